"""Hyperparameters of a decoder, read from `config.json` and checked.

Field names are those of the Hugging Face configs. Rules for nesting, defaults and old spellings
follow transformers 5.24.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.fields import Fields
from edgecc.frontends.layer_kinds import HYBRID, attention_kinds
from edgecc.frontends.strict_json import JsonObject
from edgecc.frontends.text_keys import check_keys
from edgecc.ir.rope import ROPE_TYPES, RopeParams
from edgecc.ir.types import DType

DEFAULT_THETA = 10000.0
"""Base of the rotary frequencies where a config has none."""

MAX_HEAD_DIM = 2**14
"""Width of a head that is believed: rotary embeddings have an entry for each two dims."""

_PLAIN = ("dynamic", "mrope")
"""Rotary embeddings that are plain ones for whatever can be compiled: the frequencies of `dynamic`
change beyond `max_position_embeddings` only, and the sections of `mrope` matter for images only."""

_BIASED = "qwen2"
"""Begin of the model types whose queries, keys and values have biases without a key saying so."""

_KEY_PROJECTION = re.compile(
    r"(?:(?!mtp\.).*\.)?(?:layers\.(\d+)|midlayer)\.self_attn\.k_proj\.q?weight(?:_packed)?"
)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language part of a config.

    Attributes:
        architectures: Class names, most specific first; may be empty.
        model_type: Family tag of the text part.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads; divides the query heads.
        head_dim: Width of one attention head.
        vocab_size: Rows of the embedding table, padding rows included.
        rms_norm_eps: Epsilon inside RMSNorm.
        hidden_act: Activation of the MLP, as spelled in the config.
        max_position_embeddings: Context length the model was trained for, or YaRN extends it to.
        attention_bias: Whether attention projections have biases.
        mlp_bias: Whether MLP projections have biases.
        tie_word_embeddings: Whether the head is the embedding table.
        rope: Rotary embedding.
        layer_types: Attention kind of each layer, one entry a layer.
        sliding_windows: Visible keys of each layer, the query's own included; None means all.
        bos_token_ids: Ids that begin a text.
        eos_token_ids: Stop ids: the union of config and generation config. Chat models list the id
            that ends a turn in only one of the two, and stopping at an id that either of them
            names is what every producer means.
        pad_token_id: Padding id, if any.
        where: File (and object) the values come from, for messages.
    """

    architectures: tuple[str, ...]
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: RopeParams
    layer_types: tuple[str, ...]
    sliding_windows: tuple[int | None, ...]
    bos_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    pad_token_id: int | None
    where: str

    def at(self, key: str) -> str:
        """How messages call a key: `target/config.json: text_config.layer_types`."""
        return Fields({}, self.where).at(key)


def read_text_config(checkpoint: Checkpoint) -> TextConfig:
    """Read and check the text part of a checkpoint's config.

    Keys of multimodal configs are taken from `text_config`, those of speculators' drafts from
    `transformer_layer_config`; token ids and `tie_word_embeddings` may be in either place.
    `head_dim` is the config's value, else what the stored key projection says, else
    `hidden_size / num_attention_heads`; a config that contradicts the weights is an error.

    Raises:
        InputError: A key is missing, has a wrong type, or contradicts another or the weights.
        UnsupportedError: The rotary embedding is of a type edgecc cannot compute.
    """
    top, text = config_fields(checkpoint)
    check_keys(text)
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        text.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim = _head_dim(checkpoint, text, kv_heads)
    layers = text.integer("num_hidden_layers")
    if layers > len(checkpoint.tensors):
        text.fail("num_hidden_layers", f"at most the {len(checkpoint.tensors)} tensors stored")
    model_type = _model_type(top, text)
    layer_types, windows = attention_kinds(text, model_type, layers)
    bos, eos = (_token_ids(checkpoint, top, text, k) for k in ("bos_token_id", "eos_token_id"))
    _note_missing_theta(checkpoint, text)
    partial = 0.25 if model_type.startswith(HYBRID) else 1.0
    rope = parse_rope(dict(text.values), head_dim, text.where, default_partial=partial)
    return TextConfig(
        architectures=top.strings("architectures") or (),
        model_type=model_type,
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=text.integer("vocab_size"),
        rms_norm_eps=_epsilon(text),
        hidden_act=text.string("hidden_act"),
        max_position_embeddings=_positions(text, rope),
        attention_bias=text.boolean("attention_bias", default=model_type.startswith(_BIASED)),
        mlp_bias=text.boolean("mlp_bias", default=False),
        tie_word_embeddings=_tied(top, text),
        rope=rope,
        layer_types=layer_types,
        sliding_windows=windows,
        bos_token_ids=bos,
        eos_token_ids=eos,
        pad_token_id=_pad(text),
        where=text.where,
    )


