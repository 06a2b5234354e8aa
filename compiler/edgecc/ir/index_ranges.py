"""Which integers a graph can take: a backwards analysis from the ops that index with them.

Token ids index a table, a cache length says where rows are written, rows to keep index an axis.
Each op states what it asks of its integer operands (`_RULES`); ops that only move or shift integers
hand the demand on what they make to what they take. Walking a graph from its end therefore gives
the range of every input within which no op refuses it, for given sizes of the dimension symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgecc.errors import InputError
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import IntShape
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.types import DimExpr, Shape, substitute

_LOW, _HIGH = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Inclusive bounds of the elements of a tensor; everything an i64 holds by default."""

    low: int = _LOW
    high: int = _HIGH

    def __and__(self, other: IndexRange) -> IndexRange:
        return IndexRange(max(self.low, other.low), min(self.high, other.high))

    def shifted(self, low: int, high: int) -> IndexRange:
        """The values x for which both `x + low` and `x + high` are in the range."""
        return IndexRange(
            self.low - low if self.low > _LOW else _LOW,
            self.high - high if self.high < _HIGH else _HIGH,
        )

    @property
    def empty(self) -> bool:
        """Whether there is no such integer."""
        return self.low > self.high

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


ANY = IndexRange()
"""No demand."""


@dataclass(frozen=True, slots=True)
class _Site:
    """A node, with what is known when it is reached from behind."""

    walk: _Walk
    node: Node
    results: tuple[IndexRange, ...]

    def shape(self, operand: int) -> IntShape:
        """Shape of an operand."""
        return self.walk.shape(self.node.operands[operand])

    def table(self, weight: int) -> IndexRange:
        """Indices of the rows of a weight."""
        table = self.walk.module.weights
        return IndexRange(0, table[table.resolve(self.node.weights[weight])].shape[0] - 1)


_Rule: TypeAlias = Callable[[_Site], Sequence[IndexRange]]
"""Demands on the operands, in order; operands that are left out can be anything."""


def input_ranges(module: Module, graph: str, sizes: Mapping[str, int]) -> dict[str, IndexRange]:
    """Ranges of the integer inputs of a graph.

    Args:
        module: Owner of the graph.
        graph: Its name.
        sizes: A value for every dimension symbol of its inputs.

    Returns:
        By input name. A range may be empty: then only a tensor without elements will do.

    Raises:
        InputError: Some axis would have a negative size, or fewer rows than an op needs of it.
    """
    found = module.graphs[graph]
    ranges = _Walk(module, found, sizes).run([ANY] * len(found.outputs))
    named = zip(found.inputs, ranges, strict=True)
    return {i.name: r for i, r in named if not i.value.type.dtype.is_float}


