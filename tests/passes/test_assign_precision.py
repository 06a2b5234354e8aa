from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgecc.devices import ONNX_DEVICES
from edgecc.errors import LegalizeError, UsageError
from edgecc.ir import (
    Builder,
    DType,
    Interpreter,
    Location,
    Module,
    Node,
    Role,
    SymbolRange,
    print_module,
    sym,
    verify,
)
from edgecc.ir.encodings import Array
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes, SplitAttributes
from edgecc.passes.assign_precision import (
    NARROW,
    TOLERANCES,
    AssignPrecision,
    AssignPrecisionOptions,
)
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.legalize import Legalize, LegalizeOptions
from edgecc.passes.pipeline import parse_pipeline
from helpers.modules import check_pass, evaluate, interface, module_text, modules, random_inputs
from helpers.ops import assert_same_bits
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import dense

NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def module_of() -> tuple[Module, Builder]:
    """A module with one graph to be built over `%x: f32[t, 4]`."""
    module = Module("m", symbols={"t": SymbolRange(0, 8)})
    rng = np.random.default_rng(0)
    for name in ("w", "w2"):
        module.weights.add(name, dense(rng.standard_normal((4, 4)), DType.BF16))
    module.weights.add("n", dense(rng.standard_normal(4), DType.BF16))
    b = Builder(module, "main").at("target: model.layers.0.mlp")
    b.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION)
    return module, b


def body(module: Module, **options: str) -> list[str]:
    """Statements of the graph after the pass, without types."""
    AssignPrecision(AssignPrecisionOptions(**options)).run(module, PassContext())
    assert verify(module) == []
    text = print_module(module)
    lines = text[text.index(") {") :].splitlines()[1:-1]
    statements = [line.strip() for line in lines]
    return statements[: statements.index("return")]


def test_casts_stand_at_the_edges_only():
    module, b = module_of()
    y = b.op("linear", b.graph.inputs[0].value, weights=("w",), name="y")
    b.output(b.op("silu", y, name="z"), "z", Role.ACTIVATION)
    assert body(module) == [
        '%x_1 = cast(%x) {dtype = "bf16"} : bf16[t, 4]',
        "%y = linear(%x_1, @w) : bf16[t, 4]",
        "%z = silu(%y) : bf16[t, 4]",
        '%z_1 = cast(%z) {dtype = "f32"} : f32[t, 4]',
    ]
    assert {n.location for n in module.graphs["main"].nodes} == {
        Location("target: model.layers.0.mlp", ("assign-precision",))
    }


def test_a_value_is_cast_once_for_all_its_users():
    module, b = module_of()
    x = b.graph.inputs[0].value
    y = b.op("add", x, x, name="y")
    z = b.op("mul", x, y, name="z")
    left, right = b.node("split", (z,), attrs=SplitAttributes(1, (2, 2)), names=("l", "r")).results
    b.output(b.op("concat", left, right, attrs=AxisAttributes(1)), "c", Role.ACTIVATION)
    b.output(y, "y", Role.HIDDEN)
    b.output(x, "x", Role.HIDDEN_TAP)
    assert body(module, dtype="f16") == [
        '%x_1 = cast(%x) {dtype = "f16"} : f16[t, 4]',
        "%y = add(%x_1, %x_1) : f16[t, 4]",
        '%y_1 = cast(%y) {dtype = "f32"} : f32[t, 4]',
        "%z = mul(%x_1, %y) : f16[t, 4]",
        "%l, %r = split(%z) {axis = 1, sizes = [2, 2]} : f16[t, 2], f16[t, 2]",
        "%concat = concat(%l, %r) {axis = 1} : f16[t, 4]",
        '%concat_1 = cast(%concat) {dtype = "f32"} : f32[t, 4]',
    ]


def test_what_tokens_are_chosen_by_is_wide_back_to_its_linear_layers():
    module, b = module_of()
    x = b.graph.inputs[0].value
    hidden = b.op("silu", x, name="h")
    first = b.op("linear", hidden, weights=("w",), name="a")
    second = b.op("linear", hidden, weights=("w2",), name="b")
    total = b.op("add", first, second, name="sum")
    b.output(b.op("argmax", total, attrs=ArgmaxAttributes(4)), "y", Role.PROPOSALS)
    assert body(module) == [
        '%x_1 = cast(%x) {dtype = "bf16"} : bf16[t, 4]',
        "%h = silu(%x_1) : bf16[t, 4]",
        '%h_1 = cast(%h) {dtype = "f32"} : f32[t, 4]',
        "%a = linear(%h_1, @w) : f32[t, 4]",
        "%b = linear(%h_1, @w2) : f32[t, 4]",
        "%sum = add(%a, %b) : f32[t, 4]",
        "%argmax = argmax(%sum) {limit = 4} : i64[t]",
    ]


