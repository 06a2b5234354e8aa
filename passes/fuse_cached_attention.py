"""`fuse-cached-attention`: rotary embedding, cache update and attention as one op."""

from __future__ import annotations

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.types import Dim, symbols_of
from edgecc.passes.base import NoOptions, Pass, PassContext, site


class FuseCachedAttention(Pass[NoOptions]):
    """Merge `rope`, `cache_update` and `attention` into `cached_attention`.

    What it does
        Matches an `attention` whose caches are both updated right before it, from the same start,
        and whose length is that start advanced by the new rows. Rotary embeddings of q and k move
        into the op when both are rotated by the same tables at the positions of their own rows.

    Why
        ONNX Runtime's GroupQueryAttention does all of it in one kernel, writes the caches in place,
        and its cost follows the valid length, not the capacity (60 times faster at capacity 8192).

    Example:
        ```
        %kc = cache_update(%k_cache, %k, %start)
        %vc = cache_update(%v_cache, %v, %start)
        %y = attention(%q, %kc, %vc, %length) {...}
        ```
        becomes
        ```
        %y, %kc, %vc = cached_attention(%q, %k, %v, %k_cache, %v_cache, %start) {...}
        ```

    Options
        None.

    Requires and ensures
        Nothing; the device record says whether it is wanted.

    Exactness
        Exact.

    Limits
        The queries must belong to the last of the new rows, for all sizes of the symbols. Heads
        must have a width that the device's op takes.
    """

    name = "fuse-cached-attention"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Fuse every attention that matches."""
        changed = False
        for graph in module.graphs.values():
            for node in [n for n in graph.nodes if n.op.name == "attention"]:
                where = site(graph, node)
                reason = _too_narrow(node, ctx) or self._fuse(module, graph, node)
                self.remark(ctx, where, reason or "fused", applied=not reason)
                changed |= not reason
        return changed

    def _fuse(self, module: Module, graph: Graph, node: Node) -> str:
        q, k_cache, v_cache, length = node.operands
        k_update, v_update, advance = k_cache.producer, v_cache.producer, length.producer
        if k_update is None or v_update is None or k_update.op.name != "cache_update":
            return "the caches are not updated right before"
        if v_update.op.name != "cache_update" or k_update.operands[2] is not v_update.operands[2]:
            return "the caches are not updated from the same start"
        if k_update is v_update:
            return "keys and values are one cache"
        if k_cache.users() != [node] or v_cache.users() != [node]:
            return "an updated cache has other readers"
        start, k, v = k_update.operands[2], k_update.operands[1], v_update.operands[1]
        if advance is None or advance.op.name != "advance" or advance.operands[0] is not start:
            return "the length is not the start advanced by the new rows"
        if advance.operands[1].type.shape[1] != k.type.shape[1]:
            return "the length does not count the new rows"
        if not _at_least(module, k.type.shape[1], q.type.shape[1]):
            return "there may be more queries than new rows"
        rotary = _rotary(q, k, start)
        weights: tuple[str, ...] = ()
        if rotary is not None:
            q, k, weights = rotary
        attrs = node.attrs
        assert isinstance(attrs, AttentionAttributes)
        rewriter = Rewriter(module, graph, self.name)
        operands = (q, k, v, k_update.operands[0], v_update.operands[0], start)
        fused = rewriter.insert(
            node,
            "cached_attention",
            operands,
            weights=weights,
            attrs=attrs,
            names=(node.result.name, k_cache.name, v_cache.name),
        )
        rewriter.replace(node, (fused.results[0],))
        for update, result in ((k_update, fused.results[1]), (v_update, fused.results[2])):
            rewriter.replace(update, (result,))
        return ""


def _too_narrow(node: Node, ctx: PassContext) -> str:
    """Why the device's fused op does not take heads of this width, if so."""
    attrs, width = node.attrs, node.operands[0].type.shape[-1]
    assert isinstance(attrs, AttentionAttributes)
    if ctx.device is None or not isinstance(width, int):
        return ""
    multiple, head = ctx.device.head_multiple, width // attrs.heads
    return f"heads are {head} wide, not a multiple of {multiple}" if head % multiple else ""


def _at_least(module: Module, rows: Dim, wanted: Dim) -> bool:
    """Whether `rows >= wanted` for all values the symbols can have."""
    extra = rows - wanted
    if isinstance(extra, int):
        return extra >= 0
    if not symbols_of([extra]) <= module.symbols.keys():
        return False
    ranges = [(module.symbols[s], c) for s, c in extra.terms]
    return extra.constant + sum(c * (r.low if c > 0 else r.high) for r, c in ranges) >= 0


def _rotary(q: Value, k: Value, start: Value) -> tuple[Value, Value, tuple[str, ...]] | None:
    """Unrotated q and k and the tables, when both are rotated at the positions of their rows."""
    q_rope, k_rope = q.producer, k.producer
    if q_rope is None or k_rope is None or q_rope.op.name != "rope" or k_rope.op.name != "rope":
        return None
    if q_rope.weights != k_rope.weights or not _counts_from(k_rope.operands[1], start):
        return None
    q_positions, k_positions = q_rope.operands[1], k_rope.operands[1]
    tail = q_positions.producer
    same = q_positions is k_positions or (
        tail is not None and tail.op.name == "tail" and tail.operands[0] is k_positions
    )
    if not same and not (_counts_from(q_positions, start) and q.type.shape[1] == k.type.shape[1]):
        return None
    return q_rope.operands[0], k_rope.operands[0], q_rope.weights


def _counts_from(positions: Value, start: Value) -> bool:
    node = positions.producer
    return node is not None and node.op.name == "position_ids" and node.operands[0] is start