def config_fields(checkpoint: Checkpoint) -> tuple[Fields, Fields]:
    """The whole config, and the object in it that describes the language model.

    Raises:
        InputError: That object is something else.
    """
    top = Fields(checkpoint.config, f"{checkpoint.role}/config.json")
    return top, top.section("text_config") or top.section("transformer_layer_config") or top


def _model_type(top: Fields, text: Fields) -> str:
    """The family of the text part; a multimodal config may only name that of the whole."""
    found = text.string("model_type", default="")
    return found or (top.string("model_type", default="") if "text_config" in top else "")


def parse_rope(
    config: JsonObject, head_dim: int, where: str, *, default_partial: float = 1.0
) -> RopeParams:
    """Rotary embedding of a config, in either spelling.

    New configs have `rope_parameters`, old ones `rope_theta` with an optional `rope_scaling`
    (`type` or `rope_type`). If both objects exist, entries of `rope_scaling` win. `rope_theta` and
    `partial_rotary_factor` may be inside the object or beside it.

    Args:
        config: The object that holds these keys.
        head_dim: Width of one attention head.
        where: File and object, for messages.
        default_partial: Fraction of each head that is rotated, if the config does not say.

    Raises:
        InputError: A value is missing, of a wrong type or out of range.
        UnsupportedError: The type is not one of `edgecc.ir.rope.ROPE_TYPES`.
    """
    outer = Fields(config, where)
    rope = rope_fields(outer)
    rope_type = _rope_type(rope)
    holder = rope if "partial_rotary_factor" in rope else outer
    partial = holder.number("partial_rotary_factor", default=default_partial)
    rotated = int(head_dim * min(partial, 1.0))
    if partial > 1 or rotated < 2 or rotated % 2:
        holder.fail("partial_rotary_factor", f"a fraction that gives head_dim {head_dim} even dims")
    theta = (rope if "rope_theta" in rope else outer).number("rope_theta", default=DEFAULT_THETA)
    try:
        return _scaled(RopeParams(theta, rotated), rope_type, rope, outer)
    except ValueError as error:
        raise InputError("config/bad-value", str(error), where=rope.where) from error


def rope_fields(outer: Fields) -> Fields:
    """The rotary keys of a config as one object, whichever of the two spellings holds them.

    Raises:
        InputError: One of them is no object.
        UnsupportedError: They differ between layers.
    """
    merged: JsonObject = {}
    where = outer.where
    for name in ("rope_parameters", "rope_scaling"):
        inner = outer.section(name)
        if inner is None:
            continue
        given = {key: value for key, value in inner.values.items() if value is not None}
        if "type" in given:
            given.setdefault("rope_type", given["type"])
        merged |= given
        where = inner.where
    if any(isinstance(value, dict) for value in merged.values()):
        raise UnsupportedError(
            "rope/per-layer",
            "rotary parameters that differ between layers are not supported",
            where=where,
        )
    return Fields(merged, where)


def _rope_type(rope: Fields) -> str:
    rope_type = rope.string("rope_type", default="default")
    if rope_type in _PLAIN:
        return "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            "rope/unsupported-type",
            f"rotary embedding of type {rope_type!r} is not supported",
            where=rope.at("rope_type"),
            help=f"supported: {', '.join((*ROPE_TYPES, *_PLAIN))}",
        )
    return rope_type


