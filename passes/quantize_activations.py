"""`quantize-activations`: round what packed linear layers read, by the checkpoint's scales."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from edgecc.devices import Device
from edgecc.errors import UsageError, did_you_mean
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import FP8, NVFP4, Encoding
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.ir.recipes import activation_scale
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.weights import Derived
from edgecc.passes.base import Pass, PassContext, site
from edgecc.passes.module_patterns import check_patterns, module_names, not_selected

FORMATS = ("auto", "nvfp4", "fp8")
TOLERANCE = 0.5
"""Relative error of results of a few layers, with room: like weights in NVFP4, single values are
off by at most 1/6 of the largest in their block; larger ones than calibration saw saturate."""


@dataclass(frozen=True, slots=True)
class QuantizeActivationsOptions:
    """What to round.

    `format`: `nvfp4` or `fp8` for layers whose weights have that format only; `auto` takes all that
    the device multiplies as such, or both without a device.
    `include`, `exclude`: module names with `*` and `?`, separated by commas; with or without the
    checkpoint's role in front: `target.*`, `*.mlp.*`. A pattern that names nothing is an error.
    `device`: whose formats `auto` takes; those of the one being compiled for when empty.
    """

    format: str = "auto"
    include: str = "*"
    exclude: str = ""
    device: str = ""


class QuantizeActivations(Pass[QuantizeActivationsOptions]):
    """Round the inputs of linear layers to the packed format of their weights.

    What it does
        Inserts `fake_quantize` before linear layers whose weights are stored with a calibrated
        activation scale (`input_scale`): NVFP4 weights get activations in NVFP4 (W4A4), with block
        scales from the data and the stored scale as the global one; FP8 weights get activations in
        FP8 with the stored scale. Layers that read one value with one scale share the op.

    Why
        A product of packed numbers runs on the FP4 or FP8 units of a GPU, several times as fast as
        16-bit ones where compute is the limit, and reads packed weights without widening them. It
        is the arithmetic that the publisher of such a checkpoint calibrated and measured.

    Example:
        ```
        %y = linear(%x, @up_proj.weight) : f32[b, t, 512]
        ```
        with a weight `nvfp4<block=16, input_scale>` becomes
        ```
        weight @up_proj.input_scale : dense<f32> [] = derived input_scale(@up_proj.weight)
        %x_q = fake_quantize(%x, @up_proj.input_scale) {encoding = "nvfp4<block=16>"} :
            f32[b, t, 256]
        %y = linear(%x_q, @up_proj.weight) : f32[b, t, 512]
        ```

    Options
        `format`, `include`, `exclude`, `device`.

    Requires and ensures
        Nothing. After the fusions, which stack weights with equal scales only, so that one op
        serves q, k and v; before `lower-encodings`, which replaces what the device does not read.

    Exactness
        Rounds, by the formulas of NVIDIA ModelOpt: nearest value, ties to even. Speculation stays
        lossless towards the rounded target, because that verifies; what the rounding costs has to
        be measured. It makes more of last bits than 16-bit activations do: kernels should give a
        row the same bits however many rows they compute. The tolerance is 0.5 of the largest
        result.

    Limits
        Calibrated scales only: weights without `input_scale` keep 16-bit activations, and so do FP8
        weights with block scales. Scales that differ between layers of one value are all obeyed, by
        one op each. Devices without such arithmetic refuse the op.
    """

    name = "quantize-activations"
    options_type = QuantizeActivationsOptions
    tolerance = TOLERANCE

    def __init__(self, options: QuantizeActivationsOptions | None = None) -> None:
        super().__init__(options)
        if self.options.format not in FORMATS:
            raise UsageError(
                "pass/bad-option",
                f"quantize-activations: unknown format {self.options.format!r}",
                help=did_you_mean(self.options.format, FORMATS),
            )

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Insert the ops, graph by graph.

        Raises:
            UsageError: A pattern of `include` or `exclude` names no linear layer.
        """
        device = ctx.device_for(self.options.device)
        self._check_patterns(module)
        counts: Counter[str] = Counter()
        for graph in module.graphs.values():
            rounded: dict[Value, dict[str, Node]] = {}
            for node in list(graph.nodes):
                if node.op.name == "linear":
                    encoding, reason = self._choose(module, node, device)
                    self.remark(ctx, site(graph, node), reason or encoding, applied=not reason)
                    if not reason:
                        made = self._quantize(module, graph, node, encoding, rounded, ctx)
                        self._read(module, graph, node, made.result)
                        counts[encoding] += 1
        for encoding, count in counts.items():
            module.decisions.append(
                f"activations of {count} linear layer{'s' if count > 1 else ''} quantized to "
                f"{encoding} with the checkpoint's scales"
            )
        return bool(counts)

    def _choose(self, module: Module, node: Node, device: Device | None) -> tuple[str, str]:
        """What the input of a layer is rounded to, or why not."""
        symbol = module.weights.resolve(node.weights[0])
        weight = module.weights[symbol].encoding
        encoding = activations_of(weight)
        producer = node.operands[0].producer
        if producer is not None and producer.op.name == "fake_quantize":
            return "", "its input is quantized already"
        if not encoding:
            return "", f"{weight} has no scale for activations"
        if self.options.format not in ("auto", weight.kind):
            return "", f"the weight is {weight.kind}"
        auto = self.options.format == "auto"
        if auto and device is not None and encoding not in device.native_activations:
            return "", f"device {device.name} has no products of activations in {encoding}"
        for origin in _origins(module, symbol):
            reason = not_selected(module_names(origin), self.options.include, self.options.exclude)
            if reason:
                return "", f"@{origin} is {reason}"
        return encoding, ""

    def _quantize(
        self,
        module: Module,
        graph: Graph,
        node: Node,
        encoding: str,
        rounded: dict[Value, dict[str, Node]],
        ctx: PassContext,
    ) -> Node:
        """The op that rounds a layer's input: one that is there already, or a new one."""
        x, table = node.operands[0], module.weights
        symbol = table.resolve(node.weights[0])
        attrs = FakeQuantizeAttributes(encoding)
        known = rounded.setdefault(x, {})
        alike = {other: made for other, made in known.items() if made.attrs == attrs}
        for other, made in alike.items():
            if _same_scale(module, symbol, other):
                return made
        if alike:
            message = f"the scales of {', '.join(f'@{s}' for s in (*alike, symbol))} differ"
            self.remark(ctx, site(graph, node), message, applied=True)
        name = f"{symbol.removesuffix('.weight')}.input_scale"
        scale = table.derive_shared(name, "input_scale", (symbol,))
        known[symbol] = Rewriter(module, graph, self.name).insert(
            node, "fake_quantize", (x,), (scale,), attrs, (f"{x.name}_q",)
        )
        return known[symbol]

    def _read(self, module: Module, graph: Graph, node: Node, value: Value) -> None:
        """Let a layer read another value of the same type."""
        rewriter = Rewriter(module, graph, self.name)
        names = [r.name for r in node.results]
        made = rewriter.insert(node, "linear", (value,), node.weights, node.attrs, names)
        rewriter.replace(node, made.results)

    def _check_patterns(self, module: Module) -> None:
        known = [
            module_names(origin)
            for graph in module.graphs.values()
            for node in graph.nodes
            if node.op.name == "linear"
            for origin in _origins(module, module.weights.resolve(node.weights[0]))
        ]
        for option in ("include", "exclude"):
            text = getattr(self.options, option)
            check_patterns(self.name, option, text, "linear layer", known)


def activations_of(encoding: Encoding) -> str:
    """The encoding that a packed weight was calibrated to be multiplied with; empty if none."""
    if isinstance(encoding, NVFP4) and encoding.input_scale:
        return str(NVFP4(encoding.block))
    if isinstance(encoding, FP8) and encoding.input_scale and encoding.scaling != "block":
        return str(FP8())
    return ""


def _same_scale(module: Module, a: str, b: str) -> bool:
    """Whether two weights have one activation scale, bit for bit; a single weight is not read."""
    read = module.weights.read
    return a == b or bool(activation_scale(read(a, 0, 1)) == activation_scale(read(b, 0, 1)))


def _origins(module: Module, symbol: str) -> list[str]:
    """The weights that a stacked one is made of, or the weight itself."""
    source = module.weights[symbol].source
    if not isinstance(source, Derived) or source.recipe != "concat_rows":
        return [symbol]
    return [o for i in source.inputs for o in _origins(module, module.weights.resolve(i))]
