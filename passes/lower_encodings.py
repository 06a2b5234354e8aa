"""`lower-encodings`: give every weight an encoding the device computes with."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.devices import DEVICES, Device, LinearForm
from edgecc.errors import UsageError, did_you_mean
from edgecc.ir.core import Graph, Module, Node
from edgecc.ir.encodings import FP8, NVFP4, Dense, Encoding, Int4, Int8Block
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import DType
from edgecc.passes.base import Pass, PassContext

_F32 = Dense(DType.F32)

NARROW_TOLERANCE = 0.05
"""Relative error of results of a few layers whose weights are rounded to 16 bits once."""


@dataclass(frozen=True, slots=True)
class LowerEncodingsOptions:
    """How to lower.

    `form`: `dense`, `int8-split` or `int8-block` for quantized linear layers; `auto` asks the
    device and leaves alone what it reads as stored.
    `device`: whose form that is; the one being compiled for when empty.
    """

    form: str = "auto"
    device: str = ""


class LowerEncodings(Pass[LowerEncodingsOptions]):
    """Replace weights by derived ones in encodings the device has kernels for.

    What it does
        Each weight that the device cannot compute with becomes a derived weight. On a device that
        computes in float32 that is `dequantize` to dense f32; on one that computes in 16 bits,
        `narrow` to dense bf16 (f32 for norms and biases). NVFP4 linear layers become `int8_codes`
        in the forms `int8-split` and `int8-block`. Encodings in the device's `native_linear` stay.
        Dense embedding tables stay as stored: rows are widened after the look-up; packed ones are
        dequantized.

    Why
        The derived weight is a recipe, not data. On the CPU, recipes of this kind are applied when
        a session is loaded, so packed weights stay packed in the bundle, and a weight used twice is
        expanded once.

    Example:
        ```
        %y = linear(%x, @q_proj.weight) : f32[b, t, 512]
        ```
        with an NVFP4 weight becomes
        ```
        weight @q_proj.weight.f32 : dense<f32> [512, 256] = derived dequantize(@q_proj.weight)
        %y = linear(%x, @q_proj.weight.f32) : f32[b, t, 512]
        ```

    Options
        `form`: how NVFP4 linear layers run. `device`: whose default form `auto` takes.

    Requires and ensures
        Requires `heads-bound`.

    Exactness
        `dequantize` and `int8_codes` are exact. `int8-split` kernels round activations to 16 bits
        in blocks, a relative error of about 2e-5 per layer. `narrow` rounds each value once, by at
        most 2^-9 of it: for a device that computes in 16 bits, weights that are neither native nor
        NVFP4 (FP8 with block scales, INT4 with zero points; FP8 and INT4 on devices without them).
        MXFP4 and MXFP8 lose nothing by it: their values have 16 bits.

    Limits
        `int8-split` is for NVFP4: weights in other packed formats (FP8, INT8, INT4) run dense.
        Weights only: what layers read is rounded by `quantize-activations`, which runs before.
    """

    name = "lower-encodings"
    options_type = LowerEncodingsOptions
    requires = ("heads-bound",)
    tolerance = 1e-4

    def __init__(self, options: LowerEncodingsOptions | None = None) -> None:
        super().__init__(options)
        device = DEVICES.get(self.options.device)
        if device is not None and device.is_narrow:
            self.tolerance = NARROW_TOLERANCE  # type: ignore[misc]

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Rewrite the weights of every node that computes with them."""
        device = ctx.device_for(self.options.device)
        form = self._form(device)
        changed = False
        for graph in module.graphs.values():
            for node in graph.nodes:
                if node.weights:
                    changed |= self._lower(module, graph, node, form, device)
        return changed

    def _form(self, device: Device | None) -> LinearForm:
        if self.options.form == "auto":
            return device.linear_form if device else LinearForm.DENSE
        try:
            return LinearForm(self.options.form)
        except ValueError:
            raise UsageError(
                "pass/bad-option",
                f"lower-encodings: unknown form {self.options.form!r}",
                help=did_you_mean(self.options.form, [f.value for f in LinearForm]),
            ) from None

    def _lower(
        self, module: Module, graph: Graph, node: Node, form: LinearForm, device: Device | None
    ) -> bool:
        table = module.weights
        auto = self.options.form == "auto"
        lowered = []
        for index, name in enumerate(node.weights):
            symbol = table.resolve(name)
            encoding = table[symbol].encoding
            matrix = _is_linear(node) and index == 0
            packed = device.native_linear if device and auto else frozenset({Int8Block.kind})
            if _native(node, encoding, matrix, device, packed):
                lowered.append(name)
            elif form is not LinearForm.DENSE and matrix and isinstance(encoding, NVFP4):
                lowered.append(table.derive_shared(f"{symbol}.int8", "int8_codes", (symbol,)))
            elif device and device.is_narrow and (matrix or node.op.name == "embedding"):
                dtype = device.compute_type
                lowered.append(
                    table.derive_shared(f"{symbol}.{dtype}", "narrow", (symbol,), dtype=dtype)
                )
            else:
                lowered.append(table.derive_shared(f"{symbol}.f32", "dequantize", (symbol,)))
        if lowered == list(node.weights):
            return False
        Rewriter(module, graph, self.name).replace_weights(node, lowered)
        return True


def _is_linear(node: Node) -> bool:
    return node.op.name == "linear"


def _native(
    node: Node, encoding: Encoding, matrix: bool, device: Device | None, packed: frozenset[str]
) -> bool:
    """Whether the op is computed with this encoding as it is."""
    if node.op.name in ("embedding", "embedding_bag", "lookup"):
        return isinstance(encoding, Dense)
    if node.op.name == "constant" and isinstance(encoding, Dense):
        return encoding == _F32 or not encoding.dtype.is_float
    return multiplies(encoding, device, packed) if matrix else encoding == _F32


def multiplies(encoding: Encoding, device: Device | None, packed: frozenset[str]) -> bool:
    """Whether linear layers read a matrix in this encoding.

    Args:
        encoding: Of the matrix.
        device: What computes; None for any that computes in float32.
        packed: Kinds of the packed encodings it reads.
    """
    if isinstance(encoding, Dense):
        return encoding == _F32 or bool(device and encoding.dtype.value == device.compute_type)
    by_block = isinstance(encoding, FP8) and encoding.scaling == "block"
    shifted = isinstance(encoding, Int4) and not encoding.is_symmetric
    return encoding.kind in packed and not by_block and not shifted
