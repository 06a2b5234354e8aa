"""Caches that one call updates several times, as EAGLE3 drafts do."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.lower import build
from edgecc.devices import get_device
from edgecc.errors import LegalizeError
from edgecc.ir import DType, Interpreter, Module, Role, SymbolRange, Value, sym
from edgecc.ir.ops.attention import AttentionAttributes
from helpers.lowering import GraphBuilder
from helpers.tensorrt_network import NetworkInterpreter

CAPACITY, HEADS, WIDTH = 24, 2, 16


class Chain(GraphBuilder):
    """A layer's attention after each of several updates of its caches.

    Args:
        steps: Updates; the first has `t` rows, the others one.
        dtype: Of rows and caches.
    """

    def __init__(self, steps: int = 3, dtype: DType = DType.F32) -> None:
        super().__init__()
        self.module.symbols["b"] = SymbolRange(1, 1)
        self.module.symbols["t"] = SymbolRange(1, 8)
        self.dtype = dtype
        shape = (sym("b"), 1, CAPACITY, WIDTH)
        self.length = self.input("length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
        self.versions = [
            [self.input(name, dtype, shape, Role.KV_CACHE)] for name in ("k_cache", "v_cache")
        ]
        for step in range(steps):
            self.step(step)

    def rows(self, name: str, width: int, step: int) -> Value:
        shape = (sym("b"), 1 if step else sym("t"), width)
        return self.input(f"{name}{step}", self.dtype, shape, Role.ACTIVATION)

    def step(self, step: int, start: Value | None = None) -> None:
        """Write rows and attend from all of them."""
        q = self.rows("q", HEADS * WIDTH, step)
        new = [self.rows(name, WIDTH, step) for name in "kv"]
        start = start or self.length
        for versions, rows in zip(self.versions, new, strict=True):
            versions.append(self.op("cache_update", versions[-1], rows, start))
        self.length = self.op("advance", start, new[0])
        attrs = AttentionAttributes(HEADS, 1, WIDTH**-0.5)
        caches = [versions[-1] for versions in self.versions]
        y = self.op("attention", q, *caches, self.length, attrs=attrs)
        self.output(y, f"y{step}", Role.ACTIVATION)

    def done(self) -> Module:
        for (cache, *_, last), name in zip(self.versions, ("k_cache", "v_cache"), strict=True):
            assert cache.name == name
            self.output(last, name, Role.KV_CACHE, alias=name)
        return self.module


def drawn(module: Module, rows: int, length: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows)
    found = {}
    for item in module.graphs["graph"].inputs:
        shape = [{"b": 1, "t": rows}.get(str(d), d) for d in item.value.type.shape]
        found[item.name] = random.standard_normal(shape).astype(np.float32)
    return {**found, "length": np.array([length])}


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize(("rows", "length"), [(1, 0), (1, 5), (6, 3), (8, 11)])
def test_steps_see_the_rows_before_them(trt, steps, rows, length):
    """The caches hold numbers in every row: what is not to be seen shows."""
    module = Chain(steps).done()
    given = drawn(module, rows, length)
    found = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"]).run(given)
    expected = Interpreter(module, np.float64).run("graph", given)
    for step in range(steps):
        assert np.abs(found[f"y{step}"] - expected[f"y{step}"]).max() <= 1e-5
    for name in ("k_cache", "v_cache"):
        assert np.array_equal(found[f"present.{name}"], expected[name].astype(np.float32))


def test_one_update_layer_for_each_cache(trt):
    """Its input is an input of the network, and its result an output: what the library asks for."""
    module = Chain(4).done()
    network = NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"]).network
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    assert kinds.count(trt.LayerType.KV_CACHE_UPDATE) == 2


@pytest.mark.parametrize("device", ["sm86", "sm89", "sm120"])
def test_a_chain_builds(trt, tmp_path, device):
    module = Chain(3, DType.BF16).done()
    session = Session(trt, get_device(device))
    path, graph = tmp_path / "graph.plan", module.graphs["graph"]
    facts = build(session, module, graph, (), path, lambda *_: None)
    assert [p["alias"] for p in facts["outputs"]][-2:] == ["k_cache", "v_cache"]


def lowered(trt, module: Module) -> None:
    NetworkInterpreter(trt, module, "sm86").network(module.graphs["graph"])


def test_rows_in_another_place_are_refused(trt):
    """A second update that overwrites the first cannot be made by one layer."""
    chain = Chain(1)
    start = next(i.value for i in chain.graph.inputs if i.name == "length")
    chain.step(1, start)
    with pytest.raises(LegalizeError, match="must start behind the rows of the first"):
        lowered(trt, chain.done())


def test_a_version_that_is_overwritten_cannot_be_an_output(trt):
    chain = Chain(2)
    chain.output(chain.versions[0][1], "early", Role.ACTIVATION)
    with pytest.raises(LegalizeError, match="wanted as it is before an update") as caught:
        lowered(trt, chain.done())
    assert caught.value.exit_code == 4


def test_two_updates_of_one_version_are_refused(trt):
    chain = Chain(1)
    before = [versions[-1] for versions in chain.versions]
    chain.step(1)
    last = [versions[-1] for versions in chain.versions]
    for versions, version in zip(chain.versions, before, strict=True):
        versions.append(version)
    chain.step(2)
    chain.output(last[0], "other", Role.ACTIVATION)
    with pytest.raises(LegalizeError, match="wanted as it is before an update"):
        lowered(trt, chain.done())
