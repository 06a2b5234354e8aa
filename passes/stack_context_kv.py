"""`stack-context-kv`: keys and values of the context for all layers of a draft in one product."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.shape import AxisAttributes, SplitAttributes
from edgecc.ir.patterns import Match, match, op
from edgecc.ir.recipes import RECIPES
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.weights import Unbound, WeightTable
from edgecc.passes.base import Pass, PassContext, site

_LAYER = op("linear", op("concat", label="rows"))


@dataclass(frozen=True, slots=True)
class StackContextKvOptions:
    """`duplicate`: do it although the weights are stored twice."""

    duplicate: bool = False


class StackContextKv(Pass[StackContextKvOptions]):
    """Multiply context rows that all layers of a block draft share by all their weights at once.

    What it does
        In a block draft every layer computes keys and values of the same context rows, followed by
        rows of its own block. Linear layers over a `concat` along rows whose first part is one
        value, in two or more such concatenations, become one layer over that value, with the
        weights stacked, and one layer each over the rest.

    Why
        The context then needs no layer of the draft to run before it, and one large product makes
        better use of an accelerator than many narrow ones. It pays where there are many more
        context rows than rows of the block: in decoding, with few of them, reading the weights
        twice costs more. So no default pipeline has this pass.

    Example:
        ```
        %rows0 = concat(%context, %y0) {axis = 1} : f32[b, c + 7, 256]
        %k0 = linear(%rows0, @k0) : f32[b, c + 7, 128]
        ...
        %rows1 = concat(%context, %y1) {axis = 1} : f32[b, c + 7, 256]
        %k1 = linear(%rows1, @k1) : f32[b, c + 7, 128]
        ```
        becomes
        ```
        %all = linear(%context, @draft.context.stacked) : f32[b, c, 256]
        %c0, %c1 = split(%all) {axis = 2, sizes = [128, 128]} : f32[b, c, 128], f32[b, c, 128]
        %b0 = linear(%y0, @k0) : f32[b, 7, 128]
        %k0 = concat(%c0, %b0) {axis = 1} : f32[b, c + 7, 128]
        ...
        %b1 = linear(%y1, @k1) : f32[b, 7, 128]
        %k1 = concat(%c1, %b1) {axis = 1} : f32[b, c + 7, 128]
        ```

    Options
        `duplicate`: the stacked weight and the single ones are both read, so their bytes are there
        twice, in the bundle and in memory. Without this option the pass only says how many.

    Requires and ensures
        Nothing. Run after `fuse-qkv`, it stacks the fused layers.

    Exactness
        Exact: rows of x and of the weights are computed one by one, in whatever product.

    Limits
        Only weights of one encoding with bit-equal per-weight scalars are stacked with each other;
        NVFP4 layers, each with its own global scale, mostly stay alone. The single weights are no
        views of the stacked one, because engines keep a copy of every constant in the layout of
        the kernel that reads it.
    """

    name = "stack-context-kv"
    options_type = StackContextKvOptions

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Stack every group of layers, or say what it would take."""
        changed = False
        for graph in module.graphs.values():
            rewriter = Rewriter(module, graph, self.name)
            refused: dict[Node, str] = {}
            # What follows the context may begin with a value that is shared in its turn.
            while self._round(rewriter, refused, ctx):
                changed = True
            for node, reason in refused.items():
                if node in graph.nodes:
                    self.remark(ctx, site(graph, node), reason, applied=False)
        return changed

    def _round(self, rewriter: Rewriter, refused: dict[Node, str], ctx: PassContext) -> bool:
        """Stack what is there now, and note why other layers are not stacked."""
        table, changed = rewriter.module.weights, False
        for layers in _shared_contexts(rewriter.module, rewriter.graph):
            for group in _of_one_layout(table, layers):
                first = group[0].root
                what = f"{len(group)} layers over %{_context(group[0]).name}"
                size = sum(table[s].nbytes for s in _symbols(table, group))
                reason = _why_not(table, group)
                if not reason and not self.options.duplicate:
                    reason = f"{what} would store {size} bytes of weights twice, see duplicate"
                if reason:
                    refused[first] = reason
                    continue
                done = f"{what} became one, {size} bytes of weights are stored twice"
                self.remark(ctx, site(rewriter.graph, first), done, applied=True)
                _rewrite(rewriter, group)
                changed = True
        return changed


