"""Weights as inputs: what the runtime fills buffers with is what constants would have held."""

from __future__ import annotations

import copy
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.stored_weights import StoredWeights
from edgecc.backends.tensorrt.bound_weights import BoundWeights
from edgecc.backends.tensorrt.names import PlanNames
from edgecc.backends.tensorrt.operands import graph_operands
from edgecc.backends.tensorrt.policy import WeightPolicy, plan_weights
from edgecc.errors import BundleError, InternalError
from edgecc.ir.weights import Inline
from helpers.engines import Written, emitted, joined, lowered_pair
from helpers.goldens import DRAFT, TARGET
from helpers.lowered_pairs import write_pair

FORMATS: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "fp8": {"quantization": "fp8", "draft_quantization": "fp8-channel"},
    "fp8-block": {"quantization": "fp8-block", "draft_quantization": "fp8-block"},
    "int8": {"quantization": "int8", "draft_quantization": "int4"},
    "head": {"quantization": "nvfp4", "draft_quantization": "nvfp4", "quantize_head": True},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A pair in bf16, to be rounded to any format."""
    return write_pair(tmp_path_factory.mktemp("dense"), hidden=128, layers=2, quantized=False)


@pytest.fixture(scope="module")
def pair(dense):
    def make(format: str, device: str):
        paths = (TARGET, DRAFT) if format == "nvfp4" else dense
        return lowered_pair(*paths, device, **FORMATS[format])

    return make


@pytest.fixture(scope="module")
def bound(trt, pair, tmp_path_factory):
    return Written(trt, pair("nvfp4", "sm120"), "sm120", "bind", tmp_path_factory.mktemp("bound"))


CASES = [
    *((d, "nvfp4") for d in ("sm86", "sm89", "sm120")),
    *(("sm89", f) for f in ("fp8", "fp8-block", "int8")),
    ("sm86", "fp8"),
    ("sm120", "head"),
]


@pytest.mark.parametrize(("device", "format"), CASES)
def test_buffers_hold_what_constants_would(trt, pair, tmp_path, device, format) -> None:
    """Bit for bit, for every array of every engine, and nothing is left a constant."""
    module = pair(format, device)
    held = emitted(trt, module, device, plan_weights(module, "embed"))
    written = Written(trt, module, device, "bind", tmp_path)
    weights = BoundWeights(written.artifact, written.open())
    for name, network in held.items():
        taken = weights.inputs(name)
        constants = dict(network.constants)
        constants |= dict.fromkeys(network.inputs.values())  # the shared embedding
        left = written.networks[name].constants
        assert taken.keys() == {network.names.input(o) for o in constants if o not in left}
        assert {o.symbol for o in left} <= {
            module.weights.resolve(w)
            for n in module.graphs[name].nodes
            if n.op.name == "constant"
            for w in n.weights
        }
        for operand, constant in network.constants.items():
            if operand in left:
                continue
            buffer = weights.buffers[taken[network.names.input(operand)]]
            found = (buffer.dtype, buffer.shape, joined(weights.blocks(buffer)))
            assert found == constant, operand
            assert buffer.nbytes == len(found[2])


def test_one_tensor_and_one_buffer_for_all_who_take_it(bound) -> None:
    weights = BoundWeights(bound.artifact, bound.open())
    (body,) = (n for n in weights.inputs("target.body") if "embed_tokens" in n)
    assert weights.inputs("target.body")[body] == weights.inputs("draft.body")[body]
    with safe_open(bound.file.path, "np") as file:
        names = list(file.keys())
    assert names.count("target.model.embed_tokens.weight") == 1
    assert sorted(n for n in names if "lm_head" in n) == [
        "target.lm_head.input_scale",
        "target.lm_head.weight",
        "target.lm_head.weight_scale",
        "target.lm_head.weight_scale_2",
    ]
    takers = Counter(b for e in bound.networks for b in set(weights.inputs(e).values()))
    assert takers.keys() == {b.id for b in weights.buffers}
    assert [b.id for b in weights.buffers] == list(range(len(weights.buffers)))
    assert weights.nbytes == sum(o.nbytes for o in bound.plan.bound)
    heads = [b for b in weights.buffers if any("lm_head" in t for _, t in b.tensors)]
    assert {takers[b.id] for b in heads} == {1}  # its own engine


def test_what_engines_share_is_bound_also_where_the_rest_is_embedded(trt, pair, tmp_path) -> None:
    written = Written(trt, pair("nvfp4", "sm86"), "sm86", "embed", tmp_path)
    assert {o.symbol for o in written.plan.bound} == {"target.model.embed_tokens.weight"}
    weights = BoundWeights(written.artifact, written.open())
    (buffer,) = weights.buffers
    taken = {name: dict(weights.inputs(name)) for name in written.networks}
    for alone in ("lm_head", "draft.tail", "target.tail"):
        assert taken.pop(alone) == {}
    assert list(taken) == ["target.body", "draft.body"]
    assert [list(t.values()) for t in taken.values()] == [[0], [0]]
    assert written.file.bytes < buffer.nbytes + 1000
    assert written.plan.policy is WeightPolicy.EMBED


def test_stored_arrays_are_views_of_the_file_and_others_a_few_megabytes(tmp_path) -> None:
    """No second copy of everything: the 8-bit form of 32 MB is made block by block."""
    rows, columns = 8192, 8192
    path = tmp_path / "w.safetensors"
    path.write_bytes(bytes(rows * columns // 2))
    tensors = {"w": {"dtype": "U8", "shape": [rows, columns // 2], "offset": 0}}
    item = {"tensors": {"weight": "w"}, "shape": [rows, columns]}
    bound = [
        {"name": "a", "form": "stored", "dtype": "f4e2m1", **item},
        {"name": "b", "form": "doubled", "dtype": "i8", **item},
    ]
    artifact = {"engines": {"e": {"bound": bound}}, "tensors": tensors}
    weights = BoundWeights(artifact, WeightFile(path, tensors))
    plain, made = weights.buffers
    tracemalloc.start()
    assert sum(block.nbytes for _, block in weights.blocks(plain)) == plain.nbytes
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    assert sum(block.nbytes for _, block in weights.blocks(made)) == made.nbytes == rows * columns
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def damaged(artifact, change) -> dict[str, Any]:
    other = copy.deepcopy(artifact)
    entry = other["engines"]["target.body"]["bound"][1]
    change(other, entry)
    return other


CHANGES = {
    "no engines": lambda a, e: a.pop("engines"),
    "no tensors": lambda a, e: a.pop("tensors"),
    "no form": lambda a, e: e.pop("form"),
    "no name": lambda a, e: e.update(name=""),
    "a fractional size": lambda a, e: e.update(shape=[1.0, 2]),
    "a negative size": lambda a, e: e.update(shape=[-1, 2]),
    "another shape": lambda a, e: e.update(shape=[3, 5]),
    "another type": lambda a, e: e.update(dtype="f32" if e["dtype"] != "f32" else "bf16"),
    "an unknown type": lambda a, e: e.update(dtype="f3"),
    "an unknown form": lambda a, e: e.update(form="halved-twice"),
    "a form that does not fit": lambda a, e: e.update(form="values-int4"),
    "no components": lambda a, e: e.update(tensors={}),
    "an unknown tensor": lambda a, e: e.update(tensors={"weight": "other"}),
    "a tensor too many": lambda a, e: e["tensors"].update(more="target.lm_head.weight"),
    "blocks": lambda a, e: e.update(block=[4, 4]),
    "blocks of nothing": lambda a, e: e.update(block=[0, 4]),
    "an input twice": lambda a, e: a["engines"]["target.body"]["bound"].append(e),
    "two shapes": lambda a, e: a["engines"]["lm_head"]["bound"].append({**e, "shape": [1, 1]}),
    "a tensor outside of the file": lambda a, e: a["tensors"][e["tensors"]["weight"]].update(
        offset=1 << 62
    ),
    "a huge tensor": lambda a, e: a["tensors"][e["tensors"]["weight"]].update(
        shape=[1 << 62, 1 << 62]
    ),
    "a tensor without a type": lambda a, e: a["tensors"][e["tensors"]["weight"]].pop("dtype"),
    "an engine that is a list": lambda a, e: a["engines"].update(lm_head=[]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_manifest(bound, change: str) -> None:
    artifact = damaged(bound.artifact, CHANGES[change])
    file = WeightFile(bound.file.path, artifact.get("tensors", {}))
    with pytest.raises(BundleError) as caught:
        BoundWeights(artifact, file)
    assert caught.value.exit_code == 3


def test_no_weight_file_and_no_engine(bound) -> None:
    with pytest.raises(BundleError, match="no weight file"):
        BoundWeights(bound.artifact, None)
    with pytest.raises(BundleError, match="no engine 'other'"):
        BoundWeights(bound.artifact, bound.open()).inputs("other")
    assert BoundWeights({"engines": {"e": {}}, "tensors": {}}, None).buffers == ()


def test_a_truncated_weight_file(bound, tmp_path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(bound.file.path.read_bytes()[:-1000])
    with pytest.raises(BundleError):
        BoundWeights(bound.artifact, WeightFile(path, bound.artifact["tensors"]))


def test_two_devices_mean_the_same_by_a_name() -> None:
    """One file holds what both need once; another tensor under a known name is refused."""
    modules = [lowered_pair(TARGET, DRAFT, d) for d in ("sm86", "sm120")]
    plans = [plan_weights(m, "bind") for m in modules]
    both, one = StoredWeights(), StoredWeights()
    one.add(modules[0], plans[0].tensors(modules[0]))
    for module, plan in zip(modules, plans, strict=True):
        both.add(module, plan.tensors(module))
    # Only sm120 reads the 33 scales of activations: 4 bytes and a line of the header each.
    assert one.nbytes < both.nbytes < one.nbytes + 33 * 200
    table = modules[1].weights
    symbol = "target.model.embed_tokens.weight"
    content = table.read(symbol)["weight"].tobytes()
    for change, refused in ((content, False), (content[:-1] + b"!", True)):
        table.rebind(symbol, replace(table[symbol], source=Inline((("weight", change),))))
        if refused:
            with pytest.raises(InternalError, match=symbol):
                both.add(modules[1], plans[1].tensors(modules[1]))
        else:
            both.add(modules[1], plans[1].tensors(modules[1]))


def test_a_tied_head_and_its_embedding_are_one_buffer(trt, tmp_path) -> None:
    """Three engines take it, under either policy: the head's, the target's and the draft's."""
    target, draft = write_pair(tmp_path, vocab=1024, hidden=64, layers=2, tied=True)
    module = lowered_pair(target, draft, "sm86")
    for weights in ("embed", "bind"):
        written = Written(trt, module, "sm86", weights, tmp_path / weights)
        buffers = BoundWeights(written.artifact, written.open())
        (table,) = (b for b in buffers.buffers if "embed_tokens" in b.tensors[0][1])
        takers = [e for e in written.networks if table.id in buffers.inputs(e).values()]
        assert takers == ["lm_head", "target.body", "draft.body"]
        assert table.nbytes == 1024 * 64 * 2


