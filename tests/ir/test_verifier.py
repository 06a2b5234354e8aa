from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from edgecc.errors import InternalError, VerifyError
from edgecc.ir import (
    Alias,
    Builder,
    Dense,
    Derived,
    DType,
    Inline,
    Input,
    Int8Block,
    Module,
    Node,
    Output,
    Role,
    SymbolRange,
    TensorType,
    Value,
    Weight,
    sym,
    verifier,
    verify,
    verify_or_raise,
)
from edgecc.ir.ops import Attributes, get_op
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.verifier import PROPERTIES, check_property
from helpers.modules import modules
from helpers.pairs import DRAFT_EMBEDDING, DRAFT_HEAD, FEWER, PairOptions, pair, pair_options
from helpers.weights import ForbiddenReader, dense, inline, packed, store

F32 = Dense(DType.F32)


def good() -> Module:
    """`main` computes a norm and a linear layer and calls `f`; weights of every kind of source."""
    module = Module("good", symbols={"t": SymbolRange(1, 8), "h": SymbolRange(1, 8)})
    table, rng = module.weights, np.random.default_rng(0)
    table.add("norm", dense(np.ones(4)))
    table.add("w", packed(rng, 3, 4).weight)
    store(module, "target", "stored", packed(rng, 2, 4).weight)
    table.add("other", dense(np.ones((1, 1))))
    table.alias("other", "stored")
    table.derive("both", "concat_rows", ("w", "other"))
    f = Builder(module, "f")
    y = f.input("y", DType.F32, (sym("h"), 4), Role.ACTIVATION)
    f.output(f.op("silu", y), "z", Role.ACTIVATION)
    main = Builder(module, "main").at("model.safetensors: q_proj")
    x = main.input("x", DType.F32, (sym("t"), 4), Role.HIDDEN)
    cache = main.input("cache", DType.F32, (sym("t"), 4), Role.KV_CACHE)
    normed = main.op("rms_norm", x, weights=("norm",), attrs=RmsNormAttributes(1e-6), name="n")
    total = main.op("add", normed, cache, name="total")
    called = main.op("call", total, attrs=CallAttributes("f"), name="called")
    main.output(main.op("linear", called, weights=("both",), name="y"), "y", Role.LOGITS)
    main.output(total, "cache", Role.KV_CACHE, alias="cache")
    return module


def node(module: Module, op: str) -> Node:
    return next(n for g in module.graphs.values() for n in g.nodes if n.op.name == op)


BROKEN: dict[str, tuple[str, str, Callable[[Module], object]]] = {}
"""Test name to diagnostic id, part of its message, and the function that breaks a good module."""


def breaks(id_: str, message: str):
    def register(function: Callable[[Module], object]):
        BROKEN[function.__name__] = (id_, message, function)
        return function

    return register


# Structure


@breaks("ir/input-producer", "input %n has a producer")
def input_made_by_a_node(m: Module):
    graph = m.graphs["main"]
    graph.inputs.append(Input(node(m, "rms_norm").result, Role.ACTIVATION))


@breaks("ir/use-before-def", "%n is not defined before its use")
def nodes_out_of_order(m: Module):
    graph = m.graphs["main"]
    graph.nodes[0], graph.nodes[1] = graph.nodes[1], graph.nodes[0]


@breaks("ir/use-before-def", "%y is not defined before its use")
def value_of_another_graph(m: Module):
    node(m, "linear")._set_operands((m.graphs["f"].inputs[0].value,))


@breaks("ir/use-before-def", "%total is not defined before its use")
def removed_node(m: Module):
    m.graphs["main"].nodes.remove(node(m, "add"))


@breaks("ir/lost-use", "%n does not know this use")
def use_not_recorded(m: Module):
    node(m, "rms_norm").result.uses.clear()


@breaks("ir/double-definition", "%n is defined twice")
def node_listed_twice(m: Module):
    graph = m.graphs["main"]
    graph.nodes.insert(1, graph.nodes[0])


@breaks("ir/double-definition", "%stolen is defined twice")
def result_with_another_producer(m: Module):
    add = node(m, "add")
    value = Value(add.result.type, "stolen", node(m, "rms_norm"), 0)
    add.results = (value,)


