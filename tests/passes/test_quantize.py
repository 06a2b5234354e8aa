from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import UsageError
from edgecc.ir import (
    FP8,
    NVFP4,
    Builder,
    Dense,
    Derived,
    DType,
    Encoding,
    Int4,
    Int8,
    Location,
    Module,
    Role,
    SymbolRange,
    sym,
    verify,
)
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.dce import Dce
from edgecc.passes.dedupe_weights import DedupeWeights, DedupeWeightsOptions
from edgecc.passes.fuse_gate_up import FuseGateUp
from edgecc.passes.fuse_qkv import FuseQkv
from edgecc.passes.pipeline import parse_pipeline
from edgecc.passes.quantize import FORMATS, TOLERANCES, Quantize, QuantizeOptions, module_names
from helpers.modules import (
    check_pass,
    evaluate,
    interface,
    module_text,
    modules,
    random_inputs,
    storage,
)
from helpers.ops import assert_same_bits
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import ForbiddenReader, dense, packed, store

Inputs = dict[str, dict[str, np.ndarray]]

DENSE = PairOptions(encoding="bf16", head="bf16", hidden=16, heads=2, head_dim=16, stored=True)
"""A pair whose widths fit every format but for the MLP's output and the confidence."""


def quantize(module: Module, **options: object) -> dict[str, str]:
    """Run the pass; why each weight was left alone, and what the others became."""
    ctx = PassContext()
    Quantize(QuantizeOptions(**options)).run(module, ctx)
    assert verify(module) == []
    return {r.where.removeprefix("@"): ("-> " * r.applied) + r.message for r in ctx.remarks}


def made(module: Module) -> dict[str, tuple[str, ...]]:
    """Quantized weights and what they are made from."""
    return {
        symbol: weight.source.inputs
        for symbol, weight in module.weights.items()
        if isinstance(weight.source, Derived) and weight.source.recipe == "quantize"
    }


def layers(*names: str, columns: int = 16, rows: int = 16) -> Module:
    """A chain of bf16 linear layers with weights of these names."""
    module = Module("m", symbols={"t": SymbolRange(0, 8)})
    rng = np.random.default_rng(0)
    b = Builder(module, "main").at("origin")
    value = b.input("x", DType.F32, (sym("t"), columns), Role.ACTIVATION)
    for name in names:
        weight = dense(rng.standard_normal((rows, columns)), DType.BF16)
        value = b.op("linear", value, weights=(store(module, "target", name, weight),))
    b.output(value, "y", Role.ACTIVATION)
    return module


# What becomes of one layer


@pytest.mark.parametrize(
    ("format", "encoding"),
    [
        ("nvfp4", NVFP4(16)),
        ("fp8", FP8("tensor")),
        ("fp8-channel", FP8("channel")),
        ("fp8-block", FP8("block")),
        ("int8", Int8()),
        ("int4", Int4(8)),
    ],
)
def test_formats(format, encoding):
    module = layers("target.up_proj.weight")
    group = 8 if format == "int4" else 0
    assert quantize(module, format=format, group=group) == {
        "target.up_proj.weight": f"-> @target.up_proj-{format}.weight"
    }
    (node,) = module.graphs["main"].nodes
    assert node.weights == (f"target.up_proj-{format}.weight",)
    assert node.location == Location("origin", ("quantize",))
    weight = module.weights[node.weights[0]]
    assert weight.encoding == encoding
    assert str(weight.source) == f"quantize(@target.up_proj.weight, encoding={encoding})"
    assert module.decisions == [
        f"1 linear weights quantized to {encoding} (512 -> {weight.nbytes} bytes)"
    ]


def test_every_format_is_listed():
    assert FORMATS.keys() == TOLERANCES.keys()
    assert FORMATS["int4"] == Int4(128)


def test_nothing_is_read():
    module = layers("target.a.weight", "target.b.weight")
    module.weights.readers["target"] = ForbiddenReader()
    assert len(quantize(module)) == 2


def test_biases_stay():
    module = layers("target.a.weight")
    bias = store(module, "target", "target.a.bias", dense(np.ones(16), DType.BF16))
    old = module.graphs["main"].nodes[0]
    b = Builder(module, "other")
    x = b.input("x", DType.F32, (sym("t"), 16), Role.ACTIVATION)
    b.output(b.op("linear", x, weights=(old.weights[0], bias)), "y", Role.ACTIVATION)
    quantize(module, format="int8")
    assert module.graphs["other"].nodes[0].weights == ("target.a-int8.weight", "target.a.bias")
    assert old.weights == ("target.a-int8.weight",)


