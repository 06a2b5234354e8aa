"""FP8 (E4M3) weights: one scale per weight, per row, or per 128 x 128 block.

The names and shapes are those of ModelOpt 0.47; a scale is always a factor. Which of the three it
is follows from the shape of `weight_scale`, and a scalar may be stored as `[1]`, rows as `[N, 1]`,
blocks with axes of size 1 between.
"""

from __future__ import annotations

from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.stored import bad, check_scalar, sidecar
from edgecc.ir.encodings import FP8
from edgecc.ir.types import DType, format_shape

FORMAT = "FP8 (weight, weight_scale)"
BLOCK = 128

_SCALE_DTYPES = (DType.F32, DType.BF16, DType.F16)


def fp8_parts(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], *, weight_only: bool
) -> tuple[FP8, dict[str, str]]:
    """Encoding and component tensors of an FP8 weight, checked.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        shape: Logical `[N, K]` the model needs.
        weight_only: Leave a stored `input_scale` out: the producer did not calibrate for it.

    Raises:
        InputError: The scale is missing, of a wrong dtype or shape, or not a positive number; or
            the weight does not have the shape the model needs.
    """
    key = f"{module}.weight"
    parts = {"weight": key, "weight_scale": sidecar(checkpoint, module, "weight_scale", FORMAT)}
    stored = checkpoint.info(key).shape
    if len(shape) != 2 or stored != shape:
        raise bad(
            "quant/bad-shape",
            f"stored as f8e4m3 {format_shape(stored)}, expected {format_shape(shape)}"
            + ("" if len(shape) == 2 else ", which is not a matrix"),
            checkpoint.location(key),
        )
    scaling = _scaling(checkpoint, parts["weight_scale"], shape)
    if scaling == "tensor":
        check_scalar(checkpoint, parts["weight_scale"], _SCALE_DTYPES)
    dtype = checkpoint.info(parts["weight_scale"]).dtype
    input_scale = f"{module}.input_scale"
    if input_scale in checkpoint.tensors and not weight_only:
        check_scalar(checkpoint, input_scale, (dtype,))
        parts["input_scale"] = input_scale
    encoding = FP8(scaling, input_scale="input_scale" in parts, scale_dtype=dtype)
    return encoding, parts


def _scaling(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> str:
    """What one scale stands for, by how many there are."""
    rows, columns = shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    info = checkpoint.info(key)
    found = {
        (rows,): "channel",
        (rows, 1): "channel",
        blocks: "block",
        (blocks[0], 1, blocks[1], 1): "block",
        (): "tensor",
        (1,): "tensor",
    }.get(info.shape)
    if found is None or info.dtype not in _SCALE_DTYPES:
        raise bad(
            "quant/bad-scale",
            f"the scales are {info.dtype.value} {format_shape(info.shape)}, expected floating-point"
            f" numbers: one, {rows} (one a row), or {format_shape(blocks)} (one per {BLOCK} x"
            f" {BLOCK} block)",
            checkpoint.location(key),
        )
    return found
