"""Answers of a hub that are not what was asked for, and caches that are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgecc.driver import compile
from edgecc.errors import (
    Diagnostic,
    EdgeccError,
    HubError,
    InputError,
    ResourceError,
    UsageError,
)
from edgecc.hub import checkpoint_folder, metadata_place
from edgecc.hub.client import Repository
from edgecc.hub.ids import HubId
from helpers.command_line import environment, process
from helpers.hub_server import Hub

TARGET = "org/tiny-target"
INFO = "^/api/models/[^/]+/[^/]+(/revision/.*)?$"
TREE = "/tree/"
WEIGHTS = "^/cdn/"
CONFIG = "/resolve/.*/config.json$"


def _info(**changes: object) -> bytes:
    return json.dumps({"id": TARGET, "tags": [], "siblings": [], **changes}).encode()


_PAGE = b"<html>please log in to this network</html>"


@pytest.mark.parametrize(
    ("pattern", "body"),
    [
        *((INFO, body) for body in (b"", _PAGE, b"[]", b"null", b"{}", b"\xff", b"[" * 100_000)),
        *((INFO, _info(sha=sha)) for sha in (None, 17, "", "abc", "../../../evil", "G" * 40)),
        *((TREE, body) for body in (b"", _PAGE, b"null", b"[1]", b"[{}]", b'[{"type":"file"}]')),
    ],
)
@pytest.mark.parametrize("metadata", [False, True])
def test_answers_that_cannot_be_read(
    hub: Hub, cache: Path, pattern: str, body: bytes, metadata: bool
) -> None:
    """Pages of a proxy, another server, another version of the interface."""
    hub.answers[pattern] = (200, body, {"Content-Type": "application/json"})
    error = _failure(metadata)
    assert (error.id, error.where) == ("hub/bad-answer", "target")
    assert "HF_ENDPOINT" in error.help
    assert not list(cache.parent.glob("**/evil"))


@pytest.mark.parametrize("body", [b"[]", b"{}"])
@pytest.mark.parametrize("metadata", [False, True])
def test_two_lists_that_differ(hub: Hub, cache: Path, body: bytes, metadata: bool) -> None:
    hub.answers[TREE] = (200, body, {"Content-Type": "application/json"})
    error = _failure(metadata)
    assert error.id == "hub/bad-answer"
    assert "config.json of commit" in error.message or "chat_template" in error.message


@pytest.mark.parametrize(
    ("headers", "id"),
    [
        ({"X-Repo-Commit": "a" * 40}, "hub/bad-answer"),  # no ETag
        ({"ETag": '"1"'}, "hub/bad-answer"),
        ({"ETag": '"1"', "X-Repo-Commit": "b" * 40}, "hub/bad-answer"),
        ({"ETag": '"1"', "X-Repo-Commit": "b" * 40, "X-Linked-Size": "9" * 15}, "hub/bad-answer"),
    ],
)
@pytest.mark.filterwarnings("ignore:Not enough free disk space")
@pytest.mark.parametrize("metadata", [False, True])
def test_headers_of_a_file(
    hub: Hub, cache: Path, headers: dict[str, str], id: str, metadata: bool
) -> None:
    """None of these is a hub that cannot be asked."""
    hub.answers[CONFIG] = (200, b"{}", headers)
    assert _failure(metadata).id == id


def test_refusals_of_files_are_no_offline_hub(hub: Hub, cache: Path) -> None:
    hub.answers[CONFIG] = (418, b"", {})
    assert _failure(False).id == "hub/refused"


@pytest.mark.parametrize("body", [b"", b"<html>", b"x" * 100_000])
def test_weights_of_another_size(hub: Hub, cache: Path, body: bytes) -> None:
    hub.answers[WEIGHTS] = (200, body, {})
    error = _failure(False)
    assert error.id == "hub/bad-answer"
    assert f"but has size {len(body)}" in error.message
    assert "--force-download" in error.help


def test_a_range_that_was_not_asked_for(hub: Hub, cache: Path) -> None:
    """Values from another place of a file would be taken for those of a tensor."""
    repository = Repository(HubId(TARGET), "target", offline=False, tell=lambda _: None)
    data = repository.read("model.safetensors", 100, 164)
    assert len(data) == 64
    for body, range_ in ((data, "bytes 36-99/5000"), (data[:-1], "bytes 100-162/5000")):
        hub.answers[WEIGHTS] = (206, body, {"Content-Range": range_})
        with pytest.raises(HubError, match=r"from byte 100|gives 63") as caught:
            repository.read("model.safetensors", 100, 164)
        assert caught.value.id == "hub/bad-answer"


@pytest.mark.parametrize("name", ["../up.json", "a\\..\\b.json", "x\n.json", "n" * 300 + ".json"])
def test_names_that_no_file_can_have(hub: Hub, cache: Path, name: str) -> None:
    """They are no part of a checkpoint: left out, and the rest is fetched."""
    hub.answers[TREE] = (200, _tree(hub, name), {"Content-Type": "application/json"})
    hub.answers[INFO] = (200, _listing(hub, name), {"Content-Type": "application/json"})
    folder = checkpoint_folder(TARGET, "target")
    assert (folder / "config.json").is_file()
    assert not list(cache.parent.glob("**/up.json"))


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"../../..", b"zzz", b"\xff\xfe"])
def test_a_damaged_reference(hub: Hub, cache: Path, content: bytes) -> None:
    checkpoint_folder(TARGET, "target")
    (cache / "models--org--tiny-target" / "refs" / "main").write_bytes(content)
    with pytest.raises(HubError) as caught:
        checkpoint_folder(TARGET, "target", offline=True)
    assert caught.value.id == "hub/bad-answer"


def test_bytes_that_changed_in_the_cache(hub: Hub, cache: Path, tmp_path: Path) -> None:
    """Same size, another scale: only the hash tells."""
    folder = checkpoint_folder(TARGET, "target")
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(InputError, match="not those of the hub") as caught:
        compile(folder, out=tmp_path / "bundle")
    assert caught.value.id == "checkpoint/damaged-blob"
    assert str(blob) in caught.value.diagnostics[0].help
    assert list(tmp_path.glob("*bundle*")) == []


@pytest.mark.parametrize("metadata", [False, True])
def test_links_out_of_a_cache(hub: Hub, cache: Path, tmp_path: Path, metadata: bool) -> None:
    """A check copies small files: not those that lie elsewhere."""
    with metadata_place(TARGET, "target") as place:
        assert place.remote
    snapshot = next((cache / "models--org--tiny-target" / "snapshots").iterdir())
    elsewhere = shutil.copyfile(snapshot / "config.json", tmp_path / "elsewhere.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(elsewhere)
    with pytest.raises(InputError) as caught:
        _resolve(metadata=True)
    assert caught.value.id == "checkpoint/outside-link"


@pytest.mark.parametrize("metadata", [False, True])
def test_a_cache_that_cannot_be_written(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bool
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file"))
    told: list[Diagnostic] = []
    with pytest.raises(ResourceError) as caught:
        _resolve(metadata=metadata, tell=told.append)
    assert caught.value.id == "hub/cache"
    assert "HF_HUB_CACHE" in caught.value.diagnostics[0].help
    assert len({d.message for d in told}) == len(told)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["hf_secret\u00e9", "hf_secret\x01", "hf_secret\udcff"])
def test_a_token_is_never_shown(hub: Hub, tmp_path: Path, token: str) -> None:
    env = environment(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path), HF_TOKEN=token)
    result = process("check", TARGET, env=env | {"HF_HUB_OFFLINE": "0"})
    assert (result.code, result.id) == (2, "hub/bad-setting")
    assert "secret" not in result.out + result.err


@pytest.mark.parametrize(
    ("variable", "value", "id"),
    [
        ("HF_ENDPOINT", "http://[::1", "hub/bad-setting"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "soon", "hub/bad-setting"),
        ("HF_ENDPOINT", "ftp://127.0.0.1", "hub/unreachable"),
    ],
)
def test_settings_of_the_library(tmp_path: Path, variable: str, value: str, id: str) -> None:
    env = environment(HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0") | {variable: value}
    result = process("check", TARGET, env=env)
    assert result.id == id, result.err
    assert "HF_" in result.err


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/org/name",
        "hf://org/name",
        "org/name@",
        "org/name@a b",
        "org/name:v1",
    ],
)
def test_names_that_are_meant_for_the_hub(text: str) -> None:
    with pytest.raises(UsageError, match="no name of a model") as caught:
        checkpoint_folder(text, "target")
    assert caught.value.id == "hub/bad-id"
    assert "org/name@revision" in caught.value.diagnostics[0].help


def test_paths_with_such_characters(tmp_path: Path) -> None:
    path = tmp_path / "org" / "name@a b"
    assert checkpoint_folder(path, "target") == path
    assert checkpoint_folder("./name@v1", "target") == Path("name@v1")


# --- tools ----------------------------------------------------------------------------------------


def _resolve(*, metadata: bool, tell: Callable[[Diagnostic], None] = lambda _: None) -> None:
    if metadata:
        with metadata_place(TARGET, "target", tell=tell):
            pass
    else:
        checkpoint_folder(TARGET, "target", tell=tell)


def _failure(metadata: bool) -> Diagnostic:
    with pytest.raises(EdgeccError) as caught:
        _resolve(metadata=metadata)
    assert caught.value.exit_code == 7
    return caught.value.diagnostics[0]


def _sizes(hub: Hub, name: str) -> dict[str, int]:
    folder = hub.folders[hub.models[TARGET]["main"]]
    return {**{file.name: file.stat().st_size for file in folder.iterdir()}, name: 5}


def _tree(hub: Hub, name: str) -> bytes:
    files = _sizes(hub, name).items()
    return json.dumps(
        [{"type": "file", "path": path, "size": size, "oid": "0" * 40} for path, size in files]
    ).encode()


def _listing(hub: Hub, name: str) -> bytes:
    siblings = [{"rfilename": n, "size": size} for n, size in _sizes(hub, name).items()]
    return _info(sha=hub.models[TARGET]["main"], siblings=siblings)
