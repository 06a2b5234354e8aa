"""Widening packed weights with standard operators inside the model: one function for each form.

The forms are those of `storage.Expansion`. Products are in float32 and in the association of
`edgecc.ir.encodings`, so the values are bit for bit those of the encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import ml_dtypes
import numpy as np
from onnx import TensorProto

from edgecc.backends.onnx.functions import dequantize_divided_nvfp4, dequantize_nvfp4
from edgecc.backends.onnx.storage import Placement
from edgecc.backends.stored_weights import StoredTensor
from edgecc.errors import LegalizeError
from edgecc.nvfp4 import E2M1_VALUES

if TYPE_CHECKING:
    from edgecc.backends.onnx.emitter import Emitter

FUNCTIONS = "edgecc"
"""Domain of the functions that models bring along."""

_BYTES = np.arange(256)

Widen: TypeAlias = Callable[["Emitter", Placement, dict[str, str]], str]
"""Given the names of the component tensors, emits nodes and names the float32 result."""


def widen(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    """Emit the nodes that expand a weight; the name of the float32 matrix.

    Args:
        e: Emitter of the model.
        placement: Of the weight, with an expansion.
        parts: Names of its component tensors in the model, by component.

    Raises:
        LegalizeError: The form has no expression in standard operators.
    """
    expansion = placement.expansion
    assert expansion is not None
    form = _FORMS.get(expansion.form)
    if form is None:
        raise LegalizeError(
            "onnx/no-lowering",
            f"the standard dialect has no form {expansion.form}",
            where=f"weight @{placement.name}",
            help="use lower-encodings{form=dense}",
        )
    return form(e, placement, parts)


def _cast(e: Emitter, name: str) -> str:
    return e.op("Cast", [name], to=TensorProto.FLOAT)[0]


def _widen(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    return _cast(e, parts["weight"])


def _nvfp4(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    function, component = (dequantize_nvfp4, "weight_scale_2")
    if "weight_global_scale" in parts:
        function, component = (dequantize_divided_nvfp4, "weight_global_scale")
    made = function()
    e.functions[made.name] = made
    names = [parts[c] for c in ("weight", "weight_scale", component)]
    return e.op(made.name, names, domain=FUNCTIONS)[0]


def _mxfp4(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    """A byte is two codes: look both up, then scale blocks."""
    rows, columns = placement.shape
    values = np.stack([E2M1_VALUES[_BYTES & 15], E2M1_VALUES[_BYTES >> 4]], axis=1)
    (index,) = e.op("Cast", [parts["weight"]], to=TensorProto.INT32)
    (pairs,) = e.op("Gather", [e.constant(values), index], axis=0)
    blocks = _shape(placement, "weight_scale")[1]
    (blocked,) = e.op("Reshape", [pairs, e.ints(rows, blocks, columns // max(1, blocks))])
    return _by_block(e, placement, blocked, _factors(e, placement, parts))


def _factors(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    """Scales in float32. E8M0 comes as bytes, because no kernel reads the type."""
    if _tensor(placement, "weight_scale").dtype != "F8_E8M0":
        return _cast(e, parts["weight_scale"])
    powers = _BYTES.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    (index,) = e.op("Cast", [parts["weight_scale"]], to=TensorProto.INT32)
    return e.op("Gather", [e.constant(powers), index], axis=0)[0]


def _by_block(e: Emitter, placement: Placement, blocked: str, factors: str) -> str:
    """Values `[N, blocks, columns of a block]` times one factor each."""
    (spread,) = e.op("Unsqueeze", [factors, e.ints(2)])
    (scaled,) = e.op("Mul", [blocked, spread])
    return e.op("Reshape", [scaled, e.ints(*placement.shape)])[0]


def _scaled(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    """Elements times one scale, or one for each row."""
    factors = _cast(e, parts["weight_scale"])
    if _shape(placement, "weight_scale"):
        (factors,) = e.op("Unsqueeze", [factors, e.ints(1)])
    return e.op("Mul", [_cast(e, parts["weight"]), factors])[0]


def _blocks(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    """Each scale repeated over its block, the last ones cut."""
    assert placement.expansion is not None
    high, wide = placement.expansion.block or (1, 1)
    down, across = _shape(placement, "weight_scale")
    rows, columns = placement.shape
    (factors,) = e.op("Unsqueeze", [_factors(e, placement, parts), e.ints(1, 3)])
    (factors,) = e.op("Expand", [factors, e.ints(down, high, across, wide)])
    (factors,) = e.op("Reshape", [factors, e.ints(down * high, across * wide)])
    (factors,) = e.op("Slice", [factors, e.ints(0, 0), e.ints(rows, columns)])
    return e.op("Mul", [_cast(e, parts["weight"]), factors])[0]


def _int4(e: Emitter, placement: Placement, parts: dict[str, str]) -> str:
    """A byte is a value of two rows: look both up, bring them below each other, scale groups."""
    rows, columns = placement.shape
    groups = _shape(placement, "weight_scale")[1]
    signed = np.array([*range(8), *range(-8, 0)], dtype=np.float32)
    both = []
    for nibble in (
        e.op("BitwiseAnd", [parts["weight"], e.constant(np.array(15, np.uint8))])[0],
        e.op("BitShift", [parts["weight"], e.constant(np.array(4, np.uint8))], direction="RIGHT")[
            0
        ],
    ):
        (index,) = e.op("Cast", [nibble], to=TensorProto.INT32)
        (values,) = e.op("Gather", [e.constant(signed), index], axis=0)
        both.append(e.op("Unsqueeze", [values, e.ints(1)])[0])
    (pairs,) = e.op("Concat", both, axis=1)
    factors, zeros = _cast(e, parts["weight_scale"]), ""
    if "weight_zero_point" in parts:
        zeros = _cast(e, parts["weight_zero_point"])
    if "group_index" in parts:  # columns of a group are anywhere: one factor for each of them
        groups = columns
        factors, zeros = (
            name and e.op("Gather", [name, parts["group_index"]], axis=1)[0]
            for name in (factors, zeros)
        )
    (values,) = e.op("Reshape", [pairs, e.ints(rows, groups, columns // max(1, groups))])
    if zeros:
        (values,) = e.op("Sub", [values, e.op("Unsqueeze", [zeros, e.ints(2)])[0]])
    return _by_block(e, placement, values, factors)


def _tensor(placement: Placement, component: str) -> StoredTensor:
    return next(t for t in placement.tensors if t.component == component)


def _shape(placement: Placement, component: str) -> tuple[int, ...]:
    return _tensor(placement, component).shape


_FORMS: Mapping[str, Widen] = {
    "fp8-block-f32": _blocks,
    "fp8-f32": _scaled,
    "int4-f32": _int4,
    "int8-f32": _scaled,
    "mxfp4-f32": _mxfp4,
    "nvfp4-f32": _nvfp4,
    "widen-f32": _widen,
}
