"""The multi-token-prediction block of Qwen3.5 checkpoints, as a draft of its own target.

Source: vLLM's qwen3_5_mtp and the converter of speculators. With s_t the target's state at position
t after its final norm, row t joins s_t with the embedding e of the token at t + 1, and predicts the
token at t + 2:

    u = fc([pre_fc_norm_embedding(e), pre_fc_norm_hidden(s)])
    x = one decoder layer of the target's kind (gated attention) on u, at position t
    z = norm(x)
    logits = lm_head(z)

All norms scale by 1 + w; embedding and head are the target's, unless the block has its own. Later
rows of a round, for which the target has no states yet, take the z of the row before in place of s.
Step i runs layer i mod L of a block of L layers. Keys and values of a row are those of its u, in
the caches of all layers, so that each of them sees the whole sequence; released blocks have one.

Positions are those of text: where the target read an image, they are not its three positions.
"""

from __future__ import annotations

from dataclasses import replace

from edgecc.errors import Diagnostic, InputError, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, config_fields, read_text_config
from edgecc.frontends.drafts.base import Draft, DraftSize
from edgecc.frontends.drafts.chain import ChainBuilder
from edgecc.frontends.drafts.vocabulary_map import DraftVocabulary
from edgecc.frontends.gated_attention import GatedAttentionBuilder, check_gate
from edgecc.frontends.inventory import check_layers, layer_numbers
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.mtp_block import MTP_BLOCK, MTP_FILES, PREFIX, mtp_names
from edgecc.frontends.quantization import read_quantization
from edgecc.frontends.spec_methods import OWN_BLOCK
from edgecc.frontends.targets.common import FINAL_NORM
from edgecc.ir.builder import Builder
from edgecc.ir.core import Json, Module, Value
from edgecc.ir.ops.shape import AxisAttributes

_FAMILY = "qwen3_5"
"""Begin of the model types whose block is built."""

_DEFAULT_STEPS = 3
"""Beyond, measured speed gains nothing."""

_OWN_FINDINGS = ("quant/stored-otherwise", "quant/stored-not-declared")


class Mtp(Draft):
    """The block of a target. Its checkpoint is the target's.

    Attributes:
        names: Canonical names of its tensors to stored ones.
    """

    method = OWN_BLOCK
    ignorable = ()
    layers_key = "mtp_num_hidden_layers"

    def __init__(self, checkpoint: Checkpoint, steps: int | None) -> None:
        """See `Draft`."""
        self.checkpoint = checkpoint
        self.names = mtp_names(checkpoint.tensors, checkpoint.role)
        if not self.names:
            raise _no_block(checkpoint)
        text = read_text_config(checkpoint)
        if not text.model_type.startswith(_FAMILY):
            raise UnsupportedError(
                "draft/kind",
                f"multi-token-prediction blocks of model_type {text.model_type!r} are not "
                "supported",
                where=text.at("model_type"),
                help=f"supported: {_FAMILY}",
            )
        self.text = replace(text, num_hidden_layers=self._layers())
        check_layers(checkpoint, self.names, self.text.num_hidden_layers, self.layers_key)
        self.steps = self.rows = _steps(steps, self.text)
        self.rows_from = "num_speculative_tokens"
        self.numbering = MTP_BLOCK

    def taps(self, target: TextConfig | None) -> tuple[int, ...]:
        """What the target's head reads."""
        return (FINAL_NORM,)

    def check_target(self, target: TextConfig) -> None:
        """Nothing: it is the checkpoint's own."""

    def open_weights(self, module: Module) -> ModuleWeights:
        """The block's tensors, under names of the draft."""
        quantization = read_quantization(self.checkpoint)
        return ModuleWeights(
            module, self.checkpoint, quantization, self.names, ("", PREFIX), owner="draft"
        )

    def findings(self, weights: ModuleWeights) -> list[Diagnostic]:
        """Without what is said of the target already.

        Nor that modules are declared quantized and are not: exports leave the block unquantized
        whether their lists name its modules or not.
        """
        return [f for f in weights.quantization.findings if f.id in _OWN_FINDINGS]

    def reads(self, taps: tuple[int, ...]) -> str:
        """The states the head reads."""
        return "the target's states after its final norm"

    def build(self, weights: ModuleWeights, size: DraftSize) -> None:
        """Build graph `draft`.

        Inputs: features f32 `[b, c, H]` of committed tokens the draft has not seen, next_token_ids
        i64 `[b, c]` (for each of them the token after it; the last is the newest committed one),
        cache_length i64 `[b]` (features before this call), two caches a layer. The c rows are
        written at cache_length, those of the N - 1 later steps behind them, where the next call
        overwrites them: nothing is rolled back. Outputs: proposals i64 `[b, N]`, draft_logits f32
        `[b, N, V]`, caches.

        Raises:
            InputError: Config and tensors contradict each other.
        """
        for i in range(self.text.num_hidden_layers):
            check_gate(weights, self.text, f"layers.{i}.self_attn.q_proj.weight")
        capacity = size.max_model_len + self.rows
        builder = _MtpBuilder(weights, self.text, capacity, size.num_tokens)
        cache = (self.text.num_key_value_heads, capacity, self.text.head_dim)
        layers = self.text.num_hidden_layers
        builder.build(self.text.hidden_size, self.steps, cache, layers)

    def metadata(self, taps: tuple[int, ...]) -> dict[str, Json]:
        """Proposals and positions."""
        return {
            "method": self.method,
            "num_speculative_tokens": self.steps,
            "max_position_embeddings": self.text.max_position_embeddings,
        }

    def facts(self) -> dict[str, Json]:
        """Its layers."""
        return {"layers": self.text.num_hidden_layers}

    def _layers(self) -> int:
        """Layers as the config counts them; as they are stored where it does not.

        Raises:
            InputError: The block is declared to have its own embedding, and has none.
        """
        _, text = config_fields(self.checkpoint)
        own = text.boolean("mtp_use_dedicated_embeddings", default=False)
        if own and "embed_tokens.weight" not in self.names:
            raise InputError(
                "draft/no-embedding",
                f"mtp_use_dedicated_embeddings is true, but {PREFIX}embed_tokens.weight is not "
                "stored",
                where=text.at("mtp_use_dedicated_embeddings"),
                help="the checkpoint is incomplete: fetch its weights again",
            )
        stored = max(len(layer_numbers(self.names)), 1)
        return text.integer(self.layers_key, default=stored)