@pytest.mark.parametrize(
    "role", [Role.LOGITS, Role.BASE_LOGITS, Role.DRAFT_LOGITS, Role.CONFIDENCE]
)
def test_scores_that_are_returned_are_wide(role):
    module, b = module_of()
    y = b.op("linear", b.graph.inputs[0].value, weights=("w",))
    b.output(y, "y", role)
    assert body(module) == ["%linear = linear(%x, @w) : f32[t, 4]"]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("", []),
        ("rms_norm", ["rms_norm"]),
        ("silu, rms_*", ["rms_norm", "silu"]),
        ("model.layers.0.*", ["rms_norm", "linear", "silu"]),
        ("target: model.layers.?.mlp", ["rms_norm", "linear", "silu"]),
        ("gated_*", []),  # an op that this module does not have
    ],
)
def test_keep(keep, kept):
    module, b = module_of()
    x = b.op("rms_norm", b.graph.inputs[0].value, weights=("n",), attrs=RmsNormAttributes(1e-5))
    b.output(b.op("silu", b.op("linear", x, weights=("w",))), "y", Role.ACTIVATION)
    ctx = PassContext()
    AssignPrecision(AssignPrecisionOptions(keep=keep)).run(module, ctx)
    assert verify(module) == []
    wide = [
        n.op.name
        for n in module.graphs["main"].nodes
        if n.op.name != "cast" and n.result.type.dtype is DType.F32
    ]
    assert wide == kept
    assert sum("kept by" in r.message for r in ctx.remarks) == len(kept)


@pytest.mark.parametrize("keep", ["lin", "model.layers.1.*", "rms_norm,rmsnorm"])
def test_a_name_that_keeps_nothing_is_a_mistake(keep):
    """A typo would compute in 16 bits what was to stay."""
    module, b = module_of()
    x = b.op("rms_norm", b.graph.inputs[0].value, weights=("n",), attrs=RmsNormAttributes(1e-5))
    b.output(x, "y", Role.ACTIVATION)
    text = module_text(module)
    with pytest.raises(UsageError, match="names no op and no module") as caught:
        AssignPrecision(AssignPrecisionOptions(keep=keep)).run(module, PassContext())
    assert caught.value.id == "assign-precision/no-match"
    assert module_text(module) == text


def test_attention_and_caches_are_wide():
    module = pair(PairOptions(encoding="bf16", head="bf16"))
    AssignPrecision().run(module, PassContext())
    assert verify(module) == []
    for graph in module.graphs.values():
        for node in graph.nodes:
            types = {r.type.dtype for r in node.results} - {DType.I64}
            if node.op.name in ("attention", "cache_update", "embedding", "markov_chain"):
                assert types == {DType.F32}
            elif node.op.name in ("rms_norm", "rope", "swiglu"):
                assert types == {DType.BF16}


def test_shapes_are_read_off_narrow_values():
    """No cast back to float32 for the sake of `position_ids`."""
    module = pair(PairOptions(), target=False)
    AssignPrecision().run(module, PassContext())
    (node,) = [n for n in module.graphs["draft"].nodes if n.op.name == "position_ids"]
    assert node.operands[1].type.dtype is DType.BF16


def test_nothing_to_do():
    module, b = module_of()
    ids = b.input("ids", DType.I64, (sym("t"), 2), Role.TOKEN_IDS)
    b.output(b.op("concat", ids, ids, attrs=AxisAttributes(1)), "y", Role.TOKEN_IDS)
    text = module_text(module)
    assert not AssignPrecision().run(module, PassContext())
    assert module_text(module) == text


@pytest.mark.parametrize("dtype", ["f32", "f8e4m3", "half"])
def test_bad_types(dtype):
    with pytest.raises(UsageError, match=f"dtype '{dtype}' is not one of 16 bits"):
        AssignPrecision(AssignPrecisionOptions(dtype))


