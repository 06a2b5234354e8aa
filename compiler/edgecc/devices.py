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
    """Dequantized to the type the device computes in; exact where that is float32."""
    INT8_SPLIT = "int8-split"
    """Exact 8-bit weight codes; activations as the sum of two 8-bit parts (relative error 2e-5)."""
    INT8_BLOCK = "int8-block"
    """Exact 8-bit weight codes with block scales, widened to the 16-bit type of the activations."""


@dataclass(frozen=True, slots=True)
class Device:
    """One compile target.

    Attributes:
        name: Spelling of `--device`.
        description: For people.
        backend: Module below `edgecc.backends` that lowers and runs.
        dialect: ONNX operators the lowering may use; None for backends without ONNX.
        ops: IR ops the backend lowers.
        float_types: Floating-point types of values it computes with.
        linear_form: Default form of linear layers whose encoding is not native.
        fused_attention: Whether cache update, rotary embedding and attention run as one op.
        head_multiple: The fused op takes heads whose width is a multiple of this; others
            stay unfused.
        min_rows: Fewest rows per call that give the same bits as any larger number; a call with
            fewer is padded, so that plain and speculative decoding agree exactly.
        source: Where the knowledge comes from.
        compute_type: Type of the activations. With 16 bits, `assign-precision` gives it to them,
            and dense weights have it as well.
        native_linear: Kinds of packed encodings that linear layers read as they are stored.
        native_activations: Encodings that activations of packed linear layers can be quantized to,
            because there are products of such numbers: see `quantize-activations`.
        library: Python package of the builder, for backends that build engines.
        compute_capabilities: GPUs an engine runs on, as 10 * major + minor.
        chooses_tokens: Whether the target also says which tokens its logits choose: worth it where
            logits would have to be copied to the host.
        pads_rounds: Whether every call of the target is padded to the rows of a round, instead of
            `min_rows`: the number of proposals is known when a pair is compiled.
    """

    name: str
    description: str
    backend: str
    dialect: Dialect | None
    ops: frozenset[str]
    float_types: frozenset[str]
    linear_form: LinearForm
    fused_attention: bool
    head_multiple: int
    min_rows: int
    source: str
    compute_type: str = "f32"
    native_linear: frozenset[str] = frozenset({"int8_block"})
    native_activations: frozenset[str] = frozenset()
    library: str = ""
    compute_capabilities: tuple[int, ...] = ()
    chooses_tokens: bool = False
    pads_rounds: bool = False

    @property
    def replays_states(self) -> bool:
        """Whether layers with a state can go back, by a log of their inputs."""
        return "logged_delta_net" in self.ops

    @property
    def is_narrow(self) -> bool:
        """Whether activations, attention and caches have 16 bits."""
        return self.compute_type != "f32"


_COMMON_OPS = frozenset(
    (
        *("linear", "embedding", "lookup", "rms_norm", "add", "sub", "mul"),
        *("silu", "sigmoid", "tanh", "swiglu"),
        "cast",
        *("concat", "split", "slice", "tail", "take_rows", "pad", "unsqueeze", "squeeze"),
        *("position_ids", "advance", "rope", "split_heads", "argmax", "call", "constant"),
        *("add_rms_norm", "layer_norm", "gelu"),
        *("multi_axis_rope", "multi_head_attention", "merge_rows", "replace_rows"),
        "embedding_bag",
    )
)

_RECURRENT_OPS = frozenset(("causal_conv1d", "gated_delta_net", "logged_delta_net"))
"""Layers with a state."""

_RTX = "tensorrt_rtx"
_FULL = "tensorrt"


def _gpu(
    name: str,
    description: str,
    native: tuple[str, ...],
    source: str,
    *,
    activations: tuple[str, ...] = (),
    library: str = _RTX,
    capabilities: tuple[int, ...] = (),
) -> Device:
    """A GPU that TensorRT builds for.

    Args:
        name: `sm` and the compute capability, or a name for several.
        description: For people.
        native: Packed encodings its linear layers read, block-scaled INT8 among them everywhere.
        source: Where the knowledge comes from.
        activations: Encodings of activations that it multiplies by such weights.
        library: The builder's package.
        capabilities: If there are several; the one in the name else.
    """
    return Device(
        name=name,
        description=description,
        backend="tensorrt",
        dialect=None,
        ops=_COMMON_OPS
        | _RECURRENT_OPS
        | {"cache_update", "attention"}
        | ({"fake_quantize"} if activations else frozenset()),
        float_types=frozenset({"f32", "bf16", "f16"}),
        linear_form=LinearForm.INT8_BLOCK,
        fused_attention=False,
        head_multiple=1,
        min_rows=1,
        source=source,
        compute_type="bf16",
        native_linear=frozenset({"int8_block", *native}),
        native_activations=frozenset(activations),
        library=library,
        compute_capabilities=capabilities or (int(name.removeprefix("sm")),),
        chooses_tokens=True,
        pads_rounds=True,
    )


