from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.devices import ONNX_DEVICES, LinearForm
from edgecc.errors import UsageError
from edgecc.ir import (
    Builder,
    Dense,
    DType,
    Int8Block,
    Location,
    Module,
    Role,
    SymbolRange,
    sym,
    verify,
)
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.lower_encodings import LowerEncodings, LowerEncodingsOptions
from helpers.modules import check_pass, modules, random_inputs
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import ForbiddenReader, Packed, dense, packed, store

F32 = Dense(DType.F32)
FORMS = [f.value for f in LinearForm]
PACKED: Packed = packed(np.random.default_rng(0), 4, 4)
BF16 = dense(np.random.default_rng(1).standard_normal((4, 4)), DType.BF16)


def module_of(*layers: tuple[str, ...]) -> Module:
    """A chain of linear layers and norms on `[t, 4]`, given as (op, weights...)."""
    module = Module("m", symbols={"t": SymbolRange(1, 8)})
    table, rng = module.weights, np.random.default_rng(2)
    table.add("nvfp4", PACKED.weight)
    table.add("bf16", BF16)
    table.add("f32", dense(np.eye(4)))
    table.add("bias", dense(rng.standard_normal(4), DType.BF16))
    table.add("norm", dense(rng.standard_normal(4), DType.F16))
    b = Builder(module, "main").at("origin")
    value = b.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION)
    for op, *weights in layers:
        attrs = RmsNormAttributes(1e-5) if op == "rms_norm" else None
        value = b.op(op, value, weights=weights, attrs=attrs)
    b.output(value, "y", Role.ACTIVATION)
    return module


def lowered(module: Module, form: str = "dense") -> list[tuple[str, ...]]:
    check_pass(LowerEncodings(LowerEncodingsOptions(form)), module)
    return [n.weights for n in module.graphs["main"].nodes]


def test_dense_form():
    module = module_of(
        ("rms_norm", "norm"), ("linear", "nvfp4", "bias"), ("linear", "bf16"), ("linear", "f32")
    )
    assert lowered(module) == [("norm.f32",), ("nvfp4.f32", "bias.f32"), ("bf16.f32",), ("f32",)]
    for symbol in ("norm.f32", "nvfp4.f32", "bias.f32", "bf16.f32"):
        assert module.weights[symbol].encoding == F32
        assert str(module.weights[symbol].source) == f"dequantize(@{symbol[:-4]})"
    assert module.graphs["main"].nodes[0].location == Location("origin", ("lower-encodings",))
    assert module.graphs["main"].nodes[3].location == Location("origin")


def test_int8_form_is_for_packed_linear_layers_only():
    module = module_of(("rms_norm", "norm"), ("linear", "nvfp4", "bias"), ("linear", "bf16"))
    assert lowered(module, "int8-split") == [
        ("norm.f32",),
        ("nvfp4.int8", "bias.f32"),
        ("bf16.f32",),
    ]
    assert module.weights["nvfp4.int8"].encoding == Int8Block(4)
    assert str(module.weights["nvfp4.int8"].source) == "int8_codes(@nvfp4)"


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_what_is_lowered_stays(first, second):
    module = module_of(("linear", "nvfp4"), ("linear", "bf16"))
    before = lowered(module, first)
    assert lowered(module, second) == before


def test_nothing_to_lower():
    module = module_of(("linear", "f32"))
    assert not check_pass(LowerEncodings(), module)


def test_a_weight_used_twice_is_expanded_once():
    module = module_of(("linear", "nvfp4"), ("linear", "nvfp4"))
    b = Builder(module, "other")
    x = b.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION)
    b.output(b.op("linear", x, weights=("nvfp4",)), "y", Role.ACTIVATION)
    count = len(module.weights)
    assert lowered(module) == [("nvfp4.f32",), ("nvfp4.f32",)]
    assert b.graph.nodes[0].weights == ("nvfp4.f32",)
    assert len(module.weights) == count + 1


def test_aliases_are_expanded_once():
    module = module_of(("linear", "nvfp4"), ("linear", "bf16"))
    module.weights.alias("bf16", "nvfp4")
    assert lowered(module) == [("nvfp4.f32",), ("nvfp4.f32",)]


def test_nothing_is_read():
    module = module_of(("linear", "nvfp4"))
    store(module, "target", "stored", PACKED.weight)
    module.graphs["main"].nodes[0].weights = ("stored",)
    module.weights.readers["target"] = ForbiddenReader()
    assert LowerEncodings().run(module, PassContext())
    assert verify(module) == []


def embedding(table: str) -> Module:
    """A table of ids, and a head that is tied to it."""
    module = Module("m", symbols={"t": SymbolRange(1, 8)})
    module.weights.add("nvfp4", PACKED.weight)
    module.weights.add("bf16", BF16)
    b = Builder(module, "main")
    ids = b.input("ids", DType.I64, (sym("t"),), Role.TOKEN_IDS)
    x = b.op("embedding", ids, weights=(table,))
    b.output(b.op("linear", x, weights=(table,)), "y", Role.LOGITS)
    return module


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("bf16", {"dense": ["bf16", "bf16.f32"], "int8": ["bf16", "bf16.f32"]}),
        ("nvfp4", {"dense": ["nvfp4.f32"] * 2, "int8": ["nvfp4.f32", "nvfp4.int8"]}),
    ],
)
def test_dense_tables_stay_and_packed_ones_are_widened(form, table, expected):
    """No device looks up packed rows, so `legalize` would refuse a packed table."""
    module = embedding(table)
    data = {"main": {"ids": np.array([3, 0, 3])}}
    assert check_pass(LowerEncodings(LowerEncodingsOptions(form)), module, data)
    assert [n.weights for n in module.graphs["main"].nodes] == [
        (w,) for w in expected[form.partition("-")[0]]
    ]