def test_pipeline_text():
    (made,) = parse_pipeline('assign-precision{dtype=f16,keep="rms_norm,*.layers.0.*"}')
    assert made.options == AssignPrecisionOptions("f16", "rms_norm,*.layers.0.*")
    assert made.tolerance == TOLERANCES["f16"] < TOLERANCES["bf16"]
    assert parse_pipeline(str(made))[0].options == made.options


# Values


class Rounding(Interpreter):
    """The module before the pass, with operands and results of narrow ops rounded by hand."""

    def __init__(self, module: Module, dtype: str) -> None:
        super().__init__(module)
        self.to = NUMPY[dtype]

    def node(self, node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
        if node.op.name not in NARROW:
            return super().node(node, operands)
        rounded = super().node(node, [self.round(o) for o in operands])
        return tuple(self.round(r) for r in rounded)

    def round(self, array: Array) -> Array:
        if array.dtype.kind != "f":
            return array
        with np.errstate(over="ignore"):
            return array.astype(self.to).astype(np.float32)


@given(module=modules(), dtype=st.sampled_from(list(NUMPY)))
def test_random_modules(module, dtype):
    """What holds for all passes; values are compared bit for bit below."""
    inputs = random_inputs(module)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = [
            array for g in inputs for array in Rounding(module, dtype).run(g, inputs[g]).values()
        ]
    assume(all(np.all(np.isfinite(a)) for a in rounded))  # f16 ends at 65504
    made = AssignPrecision(AssignPrecisionOptions(dtype))
    check_pass(made, module, inputs, tolerance=1e30)


@given(
    module=modules(ops=NARROW - {"tail"}),
    dtype=st.sampled_from(list(NUMPY)),
    seed=st.integers(0, 9),
)
def test_values_of_random_modules(module, dtype, seed):
    """Every narrow op rounds once, bit for bit; interfaces stay; a second run changes nothing."""
    inputs = random_inputs(module, seed)
    interfaces = {name: interface(g) for name, g in module.graphs.items()}
    with np.errstate(invalid="ignore", over="ignore"):
        expected = [
            array for g in inputs for array in Rounding(module, dtype).run(g, inputs[g]).values()
        ]
    made = AssignPrecision(AssignPrecisionOptions(dtype))
    text = module_text(module)
    changed = made.run(module, PassContext())
    assert verify(module) == []
    assert changed is (module_text(module) != text)
    assert {name: interface(g) for name, g in module.graphs.items()} == interfaces
    with np.errstate(invalid="ignore", over="ignore"):
        assert_same_bits(list(evaluate(module, inputs).values()), expected)
    text = module_text(module)
    assert not made.run(module, PassContext())
    assert module_text(module) == text
    for graph in module.graphs.values():
        outputs = {o.value for o in graph.outputs}
        for node in graph.nodes:
            if node.op.name == "cast":
                assert node.result.uses or node.result in outputs
                assert node.operands[0].type.dtype is not node.result.type.dtype


@FEWER
@given(drawn=pair_options(), dtype=st.sampled_from(list(NUMPY)))
def test_random_pairs(drawn, dtype):
    """Results of the target are within the tolerance of the pass."""
    drawn = replace(drawn, head_norms=False)
    module = pair(drawn)
    BindSharedWeights().run(module, PassContext())
    inputs = pair_inputs(module, drawn)
    before = evaluate(module, inputs)
    made = AssignPrecision(AssignPrecisionOptions(dtype))
    assert made.run(module, PassContext())
    assert verify(module) == []
    after = evaluate(module, inputs)
    for name in ("target.logits", "target.hidden_tap", "draft.base_logits"):
        error = np.max(np.abs(after[name] - before[name])) / np.max(np.abs(before[name]))
        assert error < made.tolerance, name
    assert not made.run(module, PassContext())


# Devices


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_devices_without_16_bit_kernels_refuse(device):
    module, b = module_of()
    module.weights.derive("w.f32", "dequantize", ("w",))
    y = b.op("linear", b.graph.inputs[0].value, weights=("w.f32",))
    b.output(y, "y", Role.ACTIVATION)
    legalize = Legalize(LegalizeOptions(device))
    assert not legalize.run(module, PassContext())
    AssignPrecision().run(module, PassContext())
    with pytest.raises(LegalizeError) as caught:
        legalize.run(module, PassContext())
    first = caught.value.diagnostics[0]
    assert (first.id, first.message) == (
        "legalize/dtype",
        f"device {device} computes in f32, cast gives bf16",
    )
    assert first.help == "leave out assign-precision for this device"
