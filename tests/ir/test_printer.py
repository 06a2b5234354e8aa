from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import (
    Builder,
    Dense,
    Derived,
    DType,
    Location,
    Module,
    Role,
    SymbolRange,
    Unbound,
    Weight,
    print_module,
    sym,
)
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.shape import SplitAttributes
from edgecc.ir.printer import print_attributes, print_node, value_names
from helpers.modules import module_text, modules
from helpers.pairs import FEWER, PairOptions, pair, pair_options
from helpers.weights import ForbiddenReader, MemoryReader, dense, packed, store

ROOT = Path(__file__).parents[2]


def small() -> Module:
    module = Module("small", symbols={"t": SymbolRange(1, 8)})
    module.metadata["draft"] = {"ids": [1, 3], "a": None}
    module.weights.add("w", dense(np.array([[1.0, -2.0]])))
    store(module, "target", "q", packed(np.random.default_rng(0), 4, 4).weight)
    module.weights.derive("qq", "concat_rows", ("q", "q"))
    module.weights.add("k", dense(np.zeros((1, 1))))
    module.weights.alias("k", "q")
    module.weights.add("head", Weight((8, 4), Dense(DType.BF16), Unbound("lm_head")))
    b = Builder(module, "main").at("config.json: eps")
    x = b.input("x", DType.F32, (sym("t"), 2), Role.HIDDEN)
    cache = b.input("cache", DType.F32, (sym("t") * 2 + 1, 1), Role.KV_CACHE)
    y = b.op("linear", x, weights=("w",), name="y")
    pieces = b.node("split", (x,), attrs=SplitAttributes(1, (1, 1)), names=("left", "y")).results
    b.location = Location("", ("some-pass",))
    total = b.op("add", b.op("mul", *pieces), y, name="y")
    b.output(total, "sum", Role.ACTIVATION)
    b.output(cache, "cache", Role.KV_CACHE, alias="cache")
    return module


def test_golden_text():
    """Any change here is a change of the text format: it needs a new version or a good reason."""
    assert print_module(small()) == dedent(
        """\
        edgecc.module v1 "small"

        symbol t: 1..8
        metadata draft = {"a": null, "ids": [1, 3]}

        weight @w : dense<f32> [1, 2] = inline {weight: 0x0000803f000000c0}
        weight @q : nvfp4<block=4> [4, 4] = stored "target" \
{weight: "model.safetensors#q.weight", weight_scale: "model.safetensors#q.weight_scale", \
weight_scale_2: "model.safetensors#q.weight_scale_2"}
        weight @qq : nvfp4<block=4> [8, 4] = derived concat_rows(@q, @q)
        weight @k : nvfp4<block=4> [4, 4] = alias @q
        weight @head : dense<bf16> [8, 4] = unbound "lm_head"

        graph @main(
          %x: f32[t, 2] hidden,
          %cache: f32[2*t + 1, 1] kv_cache
        ) {
          %y = linear(%x, @w) : f32[t, 1]
          %left, %y_1 = split(%x) {axis = 1, sizes = [1, 1]} : f32[t, 1], f32[t, 1]
          %mul = mul(%left, %y_1) : f32[t, 1]
          %y_2 = add(%mul, %y) : f32[t, 1]
          return
            sum = %y_2 activation,
            cache = %cache kv_cache alias %cache
        }
        """
    )


def test_locations_are_printed_on_request():
    with_locations = print_module(small(), locations=True)
    assert '%y = linear(%x, @w) : f32[t, 1]  loc("config.json: eps")\n' in with_locations
    assert '%y_2 = add(%mul, %y) : f32[t, 1]  loc(" <- some-pass")\n' in with_locations
    assert re.sub(r"  loc\(.*\)", "", with_locations) == print_module(small())


def test_printing_reads_no_weights():
    module = pair(PairOptions(stored=True, draft_head="own"))
    expected = print_module(module)
    module.weights.derive("rope", "rope_table", (), part="cos", length=1 << 40, theta=2.0, dim=2)
    for checkpoint, reader in module.weights.readers.items():
        assert isinstance(reader, MemoryReader)
        assert reader.reads == []
        module.weights.readers[checkpoint] = ForbiddenReader()
    text = print_module(module, locations=True)
    assert re.sub(r"  loc\(.*\)|weight @rope .*\n", "", text) == expected


@given(modules())
def test_printing_twice_gives_the_same_text(module):
    assert print_module(module) == print_module(module)


@FEWER
@given(pair_options())
def test_equal_modules_print_the_same_text(options):
    assert print_module(pair(options), locations=True) == print_module(
        pair(options), locations=True
    )