@breaks("ir/stale-use", "%x lists a use that is not there")
def use_of_a_node_that_is_gone(m: Module):
    x = m.graphs["main"].inputs[0].value
    gone = Node(get_op("silu"), (x,), (), Attributes(), (x.type,), (), node(m, "add").location)
    assert (gone, 0) in x.uses


@breaks("ir/stale-use", "%x lists a use that is not there")
def use_at_another_position(m: Module):
    m.graphs["main"].inputs[0].value.uses[node(m, "add"), 1] = None


@breaks("ir/stale-use", "%x lists a use that is not there")
def use_beyond_the_operands(m: Module):
    m.graphs["main"].inputs[0].value.uses[node(m, "add"), 7] = None


@breaks("ir/undefined-output", "output z is not defined")
def output_of_another_graph(m: Module):
    value = m.graphs["f"].outputs[0].value
    m.graphs["main"].outputs.append(Output(value, "z", Role.ACTIVATION))


@breaks("ir/undefined-output", "output y is not defined")
def output_whose_node_is_gone(m: Module):
    graph = m.graphs["main"]
    last = node(m, "linear")
    graph.nodes.remove(last)
    last._set_operands(())


# Types


@breaks("ir/type-rule", "add: operands must have one type")
def operands_that_do_not_fit(m: Module):
    module_input = m.graphs["main"].inputs[1].value
    module_input.type = TensorType(DType.F32, (sym("t"), 5))
    m.graphs["main"].outputs.pop()


@breaks("ir/type-rule", "add: expects operands (a, b), got 1")
def too_few_operands(m: Module):
    add = node(m, "add")
    add._set_operands(add.operands[:1])


@breaks("ir/type-rule", "linear: expects weights (weight, bias?), got 0")
def too_few_weights(m: Module):
    node(m, "linear").weights = ()


@breaks("ir/type-rule", "rms_norm: expects attributes RmsNormAttributes, got Attributes")
def attributes_of_another_op(m: Module):
    node(m, "rms_norm").attrs = Attributes()


@breaks("ir/type-rule", "rms_norm: eps must be positive, got -1")
def attributes_out_of_range(m: Module):
    node(m, "rms_norm").attrs = RmsNormAttributes(-1)


@breaks("ir/type-rule", "call: no graph @g")
def call_of_a_graph_that_is_not_there(m: Module):
    node(m, "call").attrs = CallAttributes("g")


@breaks("ir/recorded-type", "results are f32[t, 4], recorded as f32[t, 9]")
def recorded_type(m: Module):
    node(m, "call").result.type = TensorType(DType.F32, (sym("t"), 9))
    node(m, "linear").weights = ("nine",)
    m.weights.add("nine", dense(np.ones((5, 9))))


@breaks("ir/recorded-type", "results are f32[t, 5], recorded as f32[t, 5], f32[t, 5]")
def number_of_results(m: Module):
    last = node(m, "linear")
    last.results = (*last.results, Value(last.results[0].type, "more", last, 1))


# Weights


@breaks("ir/unknown-weight", "no weight @gone")
def weight_of_a_node(m: Module):
    node(m, "linear").weights = ("gone",)


@breaks("ir/unknown-weight", "derived from unknown weights ['w']")
def weight_of_a_recipe(m: Module):
    m.weights.remove("w")


@breaks("ir/bad-alias", "alias @other leads to other -> gone")
def alias_of_nothing(m: Module):
    m.weights.rebind("other", replace(m.weights["other"], source=Alias("gone")))


@breaks("ir/bad-alias", "alias @other leads to other -> other")
def alias_of_itself(m: Module):
    m.weights.rebind("other", replace(m.weights["other"], source=Alias("other")))


@breaks("ir/alias-type", "alias is dense<f32> (2, 4), its target nvfp4<block=4> (2, 4)")
def alias_of_another_encoding(m: Module):
    m.weights.rebind("other", Weight((2, 4), F32, Alias("stored")))


@breaks("ir/alias-type", "alias is nvfp4<block=4> (3, 4), its target nvfp4<block=4> (2, 4)")
def alias_of_another_shape(m: Module):
    m.weights.rebind("other", replace(m.weights["other"], shape=(3, 4)))


