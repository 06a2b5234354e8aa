"""The intermediate representation: small, typed, printable.

`types` and `encodings` are immutable values; `core` holds the mutable graph; `weights` the lazy
weight table; `ops` the operations with their rules; `builder` and `rewriter` are the only ways to
change a graph; `verifier`, `printer`, `interpreter` and `analysis` read it.
"""

from edgecc.ir.builder import Builder
from edgecc.ir.compare import diff, equal, fingerprint
from edgecc.ir.core import Graph, Input, Location, Module, Node, Output, Value
from edgecc.ir.encodings import FP8, MXFP4, NVFP4, Dense, Encoding, Int4, Int8, Int8Block
from edgecc.ir.interpreter import Interpreter, evaluate
from edgecc.ir.parser import parse_module, read_module
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

parse = parse_module
"""Short for people: `ir.parse(text)`."""

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
