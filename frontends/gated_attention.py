"""Qwen3.5's gated attention, which targets and their multi-token-prediction blocks share."""

from __future__ import annotations

from edgecc.errors import InputError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.decoder_layer import DecoderBuilder
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.ir.core import Value
from edgecc.ir.ops.attention import AttentionAttributes, SplitHeadsAttributes
from edgecc.ir.ops.vision import MultiAxisRopeAttributes


class GatedAttentionBuilder(DecoderBuilder):
    """Attention whose output is multiplied by sigmoid(gate).

    q_proj stores query and gate side by side in each head; q and k are normed per head; the first
    dims of each head are rotated, halves.

    Attributes:
        config: Sizes of the layers.
        tables: Of the rotary embedding.
        axes: Which of three positions each frequency turns with; empty where there is one.
        start: Rows that are valid in the caches before the new ones.
        length: The same with the new ones.
        positions: Of the new rows.
    """

    config: TextConfig
    tables: tuple[str, str]
    axes: tuple[int, ...] = ()
    start: Value
    length: Value
    positions: Value

    def cached(self, module: str, x: Value, caches: tuple[Value, Value]) -> tuple[Value, Value]:
        """The caches with keys and values of the new rows."""
        b, kv_heads = self.b, self.config.num_key_value_heads
        width = kv_heads * self.config.head_dim
        k = self.linear(x, f"{module}.k_proj", width)
        v = self.linear(x, f"{module}.v_proj", width)
        k = self.head_norm(k, f"{module}.k_norm", kv_heads)
        k = self._rotated(k, self.positions, kv_heads)
        b.at(f"{self.weights.checkpoint.role}: {module}")
        k_new, v_new = (
            b.op("cache_update", cache, new, self.start, name=cache.name)
            for cache, new in zip(caches, (k, v), strict=True)
        )
        return k_new, v_new

    def attended(
        self, module: str, x: Value, caches: tuple[Value, Value], positions: Value
    ) -> Value:
        """What rows see in the caches, gated and projected.

        Args:
            module: Of the layer.
            x: All new rows, or the last of them.
            caches: With all new rows.
            positions: Of the rows of x.
        """
        b, config, dim = self.b, self.config, self.config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        joined = self.linear(x, f"{module}.q_proj", 2 * heads * dim)
        attrs = SplitHeadsAttributes(heads, (dim, dim))
        q, gate = b.node("split_heads", (joined,), attrs=attrs, names=("q", "gate")).results
        q = self.head_norm(q, f"{module}.q_norm", heads)
        q = self._rotated(q, positions, heads)
        b.at(f"{self.weights.checkpoint.role}: {module}")
        scores = AttentionAttributes(heads, kv_heads, dim**-0.5)
        y = b.op("attention", q, *caches, self.length, attrs=scores, name="attn")
        y = b.op("mul", y, b.op("sigmoid", gate, name="gate"), name="gated")
        return self.linear(y, f"{module}.o_proj", config.hidden_size)

    def _rotated(self, x: Value, positions: Value, heads: int) -> Value:
        if not self.axes:
            return self.rope(x, positions, self.tables, heads)
        attrs = MultiAxisRopeAttributes(heads, self.axes)
        operands = x, positions
        return self.b.op(
            "multi_axis_rope", *operands, weights=self.tables, attrs=attrs, name=x.name
        )


def check_gate(weights: ModuleWeights, config: TextConfig, name: str) -> None:
    """Cross-check a query projection, if it is stored, with the layout of query and gate.

    Raises:
        InputError: It is that of attention without a gate.
    """
    if not weights.has(name):
        return
    info = weights.checkpoint.tensors.get(weights.stored_name(name))
    width = config.num_attention_heads * config.head_dim
    if info is not None and info.shape[:1] == (width,):
        raise InputError(
            "target/no-gate",
            f"the query projection has {width} rows, as for attention without an output gate; "
            f"expected {2 * width}, query and gate of each head",
            where=weights.checkpoint.location(weights.stored_name(name)),
            help="config and weights are of different models or revisions: fetch both again",
        )
