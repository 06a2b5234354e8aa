from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc import fp8, nvfp4
from edgecc.devices import DEVICES, get_device
from edgecc.errors import UsageError
from edgecc.ir import Builder, DType, Interpreter, Module, Role, SymbolRange, sym
from edgecc.ir.encodings import FP8, NVFP4, Dense, Encoding
from edgecc.ir.interpreter import evaluate
from edgecc.ir.quantize import quantize
from edgecc.ir.random_inputs import random_inputs
from edgecc.ir.weights import Alias
from edgecc.passes.base import PassContext
from edgecc.passes.fuse_qkv import FuseQkv
from edgecc.passes.quantize_activations import (
    TOLERANCE,
    QuantizeActivations,
    QuantizeActivationsOptions,
    activations_of,
)
from helpers.modules import check_pass, modules
from helpers.ops import assert_same_bits
from helpers.weights import dense, inline

X = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)


SCALE = np.float32(0.01)


def weight(encoding: Encoding, seed: int = 0, scale: float = float(SCALE)):
    """A rounded random matrix `[32, 32]`, with a calibrated scale for activations."""
    values = np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32)
    plain = NVFP4(encoding.block) if isinstance(encoding, NVFP4) else FP8(encoding.scaling)
    parts = quantize(plain, values, lambda: np.float32(np.abs(values).max()))
    return inline((32, 32), encoding, {**parts, "input_scale": np.array(scale, np.float32)})


W4A4, W8A8 = NVFP4(input_scale=True), FP8(input_scale=True)


def layers(**weights) -> Module:
    """Linear layers of one value."""
    module = Module("m", symbols={"t": SymbolRange(1, 8)})
    b = Builder(module, "main").at("origin")
    x = b.input("x", DType.F32, (sym("t"), 32), Role.ACTIVATION)
    for name, made in weights.items():
        module.weights.add(f"target.{name}.weight", made)
        y = b.op("linear", x, weights=(f"target.{name}.weight",))
        b.output(y, name, Role.ACTIVATION)
    return module


def run(module: Module, device: str = "", **options) -> PassContext:
    ctx = PassContext(get_device(device) if device else None)
    check_pass(QuantizeActivations(QuantizeActivationsOptions(**options)), module, ctx=ctx)
    return ctx


def ops(module: Module, op: str = "fake_quantize"):
    return [n for g in module.graphs.values() for n in g.nodes if n.op.name == op]


@pytest.mark.parametrize(
    ("encoding", "rounded"),
    [
        (W4A4, lambda x: nvfp4.fake_quantize(x, SCALE)),
        (NVFP4(8, input_scale=True), lambda x: nvfp4.fake_quantize(x, SCALE, 8)),
        (W8A8, lambda x: fp8.fake_quantize(x, SCALE)),
        (FP8("channel", input_scale=True), lambda x: fp8.fake_quantize(x, SCALE)),
    ],
)
def test_layers_read_rounded_values(encoding, rounded):
    module = layers(w=weight(encoding))
    plain = Interpreter(module).run("main", {"x": rounded(X)})
    run(module)
    found = Interpreter(module).run("main", {"x": X})
    assert_same_bits([found["w"]], [plain["w"]])
    assert (
        np.abs(
            found["w"] - Interpreter(layers(w=weight(encoding))).run("main", {"x": X})["w"]
        ).max()
        > 0
    )


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        (W4A4, "nvfp4<block=16>"),
        (W8A8, "fp8<tensor>"),
        (FP8("channel", input_scale=True, scale_dtype=DType.BF16), "fp8<tensor>"),
        (FP8("block", input_scale=True), ""),
        (NVFP4(), ""),
        (FP8(), ""),
        (Dense(DType.BF16), ""),
    ],
)
def test_what_weights_are_multiplied_with(encoding, expected):
    assert activations_of(encoding) == expected


def test_layers_of_one_scale_share_the_op():
    module = layers(q=weight(W4A4, 1), k=weight(W4A4, 2), v=weight(W4A4, 3, 0.02))
    ctx = run(module)
    first, second = ops(module)
    q, k, v = ops(module, "linear")
    assert q.operands[0] is k.operands[0] is first.result
    assert v.operands[0] is second.result
    assert "the scales of @target.q.weight, @target.v.weight differ" in str(ctx.remarks[-1])
    assert str(q.location) == str(first.location)


def test_formats_do_not_share():
    module = layers(a=weight(W4A4, 1), b=weight(W8A8, 2))
    ctx = run(module)
    assert [n.attrs.encoding for n in ops(module)] == ["nvfp4<block=16>", "fp8<tensor>"]
    assert not any("differ" in str(r) for r in ctx.remarks)


