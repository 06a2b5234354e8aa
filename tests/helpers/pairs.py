"""Decoder-like modules: a target and a block draft that may borrow its head and embedding.

Small copies of what lifting makes: embedding, attention over caches with rotary embedding and
per-head norms, gated MLP, head; a draft that reads taps of the target, attends over context and
block rows, and proposes with a Markov head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgecc.ir import (
    Builder,
    Dense,
    DType,
    Module,
    Role,
    SymbolRange,
    Unbound,
    Value,
    Weight,
    sym,
)
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.sampling import MarkovChainAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes
from edgecc.ir.types import substitute
from helpers.weights import dense, packed, store

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """What a pair looks like.

    Attributes:
        layers: Decoder layers of each graph.
        hidden: Hidden size of both, a multiple of 4.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head, a multiple of 4.
        vocab: Rows of embedding and head; unlike all other widths of these modules.
        tokens: Ids below it are tokens, the other rows padding.
        slots: Slots of the draft's block.
        capacity: Rows of the caches.
        encoding: Of linear layers: f32, bf16 or nvfp4.
        special: Encodings of single weights by the end of their name: f32, bf16, nvfp4, or other
            for NVFP4 with another global scale.
        head: Encoding of the target's head, or `tied`.
        embedding: Encoding of the target's embedding table.
        draft_head: `unbound`, `own` bytes or the `same` bytes as the target's.
        draft_embedding: Likewise.
        draft_hidden: Hidden size the draft expects of what it borrows; default `hidden`.
        draft_vocab: Rows it expects; default `vocab`.
        bias: Whether q, k and v have biases.
        head_norms: Whether queries and keys have per-head norms.
        rope: Whether they are rotated.
        stored: Whether weights pretend to lie in checkpoints instead of in the module.
        seed: Of all weights.
    """

    layers: int = 1
    hidden: int = 8
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 4
    vocab: int = 13
    tokens: int = 11
    slots: int = 3
    capacity: int = 10
    encoding: str = "nvfp4"
    special: Mapping[str, str] = field(default_factory=dict)
    head: str = "nvfp4"
    embedding: str = "bf16"
    draft_head: str = "unbound"
    draft_embedding: str = "unbound"
    draft_hidden: int | None = None
    draft_vocab: int | None = None
    bias: bool = False
    head_norms: bool = True
    rope: bool = True
    stored: bool = False
    seed: int = 0


FEWER = settings(max_examples=max(20, settings().max_examples // 4))
"""For property tests that evaluate whole pairs: each example takes a tenth of a second."""

TARGET_HEAD = "target.lm_head.weight"
TARGET_EMBEDDING = "target.embed_tokens.weight"
DRAFT_HEAD = "draft.lm_head.weight"
DRAFT_EMBEDDING = "draft.embed_tokens.weight"


def pair(options: PairOptions | None = None, *, target: bool = True, draft: bool = True) -> Module:
    """A module with both graphs, or one of them."""
    options = options or PairOptions()
    module = Module(
        "pair",
        symbols={
            "b": SymbolRange(1, 2),
            "t": SymbolRange(1, 8),
            "r": SymbolRange(1, 8),
            "c": SymbolRange(0, 8),
        },
    )
    if target:
        _Target(module, "target", options).build()
    if draft:
        _Draft(module, "draft", options).build()
    return module


def pair_inputs(
    module: Module,
    options: PairOptions | None = None,
    seed: int = 0,
    *,
    batch: int = 1,
    rows: int = 3,
    context: int = 2,
    start: int = 2,
) -> dict[str, dict[str, Array]]:
    """Inputs of all entries: `start` valid rows in caches full of numbers, then new ones."""
    options = options or PairOptions()
    rng = np.random.default_rng(seed)
    sizes = {"b": batch, "t": rows, "r": 2, "c": context}

    def array(role: Role, shape: tuple[int, ...]) -> Array:
        if role in (Role.TOKEN_IDS, Role.ANCHOR):
            return rng.integers(0, options.tokens, shape)
        if role is Role.CACHE_LENGTH:
            return np.full(shape, start)
        if role is Role.LOGIT_ROWS:
            return rng.integers(0, rows, shape)
        return rng.standard_normal(shape).astype(np.float32)

    return {
        graph.name: {
            i.name: array(i.role, substitute(i.value.type.shape, sizes)) for i in graph.inputs
        }
        for graph in module.entries()
    }


@st.composite
def pair_options(draw: st.DrawFn) -> PairOptions:
    """Pairs of different shapes, encodings and ways to get a head."""
    kind = st.sampled_from(["f32", "bf16", "nvfp4"])
    source = st.sampled_from(["unbound", "own", "same"])
    kv_heads = draw(st.integers(1, 2))
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return PairOptions(
        layers=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        encoding=draw(kind),
        special=draw(st.dictionaries(st.sampled_from(names), kind | st.just("other"), max_size=2)),
        head=draw(kind | st.just("tied")),
        embedding=draw(kind),
        draft_head=draw(source),
        draft_embedding=draw(source),
        bias=draw(st.booleans()),
        head_norms=draw(st.booleans()),
        rope=draw(st.booleans()),
        stored=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


class _Decoder:
    """Weights and layers both graphs have."""

    def __init__(self, module: Module, name: str, options: PairOptions) -> None:
        self.module = module
        self.b = Builder(module, name)
        self.name = name
        self.options = options

    def weight(self, name: str, *shape: int, kind: str | None = None, like: str = "") -> str:
        """A random weight with the bytes of the one called `like`, default its own full name."""
        special = next((k for n, k in self.options.special.items() if n in name), None)
        kind = kind or special or self.options.encoding
        if len(shape) < 2 and kind in ("nvfp4", "other"):
            kind = "bf16"
        rng = np.random.default_rng([self.options.seed, *(like or f"{self.name}.{name}").encode()])
        if kind in ("nvfp4", "other"):
            scale = 0.125 if kind == "other" else 0.0625
            made = packed(rng, *shape, global_scale=scale).weight
        else:
            made = dense(rng.standard_normal(shape) / 2, DType(kind))
        symbol = f"{self.name}.{name}"
        if self.options.stored:
            return store(self.module, self.name, symbol, made)
        return self.module.weights.add(symbol, made)

    def norm(self, x: Value, name: str, groups: int = 1, width: int | None = None) -> Value:
        """RMS norm with a weight of its own."""
        weight = self.weight(name, width or self.options.hidden)
        return self.b.op("rms_norm", x, weights=(weight,), attrs=RmsNormAttributes(1e-5, groups))

    def linear(self, x: Value, name: str, rows: int, columns: int, bias: bool = False) -> Value:
        """Linear layer with a weight of its own; its name is the last part but one."""
        weights = [self.weight(f"{name}.weight", rows, columns)]
        if bias:
            weights.append(self.weight(f"{name}.bias", rows, kind="bf16"))
        return self.b.op("linear", x, weights=weights, name=name.split(".")[-1])

    def caches(self, layer: int) -> tuple[Value, Value]:
        """Inputs of a layer's caches."""
        o = self.options
        shape = (sym("b"), o.kv_heads, o.capacity, o.head_dim)
        k, v = (
            self.b.input(f"{part}_cache.{layer}", DType.F32, shape, Role.KV_CACHE) for part in "kv"
        )
        return k, v

    def rotary(self, x: Value, positions: Value, heads: int) -> Value:
        """Rotary embedding, if the model has one."""
        if not self.options.rope:
            return x
        for part in ("cos", "sin"):
            self.module.weights.derive(
                f"{self.name}.rope.{part}",
                "rope_table",
                (),
                part=part,
                length=self.options.capacity,
                theta=100.0,
                dim=self.options.head_dim,
            )
        tables = (f"{self.name}.rope.cos", f"{self.name}.rope.sin")
        return self.b.op("rope", x, positions, weights=tables, attrs=RopeAttributes(heads))

    def layer(
        self, index: int, x: Value, context: Value | None, caches: tuple[Value, Value], at: _Rows
    ) -> Value:
        """One decoder layer; keys and values also cover the context rows, if there are any."""
        o, prefix = self.options, f"layers.{index}"
        q_width, kv_width = o.heads * o.head_dim, o.kv_heads * o.head_dim
        normed = self.norm(x, f"{prefix}.input_layernorm.weight")
        rows = normed
        if context is not None:
            rows = self.b.op("concat", context, normed, attrs=AxisAttributes(1))
        q = self.linear(normed, f"{prefix}.q_proj", q_width, o.hidden, o.bias)
        k = self.linear(rows, f"{prefix}.k_proj", kv_width, o.hidden, o.bias)
        v = self.linear(rows, f"{prefix}.v_proj", kv_width, o.hidden, o.bias)
        if o.head_norms:
            q = self.norm(q, f"{prefix}.q_norm.weight", o.heads, o.head_dim)
            k = self.norm(k, f"{prefix}.k_norm.weight", o.kv_heads, o.head_dim)
        q = self.rotary(q, at.query_positions, o.heads)
        k = self.rotary(k, at.positions, o.kv_heads)
        k_cache, v_cache = caches
        k_new = self.b.op("cache_update", k_cache, k, at.start, name=k_cache.name)
        v_new = self.b.op("cache_update", v_cache, v, at.start, name=v_cache.name)
        attrs = AttentionAttributes(o.heads, o.kv_heads, o.head_dim**-0.5, context is None)
        attn = self.b.op("attention", q, k_new, v_new, at.length, attrs=attrs, name="attn")
        self.b.output(k_new, k_cache.name, Role.KV_CACHE, alias=k_cache.name)
        self.b.output(v_new, v_cache.name, Role.KV_CACHE, alias=v_cache.name)
        x = self.b.op("add", x, self.linear(attn, f"{prefix}.o_proj", o.hidden, q_width))
        normed = self.norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate = self.linear(normed, f"{prefix}.gate_proj", 12, o.hidden)
        up = self.linear(normed, f"{prefix}.up_proj", 12, o.hidden)
        act = self.b.op("swiglu", gate, up)
        return self.b.op("add", x, self.linear(act, f"{prefix}.down_proj", o.hidden, 12))


