from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import EdgeccError, InputError, ResourceError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.ir.types import DType
from helpers.checkpoints import edit_json, hub_layout, read_tensors, write_draft, write_target

PAIRS = Path(__file__).parents[1] / "data" / "pairs"


def open_target(path: Path | str) -> Checkpoint:
    return Checkpoint.open(path, role="target")


def refused(path: Path | str, error: type[EdgeccError] = InputError) -> EdgeccError:
    """Open a checkpoint that must be refused; the error names the role and a file or tensor."""
    with pytest.raises(error) as caught:
        open_target(path)
    first = caught.value.diagnostics[0]
    assert "target" in first.where
    assert first.message
    return caught.value


def header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_file(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def put(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    (folder / name).write_bytes(content)
    return folder


# Reading


def test_every_dtype_reads_back_what_was_written(folder: Path) -> None:
    values: dict[str, tuple[DType, np.ndarray[Any, Any]]] = {
        "BOOL": (DType.BOOL, np.array([[True, False]])),
        "U8": (DType.U8, np.array([[0, 255]], np.uint8)),
        "I8": (DType.I8, np.array([[-128, 127]], np.int8)),
        "F8_E5M2": (DType.F8E5M2, np.array([[1.5, -2]], ml_dtypes.float8_e5m2)),
        "F8_E4M3": (DType.F8E4M3, np.array([[448, -1]], ml_dtypes.float8_e4m3fn)),
        "F8_E8M0": (DType.F8E8M0, np.array([[0.5, 4]], ml_dtypes.float8_e8m0fnu)),
        "I16": (DType.I16, np.array([[-5, 5]], np.int16)),
        "U16": (DType.U16, np.array([[0, 65535]], np.uint16)),
        "F16": (DType.F16, np.array([[0.1, -65504]], np.float16)),
        "BF16": (DType.BF16, np.array([[0.1, 3e38]], ml_dtypes.bfloat16)),
        "I32": (DType.I32, np.array([[-(2**31), 7]], np.int32)),
        "U32": (DType.U32, np.array([[2**32 - 1, 7]], np.uint32)),
        "F32": (DType.F32, np.array([[0.1, -0.0]], np.float32)),
        "F64": (DType.F64, np.array([[0.1, np.inf]], np.float64)),
        "I64": (DType.I64, np.array([[-(2**63), 7]], np.int64)),
        "U64": (DType.U64, np.array([[2**64 - 1, 7]], np.uint64)),
    }
    entries, data = {}, b""
    for name, (_, array) in values.items():
        entries[name] = tensor(name, [1, 2], len(data), len(data) + array.nbytes)
        data += array.tobytes()
    with open_target(put(folder, raw_file(header(**entries), data))) as checkpoint:
        for name, (dtype, array) in values.items():
            read = checkpoint.read(name)
            assert checkpoint.tensors[name].dtype is dtype
            assert read.dtype == array.dtype
            assert read.shape == (1, 2)
            assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("padding", range(8))
def test_unaligned_data_reads_like_aligned_data(folder: Path, padding: int) -> None:
    array = np.arange(6, dtype=np.float64).reshape(3, 2)
    text = header(x=tensor("F64", [3, 2], 0, 48)) + b" " * padding
    with open_target(put(folder, raw_file(text, array.tobytes()))) as checkpoint:
        for read in (checkpoint.read("x"), checkpoint.read("x", 1, 3)):
            assert read.flags.aligned
            assert not read.flags.writeable
        assert (checkpoint.read("x") == array).all()
        assert (checkpoint.read("x", 1, 3) == array[1:3]).all()


def test_aligned_tensors_are_views_of_the_mapping(tmp_path: Path) -> None:
    with open_target(write_target(tmp_path / "t")) as checkpoint:
        read = checkpoint.read("lm_head.weight")
        assert not read.flags.owndata
        assert not read.flags.writeable


def test_rows_are_cut_along_the_first_axis(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    whole = read_tensors(path)["model.embed_tokens.weight"]
    with open_target(path) as checkpoint:
        read = checkpoint.read
        key = "model.embed_tokens.weight"
        assert (read(key, 5, 9) == whole[5:9]).all()
        assert (read(key, 280) == whole[280:]).all()
        assert (read(key, stop=3) == whole[:3]).all()
        assert read(key, 4, 4).shape == (0, 64)
        for start, stop in ((-1, 2), (5, 4), (0, 289)):
            with pytest.raises(ValueError, match="rows"):
                read(key, start, stop)
        with pytest.raises(ValueError, match="scalar"):
            read("lm_head.weight_scale_2", 0, 1)


def test_arrays_outlive_the_checkpoint(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    with open_target(path) as checkpoint:
        read = checkpoint.read("model.norm.weight")
    assert (read == read_tensors(path)["model.norm.weight"]).all()


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_and_locations_of_single_and_sharded_checkpoints(
    tmp_path: Path, shards: int
) -> None:
    path = write_target(tmp_path / "t", shards=shards)
    expected = read_tensors(path)
    with open_target(path) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        for name, array in expected.items():
            info = checkpoint.tensors[name]
            assert (info.shape, info.nbytes) == (array.shape, array.nbytes)
            assert checkpoint.read(name).tobytes() == array.tobytes()
            assert checkpoint.location(name) == f"target/{info.file}: {name}"
        assert len(checkpoint.files) == shards
        assert checkpoint.findings == []


def test_zero_size_scalar_and_empty_file_are_fine(folder: Path) -> None:
    text = header(
        empty=tensor("F32", [0], 0, 0), flat=tensor("U8", [2, 0], 0, 0), one=tensor("U8", [], 0, 1)
    )
    with open_target(put(folder, raw_file(text + b"  ", b"\7"))) as checkpoint:
        assert checkpoint.read("empty").shape == (0,)
        assert checkpoint.read("flat", 1, 2).shape == (1, 0)
        assert checkpoint.read("one") == 7
    with open_target(put(folder, raw_file(b"{}"))) as checkpoint:
        assert len(checkpoint.tensors) == 0


def test_dtypes_without_counterpart_are_kept_out_but_named(folder: Path) -> None:
    text = header(
        f4=tensor("F4", [2, 2], 0, 2), f6=tensor("F6_E2M3", [4], 2, 5), ok=tensor("U8", [1], 5, 6)
    )
    with open_target(put(folder, raw_file(text, bytes(6)))) as checkpoint:
        assert list(checkpoint.tensors) == ["ok"]
        with pytest.raises(UnsupportedError, match="F6_E2M3"):
            checkpoint.read("f6")


def test_missing_tensor_lists_near_names(tmp_path: Path) -> None:
    with open_target(write_target(tmp_path / "t")) as checkpoint:
        with pytest.raises(InputError, match=r"model\.embed_tokens\.weight") as caught:
            checkpoint.read("embed_tokens.weight")
        assert caught.value.id == "checkpoint/missing-tensor"


def test_a_folder_named_in_other_scripts_with_spaces(tmp_path: Path) -> None:
    path = write_target(tmp_path / "modèle 模型 (v1)")
    with open_target(str(path)) as checkpoint:
        assert checkpoint.read("model.norm.weight").shape == (64,)
        assert all(file.exists() for file in checkpoint.tokenizer_files())


def test_the_committed_pair_opens() -> None:
    with (
        open_target(PAIRS / "tiny-qwen3-nvfp4") as target,
        Checkpoint.open(PAIRS / "tiny-qwen3-dspark", role="draft") as draft,
    ):
        assert target.tensors["lm_head.weight"].shape == (4096, 128)
        assert "lm_head.weight" not in draft.tensors
        assert draft.location("fc.weight") == "draft/model.safetensors: fc.weight"
        assert draft.generation_config == {}


def test_thousands_of_tensors_are_read_lazily(folder: Path) -> None:
    count = 5000
    entries = {f"layers.{i}.weight": tensor("F32", [16], 64 * i, 64 * i + 64) for i in range(count)}
    with open_target(put(folder, raw_file(header(**entries), bytes(64 * count)))) as checkpoint:
        assert len(checkpoint.tensors) == count
        assert all(file._map is None for file in checkpoint._files.values())


# Files beside the weights


def test_digests_cover_every_used_file(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", shards=2)
    (path / "README.md").write_text("not used")
    with open_target(path) as checkpoint:
        digests = checkpoint.file_digests()
        assert digests == {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(path.iterdir())
            if file.name != "README.md"
        }
        assert list(digests) == sorted(digests)


def test_side_files(tmp_path: Path) -> None:
    with open_target(write_target(tmp_path / "t")) as checkpoint:
        assert checkpoint.json("absent.json") is None
        side = checkpoint.json("hf_quant_config.json")
        assert side is not None
        assert side["producer"] == {"name": "modelopt", "version": "0.47.0"}
        assert checkpoint.generation_config["eos_token_id"] == [258, 256]
        assert [file.name for file in checkpoint.tokenizer_files()] == [
            "chat_template.jinja",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert checkpoint.file("absent") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "JSON"),
        (b"[1]", "a list, not an object"),
        (b"null", "null, not an object"),
        (b'{"a": 1,}', "JSON"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": {"b": 1, "c": 1, "b": 2}}', "'b' occurs twice"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested deeper"),
        (b'{"a":' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS"),
    ],
)
def test_bad_config_files(folder: Path, content: bytes, reason: str) -> None:
    (folder / "config.json").write_bytes(content)
    assert reason in str(refused(folder))


def test_config_may_hold_the_constants_python_writes(folder: Path) -> None:
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    with open_target(put(folder, raw_file(b"{}"))) as checkpoint:
        assert checkpoint.config["time_step_limit"] == [0.0, float("inf")]


def test_a_config_larger_than_any_real_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgecc.frontends.checkpoint.MAX_JSON", 10)
    (folder / "config.json").write_text('{"a": 123456}')
    assert refused(folder).id == "checkpoint/too-large"


# Malformed weight files

X = tensor("U8", [4], 0, 4)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"1234567", "truncated"),
    "zero header": (bytes(8) + b"{}", "bad-header"),
    "header length 2^63": (raw_file(b"{}", length=2**63), "bad-header"),
    "header length above the limit": (raw_file(b"{}", length=100_000_001), "bad-header"),
    "header longer than the file": (raw_file(b"{}", length=100), "truncated"),
    "header is a list": (raw_file(b"[]"), "bad-header"),
    "header starts with a space": (raw_file(b" {}"), "bad-header"),
    "header is no UTF-8": (raw_file(b'{"\xff": 1}'), "bad-json"),
    "header is no JSON": (raw_file(b"{]"), "bad-json"),
    "header has text after it": (raw_file(b"{} x"), "bad-json"),
    "NaN in the header": (raw_file(b'{"__metadata__": NaN}'), "bad-json"),
    "deep header": (raw_file(b'{"a":' * 100_000), "bad-json"),
    "duplicate tensor": (
        raw_file(b'{"x": %b, "x": %b}' % ((json.dumps(X).encode(),) * 2), bytes(4)),
        "bad-json",
    ),
    "metadata of numbers": (raw_file(header(__metadata__={"a": 1})), "bad-header"),
    "metadata is a list": (raw_file(header(__metadata__=[])), "bad-header"),
    "entry is a number": (raw_file(header(x=1)), "bad-tensor"),
    "no dtype": (
        raw_file(header(x={"shape": [4], "data_offsets": [0, 4]}), bytes(4)),
        "bad-tensor",
    ),
    "no shape": (
        raw_file(header(x={"dtype": "U8", "data_offsets": [0, 4]}), bytes(4)),
        "bad-tensor",
    ),
    "no offsets": (raw_file(header(x={"dtype": "U8", "shape": [4]}), bytes(4)), "bad-tensor"),
    "unknown dtype": (raw_file(header(x=tensor("F8_E4M3FN", [4], 0, 4)), bytes(4)), "bad-tensor"),
    "lower-case dtype": (raw_file(header(x=tensor("u8", [4], 0, 4)), bytes(4)), "bad-tensor"),
    "dtype is a list": (raw_file(header(x={**X, "dtype": []}), bytes(4)), "bad-tensor"),
    "size mismatch": (raw_file(header(x=tensor("U8", [5], 0, 4)), bytes(4)), "bad-tensor"),
    "negative dim": (raw_file(header(x=tensor("U8", [-4], 0, 4)), bytes(4)), "bad-tensor"),
    "fractional dim": (raw_file(header(x={**X, "shape": [4.0]}), bytes(4)), "bad-tensor"),
    "boolean dim": (raw_file(header(x={**X, "shape": [True, 4]}), bytes(4)), "bad-tensor"),
    "dim of 2^63": (raw_file(header(x=tensor("U8", [2**63], 0, 4)), bytes(4)), "bad-tensor"),
    "product overflow": (raw_file(header(x=tensor("U8", [2**62, 4], 0, 0)), b""), "bad-tensor"),
    "overflow behind a zero": (
        raw_file(header(x=tensor("U8", [0, 2**40, 2**40], 0, 0))),
        "bad-tensor",
    ),
    "rank 9": (raw_file(header(x=tensor("U8", [1] * 9, 0, 1)), bytes(1)), "bad-tensor"),
    "odd number of 4-bit values": (
        raw_file(header(x=tensor("F4", [3], 0, 2)), bytes(2)),
        "bad-tensor",
    ),
    "begin after end": (raw_file(header(x=tensor("U8", [4], 4, 0)), bytes(4)), "bad-tensor"),
    "three offsets": (raw_file(header(x={**X, "data_offsets": [0, 2, 4]}), bytes(4)), "bad-tensor"),
    "end beyond the data": (raw_file(header(x=X), bytes(3)), "truncated"),
    "data cut by 1 KiB": (
        raw_file(header(x=tensor("U8", [2000], 0, 2000)), bytes(976)),
        "truncated",
    ),
    "bytes after the data": (raw_file(header(x=X), bytes(5)), "trailing-bytes"),
    "overlap": (raw_file(header(x=X, y=tensor("U8", [4], 2, 6)), bytes(6)), "bad-tensor"),
    "same range twice": (raw_file(header(x=X, y=X), bytes(4)), "bad-tensor"),
    "hole": (raw_file(header(x=X, y=tensor("U8", [1], 5, 6)), bytes(6)), "bad-tensor"),
    "first tensor not at zero": (
        raw_file(header(x=tensor("U8", [4], 1, 5)), bytes(5)),
        "bad-tensor",
    ),
    "empty name": (raw_file(header(**{"": X}), bytes(4)), "bad-tensor"),
    "long name": (raw_file(header(**{"n" * 1025: X}), bytes(4)), "bad-tensor"),
    "control character in a name": (raw_file(header(**{"a\nb": X}), bytes(4)), "bad-tensor"),
    "lone surrogate in a name": (
        raw_file(b'{"\\ud800": %b}' % json.dumps(X).encode(), bytes(4)),
        "bad-tensor",
    ),
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n",
        "lfs-pointer",
    ),
    "pickle": (pickle.dumps({"x": [1] * 50}, protocol=2), "not-safetensors"),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00" + bytes(50), "not-safetensors"),
    "web page": (b"<!DOCTYPE html><html></html>", "not-safetensors"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(50), "not-safetensors"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_weight_files(folder: Path, case: str) -> None:
    content, reason = MALFORMED[case]
    error = refused(put(folder, content))
    assert error.id == f"checkpoint/{reason}"
    assert error.diagnostics[0].where.startswith("target/model.safetensors")


def test_truncation_names_both_sizes(folder: Path) -> None:
    content = raw_file(header(x=tensor("U8", [2000], 0, 2000)), bytes(2000))
    message = str(refused(put(folder, content[:-1024])))
    assert str(len(content)) in message
    assert str(len(content) - 1024) in message


def test_too_many_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgecc.frontends.safetensors_file.MAX_TENSORS", 1)
    content = raw_file(header(x=X, y=tensor("U8", [1], 4, 5)), bytes(5))
    assert refused(put(folder, content)).id == "checkpoint/bad-header"


SMALL = raw_file(
    header(
        __metadata__={"format": "pt"},
        a=tensor("BF16", [2, 3], 0, 12),
        b=tensor("F32", [], 12, 16),
        c=tensor("U8", [3], 16, 19),
    ),
    bytes(range(19)),
)


def reads_or_refuses(folder: Path, content: bytes) -> None:
    message = "read"
    try:
        with open_target(put(folder, content)) as checkpoint:
            for name, info in checkpoint.tensors.items():
                assert checkpoint.read(name).shape == info.shape
    except InputError as error:
        message = str(error)
    assert message.encode("utf-8")  # printable: no lone surrogates


@given(position=st.integers(0, len(SMALL) - 1), byte=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    (folder / "config.json").write_text("{}")
    reads_or_refuses(folder, SMALL[:position] + bytes([byte]) + SMALL[position + 1 :])


@given(length=st.integers(0, len(SMALL) - 1))
def test_any_truncation_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "config.json").write_text("{}")
    refused(put(folder, SMALL[:length]))


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    key=st.sampled_from(["dtype", "shape", "data_offsets"]),
)
def test_any_json_value_in_an_entry_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    folder = tmp_path_factory.mktemp("value")
    (folder / "config.json").write_text("{}")
    reads_or_refuses(folder, raw_file(header(x={**X, key: value}), bytes(4)))


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", quantized=False)
    with open_target(path) as checkpoint:
        checkpoint.read("lm_head.weight")
        os.truncate(path / "model.safetensors", 4096)
        with pytest.raises(InputError, match="now 4096") as caught:
            checkpoint.read("lm_head.weight")
        assert caught.value.id == "checkpoint/changed"


def test_a_file_replaced_before_the_first_read_is_an_error(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    with open_target(path) as checkpoint:
        write_target(path, seed=9)
        with pytest.raises(InputError, match="changed after it was opened"):
            checkpoint.read("lm_head.weight")


# Folders and indexes


@pytest.mark.parametrize(
    ("name", "error", "id"),
    [
        ("org/model", InputError, "checkpoint/not-found"),
        ("/no/such/folder", InputError, "checkpoint/not-found"),
        ("", InputError, "checkpoint/no-config"),
        ("a\0b", InputError, "checkpoint/not-found"),
        ("a" * 5000, InputError, "checkpoint/not-found"),
    ],
)
def test_paths_that_are_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[EdgeccError], id: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(name, error).id == id


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    error = refused(path / "model.safetensors")
    assert error.id == "checkpoint/not-a-folder"
    assert str(path) in error.diagnostics[0].help
    assert refused(path / "config.json" / "x").id == "checkpoint/not-found"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert refused(tmp_path / "model.gguf", UnsupportedError).id == "checkpoint/gguf"


@pytest.mark.parametrize(
    ("file", "error", "id"),
    [
        ("pytorch_model.bin", UnsupportedError, "checkpoint/pickle"),
        ("model.pth", UnsupportedError, "checkpoint/pickle"),
        ("model.gguf", UnsupportedError, "checkpoint/gguf"),
        ("model-00001-of-00002.safetensors", InputError, "checkpoint/no-index"),
        ("notes.txt", InputError, "checkpoint/no-weights"),
    ],
)
def test_folders_without_safetensors(
    folder: Path, file: str, error: type[EdgeccError], id: str
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return os.mkdir, (str(folder / "unpickled"),)

    (folder / file).write_bytes(pickle.dumps(Bomb()))
    assert refused(folder, error).id == id
    assert not (folder / "unpickled").exists()


def test_single_file_and_index_together_are_ambiguous(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", shards=2)
    put(path, raw_file(b"{}"))
    assert refused(path).id == "checkpoint/ambiguous"


def test_an_index_that_names_only_the_single_file_is_fine(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t")
    names = read_tensors(path)
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_target(path) as checkpoint:
        assert checkpoint.tensors.keys() == names.keys()


INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "../../x.safetensors",
        "../x.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "/etc/x.safetensors",
        "C:x.safetensors",
        "C:\\x.safetensors",
        "",
        ".safetensors",
        "..",
        "x.bin",
        "x\0.safetensors",
        "x\n.safetensors",
        "\u202ex.safetensors",
        "\ud800.safetensors",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_index_with_a_bad_file_name(tmp_path: Path, name: object) -> None:
    path = write_target(tmp_path / "t", shards=2)
    content = json.loads((path / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = name
    (path / INDEX).write_text(json.dumps(content))
    assert refused(path).id == "checkpoint/bad-index"


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_a_usable_map(tmp_path: Path, weight_map: object) -> None:
    path = write_target(tmp_path / "t", shards=2)
    edit_json(path / INDEX, weight_map=weight_map)
    assert refused(path).id == "checkpoint/bad-index"


@pytest.mark.parametrize("total_size", [None, "12", 1.5, -1, 10**30])
def test_total_size_is_informational(tmp_path: Path, total_size: object) -> None:
    path = write_target(tmp_path / "t", shards=2)
    edit_json(path / INDEX, metadata={"total_size": total_size})
    with open_target(path) as checkpoint:
        assert len(checkpoint.files) == 2


def test_a_file_name_too_long_for_the_file_system_is_missing(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", shards=2)
    content = json.loads((path / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = "x" * 300 + ".safetensors"
    (path / INDEX).write_text(json.dumps(content))
    assert refused(path).id == "checkpoint/missing-shard"


def test_missing_shard(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", shards=2)
    (path / SHARD).unlink()
    error = refused(path)
    assert error.id == "checkpoint/missing-shard"
    assert SHARD in str(error)


def test_index_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", shards=2)
    content = json.loads((path / INDEX).read_text())
    content["weight_map"]["absent.weight"] = SHARD
    (path / INDEX).write_text(json.dumps(content))
    assert "no weight file has it" in str(refused(path))
    del content["weight_map"]["absent.weight"]
    content["weight_map"]["model.norm.weight"] = SHARD
    (path / INDEX).write_text(json.dumps(content))
    assert "it is in model-00002-of-00002.safetensors" in str(refused(path))


def test_tensor_in_two_shards(folder: Path) -> None:
    put(folder, raw_file(header(x=X), b"aaaa"), "a.safetensors")
    put(folder, raw_file(header(x=X), b"bbbb"), "b.safetensors")
    put(folder, raw_file(header(y=X), b"cccc"), "c.safetensors")
    index = {"x": "a.safetensors", "y": "c.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    with open_target(folder) as checkpoint:  # b is not part of the checkpoint
        assert list(checkpoint.tensors) == ["x", "y"]
    put(folder, raw_file(header(x=X, z=tensor("U8", [1], 4, 5)), b"bbbbb"), "b.safetensors")
    index["z"] = "b.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    assert refused(folder).id == "checkpoint/duplicate-tensor"


def test_tensors_outside_the_index_are_reported_and_ignored(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", shards=2)
    content = json.loads((path / INDEX).read_text())
    del content["weight_map"]["model.norm.weight"]
    (path / INDEX).write_text(json.dumps(content))
    with open_target(path) as checkpoint:
        assert "model.norm.weight" not in checkpoint.tensors
        assert [finding.id for finding in checkpoint.findings] == ["checkpoint/unindexed-tensor"]


# Links


def test_hub_cache_layout(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source", shards=2)
    snapshot = hub_layout(source, tmp_path / "models--org--name")
    with open_target(snapshot) as checkpoint, open_target(source) as plain:
        assert checkpoint.tensors == plain.tensors
        assert checkpoint.file_digests() == plain.file_digests()
    link = tmp_path / "link"
    link.symlink_to(snapshot, target_is_directory=True)
    with open_target(link) as checkpoint:
        assert checkpoint.read("model.norm.weight").shape == (64,)


def test_the_folder_of_a_hub_cache_itself(tmp_path: Path) -> None:
    hub_layout(write_draft(tmp_path / "source"), tmp_path / "models--org--name")
    error = refused(tmp_path / "models--org--name")
    assert "snapshots" in error.diagnostics[0].help


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "hf_quant_config.json"])
def test_links_that_leave_the_checkpoint(tmp_path: Path, name: str) -> None:
    snapshot = hub_layout(write_target(tmp_path / "source"), tmp_path / "models--org--name")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(tmp_path / "source" / name)
    with pytest.raises(InputError) as caught:
        open_target(snapshot).json("hf_quant_config.json")
    assert caught.value.id == "checkpoint/outside-link"


@pytest.mark.parametrize("target", ["../../blobs/absent", "config.json"])
def test_broken_and_circular_links(tmp_path: Path, target: str) -> None:
    snapshot = hub_layout(write_target(tmp_path / "source"), tmp_path / "models--org--name")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(target)
    error = refused(snapshot)
    assert error.id == "checkpoint/broken-link"
    assert error.diagnostics[0].where == "target/config.json"


def test_things_that_are_not_files(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    assert refused(folder).id == "checkpoint/not-a-file"
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # opening one would wait forever
    assert refused(folder).id == "checkpoint/not-a-file"


def test_a_folder_that_may_not_be_entered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path, *_: object) -> object:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", deny)
        assert refused(folder, ResourceError).id == "checkpoint/unreadable"
    monkeypatch.setattr(Path, "lstat", deny)
    assert refused(folder, ResourceError).id == "checkpoint/unreadable"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_unreadable_files_are_a_resource_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put(folder, raw_file(b"{}"))
    opened = Path.open

    def deny(self: Path, mode: str = "r") -> object:
        if self.name == name:
            raise PermissionError(13, "Permission denied")
        return opened(self, mode)

    monkeypatch.setattr(Path, "open", deny)
    error = refused(folder, ResourceError)
    assert error.exit_code == 6
    assert "Permission denied" in str(error)