def test_a_shared_weight_has_one_scale_in_all_graphs():
    module = layers(head=weight(W4A4))
    shared = module.weights["target.head.weight"]
    module.weights.add("draft.head.weight", inline(shared.shape, W4A4, {}))
    module.weights.rebind(
        "draft.head.weight", type(shared)(shared.shape, W4A4, Alias("target.head.weight"))
    )
    b = Builder(module, "draft").at("origin")
    x = b.input("x", DType.F32, (3, 32), Role.ACTIVATION)
    b.output(b.op("linear", x, weights=("draft.head.weight",)), "y", Role.ACTIVATION)
    run(module)
    assert {n.weights for n in ops(module)} == {("target.head.input_scale",)}
    assert len(ops(module)) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_device_multiplies(device):
    module = layers(a=weight(W4A4, 1), b=weight(W8A8, 2))
    run(module, device)
    found = {n.attrs.encoding for n in ops(module)}
    assert found == get_device(device).native_activations
    if found:
        assert get_device(device).native_linear >= {e.partition("<")[0] for e in found}


def test_patterns():
    module = layers(gate=weight(W4A4, 1), up=weight(W4A4, 2), down=weight(W8A8, 3))
    run(module, include="target.*", exclude="up")
    read = {n.weights[0].split(".")[1]: n.operands[0] for n in ops(module, "linear")}
    assert read["up"] is module.graphs["main"].inputs[0].value
    assert [read["gate"], read["down"]] == [n.result for n in ops(module)]


@pytest.mark.parametrize(
    ("options", "id"),
    [
        ({"format": "int4"}, "pass/bad-option"),
        ({"include": "nothing"}, "quantize-activations/no-match"),
        ({"exclude": "*.nothing"}, "quantize-activations/no-match"),
    ],
)
def test_bad_options(options, id):
    with pytest.raises(UsageError) as caught:
        run(layers(w=weight(W4A4)), **options)
    assert caught.value.diagnostics[0].id == id


def test_a_scale_is_only_read_to_compare():
    """One layer of a value needs no bytes: the op names the weight that has them."""
    module = layers(w=weight(W4A4))
    module.weights.read = lambda *_: pytest.fail("read")  # type: ignore[method-assign]
    QuantizeActivations().run(module, PassContext())
    assert ops(module)[0].weights == ("target.w.input_scale",)


class Rounding(Interpreter):
    """Rounds what linear layers read, by the encoding of their weight: the pass, done by hand."""

    def node(self, node, operands):
        table = self.module.weights
        if node.op.name != "linear":
            return super().node(node, operands)
        name, given = table.resolve(node.weights[0]), node.operands[0].producer
        if given is None or given.op.name != "fake_quantize":
            encoding = table[name].encoding
            kind = activations_of(encoding)
            if kind:
                parts = table.read(name, 0, 1)
                if "input_global_scale" in parts:  # a divisor: its reciprocal, in float32
                    g = np.float32(1) / parts["input_global_scale"]
                else:
                    g = parts["input_scale"]
                g = g.astype(operands[0].dtype)[()]
                x = operands[0]
                x = (
                    nvfp4.fake_quantize(x, g, encoding.block)
                    if "nvfp4" in kind
                    else fp8.fake_quantize(x, g)
                )
                operands = [x, *operands[1:]]
        return super().node(node, operands)


FORMATS = st.sampled_from(["auto", "nvfp4", "fp8"])


@given(module=modules(), format=FORMATS)
def test_random_modules(module, format):
    """What holds for all passes; values are compared below."""
    check_pass(QuantizeActivations(QuantizeActivationsOptions(format)), module, tolerance=1e30)


@given(module=modules(), seed=st.integers(0, 9))
def test_values_of_random_modules(module, seed):
    inputs = random_inputs(module, seed)
    expected = {
        f"{graph}.{name}": array
        for graph, arrays in inputs.items()
        for name, array in Rounding(module).run(graph, arrays).items()
    }
    QuantizeActivations().run(module, PassContext())
    found = evaluate(module, inputs)
    assert_same_bits(list(found.values()), list(expected.values()))


def test_results_are_within_the_tolerance():
    module = layers(a=weight(W4A4, 1, 5 / 2688), b=weight(W8A8, 2, 5 / 448))
    before = Interpreter(module).run("main", {"x": X})
    run(module)
    after = Interpreter(module).run("main", {"x": X})
    for name, low in (("a", 100), ("b", 500)):
        error = np.abs(after[name] - before[name]).max() / np.abs(before[name]).max()
        assert TOLERANCE / low < error < TOLERANCE


def test_stacks_keep_their_scale():
    """Queries, keys and values that `fuse-qkv` stacks share one op; see the golden cases too."""
    table = layers(q=weight(W4A4, 1), k=weight(W4A4, 2)).weights
    table.derive("stack", "concat_rows", ("target.q.weight", "target.k.weight"))
    table.derive("scale", "input_scale", ("stack",))
    assert table.read("scale")["weight"] == SCALE
    assert FuseQkv.requires == QuantizeActivations.requires == ()
    table.add("plain", dense(np.eye(2)))
    with pytest.raises(ValueError, match="has no input_scale"):
        table.derive("none", "input_scale", ("plain",))
