"""Layers with a recurrent state: numbers, bits whatever the rows of a call, states in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.onnxruntime import OrtEngine
from edgecc.devices import ONNX_DEVICES
from edgecc.ir import DType, Value, sym
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from helpers.goldens import SHIPPED
from helpers.lowered_pairs import LoweredPair
from helpers.lowering import Array, GraphBuilder, Lowered, compare, lowered, reference

B, T = sym("b"), sym("t")


@dataclass(frozen=True)
class Layer:
    """Sizes and weights of one layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    log_rows: int = 4

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def attrs(self) -> GatedDeltaNetAttributes:
        return GatedDeltaNetAttributes(self.key_heads, self.value_heads)

    def gates(self, b: GraphBuilder) -> list[str]:
        random = np.random.default_rng(0)
        return [b.dense(name, normal(random, self.value_heads)) for name in ("A_log", "dt_bias")]

    def conv1d(self, b: GraphBuilder) -> str:
        weight = normal(np.random.default_rng(1), self.channels, 1, self.taps)
        return b.dense("conv1d", weight * 0.5)

    def convolution(self, b: GraphBuilder) -> None:
        """Graph of `causal_conv1d`."""
        operands = (b.take("x", (B, T, self.channels)), self.take(b, "conv"))
        node = b.node("causal_conv1d", operands, (self.conv1d(b),))
        b.give("y", node.results[0])
        b.give("conv_after", node.results[1])

    def delta(self, b: GraphBuilder) -> None:
        """Graph of `gated_delta_net`."""
        widths = (self.keys, self.keys, self.values, self.value_heads, self.value_heads)
        rows = [b.take(n, (B, T, w)) for n, w in zip("qkvab", widths, strict=True)]
        operands = (*rows, self.take(b, "delta"))
        node = b.node("gated_delta_net", operands, self.gates(b), self.attrs)
        b.give("y", node.results[0])
        b.give("delta_after", node.results[1])

    def logged(self, b: GraphBuilder) -> None:
        """Graph of `logged_delta_net`."""
        widths = (self.channels, self.value_heads, self.value_heads)
        rows = [b.take(n, (B, T, w)) for n, w in zip("xab", widths, strict=True)]
        carried = [self.take(b, name) for name in ("conv", "delta", "log")]
        counts = [b.take(name, (B,), DType.I64) for name in ("replay", "commit")]
        weights = (self.conv1d(b), *self.gates(b))
        node = b.node("logged_delta_net", (*rows, *carried, *counts), weights, self.attrs)
        names = ("y", "conv_after", "delta_after", "log_after")
        for name, value in zip(names, node.results, strict=True):
            b.give(name, value)

    def take(self, b: GraphBuilder, name: str) -> Value:
        return b.take(name, (B, *self.shapes()[name]))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What is carried, for one sequence."""
        return {
            "conv": (self.channels, self.taps - 1),
            "delta": (self.value_heads, self.key_dim, self.value_dim),
            "log": (self.log_rows, self.channels + 2 * self.value_heads),
        }

    def carried(self, random: np.random.Generator, batch: int) -> dict[str, Array]:
        return {name: normal(random, batch, *shape) for name, shape in self.shapes().items()}

    def rows(self, random: np.random.Generator, batch: int, rows: int) -> dict[str, Array]:
        widths = {"x": self.channels, "a": self.value_heads, "b": self.value_heads}
        return {name: normal(random, batch, rows, w) for name, w in widths.items()}


LAYERS = {
    "published widths": Layer(2, 6, 128, 128, 4, 8),
    "odd": Layer(1, 3, 5, 7, 3, 2),
    "tiny": Layer(1, 1, 1, 1, 2, 1),
    "as many key heads": Layer(4, 4, 8, 12, 4),
}
ROWS = [(1, 1), (1, 2), (1, 9), (3, 5)]


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_convolution(name: str, device: str, tmp_path: Path) -> None:
    layer = LAYERS[name]
    for index, (batch, rows) in enumerate(ROWS):
        random = np.random.default_rng(index)
        carried = layer.carried(random, batch)
        inputs = {"x": layer.rows(random, batch, rows)["x"], "conv": carried["conv"]}
        folder = tmp_path / str(index)
        folder.mkdir()
        expected = reference(layer.convolution, inputs)
        compare(layer.convolution, device, folder, inputs, expected)


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_delta_rule(name: str, device: str, tmp_path: Path) -> None:
    layer = LAYERS[name]
    for index, (batch, rows) in enumerate(ROWS):
        random = np.random.default_rng(index)
        widths = (layer.keys, layer.keys, layer.values)
        inputs = {n: normal(random, batch, rows, w) for n, w in zip("qkv", widths, strict=True)}
        inputs |= {n: 3 * normal(random, batch, rows, layer.value_heads) for n in "ab"}
        inputs["delta"] = layer.carried(random, batch)["delta"]
        folder = tmp_path / str(index)
        folder.mkdir()
        compare(layer.delta, device, folder, inputs, reference(layer.delta, inputs))


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_replay(name: str, device: str, tmp_path: Path) -> None:
    """Sequences of one batch replay and commit different numbers of rows."""
    layer = LAYERS[name]
    for index, (batch, rows) in enumerate(ROWS):
        random = np.random.default_rng(index)
        inputs = {**layer.rows(random, batch, rows), **layer.carried(random, batch)}
        most = min(layer.log_rows, 3)
        inputs["replay"] = np.array([most, 0, 1][:batch])
        inputs["commit"] = np.array([0, rows, 2][:batch])
        folder = tmp_path / str(index)
        folder.mkdir()
        expected = reference(layer.logged, inputs)
        compare(layer.logged, device, folder, inputs, expected)


def test_equal_keys_written_with_full_strength(tmp_path: Path) -> None:
    """Where forms that invert a matrix by its powers lose all digits."""
    layer = LAYERS["as many key heads"]
    random = np.random.default_rng(0)
    inputs = {n: normal(random, 1, 64, w) for n, w in (("q", 32), ("v", 48))}
    inputs["k"] = np.tile(normal(random, 1, 1, 32), (1, 64, 1))
    inputs |= {"a": np.full((1, 64, 4), -20, np.float32), "b": np.full((1, 64, 4), 9, np.float32)}
    inputs["delta"] = layer.carried(random, 1)["delta"]
    compare(layer.delta, "cpu", tmp_path, inputs, reference(layer.delta, inputs))


@pytest.fixture(scope="module", params=ONNX_DEVICES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[Layer, Lowered, OrtEngine]]]:
    """A layer of an odd number of heads, and one of the shipped pair's sizes."""
    made = []
    for layer in (LAYERS["odd"], Layer(2, 4, 64, 64, 4, 8)):
        graph = lowered(layer.logged, request.param, tmp_path_factory.mktemp("logged"))
        made.append((layer, graph, graph.engine()))
    yield made
    for *_, engine in made:
        engine.close()


