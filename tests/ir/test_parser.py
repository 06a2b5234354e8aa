from __future__ import annotations

import numpy as np
import pytest

from edgecc.errors import InputError
from edgecc.ir import (
    NVFP4,
    Alias,
    Builder,
    Dense,
    Derived,
    DType,
    Inline,
    Int4,
    Int8Block,
    Location,
    Module,
    Stored,
    StoredPart,
    SymbolRange,
    Unbound,
    Weight,
    parse_module,
    print_module,
    read_module,
    sym,
    verify,
)
from edgecc.ir.compare import diff, equal, fingerprint
from edgecc.ir.encodings import parse_encoding
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.shape import AxisAttributes, SplitAttributes
from edgecc.roles import Role
from helpers.weights import SMALL_ENCODINGS


def everything() -> Module:
    """A module with every kind of statement the text form has."""
    module = Module('odd "name" ü')
    module.symbols.update(b=SymbolRange(1, 4), t=SymbolRange(0, 64))
    module.metadata.update(target={"ids": [1, 2], "name": "x // y", "none": None}, n=3)
    module.checkpoints["target"] = "some folder/模型"
    module.decisions.append('chose "a" because <- b')
    table = module.weights
    w = np.arange(32, dtype=np.float32).reshape(4, 8)
    table.add("w", Weight((4, 8), Dense(DType.F32), Inline((("weight", w.tobytes()),))))
    parts = (StoredPart("weight", "model.safetensors", "a.weight"),)
    table.add("norm", Weight((8,), Dense(DType.BF16), Stored("target", parts)))
    table.add("w2", Weight((4, 8), Dense(DType.F32), Alias("w")))
    table.add("odd name%", Weight((4, 8), Dense(DType.F32), Derived("concat_rows", ("w",))))
    table.add("head", Weight((4, 16), NVFP4(16, input_scale=True), Unbound("lm_head", ("x", "y"))))
    table.add("codes", Weight((4, 16), Int8Block(16), Unbound("lm_head")))
    params = (("dim", 8), ("length", 3), ("part", "cos"), ("theta", 1e6))
    table.add("rope", Weight((3, 4), Dense(DType.F32), Derived("rope_table", (), params)))
    b = Builder(module, "main").at("target: layers.0")
    x = b.input("x", DType.F32, (sym("b"), sym("t") + 2, 8), Role.ACTIVATION)
    y = b.op("rms_norm", x, weights=("norm",), attrs=RmsNormAttributes(1e-6), name="x")
    left, right = b.node(
        "split", (y,), attrs=SplitAttributes(2, (4, 4)), names=("half", "half")
    ).results
    joined = b.op("concat", left, right, attrs=AxisAttributes(2))
    b.location = Location("target: layers.1", ("fuse-qkv", "dce"))
    z = b.op("linear", joined, weights=("w",), name="y")
    b.output(z, "y", Role.LOGITS)
    b.output(y, "x", Role.ACTIVATION, alias="x")
    return module


@pytest.mark.parametrize("locations", [False, True])
def test_round_trip(locations):
    text = print_module(everything(), locations=locations)
    parsed = parse_module(text)
    assert print_module(parsed, locations=locations) == text
    assert verify(parsed) == []


def test_parsed_module_has_the_same_parts():
    module, parsed = everything(), parse_module(print_module(everything(), locations=True))
    assert dict(parsed.weights) == dict(module.weights)
    assert parsed.symbols == module.symbols
    assert parsed.metadata == module.metadata
    assert parsed.checkpoints == module.checkpoints
    assert parsed.decisions == module.decisions
    pairs = zip(parsed.graphs["main"].nodes, module.graphs["main"].nodes, strict=True)
    for found, expected in pairs:
        assert found.op is expected.op
        assert found.attrs == expected.attrs
        assert found.weights == expected.weights
        assert found.location == expected.location
        assert [r.type for r in found.results] == [r.type for r in expected.results]
    outputs = parsed.graphs["main"].outputs
    assert [(o.name, o.role, o.alias) for o in outputs] == [
        ("y", Role.LOGITS, None),
        ("x", Role.ACTIVATION, "x"),
    ]


def test_comments_and_spacing_are_free():
    text = print_module(everything())
    loose = "// first\n" + text.replace(" = ", "  =\t").replace("\n", " // note\n")
    assert "metadata" in loose
    # Metadata is JSON to the end of its line, so no comment can follow it.
    lines = [
        line.removesuffix(" // note") if line.lstrip().startswith("metadata") else line
        for line in loose.split("\n")
    ]
    assert print_module(parse_module("\n".join(lines))) == text


def test_known_hashes_travel():
    module = everything()
    digest = module.weights.digest("w")
    text = print_module(module)
    assert f'hash "{digest}"' in text
    parsed = parse_module(text)
    assert parsed.weights.known_digest("w") == digest
    assert print_module(parsed) == text


GOOD = print_module(everything())


