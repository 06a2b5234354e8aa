"""The files a module is lowered to: models without weights, and one weight file anyone can read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper
from safetensors import safe_open

from edgecc.backends.onnx import stored_tensors
from edgecc.backends.stored_weights import StoredWeights
from edgecc.devices import ONNX_DEVICES, get_device
from edgecc.errors import LegalizeError, ResourceError
from edgecc.ir import sym
from helpers.checkpoints import read_tensors, write_target
from helpers.lowered_pairs import FORMS, REAL_DRAFT, REAL_TARGET, LoweredPair
from helpers.lowering import Array, GraphBuilder, lower_onnx, lowered

SMALL = 256
"""Bytes of the largest tensor that may lie inside a model."""
LOCATION = "weights/weights.safetensors"


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoweredPair:
    device, form = FORMS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return LoweredPair(folder, REAL_TARGET, REAL_DRAFT, device=device, form=form)


def models(pair: LoweredPair) -> dict[str, onnx.ModelProto]:
    return {
        name: onnx.load(str(pair.folder / model["file"]), load_external_data=False)
        for name, model in pair.artifact.manifest["models"].items()
    }


def external(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def test_models_pass_the_full_check(pair: LoweredPair) -> None:
    for name in pair.artifact.files:
        onnx.checker.check_model(str(pair.folder / name), full_check=True)


def test_models_hold_no_weights(pair: LoweredPair) -> None:
    assert sum((pair.folder / name).stat().st_size for name in pair.artifact.files) < 200_000
    for model in models(pair).values():
        for tensor in model.graph.initializer:
            if not external_data_helper.uses_external_data(tensor):
                assert tensor.ByteSize() <= SMALL, tensor.name
            else:
                assert not tensor.HasField("raw_data")
                assert external(tensor)["location"] == LOCATION


def test_no_stretch_of_a_weight_occurs_in_a_model(pair: LoweredPair) -> None:
    protobufs = [(pair.folder / name).read_bytes() for name in pair.artifact.files]
    checked = 0
    for name, (offset, length) in pair.weights.offsets.items():
        if length < 1024:
            continue
        with pair.weights.path.open("rb") as file:
            file.seek(offset + length // 2 // 64 * 64)
            stretch = file.read(64)
        assert len(set(stretch)) > 4 or name.endswith("scale")
        assert not any(stretch in protobuf for protobuf in protobufs), name
        checked += 1
    assert checked > 40


def test_weight_file_is_read_by_safetensors(pair: LoweredPair) -> None:
    described = pair.artifact.manifest["tensors"]
    with safe_open(pair.weights.path, "np") as file:
        assert set(file.keys()) == set(described)
        for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            view = file.get_slice(name)
            assert list(view.get_shape()) == described[name]["shape"]
            assert view.get_dtype() == described[name]["dtype"]
    content = pair.weights.path.read_bytes()
    assert pair.weights.bytes == len(content)
    assert pair.weights.sha256 == hashlib.sha256(content).hexdigest()


def test_stored_bytes_are_those_of_the_checkpoints(pair: LoweredPair) -> None:
    """Fused weights are rows under each other, everything else is found unchanged."""
    written = read_tensors(pair.weights.path.parent)
    stored = {"target": read_tensors(REAL_TARGET), "draft": read_tensors(REAL_DRAFT)}
    compared = 0
    for name, array in written.items():
        role, _, key = name.removesuffix(".f32").partition(".")
        if role not in stored or "rope" in name:
            continue
        original = stored[role].get(key)
        if original is None:
            assert "+" in key, name
            original = _stacked(stored[role], key)
        if original.ndim == 1:  # vectors are widened
            np.testing.assert_array_equal(array, original.astype(np.float32), err_msg=name)
        else:
            assert array.dtype == original.dtype, name
            assert array.tobytes() == original.tobytes(), name
        compared += 1
    assert compared > 100


def _stacked(stored: dict[str, Array], key: str) -> Array:
    """`a.q_proj+k_proj.weight`: rows of `a.q_proj.weight`, then of `a.k_proj.weight`."""
    prefix, fused, component = key.rsplit(".", 2)
    parts = [stored[f"{prefix}.{name}.{component}"] for name in fused.split("+")]
    return np.concatenate(parts) if parts[0].ndim else parts[0]


def test_every_offset_is_that_of_a_tensor(pair: LoweredPair) -> None:
    described = pair.artifact.manifest["tensors"]
    width = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
    spans = {}
    used = set()
    for name, tensor in described.items():
        offset, length = pair.weights.offsets[name]
        assert tensor["offset"] == offset
        assert length == int(np.prod(tensor["shape"])) * width[tensor["dtype"]]
        assert offset % width[tensor["dtype"]] == 0
        spans[offset, length] = name
    for graph, model in models(pair).items():
        expand = pair.artifact.manifest["models"][graph]["expand"]
        made = {name: item for item in expand for name in item["initializers"]}
        for tensor in model.graph.initializer:
            if external_data_helper.uses_external_data(tensor):
                place = external(tensor)
                found = spans[int(place["offset"]), int(place["length"])]
                if tensor.name in made:
                    assert found == made[tensor.name]["parts"]["weight"]
                    used |= set(made[tensor.name]["parts"].values())
                else:
                    assert found == tensor.name
                    assert list(tensor.dims) == described[found]["shape"]
                    used.add(found)
    assert used == set(described)


def test_initializers_to_expand_are_in_their_model(pair: LoweredPair) -> None:
    for graph, model in models(pair).items():
        known = {t.name: t for t in model.graph.initializer}
        for item in pair.artifact.manifest["models"][graph]["expand"]:
            assert set(item["initializers"]) <= known.keys()
            assert set(item["parts"].values()) <= pair.artifact.manifest["tensors"].keys()


def test_one_model_has_the_head(pair: LoweredPair) -> None:
    """Target and draft call it; the range of its packed bytes occurs in no other model."""
    place = str(pair.weights.offsets["target.lm_head.weight"][0])
    owners = [
        name
        for name, model in models(pair).items()
        if any(external(t).get("offset") == place for t in model.graph.initializer)
    ]
    assert owners == ["lm_head"]
    for program in pair.artifact.manifest["programs"].values():
        assert [s["graph"] for s in program].count("lm_head") == 1


def test_lowering_again_gives_the_same_bytes(pair: LoweredPair, tmp_path: Path) -> None:
    record = get_device(pair.artifact.manifest["models"]["lm_head"]["file"].partition("-")[0])
    artifact, weights = lower_onnx(pair.module, record, tmp_path)
    assert json.dumps(artifact.manifest) == json.dumps(pair.artifact.manifest)
    assert weights.sha256 == pair.weights.sha256
    for name in artifact.files:
        assert (tmp_path / name).read_bytes() == (pair.folder / name).read_bytes()


def test_both_dialects_store_the_same_weights(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", layers=1)
    files = {LoweredPair(tmp_path / d, target, device=d).weights.sha256 for d in ONNX_DEVICES}
    assert len(files) == 1


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_progress_counts_bytes(device: str, tmp_path: Path) -> None:
    builder = GraphBuilder()
    w = builder.dense("w", np.ones((300, 64), np.float32))
    builder.give("y", builder.op("linear", builder.take("x", (1, sym("t"), 64)), weights=(w,)))
    seen: list[tuple[str, int, int]] = []
    weights = StoredWeights()
    weights.add(builder.module, stored_tensors(builder.module, get_device(device)))
    weights.write(tmp_path, lambda *args: seen.append(args))
    assert seen[0] == ("weights", 0, 76800)
    assert seen[-1] == ("weights", 76800, 76800)


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_inputs_returned_as_they_are_and_values_returned_twice(device: str, tmp_path: Path) -> None:
    def build(b: GraphBuilder) -> None:
        x = b.take("x", (1, sym("t"), 4))
        y = b.op("add", x, x, name="x")  # the name of an input, and no output's
        b.give("first", y)
        b.give("second", y)
        b.give("same", x)
        b.give("x", b.op("mul", y, x, name="second"))  # the names of an input and of an output

    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    found = lowered(build, device, tmp_path).run({"x": x})
    expected = {"first": 2 * x, "second": 2 * x, "same": x, "x": 2 * x * x}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_packed_weight_without_an_expansion_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LowerEncodings", "Legalize"):
        monkeypatch.setattr(f"helpers.lowering.{name}.run", lambda *_: False)
    codes = (np.zeros((8, 8), np.uint8), np.zeros((8, 1), "u1").view("i1"), np.float32(1))

    def build(b: GraphBuilder) -> None:
        b.nvfp4("w", codes[0], codes[1], np.array(codes[2]))
        b.give("y", b.op("linear", b.take("x", (1, sym("t"), 16)), weights=("w",)))

    with pytest.raises(LegalizeError) as caught:
        lowered(build, "cpu", tmp_path)
    assert caught.value.id == "onnx/encoding"


def test_full_disk_leaves_no_weight_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(b: GraphBuilder) -> None:
        w = b.dense("w", np.ones((64, 64), np.float32))
        b.give("y", b.op("linear", b.take("x", (1, sym("t"), 64)), weights=(w,)))

    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("edgecc.backends.weight_file.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ResourceError):
        lowered(build, "cpu", tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
