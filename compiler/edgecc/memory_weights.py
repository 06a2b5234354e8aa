"""Bytes of the weights of each graph: in the bundle, and as they are computed with."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.backends.stored_weights import stored_symbol, stored_tensor
from edgecc.backends.tensorrt.operands import Operand, graph_operands
from edgecc.backends.tensorrt.policy import WeightPlan
from edgecc.backends.weight_file import TensorSpec
from edgecc.ir.core import Graph, Module
from edgecc.ir.encodings import ACTIVATION_SCALES
from edgecc.ir.weights import WeightTable


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Of one graph without calls.

    Attributes:
        stored: In the bundle; a tensor that several graphs read counts for the first.
        resident: As the graph computes with them, of which
        mapped: are read where they lie in the bundle's files.
    """

    stored: int = 0
    resident: int = 0
    mapped: int = 0


def model_weights(module: Module) -> dict[str, WeightBytes]:
    """Weights of models over a weight file.

    A matrix that is expanded at load is an array of its session, and so is one that a kernel packs;
    everything else is mapped.

    Args:
        module: Legalized for ONNX Runtime.
    """
    table, seen = module.weights, set[str]()
    return {
        graph.name: _model_graph(table, graph, seen)
        for graph in module.graphs.values()
        if not list(graph.callees())
    }


def _model_graph(table: WeightTable, graph: Graph, seen: set[str]) -> WeightBytes:
    packed = {table.resolve(node.weights[0]) for node in graph.nodes if node.op.name == "linear"}
    stored = resident = mapped = 0
    for symbol in dict.fromkeys(map(table.resolve, graph.used_weights())):
        base = stored_symbol(table, symbol)
        fresh, size = base not in seen, table[symbol].nbytes
        seen.add(base)
        stored += _stored(table, base) if fresh else 0
        if base != symbol or symbol in packed:
            resident += size
        elif fresh:  # the pages of a file are there once, whoever maps it
            mapped += size
    return WeightBytes(stored, resident + mapped, mapped)


def engine_weights(module: Module, plan: WeightPlan) -> dict[str, WeightBytes]:
    """Weights of engines: constants of one, and inputs that exist once on the device.

    Args:
        module: Legalized for TensorRT.
        plan: Which weights are inputs.

    Raises:
        LegalizeError: An encoding has no form in TensorRT.
    """
    bound = frozenset(plan.bound)
    arrays, tensors = set[Operand](), set[str]()
    found = {}
    for graph in module.graphs.values():
        if list(graph.callees()):
            continue
        stored = resident = 0
        for operand in dict.fromkeys(graph_operands(module, graph)):
            if operand not in bound:
                stored += operand.nbytes
            elif operand.symbol not in tensors:
                stored += _stored(module.weights, operand.symbol)
                tensors.add(operand.symbol)
            if operand not in bound or operand not in arrays:
                resident += operand.nbytes
            arrays.add(operand)
        found[graph.name] = WeightBytes(stored, resident)
    return found


def _stored(table: WeightTable, symbol: str) -> int:
    weight = table[symbol]
    components = weight.encoding.components(weight.shape)
    # Scales of activations are weights of their own where anything reads them.
    parts = (c for c in components if c not in ACTIVATION_SCALES)
    tensors = (stored_tensor(table, symbol, component) for component in parts)
    return sum(TensorSpec(t.name, t.dtype, t.shape).nbytes for t in tensors)
