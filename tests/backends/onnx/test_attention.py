"""Cached attention in both dialects against a formula over plain lists of rows.

The reference never has a cache: it keeps the rows every position was last given, and computes whole
softmaxes in float64. The engine keeps its own caches over all calls of a sequence; the reference
evaluator is handed the caches it returned before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.devices import ONNX_DEVICES, Dialect, get_device
from edgecc.ir import DType, Value, sym
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.fuse_cached_attention import FuseCachedAttention
from edgecc.roles import Role
from helpers.lowering import (
    GRAPH,
    Array,
    GraphBuilder,
    Lowered,
    assert_close,
    reference,
)

CAPACITY = 40
BLOCK = 7


@dataclass(frozen=True)
class Shape:
    """Heads of one attention; `rotated` dims of each head turn with the position, 0 for none."""

    heads: int
    kv_heads: int
    dim: int
    rotated: int
    causal: bool = True
    block: bool = False
    window: int | None = None

    @property
    def tables(self) -> tuple[Array, Array]:
        angles = np.arange(CAPACITY)[:, None] / 50.0 ** (
            np.arange(0, self.rotated, 2) / max(1, self.rotated)
        )
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


SHAPES = {
    "8/2x64": Shape(8, 2, 64, 64),
    "4/4x32": Shape(4, 4, 32, 32),
    "4/1x128": Shape(4, 1, 128, 128),
    "6/3x64 without rotation": Shape(6, 3, 64, 0),
    "4/2x64, 32 dims rotated": Shape(4, 2, 64, 32),
    "block 8/2x64": Shape(8, 2, 64, 64, causal=False, block=True),
    "block 4/4x128": Shape(4, 4, 128, 128, causal=False, block=True),
    "causal block 4/1x32": Shape(4, 1, 32, 32, causal=True, block=True),
    "all rows see each other 4/2x32": Shape(4, 2, 32, 32, causal=False),
    "4/2x32, window of 6": Shape(4, 2, 32, 32, window=6),
    "8/2x64, window of 1": Shape(8, 2, 64, 0, window=1),
    "4/2x24, too narrow to fuse, window of 3": Shape(4, 2, 24, 24, window=3),
    "causal block 4/1x32, window of 9": Shape(4, 1, 32, 32, block=True, window=9),
    "causal block 4/1x40, too narrow to fuse, window of 2": Shape(
        4, 1, 40, 40, block=True, window=2
    ),
    "4/2x24, too narrow to fuse": Shape(4, 2, 24, 24),
    "block 4/4x40, too narrow to fuse": Shape(4, 4, 40, 40, causal=False, block=True),
}
STEPS = [(0, 5), (5, 1), (6, 8), (9, 8), (9, 1), (10, 2), (3, 4), (7, 20)]
"""Rows in the caches before each call, and new rows: some steps go back over rows once written."""


def build(b: GraphBuilder, shape: Shape) -> None:
    """One attention layer as frontends build it: with `block`, context rows join in front."""
    width, kv_width = shape.heads * shape.dim, shape.kv_heads * shape.dim
    rows = BLOCK if shape.block else sym("t")
    q = b.take("q", (sym("b"), rows, width))
    k, v = (b.take(name, (sym("b"), rows, kv_width)) for name in "kv")
    start = b.input("start", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    if shape.block:
        context = [b.take(f"context_{name}", (sym("b"), sym("c"), kv_width)) for name in "kv"]
        k, v = (
            b.op("concat", old, new, attrs=AxisAttributes(1))
            for old, new in zip(context, (k, v), strict=True)
        )
    caches = [
        b.input(
            f"{name}_cache",
            DType.F32,
            (sym("b"), shape.kv_heads, CAPACITY, shape.dim),
            Role.KV_CACHE,
        )
        for name in "kv"
    ]
    if shape.rotated:
        q, k = _rotate(b, shape, q, k, start)
    length = b.op("advance", start, k)
    k_new = b.op("cache_update", caches[0], k, start)
    v_new = b.op("cache_update", caches[1], v, start)
    attrs = AttentionAttributes(
        shape.heads, shape.kv_heads, shape.dim**-0.5, shape.causal, shape.window
    )
    b.give("y", b.op("attention", q, k_new, v_new, length, attrs=attrs))
    b.output(k_new, "k_cache", Role.KV_CACHE, alias="k_cache")
    b.output(v_new, "v_cache", Role.KV_CACHE, alias="v_cache")


def _rotate(b: GraphBuilder, shape: Shape, q: Value, k: Value, start: Value) -> tuple[Value, Value]:
    cos, sin = shape.tables
    tables = (b.dense("cos", cos), b.dense("sin", sin))
    positions = b.op("position_ids", start, k)
    own = b.op("tail", positions, q, attrs=AxisAttributes(1)) if shape.block else positions
    q = b.op("rope", q, own, weights=tables, attrs=RopeAttributes(shape.heads))
    k = b.op("rope", k, positions, weights=tables, attrs=RopeAttributes(shape.kv_heads))
    return q, k


def lower_for(device: str, shape: Shape, folder: Path, slots: int = 1) -> Lowered:
    builder = GraphBuilder()
    build(builder, shape)
    module = builder.module
    module.metadata["limits"] = {"max_batch_size": slots}
    record = get_device(device)
    fits = record.fused_attention and shape.dim % record.head_multiple == 0
    if record.fused_attention:
        assert FuseCachedAttention().run(module, PassContext(record)) == fits
    assert ("cached_attention" in {n.op.name for n in module.graphs[GRAPH].nodes}) == fits
    return Lowered(module, device, folder)


class History:
    """What every position was last given, and attention over it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.keys: dict[int, Array] = {}
        self.values: dict[int, Array] = {}

    def step(self, inputs: dict[str, Array], start: int) -> Array:
        """Result `[1, s, heads * dim]` in float64."""
        k, v = inputs["k"][0], inputs["v"][0]
        if self.shape.block:
            k, v = np.vstack([inputs["context_k"][0], k]), np.vstack([inputs["context_v"][0], v])
        for row in range(len(k)):
            self.keys[start + row] = self.turned(k[row], start + row, self.shape.kv_heads)
            self.values[start + row] = v[row].reshape(self.shape.kv_heads, -1).astype(np.float64)
        total = start + len(k)
        first = total - inputs["q"].shape[1]
        rows = [self.attend(q, first + i, total) for i, q in enumerate(inputs["q"][0])]
        return np.stack(rows)[None]

    def turned(self, row: Array, position: int, heads: int) -> Array:
        split, half = row.reshape(heads, -1).astype(np.float64), self.shape.rotated // 2
        cos, sin = (table[position].astype(np.float64) for table in self.shape.tables)
        turned = (split[:, :half] + 1j * split[:, half : 2 * half]) * (cos + 1j * sin)
        return np.concatenate([turned.real, turned.imag, split[:, 2 * half :]], axis=1)

    def attend(self, row: Array, position: int, total: int) -> Array:
        window = total if self.shape.window is None else self.shape.window
        first = max(position + 1 - window, 0) if self.shape.causal else 0
        seen = range(first, position + 1 if self.shape.causal else total)
        keys = np.stack([self.keys[i] for i in seen], axis=1)
        values = np.stack([self.values[i] for i in seen], axis=1)
        outputs = []
        for head, q in enumerate(self.turned(row, position, self.shape.heads)):
            group = head // (self.shape.heads // self.shape.kv_heads)
            weights = np.exp(keys[group] @ q / np.sqrt(self.shape.dim))
            outputs.append(weights / weights.sum() @ values[group])
        return np.concatenate(outputs)


