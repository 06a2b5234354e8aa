"""What may lie in the place of a file: a check ends soon, and says where, what and what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from edgecc.contract.report import CheckReport, check
from helpers.broken_pairs import header, index, write_pair
from helpers.checkpoints import edit_json

SECONDS = 30
"""More than any check of a small pair takes on a slow machine."""


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Turn what never ends, such as reading a pipe that nobody writes to, into a failure."""

    def late(*_: Any) -> NoReturn:
        pytest.fail(f"no end within {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("malformed-files")
    target, _ = write_pair(folder)
    (target / "added_tokens.json").write_text("{}")
    return folder


@pytest.fixture
def pair(originals: Path, tmp_path: Path) -> tuple[Path, Path]:
    for role in ("target", "draft"):
        shutil.copytree(originals / role, tmp_path / role)
    return tmp_path / "target", tmp_path / "draft"


def told(report: CheckReport, file: str, code: int = 3) -> str:
    """The errors of a report, after checking that each is fit for a user and one names the file."""
    assert report.exit_code == code, [f.diagnostic.render() for f in report.findings]
    errors = [f for f in report.findings if f.diagnostic.severity == "error"]
    for finding in errors:
        assert finding.diagnostic.message
        assert finding.diagnostic.where
        assert finding.action
        assert finding.rule is not None
    text = "\n".join(f.diagnostic.render() for f in errors)
    assert file in text
    return text


# --- things that are no files ---------------------------------------------------------------------


def _loop(path: Path) -> None:
    other = path.with_name("loop")
    other.symlink_to(path.name)
    path.symlink_to("loop")


def _socket(path: Path) -> None:
    home = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.fchdir(home)
        os.close(home)


THINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "not a regular file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "a socket": (_socket, "not a regular file"),
    "a link to itself": (lambda p: p.symlink_to(p.name), "symbolic link leads nowhere"),
    "a circle of links": (_loop, "symbolic link leads nowhere"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), "leads out of the checkpoint: /dev/zero"),
    "a link to a pipe": (
        lambda p: (os.mkfifo(p.with_name("pipe")), p.symlink_to("pipe")),
        "not a regular file",
    ),
}
FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json"),
    *("added_tokens.json", "model.safetensors", "model.safetensors.index.json"),
)


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("file", FILES)
def test_no_file(pair: tuple[Path, Path], file: str, thing: str) -> None:
    make, says = THINGS[thing]
    path = pair[0] / file
    path.unlink(missing_ok=True)
    make(path)
    assert says in told(check(*pair), file)


@pytest.mark.parametrize("thing", THINGS)
def test_no_shard(pair: tuple[Path, Path], thing: str) -> None:
    index("target", lambda content: None)(*pair)
    shard = pair[0] / "model-00001-of-00001.safetensors"
    shard.unlink()
    make, says = THINGS[thing]
    make(shard)
    assert says in told(check(*pair), shard.name)


@pytest.mark.parametrize("thing", ["a pipe", "a link to itself", "a device"])
def test_no_folder(pair: tuple[Path, Path], thing: str) -> None:
    shutil.rmtree(pair[1])
    THINGS[thing][0](pair[1])
    told(check(*pair), "draft")


# --- bytes that are no JSON -----------------------------------------------------------------------