@dataclass(frozen=True)
class _Rows:
    """Where the new rows of a call stand."""

    start: Value
    length: Value
    positions: Value
    query_positions: Value


class _Target(_Decoder):
    def build(self) -> None:
        b, o = self.b, self.options
        ids = b.input("token_ids", DType.I64, (sym("b"), sym("t")), Role.TOKEN_IDS)
        start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
        logit_rows = b.input("logit_rows", DType.I64, (sym("r"),), Role.LOGIT_ROWS)
        caches = [self.caches(i) for i in range(o.layers)]
        table = self.weight("embed_tokens.weight", o.vocab, o.hidden, kind=o.embedding)
        x = b.op("embedding", ids, weights=(table,), name="x")
        positions = b.op("position_ids", start, x)
        rows = _Rows(start, b.op("advance", start, x), positions, positions)
        for index in range(o.layers):
            x = self.layer(index, x, None, caches[index], rows)
        b.output(x, "hidden_tap", Role.HIDDEN_TAP)
        z = b.op("take_rows", self.norm(x, "norm.weight"), logit_rows)
        head = table
        if o.head != "tied":
            head = self.weight("lm_head.weight", o.vocab, o.hidden, kind=o.head)
        b.output(b.op("linear", z, weights=(head,), name="logits"), "logits", Role.LOGITS)


