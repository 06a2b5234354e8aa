"""Expressions of quantized activations."""

from __future__ import annotations

from edgecc.ir.encodings import FP8, NVFP4, Encoding
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.testing.expressions import Expr, Wanted
from edgecc.testing.families.norm import last_axis
from edgecc.testing.rules import Grower, Rule, apply, is_float
from edgecc.testing.weight_trees import Bytes, Made


def _is_rows(wanted: Wanted) -> bool:
    return is_float(wanted) and wanted.rank > 0 and isinstance(wanted.shape[-1], int)


def _fake_quantize(grow: Grower, wanted: Wanted) -> Expr:
    """The scale is one stored with a weight: of x's width in the format of x, as passes make it."""
    width = last_axis(wanted)
    blocks = [str(NVFP4(b)) for b in (2, 4) if width % b == 0]
    encoding = grow.pick("fp8<tensor>", *blocks)
    packed: Encoding = FP8(input_scale=True)
    if encoding != "fp8<tensor>" and width:
        packed = NVFP4(int(encoding[-2]), input_scale=True)
    weight = Bytes((grow.width(), width), packed, grow.number(0, 1))
    scale = Made("input_scale", (weight,))
    return apply(
        "fake_quantize",
        grow(wanted),
        weights=(scale,),
        attrs=FakeQuantizeAttributes(encoding),
    )


RULES = (Rule("fake_quantize", _is_rows, _fake_quantize),)
