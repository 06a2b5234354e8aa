"""`cse`: equal nodes of a graph become one."""

from __future__ import annotations

from collections.abc import Hashable

from edgecc.ir.core import Graph, Module, Node
from edgecc.ir.ops.base import Trait
from edgecc.ir.rewriter import Rewriter
from edgecc.passes.base import NoOptions, Pass, PassContext, site


class Cse(Pass[NoOptions]):
    """Compute equal expressions once.

    What it does
        Walks each graph in execution order and replaces a node by an earlier one that computes the
        same: same op, operands, weights (aliases followed) and attributes. Operands of commutative
        ops count in any order. The first node keeps its place, names and location; users of the
        second read the first, so that nodes that become equal by this are found in the same walk.

    Why
        Frontends state what each layer needs, such as positions and lengths, without looking at
        what the layer before has computed; unrolling repeats what does not depend on the step.

    Example:
        ```
        %a = linear(%x, @w) : f32[b, t, 8]
        %b = linear(%x, @w) : f32[b, t, 8]
        %y = add(%a, %b) : f32[b, t, 8]
        ```
        becomes
        ```
        %a = linear(%x, @w) : f32[b, t, 8]
        %y = add(%a, %a) : f32[b, t, 8]
        ```

    Options
        None.

    Requires and ensures
        Nothing. Run after `dedupe-weights`, more nodes are equal.

    Exactness
        Exact. If both operands of an `add` or `mul` are NaN, the bits of the NaN may differ.

    Limits
        Within one graph. Values that overwrite an input keep their own node, because each has a
        buffer of its own. Weights are compared by symbol, so a head bound with
        `bind-shared-weights{copy=true}` stays a second head.
    """

    name = "cse"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """One walk over each graph; time grows with the number of nodes."""
        changed = False
        for graph in module.graphs.values():
            changed |= self._run(module, graph, ctx)
        return changed

    def _run(self, module: Module, graph: Graph, ctx: PassContext) -> bool:
        rewriter = Rewriter(module, graph, self.name)
        pinned = {o.value.producer for o in graph.outputs if o.alias is not None}
        known: dict[Hashable, Node] = {}
        changed = False
        for node in list(graph.nodes):
            if node in pinned:
                continue
            first = known.setdefault(_key(module, node), node)
            if first is not node:
                self.remark(ctx, site(graph, node), f"equals {first!r}", applied=True)
                rewriter.replace(node, first.results)
                changed = True
        return changed


def _key(module: Module, node: Node) -> Hashable:
    """What two nodes have in common exactly when they compute the same."""
    operands: Hashable = node.operands
    if Trait.COMMUTATIVE in node.op.traits:
        operands = frozenset((o, node.operands.count(o)) for o in node.operands)
    weights = tuple(module.weights.resolve(w) for w in node.weights)
    # As text, because 0.0 equals -0.0 and no NaN equals itself.
    return node.op.name, operands, weights, repr(node.attrs)
