"""The intermediate representation: small, typed, printable.

`types` and `encodings` are immutable values; `core` holds the mutable graph; `weights` the lazy
weight table; `ops` the operations with their rules; `builder` and `rewriter` are the only ways to
change a graph; `verifier`, `printer`, `interpreter` and `analysis` read it.

Everything here is loaded on first use: who reads metadata only pays for no parser and no analysis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgecc.ir.builder import Builder
    from edgecc.ir.compare import diff, equal, fingerprint
    from edgecc.ir.core import Graph, Input, Location, Module, Node, Output, Value
    from edgecc.ir.encodings import FP8, MXFP4, NVFP4, Dense, Encoding, Int4, Int8, Int8Block
    from edgecc.ir.interpreter import Interpreter, evaluate
    from edgecc.ir.parser import parse_module, read_module
    from edgecc.ir.parser import parse_module as parse
    from edgecc.ir.printer import print_module
    from edgecc.ir.rewriter import Rewriter
    from edgecc.ir.types import Dim, DimExpr, DType, SymbolRange, TensorType, sym
    from edgecc.ir.verifier import verify, verify_or_raise
    from edgecc.ir.weights import (
        Alias,
        Derived,
        Inline,
        Stored,
        StoredPart,
        Unbound,
        Weight,
        WeightTable,
    )
    from edgecc.roles import Role

_NAMES = {
    "edgecc.ir.builder": ("Builder",),
    "edgecc.ir.compare": ("diff", "equal", "fingerprint"),
    "edgecc.ir.core": ("Graph", "Input", "Location", "Module", "Node", "Output", "Value"),
    "edgecc.ir.encodings": (
        "FP8",
        "MXFP4",
        "NVFP4",
        "Dense",
        "Encoding",
        "Int4",
        "Int8",
        "Int8Block",
    ),
    "edgecc.ir.interpreter": ("Interpreter", "evaluate"),
    "edgecc.ir.parser": ("parse_module", "read_module"),
    "edgecc.ir.printer": ("print_module",),
    "edgecc.ir.rewriter": ("Rewriter",),
    "edgecc.ir.types": ("DType", "Dim", "DimExpr", "SymbolRange", "TensorType", "sym"),
    "edgecc.ir.verifier": ("verify", "verify_or_raise"),
    "edgecc.ir.weights": (
        *("Alias", "Derived", "Inline", "Stored", "StoredPart", "Unbound", "Weight"),
        "WeightTable",
    ),
    "edgecc.roles": ("Role",),
}
_LAZY = {name: (module, name) for module, names in _NAMES.items() for name in names}
_LAZY["parse"] = ("edgecc.ir.parser", "parse_module")  # short for people: `ir.parse(text)`

__all__ = [
    "FP8",
    "MXFP4",
    "NVFP4",
    "Alias",
    "Builder",
    "DType",
    "Dense",
    "Derived",
    "Dim",
    "DimExpr",
    "Encoding",
    "Graph",
    "Inline",
    "Input",
    "Int4",
    "Int8",
    "Int8Block",
    "Interpreter",
    "Location",
    "Module",
    "Node",
    "Output",
    "Rewriter",
    "Role",
    "Stored",
    "StoredPart",
    "SymbolRange",
    "TensorType",
    "Unbound",
    "Value",
    "Weight",
    "WeightTable",
    "diff",
    "equal",
    "evaluate",
    "fingerprint",
    "parse",
    "parse_module",
    "print_module",
    "read_module",
    "sym",
    "verify",
    "verify_or_raise",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'edgecc.ir' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
