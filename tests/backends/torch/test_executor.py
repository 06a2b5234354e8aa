from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.torch import TorchExecutor
from edgecc.backends.torch.executor import KERNELS
from edgecc.errors import LegalizeError, RequestError, UnsupportedError, UsageError
from edgecc.ir import Builder, Interpreter, Module, Role, SymbolRange
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from helpers.modules import modules, random_inputs
from helpers.ops import Array, tensor, values
from helpers.oracle import assert_close, on_devices, oracle
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import dense, packed

ROOT = Path(__file__).parents[3]


def outputs(evaluator, inputs) -> dict[str, Array]:
    return {
        f"{graph}.{name}": array
        for graph, arrays in inputs.items()
        for name, array in evaluator.run(graph, arrays).items()
    }


def check(module: Module, inputs, device: str, **options) -> None:
    """Both oracles on all graphs: float64 closely, float32 as float32 can."""
    expected = outputs(Interpreter(module, np.float64), inputs)
    for dtype, tolerance in ((np.float64, 1e-10), (np.float32, 1e-4)):
        found = outputs(oracle(device, **options)(module, dtype), inputs)
        assert_close(found, expected, tolerance)


@on_devices
@given(modules(), st.integers(0, 9))
def test_random_modules(device, module, seed):
    inputs = random_inputs(module, seed)
    expected = outputs(Interpreter(module, np.float64), inputs)
    found = outputs(oracle(device)(module, np.float64), inputs)
    assert_close(found, expected, 1e-10)


@on_devices
@FEWER
@given(
    options=pair_options(),
    seed=st.integers(0, 9),
    rows=st.integers(1, 4),
    context=st.integers(0, 3),
    batch=st.integers(1, 2),
    keep_bytes=st.sampled_from([0, 600, 1 << 20]),
)
def test_random_pairs(device, options, seed, rows, context, batch, keep_bytes):
    module = pair(options)
    BindSharedWeights().run(module, PassContext())
    inputs = pair_inputs(module, options, seed, rows=rows, context=context, batch=batch)
    expected = outputs(Interpreter(module, np.float64), inputs)
    found = outputs(oracle(device, keep_bytes=keep_bytes)(module, np.float64), inputs)
    assert_close(found, expected, 1e-10)


@on_devices
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_float32(device, keep_bytes):
    options = PairOptions(layers=2, bias=True)
    module = pair(options)
    BindSharedWeights().run(module, PassContext())
    check(module, pair_inputs(module, options, batch=2), device, keep_bytes=keep_bytes)


@on_devices
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision(device, dtype, tolerance):
    options = PairOptions(encoding="bf16", head="bf16")
    module = pair(options, draft=False)
    inputs = pair_inputs(module, options)
    found = outputs(TorchExecutor(module, getattr(torch, dtype), device), inputs)
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    assert {a.dtype for a in found.values()} == {np.dtype(kinds[dtype])}
    wide = {name: a.astype(np.float32) for name, a in found.items()}
    assert_close(wide, outputs(Interpreter(module), inputs), tolerance)


def graph(*types: str) -> Builder:
    """A graph of inputs `x0`, `x1` ..."""
    b = Builder(Module("m", symbols={s: SymbolRange(0, 99) for s in "bct"}), "main")
    for i, text in enumerate(types):
        made = tensor(text)
        b.input(f"x{i}", made.dtype, made.shape, Role.ACTIVATION)
    return b


def echo(*types: str) -> Module:
    """Returns its inputs."""
    b = graph(*types)
    for i, item in enumerate(b.graph.inputs):
        b.output(item.value, f"y{i}", Role.ACTIVATION)
    return b.module


@pytest.mark.parametrize(
    ("types", "inputs"),
    [
        (["f32[2]"], {}),
        (["f32[2]"], {"x0": np.ones(2), "z": np.ones(1)}),
        (["f32[2]"], {"x0": np.ones(3)}),
        (["f32[2]"], {"x0": np.ones((2, 1))}),
        (["f32[t]", "f32[t]"], {"x0": np.ones(2), "x1": np.ones(3)}),
        (["f32[t + 3]"], {"x0": np.ones(2)}),
        (["i64[2]"], {"x0": np.ones(2)}),
        (["bool[2]"], {"x0": np.zeros(2, np.int64)}),
        (["u8[2]"], {"x0": np.zeros(2, np.int64)}),
    ],
)
def test_calls_are_refused_in_the_words_of_the_interpreter(types, inputs):
    module = echo(*types)
    forms = [inputs, {name: torch.from_numpy(array) for name, array in inputs.items()}]
    with pytest.raises(RequestError) as expected:
        Interpreter(module).run("main", inputs)
    for given_ in forms:
        with pytest.raises(RequestError) as caught:
            TorchExecutor(module).run("main", given_)
        assert str(caught.value) == str(expected.value)


