"""Opening what a bundle holds: expansion, memory, damage."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

from edgecc.backends.layouts import BLOCK_BYTES
from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.onnxruntime import OrtEngine, open_engine
from edgecc.backends.onnxruntime import engine as engine_module
from edgecc.backends.onnxruntime.expand import expand, expanded_bytes
from edgecc.errors import BackendError, BundleError, ResourceError, UnsupportedError
from edgecc.roles import Role
from helpers.lowered_pairs import LoweredPair, Reference, draft_inputs, target_inputs, write_pair
from helpers.lowering import Array, Files, nvfp4_values, random_nvfp4

Json = dict[str, Any]
FORMS = ("dense", "int8-split")


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoweredPair:
    folder = tmp_path_factory.mktemp(request.param)
    target, draft = write_pair(folder, layers=2, hidden=32, intermediate=48)
    return LoweredPair(folder / "out", target, draft, form=request.param, max_model_len=40)


@pytest.fixture
def damaged(pair: LoweredPair, tmp_path: Path) -> tuple[Path, Json]:
    """A copy of a lowered pair and its manifest, to be damaged."""
    folder = tmp_path / "copy"
    shutil.copytree(pair.folder, folder)
    return folder, copy.deepcopy(dict(pair.artifact.manifest))


def opened(folder: Path, artifact: Json) -> OrtEngine:
    return open_engine(Files(folder), artifact, num_threads=1)


def results(engine: OrtEngine) -> dict[Role, Array]:
    """Everything one prompt call and one draft call give, copied."""
    target = engine.entry("target").run(target_inputs(range(9), 0), [Role.LOGITS, Role.HIDDEN_TAP])
    found = {role: array.copy() for role, array in target.items()}
    draft = engine.entry("draft").run(
        draft_inputs(found[Role.HIDDEN_TAP][0], 5, 0),
        [Role.PROPOSALS, Role.BASE_LOGITS, Role.DRAFT_LOGITS, Role.CONFIDENCE],
    )
    return found | {role: array.copy() for role, array in draft.items()}


def test_results_are_the_interpreters(pair: LoweredPair) -> None:
    found = results(pair.engine())
    expected = Reference(pair.reference, "target").run(target_inputs(range(9), 0))
    taps = expected[Role.HIDDEN_TAP][0]
    expected |= Reference(pair.reference, "draft").run(draft_inputs(taps, 5, 0))
    assert found.keys() == expected.keys()
    for role, array in expected.items():
        scale = float(np.abs(array).max())
        atol = pair.tolerance * scale if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(found[role], array, rtol=0, atol=atol, err_msg=role)


def test_expanded_weights_outlive_kernels_that_do_not_pack_them(
    pair: LoweredPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing kernels copy a weight, others go on reading ours: it must live as long as they do."""
    expected = results(pair.engine())
    expanded: list[tuple[int, int]] = []

    def options() -> onnxruntime.SessionOptions:
        made = original()
        made.add_session_config_entry("session.disable_prepacking", "1")
        return made

    original, expanding = onnxruntime.SessionOptions, engine_module.expand

    def recording(item: Json, file: WeightFile) -> dict[str, Array]:
        made = expanding(item, file)
        expanded.extend((a.ctypes.data, a.nbytes) for a in made.values())
        return made

    monkeypatch.setattr(onnxruntime, "SessionOptions", options)
    monkeypatch.setattr(engine_module, "expand", recording)
    engine = pair.engine()
    # What was freed would be handed out again, and overwritten.
    junk = [np.full(nbytes, 0xFF, np.uint8) for _, nbytes in expanded for _ in range(4)]
    assert not {array.ctypes.data for array in junk} & {address for address, _ in expanded}
    for role, array in results(engine).items():
        if array.dtype.kind == "f":
            atol = pair.tolerance * float(np.abs(expected[role]).max())
            np.testing.assert_allclose(array, expected[role], rtol=0, atol=atol, err_msg=role)


