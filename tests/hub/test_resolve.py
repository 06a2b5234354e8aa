"""Models of the hub, fetched by the real library from a real server on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from edgecc.errors import Diagnostic, HubError, InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.hub import checkpoint_folder, metadata_place
from edgecc.hub_layout import origin_of
from helpers.checkpoints import edit_tensors, write_target
from helpers.command_line import SMALL
from helpers.hub_server import Hub

TARGET, DRAFT = "org/tiny-target", "org/tiny-draft"


@pytest.mark.parametrize("bars", [True, False], ids=["bars", "no-bars"])
def test_a_folder_of_one_commit(hub: Hub, cache: Path, pair: tuple[Path, Path], bars: bool) -> None:
    seen: list[tuple[int, int]] = []
    before = are_progress_bars_disabled()
    (enable_progress_bars if bars else disable_progress_bars)()
    try:
        found = checkpoint_folder(
            TARGET, "target", progress=lambda stage, done, total: seen.append((done, total))
        )
    finally:
        (disable_progress_bars if before else enable_progress_bars)()
    assert found.parent == cache / "models--org--tiny-target" / "snapshots"
    origin = origin_of(found)
    assert origin is not None
    assert str(origin) == f"{TARGET}@{hub.models[TARGET]['main']}"
    with Checkpoint.open(found, role="target") as mine, Checkpoint.open(pair[0], role="t") as whole:
        assert mine.name == "tiny-target"
        assert mine.file_digests() == whole.file_digests()
    assert (found / "model.safetensors").is_symlink()
    size = (pair[0] / "model.safetensors").stat().st_size
    assert hub.sent("model.safetensors") == size
    assert seen[-1][0] == seen[-1][1] >= size


def test_what_is_there_is_not_fetched_again(hub: Hub, cache: Path) -> None:
    first = checkpoint_folder(TARGET, "target")
    commit = first.name
    hub.log.clear()
    assert checkpoint_folder(f"{TARGET}@{commit}", "target") == first
    assert hub.log == []  # a commit never changes: nobody is asked
    assert checkpoint_folder(TARGET, "target") == first
    assert [path for _, path, _ in hub.log] == [f"/api/models/{TARGET}"]  # where main is now


def test_only_what_a_checkpoint_needs(hub: Hub, cache: Path, tmp_path: Path) -> None:
    other = _copy(hub, tmp_path)
    for name in ("pytorch_model.bin", "modeling_x.py", "README.md", "consolidated.safetensors"):
        (other / name).write_bytes(b"x" * 1000)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    (other / "preprocessor_config.json").write_text("{}")
    hub.add("org/more", other)
    names = {file.name for file in checkpoint_folder("org/more", "target").iterdir()}
    assert {"chat_template.jinja", "preprocessor_config.json", "tokenizer.json"} < names
    assert {"config.json", "generation_config.json", "model.safetensors"} < names
    assert not names & {"pytorch_model.bin", "modeling_x.py", "README.md"}
    assert "consolidated.safetensors" not in names


def test_a_revision_is_pinned(hub: Hub, cache: Path, tmp_path: Path) -> None:
    """The branch moves on; the tag and the commit stay."""
    old = hub.models[TARGET]["main"]
    hub.models[TARGET]["v1"] = old
    new = hub.add(TARGET, _copy(hub, tmp_path))
    assert checkpoint_folder(TARGET, "target").name == new
    for revision in ("v1", old):
        assert checkpoint_folder(f"{TARGET}@{revision}", "target").name == old


def test_a_folder_comes_first(
    hub: Hub, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / TARGET).symlink_to(pair[0])
    told: list[Diagnostic] = []
    assert checkpoint_folder(TARGET, "target", tell=told.append) == Path(TARGET)
    assert [d.id for d in told] == ["hub/local-folder"]
    assert hub.log == []
    assert checkpoint_folder(f"{TARGET}@main", "target", tell=told.append).is_absolute()
    assert len(told) == 1


# --- without a network ----------------------------------------------------------------------------


def test_offline(hub: Hub, cache: Path) -> None:
    with pytest.raises(HubError, match=r"its cache has no org/tiny-target\n") as caught:
        checkpoint_folder(TARGET, "target", offline=True)
    assert caught.value.id == "hub/offline"
    assert "`hf download org/tiny-target`" in caught.value.diagnostics[0].help
    with pytest.raises(HubError) as caught:
        checkpoint_folder(f"{TARGET}@v1", "target", offline=True)
    assert "`hf download org/tiny-target --revision v1`" in caught.value.diagnostics[0].help
    fetched = checkpoint_folder(TARGET, "target")
    hub.log.clear()
    assert checkpoint_folder(TARGET, "target", offline=True) == fetched
    with metadata_place(TARGET, "target", offline=True) as place:
        assert (place.path, place.remote) == (fetched, {})
    assert hub.log == []


def test_offline_by_the_library_s_own_variable(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = checkpoint_folder(TARGET, "target")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.log.clear()
    assert checkpoint_folder(TARGET, "target") == fetched
    with pytest.raises(HubError) as caught:
        checkpoint_folder(DRAFT, "draft")
    assert caught.value.id == "hub/offline"
    assert hub.log == []


def test_a_cache_without_weights(hub: Hub, cache: Path) -> None:
    """A check has fetched the small files only: nothing of that may be compiled."""
    with metadata_place(TARGET, "target"):
        pass
    with pytest.raises(HubError, match=r"model\.safetensors of org/tiny-target") as caught:
        checkpoint_folder(TARGET, "target", offline=True)
    assert caught.value.id == "hub/offline"


def test_a_shard_is_not_in_the_cache(hub: Hub, cache: Path, tmp_path: Path) -> None:
    hub.add("org/sharded", _sharded(tmp_path))
    folder = checkpoint_folder("org/sharded", "target")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HubError, match=r"model-00002-of-00002\.safetensors"):
        checkpoint_folder("org/sharded", "target", offline=True)


def test_nobody_answers(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache has is used, and that is told; what it has not is an error."""
    fetched = checkpoint_folder(TARGET, "target")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    told: list[Diagnostic] = []
    assert checkpoint_folder(TARGET, "target", tell=told.append) == fetched
    assert [d.id for d in told] == ["hub/library"]
    assert "cached commit hash" in told[0].message
    with pytest.raises(HubError, match="cannot be reached") as caught:
        checkpoint_folder(DRAFT, "draft")
    assert caught.value.id == "hub/unreachable"
    with pytest.raises(HubError, match="cannot be reached"):
        checkpoint_folder(f"{DRAFT}@{hub.models[DRAFT]['main']}", "draft")