def test_unknown_graph():
    with pytest.raises(RequestError, match="no graph @mian") as caught:
        TorchExecutor(echo("f32[2]")).run("mian", {})
    assert caught.value.diagnostics[0].help == "did you mean 'main'? valid: main"


@pytest.mark.parametrize("form", [np.asarray, torch.tensor, list])
def test_inputs_may_be_arrays_tensors_or_lists(form):
    module = echo("f32[2]", "i64[2]")
    found = TorchExecutor(module).run("main", {"x0": form([1, 2]), "x1": form([3, 4])})
    assert [(a.dtype, a.tolist()) for a in found.values()] == [
        (np.float32, [1.0, 2.0]),
        (np.int64, [3, 4]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_are_rounded_once_to_the_dtype(dtype):
    module = echo("f32[1]", "f64[1]", "f32[1]")
    value = 1 + 2**-8 + 2**-40  # two roundings, by way of float32, would give 1
    inputs = {f"x{i}": np.array([value]) for i in range(3)}
    expected = [torch.tensor(value, dtype=torch.float64).to(dtype).item()] * 3
    for given_ in (inputs, {n: torch.from_numpy(a) for n, a in inputs.items()}):
        found = TorchExecutor(module, dtype).run_tensors("main", given_)
        assert [t.item() for t in found.values()] == expected
        assert {t.dtype for t in found.values()} == {dtype}


def test_outputs_by_name_in_order_and_only_those_wanted(monkeypatch):
    b = graph("f32[2]", "f32[2]")
    x, y = (i.value for i in b.graph.inputs)
    b.output(b.op("add", x, y), "z", Role.ACTIVATION)
    b.output(b.op("silu", x), "a", Role.ACTIVATION)
    b.output(x, "same", Role.ACTIVATION)
    inputs = {"x0": np.array([1.0, 2.0]), "x1": np.ones(2)}
    executor = TorchExecutor(b.module)
    assert list(executor.run("main", inputs)) == ["z", "a", "same"]
    monkeypatch.setitem(KERNELS, "silu", None)  # must not be computed
    found = executor.run_tensors("main", inputs, ["same", "z"])
    assert {name: t.tolist() for name, t in found.items()} == {"z": [2, 3], "same": [1, 2]}
    assert executor.run_tensors("main", inputs, []) == {}
    with pytest.raises(RequestError, match="graph @main has no output 'sane'") as caught:
        executor.run_tensors("main", inputs, ["sane"])
    assert caught.value.id == "run/outputs"
    assert caught.value.diagnostics[0].help.startswith("did you mean 'same'?")


def test_results_do_not_depend_on_gradients():
    x = torch.ones(2, requires_grad=True)
    b = graph("f32[2]")
    b.output(b.op("silu", b.graph.inputs[0].value), "y", Role.ACTIVATION)
    assert not TorchExecutor(b.module).run_tensors("main", {"x0": x})["y"].requires_grad


@on_devices
def test_chains_of_calls(device):
    """`main` calls `middle` on twice as many rows, which calls `leaf`."""
    rng = np.random.default_rng(1)
    w1, w2 = values(rng, 3, 4), values(rng, 2, 3)
    module = Module("chain", symbols={s: SymbolRange(0, 64) for s in "thk"})
    module.weights.add("w1", dense(w1))
    module.weights.add("w2", dense(w2))
    parts = {n: Builder(module, n) for n in ("main", "middle", "leaf")}
    inputs = [
        b.input("x", t.dtype, t.shape, Role.ACTIVATION)
        for b, t in zip(
            parts.values(), map(tensor, ("f32[t, 4]", "f32[h, 4]", "f32[k, 3]")), strict=True
        )
    ]
    leaf, middle, main = parts["leaf"], parts["middle"], parts["main"]
    leaf.output(leaf.op("linear", inputs[2], weights=("w2",)), "y", Role.ACTIVATION)
    leaf.output(inputs[2], "x_again", Role.ACTIVATION)
    hidden = middle.op("linear", inputs[1], weights=("w1",))
    for i, r in enumerate(middle.node("call", [hidden], attrs=CallAttributes("leaf")).results):
        middle.output(r, f"r{i}", Role.ACTIVATION)
    twice = main.op("concat", inputs[0], inputs[0], attrs=AxisAttributes(0))
    for i, r in enumerate(main.node("call", [twice], attrs=CallAttributes("middle")).results):
        main.output(r, f"r{i}", Role.ACTIVATION)
    x = values(rng, 5, 4)
    expected = np.concatenate([x, x]) @ w1.T
    found = oracle(device)(module, np.float64).run("main", {"x": x})
    assert_close(found, {"r0": expected @ w2.T, "r1": expected}, 1e-13)


def test_results_that_do_not_match_are_reported_with_their_node():
    b = graph("f32[c]", "f32[t]")
    x, like = (i.value for i in b.graph.inputs)
    b.output(b.op("tail", x, like, attrs=AxisAttributes(0), name="y"), "y", Role.ACTIVATION)
    with pytest.raises(RequestError, match=r"@main: %y = tail\(%x0, %x1\): expected f32\[t\]"):
        TorchExecutor(b.module).run("main", {"x0": np.zeros(2), "x1": np.zeros(3)})


def test_values_are_dropped_after_their_last_use():
    b = graph("f32[3]")
    x = b.graph.inputs[0].value
    for _ in range(5):
        x = b.op("silu", x)
    b.output(x, "y", Role.ACTIVATION)
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = []

    class Watch(TorchExecutor):
        def node(self, node, operands):
            results = super().node(node, operands)
            alive.extend(weakref.ref(r) for r in results)
            gc.collect()
            peak.append(sum(r() is not None for r in alive))
            return results

    Watch(b.module).run("main", {"x0": np.ones(3)})
    assert len(peak) == 5
    assert max(peak) <= 2  # the operand and the result


def test_ops_without_a_kernel(monkeypatch):
    b = graph("f32[2]")
    b.output(b.op("silu", b.graph.inputs[0].value, name="y"), "y", Role.ACTIVATION)
    monkeypatch.delitem(KERNELS, "silu")
    with pytest.raises(UnsupportedError, match="no kernel for the op silu") as caught:
        TorchExecutor(b.module).run("main", {"x0": np.ones(2)})
    assert caught.value.id == "torch/op"
    assert caught.value.diagnostics[0].where == "%y = silu(%x0)"


def test_unbound_weights_raise_when_they_are_read():
    module = pair()
    inputs = pair_inputs(module)
    assert "logits" in TorchExecutor(module).run("target", inputs["target"])
    with pytest.raises(LegalizeError, match=r"weight @draft\.embed_tokens\.weight has no bytes"):
        TorchExecutor(module).run("draft", inputs["draft"])


def test_streamed_weights_give_the_values_of_whole_ones(monkeypatch):
    b = graph("f32[t, 8]")
    rng = np.random.default_rng(4)
    b.module.weights.add("w", packed(rng, 10, 8).weight)
    b.module.weights.add("bias", dense(values(rng, 10)))
    y = b.op("linear", b.graph.inputs[0].value, weights=("w", "bias"))
    b.output(y, "y", Role.ACTIVATION)
    inputs = {"x0": values(rng, 3, 8)}
    monkeypatch.setattr("edgecc.ir.weights.WeightTable.row_blocks.__defaults__", (3 * 8 * 4,))
    streamed = TorchExecutor(b.module, torch.float64).run("main", inputs)
    monkeypatch.undo()
    assert_close(streamed, TorchExecutor(b.module, torch.float64).run("main", inputs), 1e-15)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, np.float32])