def make_inputs(
    random: np.random.Generator, shape: Shape, start: int, rows: int
) -> dict[str, Array]:
    """Inputs of one call by name; of a block, `rows` are context rows."""
    width, kv_width = shape.heads * shape.dim, shape.kv_heads * shape.dim
    own = BLOCK if shape.block else rows
    sizes = {"q": (own, width), "k": (own, kv_width), "v": (own, kv_width)}
    if shape.block:
        sizes |= {"context_k": (rows, kv_width), "context_v": (rows, kv_width)}
    inputs = {n: random.standard_normal((1, *s)).astype(np.float32) for n, s in sizes.items()}
    return inputs | {"start": np.array([start])}


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_steps_and_rollbacks(name: str, device: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    graph = lower_for(device, shape, tmp_path)
    engine = graph.engine()
    evaluator = graph.evaluator() if graph.device.dialect is Dialect.STANDARD else None
    history = History(shape)
    random = np.random.default_rng(7)
    zeros = np.zeros((1, shape.kv_heads, CAPACITY, shape.dim), np.float32)
    caches = {"k_cache": zeros, "v_cache": zeros}
    wide_caches = dict(caches)
    for start, rows in STEPS:
        if shape.block and start + rows + BLOCK > CAPACITY:
            continue
        inputs = make_inputs(random, shape, start, rows)
        expected = {"y": history.step(inputs, start)}
        ir = reference(lambda b: build(b, shape), {**inputs, **wide_caches})
        wide_caches = {n: ir[n] for n in wide_caches}
        assert_close({"y": ir["y"]}, expected, 1e-12)
        assert_close(graph.call(engine, inputs), expected, 3e-6)
        if evaluator is not None:
            y, *updated = evaluator.run(None, {**inputs, **caches})
            caches = dict(zip(caches, updated, strict=True))
            assert_close({"y": y}, expected, 3e-6)


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_caches_may_be_filled_to_the_last_row(device: str, tmp_path: Path) -> None:
    shape = SHAPES["4/4x32"]
    graph = lower_for(device, shape, tmp_path)
    engine = graph.engine()
    history, random = History(shape), np.random.default_rng(3)
    for start, rows in [(0, CAPACITY - 3), (CAPACITY - 3, 2), (CAPACITY - 1, 1), (0, CAPACITY)]:
        inputs = make_inputs(random, shape, start, rows)
        assert_close(graph.call(engine, inputs), {"y": history.step(inputs, start)}, 3e-6)


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_garbage_behind_the_valid_rows_is_never_read(device: str, tmp_path: Path) -> None:
    """Rows of an abandoned branch hold what would drown every sum: NaN where the kernel stops at
    the valid rows, numbers near the end of the range where it multiplies them by zero weights.
    """
    shape = SHAPES["8/2x64"]
    graph = lower_for(device, shape, tmp_path)
    engine = graph.engine()
    history, random = History(shape), np.random.default_rng(4)
    first = make_inputs(random, shape, 0, 4)
    history.step(first, 0)
    graph.call(engine, first)
    value = np.nan if graph.device.fused_attention else 1e30
    poison = make_inputs(random, shape, 4, 30)
    for name in ("k", "v"):
        poison[name] = np.full_like(poison[name], value)
    graph.call(engine, poison)
    for start, rows in [(4, 1), (5, 3), (8, 1)]:
        inputs = make_inputs(random, shape, start, rows)
        assert_close(graph.call(engine, inputs), {"y": history.step(inputs, start)}, 3e-6)


SLOTS = 3
CALL = st.tuples(
    st.integers(0, SLOTS - 1),  # first slot
    st.lists(st.integers(0, CAPACITY), min_size=1, max_size=SLOTS),  # rows gone back over
    st.integers(1, 9),  # new rows
)


class Batched:
    """One attention for several sequences: its engine, and a history of each slot."""

    def __init__(self, device: str, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.graph = lower_for(device, shape, folder, SLOTS)
        self.engine = self.graph.engine()
        self.target = self.engine.entry(GRAPH)
        self.begin()

    def begin(self) -> None:
        self.histories = [History(self.shape) for _ in range(SLOTS)]
        self.lengths = [0] * SLOTS

    def call(self, random: np.random.Generator, slot: int, back: list[int], rows: int) -> None:
        """Check a call of neighbouring slots; sequences go back over some of their rows."""
        slots = range(slot, min(SLOTS, slot + len(back)))
        own = rows + (BLOCK if self.shape.block else 0)
        starts = [
            min(max(0, self.lengths[s] - b), CAPACITY - own)
            for s, b in zip(slots, back, strict=False)
        ]
        parts = [make_inputs(random, self.shape, start, rows) for start in starts]
        inputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        named = {self.graph.module.graphs[GRAPH].input(n).role: a for n, a in inputs.items()}
        (role,) = (o.role for o in self.graph.module.graphs[GRAPH].outputs if o.name == "y")
        found = self.target.run(named, [role], slot=slot)[role].copy()
        for index, (at, part, start) in enumerate(zip(slots, parts, starts, strict=True)):
            expected = {"y": self.histories[at].step(part, start)}
            assert_close({"y": found[index : index + 1]}, expected, 3e-6)
            # What is fed back may be gone back over: a draft's block is never counted.
            self.lengths[at] = start + rows


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_several_sequences(name: str, device: str, tmp_path: Path) -> None:
    """One to three sequences of different lengths in a call, in slots that others are beside."""
    batched = Batched(device, SHAPES[name], tmp_path)

    @settings(max_examples=settings().max_examples // 3)
    @given(calls=st.lists(CALL, min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
    def check(calls: list[tuple[int, list[int], int]], seed: int) -> None:
        batched.begin()
        random = np.random.default_rng(seed)
        for slot, back, rows in calls:
            batched.call(random, slot, back, rows)

    check()


def test_one_model_input_for_each_cache_that_is_updated_in_place(tmp_path: Path) -> None:
    """As many attention nodes as sequences, of which a call of one sequence runs one."""
    graph = lower_for("cpu", SHAPES["8/2x64"], tmp_path, SLOTS)
    model = onnx.load(str(tmp_path / graph.artifact.files[0]))
    names = {f"{c}_cache@{slot}" for c in "kv" for slot in range(SLOTS)}
    assert names <= {i.name for i in model.graph.input}
    (choice,) = (n for n in model.graph.node if n.op_type == "If")
    kernels = {
        a.name: [n.op_type for n in a.g.node].count("GroupQueryAttention") for a in choice.attribute
    }
    assert kernels == {"then_branch": 1, "else_branch": SLOTS}


def test_a_single_sequence_has_a_plain_model(tmp_path: Path) -> None:
    graph = lower_for("cpu", SHAPES["8/2x64"], tmp_path)
    model = onnx.load(str(tmp_path / graph.artifact.files[0]))
    assert {"k_cache", "v_cache"} <= {i.name for i in model.graph.input}
    assert not [n for n in model.graph.node if n.op_type == "If"]