class _Walk:
    """One graph under one binding of its symbols."""

    def __init__(self, module: Module, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.module = module
        self.graph = graph
        self.sizes = sizes

    def run(self, outputs: Sequence[IndexRange]) -> list[IndexRange]:
        """Demands on the inputs that follow from demands on the outputs and from all nodes."""
        demands: dict[Value, IndexRange] = {}
        for output, demand in zip(self.graph.outputs, outputs, strict=True):
            demands[output.value] = demands.get(output.value, ANY) & demand
        for node in reversed(self.graph.nodes):
            results = tuple(demands.get(r, ANY) for r in node.results)
            for result in node.results:
                self.shape(result)
            rule = _RULES.get(node.op.name, _unknown)
            for value, demand in zip(node.operands, rule(_Site(self, node, results)), strict=False):
                demands[value] = demands.get(value, ANY) & demand
        return [demands.get(i.value, ANY) for i in self.graph.inputs]

    def shape(self, value: Value) -> IntShape:
        """The shape of a value.

        Raises:
            InputError: An axis is negative.
        """
        return concrete(value.type.shape, self.sizes, f"%{value.name} of graph @{self.graph.name}")


def concrete(shape: Shape, sizes: Mapping[str, int], what: str) -> IntShape:
    """A shape with all symbols replaced.

    Raises:
        InputError: A symbol has no size, or an axis is negative.
    """
    found = tuple(d for d in substitute(shape, sizes) if isinstance(d, int) and d >= 0)
    if len(found) != len(shape):
        chosen = ", ".join(f"{k} = {v}" for k, v in sizes.items())
        raise InputError("ir/bad-sizes", f"{what} has no shape for {chosen}")
    return found


def _unknown(site: _Site) -> Sequence[IndexRange]:
    """Of an op without a rule nothing is known but that zero is an index of everything."""
    return [IndexRange(0, 0)] * len(site.node.operands)


def _nothing(site: _Site) -> Sequence[IndexRange]:
    return ()


def _moves(site: _Site) -> Sequence[IndexRange]:
    """Elements of the results are elements of the operands."""
    demand = ANY
    for result in site.results:
        demand &= result
    return [demand] * len(site.node.operands)


def _tail(site: _Site) -> Sequence[IndexRange]:
    axis: int = site.node.attrs.axis  # type: ignore[attr-defined]
    _require_rows(site, site.shape(0)[axis], site.shape(1)[axis])
    return site.results


def _require_rows(site: _Site, found: int, needed: int) -> None:
    if found < needed:
        raise InputError(
            "ir/bad-sizes", f"{site.node!r} needs {needed} rows of %{site.node.operands[0].name}"
        )


def _embedding(site: _Site) -> Sequence[IndexRange]:
    return (site.table(0),)


def _take_rows(site: _Site) -> Sequence[IndexRange]:
    return site.results[0], IndexRange(0, site.shape(0)[1] - 1)


def _rope(site: _Site) -> Sequence[IndexRange]:
    return ANY, site.table(0)


def _replace_rows(site: _Site) -> Sequence[IndexRange]:
    return ANY, ANY, IndexRange(-1, site.shape(1)[0] - 1)


def _cache_update(site: _Site) -> Sequence[IndexRange]:
    return ANY, ANY, IndexRange(0, site.shape(0)[2] - site.shape(1)[1])


def _attention(site: _Site) -> Sequence[IndexRange]:
    return ANY, ANY, ANY, IndexRange(site.shape(0)[1], site.shape(1)[2])


def _cached_attention(site: _Site) -> Sequence[IndexRange]:
    rows = site.shape(1)[1]
    if rows < site.shape(0)[1]:
        raise InputError("ir/bad-sizes", f"{site.node!r} has more queries than new rows")
    start = IndexRange(0, site.shape(3)[2] - rows)
    if site.node.weights and rows:
        start &= site.table(0).shifted(0, rows - 1)
    return ANY, ANY, ANY, ANY, ANY, start


def _logged_delta_net(site: _Site) -> Sequence[IndexRange]:
    replayed, committed = IndexRange(0, site.shape(5)[1]), IndexRange(0, site.shape(0)[1])
    return ANY, ANY, ANY, ANY, ANY, ANY, replayed, committed


def _markov_chain(site: _Site) -> Sequence[IndexRange]:
    return ANY, site.table(0)


def _position_ids(site: _Site) -> Sequence[IndexRange]:
    rows = site.shape(1)[1]
    return (site.results[0].shifted(0, rows - 1) if rows else ANY,)


def _advance(site: _Site) -> Sequence[IndexRange]:
    rows = site.shape(1)[1]
    return (site.results[0].shifted(rows, rows),)


def _call(site: _Site) -> Sequence[IndexRange]:
    attrs = site.node.attrs
    assert isinstance(attrs, CallAttributes)
    callee = site.walk.module.graphs[attrs.callee]
    sizes: dict[str, int] = {}
    for index, item in enumerate(callee.inputs):
        sizes.update(_bound(item.value.type.shape, site.shape(index)))
    return _Walk(site.walk.module, callee, sizes).run(site.results)


def _bound(expected: Shape, found: IntShape) -> Iterator[tuple[str, int]]:
    """Sizes of the symbols that are whole axes."""
    for dim, size in zip(expected, found, strict=True):
        if isinstance(dim, DimExpr) and len(dim.terms) == 1 and dim.terms[0][1] == 1:
            yield dim.terms[0][0], size - dim.constant


_RULES: Mapping[str, _Rule] = {
    "advance": _advance,
    "attention": _attention,
    "cache_update": _cache_update,
    "cached_attention": _cached_attention,
    "call": _call,
    "concat": _moves,
    "embedding": _embedding,
    "embedding_bag": _embedding,
    "logged_delta_net": _logged_delta_net,
    "lookup": _embedding,
    "markov_chain": _markov_chain,
    "merge_rows": _moves,
    "multi_axis_rope": _rope,
    "pad": _moves,
    "position_ids": _position_ids,
    "replace_rows": _replace_rows,
    "rope": _rope,
    "slice": _moves,
    "split": _moves,
    "squeeze": _moves,
    "tail": _tail,
    "take_rows": _take_rows,
    "unsqueeze": _moves,
}
"""By name of the op. An op that reads integers needs a line here, or its operands are all zero."""