# What is left alone, and why


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("target.lm_head.weight", {}, "excluded by default, *lm_head*"),
        ("target.lm_head.weight", {"head": True}, None),
        ("target.model.layers.1.mlp.gate.weight", {}, "excluded by default, *mlp.gate"),
        ("target.model.layers.1.mlp.gate.weight", {"head": True}, "excluded by default, *mlp.gate"),
        ("target.model.layers.1.mlp.gate_proj.weight", {}, None),
        ("target.layers.0.linear_attn.in_proj_b.weight", {}, "excluded by default, *linear_attn."),
        ("target.layers.0.linear_attn.in_proj_qkv.weight", {}, None),
        ("target.mtp.fc.weight", {}, "excluded by default, mtp.*"),
        ("target.model.visual.merger.weight", {}, "excluded by default, *visual*"),
        ("target.a.weight", {"exclude": "z,target.a"}, "excluded by target.a"),
        ("target.a.weight", {"exclude": " ?"}, "excluded by ?"),
        ("target.a.weight", {"exclude": "target.?.*"}, None),
        ("target.a.weight", {"include": "*.other,z*"}, "not included"),
        ("target.a.weight", {"include": "a,z"}, None),
        ("target.a.weight", {"format": "int4"}, "int4 needs a [N, K] weight with N a multiple of"),
    ],
)
def test_exclusions(name, options, reason):
    module = layers(name, "target.z.weight", "target.x.other.weight")
    found = quantize(module, **{"format": "fp8", **options})[name]
    assert found.startswith(reason or "-> @target."), found


def test_matrices_that_do_not_fit_the_layout():
    module = layers("target.a.weight", columns=24, rows=24)
    assert quantize(module) == {
        "target.a.weight": "nvfp4 needs a [N, K] weight with K even and a multiple of 16, "
        "found [24, 24]"
    }
    assert quantize(module, format="int4", group=8)["target.a.weight"].startswith("-> ")


def test_quantized_weights_stay():
    module = layers("target.b.weight")
    module.weights.add("target.a.weight", packed(np.random.default_rng(0), 16, 16, block=16).weight)
    b = Builder(module, "other")
    x = b.input("x", DType.F32, (sym("t"), 16), Role.ACTIVATION)
    b.output(b.op("linear", x, weights=("target.a.weight",)), "y", Role.ACTIVATION)
    found = quantize(module, format="fp8")
    assert found["target.a.weight"] == "is nvfp4<block=16> already"
    assert found["target.b.weight"].startswith("-> ")


def test_tied_embeddings_and_weights_of_other_ops_stay():
    """A quantized copy for the linear layer alone would be stored beside the original."""
    module = pair(replace(DENSE, head="tied"), draft=False)
    found = quantize(module, format="int8", head=True)
    assert found["target.embed_tokens.weight"] == "is also read by embedding in @target"
    module = pair(DENSE)
    table = module.weights
    b = Builder(module, "other")
    x = b.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION)
    b.output(b.op("linear", x, weights=("draft.markov_w2",)), "y", Role.ACTIVATION)
    table.derive("stack", "concat_rows", ("target.layers.0.up_proj.weight",) * 2)
    table.derive("narrow", "dequantize", ("stack",))
    wide = b.input("wide", DType.F32, (sym("t"), 16), Role.ACTIVATION)
    b.output(b.op("linear", wide, weights=("narrow",)), "z", Role.ACTIVATION)
    found = quantize(module, format="int8")
    assert found["draft.markov_w2"] == "is also read by markov_chain in @draft"
    assert found["narrow"] == "-> @narrow-int8"


def test_unbound_heads_wait_for_their_target():
    found = quantize(pair(DENSE), format="int8", head=True)
    assert found["draft.lm_head.weight"] == "unbound lm_head: bind it first"


@pytest.mark.parametrize("exclude", ["aa", "z,draft.a", "target", "*.downproj"])
def test_an_exclude_that_names_nothing_is_a_mistake(exclude):
    """A typo would round what was to stay as it is."""
    module = layers("target.a.weight", "target.z.weight")
    text = module_text(module)
    with pytest.raises(UsageError, match="names no weight") as caught:
        Quantize(QuantizeOptions(exclude=exclude)).run(module, PassContext())
    assert caught.value.id == "quantize/no-match"
    assert module_text(module) == text


def test_weights_of_other_ops_may_be_excluded():
    """Lists of exclusions name embeddings as well."""
    module = pair(DENSE)
    assert quantize(module, format="int8", exclude="embed_tokens,*.o_proj")
    assert made(module)
    assert not any("o_proj" in symbol for symbol in made(module))


