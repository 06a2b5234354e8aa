"""EAGLE3 drafts: one decoder layer run N times, each time on its own last state and token.

Source: EAGLE-3 (arXiv 2503.01840), as released by SafeAILab and AngelSlim. With F_t the tapped
states of the target at position t, row t joins g_t = fc(F_t) with the embedding e of the token at
t + 1, and predicts the token at t + 2:

    x = [input_layernorm(e), hidden_norm(g)]      queries, keys and values come from x
    h = g + o_proj(attention(x)) at position t    causal, rotary
    h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))

Later rows of a round, for which the target has no states yet, take the h of the row before in place
of g; fc is not applied again. Only keys and values of a row are read by others, so of the first
call's rows only the last one needs more.
"""

from __future__ import annotations

from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig
from edgecc.frontends.drafts.base import (
    ANOTHER_TARGET,
    Draft,
    DraftSize,
    check_taps,
    check_vocabulary,
)
from edgecc.frontends.drafts.chain import ChainBuilder
from edgecc.frontends.drafts.eagle3_config import DEFAULT_TAPS, default_taps, read_eagle3_config
from edgecc.frontends.drafts.names import stores
from edgecc.frontends.drafts.vocabulary_map import DraftVocabulary, read_vocabulary
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.ir.builder import Builder
from edgecc.ir.core import Json, Value
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.shape import AxisAttributes

_LAYER = "layers.0"
_VARIANTS = (
    (".qkv_proj.weight", "draft/fused-qkv", "fused q, k and v projections are not supported"),
    ("fc_norm.", "draft/kind", "drafts that norm the features before fc are not supported"),
    ("mask_embedding", "draft/kind", "P-EAGLE drafts are not supported"),
)
"""Parts of tensor names that mean another network, the error's id and what is said about it."""


class Eagle3(Draft):
    """An EAGLE3 draft."""

    method = "eagle3"

    def __init__(self, checkpoint: Checkpoint, steps: int | None) -> None:
        """See `Draft`."""
        self.checkpoint = checkpoint
        self.config = config = read_eagle3_config(checkpoint)
        self.text, self.numbering = config.text, config.numbering
        self._vocabulary_size = config.draft_vocab_size or config.text.vocab_size
        self.steps = self.rows = config.steps if steps is None else steps
        self.rows_from = "num_speculative_tokens"
        if self.steps < 1:
            raise UsageError(
                "usage/speculative-tokens",
                f"{steps} speculative tokens asked for",
                help="choose at least 1",
            )

    @property
    def target_hidden(self) -> int:
        """What the config says, else the draft's own."""
        return self.config.target_hidden_size or self.text.hidden_size

    def taps(self, target: TextConfig | None) -> tuple[int, ...]:
        """The listed layers, or those every EAGLE3 engine takes where none are listed."""
        if self.config.target_layer_ids is not None:
            return self.config.target_layer_ids
        return () if target is None else default_taps(target)

    def check_target(self, target: TextConfig) -> None:
        """Layers, hidden size and vocabulary.

        Raises:
            InputError: One of them is of another target.
        """
        check_taps(self.taps(target), self.numbering, self.config.num_target_layers, target)
        check_vocabulary(self.text, target)
        if self.target_hidden != target.hidden_size and self.config.target_hidden_size:
            raise InputError(
                "draft/target-hidden",
                f"the draft was trained for hidden size {self.target_hidden}, the target's is "
                f"{target.hidden_size}",
                where=f"{self.checkpoint.role}/config.json: target_hidden_size",
                help=ANOTHER_TARGET,
            )
        declared, found = self.config.target_model_type, target.model_type.removesuffix("_text")
        if declared is not None and declared.removesuffix("_text") != found:
            self.checkpoint.findings.append(
                Diagnostic(
                    "draft/target-family",
                    f"the draft was trained for a target of model_type {declared!r}, this one is "
                    f"{target.model_type!r}",
                    where=f"{self.checkpoint.role}/config.json: target_model_type",
                    help=ANOTHER_TARGET,
                    severity=Severity.WARNING,
                )
            )

    def build(self, weights: ModuleWeights, size: DraftSize) -> None:
        """Build graph `draft`.

        Inputs: features f32 `[b, c, n*Ht]` of committed tokens the draft has not seen,
        next_token_ids i64 `[b, c]` (for each of them the token after it; the last is the newest
        committed one), cache_length i64 `[b]` (features before this call), two caches. The c rows
        are written at cache_length, those of the N - 1 later steps behind them, where the next call
        overwrites them: nothing is rolled back. Outputs: proposals i64 `[b, N]` (target ids),
        draft_logits f32 `[b, N, Vd]` (over the draft's vocabulary), caches.

        Raises:
            InputError: Config and tensors contradict each other.
            UnsupportedError: A variant this frontend does not build.
        """
        self._check_tensors(weights, size)
        vocab, declared = self.text.vocab_size, self.config.draft_vocab_size
        vocabulary = read_vocabulary(weights, vocab, declared, size.num_tokens)
        self._vocabulary_size = vocabulary.size
        capacity = size.max_model_len + self.rows
        builder = _Eagle3Builder(weights, self, vocabulary, capacity)
        cache = (self.text.num_key_value_heads, capacity, self.text.head_dim)
        builder.build(self._features() * size.target_hidden, self.steps, cache, layers=1)

    def metadata(self, taps: tuple[int, ...]) -> dict[str, Json]:
        """Proposals, layers and vocabulary."""
        return {
            "method": self.method,
            "num_speculative_tokens": self.steps,
            **({"target_layer_ids": list(taps)} if taps else {}),
            "draft_vocab_size": self._vocabulary_size,
            "max_position_embeddings": self.text.max_position_embeddings,
        }

    def facts(self) -> dict[str, Json]:
        """What it reads, its vocabulary and its variant."""
        config = self.config
        ids = config.target_layer_ids
        return {
            "reads_outputs_of_layers": None if ids is None else list(ids),
            "numbered_by": config.numbering,
            "own_head": stores(self.checkpoint.tensors, "lm_head.weight"),
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "vocab_size": self.text.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "target_layers": config.num_target_layers,
        }

    def _check_tensors(self, weights: ModuleWeights, size: DraftSize) -> None:
        """Cross-check config and tensors where shapes alone would not say what is wrong.

        Raises:
            InputError: `fc` is of another width.
            UnsupportedError: A variant this frontend does not build.
        """
        role, names = weights.checkpoint.role, weights.names()
        for part, id, reason in _VARIANTS:
            found = next((stored for name, stored in names.items() if part in name), None)
            if found is not None:
                raise UnsupportedError(id, f"{found} is stored: {reason}", where=role)
        stored, taps = weights.columns("fc.weight"), self._features()
        if stored not in (None, taps * size.target_hidden):
            raise InputError(
                "draft/fc-width",
                f"fc.weight has {stored} columns, expected {taps} tapped layers x hidden size "
                f"{size.target_hidden} of the target = {taps * size.target_hidden}",
                where=f"{role}: {names['fc.weight']}",
                notes=(f"tapped layers: read from {self.numbering}",),
                help="wrong target, or config and weights of different revisions",
            )

    def _features(self) -> int:
        """How many states of the target a row reads."""
        ids = self.config.target_layer_ids
        return DEFAULT_TAPS if ids is None else len(ids)