class _MtpBuilder(ChainBuilder, GatedAttentionBuilder):
    """State of building one graph."""

    def __init__(
        self, weights: ModuleWeights, config: TextConfig, capacity: int, num_tokens: int
    ) -> None:
        b = Builder(weights.module, "draft")
        super().__init__(b, weights, config.rms_norm_eps, unit_offset=True)
        self.config, vocab = config, config.vocab_size
        self.tables = weights.rope_tables(config.rope, capacity)
        self.vocabulary = DraftVocabulary(vocab, None, num_tokens)
        self.embedding = weights.own_or_borrowed("embed_tokens", vocab, config.hidden_size)
        self.head = weights.own_or_borrowed("lm_head", vocab, config.hidden_size)

    def first(self, features: Value) -> Value:
        return features

    def step(self, index: int, state: Value, tokens: Value) -> tuple[Value, Value]:
        b, layers = self.b, self.config.num_hidden_layers
        b.at("target: mtp.embed_tokens")
        e = b.op("embedding", tokens, weights=(self.embedding,), name="e")
        parts = self.norm(e, "pre_fc_norm_embedding"), self.norm(state, "pre_fc_norm_hidden")
        rows = b.op("concat", *parts, attrs=AxisAttributes(2), name="rows")
        u = self.linear(rows, "fc", self.config.hidden_size, "u")
        self.positions = b.op("position_ids", self.start, u, name="positions")
        self.length = b.op("advance", self.start, u, name="length")
        normed = [self.norm(u, f"layers.{i}.input_layernorm") for i in range(layers)]
        self.caches = [
            self.cached(f"layers.{i}.self_attn", y, caches)
            for i, (y, caches) in enumerate(zip(normed, self.caches, strict=True))
        ]
        z = self.norm(self._layer(index % layers, u, normed[index % layers]), "norm", name="z")
        self.start = self.length
        return z, z

    def _layer(self, i: int, u: Value, normed: Value) -> Value:
        """The output of a layer at the last row `[b, 1, H]`."""
        config, layer = self.config, f"layers.{i}"
        y, positions = self.last(normed), self.last(self.positions)
        y = self.attended(f"{layer}.self_attn", y, self.caches[i], positions)
        x = self.add(self.last(u), y)
        y = self.norm(x, f"{layer}.post_attention_layernorm")
        return self.add(
            x, self.mlp(y, f"{layer}.mlp", config.intermediate_size, config.hidden_size)
        )


def has_block(checkpoint: Checkpoint) -> bool:
    """Whether a target has a block that could draft."""
    return bool(mtp_names(checkpoint.tensors, checkpoint.role))


def _steps(wanted: int | None, text: TextConfig) -> int:
    """Proposals per round.

    Raises:
        UsageError: Not a multiple of the layers, whose turns are one round of proposals.
    """
    layers = text.num_hidden_layers
    if wanted is None:
        return -(-_DEFAULT_STEPS // layers) * layers
    if wanted < 1 or wanted % layers:
        raise UsageError(
            "usage/speculative-tokens",
            f"{wanted} speculative tokens with a block of {layers} layers",
            where=text.at(Mtp.layers_key),
            help="choose at least 1" if wanted < 1 else f"choose a multiple of {layers}",
        )
    return wanted


def _no_block(checkpoint: Checkpoint) -> InputError:
    _, text = config_fields(checkpoint)
    declared = text.integer(Mtp.layers_key, minimum=0, default=0)
    return InputError(
        "draft/no-mtp",
        f"--spec-method mtp: the target has no {MTP_BLOCK}",
        where=f"{checkpoint.role}/config.json: {Mtp.layers_key}",
        notes=[
            f"{Mtp.layers_key} is {declared}",
            f"looked for {PREFIX}fc.weight in {', '.join(checkpoint.files[:4])}",
            f"there is no file {' or '.join(MTP_FILES)}",
        ],
        help="some exports leave the block out: use one that has it, or a draft of its own"
        if declared
        else "use a draft of its own: --draft DIR",
    )
