"""`legalize`: check that the device can run every node, before a backend tries."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.devices import Device
from edgecc.errors import Diagnostic, LegalizeError, UsageError
from edgecc.ir.core import Graph, Module, Node
from edgecc.ir.encodings import Dense, Encoding
from edgecc.ir.ops.quantization import FakeQuantize, FakeQuantizeAttributes
from edgecc.ir.types import DType
from edgecc.passes.base import Pass, PassContext, site
from edgecc.passes.lower_encodings import multiplies


@dataclass(frozen=True, slots=True)
class LegalizeOptions:
    """`device`: which device; the one being compiled for when empty."""

    device: str = ""


_DECOMPOSED_BY = {
    "markov_chain": "unroll-markov",
    "attention": "fuse-cached-attention",
    "cache_update": "fuse-cached-attention",
}


_CONSTANTS = (DType.F32, DType.I64, DType.I32, DType.I8, DType.U8, DType.BOOL)
"""Element types that values of lowered graphs can have."""


class Legalize(Pass[LegalizeOptions]):
    """Report every node and weight the device has no way to run.

    What it does
        Compares ops, element types and weight encodings with the device record. It changes nothing:
        what can be rewritten has been by the passes before.

    Why
        An error that names the op, the node and the checkpoint tensor beats the one an engine would
        give later.

    Example:
        `markov_chain` on `cpu` is reported with the pass that removes it, `unroll-markov`.

    Options
        `device`: which device.

    Requires and ensures
        Requires `heads-bound`.

    Exactness
        Exact.

    Limits
        Needs a device: as an option, or the one being compiled for.
    """

    name = "legalize"
    options_type = LegalizeOptions
    requires = ("heads-bound",)

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Collect all findings, then raise once.

        Raises:
            LegalizeError: Something cannot run on the device.
        """
        device = ctx.device_for(self.options.device)
        if device is None:
            raise UsageError(
                "pass/no-device", "legalize needs a device", help="write legalize{device=cpu}"
            )
        findings = [
            finding
            for graph in module.graphs.values()
            for node in graph.nodes
            for finding in _check(module, graph, node, device)
        ]
        if findings:
            raise LegalizeError(*_one_of_each_kind(findings))
        return False


def _types(node: Node, device: Device, where: str) -> list[Diagnostic]:
    """Results in floating-point types the device has no kernels for."""
    found = {r.type.dtype.value for r in node.results if r.type.dtype.is_float}
    return [
        Diagnostic(
            "legalize/dtype",
            f"device {device.name} computes in {', '.join(sorted(device.float_types))}, "
            f"{node.op.name} gives {dtype}",
            where,
            help="leave out assign-precision for this device",
        )
        for dtype in sorted(found - device.float_types)
    ]


def _activations(node: Node, device: Device, where: str) -> list[Diagnostic]:
    """Activations quantized to what the device does not multiply."""
    attrs = node.attrs
    if not isinstance(attrs, FakeQuantizeAttributes):
        return []
    if attrs.encoding in device.native_activations:
        return []
    return [
        Diagnostic(
            "legalize/activations",
            f"device {device.name} has no products of activations in {attrs.encoding}",
            where,
            notes=(f"it has {', '.join(sorted(device.native_activations))}",),
            help=_way_out(node.op.name),
        )
    ]


def _one_of_each_kind(findings: list[Diagnostic]) -> list[Diagnostic]:
    """The first finding of each message: a missing pass gives one for every layer."""
    kinds: dict[str, list[Diagnostic]] = {}
    for finding in findings:
        kinds.setdefault(finding.message, []).append(finding)
    return [
        first if not more else first.with_note(f"and {len(more)} more like it")
        for first, *more in kinds.values()
    ]


def _way_out(op: str) -> str:
    if op == FakeQuantize.name:
        return "leave out quantize-activations, or --activations quantized, for this device"
    return f"run {_DECOMPOSED_BY[op]} first" if op in _DECOMPOSED_BY else "choose another device"


def _check(module: Module, graph: Graph, node: Node, device: Device) -> list[Diagnostic]:
    where = site(graph, node)
    if node.op.name not in device.ops:
        return [
            Diagnostic(
                "legalize/op",
                f"device {device.name} cannot run {node.op.name}",
                where,
                help=_way_out(node.op.name),
            )
        ]
    findings = [*_types(node, device, where), *_activations(node, device, where)]
    for index, symbol in enumerate(node.weights):
        encoding = module.weights[module.weights.resolve(symbol)].encoding
        if not _computes(node.op.name, encoding, device, matrix=index == 0):
            findings.append(
                Diagnostic(
                    "legalize/encoding",
                    f"device {device.name} has no {node.op.name} for {encoding}",
                    where,
                    notes=(f"weight @{symbol}: {module.weights.origin(symbol)}",),
                    help="run lower-encodings first",
                )
            )
    return findings


def _computes(op: str, encoding: Encoding, device: Device, *, matrix: bool) -> bool:
    """Whether the device has a kernel of the op for this encoding of one of its weights."""
    if op in ("embedding", "embedding_bag", "lookup"):
        return isinstance(encoding, Dense)
    if op == "constant" and isinstance(encoding, Dense):
        return encoding.dtype in _CONSTANTS
    if op == "linear" and matrix:
        return multiplies(encoding, device, device.native_linear)
    return encoding == Dense(DType.F32)
