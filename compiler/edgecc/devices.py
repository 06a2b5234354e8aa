"""What each device runs natively: data only, no backend code.

A record decides how passes lower a module (`lower-encodings`, `legalize`) and names the backend
that takes the result. Every entry says where the knowledge comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from edgecc.errors import UnsupportedError, did_you_mean


class Dialect(StrEnum):
    """Which ONNX operators a device's engine understands."""

    STANDARD = "standard"
    """ai.onnx opset 24 only: portable, evaluated by the onnx reference evaluator."""
    ORT_CONTRIB = "ort-contrib"
    """ONNX Runtime's com.microsoft operators where they are faster."""


class LinearForm(StrEnum):
    """How a quantized linear layer is computed on a device without native kernels for it."""

    DENSE = "dense"
    """Dequantized to float32 when the session is loaded; exact."""
    INT8_SPLIT = "int8-split"
    """Exact 8-bit weight codes; activations as the sum of two 8-bit parts (relative error 2e-5)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One compile target.

    Attributes:
        name: Spelling of `--device`.
        description: For people.
        backend: Module below `edgecc.backends` that lowers and runs.
        dialect: Operators the lowering may use.
        ops: IR ops the backend lowers.
        float_types: Floating-point types of values it computes with.
        linear_form: Default form of linear layers whose encoding is not native.
        fused_attention: Whether cache update, rotary embedding and attention run as one op.
        head_multiple: The fused op takes heads whose width is a multiple of this; others
            stay unfused.
        min_rows: Fewest rows per call that give the same bits as any larger number; a call with
            fewer is padded, so that plain and speculative decoding agree exactly.
        source: Where the knowledge comes from.
    """

    name: str
    description: str
    backend: str
    dialect: Dialect
    ops: frozenset[str]
    float_types: frozenset[str]
    linear_form: LinearForm
    fused_attention: bool
    head_multiple: int
    min_rows: int
    source: str


_COMMON_OPS = frozenset(
    (
        *("linear", "embedding", "lookup", "rms_norm", "add", "mul", "silu", "sigmoid", "swiglu"),
        "cast",
        *("concat", "split", "slice", "tail", "take_rows", "pad", "unsqueeze", "squeeze"),
        *("position_ids", "advance", "rope", "split_heads", "argmax", "call", "constant"),
        "add_rms_norm",
    )
)

EVALUATED_ONLY = frozenset(("causal_conv1d", "gated_delta_net"))
"""IR ops that no device runs yet: graphs with them can be lifted, transformed and evaluated."""

DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        Device(
            name="cpu",
            description="ONNX Runtime on CPU, fused attention with caches updated in place",
            backend="onnxruntime",
            dialect=Dialect.ORT_CONTRIB,
            ops=_COMMON_OPS | {"cached_attention", "cache_update", "attention"},
            float_types=frozenset({"f32"}),
            linear_form=LinearForm.DENSE,
            fused_attention=True,
            head_multiple=16,
            min_rows=2,
            source="measured with ONNX Runtime 1.32, see docs/adr/0003-cpu-lowering.md",
        ),
        Device(
            name="onnx",
            description="portable ONNX, standard opset-24 operators only",
            backend="onnxruntime",
            dialect=Dialect.STANDARD,
            ops=_COMMON_OPS | {"cache_update", "attention"},
            float_types=frozenset({"f32"}),
            linear_form=LinearForm.DENSE,
            fused_attention=False,
            head_multiple=1,
            min_rows=2,
            source="ONNX operator specification, opset 24",
        ),
    )
}
"""Every device by name."""


_GPU = re.compile(
    r"(sm|compute)[-_]?\d|(jetson|orin|thor|xavier|gpu|cuda|nvidia|rtx|trt|tensorrt)", re.IGNORECASE
)
"""Spellings by which people ask for an NVIDIA device."""


def get_device(name: str) -> Device:
    """The record of a device.

    Raises:
        UnsupportedError: No such device; the known ones are listed.
    """
    if name in DEVICES:
        return DEVICES[name]
    if _GPU.match(name):
        raise UnsupportedError(
            "device/unknown",
            f"unknown device {name!r}: no backend builds engines for this GPU",
            notes=[f"{d.name}: {d.description}" for d in DEVICES.values()],
            help="`--device cpu` runs without the GPU; `--device onnx` writes standard ONNX, which "
            "other runtimes read",
        )
    raise UnsupportedError(
        "device/unknown", f"unknown device {name!r}", help=did_you_mean(name.lower(), DEVICES)
    )
