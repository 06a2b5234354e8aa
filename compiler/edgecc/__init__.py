"""edgecc: a graph-IR compiler for speculative-decoding pairs.

`compile(target, draft=..., out=...)` builds a bundle, `load(bundle)` opens one for generation.
Everything here is loaded on first use: importing `edgecc` costs milliseconds, and the runtime never
imports the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgecc.backends.runtime import Generation, Generator, Grammar, SamplingParams, load
    from edgecc.driver import CompileOptions, compile, lift
    from edgecc.errors import EdgeccError
    from edgecc.ir_source import read_ir
    from edgecc.prompt_lookup import PromptLookup

__version__ = "0.1.0"

_LAZY = {
    "CompileOptions": "edgecc.driver",
    "EdgeccError": "edgecc.errors",
    "Generation": "edgecc.backends.runtime",
    "Generator": "edgecc.backends.runtime",
    "Grammar": "edgecc.backends.runtime",
    "PromptLookup": "edgecc.prompt_lookup",
    "SamplingParams": "edgecc.backends.runtime",
    "compile": "edgecc.driver",
    "lift": "edgecc.driver",
    "load": "edgecc.backends.runtime",
    "read_ir": "edgecc.ir_source",
}

__all__ = [
    "CompileOptions",
    "EdgeccError",
    "Generation",
    "Generator",
    "Grammar",
    "PromptLookup",
    "SamplingParams",
    "__version__",
    "compile",
    "lift",
    "load",
    "read_ir",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in ("ir", "passes", "frontends", "backends", "errors", "devices"):
        return importlib.import_module(f"edgecc.{name}")
    raise AttributeError(f"module 'edgecc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
