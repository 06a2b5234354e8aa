"""`fuse-gate-up`: one product for both halves of a gated MLP."""

from __future__ import annotations

from edgecc.ir.core import Graph, Module, Node
from edgecc.passes.base import NoOptions, Pass, PassContext, site
from edgecc.passes.fuse_linears import fuse, why_not_fusable


class FuseGateUp(Pass[NoOptions]):
    """Stack the gate and up projections of a gated MLP into one linear layer.

    What it does
        `swiglu(linear(x, G), linear(x, U))` becomes `swiglu` of the two pieces of
        `linear(x, [G; U])`.

    Why
        One larger product uses caches and threads better than two, and an engine starts one kernel
        less.

    Example:
        ```
        %g = linear(%x, @gate) : f32[b, t, 768]
        %u = linear(%x, @up) : f32[b, t, 768]
        %y = swiglu(%g, %u) : f32[b, t, 768]
        ```
        becomes
        ```
        %gu = linear(%x, @gate+up) : f32[b, t, 1536]
        %g, %u = split(%gu) {axis = 2, sizes = [768, 768]} : f32[b, t, 768], f32[b, t, 768]
        %y = swiglu(%g, %u) : f32[b, t, 768]
        ```

    Options
        None.

    Requires and ensures
        Nothing.

    Exactness
        Exact: rows of the weight are only stacked.

    Limits
        Needs one encoding, bit-equal per-weight scalars, and weights nothing else reads; says why
        when it does not apply.
    """

    name = "fuse-gate-up"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Fuse below every `swiglu`."""
        changed = False
        for graph in module.graphs.values():
            for node in [n for n in graph.nodes if n.op.name == "swiglu"]:
                changed |= self._fuse(module, graph, node, ctx)
        return changed

    def _fuse(self, module: Module, graph: Graph, node: Node, ctx: PassContext) -> bool:
        layers = [o.producer for o in node.operands]
        linears = [p for p in layers if p is not None and p.op.name == "linear"]
        if len(linears) != 2 or linears[0] is linears[1]:
            return False
        where = site(graph, node)
        reason = why_not_fusable(module, linears)
        if reason:
            self.remark(ctx, where, reason, applied=False)
            return False
        fused = fuse(module, graph, linears, self.name)
        self.remark(ctx, where, f"@{fused.weights[0]}", applied=True)
        return True
