from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.devices import DEVICES, ONNX_DEVICES, get_device
from edgecc.errors import Diagnostic, LegalizeError, UsageError
from edgecc.ir import Builder, Dense, DType, Encoding, Int8Block, Module, Role, Unbound, Weight
from edgecc.ir.ops import OPS
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.legalize import Legalize, LegalizeOptions
from edgecc.passes.lower_encodings import LowerEncodings, LowerEncodingsOptions
from edgecc.passes.manager import PassManager
from helpers.modules import check_pass, module_text, modules
from helpers.pairs import PairOptions, pair
from helpers.weights import dense, packed

OWN = PairOptions(draft_head="own", draft_embedding="own")


def findings(module: Module, device: str = "cpu") -> list[Diagnostic]:
    text = module_text(module)
    found: list[Diagnostic] = []
    try:
        assert Legalize(LegalizeOptions(device)).run(module, PassContext()) is False
    except LegalizeError as error:
        found += error.diagnostics
    assert module_text(module) == text
    return found


def layer(op: str, weight: Weight, bias: Weight | None = None) -> Module:
    module = Module("m")
    symbols = [module.weights.add("w", weight)]
    if bias is not None:
        symbols.append(module.weights.add("bias", bias))
    b = Builder(module, "main")
    table = op in ("embedding", "embedding_bag", "lookup")
    dtype = DType.I64 if table else DType.F32
    shape = (3,) if table else (3, 4)
    x = b.input("x", dtype, shape, Role.ACTIVATION)
    b.output(b.op(op, x, weights=symbols, name="y"), "y", Role.ACTIVATION)
    return module


PACKED = packed(np.random.default_rng(0), 4, 4)
ONES = np.ones((4, 4))


def int8() -> Module:
    module = layer("linear", PACKED.weight)
    module.weights.derive("w.int8", "int8_codes", ("w",))
    module.graphs["main"].nodes[0].weights = ("w.int8",)
    return module


def constant(weight: Weight) -> Module:
    module = Module("m")
    module.weights.add("w", weight)
    b = Builder(module, "main")
    b.output(b.op("constant", weights=("w",), name="y"), "y", Role.ACTIVATION)
    return module


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F64, DType.I16, DType.U32])
def test_constants_of_other_types(dtype):
    (found,) = findings(constant(dense(ONES, dtype)))
    assert found.id == "legalize/encoding"
    assert found.message == f"device cpu has no constant for dense<{dtype.value}>"


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant(dense(ONES)),
        lambda: constant(dense(ONES, DType.I64)),
        lambda: constant(dense(ONES, DType.BOOL)),
        lambda: layer("linear", dense(ONES)),
        lambda: layer("linear", dense(ONES), dense(ONES[0])),
        int8,
        lambda: layer("embedding", dense(ONES)),
        lambda: layer("embedding", dense(ONES, DType.BF16)),
        lambda: layer("embedding", dense(ONES, DType.F16)),
        lambda: layer("lookup", dense(np.arange(4))),
    ],
)
@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_legal(make: Callable[[], Module], device):
    assert findings(make(), device) == []


@pytest.mark.parametrize(
    ("module", "op", "encoding", "symbol"),
    [
        (layer("linear", PACKED.weight), "linear", "nvfp4<block=4>", "w"),
        (layer("linear", dense(ONES, DType.BF16)), "linear", "dense<bf16>", "w"),
        (layer("linear", dense(ONES), dense(ONES[0], DType.F16)), "linear", "dense<f16>", "bias"),
        (layer("embedding", PACKED.weight), "embedding", "nvfp4<block=4>", "w"),
    ],
)
@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_encodings_a_device_does_not_compute_with(module, op, encoding, symbol, device):
    (found,) = findings(module, device)
    assert found.id == "legalize/encoding"
    assert found.message == f"device {device} has no {op} for {encoding}"
    assert found.where == f"@main, %y = {op}(%x)"
    assert found.notes == (f"weight @{symbol}: inline",)
    assert found.help == "run lower-encodings first"


def test_int8_codes_are_for_linear_layers():
    module = layer("embedding", PACKED.weight)
    module.weights.derive("w.int8", "int8_codes", ("w",))
    module.graphs["main"].nodes[0].weights = ("w.int8",)
    (found,) = findings(module)
    assert found.message == "device cpu has no embedding for int8_block<block=4>"


def test_aliases_count_for_what_they_stand_for():
    module = layer("linear", dense(ONES))
    module.weights.add("packed", PACKED.weight)
    module.weights.alias("w", "packed")
    assert [d.id for d in findings(module)] == ["legalize/encoding"]


