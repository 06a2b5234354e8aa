"""`fold-constants`: compute at compile time what depends on no input."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np

from edgecc.errors import EdgeccError
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import Array, Dense
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, Inline, Weight, WeightTable
from edgecc.passes.base import Pass, PassContext, site


@dataclass(frozen=True, slots=True)
class FoldConstantsOptions:
    """`max_bytes`: nodes with larger results are left alone; the module holds folded values."""

    max_bytes: int = 1 << 16


class FoldConstants(Pass[FoldConstantsOptions]):
    """Replace nodes that only read constants by their values.

    What it does
        A node whose operands are all results of `constant` becomes a `constant` itself, of an
        inline weight with the value the op's reference gives in float32. Equal values share one
        weight. A weight that is derived by `dequantize` from a dense f32 one becomes an alias.

    Why
        Work that is the same in every call is done once, by the compiler. Engines fold constants
        too, but each only inside its own graph, and they cannot drop the weights that only folded
        nodes read.

    Example:
        ```
        %id = constant(@mask_id) : i64[1]
        %x = embedding(%id, @embed_tokens) : f32[1, 4]
        ```
        becomes
        ```
        weight @main.x : dense<f32> [1, 4] = inline {...}
        %x = constant(@main.x) : f32[1, 4]
        ```

    Options
        `max-bytes`: nodes with larger results are left alone, 65536 by default.

    Requires and ensures
        Nothing. `dce` removes the nodes and weights that nobody reads any more.

    Exactness
        Exact: the value is the one that the interpreter computes in float32. A device rounds the
        same expression in its own way, as for any other node.

    Limits
        Only f32 and integer results. Nodes that read unbound weights, or whose reference raises an
        error such as an index out of range, are left alone. `concat_rows` of one weight is a copy
        that was asked for (`bind-shared-weights{copy=true}`) and stays.
    """

    name = "fold-constants"
    options_type = FoldConstantsOptions

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Fold weights, then each graph in one walk."""
        changed = self._fold_weights(module, ctx)
        made = _InlineWeights(module.weights)
        for graph in module.graphs.values():
            changed |= self._fold_graph(module, graph, made, ctx)
        return changed

    def _fold_weights(self, module: Module, ctx: PassContext) -> bool:
        table = module.weights
        changed = False
        for symbol, weight in list(table.items()):
            if _is_identity(table, weight):
                assert isinstance(weight.source, Derived)
                table.alias(symbol, weight.source.inputs[0])
                self.remark(ctx, f"@{symbol}", "it is dense f32 already", applied=True)
                changed = True
        return changed

    def _fold_graph(
        self, module: Module, graph: Graph, made: _InlineWeights, ctx: PassContext
    ) -> bool:
        rewriter = Rewriter(module, graph, self.name)
        interpreter = Interpreter(module)
        changed = False
        for node in list(graph.nodes):
            if not node.operands or not all(map(_is_constant, node.operands)):
                continue
            found = self._values(interpreter, node)
            if isinstance(found, str):
                self.remark(ctx, site(graph, node), found, applied=False)
                continue
            results = []
            for old, array in zip(node.results, found, strict=True):
                symbol = made.add(f"{graph.name}.{old.name}", old.type.dtype, array)
                results.append(rewriter.insert(node, "constant", (), weights=(symbol,)).result)
                self.remark(ctx, site(graph, node), f"@{symbol}", applied=True)
            rewriter.replace(node, results)
            changed = True
        return changed

    def _values(self, interpreter: Interpreter, node: Node) -> tuple[Array, ...] | str:
        """Results of a node of constants, or why it is left alone."""
        size = 0
        for value in node.results:
            dtype, shape = value.type.dtype, value.type.shape
            if dtype.is_float and dtype is not DType.F32:
                return f"the result is {dtype.value}"
            dims = [d for d in shape if isinstance(d, int)]
            if len(dims) < len(shape) or 0 in dims:
                return f"the result is empty or of unknown size: {value.type}"
            size += prod(dims) * dtype.numpy.itemsize
        if size > self.options.max_bytes:
            return f"the result takes {size} bytes, max-bytes is {self.options.max_bytes}"
        try:
            operands = [interpreter.node(_producer(o), ())[0] for o in node.operands]
            return interpreter.node(node, operands)
        except EdgeccError as error:
            return error.diagnostics[0].message


class _InlineWeights:
    """The inline weights of a table, by value."""

    def __init__(self, table: WeightTable) -> None:
        self._table = table
        self._symbols = {w: s for s, w in table.items() if isinstance(w.source, Inline)}
        self._taken: Counter[str] = Counter()

    def add(self, name: str, dtype: DType, array: Array) -> str:
        """The symbol of a weight with these values: one that is there, or a new one."""
        data = np.ascontiguousarray(array, dtype.numpy).tobytes()
        weight = Weight(array.shape, Dense(dtype), Inline((("weight", data),)))
        if weight not in self._symbols:
            symbol = name
            while symbol in self._table:
                self._taken[name] += 1
                symbol = f"{name}.{self._taken[name]}"
            self._symbols[weight] = self._table.add(symbol, weight)
        return self._symbols[weight]


def _is_identity(table: WeightTable, weight: Weight) -> bool:
    """Whether a weight is derived from another one without changing its values or encoding.

    Binding replaces the encoding of unbound weights, so what is made from them may still change.
    """
    source = weight.source
    if not isinstance(source, Derived) or source.recipe != "dequantize":
        return False
    (origin,) = source.inputs
    dense = table[table.resolve(origin)].encoding == Dense(DType.F32)
    return dense and not list(table.unbound(origin))


def _is_constant(value: Value) -> bool:
    return value.producer is not None and value.producer.op.name == "constant"


def _producer(value: Value) -> Node:
    assert value.producer is not None
    return value.producer