# --- what the hub refuses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "id", "says", "helps"),
    [
        ("org/none", "hub/not-found", "no model org/none, or it is private", "HF_TOKEN"),
        (f"{TARGET}@v9", "hub/no-revision", "no branch, tag or commit 'v9'", "@revision"),
        (f"{TARGET}@{'0' * 40}", "hub/no-revision", "0000", "@revision"),
        ("org/gated", "hub/gated", "access to org/gated is restricted", "terms"),
    ],
)
@pytest.mark.parametrize("metadata", [False, True])
def test_refusals(
    hub: Hub, pair: tuple[Path, Path], wanted: str, id: str, says: str, helps: str, metadata: bool
) -> None:
    hub.add("org/gated", pair[0])
    hub.gated.add("org/gated")
    with pytest.raises(HubError) as caught:
        _resolve(wanted, metadata, "draft")
    error = caught.value.diagnostics[0]
    assert (error.id, error.where) == (id, "draft")
    assert says in error.message
    assert helps in error.help
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(("status", "id"), [(403, "hub/refused"), (503, "hub/unreachable")])
def test_the_hub_answers_with_an_error(hub: Hub, cache: Path, status: int, id: str) -> None:
    hub.failing = status
    with pytest.raises(HubError, match=f"org/tiny-target: .*{status}") as caught:
        checkpoint_folder(TARGET, "target")
    assert caught.value.id == id


@pytest.mark.parametrize("metadata", [False, True])
def test_weights_that_would_run_code(hub: Hub, cache: Path, tmp_path: Path, metadata: bool) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x" * 5000)
    hub.add("org/pickled", folder)
    with pytest.raises(UnsupportedError) as caught:
        _resolve("org/pickled", metadata)
    assert caught.value.id == "checkpoint/pickle"
    assert hub.sent(".bin") == 0


