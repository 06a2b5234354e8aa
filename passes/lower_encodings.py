"""`lower-encodings`: give every weight an encoding the device computes with."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.devices import LinearForm
from edgecc.errors import UsageError, did_you_mean
from edgecc.ir.core import Graph, Module, Node
from edgecc.ir.encodings import NVFP4, Dense, Encoding, Int8Block
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import DType
from edgecc.passes.base import Pass, PassContext

_F32 = Dense(DType.F32)


@dataclass(frozen=True, slots=True)
class LowerEncodingsOptions:
    """How to lower.

    `form`: `dense` or `int8-split` for quantized linear layers; `auto` asks the device.
    `device`: whose form that is; the one being compiled for when empty.
    """

    form: str = "auto"
    device: str = ""


class LowerEncodings(Pass[LowerEncodingsOptions]):
    """Replace weights by derived ones in encodings the device has kernels for.

    What it does
        For devices without kernels for packed formats or bf16, each linear weight, norm weight and
        bias becomes a derived weight: `dequantize` to dense f32, or `int8_codes` for NVFP4 linear
        layers in the form `int8-split`. Dense embedding tables stay as stored: rows are widened
        after the look-up; packed ones are dequantized.

    Why
        The derived weight is a recipe, not data. Recipes of this kind are applied when a session is
        loaded, so packed weights stay packed in the bundle, and a weight used twice is expanded
        once.

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
        The weights are exact in both forms. `int8-split` kernels round activations to 16 bits in
        blocks, a relative error of about 2e-5 per layer.

    Limits
        `int8-split` is for NVFP4: weights in other packed formats (FP8, INT8, INT4) run dense.
    """

    name = "lower-encodings"
    options_type = LowerEncodingsOptions
    requires = ("heads-bound",)
    tolerance = 1e-4

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Rewrite the weights of every node that computes with them."""
        form = self._form(ctx)
        changed = False
        for graph in module.graphs.values():
            for node in graph.nodes:
                if node.weights:
                    changed |= self._lower(module, graph, node, form)
        return changed

    def _form(self, ctx: PassContext) -> LinearForm:
        if self.options.form == "auto":
            device = ctx.device_for(self.options.device)
            return device.linear_form if device else LinearForm.DENSE
        try:
            return LinearForm(self.options.form)
        except ValueError:
            raise UsageError(
                "pass/bad-option",
                f"lower-encodings: unknown form {self.options.form!r}",
                help=did_you_mean(self.options.form, [f.value for f in LinearForm]),
            ) from None

    def _lower(self, module: Module, graph: Graph, node: Node, form: LinearForm) -> bool:
        table = module.weights
        symbols = [table.resolve(s) for s in node.weights]
        lowered = []
        for name, symbol in zip(node.weights, symbols, strict=True):
            encoding = table[symbol].encoding
            if _native(node, encoding):
                lowered.append(name)
            elif form is LinearForm.INT8_SPLIT and _is_linear(node) and isinstance(encoding, NVFP4):
                lowered.append(table.derive(f"{symbol}.int8", "int8_codes", (symbol,)))
            else:
                lowered.append(table.derive(f"{symbol}.f32", "dequantize", (symbol,)))
        if lowered == list(node.weights):
            return False
        Rewriter(module, graph, self.name).replace_weights(node, lowered)
        return True


def _is_linear(node: Node) -> bool:
    return node.op.name == "linear"


def _native(node: Node, encoding: Encoding) -> bool:
    """Whether every device computes the op with this encoding."""
    if node.op.name in ("embedding", "lookup"):
        return isinstance(encoding, Dense)
    if node.op.name == "constant" and isinstance(encoding, Dense):
        return encoding == _F32 or not encoding.dtype.is_float
    return encoding == _F32 or (_is_linear(node) and isinstance(encoding, Int8Block))