@pytest.mark.parametrize(
    ("old", "new", "message", "line_has"),
    [
        ("edgecc.module v1", "edgecc.module v9", "this edgecc reads v1", "edgecc.module"),
        ("symbol b: 1..4", "symbol b: 4..1", "empty or negative range", "symbol b"),
        ("symbol b: 1..4", "symbol b 1..4", "expected ':'", "symbol b"),
        ("metadata n = 3", "metadata n = {3", "not JSON", "metadata n"),
        ("dense<bf16> [8]", "dense<bf17> [8]", "unknown element type 'bf17'", "@norm"),
        ("nvfp4<block=16, input_scale>", "nvfp5<block=16>", "unknown encoding", "@head"),
        ("weight @w2", "weight @w", "defined twice", "weight @w"),
        ("alias @w\n", "borrowed @w\n", "expected 'stored' or 'derived'", "@w2"),
        ("f32[b, t + 2, 8] activation", "f99[b, t + 2, 8] activation", "unknown type f99", "%x"),
        ("f32[b, t + 2, 8] activation", "f32[b, t + 2, 8] actor", "unknown role actor", "%x"),
        ("rms_norm(", "rms_nrm(", "unknown op 'rms_nrm'", "rms_nrm"),
        ("{eps = 1e-06}", "{epz = 1e-06}", "unknown attribute epz", "rms_norm"),
        ("{eps = 1e-06}", "", "attribute eps is missing", "rms_norm"),
        ("{eps = 1e-06}", "{eps = true}", "eps must be of type float", "rms_norm"),
        ("{axis = 2, sizes = [4, 4]}", "{axis = 2, axis = 2}", "is given twice", "split"),
        ("split(%x_1)", "split(%x_9)", "%x_9 is not defined before its use", "split"),
        ("%half, %half_1 = split", "%half = split", "1 results, 2 types", "split"),
        ("%half, %half_1 = split", "%x, %half_1 = split", "%x is defined twice", "split"),
        ("    y = %y logits", "    y = %nowhere logits", "%nowhere is not defined", "logits"),
    ],
)
def test_errors_name_the_place(old, new, message, line_has):
    assert old in GOOD
    bad = GOOD.replace(old, new, 1)
    with pytest.raises(InputError) as caught:
        parse_module(bad, file="pair.eir")
    first = caught.value.diagnostics[0]
    assert message in first.message
    file, line, column = first.where.split(":")
    text = bad.split("\n")[int(line) - 1]
    assert file == "pair.eir"
    assert line_has in text
    excerpt, caret = first.notes
    assert excerpt in text
    assert text[int(column) - 1 :].startswith(excerpt[caret.index("^") :][:1])


def test_several_errors_and_no_follow_ups():
    bad = GOOD.replace("rms_norm(", "rms_nrm(").replace("symbol b: 1..4", "symbol b: 9..1")
    with pytest.raises(InputError) as caught:
        parse_module(bad)
    assert len(caught.value.diagnostics) == 2  # not one for every use of what is missing


def test_reading_files(tmp_path):
    path = tmp_path / "模块.eir"
    path.write_text(GOOD, encoding="utf-8")
    assert print_module(read_module(path)) == GOOD
    with pytest.raises(InputError, match="cannot read IR text"):
        read_module(tmp_path / "missing.eir")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot read IR text"):
        read_module(path)


@pytest.mark.parametrize("text", ["", "x", "\x00", "graph", "weight @", '"', "%", "edgecc.module"])
def test_garbage_is_an_input_error(text):
    with pytest.raises(InputError):
        parse_module(text)


@pytest.mark.parametrize("cut", range(0, len(GOOD) - 2, 37))
def test_any_truncation_is_an_input_error_or_a_shorter_module(cut):
    try:
        parsed = parse_module(GOOD[:cut])
    except InputError:
        return
    assert GOOD.startswith(print_module(parsed).split("\n", 1)[0])


@pytest.mark.parametrize(
    "encoding",
    [Dense(DType.F64), NVFP4(32), NVFP4(16, True), Int8Block(64), Int4(), *SMALL_ENCODINGS],
)
def test_encodings_round_trip(encoding):
    assert parse_encoding(str(encoding)) == encoding
    module = Module("m")
    module.weights.add("w", Weight((256, 256), encoding, Unbound("lm_head")))
    assert parse_module(print_module(module)).weights["w"].encoding == encoding


@pytest.mark.parametrize(
    "text",
    [
        *("", "dense", "dense<>", "nvfp4", "nvfp4<block=x>", "nvfp4<block=16, more>", "int8"),
        *("int8<>", "int8<tensor>", "int4<group=-2>", "int4<group=2x2>", "int8_block<block=1_6>"),
        *("fp8", "fp8<>", "fp8<row>", "fp8<tensor, channel>", "fp8<tensor, scale=i8>"),
        *(
            "fp8<block=128>",
            "fp8<block=0x4>",
            "fp8<channel, scale=no>",
            "nvfp4<block=4, block=4>",
            "nvfp4<block=4><block=4>",
        ),
    ],
)
def test_bad_encodings(text):
    with pytest.raises(ValueError, match="unknown encoding"):
        parse_encoding(text)