def test_an_include_that_names_nothing_is_a_mistake():
    module = layers("target.model.up_proj.weight")
    text = module_text(module)
    with pytest.raises(UsageError, match="names no linear layer") as caught:
        Quantize(QuantizeOptions(include="*.up_proj,*.upproj")).run(module, PassContext())
    assert caught.value.id == "quantize/no-match"
    assert "model.up_proj" in caught.value.diagnostics[0].help
    assert module_text(module) == text
    assert not Quantize().run(Module("empty"), PassContext())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "nvfp8"}, "unknown format 'nvfp8'"),
        ({"format": "fp8", "group": 32}, "group 32 with format fp8"),
        ({"format": "int4", "group": -1}, "group -1 with format int4"),
        ({"include": ""}, "include names nothing"),
        ({"include": " , "}, "include names nothing"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        Quantize(QuantizeOptions(**options))


def test_pipelines():
    text = 'quantize{include="*.mlp.*,draft.*",format=int4,group=32},quantize{format=fp8,head=true}'
    first, second = parse_pipeline(text)
    assert (first.encoding, second.encoding) == (Int4(32), FP8())
    again = parse_pipeline(f"{first},{second}")
    assert [p.options for p in again] == [first.options, second.options]
    assert (first.tolerance, second.tolerance) == (TOLERANCES["int4"], TOLERANCES["fp8"])
    assert Quantize.tolerance == 0
    with pytest.raises(UsageError, match="unknown format"):
        parse_pipeline("quantize{format=fp4}")


def test_names():
    assert module_names("target.model.mlp.up.weight") == ("model.mlp.up", "target.model.mlp.up")
    assert module_names("w") == ("w", "w")


# Scales of layers that are stacked later


def siblings(module: Module) -> dict[str, set[str]]:
    """Quantized weights, by the short names of those that share their scale."""
    return {s: {i.split(".")[-2] for i in inputs} for s, inputs in made(module).items()}


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_layers_that_read_one_value_share_their_scale(format):
    """In the draft, keys and values also cover the context: queries have their own scale."""
    module = pair(DENSE)
    quantize(module, format=format)
    found = siblings(module)
    for name, expected in {
        "target.layers.0.q_proj": {"q_proj", "k_proj", "v_proj"},
        "target.layers.0.v_proj": {"q_proj", "k_proj", "v_proj"},
        "target.layers.0.gate_proj": {"gate_proj", "up_proj"},
        "target.layers.0.o_proj": {"o_proj"},
        "draft.layers.0.q_proj": {"q_proj"},
        "draft.layers.0.k_proj": {"k_proj", "v_proj"},
        "draft.fc": {"fc"},
    }.items():
        assert found[f"{name}-{format}.weight"] == expected
    scalar = "weight_scale_2" if format == "nvfp4" else "weight_scale"
    scales = {
        s: module.weights.read(f"target.layers.0.{s}_proj-{format}.weight")[scalar].tobytes()
        for s in ("q", "k", "v", "gate", "o")
    }
    assert scales["q"] == scales["k"] == scales["v"] != scales["gate"]


@pytest.mark.parametrize("format", ["fp8-channel", "int8", "int4"])
def test_formats_without_a_global_scale_share_nothing(format):
    module = pair(DENSE)
    quantize(module, format=format, group=4 if format == "int4" else 0)
    assert all(len(inputs) == 1 for inputs in made(module).values())


def test_sharing_is_transitive_and_ignores_what_stays():
    """a and b read x, b and c read y: one scale. d reads x as well, but is left alone."""
    module = Module("m", symbols={"t": SymbolRange(0, 8)})
    rng = np.random.default_rng(0)
    for name in "abcd":
        module.weights.add(name, dense(rng.standard_normal((16, 16)), DType.BF16))
    b = Builder(module, "main")
    x, y = (b.input(n, DType.F32, (sym("t"), 16), Role.ACTIVATION) for n in "xy")
    for i, (value, name) in enumerate([(x, "a"), (x, "b"), (x, "d"), (y, "b"), (y, "c")]):
        b.output(b.op("linear", value, weights=(name,)), f"y{i}", Role.ACTIVATION)
    quantize(module, exclude="d")
    assert made(module) == {
        "a-nvfp4": ("a", "b", "c"),
        "b-nvfp4": ("b", "a", "c"),
        "c-nvfp4": ("c", "a", "b"),
    }


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "fp8-channel", "int8"])
def test_the_fusions_apply_exactly_afterwards(format):
    module = pair(DENSE)
    BindSharedWeights().run(module, PassContext())
    quantize(module, format=format)
    inputs = pair_inputs(module, DENSE)
    before = evaluate(module, inputs)
    for fusion, count in ((FuseQkv(), 2), (FuseGateUp(), 2)):
        ctx = PassContext()
        assert fusion.run(module, ctx)
        assert sum(r.applied for r in ctx.remarks) == count, [str(r) for r in ctx.remarks]
    assert verify(module) == []
    assert_same_bits(list(evaluate(module, inputs).values()), list(before.values()))
    name = f"target.layers.0.q_proj-{format}+k_proj-{format}+v_proj-{format}.weight"
    assert module.weights[name].encoding == FORMATS[format]


