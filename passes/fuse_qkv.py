"""`fuse-qkv`: one product for the query, key and value projections of an attention layer."""

from __future__ import annotations

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.passes.base import NoOptions, Pass, PassContext, site
from edgecc.passes.fuse_linears import fuse, why_not_fusable

_PASS_THROUGH = ("rms_norm", "rope")


class FuseQkv(Pass[NoOptions]):
    """Stack the projections that feed one attention into one linear layer.

    What it does
        Follows q, k and v of an `attention` back through per-head norms and rotary embedding to
        their linear layers, and stacks those that read the same value. In a block draft, where
        keys and values also cover the context rows and queries do not, k and v are stacked and q
        stays alone.

    Why
        One larger product instead of three small ones; k and v are narrow in grouped-query
        attention, so alone they use a fraction of the machine.

    Example:
        ```
        %q = linear(%x, @q_proj) : f32[b, t, 512]
        %k = linear(%x, @k_proj) : f32[b, t, 128]
        %v = linear(%x, @v_proj) : f32[b, t, 128]
        ```
        becomes
        ```
        %qkv = linear(%x, @q_proj+k_proj+v_proj) : f32[b, t, 768]
        %q, %k, %v = split(%qkv) {axis = 2, sizes = [512, 128, 128]} : ...
        ```

    Options
        None.

    Requires and ensures
        Runs before `fuse-cached-attention`; works on unfused `attention`.

    Exactness
        Exact: rows of the weight are only stacked, in the order q, k, v.

    Limits
        Needs one encoding, bit-equal per-weight scalars, and weights nothing else reads; says why
        when it does not apply.
    """

    name = "fuse-qkv"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Fuse above every `attention`."""
        changed = False
        for graph in module.graphs.values():
            for node in [n for n in graph.nodes if n.op.name == "attention"]:
                changed |= self._fuse(module, graph, node, ctx)
        return changed

    def _fuse(self, module: Module, graph: Graph, node: Node, ctx: PassContext) -> bool:
        layers = [p for p in map(_projection, node.operands[:3]) if p is not None]
        groups: dict[Value, list[Node]] = {}
        for layer in dict.fromkeys(layers):
            groups.setdefault(layer.operands[0], []).append(layer)
        changed = False
        for group in groups.values():
            if len(group) < 2:
                continue
            where = site(graph, node)
            reason = why_not_fusable(module, group)
            if reason:
                self.remark(ctx, where, reason, applied=False)
                continue
            fused = fuse(module, graph, group, self.name)
            self.remark(ctx, where, f"@{fused.weights[0]}", applied=True)
            changed = True
        return changed


def _projection(value: Value) -> Node | None:
    """The linear layer a query, key or value comes from."""
    node = value.producer
    while node is not None and node.op.name in (*_PASS_THROUGH, "cache_update"):
        source = node.operands[1] if node.op.name == "cache_update" else node.operands[0]
        node = source.producer
    return node if node is not None and node.op.name == "linear" else None