def _shared_contexts(module: Module, graph: Graph) -> Iterator[list[Match]]:
    """Layers over concatenations that begin with one value; two or more concatenations each."""
    groups: dict[tuple[Value, int], list[Match]] = {}
    for node in graph.nodes:
        found = match(_LAYER, module, graph, node)
        if isinstance(found, Match):
            rows = found["rows"]
            axis = _axis(rows)
            if axis < rows.result.type.rank - 1 and len(rows.operands) > 1:
                groups.setdefault((rows.operands[0], axis), []).append(found)
    yield from (g for g in groups.values() if _concats(g) > 1)


def _of_one_layout(table: WeightTable, layers: Sequence[Match]) -> list[list[Match]]:
    """The layers by what their weights must have in common to be stacked exactly."""
    groups: dict[Hashable, list[Match]] = {}
    for layer in layers:
        symbol = table.resolve(layer.root.weights[0])
        weight = table[symbol]
        scalars: Hashable = None
        if not isinstance(weight.source, Unbound):
            components = weight.encoding.components(weight.shape)
            names = [name for name, component in components.items() if not component.rows]
            parts = table.read(symbol, 0, 1) if names else {}
            scalars = tuple(parts[name].tobytes() for name in names)
        key = (len(layer.root.weights), weight.encoding, scalars)
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def _why_not(table: WeightTable, group: Sequence[Match]) -> str:
    """Why layers of one layout cannot become one; empty when they can."""
    weights = [table[s] for s in _symbols(table, group)]
    if len(group[0].root.weights) > 1:
        return "the layer has a bias"
    if any(isinstance(w.source, Unbound) for w in weights):
        return "a weight is unbound"
    if _concats(group) < 2:
        encoding = weights[0].encoding
        return f"no layer over other rows has a weight in {encoding} with the same scalars"
    try:
        RECIPES["concat_rows"].check(weights, {})
    except ValueError as error:
        return str(error)
    return ""


def _rewrite(rewriter: Rewriter, group: Sequence[Match]) -> None:
    table, context = rewriter.module.weights, _context(group[0])
    first = group[0].root
    name = base = f"{rewriter.graph.name}.{context.name}.stacked"
    taken = 0
    while name in table:
        taken += 1
        name = f"{base}.{taken}"
    stacked = table.derive_shared(name, "concat_rows", tuple(_symbols(table, group)))
    product = rewriter.insert(first, "linear", (context,), (stacked,)).result
    sizes = tuple(int(str(m.root.result.type.shape[-1])) for m in group)
    attrs = SplitAttributes(product.type.rank - 1, sizes)
    pieces = rewriter.insert(first, "split", (product,), attrs=attrs).results
    for layer, piece in zip(group, pieces, strict=True):
        node, rows = layer.root, layer["rows"]
        rest = rows.operands[1:]
        if len(rest) > 1:
            rest = rewriter.insert(node, "concat", rest, attrs=rows.attrs).results
        block = rewriter.insert(node, "linear", rest, node.weights).result
        joined = rewriter.insert(node, "concat", (piece, block), attrs=rows.attrs)
        rewriter.replace(node, joined.results)
    returned = {o.value for o in rewriter.graph.outputs}
    for rows in dict.fromkeys(layer["rows"] for layer in group):
        if not rows.result.uses and rows.result not in returned:
            rewriter.erase(rows)


def _context(layer: Match) -> Value:
    return layer["rows"].operands[0]


def _concats(layers: Sequence[Match]) -> int:
    return len({layer["rows"] for layer in layers})


def _symbols(table: WeightTable, layers: Sequence[Match]) -> list[str]:
    return [table.resolve(layer.root.weights[0]) for layer in layers]


def _axis(concat: Node) -> int:
    assert isinstance(concat.attrs, AxisAttributes)
    return concat.attrs.axis