def _scaled(plain: RopeParams, rope_type: str, rope: Fields, outer: Fields) -> RopeParams:
    if rope_type == "default":
        return plain
    factor = rope.number("factor")
    if rope_type == "linear":
        return replace(plain, rope_type=rope_type, factor=factor)
    key = "original_max_position_embeddings"
    original = (outer if key in outer else rope).integer(key, default=None)
    if original is None:
        original = outer.integer("max_position_embeddings")
    if rope_type == "llama3":
        return replace(
            plain,
            rope_type=rope_type,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return replace(
        plain,
        rope_type=rope_type,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.boolean("truncate", default=True),
        attention_factor=rope.number("attention_factor", default=None),
        mscale=rope.number("mscale", default=None),
        mscale_all_dim=rope.number("mscale_all_dim", default=None),
    )


def _head_dim(checkpoint: Checkpoint, text: Fields, kv_heads: int) -> int:
    declared = text.integer("head_dim", default=None)
    key = _key_projection(checkpoint)
    if key is None:
        found = declared if declared is not None else _quotient(text)
        if found > MAX_HEAD_DIM:
            text.fail("head_dim", f"at most {MAX_HEAD_DIM}")
        return found
    rows = checkpoint.tensors[key].shape[0]
    stored = rows // kv_heads
    if rows % kv_heads or declared not in (None, stored):
        raise InputError(
            "config/head-dim",
            f"head_dim is {declared}, but the key projection has {rows} rows for {kv_heads} heads"
            f" ({rows / kv_heads:g} each)",
            where=text.at("head_dim"),
            notes=(f"weights: {checkpoint.location(key)}",),
            help="config and weights are of different models or revisions: fetch both again",
        )
    return stored


def _quotient(text: Fields) -> int:
    hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    if hidden % heads:
        text.fail(
            "head_dim", f"a value, because hidden_size {hidden} / {heads} heads is no integer"
        )
    return hidden // heads


def _key_projection(checkpoint: Checkpoint) -> str | None:
    """The first key projection whose stored rows are output features, whatever its precision."""
    found: list[tuple[int, str]] = []
    for key, info in checkpoint.tensors.items():
        match = _KEY_PROJECTION.fullmatch(key)
        if match and len(info.shape) == 2 and _rows_are_features(checkpoint, key):
            found.append((int(match[1] or 0), key))
    return min(found)[1] if found else None


def _rows_are_features(checkpoint: Checkpoint, key: str) -> bool:
    info = checkpoint.tensors[key]
    if info.dtype.is_float:
        return True
    scale = checkpoint.tensors.get(f"{key}_scale")  # INT4 packs rows, NVFP4 columns
    return info.dtype is DType.U8 and scale is not None and scale.dtype is DType.F8E4M3


def _token_ids(checkpoint: Checkpoint, top: Fields, text: Fields, key: str) -> frozenset[int]:
    generation = Fields(checkpoint.generation_config, f"{checkpoint.role}/generation_config.json")
    found: frozenset[int] = frozenset()
    for fields in (top, text, generation):
        ids = fields.ids(key)
        if ids and max(ids) >= text.integer("vocab_size"):
            fields.fail(key, f"ids below vocab_size {text.integer('vocab_size')}")
        found |= ids
    return found


def _epsilon(text: Fields) -> float:
    epsilon = text.number("rms_norm_eps")
    if epsilon >= 1:  # would drown what it is added to
        text.fail("rms_norm_eps", "a number below 1")
    return epsilon


def _note_missing_theta(checkpoint: Checkpoint, text: Fields) -> None:
    """No frequency base is a sign of a damaged config: most models were trained with another."""
    if "rope_theta" not in text and "rope_theta" not in rope_fields(text):
        checkpoint.findings.append(
            Diagnostic(
                "rope/default-theta",
                f"there is no rope_theta: {DEFAULT_THETA:g} is taken",
                where=text.at("rope_theta"),
                help="add the value the model was trained with",
                severity=Severity.WARNING,
            )
        )


def _positions(text: Fields, rope: RopeParams) -> int:
    """Configs with YaRN may keep the length before it: Qwen2.5's do, as its model card tells."""
    declared = text.integer("max_position_embeddings", minimum=2)  # a prompt and an answer
    if rope.rope_type != "yarn":
        return declared
    return max(declared, int(rope.factor * (rope.original_max_position_embeddings or 0)))


def _tied(top: Fields, text: Fields) -> bool:
    holder = top if "tie_word_embeddings" in top else text
    return holder.boolean("tie_word_embeddings", default=False)


def _pad(text: Fields) -> int | None:
    pad = text.integer("pad_token_id", minimum=-1, default=None)
    return None if pad == -1 else pad  # old Llama configs write -1 for "none"