def test_dtypes_that_cannot_be_computed_in(dtype):
    with pytest.raises(UsageError, match="cannot evaluate in") as caught:
        TorchExecutor(Module("m"), dtype)
    assert "torch.bfloat16" in caught.value.diagnostics[0].help


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_devices_that_do_not_exist(device):
    with pytest.raises(UsageError, match=f"no device '{device}'") as caught:
        TorchExecutor(Module("m"), device=device)
    assert caught.value.id == "torch/device"


def test_devices_that_are_not_there():
    with pytest.raises(UnsupportedError, match="PyTorch sees no device cuda:99") as caught:
        TorchExecutor(Module("m"), device="cuda:99")
    assert caught.value.id == "torch/no-device"


def fresh(program: str) -> str:
    """What a program prints in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT / "compiler")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_without_pytorch_the_message_says_what_to_install():
    message = fresh(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import edgecc.backends.torch\n"
        "from edgecc.errors import UnsupportedError\n"
        "try:\n"
        "    from edgecc.backends.torch import TorchExecutor\n"
        "except UnsupportedError as error:\n"
        "    print(error)\n"
    )
    assert message == (
        "error[torch/not-installed]: the torch backend needs PyTorch, which is not installed\n"
        "  help: pip install 'edgecc[torch]'\n"
    )


def test_the_package_has_no_other_names():
    import edgecc.backends.torch as package

    with pytest.raises(AttributeError, match="no attribute 'TorchCompiler'"):
        _ = package.TorchCompiler
