"""Shared by `fuse-qkv` and `fuse-gate-up`: several linear layers of one input become one.

Rows of a linear weight are independent, so stacking the weights and splitting the result is exact.
Biases are stacked in the same order. It is only done where the encodings allow it exactly as well:
one encoding, and per-weight scalars (the NVFP4 global scale) equal bit for bit. A weight that is
read elsewhere too stays alone, because stacking would store it twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.shape import SplitAttributes
from edgecc.ir.patterns import Match, OpPattern
from edgecc.ir.recipes import RECIPES
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.rules import Rule
from edgecc.ir.weights import Unbound


class WeightReaders:
    """Which nodes read each weight, directly or through a derived one.

    Made once for a pass. Fusing keeps it right for all other layers: what is fused had no reader
    besides the fused layers.
    """

    def __init__(self, module: Module) -> None:
        self._readers: dict[str, dict[Node, str]] = {}
        for graph in module.graphs.values():
            for node in graph.nodes:
                for weight in node.weights:
                    for symbol in module.weights.dependencies(weight):
                        self._readers.setdefault(symbol, {})[node] = graph.name

    def elsewhere(self, symbols: Collection[str], nodes: Collection[Node]) -> str:
        """Which of the weights a node besides the given ones reads; empty when none does."""
        for symbol in symbols:
            for node, graph in self._readers.get(symbol, {}).items():
                if node not in nodes:
                    return f"@{symbol} is also read in @{graph} by {node!r}"
        return ""


def why_not_fusable(module: Module, nodes: Sequence[Node], readers: WeightReaders) -> str:
    """Why linear layers of one value cannot become one exactly; empty when they can."""
    if len({len(n.weights) for n in nodes}) > 1:
        return "only some of the layers have a bias"
    if any(n.result.type.shape[-1] == 0 for n in nodes):
        return "a layer has no rows"
    reasons = (_why_not_stackable(module, nodes, s, readers) for s in _symbols(module, nodes))
    return next(filter(None, reasons), "")


def _symbols(module: Module, nodes: Sequence[Node]) -> list[list[str]]:
    """The weights of the layers, then their biases if they have any."""
    resolve = module.weights.resolve
    return [list(map(resolve, names)) for names in zip(*(n.weights for n in nodes), strict=True)]


def _why_not_stackable(
    module: Module, nodes: Sequence[Node], symbols: Sequence[str], readers: WeightReaders
) -> str:
    """Why weights, or biases, cannot become one exactly; empty when they can."""
    table = module.weights
    if len(set(symbols)) != len(symbols):
        return "two layers share one weight"
    weights = [table[s] for s in symbols]
    if any(isinstance(w.source, Unbound) for w in weights):
        return "a weight is unbound"
    shared = readers.elsewhere(symbols, nodes)
    if shared:
        return shared
    try:
        RECIPES["concat_rows"].check(weights, {})
    except ValueError as error:
        return str(error)
    components = weights[0].encoding.components(weights[0].shape)
    scalars = [name for name, c in components.items() if not c.rows]
    for name in scalars:
        values = {table.read(s, 0, 1)[name].tobytes() for s in symbols}
        if len(values) != 1:
            return f"{name} differs between the layers"
    return ""


def common_name(names: Sequence[str]) -> str:
    """`a.q_proj.weight`, `a.k_proj.weight` give `a.q_proj+k_proj.weight`."""
    split = [n.split(".") for n in names]
    if len({(len(s), *s[:-2], s[-1]) for s in split}) == 1 and len(split[0]) > 1:
        return ".".join([*split[0][:-2], "+".join(s[-2] for s in split), split[0][-1]])
    return "+".join(names)


def fuse(rewriter: Rewriter, nodes: Sequence[Node]) -> Node:
    """Replace linear layers of one input by one layer and a split; returns the new layer."""
    graph: Graph = rewriter.graph
    table = rewriter.module.weights
    anchor = min(nodes, key=graph.nodes.order)
    fused = [
        table.derive_shared(common_name(symbols), "concat_rows", tuple(symbols))
        for symbols in _symbols(rewriter.module, nodes)
    ]
    x: Value = nodes[0].operands[0]
    linear = rewriter.insert(anchor, "linear", (x,), weights=fused, origin=nodes[0].location)
    sizes = tuple(int(str(n.result.type.shape[-1])) for n in nodes)
    split = rewriter.insert(
        anchor,
        "split",
        (linear.result,),
        attrs=SplitAttributes(x.type.rank - 1, sizes),
        names=[n.result.name for n in nodes],
        origin=nodes[0].location,
    )
    for node, piece in zip(nodes, split.results, strict=True):
        rewriter.replace(node, (piece,))
    return linear


class FuseLayers(Rule):
    """Linear layers of one value, found by a pattern, become one."""

    explains = True

    def __init__(self, readers: WeightReaders, pattern: OpPattern, labels: Sequence[str]) -> None:
        self.readers = readers
        self.pattern = pattern  # type: ignore[misc]
        self.labels = tuple(labels)

    def check(self, match: Match) -> str:
        """Whether stacking is exact."""
        return why_not_fusable(match.module, self._layers(match), self.readers)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        """Fuse; the root stays."""
        fuse(rewriter, self._layers(match))

    def done(self, match: Match) -> str:
        """The stacked weight."""
        return f"@{common_name(_symbols(match.module, self._layers(match))[0])}"

    def _layers(self, match: Match) -> list[Node]:
        return [match[label] for label in self.labels]
