"""Passes over the IR, one file each, and the manager that runs them.

`PASSES` maps a name to where its class lives; classes are imported when used, so that listing
passes imports none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from edgecc.errors import UsageError, did_you_mean
from edgecc.passes.base import Pass, PassContext, Remark

PASSES: Mapping[str, str] = {
    "bind-shared-weights": "edgecc.passes.bind_shared_weights:BindSharedWeights",
    "dce": "edgecc.passes.dce:Dce",
    "dedupe-weights": "edgecc.passes.dedupe_weights:DedupeWeights",
    "drop-outputs": "edgecc.passes.drop_outputs:DropOutputs",
    "fuse-cached-attention": "edgecc.passes.fuse_cached_attention:FuseCachedAttention",
    "fuse-gate-up": "edgecc.passes.fuse_gate_up:FuseGateUp",
    "fuse-qkv": "edgecc.passes.fuse_qkv:FuseQkv",
    "legalize": "edgecc.passes.legalize:Legalize",
    "lower-encodings": "edgecc.passes.lower_encodings:LowerEncodings",
    "outline-shared": "edgecc.passes.outline_shared:OutlineShared",
    "unroll-markov": "edgecc.passes.unroll_markov:UnrollMarkov",
}
"""Pass names to `module:Class`."""


def get_pass(name: str) -> type[Pass[Any]]:
    """The class of a pass.

    Raises:
        UsageError: No such pass; the known ones are listed.
    """
    if name not in PASSES:
        raise UsageError("pass/unknown", f"unknown pass {name!r}", help=did_you_mean(name, PASSES))
    module, _, attribute = PASSES[name].partition(":")
    found: type[Pass[Any]] = getattr(importlib.import_module(module), attribute)
    return found


__all__ = ["PASSES", "Pass", "PassContext", "Remark", "get_pass"]