def test_nothing_is_printed_and_threads_may_be_chosen(
    pair: LoweredPair, capfd: pytest.CaptureFixture[str]
) -> None:
    bits = [results(pair.engine(threads))[Role.LOGITS].tobytes() for threads in (1, 2)]
    assert bits[0] == bits[1]
    with pytest.raises(BackendError):
        pair.engine().entry("target").run(target_inputs([10**6, 1], 0), [Role.LOGITS])
    assert capfd.readouterr() == ("", "")


def test_progress_counts_models(pair: LoweredPair) -> None:
    seen: list[tuple[str, int, int]] = []
    open_engine(
        Files(pair.folder), pair.artifact.manifest, progress=lambda *args: seen.append(args)
    ).close()
    assert seen == [("load", done, 4) for done in range(5)]


def test_entries_keep_their_caches(pair: LoweredPair) -> None:
    engine = pair.engine()
    assert engine.entry("target") is engine.entry("target")
    engine.entry("target").run(target_inputs(range(6), 0), [])
    logits = engine.entry("target").run(target_inputs([6], 6), [Role.LOGITS])[Role.LOGITS]
    reference = Reference(pair.reference, "target")
    expected = reference.run(target_inputs(range(7), 0, [6]))[Role.LOGITS]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3)


def test_unknown_entry_and_closed_engine(pair: LoweredPair) -> None:
    engine = pair.engine()
    with pytest.raises(BundleError) as caught:
        engine.entry("vision")
    assert caught.value.id == "bundle/no-entry"
    engine.entry("target")
    engine.close()
    engine.close()
    with pytest.raises(BackendError) as closed:
        engine.entry("target")
    assert closed.value.id == "onnxruntime/closed"


def test_missing_package(damaged: tuple[Path, Json], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(UnsupportedError) as caught:
        opened(*damaged)
    assert caught.value.id == "onnxruntime/missing"


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 7, 100, 0.5, 0.99])
def test_truncated_models(kept: float, damaged: tuple[Path, Json]) -> None:
    folder, artifact = damaged
    for model in artifact["models"].values():
        path = folder / model["file"]
        whole = path.read_bytes()
        path.write_bytes(whole[: int(kept if kept >= 1 else kept * len(whole))])
        with pytest.raises(BundleError) as caught:
            opened(folder, artifact)
        assert caught.value.id == "bundle/model"
        assert path.name in caught.value.diagnostics[0].where
        path.write_bytes(whole)


def test_missing_model(damaged: tuple[Path, Json]) -> None:
    folder, artifact = damaged
    (folder / artifact["models"]["lm_head"]["file"]).unlink()
    with pytest.raises(BundleError) as caught:
        opened(folder, artifact)
    assert caught.value.id == "bundle/model"


def test_models_that_changed_places(damaged: tuple[Path, Json]) -> None:
    folder, artifact = damaged
    models = artifact["models"]
    models["draft.tail"]["file"], models["draft.body"]["file"] = (
        models["draft.body"]["file"],
        models["draft.tail"]["file"],
    )
    with pytest.raises(BundleError) as caught:
        opened(folder, artifact)
    assert caught.value.id == "bundle/model"


@pytest.mark.parametrize("kept", [0, 8, 5000, 0.5, 0.9])
def test_truncated_weight_file(kept: float, damaged: tuple[Path, Json]) -> None:
    folder, artifact = damaged
    path = folder / artifact["weight_file"]
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept >= 1 else kept * len(whole))])
    with pytest.raises(BundleError) as caught:
        opened(folder, artifact)
    assert caught.value.id in ("bundle/weight-file", "bundle/tensor-range", "bundle/model")


def test_missing_weight_file(damaged: tuple[Path, Json]) -> None:
    folder, artifact = damaged
    (folder / artifact["weight_file"]).unlink()
    with pytest.raises(BundleError) as caught:
        opened(folder, artifact)
    assert caught.value.id == "bundle/weight-file"


def test_unreadable_weight_file(damaged: tuple[Path, Json]) -> None:
    folder, artifact = damaged
    path = folder / artifact["weight_file"]
    path.unlink()
    path.mkdir()
    with pytest.raises(ResourceError) as caught:
        opened(folder, artifact)
    assert caught.value.id == "bundle/unreadable"


def first_expansion(artifact: Json) -> Json:
    item: Json = artifact["models"]["lm_head"]["expand"][0]
    return item


