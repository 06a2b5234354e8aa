"""Every op of every device, lowered and run, against NumPy formulas written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edgecc.devices import ONNX_DEVICES, Dialect
from edgecc.errors import LegalizeError
from edgecc.ir import Builder, DType, Interpreter, Module, SymbolRange, sym
from edgecc.ir.ops.attention import RopeAttributes, SplitHeadsAttributes
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.elementwise import CastAttributes, GeluAttributes
from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes
from edgecc.ir.ops.sampling import ArgmaxAttributes, MarkovChainAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
from edgecc.roles import Role
from helpers.lowering import (
    GRAPH,
    Array,
    Build,
    GraphBuilder,
    Lowered,
    assert_close,
    compare,
    lowered,
    nvfp4_values,
    random_nvfp4,
)

B, T, R = sym("b"), sym("t"), sym("r")
BATCH_AND_ROWS = [(1, 1), (1, 2), (1, 17), (3, 5)]
NOT_HERE = {
    *("call", "cached_attention", "cache_update", "attention"),
    *("causal_conv1d", "gated_delta_net", "logged_delta_net"),
}
"""Ops with tests of their own: below, in test_attention.py and in test_state.py."""


@dataclass(frozen=True)
class Case:
    """One graph, its inputs, and what an independent formula gives."""

    build: Build
    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]
    options: dict[str, Any] = field(default_factory=dict)
    dialects: tuple[Dialect, ...] = tuple(Dialect)


Make = Callable[[np.random.Generator, int, int], Case]
CASES: dict[str, tuple[str, Make]] = {}


def case(op: str) -> Callable[[Make], Make]:
    """Register a function `(random, batch, rows)` that makes a case of `op`."""

    def register(make: Make) -> Make:
        CASES[make.__name__] = (op, make)
        return make

    return register


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def wide(array: Array) -> Array:
    return array.astype(np.float64)


@case("linear")
def linear_f32(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, w = normal(random, batch, rows, 96), normal(random, 40, 96)

    def build(b: GraphBuilder) -> None:
        y = b.op("linear", b.take("x", (B, T, 96)), weights=(b.dense("w", w),))
        b.give("y", y)

    return Case(build, {"x": x}, {"y": np.einsum("btk,nk->btn", wide(x), wide(w))})


@case("linear")
def linear_bf16_bias(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, rows, 33)
    w = normal(random, 7, 33).astype(ml_dtypes.bfloat16)
    bias = normal(random, 7).astype(ml_dtypes.bfloat16)

    def build(b: GraphBuilder) -> None:
        weights = (b.dense("w", w), b.dense("bias", bias))
        b.give("y", b.op("linear", b.take("x", (B, T, 33)), weights=weights))

    y = np.einsum("btk,nk->btn", wide(x), wide(w)) + wide(bias)
    return Case(build, {"x": x}, {"y": y})


@case("linear")
def linear_one_column_of_two_axes(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, w = normal(random, rows, 48), normal(random, 1, 48).astype(np.float16)

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("linear", b.take("x", (T, 48)), weights=(b.dense("w", w),)))

    return Case(build, {"x": x}, {"y": wide(x) @ wide(w).T})


@case("linear")
def linear_nvfp4(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, parts = normal(random, batch, rows, 128), random_nvfp4(random, 48, 128)

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("linear", b.take("x", (B, T, 128)), weights=(b.nvfp4("w", *parts),)))

    return Case(build, {"x": x}, {"y": np.einsum("btk,nk->btn", wide(x), nvfp4_values(*parts))})


@case("linear")
def linear_nvfp4_twice(random: np.random.Generator, batch: int, rows: int) -> Case:
    """One weight, two layers: it is expanded and transposed once."""
    x, parts = normal(random, batch, rows, 64), random_nvfp4(random, 64, 64)

    def build(b: GraphBuilder) -> None:
        w = b.nvfp4("w", *parts)
        first = b.op("linear", b.take("x", (B, T, 64)), weights=(w,))
        b.give("y", b.op("linear", first, weights=(w,)))

    values = nvfp4_values(*parts)
    return Case(build, {"x": x}, {"y": wide(x) @ values.T @ values.T})


@case("linear")
def linear_int8_split(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, parts = normal(random, batch, rows, 256), random_nvfp4(random, 48, 256)
    x[0, 0, 16:32] = 0  # a block without a scale

    def build(b: GraphBuilder) -> None:
        weights = (b.nvfp4("w", *parts), b.dense("bias", normal(np.random.default_rng(1), 48)))
        b.give("y", b.op("linear", b.take("x", (B, T, 256)), weights=weights))

    y = wide(x) @ nvfp4_values(*parts).T + wide(normal(np.random.default_rng(1), 48))
    options = {"form": "int8-split", "tolerance": 1e-4}
    return Case(build, {"x": x}, {"y": y}, options, (Dialect.ORT_CONTRIB,))


@case("linear")
def linear_int8_split_of_two_axes(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, parts = normal(random, rows, 64), random_nvfp4(random, 32, 64)

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("linear", b.take("x", (T, 64)), weights=(b.nvfp4("w", *parts),)))

    options = {"form": "int8-split", "tolerance": 1e-4}
    y = wide(x) @ nvfp4_values(*parts).T
    return Case(build, {"x": x}, {"y": y}, options, (Dialect.ORT_CONTRIB,))


def _embedding(random: np.random.Generator, table: Array, ids: Array) -> Case:
    def build(b: GraphBuilder) -> None:
        taken = b.take("ids", (B, T), DType.I64)
        b.give("rows", b.op("embedding", taken, weights=(b.dense("table", table),)))

    return Case(build, {"ids": ids}, {"rows": wide(table)[ids]}, {"tolerance": 0.0})


@case("embedding")
def embedding_bf16(random: np.random.Generator, batch: int, rows: int) -> Case:
    table = normal(random, 50, 24).astype(ml_dtypes.bfloat16)
    return _embedding(random, table, random.integers(0, 50, (batch, rows)))


@case("embedding")
def embedding_f16(random: np.random.Generator, batch: int, rows: int) -> Case:
    table = normal(random, 50, 24).astype(np.float16)
    return _embedding(random, table, np.full((batch, rows), 49))


@case("embedding")
def embedding_f32(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _embedding(random, normal(random, 5, 3), random.integers(0, 5, (batch, rows)))


@case("embedding")
def embedding_and_head_of_one_table(random: np.random.Generator, batch: int, rows: int) -> Case:
    """A tied head: rows of the table as stored, and the product with the widened table."""
    table = normal(random, 50, 32).astype(ml_dtypes.bfloat16)
    ids = random.integers(0, 50, (batch, rows))

    def build(b: GraphBuilder) -> None:
        symbol = b.dense("table", table)
        x = b.op("embedding", b.take("ids", (B, T), DType.I64), weights=(symbol,))
        b.give("logits", b.op("linear", x, weights=(symbol,)))

    return Case(build, {"ids": ids}, {"logits": wide(table)[ids] @ wide(table).T})


@case("lookup")
def lookup_ids(random: np.random.Generator, batch: int, rows: int) -> Case:
    ids, table = random.integers(0, 40, (batch, rows)), random.integers(0, 1 << 40, 40)

    def build(b: GraphBuilder) -> None:
        taken = b.take("ids", (B, T), DType.I64)
        b.give("found", b.op("lookup", taken, weights=(b.dense("table", table),)))

    return Case(build, {"ids": ids}, {"found": table[ids]})


@case("lookup")
def lookup_of_offsets(random: np.random.Generator, batch: int, rows: int) -> Case:
    """The derived table is written as ids."""
    ids, offsets = random.integers(0, 40, (batch, rows)), random.integers(0, 1 << 40, 40)

    def build(b: GraphBuilder) -> None:
        b.module.weights.derive("map", "offsets_to_ids", (b.dense("offsets", offsets),))
        taken = b.take("ids", (B, T), DType.I64)
        b.give("found", b.op("lookup", taken, weights=("map",)))

    return Case(build, {"ids": ids}, {"found": ids + offsets[ids]})


def _rms_norm(x: Array, w: Array, groups: int, eps: float) -> Array:
    pieces = [
        piece / np.sqrt((piece**2).sum(-1, keepdims=True) / piece.shape[-1] + eps) * wide(w)
        for piece in np.split(wide(x), groups, axis=-1)
    ]
    return np.concatenate(pieces, axis=-1)


@case("rms_norm")
def rms_norm_plain(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, w = normal(random, batch, rows, 96), normal(random, 96).astype(ml_dtypes.bfloat16)

    def build(b: GraphBuilder) -> None:
        attrs = RmsNormAttributes(1e-6)
        y = b.op("rms_norm", b.take("x", (B, T, 96)), weights=(b.dense("w", w),), attrs=attrs)
        b.give("y", y)

    return Case(build, {"x": x}, {"y": _rms_norm(x, w, 1, 1e-6)})


@case("rms_norm")
def rms_norm_of_heads(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, w = normal(random, batch, rows, 6 * 32), normal(random, 32)

    def build(b: GraphBuilder) -> None:
        attrs = RmsNormAttributes(1e-5, groups=6)
        y = b.op("rms_norm", b.take("x", (B, T, 192)), weights=(b.dense("w", w),), attrs=attrs)
        b.give("y", y)

    return Case(build, {"x": x}, {"y": _rms_norm(x, w, 6, 1e-5)})


@case("rms_norm")
def rms_norm_of_tiny_rows(random: np.random.Generator, batch: int, rows: int) -> Case:
    """Rows so small that eps decides, of two axes."""
    x, w = normal(random, rows, 16) * np.float32(1e-4), normal(random, 8)

    def build(b: GraphBuilder) -> None:
        attrs = RmsNormAttributes(1e-6, groups=2)
        y = b.op("rms_norm", b.take("x", (T, 16)), weights=(b.dense("w", w),), attrs=attrs)
        b.give("y", y)

    return Case(build, {"x": x}, {"y": _rms_norm(x, w, 2, 1e-6)})


def _elementwise(op: str, inputs: dict[str, Array], expected: Array) -> Case:
    def build(b: GraphBuilder) -> None:
        taken = [b.take(name, (B, T, array.shape[2])) for name, array in inputs.items()]
        b.give("y", b.op(op, *taken))

    return Case(build, inputs, {"y": expected})


@case("add")
def add(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, y = normal(random, batch, rows, 9), normal(random, batch, rows, 9)
    return _elementwise("add", {"x": x, "y": y}, wide(x) + wide(y))


@case("sub")
def sub(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, y = normal(random, batch, rows, 9), normal(random, batch, rows, 9)
    return _elementwise("sub", {"x": x, "y": y}, wide(x) - wide(y))


@case("mul")
def mul(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, y = normal(random, batch, rows, 9), normal(random, batch, rows, 9)
    return _elementwise("mul", {"x": x, "y": y}, wide(x) * wide(y))


def _spread(random: np.random.Generator, batch: int, rows: int) -> Array:
    """Numbers over a range where a careless sigmoid overflows."""
    x = normal(random, batch, rows, 12) * np.float32(4)
    x[..., :4] = [-200, -30, 0, 90]
    return x


@case("sigmoid")
def sigmoid(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = _spread(random, batch, rows)
    return _elementwise("sigmoid", {"x": x}, (1 + np.tanh(wide(x) / 2)) / 2)


@case("tanh")
def tanh(random: np.random.Generator, batch: int, rows: int) -> Case:
    """From another formula, and with small numbers, which that of a careless one loses."""
    x = _spread(random, batch, rows)
    x[..., -1] = 1e-6
    grown = np.expm1(2 * np.minimum(wide(x), 20))
    return _elementwise("tanh", {"x": x}, grown / (grown + 2))


@case("silu")
def silu(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = _spread(random, batch, rows)
    return _elementwise("silu", {"x": x}, wide(x) * (1 + np.tanh(wide(x) / 2)) / 2)


@case("swiglu")
def swiglu(random: np.random.Generator, batch: int, rows: int) -> Case:
    gate, up = _spread(random, batch, rows), normal(random, batch, rows, 12)
    y = wide(gate) * (1 + np.tanh(wide(gate) / 2)) / 2 * wide(up)
    return _elementwise("swiglu", {"gate": gate, "up": up}, y)


@case("concat")
def concat_rows(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, y = normal(random, batch, rows, 5), normal(random, batch, 7, 5)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("x", (B, T, 5)), b.take("y", (B, 7, 5)))
        b.give("z", b.op("concat", *operands, attrs=AxisAttributes(1)))

    return Case(
        build, {"x": x, "y": y}, {"z": np.stack([np.vstack(p) for p in zip(x, y, strict=True)])}
    )


@case("concat")
def concat_three_columns_of_integers(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = random.integers(-9, 9, (batch, rows, 2))

    def build(b: GraphBuilder) -> None:
        taken = b.take("x", (B, T, 2), DType.I64)
        b.give("z", b.op("concat", taken, taken, taken, attrs=AxisAttributes(2)))

    return Case(build, {"x": x}, {"z": np.tile(x, 3)})


@case("split")
def split(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, rows, 10)

    def build(b: GraphBuilder) -> None:
        node = b.node("split", [b.take("x", (B, T, 10))], attrs=SplitAttributes(2, (6, 1, 3)))
        for index, piece in enumerate(node.results):
            b.give(f"piece{index}", piece)

    pieces = {"piece0": x[..., :6], "piece1": x[..., 6:7], "piece2": x[..., 7:]}
    return Case(build, {"x": x}, pieces, {"tolerance": 0.0})


@case("split_heads")
def split_heads(random: np.random.Generator, batch: int, rows: int) -> Case:
    """Query and gate side by side in each of 3 heads."""
    x = normal(random, batch, rows, 15)

    def build(b: GraphBuilder) -> None:
        attrs = SplitHeadsAttributes(3, (4, 1))
        node = b.node("split_heads", [b.take("x", (B, T, 15))], attrs=attrs)
        for index, piece in enumerate(node.results):
            b.give(f"piece{index}", piece)

    gates = [4, 9, 14]
    pieces = {"piece0": np.delete(x, gates, axis=2), "piece1": x[..., gates]}
    return Case(build, {"x": x}, pieces, {"tolerance": 0.0})


@case("slice")
def slice_(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, 7, rows)

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("slice", b.take("x", (B, 7, T)), attrs=SliceAttributes(1, 2, 5)))

    return Case(build, {"x": x}, {"y": x[:, 2:5]}, {"tolerance": 0.0})


@case("tail")
def tail_as_long_as_a_fixed_axis(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, like = normal(random, batch, rows + 4, 3), normal(random, batch, 4, 2)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("x", (B, T, 3)), b.take("like", (B, 4, 2)))
        b.give("y", b.op("tail", *operands, attrs=AxisAttributes(1)))

    return Case(build, {"x": x, "like": like}, {"y": x[:, rows:]}, {"tolerance": 0.0})


@case("tail")
def tail_as_long_as_a_free_axis(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, like = random.integers(0, 99, (batch, rows + 4)), normal(random, batch, rows, 2)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("x", (B, T), DType.I64), b.take("like", (B, R, 2)))
        b.give("y", b.op("tail", *operands, attrs=AxisAttributes(1)))

    return Case(build, {"x": x, "like": like}, {"y": x[:, 4:]})


@case("take_rows")
def take_rows(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, picked = normal(random, batch, rows, 5), random.integers(0, rows, 4)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("x", (B, T, 5)), b.take("rows", (R,), DType.I64))
        b.give("y", b.op("take_rows", *operands))

    return Case(build, {"x": x, "rows": picked}, {"y": x[:, picked]}, {"tolerance": 0.0})


@case("pad")
def pad_integers(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = random.integers(0, 99, (batch, rows))

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("pad", b.take("x", (B, T), DType.I64), attrs=PadAttributes(1, 6, 4095)))

    filler = np.full((batch, 6), 4095)
    return Case(build, {"x": x}, {"y": np.hstack([x, filler])})


@case("pad")
def pad_first_axis_of_floats(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, rows, 2)

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("pad", b.take("x", (B, T, 2)), attrs=PadAttributes(0, 1, -3)))

    y = np.concatenate([x, np.full((1, rows, 2), -3, np.float32)])
    return Case(build, {"x": x}, {"y": y}, {"tolerance": 0.0})


@case("add_rms_norm")
def add_rms_norm(random: np.random.Generator, batch: int, rows: int) -> Case:
    """Both results are returned, and both are used."""
    a, b, w = normal(random, batch, rows, 96), normal(random, batch, rows, 96), normal(random, 96)

    def build(g: GraphBuilder) -> None:
        operands = [g.take("a", (B, T, 96)), g.take("b", (B, T, 96))]
        node = g.node("add_rms_norm", operands, (g.dense("w", w),), AddRmsNormAttributes(1e-5))
        g.give("normed", node.results[0])
        g.give("sum", node.results[1])
        g.give("product", g.op("mul", *node.results))

    total = wide(a) + b
    normed = _rms_norm(total, w, 1, 1e-5)
    expected = {"normed": normed, "sum": total, "product": normed * total}
    return Case(build, {"a": a, "b": b}, expected)


@case("add_rms_norm")
def add_rms_norm_of_other_ranks(random: np.random.Generator, batch: int, rows: int) -> Case:
    """The kernel takes two or three axes; only the norm is read."""
    a, w = normal(random, batch, 2, rows, 32), normal(random, 32)

    def build(g: GraphBuilder) -> None:
        x, flat = g.take("x", (B, 2, T, 32)), g.take("flat", (T, 32))
        weights = (g.dense("w", w),)
        attrs = AddRmsNormAttributes(1e-6)
        g.give("four", g.node("add_rms_norm", (x, x), weights, attrs).results[0])
        g.give("two", g.node("add_rms_norm", (flat, flat), weights, attrs).results[0])

    expected = {"four": _rms_norm(2 * wide(a), w, 1, 1e-6)}
    expected["two"] = _rms_norm(2 * wide(a[0, 0]), w, 1, 1e-6)
    return Case(build, {"x": a, "flat": a[0, 0]}, expected)


@case("constant")
def constants(random: np.random.Generator, batch: int, rows: int) -> Case:
    """Floats of any encoding and integers, returned as they are and used by others."""
    x, table = normal(random, 3, 8), normal(random, 4, 32)
    vector = normal(random, 8).astype(ml_dtypes.bfloat16)
    packed, scale, scale_2 = random_nvfp4(random, 4, 32)
    ids = random.integers(0, 4, (2, rows))

    def build(b: GraphBuilder) -> None:
        b.give("x", b.op("constant", weights=(b.dense("wx", x),)))
        b.give("v", b.op("constant", weights=(b.dense("wv", vector),)))
        b.give("p", b.op("constant", weights=(b.nvfp4("wp", packed, scale, scale_2),)))
        made = b.op("constant", weights=(b.dense("ids", ids),))
        b.give("rows", b.op("embedding", made, weights=(b.dense("table", table),)))
        b.give("sum", b.op("add", b.take("y", (3, 8)), b.graph.nodes[0].result))

    y = normal(random, 3, 8)
    expected = {
        "x": x,
        "v": vector.astype(np.float32),
        "p": nvfp4_values(packed, scale, scale_2),
        "rows": table[ids],
        "sum": wide(x) + y,
    }
    return Case(build, {"y": y}, expected, {"tolerance": 1e-7})


@case("layer_norm")
def layer_norm(random: np.random.Generator, batch: int, rows: int) -> Case:
    """Far from zero, with 16-bit weights."""
    x = normal(random, batch, rows, 48) + np.float32(9)
    w, bias = (normal(random, 48).astype(ml_dtypes.bfloat16) for _ in "wb")

    def build(b: GraphBuilder) -> None:
        weights = (b.dense("w", w), b.dense("bias", bias))
        attrs = LayerNormAttributes(1e-6)
        b.give("y", b.op("layer_norm", b.take("x", (B, T, 48)), weights=weights, attrs=attrs))

    mean = wide(x).mean(-1, keepdims=True)
    deviation = np.sqrt(((wide(x) - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
    y = (wide(x) - mean) / deviation * wide(w) + wide(bias)
    return Case(build, {"x": x}, {"y": y})


def _gelu(random: np.random.Generator, batch: int, rows: int, approximate: str) -> Case:
    x = _spread(random, batch, rows)

    def build(b: GraphBuilder) -> None:
        attrs = GeluAttributes(approximate)
        b.give("y", b.op("gelu", b.take("x", (B, T, 12)), attrs=attrs))

    share = np.vectorize(NormalDist().cdf)(wide(x))
    if approximate == "tanh":
        share = (1 + np.tanh(np.sqrt(2 / np.pi) * (wide(x) + 0.044715 * wide(x) ** 3))) / 2
    return Case(build, {"x": x}, {"y": wide(x) * share})


@case("gelu")
def gelu_exact(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _gelu(random, batch, rows, "none")


@case("gelu")
def gelu_tanh(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _gelu(random, batch, rows, "tanh")


def _multi_axis_rope(
    random: np.random.Generator, batch: int, rows: int, axes: tuple[int, ...], head_dim: int
) -> Case:
    """Two layers that share cosines and sines, as complex rotations."""
    half, count = len(axes), max(axes) + 1
    x, positions = (
        normal(random, batch, rows, 2 * head_dim),
        random.integers(0, 64, (count, batch, rows)),
    )
    angle = random.uniform(-3, 3, (64, half)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)

    def build(b: GraphBuilder) -> None:
        tables = (b.dense("cos", cos), b.dense("sin", sin))
        taken = b.take("x", (B, T, 2 * head_dim)), b.take("p", (count, B, T), DType.I64)
        attrs = MultiAxisRopeAttributes(2, axes)
        y = b.op("multi_axis_rope", *taken, weights=tables, attrs=attrs)
        b.give("y", y)
        b.give("z", b.op("multi_axis_rope", y, taken[1], weights=tables, attrs=attrs))

    where = np.stack([positions[axis] for axis in axes], axis=-1)
    turn = (wide(cos) + 1j * wide(sin))[where, np.arange(half)][:, :, None]

    def turned(values: Array) -> Array:
        heads = values.reshape(batch, rows, 2, head_dim)
        z = (heads[..., :half] + 1j * heads[..., half : 2 * half]) * turn
        parts = [z.real, z.imag, heads[..., 2 * half :]]
        return np.concatenate(parts, axis=-1).reshape(values.shape)

    y = turned(wide(x))
    return Case(build, {"x": x, "p": positions}, {"y": y, "z": turned(y)})


@case("multi_axis_rope")
def axial_rope_of_whole_heads(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _multi_axis_rope(random, batch, rows, (0,) * 9 + (1,) * 9, 36)


@case("multi_axis_rope")
def interleaved_rope_of_a_part_of_a_head(
    random: np.random.Generator, batch: int, rows: int
) -> Case:
    return _multi_axis_rope(random, batch, rows, (0, 1, 2, 0, 1, 2, 0, 0), 64)


@case("multi_head_attention")
def multi_head_attention(random: np.random.Generator, batch: int, rows: int) -> Case:
    """Heads of 72, as vision towers have."""
    operands = {name: normal(random, batch, rows, 3 * 72) for name in "qkv"}

    def build(b: GraphBuilder) -> None:
        taken = [b.take(name, (B, T, 216)) for name in operands]
        attrs = MultiHeadAttentionAttributes(3, 0.2)
        b.give("y", b.op("multi_head_attention", *taken, attrs=attrs))

    q, k, v = (wide(x).reshape(batch, rows, 3, 72) for x in operands.values())
    shares = np.exp(0.2 * np.einsum("bihd,bjhd->bhij", q, k))
    shares /= shares.sum(-1, keepdims=True)
    y = np.einsum("bhij,bjhd->bihd", shares, v).reshape(batch, rows, 216)
    return Case(build, operands, {"y": y})


@case("merge_rows")
def merge_rows(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, 4 * rows, 6)

    def build(b: GraphBuilder) -> None:
        taken = b.take("x", (B, 4 * T, 6))
        b.give("y", b.op("merge_rows", taken, attrs=MergeRowsAttributes(4)))

    y = np.concatenate([x[:, i::4] for i in range(4)], axis=-1)
    return Case(build, {"x": x}, {"y": y}, {"tolerance": 0.0})


@case("replace_rows")
def replace_rows(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, new = normal(random, batch, rows, 6), normal(random, 4, 6)
    index = random.integers(-1, 4, (batch, rows))

    def build(b: GraphBuilder) -> None:
        taken = b.take("x", (B, T, 6)), b.take("new", (R, 6)), b.take("i", (B, T), DType.I64)
        b.give("y", b.op("replace_rows", *taken))

    y = np.where(index[..., None] < 0, x, new[index])
    return Case(build, {"x": x, "new": new, "i": index}, {"y": y}, {"tolerance": 0.0})


@case("replace_rows")
def replace_no_rows(random: np.random.Generator, batch: int, rows: int) -> Case:
    """A call for text: what the rows hold is of no account."""
    x, none = normal(random, batch, rows, 6), np.full((1, 6), np.nan, np.float32)

    def build(b: GraphBuilder) -> None:
        taken = b.take("x", (B, T, 6)), b.take("new", (R, 6)), b.take("i", (B, T), DType.I64)
        b.give("y", b.op("replace_rows", *taken))

    index = np.full((batch, rows), -1)
    return Case(build, {"x": x, "new": none, "i": index}, {"y": x}, {"tolerance": 0.0})


def _embedding_bag(random: np.random.Generator, batch: int, rows: int, table: Array) -> Case:
    ids, factors = random.integers(0, 50, (batch, rows, 4)), normal(random, batch, rows, 4)

    def build(b: GraphBuilder) -> None:
        taken = b.take("ids", (B, T, 4), DType.I64), b.take("factors", (B, T, 4))
        b.give("y", b.op("embedding_bag", *taken, weights=(b.dense("table", table),)))

    y = np.einsum("btk,btkh->bth", wide(factors), wide(table)[ids])
    return Case(build, {"ids": ids, "factors": factors}, {"y": y})


@case("embedding_bag")
def embedding_bag_f32(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _embedding_bag(random, batch, rows, normal(random, 50, 24))


@case("embedding_bag")
def embedding_bag_bf16(random: np.random.Generator, batch: int, rows: int) -> Case:
    table = normal(random, 50, 24).astype(ml_dtypes.bfloat16)
    return _embedding_bag(random, batch, rows, table)


@case("unsqueeze")
def unsqueeze(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, rows)

    def build(b: GraphBuilder) -> None:
        taken = b.take("x", (B, T))
        for axis in range(3):
            b.give(f"y{axis}", b.op("unsqueeze", taken, attrs=AxisAttributes(axis)))

    y = {"y0": x[None], "y1": x[:, None], "y2": x[:, :, None]}
    return Case(build, {"x": x}, y, {"tolerance": 0.0})


@case("squeeze")
def squeeze(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, 1, rows)

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("squeeze", b.take("x", (B, 1, T)), attrs=AxisAttributes(1)))

    return Case(build, {"x": x}, {"y": x.reshape(batch, rows)}, {"tolerance": 0.0})


@case("position_ids")
def position_ids(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, length = normal(random, batch, rows, 2), random.integers(0, 9999, batch)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("length", (B,), DType.I64), b.take("x", (B, T, 2)))
        b.give("y", b.op("position_ids", *operands))

    y = np.array([range(first, first + rows) for first in length])
    return Case(build, {"length": length, "x": x}, {"y": y})


@case("position_ids")
def position_ids_of_a_fixed_block(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, length = normal(random, batch, 7, rows), random.integers(0, 9999, batch)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("length", (B,), DType.I64), b.take("x", (B, 7, T)))
        b.give("y", b.op("position_ids", *operands))

    y = np.array([range(first, first + 7) for first in length])
    return Case(build, {"length": length, "x": x}, {"y": y})


@case("advance")
def advance(random: np.random.Generator, batch: int, rows: int) -> Case:
    x, length = normal(random, batch, rows, 2), random.integers(0, 9999, batch)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("length", (B,), DType.I64), b.take("x", (B, T, 2)))
        b.give("y", b.op("advance", *operands))

    return Case(build, {"length": length, "x": x}, {"y": length + rows})


def _argmax(random: np.random.Generator, x: Array, limit: int) -> Case:
    def build(b: GraphBuilder) -> None:
        taken = b.take("x", (B, T, x.shape[2]))
        b.give("y", b.op("argmax", taken, attrs=ArgmaxAttributes(limit)))

    first = [[min(i for i in range(limit) if row[i] == max(row[:limit])) for row in s] for s in x]
    return Case(build, {"x": x}, {"y": np.array(first)})


@case("argmax")
def argmax_takes_the_first_of_equals(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = random.integers(0, 3, (batch, rows, 40)).astype(np.float32)
    return _argmax(random, x, 40)


@case("argmax")
def argmax_leaves_padding_out(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, rows, 40)
    x[..., 37:] = 99
    return _argmax(random, x, 37)


def _rope(random: np.random.Generator, rows: Array, heads: int, dim: int, rotated: int) -> Case:
    """Rotation as multiplication with `exp(i angle)`."""
    batch, count = rows.shape
    x = normal(random, batch, count, heads * dim)
    angles = np.arange(64)[:, None] / 100.0 ** (np.arange(0, rotated, 2) / rotated)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def build(b: GraphBuilder) -> None:
        operands = (b.take("x", (B, T, heads * dim)), b.take("rows", (B, T), DType.I64))
        tables = (b.dense("cos", cos), b.dense("sin", sin))
        b.give("y", b.op("rope", *operands, weights=tables, attrs=RopeAttributes(heads)))

    split = wide(x).reshape(batch, count, heads, dim)
    half = rotated // 2
    turned = (split[..., :half] + 1j * split[..., half:rotated]) * (wide(cos) + 1j * wide(sin))[
        rows
    ][:, :, None]
    y = np.concatenate([turned.real, turned.imag, split[..., rotated:]], axis=-1)
    return Case(build, {"x": x, "rows": rows}, {"y": y.reshape(x.shape)})


@case("rope")
def rope_of_whole_heads(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _rope(random, random.integers(0, 64, (batch, rows)), 3, 32, 32)


@case("rope")
def rope_of_wide_heads(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _rope(random, np.tile(np.arange(63, 63 - rows, -1), (batch, 1)), 1, 128, 128)


@case("rope")
def rope_of_half_a_head(random: np.random.Generator, batch: int, rows: int) -> Case:
    return _rope(random, random.integers(0, 64, (batch, rows)), 4, 64, 32)


@case("cast")
def cast_to_the_same_type(random: np.random.Generator, batch: int, rows: int) -> Case:
    x = normal(random, batch, rows, 8)

    def build(b: GraphBuilder) -> None:
        b.give("y", b.op("cast", b.take("x", (B, T, 8)), attrs=CastAttributes("f32")))

    return Case(build, {"x": x}, {"y": wide(x)})


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_casts_round_like_the_reference(
    dtype: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`legalize` refuses them on these devices, which have no other 16-bit kernels."""
    monkeypatch.setattr("helpers.lowering.Legalize.run", lambda *_: False)

    def build(b: GraphBuilder) -> None:
        narrow = b.op("cast", b.take("x", (1, T, 8)), attrs=CastAttributes(dtype))
        b.give("y", b.op("cast", narrow, attrs=CastAttributes("f32")))

    x = normal(np.random.default_rng(0), 1, 9, 8)
    x[0, 0, :3] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-11 + 1]  # halfway between two
    builder = GraphBuilder()
    build(builder)
    expected = Interpreter(builder.module).run(GRAPH, {"x": x})
    graph = lowered(build, device, tmp_path)
    assert graph.run({"x": x})["y"].tobytes() == expected["y"].tobytes()