def test_equality_and_diff():
    a, b = everything(), everything()
    assert equal(a, b)
    assert diff(a, b) == ""
    assert fingerprint(a) == fingerprint(b)
    b.graphs["main"].nodes[0].attrs = RmsNormAttributes(1e-5)
    assert not equal(a, b)
    assert "+  %x_1 = rms_norm(%x, @norm) {eps = 1e-05}" in diff(a, b)
    assert fingerprint(a) != fingerprint(b)


@pytest.mark.parametrize("name", ["a b", "a_b", "ä", 'say "x"', "", "new\nline", "7", "k_cache.0"])
def test_names_that_bind_keep_every_character(name):
    b = Builder(Module("m", metadata={"odd key": 1}), "main")
    x = b.input(name, DType.F32, (2,), Role.KV_CACHE)
    other = b.input("other name", DType.F32, (2,), Role.ACTIVATION)
    b.output(b.op("add", x, other, name="a b"), name, Role.KV_CACHE, alias=name)
    parsed = parse_module(print_module(b.module))
    graph = parsed.graphs["main"]
    assert [i.name for i in graph.inputs] == [name, "other name"]
    assert (graph.outputs[0].name, graph.outputs[0].alias) == (name, name)
    assert print_module(parsed) == print_module(b.module)


def test_inputs_that_differ_in_one_odd_character_stay_apart():
    b = Builder(Module("m"), "main")
    x, y = (b.input(n, DType.F32, (2,), Role.ACTIVATION) for n in ("a b", "a_b"))
    b.output(b.op("add", x, y, name="a_b"), "out", Role.ACTIVATION)
    add = parse_module(print_module(b.module)).graphs["main"].nodes[0]
    assert [o.name for o in add.operands] == ["a b", "a_b"]


def test_a_hash_is_no_part_of_the_structure_unless_both_sides_know_one():
    def made(digest: str = "") -> Module:
        text = 'edgecc.module v1 "m"\nweight @w : dense<f32> [1] = inline {weight: 0x0000803f}'
        return parse_module(text + (f' hash "{digest}"' if digest else ""))

    assert equal(made(), made("aa"))
    assert equal(made("aa"), made("aa"))
    assert not equal(made("aa"), made("bb"))
    assert diff(made(), made("aa")) == ""
    assert 'hash "bb"' in diff(made("aa"), made("bb"))
    assert fingerprint(made()) == fingerprint(made("aa"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("symbol t: 1..2\nsymbol t: 3..4", "symbol t has a range already"),
        ("metadata a = 1\nmetadata a = 2", "metadata a is given twice"),
        ('checkpoint "a" = "x"\ncheckpoint "a" = "y"', "checkpoint 'a' is given twice"),
        ("metadata a = " + "[" * 100_000, "nested too deeply"),
        ("symbol t: 1.." + "9" * 5000, "a number of 5000 digits"),
        ('decision "a\\qb"', "bad string"),
        ("weight @a : dense<f32> [1] = derived r(n = 1, n = 2)", "parameter n is given twice"),
        ('weight @a : dense<f32> [1] = derived r(n = 1, n = "")', "parameter n is given twice"),
        ("weight @a : dense<f32> [1] = derived r(n = [[1], 2])", "expected a number, found '['"),
        ("weight @a : dense<u8> [1] = inline {weight: 0x000}", "half a byte"),
        ('weight @a : dense<f32> [1] = alias @b hash "x"', "an alias has no hash"),
        ('weight @a : dense<f32> [1] = derived add_one(@b) hash "x"', "no weight @b"),
    ],
)
def test_odd_statements_are_input_errors(line, message):
    with pytest.raises(InputError) as caught:
        parse_module(f'edgecc.module v1 "m"\n{line}\n')
    (diagnostic,) = caught.value.diagnostics
    assert message in diagnostic.message


def test_the_caret_of_a_bad_string_is_within_it():
    with pytest.raises(InputError) as caught:
        parse_module('edgecc.module v1 "m"\ndecision "ab\\qc"\n')
    assert caught.value.diagnostics[0].where == "<text>:2:13"


def test_the_statement_after_a_bad_one_is_read():
    text = GOOD.replace("return", '%bad = add(%x, %x) : f32["]\n  return')
    with pytest.raises(InputError):
        parse_module(text)
    text = 'edgecc.module v1 "m"\ngraph @g(%x: f32[4] features) {\n  %y = silu(%x) : f32[-4]\n'
    with pytest.raises(InputError) as caught:
        parse_module(text + "  return\n    o = %x features\n}\n")
    assert [d.message for d in caught.value.diagnostics] == ["negative dimension in [-4]"]


def test_a_byte_order_mark_is_no_part_of_the_text():
    assert print_module(parse_module("\ufeff" + GOOD)) == print_module(parse_module(GOOD))


def test_negative_dimensions_of_weights_are_findings():
    text = 'edgecc.module v1 "m"\nweight @a : dense<f32> [-1] = unbound "x"\n'
    assert [d.id for d in verify(parse_module(text))] == ["ir/encoding-shape"]
