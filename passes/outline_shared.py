"""`outline-shared`: a linear weight two graphs use becomes a graph of its own."""

from __future__ import annotations

from edgecc.ir.analysis import ancestors, descendants, live_nodes
from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Location, Module, Node, Output, Value
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.types import DType, SymbolRange, sym
from edgecc.passes.base import NoOptions, Pass, PassContext
from edgecc.passes.bind_shared_weights import TARGET, head_of
from edgecc.passes.outlining import Piece, extract, piece_of, unique
from edgecc.roles import Role

Layer = tuple[Node, ...]
"""A linear layer, after the op that quantizes its input if no other layer reads that."""

Key = tuple[tuple[tuple[str, ...], ...], tuple[Attributes, ...], int, DType]
"""Resolved weights and attributes of a layer's ops, rank and element type of its input."""


class OutlineShared(Pass[NoOptions]):
    """Cut graphs at a shared linear layer, so that one engine holds its weight for all of them.

    What it does
        For a weight that linear layers of two or more graphs read, the layer becomes graph
        `lm_head`, together with the `fake_quantize` of its input. Each user graph is cut into what
        comes before (`NAME.body`), the call of the shared graph, and the rest (`NAME.tail`); parts
        without nodes are left out. The user graph itself keeps its interface and only calls.

    Why
        An engine keeps its own packed copy of a constant weight. As an engine of its own the head
        is resident once, and the head that drafts is the head that verifies, bit for bit.
        Embedding tables need no outlining: engines read rows of one mapped file, or of one buffer
        that all of them bind.

    Example:
        ```
        graph @draft(...) { ...; %base = linear(%z, @head); ...; return %tokens }
        ```
        becomes
        ```
        graph @lm_head(%hidden) { %logits = linear(%hidden, @head); return %logits }
        graph @draft(...) {
          %z, ... = call(...) {callee = "draft.body"}
          %base = call(%z) {callee = "lm_head"}
          %tokens = call(%base, ...) {callee = "draft.tail"}
          return %tokens
        }
        ```

    Options
        None.

    Requires and ensures
        Requires `heads-bound`.

    Exactness
        Exact.

    Limits
        One shared layer per graph, the one with the largest weight, where it is used first. Cuts
        through values whose sizes do not tell those of their symbols are not made.
    """

    name = "outline-shared"
    requires = ("heads-bound",)

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Outline every weight that two graphs multiply by."""
        users = self._users(module)
        changed = False
        for key in sorted(users, key=lambda k: -module.weights[k[0][-1][0]].nbytes):
            weight = key[0][-1][0]
            where = f"@{weight}"
            sites: dict[str, tuple[Graph, Layer]] = {}
            for graph, layer in users[key]:
                sites.setdefault(graph.name, (graph, layer))
            if len(sites) < 2:
                continue
            if any(list(graph.callees()) for graph, _ in sites.values()):
                self.remark(ctx, where, "a graph is cut at another layer", applied=False)
                continue
            cuts = [
                (graph, layer, self._plan(module, graph, layer)) for graph, layer in sites.values()
            ]
            loose = {s for *_, pieces in cuts for p in pieces if p for s in p.loose_symbols()}
            if loose:
                reason = f"no input of a part would fix {', '.join(sorted(loose))}"
                self.remark(ctx, where, reason, applied=False)
                continue
            callee = self._shared_graph(module, users[key][0][1], key[0])
            for graph, layer, (body, tail) in cuts:
                self._cut(module, graph, layer, callee, body, tail)
            self.remark(
                ctx,
                where,
                f"graph @{callee} for {', '.join(f'@{s}' for s in sorted(sites))}",
                applied=True,
            )
            if len(users[key]) > len(sites):
                self.remark(ctx, where, "a graph uses it more than once", applied=False)
            module.decisions.append(
                f"{weight} runs as its own graph {callee}, called by {', '.join(sorted(sites))}"
            )
            changed = True
        return changed

    def _users(self, module: Module) -> dict[Key, list[tuple[Graph, Layer]]]:
        """The linear layers of all graphs that are not cut yet, by what would be shared."""
        users: dict[Key, list[tuple[Graph, Layer]]] = {}
        for graph in module.entries():
            if list(graph.callees()):
                continue
            live = live_nodes(graph)
            for node in graph.nodes:
                if node.op.name == "linear" and node in live:
                    layer = _layer(graph, node)
                    weights = tuple(tuple(map(module.weights.resolve, n.weights)) for n in layer)
                    attrs, x = tuple(n.attrs for n in layer), layer[0].operands[0].type
                    key = (weights, attrs, x.rank, x.dtype)
                    users.setdefault(key, []).append((graph, layer))
        return users

    def _shared_graph(
        self, module: Module, layer: Layer, weights: tuple[tuple[str, ...], ...]
    ) -> str:
        target = module.graphs.get(TARGET)
        head = head_of(target) if target else None
        is_head = head is not None and module.weights.resolve(head) == weights[-1][0]
        name = unique("lm_head" if is_head else "shared", set(module.graphs))
        x, location = layer[0].operands[0].type, layer[-1].location
        for axis in range(x.rank - 1):
            # Any caller's row counts: the widest range any symbol of the module has.
            high = max((r.high for r in module.symbols.values()), default=1)
            module.symbols.setdefault(f"h{axis}", SymbolRange(0, max(high, 64)))
        builder = Builder(module, name)
        builder.location = Location(location.origin, (*location.passes, self.name))
        shape = (*(sym(f"h{axis}") for axis in range(x.rank - 1)), x.shape[-1])
        value = builder.input("hidden", x.dtype, shape, Role.ACTIVATION)
        for node, symbols in zip(layer, weights, strict=True):
            label = "logits" if node is layer[-1] else node.result.name
            value = builder.op(node.op.name, value, weights=symbols, attrs=node.attrs, name=label)
        builder.output(value, "logits", Role.ACTIVATION)
        return name

    def _plan(
        self, module: Module, graph: Graph, layer: Layer
    ) -> tuple[Piece | None, Piece | None]:
        """What runs before the layer and what runs after it."""
        after = descendants(graph, [layer[-1]])
        early = [o.value for o in graph.outputs if o.value.producer not in after]
        needed = ancestors(graph, [*layer[0].operands, *early])
        live = live_nodes(graph)
        before = [n for n in graph.nodes if n in needed]
        # What only the tail reads moves there, so that no weight ends up in both engines.
        rest = [n for n in graph.nodes if n in live and n not in needed and n not in layer]
        wanted = [o.value for o in graph.outputs]
        read = [*wanted, *layer[0].operands, *(o for n in rest for o in n.operands)]
        taken = set(module.graphs)
        body, tail = (unique(f"{graph.name}.{part}", taken) for part in ("body", "tail"))
        return (
            piece_of(body, before, read) if before else None,
            piece_of(tail, rest, wanted) if rest else None,
        )

    def _cut(
        self,
        module: Module,
        graph: Graph,
        layer: Layer,
        callee: str,
        body: Piece | None,
        tail: Piece | None,
    ) -> None:
        """Replace the nodes of a graph by calls."""
        for piece in (body, tail):
            if piece is not None:
                extract(module, piece, graph)
        operand, old_outputs = layer[0].operands[0], graph.outputs
        origin, result = layer[-1].location, layer[-1].result
        for stale in graph.nodes:
            stale._set_operands(())
        graph.nodes.clear()
        graph.outputs = []
        builder = Builder(module, graph)
        location = Location(origin.origin, (*origin.passes, self.name))
        builder.location = Location("", (self.name,))
        now: dict[Value, Value] = {i.value: i.value for i in graph.inputs}

        def call(name: str, taken: list[Value], returned: list[Value]) -> None:
            made = builder.node(
                "call",
                [now[v] for v in taken],
                attrs=CallAttributes(name),
                names=[v.name for v in returned],
            )
            now.update(zip(returned, made.results, strict=True))

        if body is not None:
            call(body.name, body.taken, body.returned)
        builder.location = location
        call(callee, [operand], [result])
        builder.location = Location("", (self.name,))
        if tail is not None:
            call(tail.name, tail.taken, tail.returned)
        for output in old_outputs:
            graph.outputs.append(Output(now[output.value], output.name, output.role, output.alias))


def _layer(graph: Graph, node: Node) -> Layer:
    first = node.operands[0].producer
    if first is None or first.op.name != "fake_quantize":
        return (node,)
    shared = first.result.users() != [node] or any(o.value is first.result for o in graph.outputs)
    return (node,) if shared else (first, node)
