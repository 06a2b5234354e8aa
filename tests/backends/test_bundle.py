"""Opening bundles: whatever a directory holds, the answer is a bundle or a BundleError."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgecc.backends.bundle_manifest
import edgecc.errors
from edgecc.backends.bundle import Bundle
from edgecc.errors import BundleError

EXAMPLE: dict[str, Any] = json.loads(
    (Path(__file__).parent / "bundle.example.json").read_text("utf-8")
)
CONTENT = {
    "cpu-target.onnx": b"target",
    "cpu-draft.onnx": b"draft",
    "tokenizer/tokenizer.json": b"{}",
    "weights/cpu.safetensors": b"weights",
}

# By the place that holds them: @ stands for a dot inside a key.
REQUIRED_KEYS = {
    "": "format version producer target draft limits entries artifacts weights shared provenance "
    "decisions files",
    "target": "model_type hidden_size num_layers vocab_size num_tokens eos_token_ids "
    "max_position_embeddings",
    "draft": "method block_size num_speculative_tokens slot_layout mask_token_id target_layer_ids "
    "max_position_embeddings",
    "vision": "preprocessing patch_size temporal_patch_size spatial_merge_size grid_size "
    "min_pixels max_pixels image_mean image_std max_image_tokens feature_size image_token_id",
    "limits": "max_model_len max_input_len prefill_chunk max_batch_size",
    "entries": "target",
    "entries.target": "inputs outputs",
    "entries.target.inputs.0": "name role dtype shape",
    "entries.target.outputs.0": "name role dtype shape alias",
    "artifacts.cpu": "backend",
    "weights.lm_head": "encoding shape bytes file origin users",
    "shared.0": "symbol role users bytes",
    "provenance": "target pipeline options",
    "provenance.target": "name files",
    "files.cpu-draft@onnx": "bytes sha256",
}
REQUIRED = [
    f"{place}.{key}".lstrip(".") for place, keys in REQUIRED_KEYS.items() for key in keys.split()
]


def keys_of(dotted: str) -> list[str | int]:
    return [int(k) if k.isdigit() else k.replace("@", ".") for k in dotted.split(".")]


def holder(manifest: Any, path: list[str | int]) -> Any:
    """The object or array that holds the last step of `path`."""
    for step in path[:-1]:
        manifest = manifest[step]
    return manifest


def write(directory: Path, manifest: object = EXAMPLE) -> Path:
    """A bundle made by hand, without the code under test."""
    for name, content in CONTENT.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (directory / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    return directory


def refused(path: Path) -> BundleError:
    with pytest.raises(BundleError) as caught:
        Bundle.open(path)
    assert all(d.message and d.where and d.help for d in caught.value.diagnostics)
    return caught.value


def test_schema_is_a_valid_schema() -> None:
    schema = Path(edgecc.backends.bundle_manifest.__file__).with_name("bundle.schema.json")

    jsonschema.Draft202012Validator.check_schema(json.loads(schema.read_text("utf-8")))


@pytest.mark.parametrize("kind", [Path, str])
def test_open_gives_the_parts(tmp_path: Path, kind: type) -> None:
    bundle = Bundle.open(kind(write(tmp_path / "out")))

    assert bundle.path == tmp_path / "out"
    assert bundle.manifest == EXAMPLE
    assert bundle.tokenizer_dir == tmp_path / "out" / "tokenizer"
    assert bundle.artifact("cpu") == EXAMPLE["artifacts"]["cpu"]
    assert bundle.entry("draft") == EXAMPLE["entries"]["draft"]
    assert bundle.file("weights/cpu.safetensors").read_bytes() == b"weights"


def test_open_without_a_draft(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest["draft"] = manifest["provenance"]["draft"] = None
    del manifest["entries"]["draft"]

    assert Bundle.open(write(tmp_path, manifest)).manifest["draft"] is None


def test_other_methods_need_no_block(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest["draft"] = {
        "method": "eagle3",
        "num_speculative_tokens": 4,
        "target_layer_ids": [2, 3, 4],
        "max_position_embeddings": 4096,
    }

    assert Bundle.open(write(tmp_path, manifest)).manifest["draft"]["method"] == "eagle3"


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    manifest = {**EXAMPLE, "expected_acceptance": 4.1}

    assert Bundle.open(write(tmp_path, manifest)).manifest["expected_acceptance"] == 4.1


def test_files_may_be_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    directory = write(tmp_path / "snapshots" / "main")
    blob = tmp_path / "blobs" / "0a1b"
    blob.parent.mkdir()
    (directory / "cpu-target.onnx").rename(blob)
    (directory / "cpu-target.onnx").symlink_to("../../blobs/0a1b")
    (tmp_path / "link").symlink_to(directory)

    Bundle.open(tmp_path / "link").verify_hashes()


def test_missing_parts_name_what_there_is(tmp_path: Path) -> None:
    bundle = Bundle.open(write(tmp_path))

    with pytest.raises(BundleError, match=r"no artifact 'gpu'(.|\n)*compiled for: cpu"):
        bundle.artifact("gpu")
    with pytest.raises(BundleError, match=r"no entry 'traget'(.|\n)*did you mean 'target'"):
        bundle.entry("traget")
    with pytest.raises(BundleError, match=r"'../secret' is used, but not listed"):
        bundle.file("../secret")


def test_missing_tokenizer(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    del manifest["files"]["tokenizer/tokenizer.json"]

    with pytest.raises(BundleError) as caught:
        _ = Bundle.open(write(tmp_path, manifest)).tokenizer_dir
    assert caught.value.id == "bundle/no-tokenizer"


def test_path_that_does_not_exist(tmp_path: Path) -> None:
    error = refused(tmp_path / "absent")

    assert error.id == "bundle/not-a-bundle"
    assert "no such file" in str(error)
    assert error.exit_code == 3


def test_path_is_a_file(tmp_path: Path) -> None:
    write(tmp_path / "out")

    assert f"use {tmp_path / 'out'}" in str(refused(tmp_path / "out" / "bundle.json"))
    assert "it is a file" in str(refused(tmp_path / "out" / "cpu-target.onnx"))


def test_path_is_some_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()

    assert "not an edgecc bundle: it has no bundle.json" in str(refused(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_path_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()

    error = refused(tmp_path)

    assert error.id == "bundle/is-a-checkpoint"
    assert f"edgecc compile {tmp_path}" in str(error)


def test_bundle_json_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").mkdir()

    assert refused(tmp_path).id == "bundle/not-a-bundle"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"format": "edgecc-bundle"', "Expecting"),
        (b"\xff\xfe{}", "codec can't decode"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "b": 2, "b": 3}', "'b' appears twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    ],
)
def test_bundle_json_is_not_json(tmp_path: Path, text: bytes, words: str) -> None:
    (write(tmp_path) / "bundle.json").write_bytes(text)

    error = refused(tmp_path)

    assert error.id == "bundle/bad-json"
    assert words in str(error)


@pytest.mark.parametrize("text", [b"[]", b"null", b"{}", b'{"format": "zip"}'])
def test_bundle_json_of_another_program(tmp_path: Path, text: bytes) -> None:
    (write(tmp_path) / "bundle.json").write_bytes(text)

    assert refused(tmp_path).id == "bundle/not-a-bundle"


def test_huge_manifest_is_not_parsed(tmp_path: Path) -> None:
    with (write(tmp_path) / "bundle.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)

    assert "is larger than" in str(refused(tmp_path))


def test_newer_version_says_which_edgecc_is_needed(tmp_path: Path) -> None:
    manifest = {"format": "edgecc-bundle", "version": 2, "producer": "edgecc 0.7.1"}

    error = refused(write(tmp_path, manifest))

    assert error.id == "bundle/newer-version"
    assert "bundle version 2 needs edgecc 0.7.1; this edgecc reads version 1" in str(error)
    assert "edgecc>=0.7.1" in str(error)


@pytest.mark.parametrize("producer", [None, 3, "someone else", "edgecc 1'; rm -rf ~"])
def test_newer_version_of_an_unknown_producer(tmp_path: Path, producer: object) -> None:
    error = refused(write(tmp_path, {**EXAMPLE, "version": 9, "producer": producer}))

    assert "needs a newer edgecc" in str(error)
    assert "rm -rf" not in str(error)


@pytest.mark.parametrize("version", [0, -1])
def test_unknown_old_version(tmp_path: Path, version: int) -> None:
    assert refused(write(tmp_path, {**EXAMPLE, "version": version})).id == "bundle/unknown-version"


@pytest.mark.parametrize("version", [True, 1.0, "1", None, [1]])
def test_version_is_no_integer(tmp_path: Path, version: object) -> None:
    assert refused(write(tmp_path, {**EXAMPLE, "version": version})).id == "bundle/invalid-manifest"


@pytest.mark.parametrize("dotted", REQUIRED)
def test_required_key_is_missing(tmp_path: Path, dotted: str) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    path = keys_of(dotted)
    del holder(manifest, path)[path[-1]]

    error = refused(write(tmp_path, manifest))

    assert dotted == "format" or str(path[-1]) in str(error)


@pytest.mark.parametrize("dotted", REQUIRED)
def test_required_key_has_another_type(tmp_path: Path, dotted: str) -> None:
    path = keys_of(dotted)
    value = holder(EXAMPLE, path)[path[-1]]
    wrong: list[object] = [True, 1.5]
    wrong += [] if isinstance(value, dict) else [{}]
    wrong += [] if isinstance(value, list) else [[]]
    wrong += [-1, "7"] if isinstance(value, int) else [7]
    for other in wrong:
        manifest = copy.deepcopy(EXAMPLE)
        holder(manifest, path)[path[-1]] = other

        assert refused(write(tmp_path, manifest)).exit_code == 3, other


def test_findings_say_where_and_what(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest["limits"]["prefill_chunk"] = 0
    manifest["entries"]["target"]["inputs"][1]["shape"] = "b, t"
    del manifest["target"]["vocab_size"]

    error = refused(write(tmp_path, manifest))

    assert [d.message for d in error.diagnostics] == [
        "entries.target.inputs[1].shape: found 'b, t', expected array",
        "limits.prefill_chunk: found 0, expected minimum 1",
        "target: missing 'vocab_size'",
    ]
    assert {d.where for d in error.diagnostics} == {str(tmp_path / "bundle.json")}


def test_keys_cannot_carry_terminal_codes(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest["weights"]["\x1b[2J"] = {}

    assert "\x1b" not in str(refused(write(tmp_path, manifest)))


def test_contradictions(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest["weights"]["lm_head"]["file"] = "weights/other.safetensors"
    manifest["entries"]["target"]["outputs"][1]["alias"] = "k1"
    manifest["target"]["num_tokens"] = 513
    del manifest["entries"]["draft"]
    del manifest["entries"]["vision"]

    text = str(refused(write(tmp_path, manifest)))

    assert "weights.lm_head.file: 'weights/other.safetensors' is not listed" in text
    assert "output 'k0_out' aliases no input 'k1'" in text
    assert "target.num_tokens: larger than target.vocab_size" in text
    assert "'draft' is missing" in text
    assert "'vision' is missing" in text


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("vision", "feature_size", 65, "vision.feature_size: not the target.hidden_size"),
        ("vision", "min_pixels", 1 << 40, "vision.min_pixels: larger than vision.max_pixels"),
        ("vision", "image_token_id", 512, "vision.image_token_id: not below target.vocab_size"),
        ("vision", "vision_end_token_id", 512, "vision.vision_end_token_id: not below"),
        ("target", "hidden_size", 32, "vision.feature_size: not the target.hidden_size"),
    ],
)
def test_contradictions_about_images(
    tmp_path: Path, where: str, key: str, value: int, message: str
) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest[where][key] = value
    assert message in str(refused(write(tmp_path, manifest)))


def test_a_tower_and_a_target_that_reads_images_come_together(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    del manifest["vision"]
    text = str(refused(write(tmp_path, manifest)))
    assert "vision: missing, but `entries` has a vision tower" in text
    manifest = copy.deepcopy(EXAMPLE)
    ports = manifest["entries"]["target"]["inputs"]
    ports[:] = [p for p in ports if p["role"] != "image_features"]
    text = str(refused(write(tmp_path, manifest)))
    assert "entries.target: no input image_features" in text


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../out.onnx",
        "a/../../b",
        "a/./b",
        "a//b",
        "a/",
        "/etc/passwd",
        "C:/windows",
        "..\\up",
        "a\x00b",
        "a\nb",
        "\ud800",
        "bundle.json",
    ],
)
def test_unsafe_path(tmp_path: Path, name: str) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest["files"][name] = {"bytes": 0, "sha256": "0" * 64}

    assert refused(write(tmp_path, manifest)).id == "bundle/unsafe-path"


def test_damaged_files_are_all_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "cpu-draft.onnx").unlink()
    (tmp_path / "cpu-target.onnx").write_bytes(b"targe")
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "tokenizer" / "tokenizer.json").mkdir()
    (tmp_path / "weights" / "cpu.safetensors").unlink()
    (tmp_path / "weights" / "cpu.safetensors").symlink_to("nowhere")

    error = refused(tmp_path)

    assert [(d.id, Path(d.where).name) for d in error.diagnostics] == [
        ("bundle/missing-file", "cpu-draft.onnx"),
        ("bundle/size-mismatch", "cpu-target.onnx"),
        ("bundle/missing-file", "tokenizer.json"),
        ("bundle/missing-file", "cpu.safetensors"),
    ]
    assert "has 5 bytes, the manifest says 6" in str(error)


def test_many_damaged_files_are_counted(tmp_path: Path) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    manifest["files"] |= {f"absent-{i}": {"bytes": 0, "sha256": "0" * 64} for i in range(20)}

    error = refused(write(tmp_path, manifest))

    assert len(error.diagnostics) == 8
    assert "and 12 more findings" in str(error)


def test_verify_hashes_reads_everything(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []

    Bundle.open(write(tmp_path)).verify_hashes(lambda *step: steps.append(step))

    assert steps == [("verify", done, 20) for done in (5, 11, 13, 20)]


@pytest.mark.parametrize("name", CONTENT)
def test_verify_hashes_finds_a_flipped_bit(tmp_path: Path, name: str) -> None:
    bundle = Bundle.open(write(tmp_path))
    content = bytearray(CONTENT[name])
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)

    bundle.check_sizes()
    with pytest.raises(BundleError) as caught:
        bundle.verify_hashes()

    assert caught.value.id == "bundle/hash-mismatch"
    assert [d.where for d in caught.value.diagnostics] == [str(tmp_path / name)]


def test_verify_hashes_after_a_file_was_lost(tmp_path: Path) -> None:
    bundle = Bundle.open(write(tmp_path))
    (tmp_path / "cpu-draft.onnx").unlink()

    with pytest.raises(BundleError, match=r"cpu-draft\.onnx"):
        bundle.verify_hashes()


@pytest.mark.skipif(os.name == "nt", reason="imports of another platform")
def test_reading_needs_nothing_of_the_compiler() -> None:
    root = Path(edgecc.errors.__file__).parents[1]
    program = "import sys, edgecc.backends.bundle; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    heavy = {"numpy", "onnx", "networkx", "jsonschema", "edgecc.ir", "edgecc.backends.base"}
    assert heavy.isdisjoint(loaded)
    assert "edgecc.backends.bundle" in loaded


# --- whatever the manifest holds --------------------------------------------------------------


def paths(value: object, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if prefix:
        yield prefix
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*prefix, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*prefix, index))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(list(paths(EXAMPLE))),
        st.sampled_from(["remove", "replace", "insert", "rename"]),
        JSON,
        st.text(max_size=5),
    ),
    min_size=1,
    max_size=4,
)


def mutate(
    manifest: Any, path: tuple[str | int, ...], action: str, value: object, key: str
) -> None:
    """Change one place, unless an earlier change has removed it."""
    try:
        place = holder(manifest, list(path))
        old = place[path[-1]]
    except (KeyError, IndexError, TypeError):
        return
    if isinstance(place, str):
        return
    if action == "replace":
        place[path[-1]] = value
    elif action in ("remove", "rename"):
        del place[path[-1]]
    if action in ("insert", "rename"):
        if isinstance(place, dict):
            place[key] = old if action == "rename" else value
        else:
            place.append(old if action == "rename" else value)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundle"))


def open_or_refuse(path: Path) -> None:
    try:
        bundle = Bundle.open(path)
    except BundleError as error:
        # Diagnostics go to a terminal: no control codes of the manifest in them.
        codes = (c for c in str(error).replace("\n", "") if unicodedata.category(c) == "Cc")
        assert not list(codes)
    else:
        assert all(type(file["bytes"]) is int for file in bundle.manifest["files"].values())


@settings(deadline=None)  # disks may be slow
@given(mutations=MUTATIONS)
def test_any_change_of_the_manifest(
    scratch: Path, mutations: list[tuple[tuple[str | int, ...], str, object, str]]
) -> None:
    manifest = copy.deepcopy(EXAMPLE)
    for mutation in mutations:
        mutate(manifest, *mutation)
    (scratch / "bundle.json").write_text(json.dumps(manifest), "utf-8")

    open_or_refuse(scratch)


@settings(deadline=None)  # disks may be slow
@given(start=st.integers(0, 4000), length=st.integers(0, 40), new=st.binary(max_size=8))
def test_any_change_of_the_bytes(scratch: Path, start: int, length: int, new: bytes) -> None:
    text = json.dumps(EXAMPLE).encode()
    (scratch / "bundle.json").write_bytes(text[:start] + new + text[start + length :])

    open_or_refuse(scratch)


@settings(deadline=None)  # disks may be slow
@given(content=st.binary(max_size=200))
def test_any_bytes(scratch: Path, content: bytes) -> None:
    (scratch / "bundle.json").write_bytes(content)

    with pytest.raises(BundleError):
        Bundle.open(scratch)