def test_the_choice_by_size(monkeypatch) -> None:
    from edgecc.backends.tensorrt import policy

    module = lowered_pair(TARGET, DRAFT, "sm120")
    total = sum(o.nbytes for o in plan_weights(module, "bind").bound)
    for limit, expected in ((total, "embed"), (total - 1, "bind")):
        monkeypatch.setattr(policy, "EMBED_LIMIT", limit)
        plan = plan_weights(module, "auto")
        assert plan.policy == expected
        relation = "at most" if expected == "embed" else "more than"
        assert f"{relation} {limit / 1e6:.0f} MB" in next(iter(plan.decisions()))
        assert plan.embedded_bytes + sum(o.nbytes for o in plan.bound) == total
        assert set(plan.bound).isdisjoint(plan.constant)


def test_names_of_inputs_tell_arrays_apart(pair) -> None:
    """Within an engine: engines of other layers have the same names."""
    for device in ("sm86", "sm120"):
        for format in FORMATS:
            module, total = pair(format, device), 0
            for graph in module.graphs.values():
                operands = set(graph_operands(module, graph))
                names = PlanNames(module, graph)
                assert len({names.input(o) for o in operands}) == len(operands)
                assert all(np.prod(o.shape) > 0 for o in operands)
                total += len(operands)
            assert total > 20
