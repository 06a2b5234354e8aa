"""`dce`: remove what no output needs."""

from __future__ import annotations

from edgecc.ir.analysis import live_nodes
from edgecc.ir.core import Module
from edgecc.ir.rewriter import Rewriter
from edgecc.passes.base import NoOptions, Pass, PassContext


class Dce(Pass[NoOptions]):
    """Remove dead nodes, graphs that are no longer called, and unused weights.

    What it does
        Erases nodes no graph output depends on, then graphs whose last call was among them, then
        weights that no node reads and no other weight is made from. Graph inputs stay: they are the
        contract with the runtime.

    Why
        Passes leave old nodes and weights behind on purpose; unread weights would be written to the
        bundle.

    Example:
        ```
        %a = linear(%x, @w0) : f32[b, t, 8]
        %b = linear(%x, @w1) : f32[b, t, 8]
        return a = %a
        ```
        loses `%b` and `@w1`.

    Options
        None.

    Requires and ensures
        Nothing.

    Exactness
        Exact.

    Limits
        Unused inputs are kept.
    """

    name = "dce"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Erase from the last node to the first, then sweep graphs and weights."""
        changed = False
        entries = {graph.name for graph in module.entries()}
        for graph in module.graphs.values():
            live = live_nodes(graph)
            rewriter = Rewriter(module, graph, self.name)
            for node in reversed(list(graph.nodes)):
                if node not in live:
                    rewriter.erase(node)
                    changed = True
        self._sweep_graphs(module, entries)
        return self._sweep_weights(module) or changed

    def _sweep_graphs(self, module: Module, entries: set[str]) -> None:
        """Remove graphs that were called before: only dead nodes did."""
        while uncalled := [g.name for g in module.entries() if g.name not in entries]:
            for name in uncalled:
                del module.graphs[name]

    def _sweep_weights(self, module: Module) -> bool:
        table = module.weights
        used: set[str] = set()
        for graph in module.graphs.values():
            for symbol in graph.used_weights():
                used.update(table.dependencies(symbol))
        dead = [s for s in table if s not in used]
        for symbol in dead:
            table.remove(symbol)
        return bool(dead)
