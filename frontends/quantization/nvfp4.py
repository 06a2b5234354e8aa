"""NVFP4 weights as NVIDIA ModelOpt 0.47 stores them."""

from __future__ import annotations

from collections.abc import Mapping

from edgecc.errors import UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.stored import bad, check_scalar, sidecar
from edgecc.ir.encodings import NVFP4
from edgecc.ir.types import DType, format_shape

FORMAT = "ModelOpt NVFP4 (weight, weight_scale, weight_scale_2)"


def nvfp4_parts(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], *, weight_only: bool
) -> tuple[NVFP4, dict[str, str]]:
    """Encoding and component tensors of a packed weight, checked.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        shape: Logical `[N, K]` the model needs.
        weight_only: Leave a stored `input_scale` out: the producer did not calibrate for it.

    Raises:
        InputError: A scale is missing, of a wrong dtype or shape, or not a positive number; or the
            packed weight does not have the shape the model needs.
        UnsupportedError: A row is no whole number of blocks.
    """
    key = f"{module}.weight"
    if len(shape) != 2:
        raise bad(
            "quant/bad-shape",
            f"stored as bytes, but this parameter is not a matrix: {format_shape(shape)}",
            checkpoint.location(key),
        )
    parts = {"weight": key}
    for component in ("weight_scale", "weight_scale_2"):
        parts[component] = sidecar(checkpoint, module, component, FORMAT)
    _check_matrix(checkpoint, parts, shape)
    check_scalar(checkpoint, parts["weight_scale_2"])
    input_scale = f"{module}.input_scale"
    if input_scale in checkpoint.tensors and not weight_only:
        check_scalar(checkpoint, input_scale)
        parts["input_scale"] = input_scale
    return NVFP4(input_scale="input_scale" in parts), parts


def _check_matrix(checkpoint: Checkpoint, parts: Mapping[str, str], shape: tuple[int, ...]) -> None:
    rows, columns = shape
    block = NVFP4().block
    weight, scale = checkpoint.info(parts["weight"]), checkpoint.info(parts["weight_scale"])
    location = checkpoint.location(parts["weight"])
    if weight.shape != (rows, columns // 2) or columns % 2:
        held = f"packed NVFP4 u8 {format_shape(weight.shape)}"
        if len(weight.shape) == 2:
            held += f" holds {format_shape((weight.shape[0], 2 * weight.shape[1]))} values"
        raise bad(
            "quant/bad-shape",
            f"{held}, expected {format_shape(shape)} values",
            location,
            "dtype and scales say that two values share a byte, whatever the shape looks like",
        )
    if columns % block:
        raise UnsupportedError(
            "quant/partial-block",
            f"{columns} columns are not a multiple of the block {block}",
            where=location,
            help="use an export that leaves this layer unquantized",
        )
    expected = (rows, columns // block)
    if scale.dtype is not DType.F8E4M3 or scale.shape != expected:
        raise bad(
            "quant/bad-scale",
            f"the block scales are {scale.dtype.value} {format_shape(scale.shape)},"
            f" expected {DType.F8E4M3.value} {format_shape(expected)} (one per {block} columns)",
            checkpoint.location(parts["weight_scale"]),
        )
