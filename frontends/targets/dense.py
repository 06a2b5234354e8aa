"""Dense pre-norm decoders over KV caches: what Llama, Mistral, Qwen2 and Qwen3 have in common.

x = embed(ids); per layer x += o_proj(attn(q, k, v)), x += mlp(norm(x)), both on normed input;
logits = lm_head(norm(x)). Rotary embedding over the full head, halves rotated; attention scale
head_dim^-0.5; grouped KV heads. A layer with a window sees the last rows only, the query's own
included. Linear layers have a bias where the checkpoint stores one.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.frontends.config import TextConfig
from edgecc.frontends.decoder_layer import DecoderBuilder
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets.common import output_head
from edgecc.ir.builder import Builder
from edgecc.ir.core import Value
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.ir.types import DType, sym
from edgecc.roles import Role


def build_dense(
    weights: ModuleWeights,
    config: TextConfig,
    taps: Sequence[int],
    capacity: int,
    *,
    head_norms: bool = False,
    proposes: int | None = None,
) -> None:
    """Build graph `target`, or that of a draft.

    Inputs: token_ids i64 `[b, t]`, cache_length i64 `[b]`, logit_rows i64 `[r]`, two caches a layer
    f32 `[b, kv_heads, capacity, head_dim]`. Outputs: logits f32 `[b, r, V]`, the outputs of the
    tapped layers joined in the order of `taps` f32 `[b, t, n*H]` (when there are any), caches.
    Graph `draft` has token_ids `[b, c]`, and in place of logits the best token of each row,
    proposals i64 `[b, r]`, and draft_logits f32 `[b, r, V]`.

    Args:
        weights: Tensors of the checkpoint.
        config: Hyperparameters.
        taps: Layers (counted from 0) whose outputs the draft reads; -1 is the embedding.
        capacity: Rows of each cache.
        head_norms: Whether queries and keys are normed per head before they are rotated.
        proposes: For a draft: tokens below are those that it chooses from.

    Raises:
        InputError: Config and tensors contradict each other.
    """
    _DenseBuilder(weights, config, capacity, head_norms, proposes).build(taps)


class _DenseBuilder(DecoderBuilder):
    """State of building one graph: the inputs every layer reads."""

    def __init__(
        self,
        weights: ModuleWeights,
        config: TextConfig,
        capacity: int,
        head_norms: bool,
        proposes: int | None,
    ) -> None:
        self.graph = "target" if proposes is None else "draft"
        super().__init__(Builder(weights.module, self.graph), weights, config.rms_norm_eps)
        self.config, self.capacity, self.head_norms = config, capacity, head_norms
        self.proposes = proposes

    def build(self, taps: Sequence[int]) -> None:
        b, config, weights = self.b, self.config, self.weights
        count = sym("t" if self.proposes is None else "c")
        ids = b.input("token_ids", DType.I64, (sym("b"), count), Role.TOKEN_IDS)
        self.start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
        rows = b.input("logit_rows", DType.I64, (sym("r"),), Role.LOGIT_ROWS)
        shape = (sym("b"), config.num_key_value_heads, self.capacity, config.head_dim)
        caches = [
            tuple(b.input(f"{kind}_cache.{i}", DType.F32, shape, Role.KV_CACHE) for kind in "kv")
            for i in range(config.num_hidden_layers)
        ]
        self.tables = weights.rope_tables(config.rope, self.capacity)
        table = weights.matrix("model.embed_tokens", config.vocab_size, config.hidden_size)
        b.at(f"{self.graph}: model.embed_tokens")
        self.positions = b.op("position_ids", self.start, ids, name="positions")
        self.length = b.op("advance", self.start, ids, name="length")
        x = b.op("embedding", ids, weights=(table,), name="x")
        tapped = {-1: x}
        updated: list[tuple[Value, Value]] = []
        for i, (k_cache, v_cache) in enumerate(caches):
            x, new = self._layer(i, x, k_cache, v_cache)
            tapped[i] = x
            updated.append(new)
        b.at(f"{self.graph}: model.norm")
        hidden = self.norm(b.op("take_rows", x, rows, name="last"), "model.norm", name="hidden")
        head = output_head(weights, config, table)
        b.at(f"{self.graph}: lm_head")
        self._choose(b.op("linear", hidden, weights=(head,), name="logits"))
        if taps:
            parts = [tapped[i] for i in taps]
            joined = b.op("concat", *parts, attrs=AxisAttributes(2), name="taps")
            b.output(joined, "hidden_tap", Role.HIDDEN_TAP)
        for i, (k_new, v_new) in enumerate(updated):
            b.output(k_new, f"k_cache.{i}", Role.KV_CACHE, alias=f"k_cache.{i}")
            b.output(v_new, f"v_cache.{i}", Role.KV_CACHE, alias=f"v_cache.{i}")

    def _choose(self, logits: Value) -> None:
        """What comes out of the head: a draft chooses itself."""
        if self.proposes is None:
            self.b.output(logits, "logits", Role.LOGITS)
            return
        best = self.b.op("argmax", logits, attrs=ArgmaxAttributes(self.proposes), name="proposals")
        self.b.output(best, "proposals", Role.PROPOSALS)
        self.b.output(logits, "draft_logits", Role.DRAFT_LOGITS)

    def _layer(
        self, i: int, x: Value, k_cache: Value, v_cache: Value
    ) -> tuple[Value, tuple[Value, Value]]:
        b, config, layer = self.b, self.config, f"model.layers.{i}"
        heads, kv_heads, dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        y = self.norm(x, f"{layer}.input_layernorm")
        q = self.linear(y, f"{layer}.self_attn.q_proj", heads * dim)
        k = self.linear(y, f"{layer}.self_attn.k_proj", kv_heads * dim)
        v = self.linear(y, f"{layer}.self_attn.v_proj", kv_heads * dim)
        if self.head_norms:
            q = self.head_norm(q, f"{layer}.self_attn.q_norm", heads)
            k = self.head_norm(k, f"{layer}.self_attn.k_norm", kv_heads)
        q = self.rope(q, self.positions, self.tables, heads)
        k = self.rope(k, self.positions, self.tables, kv_heads)
        b.at(f"{self.graph}: {layer}.self_attn")
        k_new = b.op("cache_update", k_cache, k, self.start, name=f"k_cache.{i}")
        v_new = b.op("cache_update", v_cache, v, self.start, name=f"v_cache.{i}")
        attrs = AttentionAttributes(heads, kv_heads, dim**-0.5, window=self._window(i))
        y = b.op("attention", q, k_new, v_new, self.length, attrs=attrs, name="attn")
        x = self.add(x, self.linear(y, f"{layer}.self_attn.o_proj", config.hidden_size))
        y = self.norm(x, f"{layer}.post_attention_layernorm")
        y = self.mlp(y, f"{layer}.mlp", config.intermediate_size, config.hidden_size)
        return self.add(x, y), (k_new, v_new)

    def _window(self, i: int) -> int | None:
        """The window of a layer, None where it holds all rows of the cache."""
        window = self.config.sliding_windows[i]
        return window if window is not None and window < self.capacity else None
