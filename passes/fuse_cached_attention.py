"""`fuse-cached-attention`: rotary embedding, cache update and attention as one op."""

from __future__ import annotations

from edgecc.devices import Device
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.patterns import Match, op, var
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.rules import Rule
from edgecc.ir.types import Dim, symbols_of
from edgecc.passes.base import NoOptions, PassContext
from edgecc.passes.rewrite import RewritePass


class FuseCachedAttention(RewritePass[NoOptions]):
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
        Exact. Rotary embeddings that give 16 bits stay outside: they are rounded before attention
        reads them, within the op they would not be.

    Limits
        The queries must belong to the last of the new rows, for all sizes of the symbols. Heads
        must have a width that the device's op takes; rotary embeddings stay outside when it does
        not take as many rotated dims. Where a call may have several sequences, the caches must be
        inputs of the graph: the kernel wants them apart, and what is computed is together. For the
        same reason no graph of the entry may only write to its caches.
    """

    name = "fuse-cached-attention"

    def rules(self, module: Module, ctx: PassContext) -> list[Rule]:
        """One rule, rooted at `attention`."""
        return [UpdatedCaches(ctx.device)]


class UpdatedCaches(Rule):
    """An attention over caches that were just updated from one start."""

    pattern = op(
        "attention",
        var("q"),
        op("cache_update", var("k_cache"), var("k"), var("start"), label="keys", only_user=True),
        op("cache_update", var("v_cache"), var("v"), var("start"), label="values", only_user=True),
        op("advance", var("start"), var("rows")),
    )
    explains = True

    def __init__(self, device: Device | None) -> None:
        self.device = device

    def check(self, match: Match) -> str:
        """What the fused op takes for granted."""
        q, k, rows = (match.value(name) for name in ("q", "k", "rows"))
        if match["keys"] is match["values"]:
            return "keys and values are one cache"
        if rows.type.shape[1] != k.type.shape[1]:
            return "the length does not count the new rows"
        if not _at_least(match.module, k.type.shape[1], q.type.shape[1]):
            return "there may be more queries than new rows"
        caches = match.value("k_cache"), match.value("v_cache")
        if _several(match.module) and any(c.producer is not None for c in caches):
            return "the caches are no inputs, and a call may have several sequences"
        if _several(match.module) and _only_written(match.module, match.graph):
            return (
                "a graph of the entry only writes to caches, and a call may have several sequences"
            )
        return _too_narrow(match.root, self.device)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        """One op with three results; rotary embeddings move into it where they can."""
        q, k, start = (match.value(name) for name in ("q", "k", "start"))
        weights: tuple[str, ...] = ()
        rotary = _rotary(q, k, start)
        if rotary is not None and self._rotates(match.module, rotary[2]):
            q, k, weights = rotary
        keys, values = match["keys"], match["values"]
        fused = rewriter.insert(
            match.root,
            "cached_attention",
            (q, k, match.value("v"), match.value("k_cache"), match.value("v_cache"), start),
            weights=weights,
            attrs=match.root.attrs,
            names=(match.root.result.name, keys.result.name, values.result.name),
        )
        result, new_keys, new_values = fused.results
        rewriter.replace(match.root, (result,))
        rewriter.replace(keys, (new_keys,))
        rewriter.replace(values, (new_values,))

    def _rotates(self, module: Module, tables: tuple[str, ...]) -> bool:
        """Whether the device's fused op rotates as many dims of a head as the tables turn."""
        rotated = 2 * module.weights[module.weights.resolve(tables[0])].shape[1]
        return self.device is None or rotated % self.device.head_multiple == 0

    def done(self, match: Match) -> str:
        """Nothing to add."""
        return "fused"


def _too_narrow(node: Node, device: Device | None) -> str:
    """Why the device's fused op does not take heads of this width, if so."""
    attrs, width = node.attrs, node.operands[0].type.shape[-1]
    assert isinstance(attrs, AttentionAttributes)
    if device is None or not isinstance(width, int):
        return ""
    multiple, head = device.head_multiple, width // attrs.heads
    return f"heads are {head} wide, not a multiple of {multiple}" if head % multiple else ""


def _several(module: Module) -> bool:
    """Whether the module was lifted for calls of several sequences."""
    limits = module.metadata.get("limits")
    return isinstance(limits, dict) and limits.get("max_batch_size", 1) != 1


def _only_written(module: Module, graph: Graph) -> bool:
    """Whether a graph that is called together with one has caches that nothing in it reads."""
    callers = [g for g in module.graphs.values() if g is graph or graph.name in g.callees()]
    together = {name for g in callers for name in (g.name, *g.callees())}
    nodes = (node for name in together for node in module.graphs[name].nodes)
    return any(n.op.name == "cache_update" and not n.result.users() for n in nodes)


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
    if min(q.type.dtype.bits, k.type.dtype.bits) < 32:  # rounded here, not within the op
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
