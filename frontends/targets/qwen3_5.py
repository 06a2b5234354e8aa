"""Qwen3.5, 3.6 and 3.8 dense, language model (`model_type` qwen3_5 or qwen3_5_text).

As in transformers' modeling_qwen3_5. x = embed(ids); per layer x += mixer(norm(x)),
x += mlp(norm(x)); logits = lm_head(norm(x)). All norms scale by 1 + w, but for the one inside the
DeltaNet. The mixer of most layers is a Gated DeltaNet, of the others gated attention:

- Gated attention: in `edgecc.frontends.gated_attention`.
- Gated DeltaNet: q, k and v go through a short causal convolution and SiLU, then the delta rule
  with decay from a and write strength from b; its output is normed per head, then multiplied by
  silu(z).

Rotary embedding is the interleaved multimodal kind: frequency j turns with the time, height or
width position of a token. The three positions of a text token are equal, so every frequency turns
with that one, and the sections cancel out: plain rotary embedding of the same frequencies. That is
the graph for text alone. The one that reads images takes the positions as an input, and features of
images in place of the embeddings of their placeholder tokens; the tower that makes them is in
`qwen3_5_vision`, the multi-token-prediction block in `edgecc.frontends.drafts.mtp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.gated_attention import GatedAttentionBuilder, check_gate
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.mtp_block import MTP_BLOCK, MTP_TENSORS
from edgecc.frontends.targets.common import FINAL_NORM, check_variant, output_head
from edgecc.frontends.targets.qwen3_5_config import (
    LinearAttentionConfig,
    multimodal_axes,
    read_linear_attention,
)
from edgecc.ir.builder import Builder
from edgecc.ir.core import Value
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.shape import AxisAttributes, SplitAttributes
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.types import DType, Shape, sym
from edgecc.roles import Role

VISION_TOWER = "vision tower"
LEFT_OUT: Mapping[str, Sequence[str]] = {
    VISION_TOWER: ("model.visual.*", "visual.*"),
    MTP_BLOCK: MTP_TENSORS,
}
"""Parts of a checkpoint that are no part of the language model, with globs of their tensors."""

_FULL, _LINEAR = "full_attention", "linear_attention"
_MIXERS = {_FULL: "self_attn", _LINEAR: "linear_attn"}
_FUSED = ("self_attn.qkv_proj", "mlp.gate_up_proj", "linear_attn.in_proj_qkvz")


def build(
    weights: ModuleWeights,
    config: TextConfig,
    taps: Sequence[int],
    capacity: int,
    *,
    images: bool = False,
) -> None:
    """Build graph `target`.

    Inputs: token_ids i64 `[b, t]`, cache_length i64 `[b]`, logit_rows i64 `[r]`; for each
    full-attention layer two caches f32 `[b, kv_heads, capacity, head_dim]`; for each
    linear-attention layer the last inputs of the convolution f32 `[b, channels, taps - 1]` and the
    recurrent state f32 `[b, value_heads, key_dim, value_dim]`. Outputs: logits f32 `[b, r, V]`, the
    outputs of the tapped layers joined in the order of `taps` f32 `[b, t, n*H]` (when there are
    any), caches and states.

    With `images` there are three more inputs: positions i64 `[3, b, t]` (time, row, column),
    image_features f32 `[1, n, H]` and image_rows i64 `[b, t]`, the row of image_features that
    stands for a token, or -1.

    Args:
        weights: Tensors of the checkpoint.
        config: Hyperparameters.
        taps: Layers (counted from 0) whose outputs the draft reads; -1 is the embedding,
            `FINAL_NORM` what the head reads.
        capacity: Rows of each cache.
        images: Whether the graph reads images.

    Raises:
        InputError: Config and tensors contradict each other.
        UnsupportedError: The config asks for something this frontend does not build.
    """
    check_variant(config, _MIXERS)
    linear = read_linear_attention(weights.checkpoint, config)
    _check_tensors(weights, config)
    axes = multimodal_axes(weights.checkpoint, config) if images else ()
    _TargetBuilder(weights, config, linear, capacity, axes).build(taps)


class _TargetBuilder(GatedAttentionBuilder):
    """State of building one graph: the inputs every layer reads, and the outputs so far."""

    def __init__(
        self,
        weights: ModuleWeights,
        config: TextConfig,
        linear: LinearAttentionConfig,
        capacity: int,
        axes: tuple[int, ...],
    ) -> None:
        b = Builder(weights.module, "target")
        super().__init__(b, weights, config.rms_norm_eps, unit_offset=True)
        self.config, self.linear_config, self.capacity = config, linear, capacity
        self.axes = axes
        self.tables = weights.rope_tables(config.rope, capacity)

    def build(self, taps: Sequence[int]) -> None:
        b, config = self.b, self.config
        ids = b.input("token_ids", DType.I64, (sym("b"), sym("t")), Role.TOKEN_IDS)
        self.start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
        rows = b.input("logit_rows", DType.I64, (sym("r"),), Role.LOGIT_ROWS)
        images = self._image_inputs() if self.axes else None
        memories = [self._memory(i) for i in range(config.num_hidden_layers)]
        table = self.weights.matrix("model.embed_tokens", config.vocab_size, config.hidden_size)
        b.at("target: model.embed_tokens")
        if images is None:
            self.positions = b.op("position_ids", self.start, ids, name="positions")
        self.length = b.op("advance", self.start, ids, name="length")
        x = b.op("embedding", ids, weights=(table,), name="x")
        if images is not None:
            features, where = images
            features = b.op("squeeze", features, attrs=AxisAttributes(0), name="features")
            x = b.op("replace_rows", x, features, where, name="x")
        tapped = {-1: x}
        updated: list[tuple[Value, Value]] = []
        for i, memory in enumerate(memories):
            x, after = self._layer(i, x, memory)
            tapped[i] = x
            updated.append(after)
        b.at("target: model.norm")
        if FINAL_NORM in taps:
            tapped[FINAL_NORM] = normed = self.norm(x, "model.norm")
            hidden = b.op("take_rows", normed, rows, name="hidden")
        else:
            last = b.op("take_rows", x, rows, name="last")
            hidden = self.norm(last, "model.norm", name="hidden")
        head = output_head(self.weights, config, table)
        b.at("target: lm_head")
        b.output(b.op("linear", hidden, weights=(head,), name="logits"), "logits", Role.LOGITS)
        if taps:
            joined = [tapped[i] for i in taps]
            joined_taps = b.op("concat", *joined, attrs=AxisAttributes(2), name="taps")
            b.output(joined_taps, "hidden_tap", Role.HIDDEN_TAP)
        for i, (before, after) in enumerate(zip(memories, updated, strict=True)):
            role = Role.STATE if config.layer_types[i] == _LINEAR else Role.KV_CACHE
            for old, new in zip(before, after, strict=True):
                b.output(new, old.name, role, alias=old.name)

    def _image_inputs(self) -> tuple[Value, Value]:
        """Positions, which every layer reads; features of images and where they go."""
        b, tokens = self.b, (sym("b"), sym("t"))
        self.positions = b.input("positions", DType.I64, (3, *tokens), Role.POSITIONS)
        shape = (1, sym("n"), self.config.hidden_size)
        features = b.input("image_features", DType.F32, shape, Role.IMAGE_FEATURES)
        return features, b.input("image_rows", DType.I64, tokens, Role.IMAGE_ROWS)

    def _memory(self, i: int) -> tuple[Value, Value]:
        """The inputs in which layer i keeps what it knows of earlier rows."""
        config, linear = self.config, self.linear_config
        shapes: tuple[tuple[str, Shape], tuple[str, Shape]]
        if config.layer_types[i] == _LINEAR:
            role = Role.STATE
            shapes = (
                ("conv_state", (linear.channels, linear.taps - 1)),
                ("delta_state", (linear.value_heads, linear.key_dim, linear.value_dim)),
            )
        else:
            role = Role.KV_CACHE
            rows = (config.num_key_value_heads, self.capacity, config.head_dim)
            shapes = (("k_cache", rows), ("v_cache", rows))
        first, second = (
            self.b.input(f"{kind}.{i}", DType.F32, (sym("b"), *shape), role)
            for kind, shape in shapes
        )
        return first, second

    def _layer(
        self, i: int, x: Value, memory: tuple[Value, Value]
    ) -> tuple[Value, tuple[Value, Value]]:
        config, layer = self.config, f"model.layers.{i}"
        y = self.norm(x, f"{layer}.input_layernorm")
        mixer = self._delta_net if config.layer_types[i] == _LINEAR else self._attention
        y, memory = mixer(f"{layer}.{_MIXERS[config.layer_types[i]]}", y, memory)
        x = self.add(x, y)
        y = self.norm(x, f"{layer}.post_attention_layernorm")
        y = self.mlp(y, f"{layer}.mlp", config.intermediate_size, config.hidden_size)
        return self.add(x, y), memory

    def _attention(
        self, module: str, x: Value, memory: tuple[Value, Value]
    ) -> tuple[Value, tuple[Value, Value]]:
        """Gated attention over the caches."""
        caches = self.cached(module, x, memory)
        return self.attended(module, x, caches, self.positions), caches

    def _delta_net(
        self, module: str, x: Value, memory: tuple[Value, Value]
    ) -> tuple[Value, tuple[Value, Value]]:
        """Convolution, delta rule, gated norm."""
        b, weights, sizes = self.b, self.weights, self.linear_config
        mixed = self.linear(x, f"{module}.in_proj_qkv", sizes.channels)
        z = self.linear(x, f"{module}.in_proj_z", sizes.value_width)
        a, beta = (
            self.linear(x, f"{module}.in_proj_{name}", sizes.value_heads, name) for name in "ab"
        )
        taps = weights.dense(f"{module}.conv1d.weight", (sizes.channels, 1, sizes.taps))
        b.at(f"{weights.checkpoint.role}: {module}.conv1d")
        names = ("conv", memory[0].name)
        mixed, conv_state = b.node(
            "causal_conv1d", (mixed, memory[0]), (taps,), names=names
        ).results
        mixed = b.op("silu", mixed, name="qkv")
        cut = SplitAttributes(2, (sizes.key_width, sizes.key_width, sizes.value_width))
        q, k, v = b.node("split", (mixed,), attrs=cut, names=("q", "k", "v")).results
        gates = [weights.vector(f"{module}.{n}", sizes.value_heads) for n in ("A_log", "dt_bias")]
        b.at(f"{weights.checkpoint.role}: {module}")
        heads = GatedDeltaNetAttributes(sizes.key_heads, sizes.value_heads)
        operands = (q, k, v, a, beta, memory[1])
        y, state = b.node(
            "gated_delta_net", operands, gates, heads, ("delta", memory[1].name)
        ).results
        scale = weights.vector(f"{module}.norm.weight", sizes.value_dim)  # a plain one: not 1 + w
        b.at(f"{weights.checkpoint.role}: {module}.norm")
        attrs = RmsNormAttributes(self.eps, sizes.value_heads)
        y = b.op("rms_norm", y, weights=(scale,), attrs=attrs, name="normed")
        y = b.op("mul", y, b.op("silu", z, name="gate"), name="gated")
        return self.linear(y, f"{module}.out_proj", self.config.hidden_size), (conv_state, state)


def _check_tensors(weights: ModuleWeights, config: TextConfig) -> None:
    """Cross-check config and tensors where a missing or misshapen one would not say why.

    Raises:
        InputError: A layer is of another kind than the config says, or attention has no gate.
        UnsupportedError: Projections are stored fused.
    """
    names, role = weights.names(), weights.checkpoint.role
    parts = {".".join(name.split(".")[:size]): name for name in names for size in (4, 5)}
    for i, kind in enumerate(config.layer_types):
        layer = f"model.layers.{i}."
        stored = {mixer for mixer in _MIXERS.values() if f"{layer}{mixer}" in parts}
        if stored and stored != {_MIXERS[kind]}:
            raise InputError(
                "target/layer-kind",
                f"layer {i} is {kind} in the config, but its tensors are "
                f"{' and '.join(sorted(stored))}",
                where=config.at("layer_types"),
                help="config and weights are of different models or revisions: fetch both again",
            )
        fused = next((parts[layer + f] for f in _FUSED if layer + f in parts), None)
        if fused is not None:
            raise UnsupportedError(
                "target/fused-projections",
                f"{names[fused]} is stored: fused projections are not supported",
                where=f"{role}: {names[fused]}",
                help="use a checkpoint in the layout of the release",
            )
        check_gate(weights, config, f"{layer}self_attn.q_proj.weight")