# One head


@pytest.mark.parametrize("draft_head", ["unbound", "same"])
@pytest.mark.parametrize(
    "order", list(permutations(["bind", "dedupe", "quantize"])), ids=lambda o: "-".join(o)
)
def test_the_shared_head_stays_one_tensor(order, draft_head):
    module = pair(replace(DENSE, draft_head=draft_head, draft_embedding=draft_head))
    passes = {
        "bind": BindSharedWeights(),
        "dedupe": DedupeWeights(DedupeWeightsOptions(0)),
        "quantize": Quantize(QuantizeOptions("int8", head=True)),
    }
    for name in order:
        passes[name].run(module, PassContext())
        assert verify(module) == []
    if order.index("quantize") < order.index("bind") and draft_head == "same":
        passes["dedupe"].run(module, PassContext())
    Dce().run(module, PassContext())
    heads = {s for s in storage(module) if "lm_head" in s and "int8" in s}
    assert heads == {"target.lm_head-int8.weight"}
    users = module.weight_users()["target.lm_head-int8.weight"]
    assert users == ["target", "draft"]
    tables = {s for s in module.weights if "embed" in s and s == module.weights.resolve(s)}
    assert tables == {"target.embed_tokens.weight"}


# Values


def check_values(module: Module, inputs: Inputs, options: QuantizeOptions) -> bool:
    """The module computes with the rounded weights, and with nothing else.

    The reference is the module as it was, its weights replaced by the values of the quantized
    ones. The interface stays, and a second run changes nothing.
    """
    text, decisions = module_text(module), len(module.decisions)
    interfaces = {name: interface(g) for name, g in module.graphs.items()}
    originals = dict(module.weights.items())
    reads = [[n.weights for n in g.nodes] for g in module.graphs.values()]
    changed = Quantize(options).run(module, PassContext())
    assert verify(module) == []
    assert changed is (module_text(module) != text) is (len(module.decisions) > decisions)
    assert {name: interface(g) for name, g in module.graphs.items()} == interfaces
    after, again = evaluate(module, inputs), module_text(module)
    assert not Quantize(options).run(module, PassContext())
    assert module_text(module) == again

    table = module.weights
    rounded = {
        inputs_of[0]: dense(table.dense(symbol))
        for symbol, inputs_of in made(module).items()
        if symbol not in originals  # random modules have quantized weights of their own
    }
    for symbol, weight in rounded.items():  # not before all are read: some share a scale
        table.rebind(symbol, weight)
    for graph, weights in zip(module.graphs.values(), reads, strict=True):
        for node, names in zip(graph.nodes, weights, strict=True):
            node.weights = names
    assert_same_bits(list(after.values()), list(evaluate(module, inputs).values()))
    for symbol, weight in originals.items():
        table.rebind(symbol, weight)
    return changed


OPTIONS = st.builds(
    QuantizeOptions,
    format=st.sampled_from(list(FORMATS)),
    exclude=st.sampled_from(["", "*up_proj*", "f32*,*q_proj"]),  # cut by `naming`
    head=st.booleans(),
).map(lambda o: replace(o, group=4) if o.format == "int4" else o)


def naming(module: Module, options: QuantizeOptions) -> QuantizeOptions:
    """The options without patterns that name nothing in a module."""
    patterns = [
        p
        for p in options.exclude.split(",")
        if any(fnmatchcase(name, p) for s in module.weights for name in module_names(s))
    ]
    return replace(options, exclude=",".join(patterns))


def test_a_weight_read_in_two_forms_of_which_one_is_stored():
    """Both quantized would be stored, besides what they were made from."""
    module = Module("m")
    symbol = module.weights.add("w.weight", dense(np.ones((4, 16), np.float32)))
    other = module.weights.derive("w.dequantized", "dequantize", (symbol,))
    b = Builder(module, "g")
    x = b.input("x", DType.F32, (2, 16), Role.ACTIVATION)
    b.output(b.op("linear", x, weights=(symbol,)), "y", Role.ACTIVATION)
    b.output(b.op("linear", x, weights=(other,)), "z", Role.ACTIVATION)
    found = quantize(module, format="int8")
    assert found == {
        "w.weight": "is also read by @w.dequantized",
        "w.dequantized": "is also read by @w.weight",
    }