_FP8 = ("fp8<tensor>",)
_FP4 = ("nvfp4<block=16>", *_FP8)
_BUILT = "built with TensorRT-RTX 1.7.1, not executed; see docs/adr/0011-tensorrt-lowering.md"
_DOCUMENTED = "NVIDIA's documentation of TensorRT 10.15 and 11, neither built nor executed"

DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        Device(
            name="cpu",
            description="ONNX Runtime on CPU, fused attention with caches updated in place",
            backend="onnxruntime",
            dialect=Dialect.ORT_CONTRIB,
            ops=_COMMON_OPS | _RECURRENT_OPS | {"cached_attention", "cache_update", "attention"},
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
            ops=_COMMON_OPS | _RECURRENT_OPS | {"cache_update", "attention"},
            float_types=frozenset({"f32"}),
            linear_form=LinearForm.DENSE,
            fused_attention=False,
            head_multiple=1,
            min_rows=2,
            source="ONNX operator specification, opset 24",
        ),
        _gpu("sm86", "GeForce RTX 30, RTX A series", ("int8", "int4"), _BUILT),
        _gpu("sm89", "GeForce RTX 40, RTX Ada", ("int8", "int4", "fp8"), _BUILT, activations=_FP8),
        _gpu(
            "sm120",
            "GeForce RTX 50, RTX PRO Blackwell",
            ("int8", "int4", "fp8", "nvfp4"),
            _BUILT,
            activations=_FP4,
        ),
        _gpu(
            "sm121", "DGX Spark (GB10)", ("int8", "int4", "fp8", "nvfp4"), _BUILT, activations=_FP4
        ),
        _gpu(
            "rtx",
            "GeForce RTX 30, 40 and 50: one engine, with what all of them have",
            ("int8", "int4"),
            _BUILT,
            capabilities=(86, 89, 120),
        ),
        _gpu("sm87", "Jetson Orin", ("int8",), _DOCUMENTED, library=_FULL),
        _gpu("sm90", "H100, H200", ("int8", "fp8"), _DOCUMENTED, activations=_FP8, library=_FULL),
        *(
            _gpu(
                name,
                description,
                ("int8", "fp8", "nvfp4"),
                _DOCUMENTED,
                activations=_FP4,
                library=_FULL,
            )
            for name, description in (("sm100", "B200"), ("sm110", "Jetson Thor"))
        ),
    )
}
"""Every device by name."""

ONNX_DEVICES: Mapping[str, Device] = {n: d for n, d in DEVICES.items() if d.dialect is not None}
"""The devices whose backend writes ONNX."""


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
    spelled = re.sub(r"^(sm|compute)[-_]?(?=\d)", "sm", name.lower())
    words = {w for w in re.split(r"[^a-z]+", name.lower()) if len(w) > 3}
    meant = [d for d in DEVICES.values() if words & set(d.description.lower().split())]
    if meant and spelled not in DEVICES:
        raise UnsupportedError(
            "device/unknown",
            f"unknown device {name!r}",
            help=", ".join(f"{d.description}: --device {d.name}" for d in meant),
        )
    if spelled not in DEVICES and _GPU.match(name):
        raise UnsupportedError(
            "device/unknown",
            f"unknown device {name!r}: no backend builds engines for this GPU",
            notes=[f"{d.name}: {d.description}" for d in DEVICES.values()],
            help="`--device cpu` runs without the GPU; `--device onnx` writes standard ONNX, which "
            "other runtimes read",
        )
    raise UnsupportedError(
        "device/unknown", f"unknown device {name!r}", help=did_you_mean(spelled, DEVICES)
    )
