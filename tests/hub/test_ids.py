"""Names of models, and what the folders of a hub's cache tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.hub import HubId, parse_id
from edgecc.hub_layout import Origin, checkpoint_name, origin_of
from helpers.broken_pairs import write_pair
from helpers.checkpoints import hub_layout

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("RadixArk/Qwen3.8-27B-NVFP4", HubId("RadixArk/Qwen3.8-27B-NVFP4")),
        ("org/name@main", HubId("org/name", "main")),
        ("org/name@refs/pr/7", HubId("org/name", "refs/pr/7")),
        (f"org/name@{COMMIT}", HubId("org/name", COMMIT)),
        ("org/name@v1.0+x", HubId("org/name", "v1.0+x")),
    ],
)
def test_names(text: str, expected: HubId) -> None:
    assert parse_id(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        *("name", "./org/name", "/org/name", "org/name/", "a/b/c", "org/", "/x", "", "org/na me"),
        *(
            "org/name@",
            "org/name@a b",
            "org@v1/name",
            "org/name@../../x",
            "org/name@/etc/passwd",
            "org/name@v1/",
            "org/name@a//b",
            "../name",
            "org/..",
            "org/a--b",
            "-a/b",
            "a/b.",
            "a./b",
            "a/b.git",
        ),
        *("org/" + "x" * 100, "org/n\u00e4me", "org/name\n", "org/name@\u0661"),
    ],
)
def test_paths_and_nonsense(text: str) -> None:
    assert parse_id(text) is None


@given(st.text(alphabet="aZ0._-/@", max_size=20))
def test_every_name_is_one_for_the_library(text: str) -> None:
    found = parse_id(text)
    if found is not None:
        validate_repo_id(found.repository)


def test_origins(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--a.name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert origin_of(snapshot) == Origin("org/a.name", COMMIT)
    assert checkpoint_name(snapshot) == "a.name"
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert origin_of(link) == Origin("org/a.name", COMMIT)
    for other in (snapshot.parent, snapshot.parent / "main", tmp_path / "x" / "snapshots" / COMMIT):
        assert origin_of(other) is None
        assert checkpoint_name(other) == other.name


# --- links of a cache; more of them are in tests/frontends/test_checkpoint.py ---------------------


def test_bytes_that_several_models_share(tmp_path: Path) -> None:
    """The library keeps equal files of several models once: links lead on to a common folder."""
    target, _ = write_pair(tmp_path)
    cache = tmp_path / "cache"
    snapshot = hub_layout(target, cache / "models--org--name")
    store = cache / "blobs" / "ab"
    store.mkdir(parents=True)
    weights = snapshot / "model.safetensors"
    blob = weights.parent / weights.readlink()
    blob.rename(store / "abcd")
    blob.symlink_to(Path("../../blobs/ab/abcd"))
    with pytest.raises(InputError, match="leads out of the checkpoint"):
        Checkpoint.open(snapshot, role="target")  # any folder could be called blobs
    (cache / "blobs" / ".huggingface-shared-blobs").write_text("1")
    with Checkpoint.open(snapshot, role="target") as checkpoint:
        assert checkpoint.read("model.norm.weight").size == 32
