"""`split-layers`: a deep graph becomes several graphs of a few layers each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.relative_names import RelativeNames
from edgecc.ir.rewriter import Rewriter
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.outlining import Piece, extract, piece_of, unique

MIXERS: Final = frozenset({"attention", "cached_attention", "gated_delta_net", "logged_delta_net"})
"""Ops that mix rows: a layer of a decoder has one."""


@dataclass(frozen=True, slots=True)
class SplitLayersOptions:
    """`layers`: about so many in a part; `most`: graphs of at most so many layers stay whole."""

    layers: int = 4
    most: int = 8


class SplitLayers(Pass[SplitLayersOptions]):
    """Cut a graph of many layers into graphs of a few, which a builder can take one by one.

    What it does
        A layer begins where the fewest values go on to later nodes, behind the op that mixed rows
        before and ahead of the next: after the last residual addition. A graph with more than
        `most` layers is replaced by calls of `NAME.0`, `NAME.1`, ...: what comes before the first
        layer, parts of a few layers each, and what comes after the last one. Where layers repeat
        with a period, as three recurrent ones and an attention layer do, a part is a multiple of
        it. Inputs, states and values of a part are numbered from its own first layer.

    Why
        The time that TensorRT takes for a layer grows with the number of layers in a network, and
        memory grows with that number. Parts of equal layers are the same network with other
        weights: where weights are inputs, one engine is built and stored for all of them.

    Example:
        ```
        graph @target.body(%ids, %k_cache.0, %k_cache.1, ...) { ...64 layers...; return %x }
        ```
        becomes
        ```
        graph @target(...) {
          %x = call(%ids) {callee = "target.body.0"}
          %x_1, ... = call(%x, %k_cache.0, ...) {callee = "target.body.1"}
          ...
        }
        ```

    Options
        `layers`: layers of a part, rounded up to a multiple of the period of the graph if that is
        not longer than `most`. `most`: graphs with at most so many layers stay whole.

    Requires and ensures
        Nothing.

    Exactness
        Exact.

    Limits
        A graph with calls stays as it is. Cuts through values whose sizes do not tell those of
        their symbols are not made.
    """

    name = "split-layers"
    options_type = SplitLayersOptions

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Split every deep graph without calls."""
        changed = False
        for graph in list(module.graphs.values()):
            if not list(graph.callees()):
                changed |= self._split(module, graph, ctx)
        return changed

    def _split(self, module: Module, graph: Graph, ctx: PassContext) -> bool:
        layers = layers_of(graph)
        size = self._size(list(graph.nodes), layers)
        if len(layers) <= max(self.options.most, size):
            return False
        pieces = self._pieces(module, graph, layers, size)
        loose = sorted({s for piece in pieces for s in piece.loose_symbols()})
        if loose:
            reason = f"no input of a part would fix {', '.join(loose)}"
            self.remark(ctx, f"@{graph.name}", reason, applied=False)
            return False
        following = list(module.graphs.values())
        following = following[following.index(graph) + 1 :]
        for piece in pieces:
            extract(module, piece, graph, RelativeNames())
        self._call(module, graph, pieces)
        for other in following:  # the parts stand where the graph stood
            module.graphs[other.name] = module.graphs.pop(other.name)
        self.remark(ctx, f"@{graph.name}", f"{len(pieces)} parts", applied=True)
        module.decisions.append(
            f"{graph.name}: {len(layers)} layers in {len(pieces)} graphs, {pieces[0].name} to "
            f"{pieces[-1].name}"
        )
        return True

    def _pieces(
        self, module: Module, graph: Graph, layers: Sequence[range], size: int
    ) -> list[Piece]:
        nodes = list(graph.nodes)
        starts = [layer.start for layer in layers[::size]]
        bounds = [*dict.fromkeys([0, *starts, layers[-1].stop, len(nodes)])]
        taken, returned = set(module.graphs), [o.value for o in graph.outputs]
        pieces = []
        for number, (start, stop) in enumerate(pairwise(bounds)):
            later = [o for n in nodes[stop:] for o in n.operands]
            name = unique(f"{graph.name}.{number}", taken)
            pieces.append(piece_of(name, nodes[start:stop], [*later, *returned]))
        return [piece for piece in pieces if piece.returned]

    def _size(self, nodes: Sequence[Node], layers: Sequence[range]) -> int:
        """Layers of a part: a multiple of the period, unless that is too long."""
        wanted, kinds = max(self.options.layers, 1), [_kinds(nodes, layer) for layer in layers]
        for period in range(1, self.options.most + 1):
            if kinds[period:] == kinds[:-period]:
                return -(-wanted // period) * period
        return wanted

    def _call(self, module: Module, graph: Graph, pieces: Sequence[Piece]) -> None:
        """Call the parts in place of the graph: where it is called, or in the graph itself."""
        callers = [
            (caller, node)
            for caller in module.graphs.values()
            for node in caller.nodes
            if node.op.name == "call" and getattr(node.attrs, "callee", "") == graph.name
        ]
        for caller, node in callers:
            rewriter = Rewriter(module, caller, self.name)
            inputs = (i.value for i in graph.inputs)
            now = dict(zip(inputs, node.operands, strict=True))
            now = self._calls(rewriter, node, pieces, now)
            rewriter.replace(node, [now[o.value] for o in graph.outputs])
        if callers:
            del module.graphs[graph.name]
            return
        rewriter, old = Rewriter(module, graph, self.name), list(graph.nodes)
        now = self._calls(rewriter, old[0], pieces, {i.value: i.value for i in graph.inputs})
        for value in {o.value: None for o in graph.outputs if o.value.producer is not None}:
            rewriter.replace_value(value, now[value])
        for node in reversed(old):
            rewriter.erase(node)

    def _calls(
        self, rewriter: Rewriter, anchor: Node, pieces: Sequence[Piece], now: dict[Value, Value]
    ) -> dict[Value, Value]:
        """Insert the calls; values of the graph to what they are there."""
        for piece in pieces:
            made = rewriter.insert(
                anchor,
                "call",
                [now[v] for v in piece.taken],
                attrs=CallAttributes(piece.name),
                names=[v.name for v in piece.returned],
            )
            now.update(zip(piece.returned, made.results, strict=True))
        return now


def layers_of(graph: Graph) -> list[range]:
    """The nodes of each layer, by their numbers; layers follow one another without gaps.

    What comes before the first layer and after the last one is found by likeness with another
    layer; where none is alike, they reach to the ends of the graph.
    """
    nodes = list(graph.nodes)
    mixers = [i for i, node in enumerate(nodes) if node.op.name in MIXERS]
    if len(mixers) < 2:
        return [range(len(nodes))] * len(mixers)
    crossing = _crossing(nodes)
    starts = [
        min(range(before + 1, mixer + 1), key=lambda at: (crossing[at], -at))
        for before, mixer in pairwise(mixers)
    ]
    ahead = [nodes[start:mixer] for start, mixer in zip(starts, mixers[1:], strict=True)]
    behind = [nodes[mixer:start] for start, mixer in zip(starts, mixers[:-1], strict=True)]
    first, last = nodes[: mixers[0]], nodes[mixers[-1] :]
    start = next((mixers[0] - len(a) for a in ahead if _alike(first[-len(a) :], a)), 0)
    length = next((len(b) for b in reversed(behind) if _alike(last[: len(b)], b)), len(last))
    return [range(a, b) for a, b in pairwise([start, *starts, mixers[-1] + length])]


def _crossing(nodes: Sequence[Node]) -> list[int]:
    """For each place between nodes: how many values made before it are read behind it."""
    order = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for index, node in enumerate(nodes):
        for value in node.results:
            last = max((order[user] for user in value.users()), default=index)
            change[index + 1] += 1
            change[last + 1] -= 1
    return list(accumulate(change))


def _alike(a: Sequence[Node], b: Sequence[Node]) -> bool:
    return len(a) == len(b) > 0 and all(_kind(x) == _kind(y) for x, y in zip(a, b, strict=True))


def _kinds(nodes: Sequence[Node], layer: range) -> list[Hashable]:
    return [_kind(nodes[i]) for i in layer]


def _kind(node: Node) -> Hashable:
    types = (v.type for v in (*node.operands, *node.results))
    return node.op.name, node.attrs, len(node.weights), *types
