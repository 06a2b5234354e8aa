"""Passes over the IR, one file each, and the manager that runs them.

`PASSES` maps a name to where its class lives; classes are imported when used, so that listing
passes imports none of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgecc.errors import UsageError, did_you_mean
from edgecc.passes.base import NoOptions, Pass, PassContext, Remark

if TYPE_CHECKING:
    from edgecc.passes.manager import PassManager
    from edgecc.passes.pipeline import parse_pipeline, print_pipeline

PASSES: Mapping[str, str] = {
    "add-state-replay": "edgecc.passes.add_state_replay:AddStateReplay",
    "assign-precision": "edgecc.passes.assign_precision:AssignPrecision",
    "bind-shared-weights": "edgecc.passes.bind_shared_weights:BindSharedWeights",
    "canonicalize": "edgecc.passes.canonicalize:Canonicalize",
    "choose-tokens": "edgecc.passes.choose_tokens:ChooseTokens",
    "cse": "edgecc.passes.cse:Cse",
    "dce": "edgecc.passes.dce:Dce",
    "dedupe-weights": "edgecc.passes.dedupe_weights:DedupeWeights",
    "drop-outputs": "edgecc.passes.drop_outputs:DropOutputs",
    "fold-constants": "edgecc.passes.fold_constants:FoldConstants",
    "fuse-cached-attention": "edgecc.passes.fuse_cached_attention:FuseCachedAttention",
    "fuse-gate-up": "edgecc.passes.fuse_gate_up:FuseGateUp",
    "fuse-qkv": "edgecc.passes.fuse_qkv:FuseQkv",
    "fuse-residual-norm": "edgecc.passes.fuse_residual_norm:FuseResidualNorm",
    "fuse-rope": "edgecc.passes.fuse_rope:FuseRope",
    "legalize": "edgecc.passes.legalize:Legalize",
    "lower-encodings": "edgecc.passes.lower_encodings:LowerEncodings",
    "outline-shared": "edgecc.passes.outline_shared:OutlineShared",
    "quantize": "edgecc.passes.quantize:Quantize",
    "quantize-activations": "edgecc.passes.quantize_activations:QuantizeActivations",
    "split-layers": "edgecc.passes.split_layers:SplitLayers",
    "stack-context-kv": "edgecc.passes.stack_context_kv:StackContextKv",
    "unroll-markov": "edgecc.passes.unroll_markov:UnrollMarkov",
}
"""Pass names to `module:Class`."""


ENTRY_POINTS = "edgecc.passes"
"""Entry-point group through which other packages add passes: name to `module:Class`."""


@functools.cache
def registered() -> Mapping[str, str]:
    """All passes by name, those of other packages included; imports none of them.

    Raises:
        UsageError: Two packages claim one name; both are named.
    """
    found = dict(PASSES)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if found.setdefault(point.name, point.value) != point.value:
            raise UsageError(
                "pass/name-clash",
                f"pass {point.name!r} is defined by {found[point.name]} and by {point.value}",
                help="uninstall one of the packages, or rename its entry point",
            )
    return found


def get_pass(name: str) -> type[Pass[Any]]:
    """The class of a pass.

    Raises:
        UsageError: No such pass; the known ones are listed. Or another package brings it, and it
            does not import or is no pass.
    """
    known = registered()
    if name not in known:
        raise UsageError("pass/unknown", f"unknown pass {name!r}", help=did_you_mean(name, known))
    module, _, attribute = known[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the code of another package
        if name in PASSES:
            raise
        raise _broken(name, f"{type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise _broken(name, f"{found!r} is not a class of passes")
    return found


def _broken(name: str, reason: str) -> UsageError:
    return UsageError(
        "pass/broken",
        f"pass {name!r} cannot be loaded: {reason}",
        where=f"entry point {registered()[name]}",
        help="repair or uninstall the package that brings it",
    )


_LAZY = {
    "PassManager": "edgecc.passes.manager",
    "parse_pipeline": "edgecc.passes.pipeline",
    "print_pipeline": "edgecc.passes.pipeline",
}
"""Names whose modules import this one."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'edgecc.passes' has no attribute {name!r}")


__all__ = [
    "ENTRY_POINTS",
    "PASSES",
    "NoOptions",
    "Pass",
    "PassContext",
    "PassManager",
    "Remark",
    "get_pass",
    "parse_pipeline",
    "print_pipeline",
    "registered",
]