def packed(artifact: Json) -> Json:
    tensor: Json = artifact["tensors"][first_expansion(artifact)["parts"]["weight"]]
    return tensor


def _set(key: str, value: object) -> Callable[[Json], None]:
    return lambda artifact: packed(artifact).__setitem__(key, value)


DAMAGE: dict[str, tuple[Callable[[Json], object], str]] = {
    "offset behind the file": (_set("offset", 1 << 40), "bundle/tensor-range"),
    "offset beyond 64 bits": (_set("offset", 1 << 80), "bundle/tensor-range"),
    "negative offset": (_set("offset", -8), "bundle/artifact"),
    "offset as float": (_set("offset", 128.0), "bundle/artifact"),
    "more rows than the file has": (_set("shape", [1 << 30, 16]), "bundle/tensor-range"),
    "a product that overflows": (_set("shape", [1 << 40, 1 << 40]), "bundle/tensor-range"),
    "negative rows": (_set("shape", [-1, 16]), "bundle/artifact"),
    "another rank": (_set("shape", [288 * 16]), "bundle/expansion"),
    "half the rows": (_set("shape", [144, 16]), "bundle/expansion"),
    "half the columns": (_set("shape", [288, 8]), "bundle/expansion"),
    "no rows": (_set("shape", [0, 16]), "bundle/expansion"),
    "unknown dtype": (_set("dtype", "F4"), "bundle/artifact"),
    "unknown form": (lambda a: first_expansion(a).update(form="nvfp5-f32"), "bundle/unknown-form"),
    "form of other parts": (
        lambda a: first_expansion(a)["parts"].pop("weight_scale"),
        "bundle/expansion",
    ),
    "too few initializers": (
        lambda a: first_expansion(a).update(initializers=[]),
        "bundle/expansion",
    ),
    "unknown tensor": (
        lambda a: first_expansion(a)["parts"].update(weight="nothing"),
        "bundle/unknown-tensor",
    ),
    "no tensors": (lambda a: a.pop("tensors"), "bundle/artifact"),
    "no models": (lambda a: a.update(models={}), "bundle/artifact"),
    "model without a file": (lambda a: a["models"]["lm_head"].pop("file"), "bundle/artifact"),
    "min_rows of zero": (lambda a: a.update(min_rows=0), "bundle/artifact"),
    "min_rows as text": (lambda a: a.update(min_rows="2"), "bundle/artifact"),
    "program of an unknown model": (
        lambda a: a["programs"]["draft"][1].update(graph="head"),
        "bundle/artifact",
    ),
    "program without its first step": (lambda a: a["programs"]["draft"].pop(0), "bundle/artifact"),
    "entry without a program": (lambda a: a["programs"].pop("draft"), "bundle/artifact"),
    "step without an input": (
        lambda a: a["programs"]["target"][0]["inputs"].popitem(),
        "bundle/model",
    ),
    "step with another output": (
        lambda a: a["programs"]["target"][0]["outputs"].update(more="value"),
        "bundle/model",
    ),
    "unknown role": (
        lambda a: a["entries"]["target"]["inputs"][0].update(role="pixels"),
        "bundle/artifact",
    ),
    "port of another dtype": (
        lambda a: a["entries"]["target"]["inputs"][0].update(dtype="f16"),
        "bundle/artifact",
    ),
    "cache of unknown capacity": (
        lambda a: a["entries"]["draft"]["inputs"][-1].update(shape=["b", 2, "C", 32]),
        "bundle/artifact",
    ),
    "update of no cache": (
        lambda a: a["entries"]["draft"]["outputs"][-1].update(alias="anchor"),
        "bundle/artifact",
    ),
    "cache that nothing updates": (
        lambda a: a["entries"]["draft"]["outputs"].pop(),
        "bundle/artifact",
    ),
    "cache that two updates overwrite": (
        lambda a: a["entries"]["draft"]["outputs"].append(
            {**a["entries"]["draft"]["outputs"][-1], "name": "again"}
        ),
        "bundle/artifact",
    ),
    "update that is an input": (
        lambda a: a["entries"]["draft"]["outputs"][-1].update(value="anchor"),
        "bundle/artifact",
    ),
    "two caches of one update": (
        lambda a: a["entries"]["draft"]["outputs"][-1].update(
            value=a["entries"]["draft"]["outputs"][-2]["value"]
        ),
        "bundle/artifact",
    ),
    "step that runs twice": (
        lambda a: a["programs"]["target"].append(a["programs"]["target"][-1]),
        "bundle/artifact",
    ),
    "output nothing makes": (
        lambda a: a["entries"]["target"]["outputs"][0].update(value="nothing"),
        "bundle/artifact",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_manifest(name: str, damaged: tuple[Path, Json]) -> None:
    folder, artifact = damaged
    damage, expected = DAMAGE[name]
    damage(artifact)
    with pytest.raises(BundleError) as caught:
        opened(folder, artifact)
    assert caught.value.id == expected
    assert len(str(caught.value)) < 2000


def test_undamaged_copy_opens(damaged: tuple[Path, Json]) -> None:
    opened(*damaged).close()


# --- expansion ------------------------------------------------------------------------------------


def weight_file(folder: Path, arrays: dict[str, Array]) -> WeightFile:
    """Arrays one after the other, behind a header no tensor is aligned to."""
    names = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
    content, tensors = b"\0" * 12, {}
    for name, array in arrays.items():
        dtype = names.get(array.dtype.name, "F32")
        tensors[name] = {"dtype": dtype, "shape": list(array.shape), "offset": len(content)}
        content += array.tobytes()
    path = folder / "weights.safetensors"
    path.write_bytes(content)
    return WeightFile(path, tensors)


def packed_file(folder: Path, rows: int, columns: int) -> tuple[WeightFile, Json, list[Array]]:
    parts = random_nvfp4(np.random.default_rng(rows), rows, columns)
    names = ("weight", "weight_scale", "weight_scale_2")
    file = weight_file(folder, dict(zip(names, parts, strict=True)))
    return file, {name: name for name in names}, parts


# One row, a few rows, rows of 2 MB: several blocks, the last one shorter.
SIZES = [(1, 16), (37, 48), (5, 1 << 19)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_packed_weights_become_exact_floats(rows: int, columns: int, tmp_path: Path) -> None:
    file, parts, arrays = packed_file(tmp_path, rows, columns)
    item = {"form": "nvfp4-f32", "initializers": ["w"], "parts": parts}
    made = expand(item, file)
    assert made["w"].dtype == np.float32
    assert expanded_bytes(item, file) == made["w"].nbytes
    np.testing.assert_array_equal(made["w"], nvfp4_values(*arrays))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_packed_weights_become_exact_codes(rows: int, columns: int, tmp_path: Path) -> None:
    file, parts, arrays = packed_file(tmp_path, rows, columns)
    item = {"form": "nvfp4-int8", "initializers": ["codes", "scales"], "parts": parts}
    made = expand(item, file)
    codes, scales = made["codes"], made["scales"]
    assert expanded_bytes(item, file) == codes.nbytes + scales.nbytes
    assert (codes.shape, codes.dtype) == ((rows, columns // 16, 16), np.uint8)
    assert (scales.shape, scales.dtype) == ((rows, columns // 16), np.float32)
    values = (codes.astype(np.float32) - 128) * scales[:, :, None]
    np.testing.assert_array_equal(values.reshape(rows, columns), nvfp4_values(*arrays))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("shape", [(1, 3), (9, 1 << 18), (4, 5, 6)])
def test_narrow_floats_widen_exactly(shape: tuple[int, ...], dtype: Any, tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    file = weight_file(tmp_path, {"a": array})
    item = {"form": "widen-f32", "initializers": ["w"], "parts": {"weight": "a"}}
    made = expand(item, file)
    assert made["w"].dtype == np.float32
    assert expanded_bytes(item, file) == made["w"].nbytes
    np.testing.assert_array_equal(made["w"], array.astype(np.float32))


def test_blocks_are_exercised() -> None:
    rows, columns = SIZES[-1]
    assert 1 < BLOCK_BYTES // (4 * columns) < rows


def test_closing_twice_and_garbage_is_silent(pair: LoweredPair) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = pair.engine()
        engine.close()
        del engine
