"""What is told before long or large work: memory to run a bundle, time to evaluate a reference."""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.backends.cache import format_size
from edgecc.device_lowering import Lowered
from edgecc.devices import LinearForm
from edgecc.errors import Diagnostic, Severity
from edgecc.golden import section
from edgecc.ir.core import Graph, Module
from edgecc.ir.encodings import NVFP4
from edgecc.ir.weights import Derived
from edgecc.memory_plan import MemoryPlan
from edgecc.roles import Role

TOLD_BYTES = 1 << 30
"""Less memory than this is not worth a word."""

TOLD_S = 20.0
"""Less time than this is not worth a word."""

TARGET_S = 6.5e-9
DRAFT_S = 5e-9
"""For each weight of linear layers: the target reads a prompt of five rows and one token after it,
the draft makes one round. Measured with NVFP4 and FP8 weights: unpacking takes most of the time."""


def running(plan: MemoryPlan, module: Module, available: int | None) -> Diagnostic | None:
    """What running models takes that expand their weights at load; None if it is little.

    Args:
        plan: Of the device.
        module: Lowered for it.
        available: Bytes this machine has left; None if unknown.

    Returns:
        A warning if this machine has too little, else a note.
    """
    total = plan.total
    if plan.total_bytes < TOLD_BYTES:
        return None
    short = available is not None and plan.total_bytes - total.mapped > available
    free = f"; {format_size(available)} are free here" if short and available is not None else ""
    return Diagnostic(
        "memory/running",
        f"running on {plan.device} takes {format_size(plan.total_bytes)} of memory: "
        f"{format_size(total.stored)} of weights in the bundle are {format_size(total.weights)} as "
        f"the engine computes with them{free}",
        help=_smaller(module) if short else "",
        severity=Severity.WARNING if short else Severity.NOTE,
    )


def _smaller(module: Module) -> str:
    """How to get along with less."""
    dense = any(
        isinstance(weight.source, Derived)
        and weight.source.recipe == "dequantize"
        and isinstance(
            module.weights[module.weights.resolve(weight.source.inputs[0])].encoding, NVFP4
        )
        for weight in module.weights.values()
    )
    if dense:
        return (
            f"--linear-form {LinearForm.INT8_SPLIT} keeps NVFP4 layers in 8 bits, and a shorter "
            "--max-model-len needs smaller caches; engines for a GPU compute with packed weights"
        )
    return "a shorter --max-model-len needs smaller caches; engines for a GPU read packed weights"


def evaluating(lowered: Sequence[Lowered]) -> Diagnostic | None:
    """What evaluating the reference takes; None if it is little.

    Args:
        lowered: For each device. Graphs of engines are evaluated twice, in their own precision and
            without the roundings of activations, beside the reference, which all devices share.
    """
    module, engines = lowered[0].lifted, sum(bool(x.device.library) for x in lowered)
    counts = {name: _multiplied(graph, module) for name, graph in module.graphs.items()}
    if "draft" in counts and module.graphs["draft"].by_role(Role.TOKEN_IDS):
        # A language model is called for each proposal.
        counts["draft"] *= int(str(section(module, "draft")["num_speculative_tokens"]))
    once = TARGET_S * counts.get("target", 0) + DRAFT_S * counts.get("draft", 0)
    seconds = once * (1 + 2 * engines)
    if seconds < TOLD_S:
        return None
    return Diagnostic(
        "verify/estimate",
        f"golden rows take about {seconds:.0f} s of one core: the reference is evaluated"
        + (", and so are the graphs of engines" if engines else ""),
        help="--verify none leaves them out; then `edgecc verify` has nothing to compare with",
        severity=Severity.NOTE,
    )


def _multiplied(graph: Graph, module: Module) -> int:
    """Weights that a graph multiplies by."""
    table, total = module.weights, 0
    for node in graph.nodes:
        if node.op.name == "linear":
            rows, columns = table[table.resolve(node.weights[0])].shape
            total += rows * columns
    return total
