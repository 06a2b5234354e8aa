"""`outline-shared`: a linear weight two graphs use becomes a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.ir.analysis import ancestors, descendants, live_nodes
from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Input, Location, Module, Node, Output, Value
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.rewriter import clone_nodes
from edgecc.ir.types import DimExpr, DType, SymbolRange, TensorType, sym, symbols_of
from edgecc.passes.base import NoOptions, Pass, PassContext
from edgecc.passes.bind_shared_weights import TARGET, head_of
from edgecc.roles import Role

Key = tuple[tuple[str, ...], int, DType]
"""Resolved weights of a linear layer, rank and element type of its input."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Nodes that become a graph, the values they read and the values others want from them."""

    name: str
    nodes: list[Node]
    taken: list[Value]
    returned: list[Value]

    def loose_symbols(self) -> frozenset[str]:
        """Symbols of its types that no input fixes: a call could not tell their values."""
        taken = [d for v in self.taken for d in v.type.shape if isinstance(d, DimExpr)]
        fixed = {d.terms[0][0] for d in taken if len(d.terms) == 1 and d.terms[0][1] == 1}
        values = (*self.taken, *self.returned)
        return symbols_of(d for v in values for d in v.type.shape) - fixed


class OutlineShared(Pass[NoOptions]):
    """Cut graphs at a shared linear layer, so that one engine holds its weight for all of them.

    What it does
        For a weight that linear layers of two or more graphs read, the layer becomes graph
        `lm_head`. Each user graph is cut into what comes before (`NAME.body`), the call of the
        shared graph, and the rest (`NAME.tail`); parts without nodes are left out. The user graph
        itself keeps its interface and only calls.

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
        for key in sorted(users, key=lambda k: -module.weights[k[0][0]].nbytes):
            where = f"@{key[0][0]}"
            sites: dict[str, tuple[Graph, Node]] = {}
            for graph, node in users[key]:
                sites.setdefault(graph.name, (graph, node))
            if len(sites) < 2:
                continue
            if any(list(graph.callees()) for graph, _ in sites.values()):
                self.remark(ctx, where, "a graph is cut at another layer", applied=False)
                continue
            cuts = [
                (graph, node, self._plan(module, graph, node)) for graph, node in sites.values()
            ]
            loose = {s for *_, pieces in cuts for p in pieces if p for s in p.loose_symbols()}
            if loose:
                reason = f"no input of a part would fix {', '.join(sorted(loose))}"
                self.remark(ctx, where, reason, applied=False)
                continue
            callee = self._shared_graph(module, users[key][0][1], key[0])
            for graph, node, (body, tail) in cuts:
                self._cut(module, graph, node, callee, body, tail)
            self.remark(
                ctx,
                where,
                f"graph @{callee} for {', '.join(f'@{s}' for s in sorted(sites))}",
                applied=True,
            )
            if len(users[key]) > len(sites):
                self.remark(ctx, where, "a graph uses it more than once", applied=False)
            module.decisions.append(
                f"{key[0][0]} runs as its own graph {callee}, called by {', '.join(sorted(sites))}"
            )
            changed = True
        return changed

    def _users(self, module: Module) -> dict[Key, list[tuple[Graph, Node]]]:
        """The linear layers of all graphs that are not cut yet, by what would be shared."""
        users: dict[Key, list[tuple[Graph, Node]]] = {}
        for graph in module.entries():
            if list(graph.callees()):
                continue
            live = live_nodes(graph)
            for node in graph.nodes:
                if node.op.name == "linear" and node in live:
                    weights = tuple(module.weights.resolve(w) for w in node.weights)
                    x = node.operands[0].type
                    users.setdefault((weights, x.rank, x.dtype), []).append((graph, node))
        return users

    def _shared_graph(self, module: Module, node: Node, weights: tuple[str, ...]) -> str:
        target = module.graphs.get(TARGET)
        head = head_of(target) if target else None
        is_head = head is not None and module.weights.resolve(head) == weights[0]
        name = _unique("lm_head" if is_head else "shared", set(module.graphs))
        x = node.operands[0].type
        for axis in range(x.rank - 1):
            # Any caller's row counts: the widest range any symbol of the module has.
            high = max((r.high for r in module.symbols.values()), default=1)
            module.symbols.setdefault(f"h{axis}", SymbolRange(0, max(high, 64)))
        builder = Builder(module, name)
        builder.location = Location(node.location.origin, (*node.location.passes, self.name))
        shape = (*(sym(f"h{axis}") for axis in range(x.rank - 1)), x.shape[-1])
        hidden = builder.input("hidden", x.dtype, shape, Role.ACTIVATION)
        logits = builder.op("linear", hidden, weights=weights, name="logits")
        builder.output(logits, "logits", Role.ACTIVATION)
        return name

    def _plan(
        self, module: Module, graph: Graph, node: Node
    ) -> tuple[_Piece | None, _Piece | None]:
        """What runs before the layer and what runs after it."""
        after = descendants(graph, [node])
        early = [o.value for o in graph.outputs if o.value.producer not in after]
        needed = ancestors(graph, [*node.operands, *early])
        live = live_nodes(graph)
        before = [n for n in graph.nodes if n in needed]
        # What only the tail reads moves there, so that no weight ends up in both engines.
        rest = [n for n in graph.nodes if n in live and n not in needed and n is not node]
        wanted = [o.value for o in graph.outputs]
        body = self._piece(
            _unique(f"{graph.name}.body", set(module.graphs)),
            before,
            [*wanted, *node.operands, *(o for n in rest for o in n.operands)],
        )
        tail = self._piece(_unique(f"{graph.name}.tail", set(module.graphs)), rest, wanted)
        return body, tail

    def _piece(self, name: str, nodes: list[Node], wanted: list[Value]) -> _Piece | None:
        made = {r for n in nodes for r in n.results}
        taken = list(dict.fromkeys(o for n in nodes for o in n.operands if o not in made))
        returned = list(dict.fromkeys(v for v in wanted if v in made))
        return _Piece(name, nodes, taken, returned) if nodes else None

    def _extract(self, module: Module, piece: _Piece, origin: Graph) -> None:
        """Add the graph of a piece to the module: copies of its nodes."""
        roles = {i.value: i.role for i in origin.inputs}
        aliases = {o.value: o for o in origin.outputs if o.alias is not None}
        graph = module.graphs.setdefault(piece.name, Graph(piece.name))
        mapping: dict[Value, Value] = {}
        names = {v.name for v in piece.taken if v in roles}
        for index, value in enumerate(piece.taken):
            name = value.name if value in roles else _unique(value.name, names)
            names.add(name)
            copy = Value(TensorType(value.type.dtype, value.type.shape), name, None, index)
            graph.inputs.append(Input(copy, roles.get(value, Role.ACTIVATION)))
            mapping[value] = copy
        mapping = clone_nodes(module, piece.nodes, graph, mapping)
        buffers = {v.name for v in piece.taken if v in roles}
        labels: set[str] = set()
        for value in piece.returned:
            alias = aliases.get(value)
            label = _unique(alias.name if alias else value.name, labels)
            labels.add(label)
            role = alias.role if alias else Role.ACTIVATION
            buffer = alias.alias if alias and alias.alias in buffers else None
            graph.outputs.append(Output(mapping[value], label, role, buffer))

    def _cut(
        self,
        module: Module,
        graph: Graph,
        node: Node,
        callee: str,
        body: _Piece | None,
        tail: _Piece | None,
    ) -> None:
        """Replace the nodes of a graph by calls."""
        for piece in (body, tail):
            if piece is not None:
                self._extract(module, piece, graph)
        operand, old_outputs = node.operands[0], graph.outputs
        for stale in graph.nodes:
            stale._set_operands(())
        graph.nodes.clear()
        graph.outputs = []
        builder = Builder(module, graph)
        location = Location(node.location.origin, (*node.location.passes, self.name))
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
        call(callee, [operand], [node.result])
        builder.location = Location("", (self.name,))
        if tail is not None:
            call(tail.name, tail.taken, tail.returned)
        for output in old_outputs:
            graph.outputs.append(Output(now[output.value], output.name, output.role, output.alias))


def _unique(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