BYTES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not usable as JSON"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "BOM"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "byte 0 is not UTF-8"),
    "Latin-1": ('{"a": "\u00e4"}'.encode("latin-1"), "byte 7 is not UTF-8"),
    "zeros": (bytes(4096), "not usable as JSON"),
    "a key twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs twice"),
    "a deep list": (b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
    "a list 40 deep": (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "deeper than 32 levels"),
    "an object 40 deep": (b'{"a":' * 40 + b"1" + b"}" * 40, "deeper than 32 levels"),
    "a huge integer": (b'{"a": ' + b"9" * 5000 + b"}", "not usable as JSON"),
    "no object": (b'"text"', "it holds a string"),
    "half an object": (b'{"a": {"b": 1}', "not usable as JSON"),
    "two objects": (b"{} {}", "not usable as JSON"),
    "a comment": (b'{"a": 1 // one\n}', "not usable as JSON"),
    "single quotes": (b"{'a': 1}", "not usable as JSON"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "a page of an error": (b"<!DOCTYPE html><title>401</title>", "not usable as JSON"),
}
JSON = tuple(file for file in FILES if file.endswith(".json"))


@pytest.mark.parametrize("what", BYTES)
def test_no_json(pair: tuple[Path, Path], what: str) -> None:
    data, says = BYTES[what]
    for file in JSON:
        path = pair[0] / file
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        assert says in told(check(*pair), file)
        path.unlink()
        if before is not None:
            path.write_bytes(before)


# --- values that are no numbers -------------------------------------------------------------------

NO_NUMBERS = (float("nan"), float("inf"), -float("inf"), 10**30, -1, 0, True, 0.5, "1", [1], {})


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_no_numbers(pair: tuple[Path, Path], role: str, key: str) -> None:
    """Sizes that JSON, or what Python writes as JSON, can say and no model has."""
    path = pair[("target", "draft").index(role)] / "config.json"
    for value in NO_NUMBERS:
        edit_json(path, **{key: value})
        text = told(check(*pair), f"{role}/config.json: {key}")
        assert f"{key} is " in text


ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "a negative size": ({"shape": [-1]}, "shape must list"),
    "a fraction": ({"shape": [1.0]}, "shape must list"),
    "true": ({"shape": [True]}, "shape must list"),
    "a size of 30 digits": ({"shape": [10**30]}, "shape must list"),
    "a product beyond all files": ({"shape": [2**40, 2**40]}, "whole number of bytes"),
    "zeros that hide a product": ({"shape": [0, 2**62, 2**62]}, "whole number of bytes"),
    "a text for a shape": ({"shape": "1"}, "shape must list"),
    "no shape": ({"shape": None}, "shape must list"),
    "offsets the wrong way": ({"data_offsets": [4, 0]}, "data_offsets must be"),
    "one offset": ({"data_offsets": [4]}, "data_offsets must be"),
    "three offsets": ({"data_offsets": [0, 2, 4]}, "data_offsets must be"),
    "an offset of 30 digits": ({"data_offsets": [0, 10**30]}, "data_offsets must be"),
    "an offset beyond the file": ({"data_offsets": [2**40, 2**40 + 4]}, "leaves a hole"),
    "another length": ({"data_offsets": [0, 8]}, "takes 4 bytes"),
    "a number for a dtype": ({"dtype": 32}, "unknown dtype 32"),
    "lower case": ({"dtype": "f32"}, "unknown dtype 'f32'"),
    "another library's name": ({"dtype": "F8_E4M3FN"}, "unknown dtype 'F8_E4M3FN'"),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_no_tensor(pair: tuple[Path, Path], what: str) -> None:
    change, says = ENTRIES[what]
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **change}
    (pair[1] / "model.safetensors").write_bytes(header({"layer.weight": entry}, 4))
    text = told(check(*pair), "draft/model.safetensors")
    assert says in text
    assert "layer.weight" in text


def test_offsets_that_are_no_numbers(pair: tuple[Path, Path]) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, float("nan")]}
    (pair[1] / "model.safetensors").write_bytes(header({"layer.weight": entry}, 4))
    assert "NaN is not a JSON number" in told(check(*pair), "draft/model.safetensors")


def test_a_name_twice_in_one_header(pair: tuple[Path, Path]) -> None:
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    text = f'{{"a": {entry}, "a": {entry}}}'.encode()
    data = len(text).to_bytes(8, "little") + text + bytes(4)
    (pair[1] / "model.safetensors").write_bytes(data)
    assert "'a' occurs twice" in told(check(*pair), "draft/model.safetensors")


# --- an index that leads elsewhere ----------------------------------------------------------------

ESCAPES = (
    *("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors"),
    *("C:x.safetensors", ".safetensors", "x.bin", "", "x\x00.safetensors", "a\nb.safetensors"),
    *(None, 3, ["x.safetensors"], {}),
)


@pytest.mark.parametrize("name", ESCAPES, ids=repr)
def test_an_index_that_leads_elsewhere(pair: tuple[Path, Path], name: object) -> None:
    index("target", lambda content: content["weight_map"].update({"x": name}))(*pair)
    assert "'x' is mapped to" in told(check(*pair), "model.safetensors.index.json")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 1, True], ids=repr)
def test_an_index_without_a_map(pair: tuple[Path, Path], weight_map: object) -> None:
    index("target", lambda content: content.update(weight_map=weight_map))(*pair)
    assert "weight_map is" in told(check(*pair), "model.safetensors.index.json")
