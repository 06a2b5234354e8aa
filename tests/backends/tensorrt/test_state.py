"""Recurrent layers: one triangular system for all rows of a call, against the walk over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.delta_rule import MAX_ROWS
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.devices import get_device
from edgecc.errors import LegalizeError
from edgecc.ir import DType, Interpreter, Module, Role, SymbolRange, sym
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from helpers.lowering import Array, GraphBuilder
from helpers.tensorrt_network import NetworkInterpreter

TOLERANCE = 5e-6
"""Relative error of float32 against float64, a few layers of sums of some hundred terms."""


@dataclass(frozen=True)
class Case:
    """Sizes of a DeltaNet, and what its inputs are like."""

    rows: int = 8
    most: int = 32
    key_heads: int = 2
    repeat: int = 2
    key_dim: int = 8
    value_dim: int = 12
    batch: int = 1
    alike: float = 0.0
    decay: float = 0.0
    write: float = 0.0
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.key_heads * self.repeat


def delta_net(case: Case, count: int = 1) -> Module:
    """One layer, or several that read the same rows."""
    n = GraphBuilder()
    n.module.symbols["b"] = SymbolRange(case.batch, case.batch)
    n.module.symbols["t"] = SymbolRange(1, case.most)
    b, t = sym("b"), sym("t")
    keys, values = case.key_heads * case.key_dim, case.heads * case.value_dim
    widths = {"q": keys, "k": keys, "v": values, "a": case.heads, "b": case.heads}
    operands = [n.input(x, DType.F32, (b, t, w), Role.ACTIVATION) for x, w in widths.items()]
    shape = (b, case.heads, case.key_dim, case.value_dim)
    random = np.random.default_rng(case.seed)
    weights = [
        n.dense(name, random.standard_normal(case.heads).astype(np.float32))
        for name in ("A_log", "dt_bias")
    ]
    attrs = GatedDeltaNetAttributes(case.key_heads, case.heads)
    for suffix in ("", *map(str, range(2, count + 1))):
        state = n.input(f"state{suffix}", DType.F32, shape, Role.STATE)
        y, after = n.node("gated_delta_net", (*operands, state), weights, attrs).results
        n.output(y, f"y{suffix}", Role.ACTIVATION)
        n.output(after, f"state{suffix}", Role.STATE, alias=f"state{suffix}")
    return n.module


def inputs(case: Case) -> dict[str, Array]:
    """Random rows; `alike` of 1 makes all keys of a head the same, as repeated tokens do."""
    random = np.random.default_rng(case.seed)
    batch, rows, keys = case.batch, case.rows, case.key_heads * case.key_dim

    def draw(*shape: int) -> Array:
        return random.standard_normal(shape)

    shared = np.sqrt(case.alike) * draw(batch, 1, keys)
    made = {
        "q": draw(batch, rows, keys),
        "k": shared + np.sqrt(1 - case.alike) * draw(batch, rows, keys),
        "v": draw(batch, rows, case.heads * case.value_dim),
        "a": case.decay + draw(batch, rows, case.heads),
        "b": case.write + draw(batch, rows, case.heads),
        "state": draw(batch, case.heads, case.key_dim, case.value_dim),
    }
    return {name: array.astype(np.float32) for name, array in made.items()}


def error(trt, case: Case) -> float:
    """Largest error of results and state against float64."""
    module, given = delta_net(case), inputs(case)
    network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"])
    found = network.run(given)
    expected = Interpreter(module, np.float64).run("graph", given)
    return max(
        float(np.abs(found[n] - want).max() / np.abs(want).max())
        for n, want in (("y", expected["y"]), ("present.state", expected["state"]))
    )


@given(
    st.builds(
        Case,
        rows=st.integers(1, 40),
        most=st.just(40),
        key_heads=st.integers(1, 3),
        repeat=st.integers(1, 3),
        key_dim=st.sampled_from([1, 4, 16]),
        value_dim=st.sampled_from([1, 3, 16]),
        batch=st.integers(1, 2),
        alike=st.sampled_from([0.0, 0.9, 1.0]),
        decay=st.sampled_from([-20.0, 0.0, 30.0]),
        write=st.sampled_from([-10.0, 0.0, 10.0]),
        seed=st.integers(0, 9),
    )
)
def test_the_system_equals_the_walk_over_rows(trt, case):
    assert error(trt, case) <= TOLERANCE


@pytest.mark.parametrize("rows", [1, 127, 128])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_a_prompt_of_one_token_again_and_again(trt, rows, alike):
    """Nothing decays and all is written: where products of powers of the system are off by 1e8."""
    case = Case(rows=rows, most=128, key_dim=64, alike=alike, decay=-30, write=5)
    assert error(trt, case) <= TOLERANCE


def test_strong_decay_in_between_loses_no_digits(trt):
    """Differences of running sums would: they are some thousand here."""
    case = Case(rows=128, most=128, decay=0)
    module, given = delta_net(case), inputs(case)
    given["a"][:, ::2] = 60
    given["a"][:, 1::2] = -8
    network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"])
    found = network.run(given)["y"]
    expected = Interpreter(module, np.float64).run("graph", given)["y"]
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_one_call_equals_two(trt):
    case = Case(rows=24)
    module, given = delta_net(case), inputs(case)
    network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"])
    whole = network.run(given)
    rows = {n: x for n, x in given.items() if n != "state"}
    first = network.run({**{n: x[:, :9] for n, x in rows.items()}, "state": given["state"]})
    second = {n: x[:, 9:] for n, x in rows.items()}
    second = network.run({**second, "state": first["present.state"]})
    joined = np.concatenate([first["y"], second["y"]], axis=1)
    assert np.abs(joined - whole["y"]).max() <= 1e-6
    assert np.abs(second["present.state"] - whole["present.state"]).max() <= 1e-6


def layers(trt, module: Module) -> list[str]:
    """Names of the layers of a network without their numbers."""
    network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"]).network
    names = (network.get_layer(i).name for i in range(network.num_layers))
    return [name.partition("/")[2].partition(".")[0] for name in names]


def test_layers_of_a_model_share_the_masks_of_a_call(trt):
    alone = layers(trt, delta_net(Case()))
    both = layers(trt, delta_net(Case(), count=2))
    assert both.count("matmul") == 2 * alone.count("matmul")
    for name in ("floor_div", "equal", "rows"):
        assert both.count(name) == alone.count(name) > 0


def test_float32_stays_float32(trt):
    """The builder may not round the factors of products to TF32, which is its default."""
    for make, rounds in ((lambda: delta_net(Case()), False), (lambda: plain(), True)):
        module = make()
        session = Session(trt, get_device("sm86"))
        graph = module.graphs["graph"]
        emitter = Emitter(trt, session.network("graph"), module, graph, {"b": 1})
        emitter.lower()
        assert session.config(emitter, []).get_flag(trt.BuilderFlag.TF32) is rounds


def plain() -> Module:
    n = GraphBuilder()
    x = n.take("x", (1, 4))
    n.give("y", n.op("add", x, x))
    return n.module


def test_chunks_that_are_too_long_are_refused(trt):
    module = delta_net(Case(most=MAX_ROWS + 1))
    with pytest.raises(LegalizeError, match=f"takes up to {MAX_ROWS} rows a call") as caught:
        NetworkInterpreter(trt, module, "sm120").network(module.graphs["graph"])
    assert caught.value.exit_code == 4
    assert caught.value.diagnostics[0].help == f"compile with --prefill-chunk {MAX_ROWS} or less"


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("taps", [2, 4])
def test_convolution(trt, batch, rows, taps):
    """The state holds more rows than the call has, or fewer."""
    n = GraphBuilder()
    n.module.symbols["b"] = SymbolRange(batch, batch)
    n.module.symbols["t"] = SymbolRange(1, 16)
    random = np.random.default_rng(rows)
    x = n.input("x", DType.F32, (sym("b"), sym("t"), 6), Role.ACTIVATION)
    state = n.input("state", DType.F32, (sym("b"), 6, taps - 1), Role.STATE)
    weight = n.dense("taps", random.standard_normal((6, 1, taps)).astype(np.float32))
    y, after = n.node("causal_conv1d", (x, state), (weight,)).results
    n.output(y, "y", Role.ACTIVATION)
    n.output(after, "state", Role.STATE, alias="state")
    given = {
        "x": random.standard_normal((batch, rows, 6)).astype(np.float32),
        "state": random.standard_normal((batch, 6, taps - 1)).astype(np.float32),
    }
    network = NetworkInterpreter(trt, n.module, "sm86").network(n.module.graphs["graph"])
    found = network.run(given)
    expected = Interpreter(n.module).run("graph", given)
    assert np.array_equal(found["y"], expected["y"])
    assert np.array_equal(found["present.state"], expected["state"])
