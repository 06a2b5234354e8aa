"""DSpark drafts: a block of slots over context projected from the target's hidden states.

Source: DeepSpec's reference model (arXiv 2607.05147). With F the tapped target states of committed
tokens, C = hidden_norm(F fc^T) is shared by all layers; each layer takes keys and values from C at
the tokens' own positions (input_layernorm is not applied to C) and from the block. The block is
[anchor, mask, ...], attends to the whole context and the whole block without a causal mask, and
slot j predicts the token after position start + j; where masks fill their own positions, slot j
from 1 on predicts the token at start + j, and slot 0 nothing. In layers with a window each slot
sees the last rows up to its own, of context and block (as in SpecForge and SGLang). The Markov head
adds `w2 w1[previous token]` to the logits of each slot, left to right.
"""

from __future__ import annotations

from edgecc.errors import InputError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig
from edgecc.frontends.decoder_layer import DecoderBuilder
from edgecc.frontends.drafts.base import (
    ANOTHER_TARGET,
    Draft,
    DraftSize,
    check_taps,
    check_vocabulary,
)
from edgecc.frontends.drafts.dspark_checks import check_tensors, markov_rank
from edgecc.frontends.drafts.dspark_config import DSparkConfig, read_dspark_config
from edgecc.frontends.drafts.markov import VANILLA, markov_type, slot_by_slot
from edgecc.frontends.drafts.names import stores
from edgecc.frontends.drafts.vocabulary_map import DraftVocabulary, read_vocabulary
from edgecc.frontends.gather import Gather
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.ir.builder import Builder
from edgecc.ir.core import Json, Value
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.sampling import MarkovChainAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes
from edgecc.ir.types import DType, sym
from edgecc.roles import Role

CONFIDENCE = "confidence_head.proj"


class DSpark(Draft):
    """A DSpark draft."""

    method = "dspark"

    def __init__(self, checkpoint: Checkpoint, steps: int | None) -> None:
        """See `Draft`."""
        self.checkpoint = checkpoint
        self.config = config = read_dspark_config(checkpoint, self.method)
        self.text, self.numbering = config.text, config.numbering
        self.rows, self.rows_from = config.block_size, f"{checkpoint.role}/config.json: block_size"
        most = config.proposals
        self.steps = most if steps is None else steps
        if not 1 <= self.steps <= most:
            raise UsageError(
                "usage/speculative-tokens",
                f"{steps} speculative tokens asked for, the draft's block proposes at most {most}",
                where=self.rows_from,
                notes=()
                if config.anchor_predicts
                else (f"its {config.block_size} slots hold the anchor, which some tools count",),
                help=f"choose 1..{most}: beyond the block every proposal gets worse",
            )

    def taps(self, target: TextConfig | None) -> tuple[int, ...]:
        """The listed layers."""
        return self.config.target_layer_ids

    def check_target(self, target: TextConfig) -> None:
        """Layers, vocabulary and mask token.

        Raises:
            InputError: One of them is of another target.
        """
        config, errors = self.config, Gather()
        with errors.step():
            check_taps(config.target_layer_ids, config.numbering, config.num_target_layers, target)
        with errors.step():
            check_vocabulary(self.text, target)
        with errors.step():
            self._check_mask(target)
        errors.raise_found()

    def _check_mask(self, target: TextConfig) -> None:
        if self.config.mask_token_id >= target.vocab_size:
            raise InputError(
                "draft/mask-token",
                f"mask_token_id {self.config.mask_token_id} has no row in an embedding of "
                f"{target.vocab_size} rows",
                where="draft/config.json: mask_token_id",
                help=ANOTHER_TARGET,
            )

    def build(self, weights: ModuleWeights, size: DraftSize) -> None:
        """Build graph `draft`.

        Inputs: features f32 `[b, c, n*Ht]`, anchor i64 `[b]`, cache_length i64 `[b]` (context rows
        before this call), two caches a layer. The c new context rows are written at cache_length,
        the block's rows behind them, where the next call overwrites them: nothing is rolled back.
        Outputs: proposals i64 `[b, N]`, base_logits and draft_logits f32 `[b, N, V]`, confidence
        f32 `[b, N]` (before the sigmoid; when the draft has that head), caches.

        Raises:
            InputError: Config and tensors contradict each other.
            UnsupportedError: A variant this frontend does not build.
        """
        check_tensors(weights, self.config, size.target_hidden)
        capacity = size.max_model_len + self.rows
        builder = self.builder(weights, self.config, size.num_tokens, self.steps, capacity)
        builder.build(size.target_hidden)

    @property
    def builder(self) -> type[BlockBuilder]:
        """What builds the graph."""
        return BlockBuilder

    def metadata(self, taps: tuple[int, ...]) -> dict[str, Json]:
        """The block, its layout and the mask token."""
        return {
            "method": self.method,
            "block_size": self.config.block_size,
            "num_speculative_tokens": self.steps,
            "slot_layout": self.config.layout,
            "mask_token_id": self.config.mask_token_id,
            "target_layer_ids": list(taps),
            "max_position_embeddings": self.text.max_position_embeddings,
        }

    def facts(self) -> dict[str, Json]:
        """The block, what it reads and its heads."""
        config = self.config
        return {
            "block_size": config.block_size,
            "reads_outputs_of_layers": list(config.target_layer_ids),
            "numbered_by": config.numbering,
            "mask_token_id": config.mask_token_id,
            "slot_layout": f"{config.layout}, by {config.layout_from}",
            "markov_rank": config.markov_rank,
            "confidence_head": stores(self.checkpoint.tensors, f"{CONFIDENCE}.weight"),
            "vocab_size": self.text.vocab_size,
            "target_layers": config.num_target_layers,
        }