@given(
    which=st.integers(0, 1),
    calls=st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 8), st.booleans()), min_size=1, max_size=5
    ),
    seed=st.integers(0, 99),
)
def test_rounds_have_the_bits_of_single_rows(
    engines: list[tuple[Layer, Lowered, OrtEngine]],
    which: int,
    calls: list[tuple[int, int, bool]],
    seed: int,
) -> None:
    """Speculation must not be seen in the numbers: see docs/adr/0004-same-bits.md."""
    layer, graph, engine = engines[which]
    random = np.random.default_rng(seed)
    first = layer.carried(random, 1)
    one, many = dict(first), dict(first)
    replay = 0

    def call(state: dict[str, Array], rows: dict[str, Array], replay: int, commit: int) -> Array:
        counts = {"replay": np.array([replay]), "commit": np.array([commit])}
        found = graph.call(engine, {**rows, **state, **counts})
        state.update({name: found[f"{name}_after"] for name in state})
        return found["y"]

    for count, accepted, final in calls:
        count = count if final else min(count, layer.log_rows)
        accepted = count if final else min(accepted, count)
        rows = layer.rows(random, 1, count)
        y = call(many, rows, replay, count if final else 0)
        replay = 0 if final else accepted
        for t in range(accepted):
            alone = call(one, {n: r[:, t : t + 1] for n, r in rows.items()}, 0, 1)
            assert alone.tobytes() == y[:, t : t + 1].tobytes()
    rows = layer.rows(random, 1, 1)
    assert call(many, rows, replay, 1).tobytes() == call(one, rows, 0, 1).tobytes()
    for name in ("conv", "delta"):
        assert many[name].tobytes() == one[name].tobytes()


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_nothing_is_read_after_it_was_overwritten(device: str, tmp_path: Path) -> None:
    """Input and output of a cache, state or log are one buffer.

    So every node that reads the input must be done before the one that writes the output, by the
    data it waits for, or be that node itself, with a kernel that may work in place.
    """
    pair = LoweredPair(tmp_path, *_folders("qwen3_5"), device=device, max_model_len=64)
    in_place = {"GroupQueryAttention", "TensorScatter"}
    checked = 0
    for file in pair.artifact.files:
        graph = onnx.load(str(tmp_path / file), load_external_data=False).graph
        order = nx.DiGraph()
        writers = {name: node.name for node in graph.node for name in node.output if name}
        for node in graph.node:
            order.add_node(node.name, op=node.op_type)
            order.add_edges_from((writers[i], node.name) for i in node.input if i in writers)
        names = {o.name for o in graph.output}
        for item in graph.input:
            output = f"present.{item.name}"
            if output not in names:
                continue
            writer = writers[output]
            before = nx.ancestors(order, writer)
            readers = {n.name for n in graph.node if item.name in n.input}
            assert readers, item.name
            late = readers - before
            assert late <= {writer}, f"{item.name} may be read after {writer} has written it"
            assert not late or order.nodes[writer]["op"] in in_place, f"{writer} in place"
            checked += 1
    assert checked == 3 * 6 + 2 * 2 + 2 * 2


def _folders(name: str) -> tuple[Path, Path]:
    pair = SHIPPED[name]
    return pair.target, pair.draft
