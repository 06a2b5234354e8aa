"""`outline-shared`: a linear layer that is used more than once becomes a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgecc.ir.analysis import live_nodes
from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Location, Module, Node, Output, Value
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.types import DType, SymbolRange, sym
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.bind_shared_weights import TARGET, head_of
from edgecc.passes.cutting import Layer, cut, extract_all
from edgecc.passes.outlining import Piece, unique
from edgecc.roles import Role

Key = tuple[tuple[tuple[str, ...], ...], tuple[Attributes, ...], int, DType]
"""Resolved weights and attributes of a layer's ops, rank and element type of its input."""


@dataclass(frozen=True, slots=True)
class OutlineSharedOptions:
    """Options of `outline-shared`.

    Attributes:
        steps: Also cut a graph at a layer that chooses a token in each of its steps.
    """

    steps: bool = False


class OutlineShared(Pass[OutlineSharedOptions]):
    """Cut graphs at a shared linear layer, so that one engine holds its weight for all of them.

    What it does
        For a weight that linear layers of two or more graphs read, the layer becomes graph
        `lm_head`, together with the `fake_quantize` of its input. Each user graph is cut into what
        comes before (`NAME.body`), the call of the shared graph, and the rest (`NAME.tail`); where
        it uses the layer again, into what lies between (`NAME.step1` ...). Parts without nodes are
        left out, parts that compute the same are one graph. Caches stay in their buffers from part
        to part. The user graph itself keeps its interface and only calls. With `steps` so is a
        graph that runs step after step, each of which chooses a token with one layer of its own.

    Why
        An engine keeps its own packed copy of a constant weight. As an engine of its own the head
        is resident once, and the head that drafts is the head that verifies, bit for bit.
        Embedding tables need no outlining: engines read rows of one mapped file, or of one buffer
        that all of them bind. Where attention updates its caches in place, it can do so in each
        step only if the step is a call: within one graph each step makes a copy of the caches.

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
        `steps`: also cut a graph at a layer that chooses a token in each of its steps.

    Requires and ensures
        Requires `heads-bound`.

    Exactness
        Exact.

    Limits
        One shared layer per graph, the one with the largest weight. Cuts through values whose
        sizes do not tell those of their symbols are not made.
    """

    name = "outline-shared"
    requires = ("heads-bound",)
    options_type = OutlineSharedOptions

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Outline every weight that two graphs multiply by, or several steps of one."""
        users = self._users(module)
        changed = False
        for key in sorted(users, key=lambda k: -module.weights[k[0][-1][0]].nbytes):
            weight = key[0][-1][0]
            where = f"@{weight}"
            sites: dict[str, tuple[Graph, list[Layer]]] = {}
            for graph, layer in users[key]:
                sites.setdefault(graph.name, (graph, []))[1].append(layer)
            if len(sites) < 2 and not (self.options.steps and _steps(users[key])):
                continue
            if any(list(graph.callees()) for graph, _ in sites.values()):
                self.remark(ctx, where, "a graph is cut at another layer", applied=False)
                continue
            cuts = [(graph, layers, cut(module, graph, layers)) for graph, layers in sites.values()]
            loose = {s for *_, pieces in cuts for p in pieces if p for s in p.loose_symbols()}
            if loose:
                reason = f"no input of a part would fix {', '.join(sorted(loose))}"
                self.remark(ctx, where, reason, applied=False)
                continue
            owner = next(iter(sites)) if len(sites) == 1 else ""
            callee = self._shared_graph(module, users[key][0][1], key[0], owner)
            for graph, layers, pieces in cuts:
                self._call(module, graph, layers, callee, pieces)
            self.remark(
                ctx,
                where,
                f"graph @{callee} for {', '.join(f'@{s}' for s in sorted(sites))}",
                applied=True,
            )
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
        self, module: Module, layer: Layer, weights: tuple[tuple[str, ...], ...], owner: str
    ) -> str:
        target = module.graphs.get(TARGET)
        head = head_of(target) if target else None
        is_head = head is not None and module.weights.resolve(head) == weights[-1][0]
        name = f"{owner}.lm_head" if owner else "lm_head" if is_head else "shared"
        name = unique(name, set(module.graphs))
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

    def _call(
        self,
        module: Module,
        graph: Graph,
        layers: Sequence[Layer],
        callee: str,
        pieces: Sequence[Piece | None],
    ) -> None:
        """Make graphs of the pieces, and replace the nodes of the graph by calls."""
        made = extract_all(module, graph, [p for p in pieces if p is not None])
        old_outputs = graph.outputs
        shared = [(layer[0].operands[0], layer[-1].result, layer[-1].location) for layer in layers]
        for stale in graph.nodes:
            stale._set_operands(())
        graph.nodes.clear()
        graph.outputs = []
        builder = Builder(module, graph)
        now: dict[Value, Value] = {i.value: i.value for i in graph.inputs}

        def call(name: str, taken: Sequence[Value], results: Sequence[Value | None]) -> None:
            node = builder.node(
                "call",
                [now[v] for v in taken],
                attrs=CallAttributes(name),
                names=["unused" if v is None else v.name for v in results],
            )
            pairs = zip(results, node.results, strict=True)
            now.update({v: result for v, result in pairs if v is not None})

        for index, piece in enumerate(pieces):
            builder.location = Location("", (self.name,))
            if piece is not None:
                call(made[piece][0], piece.taken, made[piece][1])
            if index < len(shared):
                operand, result, origin = shared[index]
                builder.location = Location(origin.origin, (*origin.passes, self.name))
                call(callee, [operand], [result])
        for output in old_outputs:
            graph.outputs.append(Output(now[output.value], output.name, output.role, output.alias))


def _steps(uses: Sequence[tuple[Graph, Layer]]) -> bool:
    """Whether a layer is used more than once, each time to choose a token."""
    results = [layer[-1].result for _, layer in uses]
    return len(uses) > 1 and all(
        any(user.op.name == "argmax" for user in result.users()) for result in results
    )


def _layer(graph: Graph, node: Node) -> Layer:
    first = node.operands[0].producer
    if first is None or first.op.name != "fake_quantize":
        return (node,)
    shared = first.result.users() != [node] or any(o.value is first.result for o in graph.outputs)
    return (node,) if shared else (first, node)