@pytest.mark.parametrize(
    ("op", "help_"),
    [
        ("attention", "run fuse-cached-attention first"),
        ("cache_update", "run fuse-cached-attention first"),
        ("markov_chain", "run unroll-markov first"),
        ("rms_norm", "choose another device"),
    ],
)
def test_ops_a_device_does_not_run(op, help_):
    module = pair(replace(OWN, encoding="f32", head="f32", embedding="f32"))
    device = replace(get_device("cpu"), name="other", ops=frozenset(OPS) - {op})
    with pytest.raises(LegalizeError) as caught:
        Legalize().run(module, PassContext(device))
    assert caught.value.exit_code == 4
    found = [d for d in caught.value.diagnostics if d.id == "legalize/op"]
    nodes = [(g, n) for g in module.graphs.values() for n in g.nodes if n.op.name == op]
    (found,) = found
    assert found.where == f"@{nodes[0][0].name}, {nodes[0][1]!r}"
    assert found.message == f"device other cannot run {op}"
    assert found.help == help_
    more = len(nodes) - 1
    assert found.notes == ((f"and {more} more like it",) if more else ())


def test_an_op_no_pass_removes():
    device = replace(get_device("cpu"), name="tiny", ops=frozenset())
    with pytest.raises(LegalizeError, match="device tiny cannot run linear") as caught:
        Legalize().run(layer("linear", dense(ONES)), PassContext(device))
    assert caught.value.diagnostics[0].help == "choose another device"


def test_all_findings_come_at_once():
    found = findings(pair(OWN))
    assert {d.id for d in found} == {"legalize/op", "legalize/encoding"}
    assert len({d.message for d in found}) == len(found) > 3


def test_a_device_is_needed():
    with pytest.raises(UsageError, match="legalize needs a device") as caught:
        Legalize().run(pair(OWN), PassContext())
    assert caught.value.id == "pass/no-device"


def test_the_option_wins_over_the_context():
    module = layer("linear", dense(ONES))
    tiny = replace(get_device("cpu"), ops=frozenset())
    assert Legalize(LegalizeOptions("cpu")).run(module, PassContext(tiny)) is False


def test_weights_must_be_bound_before():
    """The manager checks what the pass requires."""
    module = layer("linear", Weight((4, 4), Dense(DType.F32), Unbound("lm_head", ("here",))))
    manager = PassManager([Legalize(LegalizeOptions("cpu"))])
    with pytest.raises(Exception, match="bound to nothing") as caught:
        manager.run(module)
    notes = caught.value.diagnostics[0].notes
    assert notes == ("looked for here", "pass legalize requires heads-bound")


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("form", ["dense", "int8-split"])
def test_the_default_pipeline_ends_legal(device, form):
    module = pair(replace(OWN, special={"up_proj": "bf16"}))
    passes: list[Pass] = default_pipeline(get_device(device), linear_form=form)
    PassManager(passes).run(module, PassContext(get_device(device)))
    assert findings(module, device) == []


def test_every_op_is_run_by_a_device_or_removed_by_a_pass():
    removed = {"markov_chain"}
    for op in set(OPS) - removed:
        assert any(op in device.ops for device in DEVICES.values()), op
    assert "fake_quantize" not in set().union(*(d.ops for d in ONNX_DEVICES.values()))
    for device in DEVICES.values():
        assert device.ops <= set(OPS)
        assert device.ops.isdisjoint(removed)


def runs(op: str, encoding: Encoding) -> bool:
    """Tables stay as stored, integers as well; everything else computes in f32."""
    if not isinstance(encoding, Dense):
        return op == "linear" and isinstance(encoding, Int8Block)
    table = op in ("embedding", "embedding_bag", "lookup")
    return table or encoding.dtype is DType.F32 or not encoding.dtype.is_float


@given(
    modules(ops=sorted(frozenset.intersection(*(d.ops for d in ONNX_DEVICES.values())) - {"cast"})),
    st.sampled_from(sorted(ONNX_DEVICES)),
    st.sampled_from(["dense", "int8-split"]),
)
def test_random_modules(module, device, form):
    """Before lowering, weights that are not f32 are named one by one; afterwards there are none."""
    foreign = {
        (node.op.name, str(encoding))
        for graph in module.graphs.values()
        for node in graph.nodes
        for encoding in (module.weights[w].encoding for w in node.weights)
        if not runs(node.op.name, encoding)
    }
    messages = [d.message for d in findings(module, device)]
    wanted = [f"device {device} has no {op} for {encoding}" for op, encoding in foreign]
    assert sorted(messages) == sorted(wanted)
    LowerEncodings(LowerEncodingsOptions(form)).run(module, PassContext())
    assert not check_pass(Legalize(LegalizeOptions(device)), module)
