"""Evaluates graphs with NumPy: the oracle for every pass and backend.

Float32 by default, float64 on request. Values are dropped after their last use, weights are
streamed block by block, so that a model larger than memory can be evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import Array
from edgecc.ir.evaluation import check_cast, find_graph, last_uses, match_shape, positional
from edgecc.ir.ops.base import EvalContext, WeightView
from edgecc.ir.types import TensorType

Inputs: TypeAlias = dict[str, dict[str, Array]]
"""Arrays by graph and input name."""


class Interpreter:
    """Evaluates the graphs of one module. Subclass and override `node` to observe or replace ops.

    Args:
        module: Module to evaluate; unbound weights raise when they are read.
        dtype: `numpy.float32` or `numpy.float64`: the type every floating-point value is held in.
    """

    def __init__(self, module: Module, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.module = module
        self.dtype = np.dtype(dtype)

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate a graph.

        Args:
            graph: Name of the graph.
            inputs: Arrays by input name; shapes must match the types, symbols consistently.

        Returns:
            Arrays by output name.

        Raises:
            RequestError: There is no such graph, or an input is missing, unknown, of the wrong
                shape, or not of integers where the graph wants them.
        """
        target = find_graph(self.module, graph)
        values = self._evaluate(target, positional(target, inputs))
        return {o.name: v for o, v in zip(target.outputs, values, strict=True)}

    def node(self, node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Evaluate one node on operand values."""
        views = [WeightView(self.module.weights, w, self.dtype) for w in node.weights]
        ctx = EvalContext(self.dtype, self._call)
        return tuple(node.op.evaluate(operands, views, node.attrs, ctx))

    def _call(self, name: str, operands: Sequence[Array]) -> tuple[Array, ...]:
        return self._evaluate(self.module.graphs[name], operands)

    def _evaluate(self, graph: Graph, inputs: Sequence[Array]) -> tuple[Array, ...]:
        binding: dict[str, int] = {}
        values: dict[Value, Array] = {}
        for item, array in zip(graph.inputs, inputs, strict=True):
            what = f"@{graph.name}: input %{item.name}"
            cast = self._cast(what, np.asarray(array), item.value.type)
            match_shape(what, cast.shape, item.value.type, binding)
            values[item.value] = cast
        last = last_uses(graph.nodes, (o.value for o in graph.outputs))
        for index, node in enumerate(graph.nodes):
            results = self.node(node, [values[o] for o in node.operands])
            for value, array in zip(node.results, results, strict=True):
                match_shape(f"@{graph.name}: {node!r}", array.shape, value.type, binding)
                values[value] = array
            for value in last.get(index, ()):
                del values[value]
        return tuple(values[o.value] for o in graph.outputs)

    def _cast(self, what: str, array: Array, type: TensorType) -> Array:
        dtype = self.dtype if type.dtype.is_float else type.dtype.numpy
        check_cast(what, array.dtype, dtype, type)
        # C order, because NumPy sums other layouts in another order: rows would lose their bits.
        return array.astype(dtype, order="C")


def evaluate(
    module: Module, inputs: Inputs, dtype: type[np.floating[Any]] = np.float32
) -> dict[str, Array]:
    """Outputs of several graphs, by `graph.output`; see `Interpreter`."""
    run = Interpreter(module, dtype).run
    return {
        f"{graph}.{name}": array
        for graph, arrays in inputs.items()
        for name, array in run(graph, arrays).items()
    }
