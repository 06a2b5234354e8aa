"""Recurrent layers with a log: what is replayed and what is final is known on the device only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.lower import build
from edgecc.devices import get_device
from edgecc.ir import DType, Interpreter, Module, Role, SymbolRange, sym
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from helpers.lowering import Array, GraphBuilder
from helpers.tensorrt_network import NetworkInterpreter

TOLERANCE = 5e-6
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 1, 2, 4, 6, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


@dataclass(frozen=True)
class Case:
    """Sizes of a call, and what each sequence replays and commits."""

    rows: int = 3
    logged: int = 4
    replay: tuple[int, ...] = (2,)
    commit: tuple[int, ...] = (0,)
    seed: int = 0


def logged(case: Case, layers: int = 1, most: int = 16) -> Module:
    """Layers that read the same new rows, each with states and a log of its own."""
    n = GraphBuilder()
    batch = len(case.replay)
    n.module.symbols["b"] = SymbolRange(batch, batch)
    n.module.symbols["t"] = SymbolRange(1, most)
    b, t = sym("b"), sym("t")
    shapes = {"x": (b, t, CHANNELS), "a": (b, t, VALUE_HEADS), "b": (b, t, VALUE_HEADS)}
    rows = [n.input(name, DType.F32, shape, Role.ACTIVATION) for name, shape in shapes.items()]
    counts = [
        n.input(name, DType.I64, (b,), role)
        for name, role in (("replay", Role.REPLAY_LENGTH), ("commit", Role.COMMIT_LENGTH))
    ]
    random = np.random.default_rng(case.seed)
    weights = [
        n.dense(name, random.standard_normal(shape).astype(np.float32))
        for name, shape in (
            ("conv1d", (CHANNELS, 1, TAPS)),
            ("A_log", (VALUE_HEADS,)),
            ("dt_bias", (VALUE_HEADS,)),
        )
    ]
    attrs = GatedDeltaNetAttributes(KEY_HEADS, VALUE_HEADS)
    for layer in range(layers):
        memory = [
            n.input(f"{name}.{layer}", DType.F32, shape, role)
            for name, shape, role in (
                ("conv_state", (b, CHANNELS, TAPS - 1), Role.STATE),
                ("delta_state", (b, VALUE_HEADS, KEY_DIM, VALUE_DIM), Role.STATE),
                ("log", (b, case.logged, CHANNELS + 2 * VALUE_HEADS), Role.STATE_LOG),
            )
        ]
        y, *after = n.node("logged_delta_net", (*rows, *memory, *counts), weights, attrs).results
        n.output(y, f"y.{layer}", Role.ACTIVATION)
        for old, new in zip(memory, after, strict=True):
            role = Role.STATE_LOG if old.name.startswith("log") else Role.STATE
            n.output(new, old.name, role, alias=old.name)
    return n.module


def inputs(module: Module, case: Case) -> dict[str, Array]:
    random = np.random.default_rng(case.seed)
    made = {}
    for item in module.graphs["graph"].inputs:
        sizes = {"b": len(case.replay), "t": case.rows}
        shape = [sizes.get(str(d), d) for d in item.value.type.shape]
        made[item.name] = random.standard_normal(shape).astype(np.float32)
    return {**made, "replay": np.array(case.replay), "commit": np.array(case.commit)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, log = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    batch = draw(st.integers(1, 3))
    some = st.tuples(*[st.integers(0, log)] * batch), st.tuples(*[st.integers(0, rows)] * batch)
    return Case(rows, log, *(draw(s) for s in some), draw(st.integers(0, 3)))


@given(cases())
def test_any_counts(trt, case):
    module = logged(case)
    arrays = inputs(module, case)
    network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"])
    found = network.run(arrays)
    expected = Interpreter(module, np.float64).run("graph", arrays)
    for name, want in expected.items():
        got = found[name if name.startswith("y") else f"present.{name}"]
        assert np.abs(got - want).max() <= TOLERANCE * max(1.0, np.abs(want).max()), name


def test_a_rejected_call_leaves_no_trace(trt):
    """Three rows of which one is accepted, then the next call replays that one."""
    case = Case(rows=3, logged=3, replay=(0,), commit=(0,))
    module = logged(case)
    network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"])
    first = inputs(module, case)
    tried = network.run(first)
    memory = {n.removeprefix("present."): x for n, x in tried.items() if n.startswith("present.")}
    second = {**inputs(module, Case(seed=1)), **memory, "replay": np.array([1])}
    after = network.run(second)
    straight = network.run(
        {
            **first,
            **{n: np.concatenate([first[n][:, :1], second[n]], axis=1) for n in ("x", "a", "b")},
        }
    )
    assert np.abs(after["y.0"] - straight["y.0"][:, 1:]).max() <= 1e-6


def test_layers_share_what_depends_on_the_counts(trt):
    def selects(layers: int) -> int:
        module = logged(Case(), layers)
        network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"]).network
        kinds = [network.get_layer(i).type for i in range(network.num_layers)]
        return kinds.count(trt.LayerType.SELECT)

    assert selects(3) == selects(1) > 0


@pytest.mark.parametrize("device", ["sm86", "sm89", "sm120"])
def test_it_builds(trt, tmp_path, device):
    module = logged(Case(logged=8), most=32)
    session = Session(trt, get_device(device))
    path = tmp_path / "graph.plan"
    facts = build(session, module, module.graphs["graph"], (), path, lambda *_: None)
    names = [p["name"] for p in facts["outputs"]]
    assert names == ["y.0", "present.conv_state.0", "present.delta_state.0", "present.log.0"]
    assert {p["alias"] for p in facts["outputs"]} == {None}  # read by kernels in any order
