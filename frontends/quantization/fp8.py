"""FP8 (E4M3) weights: one scale per weight, per row, per block, or per 32 columns of a row.

The names and shapes are those of ModelOpt 0.47, compressed-tensors 0.20 and the fine-grained FP8 of
transformers; a scale is always a factor, `weight_scale_inv` included. Which of the four it is
follows from its dtype and shape: a scalar may be stored as `[1]`, rows as `[N, 1]`, blocks with
axes of size 1 between. Scales that are powers of two (E8M0) may be stored as bytes.
"""

from __future__ import annotations

from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.declaration import Scheme
from edgecc.frontends.quantization.layouts import EXPONENTS, unsupported
from edgecc.frontends.quantization.ranges import FP8_SCALES
from edgecc.frontends.quantization.stored import (
    SCALE_DTYPES,
    EncodedWeight,
    bad,
    check_scalar,
    sidecar,
)
from edgecc.ir.encodings import FP8, MX_BLOCK
from edgecc.ir.types import DType, format_shape

FORMAT = "FP8 (weight, weight_scale)"
BLOCK = (128, 128)
_INVERSE = "weight_scale_inv"
_ACTIVATIONS = ("input_scale", "activation_scale")


def read_fp8(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """An FP8 weight, checked.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        shape: Logical `[N, K]` the model needs.
        scheme: What is declared: the size of blocks, and whether a stored `input_scale` was
            calibrated; one that was not is left out.

    Raises:
        InputError: The scale is missing, of a wrong dtype or shape, or not a positive number; or
            the weight does not have the shape the model needs.
        UnsupportedError: There are zero points.
    """
    key = f"{module}.weight"
    if f"{module}.weight_zero_point" in checkpoint.tensors:
        raise unsupported("FP8 with zero points", f"{checkpoint.role}: {module}")
    name = _INVERSE if f"{module}.{_INVERSE}" in checkpoint.tensors else "weight_scale"
    parts = {"weight": key, "weight_scale": sidecar(checkpoint, module, name, FORMAT)}
    stored = checkpoint.info(key).shape
    if len(shape) != 2 or stored != shape:
        raise bad(
            "quant/bad-shape",
            f"stored as f8e4m3 {format_shape(stored)}, expected {format_shape(shape)}"
            + ("" if len(shape) == 2 else ", which is not a matrix"),
            checkpoint.location(key),
        )
    block = (scheme.block if scheme is not None else None) or BLOCK
    scaling, block = _scaling(checkpoint, parts["weight_scale"], shape, block)
    dtype = checkpoint.info(parts["weight_scale"]).dtype
    if scaling == "tensor":
        check_scalar(checkpoint, parts["weight_scale"], SCALE_DTYPES, FP8_SCALES)
    known = [f"{module}.{n}" for n in _ACTIVATIONS if f"{module}.{n}" in checkpoint.tensors]
    static = f"{module}.input_scale" in known and not (scheme is not None and scheme.weight_only)
    if static:
        check_scalar(checkpoint, f"{module}.input_scale", (dtype,))
        parts["input_scale"] = f"{module}.input_scale"
    encoding = FP8(
        scaling,
        block if scaling == "block" else BLOCK,
        input_scale=static,
        scale_dtype=DType.F8E8M0 if dtype in EXPONENTS else dtype,
    )
    beside = tuple(key for key in known if key not in parts.values())
    return EncodedWeight(encoding, parts, module, shape, beside=beside)


def _scaling(
    checkpoint: Checkpoint, key: str, shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[str, tuple[int, int]]:
    """What one scale stands for, by how many there are, and the size of a block."""
    rows, columns = shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    info = checkpoint.info(key)
    if info.dtype in EXPONENTS:
        micro = (rows, columns // MX_BLOCK)
        if info.shape == micro and not columns % MX_BLOCK:
            return "block", (1, MX_BLOCK)
        if info.shape == blocks:
            return "block", block
        expected = f"{format_shape(micro)} (one per {MX_BLOCK} columns)"
    else:
        found = {
            (rows,): "channel",
            (rows, 1): "channel",
            blocks: "block",
            (blocks[0], 1, blocks[1], 1): "block",
            (): "tensor",
            (1,): "tensor",
        }.get(info.shape)
        if found is not None and info.dtype in SCALE_DTYPES:
            return found, block
        expected = f"floating-point numbers: one, {rows} (one a row)"
    raise bad(
        "quant/bad-scale",
        f"the scales are {info.dtype.value} {format_shape(info.shape)}, expected {expected}, or "
        f"{format_shape(blocks)} (one per {block[0]} x {block[1]} block)",
        checkpoint.location(key),
    )