@breaks("ir/encoding-shape", "int8_block needs a [N, K] weight with K a multiple of 16")
def shape_the_encoding_cannot_hold(m: Module):
    m.weights.add("odd", Weight((2, 9), Int8Block(), Inline(())))


@breaks("ir/weight-parts", "nvfp4<block=4> needs weight, weight_scale, weight_scale_2, found weig")
def stored_weight_without_scales(m: Module):
    stored = m.weights["stored"]
    source = replace(stored.source, parts=stored.source.parts[:1])
    m.weights.rebind("stored", replace(stored, source=source))


@breaks("ir/weight-parts", "dense<f32> needs weight, found weight, bias")
def inline_weight_with_more(m: Module):
    m.weights.add("more", Weight((1,), F32, Inline((("weight", b"1234"), ("bias", b"")))))


@breaks("ir/weight-parts", "weight has 8 bytes, expected 12")
def inline_weight_of_another_size(m: Module):
    m.weights.add("short", inline((3,), F32, {"weight": np.zeros(2, np.float32)}))


@breaks("ir/unknown-recipe", "unknown recipe mix")
def unknown_recipe(m: Module):
    m.weights.add("mixed", Weight((1,), F32, Derived("mix", ("w",))))


@breaks("ir/recipe", "int8_codes(@norm): int8_codes needs nvfp4, found dense<f32>")
def recipe_that_does_not_take_its_inputs(m: Module):
    m.weights.add("codes", Weight((4,), Int8Block(), Derived("int8_codes", ("norm",))))


@breaks("ir/recipe", "dequantize(): dequantize takes 1 inputs, got 0")
def recipe_without_inputs(m: Module):
    m.weights.add("wide", Weight((4,), F32, Derived("dequantize", ())))


@breaks("ir/recipe", "parameters of a rope table: 'part'")
def recipe_without_parameters(m: Module):
    m.weights.add("cos", Weight((4, 2), F32, Derived("rope_table", ())))


@breaks("ir/recipe-type", "concat_rows(@w, @other) gives nvfp4<block=4> (5, 4)")
def derived_weight_of_another_shape(m: Module):
    m.weights.rebind("both", replace(m.weights["both"], shape=(6, 4)))


@breaks("ir/recipe-type", "dequantize(@w) gives dense<f32> (3, 4)")
def derived_weight_of_another_encoding(m: Module):
    m.weights.add("wide", Weight((3, 4), Dense(DType.F16), Derived("dequantize", ("w",))))


@breaks("ir/weight-cycle", "dequantize(@b) is made from @a itself")
def weights_made_from_each_other(m: Module):
    m.weights.add("a", Weight((2, 4), F32, Derived("dequantize", ("b",))))
    m.weights.add("b", Weight((2, 4), F32, Derived("dequantize", ("a",))))


@breaks("ir/weight-cycle", "dequantize(@a) is made from @a itself")
def weight_made_from_itself(m: Module):
    m.weights.add("a", Weight((2, 4), F32, Derived("dequantize", ("a",))))


# Calls and interface


@breaks("ir/recursive-call", "graphs call each other: ")
def graphs_that_call_each_other(m: Module):
    f = Builder(m, m.graphs["f"])
    cache = f.input("c", DType.F32, (sym("h"), 4), Role.ACTIVATION)
    f.op("call", cache, cache, attrs=CallAttributes("f"))


@breaks("ir/duplicate-name", "two inputs are called x")
def inputs_of_one_name(m: Module):
    m.graphs["main"].inputs[1].value.name = "x"
    m.graphs["main"].outputs[1].alias = None


@breaks("ir/duplicate-name", "two outputs are called y")
def outputs_of_one_name(m: Module):
    m.graphs["main"].outputs[1].name = "y"


@breaks("ir/output-alias", "output cache: f32[t, 4] cannot overwrite input z: None")
def alias_of_no_input(m: Module):
    m.graphs["main"].outputs[1].alias = "z"


@breaks("ir/output-alias", "output y: f32[t, 5] cannot overwrite input x: f32[t, 4]")
def alias_of_another_type(m: Module):
    m.graphs["main"].outputs[0].alias = "x"


