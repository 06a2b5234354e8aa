"""FP4 weights: NVFP4 of ModelOpt and compressed-tensors, MXFP4 of those and of gpt-oss."""

from __future__ import annotations

from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.declaration import Scheme
from edgecc.frontends.quantization.layouts import EXPONENTS
from edgecc.frontends.quantization.ranges import E2M1_RANGE, E4M3_RANGE, ScaleRange
from edgecc.frontends.quantization.stored import (
    EncodedWeight,
    bad,
    check_scalar,
    check_tensor,
    check_whole_blocks,
    matrix_shape,
    sidecar,
)
from edgecc.ir.encodings import MX_BLOCK, MXFP4, NVFP4
from edgecc.ir.types import DType, format_shape

NVFP4_FORMAT = "ModelOpt NVFP4 (weight, weight_scale, weight_scale_2)"
DIVIDED_FORMAT = "compressed-tensors NVFP4 (weight_packed, weight_scale, weight_global_scale)"
MXFP4_FORMAT = "MXFP4 (packed weight, scales of E8M0)"
GPT_OSS_FORMAT = "MXFP4 of gpt-oss (_blocks, _scales)"
_BLOCKS = tuple(a * b for a, b in zip(E2M1_RANGE, E4M3_RANGE, strict=True))
"""The smallest magnitude but zero, and the largest one, of a code times its block scale."""


def read_bytes(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight whose bytes hold two FP4 codes each: its scales say which kind it is.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        shape: Logical `[N, K]` the model needs.
        scheme: What is declared. Without a static activation scale, one that is stored is left out:
            the producer did not calibrate for it.

    Raises:
        InputError: A scale is missing, of a wrong dtype or shape, or not a positive number; or the
            packed weight does not have the shape the model needs.
        UnsupportedError: A row is no whole number of blocks.
    """
    key = f"{module}.weight"
    divided = f"{module}.weight_packed" in checkpoint.tensors
    if divided:
        key = f"{module}.weight_packed"
    scale = checkpoint.tensors.get(f"{module}.weight_scale")
    if scale is not None and scale.dtype in EXPONENTS:
        parts = {"weight": key, "weight_scale": f"{module}.weight_scale"}
        return _mxfp4(checkpoint, module, shape, parts)
    return _nvfp4(checkpoint, module, shape, key, scheme, divided=divided)


def read_blocks(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight as gpt-oss stores it: `name_blocks` u8 `[N, K/32, 16]`, `name_scales` `[N, K/32]`.

    Raises:
        InputError: See `read_bytes`.
    """
    key, scales = f"{module}_blocks", f"{module}_scales"
    if scales not in checkpoint.tensors:
        raise bad(
            "quant/missing-scale",
            f"the weight is packed, but {scales} is missing",
            checkpoint.location(key),
            f"assumed format: {GPT_OSS_FORMAT}",
        )
    rows, columns = matrix_shape(checkpoint, key, shape)
    expected = (rows, columns // MX_BLOCK, MX_BLOCK // 2)
    check_tensor(checkpoint, key, "packed codes", (DType.U8,), expected, "quant/bad-shape")
    return _mxfp4(checkpoint, module, shape, {"weight": key, "weight_scale": scales})


def _nvfp4(
    checkpoint: Checkpoint,
    module: str,
    shape: tuple[int, ...],
    key: str,
    scheme: Scheme | None,
    *,
    divided: bool,
) -> EncodedWeight:
    rows, columns = matrix_shape(checkpoint, key, shape)
    format_ = DIVIDED_FORMAT if divided else NVFP4_FORMAT
    names = ("weight_scale", "weight_global_scale" if divided else "weight_scale_2")
    parts = {"weight": key, **{n: sidecar(checkpoint, module, n, format_) for n in names}}
    block = NVFP4().block
    _check_packed(checkpoint, key, (rows, columns), "NVFP4")
    check_whole_blocks(checkpoint, key, columns, block)
    _check_scales(checkpoint, parts["weight_scale"], (rows, columns // block), DType.F8E4M3)
    within = ScaleRange.of_divisor(*_BLOCKS) if divided else ScaleRange.of_factor(*_BLOCKS)
    check_scalar(checkpoint, parts[names[1]], within=within)
    component = "input_global_scale" if divided else "input_scale"
    stored = f"{module}.{component}"
    beside: tuple[str, ...] = ()
    if stored in checkpoint.tensors:
        if scheme is not None and scheme.weight_only:
            beside = (stored,)
        else:
            check_scalar(checkpoint, stored)
            parts[component] = stored
    encoding = NVFP4(input_scale=component in parts, divisor=divided)
    return EncodedWeight(encoding, parts, module, shape, beside=beside)


def _mxfp4(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], parts: dict[str, str]
) -> EncodedWeight:
    key = parts["weight"]
    rows, columns = matrix_shape(checkpoint, key, shape)
    if not key.endswith("_blocks"):
        _check_packed(checkpoint, key, (rows, columns), "MXFP4")
    check_whole_blocks(checkpoint, key, columns, MX_BLOCK)
    scales = (rows, columns // MX_BLOCK)
    _check_scales(checkpoint, parts["weight_scale"], scales, *EXPONENTS)
    return EncodedWeight(MXFP4(), parts, module, shape)


def _check_packed(checkpoint: Checkpoint, key: str, shape: tuple[int, int], kind: str) -> None:
    stored = checkpoint.info(key)
    if stored.dtype is not DType.U8 or stored.shape != (shape[0], shape[1] // 2) or shape[1] % 2:
        held = f"packed {kind} {stored.dtype.value} {format_shape(stored.shape)}"
        if len(stored.shape) == 2:
            held += f" holds {format_shape((stored.shape[0], 2 * stored.shape[1]))} values"
        raise bad(
            "quant/bad-shape",
            f"{held}, expected {format_shape(shape)} values",
            checkpoint.location(key),
            "dtype and scales say that two values share a byte, whatever the shape looks like",
        )


def _check_scales(
    checkpoint: Checkpoint, key: str, expected: tuple[int, int], *dtypes: DType
) -> None:
    scale = checkpoint.info(key)
    if scale.dtype not in dtypes or scale.shape != expected:
        columns = NVFP4().block if dtypes == (DType.F8E4M3,) else MX_BLOCK
        raise bad(
            "quant/bad-scale",
            f"the block scales are {scale.dtype.value} {format_shape(scale.shape)},"
            f" expected {' or '.join(d.value for d in dtypes)} {format_shape(expected)} (one per "
            f"{columns} columns)",
            checkpoint.location(key),
        )