def test_a_weight_whose_values_a_layer_reads_while_a_table_is_packed():
    module = Module("m")
    symbol = module.weights.add("w.weight", packed(np.random.default_rng(0), 3, 16).weight)
    other = module.weights.derive("w.dequantized", "dequantize", (symbol,))
    b = Builder(module, "g")
    ids = b.input("ids", DType.I64, (2,), Role.TOKEN_IDS)
    x = b.op("embedding", ids, weights=(symbol,))
    b.output(b.op("linear", x, weights=(other,)), "y", Role.ACTIVATION)
    assert quantize(module, format="int8") == {"w.dequantized": "is also read by @w.weight"}


@given(module=modules(), options=OPTIONS)
def test_random_modules(module, options):
    """What holds for all passes; how far values may move is for the tests of values."""
    check_pass(Quantize(naming(module, options)), module, tolerance=1e30)


@given(module=modules(), options=OPTIONS, seed=st.integers(0, 9))
def test_values_of_random_modules(module, options, seed):
    check_values(module, random_inputs(module, seed), naming(module, options))


@FEWER
@given(drawn=pair_options(), options=OPTIONS, wide=st.booleans())
def test_random_pairs(drawn, options, wide):
    drawn = replace(drawn, hidden=16 if wide else 8)
    module = pair(drawn)
    BindSharedWeights().run(module, PassContext())
    check_values(module, pair_inputs(module, drawn), naming(module, options))


@pytest.mark.parametrize("format", FORMATS)
def test_results_are_within_the_tolerance(format):
    """Of a pair of several layers, relative to the largest result."""
    options = replace(DENSE, layers=2)
    module = pair(options)
    BindSharedWeights().run(module, PassContext())
    inputs = pair_inputs(module, options)
    before = evaluate(module, inputs)
    made = Quantize(QuantizeOptions(format, head=True, group=16 if format == "int4" else 0))
    assert made.run(module, PassContext())
    errors = [
        float(np.max(np.abs(after - before[name])) / np.max(np.abs(before[name])))
        for name, after in evaluate(module, inputs).items()
        if not name.endswith(("proposals", "draft_logits", "confidence"))  # of another choice
    ]
    assert made.tolerance / 100 < max(errors) < made.tolerance


def test_runs_for_several_formats_combine():
    module = pair(DENSE)
    quantize(module, format="fp8", include="*.?_proj")
    found = quantize(module, format="int8")
    assert found["target.layers.0.up_proj.weight"].startswith("-> ")
    assert "target.layers.0.q_proj.weight" not in found
    encodings: dict[str, Encoding] = {
        n.weights[0].split(".")[-2]: module.weights[n.weights[0]].encoding
        for n in module.graphs["target"].nodes
        if n.op.name == "linear"
    }
    assert encodings["q_proj-fp8"] == FP8()
    assert encodings["down_proj-int8"] == Int8()
    assert encodings["lm_head"] == Dense(DType.BF16)


def test_stacks_are_quantized_as_one_weight():
    """After a fusion the stack is what the layer reads; its parts are read by nobody."""
    module = pair(DENSE, draft=False)
    FuseGateUp().run(module, PassContext())
    found = quantize(module, format="nvfp4")
    assert found["target.layers.0.gate_proj+up_proj.weight"] == (
        "-> @target.layers.0.gate_proj+up_proj-nvfp4.weight"
    )
    Dce().run(module, PassContext())
    assert not any("up_proj-nvfp4+" in s for s in storage(module))


def test_a_part_of_a_stack_that_is_also_read_alone():
    """Both readers are linear layers: both get quantized weights, and no dense bytes are left."""
    module = layers("target.a.weight")
    module.weights.derive("target.aa.weight", "concat_rows", ("target.a.weight",) * 2)
    b = Builder(module, "other")
    x = b.input("x", DType.F32, (sym("t"), 16), Role.ACTIVATION)
    y = b.op("concat", x, x, attrs=AxisAttributes(1))
    b.output(y, "z", Role.ACTIVATION)
    b.output(b.op("linear", x, weights=("target.aa.weight",)), "y", Role.ACTIVATION)
    quantize(module, format="int8")
    assert [n.weights for g in module.graphs.values() for n in g.nodes if n.weights] == [
        ("target.a-int8.weight",),
        ("target.aa-int8.weight",),
    ]