def test_a_repository_without_a_shard_of_its_index(hub: Hub, cache: Path, tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub.add("org/half", folder)
    with pytest.raises(InputError, match="lacks 1 weight files") as caught:
        checkpoint_folder("org/half", "target")
    assert caught.value.id == "checkpoint/missing-shard"
    assert hub.sent(".safetensors") == 0


@pytest.mark.parametrize("found", [None, ModuleType("huggingface_hub")], ids=["none", "old"])
def test_the_library_is_missing_or_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", found)
    with pytest.raises(UnsupportedError, match="there is no folder org/x") as caught:
        checkpoint_folder("org/x", "target")
    assert caught.value.id == "hub/not-installed"
    assert "edgecc[hub]" in caught.value.diagnostics[0].help
    assert checkpoint_folder(tmp_path, "target") == tmp_path  # folders need no library


# --- metadata -------------------------------------------------------------------------------------


def test_headers_without_weights(hub: Hub, cache: Path, pair: tuple[Path, Path]) -> None:
    """A file of megabytes: its header comes, and single tensors that are asked for."""
    big = _large(hub, pair, cache.parent)
    with metadata_place("org/large", "target") as place:
        assert list(place.remote) == ["model.safetensors"]
        with (
            Checkpoint.open(place, role="target") as remote,
            Checkpoint.open(big, role="target") as local,
        ):
            assert remote.name == "large"
            assert dict(remote.tensors) == dict(local.tensors)
            assert remote.is_remote("big.weight")
            assert not local.is_remote("big.weight")
            sent = hub.sent("model.safetensors")
            assert sent <= 128 * 1024
            assert (remote.read("model.norm.weight") == local.read("model.norm.weight")).all()
            rows = remote.read("big.weight", 5, 7)
            assert (rows == local.read("big.weight", 5, 7)).all()
            assert not rows.flags.writeable
            assert hub.sent("model.safetensors") == sent + 64 + 2 * 4096
    assert not place.path.exists()


def test_a_long_header_comes_whole(hub: Hub, cache: Path, tmp_path: Path) -> None:
    folder = _copy(hub, tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    longer = data[8 : 8 + length] + b" " * 300_000
    path.write_bytes(len(longer).to_bytes(8, "little") + longer + data[8 + length :])
    hub.add("org/long", folder)
    with (
        metadata_place("org/long", "target") as place,
        Checkpoint.open(place, role="target") as remote,
        Checkpoint.open(folder, role="target") as local,
    ):
        assert dict(remote.tensors) == dict(local.tensors)


def test_a_server_that_knows_no_ranges(hub: Hub, cache: Path, pair: tuple[Path, Path]) -> None:
    _large(hub, pair, cache.parent)
    hub.ranges = False
    with (
        metadata_place("org/large", "target") as place,
        Checkpoint.open(place, role="target") as remote,
    ):
        assert remote.tensors
        with pytest.raises(HubError, match=r"model\.safetensors as a whole only") as caught:
            remote.read("big.weight", 5, 6)
    assert caught.value.id == "hub/no-ranges"


@pytest.mark.parametrize("damage", ["trailing", "short", "empty"])
def test_a_damaged_file_of_the_hub(hub: Hub, cache: Path, tmp_path: Path, damage: str) -> None:
    """Its size is compared with its header, although nobody fetches it."""
    folder = _copy(hub, tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes({"trailing": data + b"x", "short": data[:-10], "empty": b""}[damage])
    hub.add("org/damaged", folder)
    with metadata_place("org/damaged", "target") as place, pytest.raises(InputError) as caught:
        Checkpoint.open(place, role="target")
    expected = {"trailing": "checkpoint/trailing-bytes"}.get(damage, "checkpoint/truncated")
    assert caught.value.id == expected


def test_fetched_weights_are_read_where_they_are(hub: Hub, cache: Path) -> None:
    folder = checkpoint_folder(TARGET, "target")
    hub.log.clear()
    with metadata_place(TARGET, "target") as place:
        assert (place.path, place.remote) == (folder, {})
    assert hub.sent(".safetensors") == 0


def test_a_token_stays_on_the_hub(
    hub: Hub, cache: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights lie with somebody else: requests there carry no token."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    _large(hub, pair, cache.parent)
    with metadata_place("org/large", "target") as place:
        assert place.remote
    checkpoint_folder("org/large", "target")
    assert any(path.startswith("/api/models/org/large") for path in hub.trusted)
    assert any(path.startswith("/cdn/") for _, path, _ in hub.log)
    assert not any(path.startswith("/cdn/") for path in hub.trusted)


def test_files_that_are_no_part_are_told_and_not_opened(
    hub: Hub, cache: Path, tmp_path: Path
) -> None:
    folder = _copy(hub, tmp_path)
    for number in range(20):
        (folder / f"other-{number}.safetensors").write_bytes(b"no header")
    hub.add("org/more", folder)
    with metadata_place("org/more", "target") as place:
        assert list(place.remote) == ["model.safetensors"]
        with Checkpoint.open(place, role="target") as checkpoint:
            assert "other-7.safetensors" in checkpoint.folder_names()
    assert hub.sent("other-7.safetensors") == 0


# --- tools ----------------------------------------------------------------------------------------


def _resolve(wanted: str, metadata: bool, role: str = "target") -> None:
    if metadata:
        with metadata_place(wanted, role):
            pass
    else:
        checkpoint_folder(wanted, role)


def _copy(hub: Hub, tmp_path: Path) -> Path:
    source = hub.folders[hub.models[TARGET]["main"]]
    return Path(shutil.copytree(source, tmp_path / "copy"))


def _large(hub: Hub, pair: tuple[Path, Path], folder: Path) -> Path:
    """The target with a tensor of four megabytes that nobody needs."""
    made = Path(shutil.copytree(pair[0], folder / "large"))
    values = np.arange(1024 * 1024, dtype=np.float32).reshape(1024, 1024)
    edit_tensors(made, lambda tensors: tensors.update({"big.weight": values}))
    hub.add("org/large", made)
    return made


def _sharded(tmp_path: Path) -> Path:
    return write_target(tmp_path / "sharded", **SMALL, shards=2)
