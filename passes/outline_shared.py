"""`outline-shared`: a linear weight two graphs use becomes a graph of its own."""

from __future__ import annotations

from edgecc.ir.analysis import ancestors, descendants
from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Input, Module, Node, Output, Value
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.rewriter import clone_nodes
from edgecc.ir.types import SymbolRange, TensorType, sym
from edgecc.passes.base import NoOptions, Pass, PassContext
from edgecc.passes.bind_shared_weights import TARGET, head_of
from edgecc.roles import Role


class OutlineShared(Pass[NoOptions]):
    """Cut graphs at a shared linear layer, so that one engine holds its weight for all of them.

    What it does
        For a weight that linear layers of two or more graphs read, the layer becomes graph
        `lm_head`. Each user graph is cut into what comes before (`NAME.body`), the call of the
        shared graph, and what depends on its result (`NAME.tail`, left out when nothing does); the
        user graph itself keeps its interface and only calls.

    Why
        An engine keeps its own packed copy of a constant weight. As an engine of its own the head
        is resident once, and the head that drafts is the head that verifies, bit for bit.
        Embedding tables need no outlining: engines read rows of one mapped file.

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
        One shared layer per graph: the first in execution order is cut out.
    """

    name = "outline-shared"
    requires = ("heads-bound",)

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Outline every weight that two graphs multiply by."""
        users: dict[tuple[str, ...], list[tuple[Graph, Node]]] = {}
        for graph in module.graphs.values():
            for node in graph.nodes:
                if node.op.name == "linear":
                    key = tuple(module.weights.resolve(w) for w in node.weights)
                    users.setdefault(key, []).append((graph, node))
        changed = False
        for key, sites in users.items():
            graphs = {g.name: (g, n) for g, n in reversed(sites)}
            if len(graphs) < 2 or any(list(g.callees()) for g, _ in graphs.values()):
                continue
            callee = self._shared_graph(module, sites[0][1], key)
            for graph, node in reversed(graphs.values()):
                self._cut(module, graph, node, callee)
            self.remark(ctx, f"@{key[0]}", f"graph @{callee} for {sorted(graphs)}", applied=True)
            module.decisions.append(
                f"{key[0]} runs as its own graph {callee}, called by {', '.join(sorted(graphs))}"
            )
            changed = True
        return changed

    def _shared_graph(self, module: Module, node: Node, weights: tuple[str, ...]) -> str:
        target = module.graphs.get(TARGET)
        head = head_of(target) if target else None
        name = "lm_head" if head in node.weights else "shared"
        while name in module.graphs:
            name += "_"
        x = node.operands[0].type
        for axis in range(x.rank - 1):
            # Any caller's row counts: the widest range any symbol of the module has.
            high = max((r.high for r in module.symbols.values()), default=1)
            module.symbols.setdefault(f"h{axis}", SymbolRange(0, max(high, 64)))
        builder = Builder(module, name)
        builder.location = node.location
        shape = (*(sym(f"h{axis}") for axis in range(x.rank - 1)), x.shape[-1])
        hidden = builder.input("hidden", x.dtype, shape, Role.ACTIVATION)
        logits = builder.op("linear", hidden, weights=weights, name="logits")
        builder.output(logits, "logits", Role.ACTIVATION)
        return name

    def _cut(self, module: Module, graph: Graph, node: Node, callee: str) -> None:
        after = descendants(graph, [node])
        early = [o.value for o in graph.outputs if o.value.producer not in after]
        needed = ancestors(graph, [*node.operands, *early])
        before = [n for n in graph.nodes if n in needed]
        # What only the tail reads moves there, so that no weight ends up in both engines.
        tail_nodes = [n for n in graph.nodes if n not in needed and n is not node]
        made_before = {r for n in before for r in n.results}
        wanted = [o.value for o in graph.outputs]
        for consumer in (node, *tail_nodes):
            wanted += consumer.operands
        body_out = list(dict.fromkeys(v for v in wanted if v in made_before))
        body = self._extract(module, f"{graph.name}.body", before, graph, body_out)
        tail = None
        if tail_nodes:
            made_after = {r for n in tail_nodes for r in n.results}
            outs = list(dict.fromkeys(o.value for o in graph.outputs if o.value in made_after))
            tail = self._extract(module, f"{graph.name}.tail", tail_nodes, graph, outs)
        self._call_all(module, graph, node, callee, body, tail)

    def _extract(
        self, module: Module, name: str, nodes: list[Node], origin: Graph, outputs: list[Value]
    ) -> tuple[Graph, list[Value], list[Value]]:
        """A graph of copies of `nodes`: (graph, values of `origin` it takes, values it returns)."""
        made = {r for n in nodes for r in n.results}
        taken = list(dict.fromkeys(o for n in nodes for o in n.operands if o not in made))
        roles = {i.value: i.role for i in origin.inputs}
        aliases = {o.value: o for o in origin.outputs if o.alias is not None}
        graph = module.graphs.setdefault(name, Graph(name))
        mapping: dict[Value, Value] = {}
        for index, value in enumerate(taken):
            copy = Value(TensorType(value.type.dtype, value.type.shape), value.name, None, index)
            graph.inputs.append(Input(copy, roles.get(value, Role.ACTIVATION)))
            mapping[value] = copy
        mapping = clone_nodes(module, nodes, graph, mapping)
        for value in outputs:
            alias = aliases.get(value)
            label = alias.name if alias else value.name
            names = {o.name for o in graph.outputs}
            while label in names:
                label += "_"
            graph.outputs.append(
                Output(
                    mapping[value],
                    label,
                    alias.role if alias else Role.ACTIVATION,
                    alias.alias if alias else None,
                )
            )
        return graph, taken, outputs

    def _call_all(
        self,
        module: Module,
        graph: Graph,
        node: Node,
        callee: str,
        body: tuple[Graph, list[Value], list[Value]],
        tail: tuple[Graph, list[Value], list[Value]] | None,
    ) -> None:
        operand, old_outputs = node.operands[0], graph.outputs
        for stale in reversed(graph.nodes):
            stale._set_operands(())
        graph.nodes, graph.outputs = [], []
        builder = Builder(module, graph)
        now: dict[Value, Value] = {i.value: i.value for i in graph.inputs}

        def call(name: str, taken: list[Value], returned: list[Value]) -> None:
            made = builder.node(
                "call",
                [now[v] for v in taken],
                attrs=CallAttributes(name),
                names=[v.name for v in returned],
            )
            now.update(zip(returned, made.results, strict=True))

        call(body[0].name, body[1], body[2])
        builder.location = node.location
        call(callee, [operand], [node.result])
        if tail is not None:
            call(tail[0].name, tail[1], tail[2])
        for output in old_outputs:
            graph.outputs.append(Output(now[output.value], output.name, output.role, output.alias))