class _Eagle3Builder(ChainBuilder):
    """State of building one graph."""

    def __init__(
        self,
        weights: ModuleWeights,
        draft: Eagle3,
        vocabulary: DraftVocabulary,
        capacity: int,
    ) -> None:
        super().__init__(Builder(weights.module, "draft"), weights, draft.text.rms_norm_eps)
        self.config, self.text = draft.config, draft.text
        self.vocabulary = vocabulary
        self.tables = weights.rope_tables(draft.text.rope, capacity)
        hidden = draft.text.hidden_size
        self.embedding = weights.own_or_borrowed("embed_tokens", draft.text.vocab_size, hidden)
        self.head = weights.own_or_borrowed("lm_head", vocabulary.size, hidden)

    def first(self, features: Value) -> Value:
        return self.linear(features, "fc", self.text.hidden_size, "g")

    def step(self, index: int, state: Value, tokens: Value) -> tuple[Value, Value]:
        h = self._layer(state, tokens)
        z = self.norm(h, "norm", name="z")
        return z, z if self.config.norm_output else h

    def _layer(self, g: Value, tokens: Value) -> Value:
        """Write all rows to the caches; the state of the last one `[b, 1, H]`."""
        b, text = self.b, self.text
        heads, kv_heads, dim = text.num_attention_heads, text.num_key_value_heads, text.head_dim
        b.at("draft: embed_tokens")
        e = b.op("embedding", tokens, weights=(self.embedding,), name="e")
        normed = self.norm(g, f"{_LAYER}.hidden_norm")
        parts = (self.norm(e, f"{_LAYER}.input_layernorm"), normed)
        rows = b.op("concat", *parts, attrs=AxisAttributes(2), name="rows")
        positions = b.op("position_ids", self.start, rows, name="positions")
        length = b.op("advance", self.start, rows, name="length")
        k = self._per_head(self.linear(rows, f"{_LAYER}.self_attn.k_proj", kv_heads * dim), "k")
        v = self.linear(rows, f"{_LAYER}.self_attn.v_proj", kv_heads * dim)
        k = self.rope(k, positions, self.tables, kv_heads)
        last = self.last(rows)
        x = self.last(normed if self.config.norm_before_residual else g)
        q = self._per_head(self.linear(last, f"{_LAYER}.self_attn.q_proj", heads * dim), "q")
        q = self.rope(q, self.last(positions), self.tables, heads)
        b.at(f"draft: {_LAYER}.self_attn")
        k_cache, v_cache = (
            b.op("cache_update", cache, new, self.start, name=cache.name)
            for cache, new in zip(self.caches[0], (k, v), strict=True)
        )
        attrs = AttentionAttributes(heads, kv_heads, dim**-0.5)
        y = b.op("attention", q, k_cache, v_cache, length, attrs=attrs, name="attn")
        self.caches, self.start = [(k_cache, v_cache)], length
        x = self.add(x, self.linear(y, f"{_LAYER}.self_attn.o_proj", text.hidden_size))
        y = self.norm(x, f"{_LAYER}.post_attention_layernorm")
        return self.add(x, self.mlp(y, f"{_LAYER}.mlp", text.intermediate_size, text.hidden_size))

    def _per_head(self, x: Value, which: str) -> Value:
        """Per-head norm of queries or keys, where the draft has one (DeepSpec's have)."""
        norm, heads = f"{_LAYER}.self_attn.{which}_norm", self.text.num_attention_heads
        if not self.weights.has(f"{norm}.weight"):
            return x
        return self.head_norm(x, norm, heads if which == "q" else self.text.num_key_value_heads)