class _Draft(_Decoder):
    def build(self) -> None:
        b, o = self.b, self.options
        shape = (sym("b"), sym("c"), o.hidden)
        features = b.input("features", DType.F32, shape, Role.FEATURES)
        anchor = b.input("anchor", DType.I64, (sym("b"),), Role.ANCHOR)
        start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
        caches = [self.caches(i) for i in range(o.layers)]
        context = self.norm(self.linear(features, "fc", o.hidden, o.hidden), "hidden_norm.weight")
        slots = b.op(
            "pad",
            b.op("unsqueeze", anchor, attrs=AxisAttributes(1)),
            attrs=PadAttributes(1, o.slots - 1, o.vocab - 1),
        )
        table = self.borrowed("embed_tokens", o.draft_embedding, o.embedding)
        x = b.op("embedding", slots, weights=(table,), name="x")
        everything = b.op("concat", context, x, attrs=AxisAttributes(1))
        positions = b.op("position_ids", start, everything)
        tail = b.op("tail", positions, slots, attrs=AxisAttributes(1))
        rows = _Rows(start, b.op("advance", start, everything), positions, tail)
        for index in range(o.layers):
            x = self.layer(index, x, context, caches[index], rows)
        z = self.norm(x, "norm.weight")
        head = self.borrowed("lm_head", o.draft_head, o.embedding if o.head == "tied" else o.head)
        base = b.op("linear", z, weights=(head,), name="base_logits")
        w1 = self.weight("markov_w1", o.vocab, 4, kind="bf16")
        w2 = self.weight("markov_w2", o.vocab, 4, kind="bf16")
        tokens, logits, embeddings = b.node(
            "markov_chain",
            (base, anchor),
            weights=(w1, w2),
            attrs=MarkovChainAttributes(o.slots, o.tokens),
            names=("proposals", "draft_logits", "embeddings"),
        ).results
        read = b.op("concat", z, embeddings, attrs=AxisAttributes(2))
        confidence = self.linear(read, "confidence", 1, o.hidden + 4, bias=True)
        confidence = b.op("squeeze", confidence, attrs=AxisAttributes(2))
        b.output(tokens, "proposals", Role.PROPOSALS)
        b.output(base, "base_logits", Role.BASE_LOGITS)
        b.output(logits, "draft_logits", Role.DRAFT_LOGITS)
        b.output(confidence, "confidence", Role.CONFIDENCE)

    def borrowed(self, role: str, source: str, kind: str) -> str:
        """Head or embedding: unbound, or of its own with the same or other bytes."""
        o = self.options
        shape = (o.draft_vocab or o.vocab, o.draft_hidden or o.hidden)
        if source == "unbound":
            looked_for = (f"draft/model.safetensors: {role}.weight",)
            weight = Weight(shape, Dense(DType.BF16), Unbound(role, looked_for))
            return self.module.weights.add(f"draft.{role}.weight", weight)
        tied = role == "lm_head" and o.head == "tied"
        same = "target.embed_tokens.weight" if tied else f"target.{role}.weight"
        like = same if source == "same" else ""
        return self.weight(f"{role}.weight", *shape, kind=kind, like=like)