class BlockBuilder(DecoderBuilder):
    """State of building one graph: the inputs every layer reads."""

    def __init__(
        self,
        weights: ModuleWeights,
        config: DSparkConfig,
        num_tokens: int,
        steps: int,
        capacity: int,
    ) -> None:
        super().__init__(Builder(weights.module, "draft"), weights, config.text.rms_norm_eps)
        self.config, self.text = config, config.text
        self.num_tokens = min(num_tokens, config.text.vocab_size)
        self.steps, self.capacity = steps, capacity
        self.tables = weights.rope_tables(config.text.rope, capacity)

    def build(self, target_hidden: int) -> None:
        """Add inputs, layers, heads and outputs."""
        b, text = self.b, self.text
        width = len(self.config.target_layer_ids) * target_hidden
        features = b.input("features", DType.F32, (sym("b"), sym("c"), width), Role.FEATURES)
        self.anchor = b.input("anchor", DType.I64, (sym("b"),), Role.ANCHOR)
        self.start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
        shape = (sym("b"), text.num_key_value_heads, self.capacity, text.head_dim)
        caches = [
            (
                b.input(f"k_cache.{i}", DType.F32, shape, Role.KV_CACHE),
                b.input(f"v_cache.{i}", DType.F32, shape, Role.KV_CACHE),
            )
            for i in range(text.num_hidden_layers)
        ]
        self.context = self.norm(
            self.linear(features, "fc", text.hidden_size), "hidden_norm", name="context"
        )
        x = self._block()
        updated = []
        for i, (k_cache, v_cache) in enumerate(caches):
            x, k_new, v_new = self._layer(i, x, k_cache, v_cache)
            updated.append((k_new, v_new))
        self._heads(self.norm(x, "norm", name="z"))
        for i, (k_new, v_new) in enumerate(updated):
            b.output(k_new, f"k_cache.{i}", Role.KV_CACHE, alias=f"k_cache.{i}")
            b.output(v_new, f"v_cache.{i}", Role.KV_CACHE, alias=f"v_cache.{i}")

    def _block(self) -> Value:
        """Embedded slots `[b, B, H]`, and the positions of context rows and slots."""
        b, config = self.b, self.config
        vocab, hidden = self.text.vocab_size, self.text.hidden_size
        table = self.weights.own_or_borrowed("embed_tokens", vocab, hidden)
        b.at("draft: embed_tokens")
        masks = PadAttributes(1, config.block_size - 1, config.mask_token_id)
        first = b.op("unsqueeze", self.anchor, attrs=AxisAttributes(1), name="first")
        slots = b.op("pad", first, attrs=masks, name="slots")
        x = b.op("embedding", slots, weights=(table,), name="x")
        rows = b.op("concat", self.context, x, attrs=AxisAttributes(1), name="rows")
        self.positions = b.op("position_ids", self.start, rows, name="positions")
        self.slot_positions = b.op(
            "tail", self.positions, slots, attrs=AxisAttributes(1), name="slot_positions"
        )
        self.length = b.op("advance", self.start, rows, name="length")
        return x

    def _layer(
        self, i: int, x: Value, k_cache: Value, v_cache: Value
    ) -> tuple[Value, Value, Value]:
        """One layer: the block attends to all context rows and to itself, both ways.

        With a window each slot attends to the last rows up to its own.
        """
        b, text, layer = self.b, self.text, f"layers.{i}"
        heads, kv_heads, dim = text.num_attention_heads, text.num_key_value_heads, text.head_dim
        y = self.norm(x, f"{layer}.input_layernorm")
        rows = b.op("concat", self.context, y, attrs=AxisAttributes(1), name="rows")
        q = self.linear(y, f"{layer}.self_attn.q_proj", heads * dim)
        k = self.linear(rows, f"{layer}.self_attn.k_proj", kv_heads * dim)
        v = self.linear(rows, f"{layer}.self_attn.v_proj", kv_heads * dim)
        q = self.head_norm(q, f"{layer}.self_attn.q_norm", heads)
        k = self.head_norm(k, f"{layer}.self_attn.k_norm", kv_heads)
        q = self.rope(q, self.slot_positions, self.tables, heads)
        k = self.rope(k, self.positions, self.tables, kv_heads)
        b.at(f"draft: {layer}.self_attn")
        k_new = b.op("cache_update", k_cache, k, self.start, name=f"k_cache.{i}")
        v_new = b.op("cache_update", v_cache, v, self.start, name=f"v_cache.{i}")
        window = text.sliding_windows[i]
        attrs = AttentionAttributes(heads, kv_heads, dim**-0.5, window is not None, window)
        y = b.op("attention", q, k_new, v_new, self.length, attrs=attrs, name="attn")
        x = self.add(x, self.linear(y, f"{layer}.self_attn.o_proj", text.hidden_size))
        y = self.norm(x, f"{layer}.post_attention_layernorm")
        x = self.add(x, self.mlp(y, f"{layer}.mlp", text.intermediate_size, text.hidden_size))
        return x, k_new, v_new

    def _heads(self, z: Value) -> None:
        """Head, and what chooses from its logits, over the first N slots that predict."""
        b, config, text = self.b, self.config, self.text
        self.vocabulary = self._vocabulary()
        size = self.vocabulary.size
        head = self.weights.own_or_borrowed("lm_head", size, text.hidden_size)
        if self.steps < config.block_size:
            first = config.first_slot
            z = b.op("slice", z, attrs=SliceAttributes(1, first, first + self.steps), name="z")
        b.at("draft: lm_head")
        base = b.op("linear", z, weights=(head,), name="base_logits")
        embeddings = self._choose(z, base)
        if self.weights.has(f"{CONFIDENCE}.weight"):
            self._confidence(z, embeddings)

    def _vocabulary(self) -> DraftVocabulary:
        """What the head's rows mean; a size in the config counts if tensors can have it."""
        sized = self.weights.has("lm_head.weight") or self.weights.has("d2t")
        declared = self.config.draft_vocab_size if sized else None
        return read_vocabulary(self.weights, self.text.vocab_size, declared, self.num_tokens)

    def _choose(self, z: Value, base: Value) -> Value | None:
        """The Markov chain, from left to right.

        Returns:
            Its embeddings of the tokens before the slots, f32 `[b, N, r]`; None without a chain.
        """
        b, vocabulary, vocab_size = self.b, self.vocabulary, self.text.vocab_size
        rank = markov_rank(self.weights, self.config)
        w1, w2 = (
            self.weights.matrix(f"markov_head.{name}", rows, rank)
            for name, rows in (
                ("markov_w1", vocab_size),
                ("markov_w2", vocabulary.size),
            )
        )
        kind, reduced = markov_type(self.weights, self.config), vocabulary.size != vocab_size
        if kind != VANILLA or vocabulary.table is not None or reduced:
            made = slot_by_slot(self, z, base, self.anchor, (w1, w2), vocabulary, kind)
        else:
            b.at("draft: markov_head")
            attrs = MarkovChainAttributes(self.steps, vocabulary.limit)
            names = ("proposals", "draft_logits", "embeddings")
            chain = b.node("markov_chain", (base, self.anchor), [w1, w2], attrs, names)
            made = chain.results[0], chain.results[1], chain.results[2]
        proposals, logits, embeddings = made
        b.output(proposals, "proposals", Role.PROPOSALS)
        b.output(base, "base_logits", Role.BASE_LOGITS)
        b.output(logits, "draft_logits", Role.DRAFT_LOGITS)
        return embeddings

    def _confidence(self, z: Value, embeddings: Value | None) -> None:
        """The confidence head reads the hidden state, or that and the Markov embedding.

        Raises:
            InputError: It is wider than what there is to read.
        """
        hidden, stored = self.text.hidden_size, self.weights.columns(f"{CONFIDENCE}.weight")
        if stored != hidden:
            if embeddings is None:
                raise InputError(
                    "draft/confidence-width",
                    f"{CONFIDENCE}.weight has {stored} columns, expected {hidden}: there is no "
                    "Markov head whose embeddings it could read",
                    where=f"{self.weights.checkpoint.role}: {CONFIDENCE}.weight",
                    help="the checkpoint is incomplete: fetch its weights again",
                )
            attrs = AxisAttributes(2)
            z = self.b.op("concat", z, embeddings, attrs=attrs, name="read")
        score = self.linear(z, CONFIDENCE, 1, "confidence")
        confidence = self.b.op("squeeze", score, attrs=AxisAttributes(2), name="confidence")
        self.b.output(confidence, "confidence", Role.CONFIDENCE)