@breaks("ir/output-alias", "two outputs overwrite input cache")
def input_overwritten_twice(m: Module):
    graph = m.graphs["main"]
    graph.outputs.append(Output(graph.outputs[1].value, "again", Role.KV_CACHE, "cache"))


@breaks("ir/unknown-symbol", "symbol h of %y has no range")
def symbol_without_range(m: Module):
    del m.symbols["h"]


def test_the_good_module_is_good():
    module = good()
    module.weights.readers["target"] = ForbiddenReader()
    assert verify(module) == []
    verify_or_raise(module)


@pytest.mark.parametrize("name", BROKEN)
def test_finds(name):
    id_, message, damage = BROKEN[name]
    module = good()
    damage(module)
    found = [d for d in verify(module) if d.id == id_ and message in d.message]
    assert found, [d.render() for d in verify(module)]
    if id_ != "ir/recursive-call":
        assert found[0].where


def test_every_diagnostic_has_a_test():
    source = inspect.getsource(verifier)
    known = set(re.findall(r'"((?:ir|bind)/[a-z-]+)"', source))
    raised_elsewhere = {"ir/bad-alias"}
    properties = {
        *("bind/unbound-weight", "ir/markov-loop", "ir/state-without-log"),
        "ir/unknown-property",
    }
    assert known | raised_elsewhere == {id_ for id_, *_ in BROKEN.values()} | properties


def test_messages_say_where():
    module = good()
    attributes_out_of_range(module)
    (found,) = verify(module)
    assert found.where == "graph @main, %n = rms_norm(%x) (model.safetensors: q_proj)"


def test_all_findings_come_at_once():
    module = good()
    attributes_out_of_range(module)
    too_few_weights(module)
    symbol_without_range(module)
    outputs_of_one_name(module)
    assert [d.id for d in verify(module)] == [
        "ir/unknown-symbol",
        "ir/type-rule",
        "ir/type-rule",
        "ir/duplicate-name",
    ]
    with pytest.raises(VerifyError) as caught:
        verify_or_raise(module, "after pass dce")
    assert len(caught.value.diagnostics) == 4
    assert all(d.notes == ("after pass dce",) for d in caught.value.diagnostics)
    assert caught.value.exit_code == 3


def test_broken_weights_are_reported_before_anything_that_reads_them():
    module = good()
    attributes_out_of_range(module)
    alias_of_nothing(module)
    assert {d.id for d in verify(module)} == {"ir/bad-alias", "ir/recipe"}


@given(modules())
def test_random_modules_verify(module):
    assert verify(module) == []


@FEWER
@given(pair_options())
def test_pairs_verify_and_nothing_is_read(options):
    module = pair(options)
    for checkpoint in module.weights.readers:
        module.weights.readers[checkpoint] = ForbiddenReader()
    assert verify(module) == []


def test_an_empty_module_is_fine():
    assert verify(Module("empty")) == []
    assert verify(Module("m", graphs={"g": Builder(Module("x"), "g").graph})) == []


# Properties


def test_heads_bound():
    module = pair()
    assert verify(module) == []
    found = check_property(module, "heads-bound")
    assert [d.where for d in found] == [f"weight @{DRAFT_EMBEDDING}", f"weight @{DRAFT_HEAD}"]
    assert all(d.id == "bind/unbound-weight" for d in found)
    assert found[1].notes == ("looked for draft/model.safetensors: lm_head.weight",)
    assert "run bind-shared-weights" in found[0].help
    bound = pair(PairOptions(draft_head="own", draft_embedding="own"))
    assert check_property(bound, "heads-bound") == []


def test_markov_unrolled():
    found = check_property(pair(), "markov-unrolled")
    assert [d.id for d in found] == ["ir/markov-loop"]
    assert "graph @draft, %proposals" in found[0].where
    assert found[0].help == "run unroll-markov"
    assert check_property(pair(draft=False), "markov-unrolled") == []


def test_unknown_property():
    assert set(PROPERTIES) >= {"heads-bound", "markov-unrolled"}
    with pytest.raises(InternalError, match="unknown property heads-bond") as caught:
        check_property(pair(), "heads-bond")
    assert caught.value.id == "ir/unknown-property"