def test_every_op_has_a_case() -> None:
    covered = {op for op, _ in CASES.values()} | NOT_HERE
    assert covered == set().union(*(device.ops for device in ONNX_DEVICES.values()))


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_lowering(name: str, device: str, tmp_path: Path) -> None:
    _, make = CASES[name]
    for index, (batch, rows) in enumerate(BATCH_AND_ROWS):
        made = make(np.random.default_rng(index), batch, rows)
        if ONNX_DEVICES[device].dialect not in made.dialects:
            pytest.skip("a form of the other dialect")
        folder = tmp_path / str(index)
        folder.mkdir()
        compare(made.build, device, folder, made.inputs, made.expected, **made.options)


def test_standard_dialect_refuses_int8_codes(tmp_path: Path) -> None:
    made = linear_int8_split(np.random.default_rng(0), 1, 2)
    with pytest.raises(LegalizeError) as caught:
        lowered(made.build, "onnx", tmp_path, "int8-split")
    assert caught.value.id == "onnx/no-lowering"


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_op_without_a_lowering_is_named(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`legalize` finds this first; the backend does not rely on it."""
    monkeypatch.setattr("helpers.lowering.Legalize.run", lambda *_: False)

    def build(b: GraphBuilder) -> None:
        operands = [b.take("base", (B, 2, 8)), b.take("anchor", (B,), DType.I64)]
        tables = [b.dense(name, np.ones((8, 4), np.float32)) for name in ("w1", "w2")]
        b.at("draft: markov_head")
        node = b.node("markov_chain", operands, tables, MarkovChainAttributes(2, 8))
        b.give("tokens", node.results[0])

    with pytest.raises(LegalizeError) as caught:
        lowered(build, device, tmp_path)
    (finding,) = caught.value.diagnostics
    assert finding.id == "onnx/no-lowering"
    assert "markov_chain" in finding.message
    assert f"graph @{GRAPH}" in finding.where
    assert finding.notes == ("comes from draft: markov_head",)


def _calling_module(random: np.random.Generator) -> Module:
    """`graph` calls `head` twice with different row counts, and `twice` in between."""
    module = Module("test")
    for symbol in ("t", "h"):
        module.symbols[symbol] = SymbolRange(1, 64)
    weights = GraphBuilder()
    weights.module = module
    head = Builder(module, "head")
    x = head.input("x", DType.F32, (1, sym("h"), 16), Role.ACTIVATION)
    y = head.op("linear", x, weights=(weights.dense("w", normal(random, 16, 16)),))
    head.output(y, "y", Role.ACTIVATION)
    twice = Builder(module, "twice")
    x = twice.input("x", DType.F32, (1, sym("t"), 16), Role.ACTIVATION)
    joined = twice.op("concat", x, x, attrs=AxisAttributes(1))
    twice.output(joined, "joined", Role.ACTIVATION)
    main = Builder(module, GRAPH)
    x = main.input("x", DType.F32, (1, sym("t"), 16), Role.HIDDEN)
    first = main.op("call", x, attrs=CallAttributes("head"))
    double = main.op("call", first, attrs=CallAttributes("twice"))
    second = main.op("call", double, attrs=CallAttributes("head"))
    main.output(first, "first", Role.HIDDEN)
    main.output(second, "second", Role.LOGITS)
    return module


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("rows", [1, 5])
def test_calls_become_steps_of_a_program(device: str, rows: int, tmp_path: Path) -> None:
    x = normal(np.random.default_rng(0), 1, rows, 16)
    module = _calling_module(np.random.default_rng(1))
    wanted = Interpreter(module, np.float64).run(GRAPH, {"x": x})
    w = wide(normal(np.random.default_rng(1), 16, 16))
    expected = {"first": wide(x) @ w.T, "second": np.tile(wide(x) @ w.T @ w.T, (1, 2, 1))}
    assert_close(wanted, expected, 1e-12)
    graph = Lowered(module, device, tmp_path)
    assert sorted(graph.artifact.files) == [f"{device}-head.onnx", f"{device}-twice.onnx"]
    steps = graph.artifact.manifest["programs"][GRAPH]
    assert [step["graph"] for step in steps] == ["head", "twice", "head"]
    assert_close(graph.run({"x": x}), expected, 3e-6)


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_a_value_may_have_the_name_of_a_weight(tmp_path, device):
    matrix = np.arange(16, dtype=np.float32).reshape(4, 4)

    def build(b: GraphBuilder) -> None:
        x = b.take("x", (3, 4))
        hidden = b.op("linear", x, weights=(b.dense("w", matrix),), name="w")
        b.give("y", b.op("add", hidden, x))

    x = normal(np.random.default_rng(0), 3, 4)
    compare(build, device, tmp_path, {"x": x}, {"y": wide(x) @ wide(matrix).T + wide(x)})


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_weight_cannot_have_the_name_of_an_input_or_output(tmp_path, name):
    def build(b: GraphBuilder) -> None:
        x = b.take("x", (3, 4))
        symbol = b.dense(name, np.ones((4, 4), np.float32))
        b.give("y", b.op("linear", x, weights=(symbol,)))

    with pytest.raises(LegalizeError, match=f"weight @{name} has the name") as caught:
        lowered(build, "cpu", tmp_path)
    assert caught.value.id == "onnx/name-clash"