@pytest.mark.parametrize("name", ONNX_DEVICES)
@pytest.mark.parametrize("form", LinearForm)
def test_the_device_decides_unless_told_otherwise(name, form):
    device = replace(ONNX_DEVICES[name], linear_form=form)
    for option, expected in (("auto", form.value), *((f, f) for f in FORMS)):
        module = module_of(("linear", "nvfp4"))
        made = LowerEncodings(LowerEncodingsOptions(option))
        assert check_pass(made, module, ctx=PassContext(device))
        suffix = {"dense": "f32", "int8-split": "int8", "int8-block": "int8"}[expected]
        assert module.graphs["main"].nodes[0].weights == (f"nvfp4.{suffix}",)


def test_without_a_device_the_form_is_dense():
    module = module_of(("linear", "nvfp4"))
    assert LowerEncodings().run(module, PassContext())
    assert module.graphs["main"].nodes[0].weights == ("nvfp4.f32",)


def test_unknown_form():
    module = module_of(("linear", "nvfp4"))
    with pytest.raises(UsageError, match="lower-encodings: unknown form 'int8'") as caught:
        LowerEncodings(LowerEncodingsOptions("int8")).run(module, PassContext())
    assert caught.value.id == "pass/bad-option"
    assert "valid: dense, int8-block, int8-split" in caught.value.diagnostics[0].help
    assert module.graphs["main"].nodes[0].weights == ("nvfp4",)


def test_a_borrowed_head_is_expanded_once():
    for form in FORMS:
        module = pair()
        BindSharedWeights().run(module, PassContext())
        LowerEncodings(LowerEncodingsOptions(form)).run(module, PassContext())
        heads = [n.weights for g in module.graphs.values() for n in g.nodes if "logits" in str(n)]
        assert verify(module) == []
        symbol = "target.lm_head.weight" + (".f32" if form == "dense" else ".int8")
        assert heads.count((symbol,)) == 2


@given(modules(), st.sampled_from(FORMS), st.integers(0, 5))
def test_random_modules(module, form, seed):
    """Both forms hold the exact values, so the interpreter gives the same bits."""
    lowering = LowerEncodings(LowerEncodingsOptions(form))
    check_pass(lowering, module, random_inputs(module, seed), tolerance=0)
    for graph in module.graphs.values():
        for node in graph.nodes:
            for symbol in node.weights:
                encoding = module.weights[symbol].encoding
                assert (
                    encoding == F32
                    or (isinstance(encoding, Dense) and not encoding.dtype.is_float)
                    or (node.op.name == "embedding" and isinstance(encoding, Dense))
                    or (node.op.name == "linear" and isinstance(encoding, Int8Block))
                )


@FEWER
@given(pair_options(), st.sampled_from(FORMS))
def test_random_pairs(options, form):
    options = replace(options, draft_head="same", draft_embedding="same")
    module = pair(options)
    lowering = LowerEncodings(LowerEncodingsOptions(form))
    check_pass(lowering, module, pair_inputs(module, options), tolerance=0)


def test_packed_pairs_change():
    module = pair(PairOptions(draft_head="own", draft_embedding="own"))
    assert LowerEncodings().run(module, PassContext())


def test_tables_of_ids_stay():
    """Widening a table of ids would make them floats."""
    module = Module("m", symbols={"t": SymbolRange(1, 8)})
    module.weights.add("offsets", dense(np.array([5, 0, 3])))
    module.weights.derive("ids", "offsets_to_ids", ("offsets",))
    b = Builder(module, "main")
    value = b.input("x", DType.I64, (sym("t"),), Role.ACTIVATION)
    b.output(b.op("lookup", value, weights=("ids",)), "y", Role.ACTIVATION)
    for form in FORMS:
        data = {"main": {"x": np.array([2, 0, 2])}}
        assert not check_pass(LowerEncodings(LowerEncodingsOptions(form)), module, data)


@pytest.mark.parametrize(
    ("weight", "lowered"),
    [
        (dense(np.ones(4)), "w"),
        (dense(np.arange(4)), "w"),
        (dense(np.ones(4), DType.BF16), "w.f32"),
        (packed(np.random.default_rng(0), 4, 4).weight, "w.f32"),
    ],
)
def test_constants(weight, lowered):
    """Integers stay, floats become f32."""
    module = Module("m")
    module.weights.add("w", weight)
    b = Builder(module, "main")
    b.output(b.op("constant", weights=("w",)), "y", Role.ACTIVATION)
    assert check_pass(LowerEncodings(), module, {"main": {}}) is (lowered != "w")
    assert b.graph.nodes[0].weights == (lowered,)
