"""The op table. One module per family; each op is one class with all its rules."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from edgecc.errors import UnsupportedError
from edgecc.ir.ops import (
    attention,
    constant,
    control,
    elementwise,
    matmul,
    norm,
    quantization,
    sampling,
    shape,
    state,
    vision,
)
from edgecc.ir.ops.base import Attributes, EvalContext, Op, Trait, TypeRuleError, WeightView

OPS: Mapping[str, Op[Any]] = {
    op.name: op
    for family in (
        matmul,
        norm,
        elementwise,
        quantization,
        attention,
        state,
        shape,
        sampling,
        control,
        constant,
        vision,
    )
    for op in family.OPS
}
"""Every op by name."""


def get_op(name: str) -> Op[Any]:
    """The op called `name`.

    Raises:
        UnsupportedError: No such op; close matches are named.
    """
    if name not in OPS:
        near = difflib.get_close_matches(name, OPS, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "see the op table in docs/ir.md"
        raise UnsupportedError("ir/unknown-op", f"unknown op {name!r}", help=hint)
    return OPS[name]


__all__ = [
    "OPS",
    "Attributes",
    "EvalContext",
    "Op",
    "Trait",
    "TypeRuleError",
    "WeightView",
    "get_op",
]
