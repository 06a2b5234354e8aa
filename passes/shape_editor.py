"""What the rules of `canonicalize` edit a graph with."""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import Dim


class Editor(Rewriter):
    """A rewriter that knows the values a graph returns, and where parts of a `concat` begin."""

    def __init__(self, module: Module, graph: Graph, pass_name: str) -> None:
        super().__init__(module, graph, pass_name)
        self.returned = {o.value for o in graph.outputs}
        self._edges: dict[Node, tuple[tuple[Value, ...], list[int] | None]] = {}

    def concat(self, anchor: Node, values: Sequence[Value], axis: int) -> Value:
        """The values joined, before the anchor; a single one as it is."""
        if len(values) == 1:
            return values[0]
        return self.insert(anchor, "concat", values, attrs=AxisAttributes(axis)).result

    def slice(self, anchor: Node, x: Value, attrs: SliceAttributes) -> Value:
        """A slice of x, before the anchor; x itself if that is all of it."""
        if attrs.start == 0 and attrs.stop == x.type.shape[attrs.axis]:
            return x
        return self.insert(anchor, "slice", (x,), attrs=attrs).result

    def edges(self, concat: Node) -> list[int] | None:
        """Where the parts begin, and the end; None if a size is unknown."""
        operands, found = self._edges.get(concat, ((), None))
        if operands is not concat.operands:
            found = _running_sums([o.type.shape[axis_of(concat)] for o in concat.operands])
            self._edges[concat] = (concat.operands, found)
        return found

    def only_user(self, value: Value) -> Node | None:
        """The node that alone reads the value, once; None if there is more to it."""
        if len(value.uses) != 1 or value in self.returned:
            return None
        ((node, _),) = value.uses
        return node

    def is_dead(self, node: Node) -> bool:
        """Whether nothing reads any result of a node, and it may go.

        Calls stay: without its last call a graph would count as an entry. `dce` removes both.
        """
        return node.op.name != "call" and not any(
            r.uses or r in self.returned for r in node.results
        )


def axis_of(node: Node) -> int:
    """The axis an op of data movement works on."""
    attrs = node.attrs
    assert isinstance(attrs, AxisAttributes | SliceAttributes | SplitAttributes | PadAttributes)
    return attrs.axis


def _running_sums(sizes: Sequence[Dim]) -> list[int] | None:
    edges = [0]
    for size in sizes:
        if not isinstance(size, int):
            return None
        edges.append(edges[-1] + size)
    return edges