@FEWER
@given(pair_options())
def test_different_modules_print_different_text(options):
    other = pair(options)
    (result,) = other.graphs["target"].nodes[-1].results
    result.type = type(result.type)(DType.F64, result.type.shape)
    assert print_module(other) != print_module(pair(options))


def test_text_does_not_depend_on_the_process():
    """Hash seeds change the order of sets: none of it may reach the text."""
    program = (
        "import sys; sys.path[:0] = ['compiler', 'tests']\n"
        "from helpers.pairs import FEWER, pair, PairOptions\n"
        "from edgecc.ir import print_module\n"
        "sys.stdout.write(print_module(pair(PairOptions(stored=True)), locations=True))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert texts == {print_module(pair(PairOptions(stored=True)), locations=True)}


@given(
    st.lists(st.sampled_from(["x", "x_1", "x_1_1", "x_2", "", "é", "a b", "_", "v"]), max_size=9)
)
def test_value_names_are_unique_numbered_hints(hints):
    b = Builder(Module("m"), "main")
    x = b.input("x", DType.F32, (2,), Role.ACTIVATION)
    for hint in hints:
        b.node("silu", (x,), names=(hint,))
    found = value_names(b.graph)
    assert next(iter(found)) is x
    assert found[x] == "x"
    assert len(set(found.values())) == len(found) == len(hints) + 1
    assert all(re.fullmatch(r"[A-Za-z0-9_.]+", name) for name in found.values())
    for value, name in found.items():
        hint = re.sub(r"(_\d+)+$", "", re.sub(r"[^A-Za-z0-9_.]", "_", value.name)) or "v"
        assert re.fullmatch(rf"{hint}(_\d+)?", name)


def test_aliases_print_the_name_of_the_input():
    b = Builder(Module("m"), "main")
    x = b.input("my cache", DType.F32, (2,), Role.KV_CACHE)
    b.output(b.op("silu", x), "out", Role.KV_CACHE, alias="my cache")
    text = print_module(b.module)
    assert '%"my cache": f32[2] kv_cache' in text
    assert 'out = %silu kv_cache alias %"my cache"' in text


@pytest.mark.parametrize(
    ("attrs", "text"),
    [
        (RmsNormAttributes(1e-6), " {eps = 1e-06}"),
        (RmsNormAttributes(0.1, groups=8), " {eps = 0.1, groups = 8}"),
        (SplitAttributes(0, (3,)), " {axis = 0, sizes = [3]}"),
        (AttentionAttributes(4, 2, 0.125), " {heads = 4, kv_heads = 2, scale = 0.125}"),
        (
            AttentionAttributes(4, 2, 2**-0.5, causal=False),
            " {heads = 4, kv_heads = 2, scale = 0.7071067811865476, causal = false}",
        ),
    ],
)
def test_attributes_without_defaults(attrs, text):
    assert print_attributes(attrs) == text


@given(st.floats(1e-300, 1e300))
def test_floats_read_back_exactly(value):
    found = re.fullmatch(r" \{eps = (.*)\}", print_attributes(RmsNormAttributes(value)))
    assert found is not None
    assert float(found[1]) == value


def test_a_node_alone_prints_its_hints():
    node = small().graphs["main"].nodes[-1]
    assert print_node(node) == "%y = add(%mul, %y) : f32[t, 1]"
    renamed = print_node(node, {node.result: "z"}, location=True)
    assert renamed == '%z = add(%mul, %y) : f32[t, 1]  loc(" <- some-pass")'


def test_strings_are_quoted():
    module = Module('a "quoted"\nname')
    module.metadata["k"] = 'x"y'
    lines = print_module(module).split("\n")
    assert lines[0] == 'edgecc.module v1 "a \\"quoted\\"\\nname"'
    assert lines[2] == 'metadata k = "x\\"y"'


def test_an_empty_module():
    assert print_module(Module("m")) == 'edgecc.module v1 "m"\n\n\n'


def test_hashes_are_the_only_text_that_depends_on_what_was_read():
    module = pair(PairOptions(stored=True))
    before = print_module(module)
    module.weights.digest("target.lm_head.weight")
    assert module_text(module) == before


def test_broken_modules_can_be_printed():
    """Someone has to look at them: dangling weights, with and without known hashes."""
    module = Module("m")
    module.weights.add("w", dense(np.ones(2)))
    module.weights.add("d", Weight((2,), Dense(DType.F32), Derived("dequantize", ("gone",))))
    before = print_module(module)
    assert "derived dequantize(@gone)" in before
    module.weights.digest("w")
    assert module_text(module) == before
