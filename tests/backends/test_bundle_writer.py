"""Making bundles: what they contain, and what may be replaced."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.backends.bundle import Bundle
from edgecc.backends.bundle_writer import BundleWriter
from edgecc.backends.weight_file import TensorSpec, WeightFileWriter
from edgecc.errors import InternalError, ResourceError, UsageError

EXAMPLE: dict[str, Any] = json.loads(
    (Path(__file__).parent / "bundle.example.json").read_text("utf-8")
)
E = TypeVar("E", bound=BaseException)

FILLED_IN = ("format", "version", "files")
MANIFEST = {key: value for key, value in EXAMPLE.items() if key not in FILLED_IN}

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def fill(writer: BundleWriter, mark: bytes = b"target") -> None:
    writer.write_file("tokenizer/tokenizer.json", b"{}")
    writer.write_file("weights/cpu.safetensors", b"weights")
    (writer.directory / "cpu-target.onnx").write_bytes(mark)
    (writer.directory / "cpu-draft.onnx").write_bytes(b"draft")


def make(out: Path, mark: bytes = b"target", *, force: bool = False) -> Bundle:
    with BundleWriter(out, force=force) as writer:
        fill(writer, mark)
        return writer.finish(MANIFEST)


def tree(root: Path) -> dict[str, bytes | str]:
    """Everything below `root`: names, contents, targets of links."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = path.read_bytes() if path.is_file() else "directory"
    return found


def mark_of(out: Path) -> bytes:
    bundle = Bundle.open(out)
    bundle.verify_hashes()
    return bundle.file("cpu-target.onnx").read_bytes()


def fails(
    kind: type[E],
    out: Path,
    act: Callable[[BundleWriter], object] = lambda writer: None,
    *,
    force: bool = False,
) -> E:
    """Make a bundle, doing `act` just before the end, and expect an exception."""

    def attempt() -> None:
        with BundleWriter(out, force=force) as writer:
            fill(writer, b"new")
            act(writer)
            writer.finish(MANIFEST)

    with pytest.raises(kind) as caught:
        attempt()
    return caught.value


def raises(error: BaseException | type[BaseException]) -> Callable[[BundleWriter], object]:
    def act(writer: BundleWriter) -> None:
        raise error

    return act


# --- what is written --------------------------------------------------------------------------


def test_bundle_opens_and_holds_what_was_given(tmp_path: Path) -> None:
    bundle = make(tmp_path / "out")

    assert bundle.path == tmp_path / "out"
    assert bundle.manifest == EXAMPLE
    assert Bundle.open(tmp_path / "out") == bundle
    bundle.verify_hashes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_manifest_text(tmp_path: Path) -> None:
    make(tmp_path)

    expected = json.dumps(EXAMPLE, sort_keys=True, indent=2) + "\n"
    assert (tmp_path / "bundle.json").read_bytes() == expected.encode("ascii")


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path / "one")
    with BundleWriter(tmp_path / "elsewhere" / "zwei") as writer:
        (writer.directory / "cpu-draft.onnx").write_bytes(b"draft")
        (writer.directory / "cpu-target.onnx").write_bytes(b"target")
        writer.write_file("weights/cpu.safetensors", b"weights")
        writer.write_file("tokenizer/tokenizer.json", b"{}")
        writer.finish(dict(reversed(MANIFEST.items())))

    assert tree(tmp_path / "one") == tree(tmp_path / "elsewhere" / "zwei")


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        make(tmp_path / "out")
    finally:
        os.umask(old)

    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "bundle.json").stat().st_mode & 0o777 == 0o640


def test_weight_file_with_a_known_digest(tmp_path: Path) -> None:
    name = "weights/extra.safetensors"
    with BundleWriter(tmp_path / "out") as writer:
        fill(writer)
        spec = TensorSpec("w", "F32", (1,))
        with WeightFileWriter(writer.new_path(name), [spec]) as file:
            file.write("w", b"1234")
        written = file.finish()
        writer.add_file(name, sha256=written.sha256, nbytes=written.bytes)
        bundle = writer.finish(MANIFEST)

    bundle.verify_hashes()
    assert bundle.manifest["files"][name] == {"bytes": written.bytes, "sha256": written.sha256}


def test_known_digests_are_not_computed_again(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        fill(writer)
        writer.add_file("cpu-target.onnx", sha256="0" * 64, nbytes=6)
        bundle = writer.finish(MANIFEST)

    assert bundle.manifest["files"]["cpu-target.onnx"]["sha256"] == "0" * 64


def test_copy_follows_links_and_leaves_the_source_alone(tmp_path: Path) -> None:
    model = tmp_path / "modèle 模型 (v1)"
    model.mkdir()
    (model / "blob").write_bytes(b"{1}")
    (model / "tokenizer.json").symlink_to("blob")
    (model / "blob").chmod(0o444)
    before = tree(model)

    with BundleWriter(tmp_path / "out") as writer:
        fill(writer)
        writer.copy_file(model / "tokenizer.json", "tokenizer/copy.json")
        bundle = writer.finish(MANIFEST)

    copied = bundle.file("tokenizer/copy.json")
    assert not copied.is_symlink()
    assert copied.read_bytes() == b"{1}"
    assert copied.stat().st_mode & 0o200
    assert bundle.manifest["files"]["tokenizer/copy.json"] == {
        "bytes": 3,
        "sha256": hashlib.sha256(b"{1}").hexdigest(),
    }
    assert tree(model) == before


def test_copy_of_a_missing_file(tmp_path: Path) -> None:
    error = fails(
        ResourceError,
        tmp_path / "out",
        lambda writer: writer.copy_file(tmp_path / "absent", "tokenizer/copy.json"),
    )

    assert f"cannot read {tmp_path / 'absent'}" in str(error)


@pytest.mark.parametrize("name", ["../up", "/root", "bundle.json", "", "a\\b"])
def test_unsafe_names_are_our_bug(tmp_path: Path, name: str) -> None:
    error = fails(InternalError, tmp_path / "out", lambda writer: writer.write_file(name, b""))

    assert error.id == "bundle/unsafe-path"
    assert tree(tmp_path) == {}


def twice(writer: BundleWriter) -> None:
    writer.write_file("weights/cpu.safetensors", b"")


def link(writer: BundleWriter) -> None:
    (writer.directory / "link").symlink_to("cpu-target.onnx")


def link_to_directory(writer: BundleWriter) -> None:
    (writer.directory / "link").symlink_to("weights")


def pipe(writer: BundleWriter) -> None:
    os.mkfifo(writer.directory / "pipe")


def lost(writer: BundleWriter) -> None:
    writer.add_file("weights/lost", sha256="0" * 64, nbytes=0)


def changed(writer: BundleWriter) -> None:
    writer.new_path("weights/cpu.safetensors").write_bytes(b"more weights")


def own_manifest(writer: BundleWriter) -> None:
    (writer.directory / "bundle.json").touch()


@pytest.mark.parametrize(
    ("mistake", "id"),
    [
        (twice, "bundle/file-exists"),
        (link, "bundle/not-a-file"),
        (link_to_directory, "bundle/not-a-file"),
        (pipe, "bundle/not-a-file"),
        (lost, "bundle/file-lost"),
        (changed, "bundle/file-changed"),
        (own_manifest, "bundle/unsafe-path"),
    ],
)
def test_mistakes_of_a_backend(
    tmp_path: Path, mistake: Callable[[BundleWriter], None], id: str
) -> None:
    assert fails(InternalError, tmp_path / "out", mistake).id == id
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"limits": None},
        {"decisions": ["a", 1]},
        {"draft": float("nan")},
        {"shared": {1, 2}},
        {"weights": {"lm_head": {**EXAMPLE["weights"]["lm_head"], "file": "weights/none"}}},
    ],
)
def test_manifest_that_breaks_the_schema_is_our_bug(
    tmp_path: Path, change: dict[str, object]
) -> None:
    error = fails(
        InternalError, tmp_path / "out", lambda writer: writer.finish({**MANIFEST, **change})
    )

    assert error.id == "bundle/invalid-manifest"
    assert tree(tmp_path) == {}


def test_tuples_become_lists(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        fill(writer)
        bundle = writer.finish({**MANIFEST, "decisions": ("one", "two")})

    assert bundle.manifest["decisions"] == ["one", "two"]
    assert bundle == Bundle.open(tmp_path / "out")


def test_block_without_finish(tmp_path: Path) -> None:
    writer = BundleWriter(tmp_path / "out")
    writer.__enter__()
    fill(writer)

    with pytest.raises(InternalError) as caught:
        writer.__exit__(None, None, None)

    assert caught.value.id == "bundle/not-finished"
    assert tree(tmp_path) == {}


NAMES = st.lists(st.sampled_from(["a", "b", "ü 模", "c.onnx"]), min_size=1, max_size=3)
FILES = st.dictionaries(NAMES.map("/".join), st.binary(max_size=20), max_size=5).filter(
    # No name is a directory of another.
    lambda files: not any(b.startswith(f"{a}/") for a in files for b in files)
)


@settings(deadline=None)  # disks may be slow
@given(files=FILES, known=st.data())
def test_any_files_are_listed(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], known: Any
) -> None:
    out = tmp_path_factory.mktemp("any") / "out"
    # Waiting for the disk takes longer than everything else here.
    with patch.object(os, "fsync"), BundleWriter(out) as writer:
        fill(writer)
        for name, content in files.items():
            if known.draw(st.booleans()):
                writer.write_file(name, content)
            else:
                writer.new_path(name).write_bytes(content)
        writer.finish(MANIFEST)

    bundle = Bundle.open(out)
    bundle.verify_hashes()
    assert bundle.manifest["files"].keys() == EXAMPLE["files"].keys() | files.keys()
    assert {name: bundle.file(name).read_bytes() for name in files} == files


# --- what is replaced -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "modèle 模型 (v1)", "a[b]*?", "-o", "x" * 200])
def test_names_of_the_destination(tmp_path: Path, name: str) -> None:
    make(tmp_path / name, b"one")
    make(tmp_path / name, b"two")

    assert mark_of(tmp_path / name) == b"two"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_missing_parents_are_created(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b" / "out")

    assert mark_of(tmp_path / "a" / "b" / "out") == b"target"


def test_created_parents_are_removed_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    fails(ZeroDivisionError, tmp_path / "a" / "b" / "c" / "out", raises(ZeroDivisionError))

    assert tree(tmp_path) == {"a": "directory"}


def test_relative_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    bundle = make(Path("sub/out"))

    assert bundle.path == tmp_path / "sub" / "out"


def test_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    make(tmp_path / "out")

    assert mark_of(tmp_path / "out") == b"target"


def test_link_to_a_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk" / "big").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/big")

    make(tmp_path / "out", b"one")
    make(tmp_path / "out", b"two")

    assert (tmp_path / "out").is_symlink()
    assert mark_of(tmp_path / "disk" / "big") == b"two"


def test_link_to_nothing_makes_its_target(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("later")

    make(tmp_path / "out")

    assert mark_of(tmp_path / "later") == b"target"


def test_bundle_is_replaced_as_a_whole(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        fill(writer, b"old")
        writer.write_file("only/in/the/old", b"")
        writer.finish(MANIFEST)

    make(tmp_path / "out", b"new")

    assert mark_of(tmp_path / "out") == b"new"
    assert not (tmp_path / "out" / "only").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_old_bundle_loads_until_the_end(tmp_path: Path) -> None:
    make(tmp_path / "out", b"old")

    with BundleWriter(tmp_path / "out") as writer:
        fill(writer, b"new")
        assert mark_of(tmp_path / "out") == b"old"
        writer.finish(MANIFEST)
        assert mark_of(tmp_path / "out") == b"new"


@pytest.mark.parametrize(
    "old", [{"version": 99}, {"limits": None}, {"files": None}], ids=["newer", "damaged", "files"]
)
def test_bundle_that_does_not_open_is_ours_all_the_same(
    tmp_path: Path, old: dict[str, object]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bundle.json").write_text(json.dumps(EXAMPLE | old))

    make(tmp_path / "out")

    assert mark_of(tmp_path / "out") == b"target"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "text"},
        {"config.json": "{}", "model.safetensors": ""},
        {"bundle.json": "{}"},
        {"bundle.json": '{"format": "edgecc-bundle"', "work": ""},
        {".git/HEAD": "ref"},
    ],
)
def test_foreign_directory_is_never_touched(
    tmp_path: Path, files: dict[str, str], force: bool
) -> None:
    for name, content in files.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    before = tree(tmp_path)

    error = fails(UsageError, tmp_path / "out", force=force)

    assert error.id == "bundle/foreign-directory"
    assert error.exit_code == 2
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["notes.txt", "weights/mine/notes.txt"])
def test_own_files_in_a_bundle_need_force(tmp_path: Path, name: str) -> None:
    make(tmp_path / "out", b"old")
    path = tmp_path / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = tree(tmp_path)

    error = fails(UsageError, tmp_path / "out")

    assert error.id == "bundle/foreign-files"
    assert repr(name) in str(error)
    assert "--force" in str(error)
    assert tree(tmp_path) == before

    make(tmp_path / "out", b"new", force=True)
    assert mark_of(tmp_path / "out") == b"new"
    assert not path.exists()


def test_own_link_in_a_bundle_needs_force(tmp_path: Path) -> None:
    make(tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "out" / "link").symlink_to("../elsewhere")

    assert fails(UsageError, tmp_path / "out").id == "bundle/foreign-files"
    make(tmp_path / "out", force=True)
    assert (tmp_path / "elsewhere" / "file").exists()


def test_files_that_arrive_meanwhile_are_not_removed(tmp_path: Path) -> None:
    def arrive(writer: BundleWriter) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("text")

    error = fails(UsageError, tmp_path / "out", arrive, force=True)

    assert error.id == "bundle/foreign-directory"
    assert tree(tmp_path) == {"out": "directory", "out/thesis.tex": b"text"}


def test_output_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"mine")

    assert fails(UsageError, tmp_path / "out", force=True).id == "bundle/output-is-a-file"
    assert tree(tmp_path) == {"out": b"mine"}


def test_parent_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")

    error = fails(ResourceError, tmp_path / "file" / "out")

    assert "Not a directory" in str(error)
    assert tree(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("out", [".", ".."])
def test_working_directory_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")

    error = fails(UsageError, Path(out))

    assert error.id == "bundle/output-in-use"
    assert tree(tmp_path) == {"a": "directory", "a/b": "directory"}


def test_mount_point_cannot_be_replaced() -> None:
    error = fails(UsageError, Path("/"))

    assert error.id == "bundle/output-in-use"
    assert "-o /bundle" in str(error)


def test_name_too_long(tmp_path: Path) -> None:
    assert fails(ResourceError, tmp_path / ("x" * 300)).exit_code == 6
    assert tree(tmp_path) == {}


# --- failures ---------------------------------------------------------------------------------


class Interrupted(BaseException):
    """What a signal handler may raise."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, Interrupted])
@pytest.mark.parametrize("old", [False, True], ids=["first", "again"])
def test_exception_leaves_everything_as_it_was(
    tmp_path: Path, error: type[BaseException], old: bool
) -> None:
    if old:
        make(tmp_path / "out", b"old")
    before = tree(tmp_path)

    fails(error, tmp_path / "out", raises(error))

    assert tree(tmp_path) == before


class Broken:
    """Stands in for a function: its n-th call raises, before or after the real one."""

    def __init__(
        self, real: Callable[..., Any], n: int, error: BaseException, *, after: bool
    ) -> None:
        self.real, self.left, self.error, self.after = real, n, error, after

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left:
            return self.real(*args, **options)
        if self.after:
            self.real(*args, **options)
        raise self.error


# The old bundle is moved away by the first rename, and the new one into its place by the second.
MOMENTS = [
    ("rename", 1, False),
    ("rename", 1, True),
    ("rename", 2, False),
    ("fsync", 1, False),
    ("fsync", 6, False),
]


@pytest.mark.parametrize(("call", "n", "after"), MOMENTS)
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_failure_while_publishing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    n: int,
    after: bool,
    kind: type[BaseException],
) -> None:
    make(tmp_path / "out", b"old")
    before = tree(tmp_path)
    broken = Broken(getattr(os, call), n, kind(errno.EIO, "I/O error"), after=after)

    fails(
        ResourceError if kind is OSError else kind,
        tmp_path / "out",
        lambda writer: monkeypatch.setattr(os, call, broken),
    )

    assert broken.left <= 0
    assert tree(tmp_path) == before
    assert mark_of(tmp_path / "out") == b"old"


def test_interrupt_right_after_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", b"old")
    broken = Broken(os.rename, 2, KeyboardInterrupt(), after=True)

    fails(
        KeyboardInterrupt,
        tmp_path / "out",
        lambda writer: monkeypatch.setattr(os, "rename", broken),
    )

    assert mark_of(tmp_path / "out") == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_old_bundle_that_cannot_be_put_back_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out", b"old")
    real = os.rename

    def once(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", refuse)
        real(source, target)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "I/O error")

    fails(ResourceError, tmp_path / "out", lambda writer: monkeypatch.setattr(os, "rename", once))
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()

    # The next writer puts it back, even if it fails itself.
    fails(ZeroDivisionError, tmp_path / "out", raises(ZeroDivisionError))
    assert mark_of(tmp_path / "out") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_in_a_library(tmp_path: Path, number: int) -> None:
    error = fails(ResourceError, tmp_path / "out", raises(OSError(number, os.strerror(number))))

    assert error.id == "bundle/disk-full"
    assert error.exit_code == 6
    assert "bytes free" in str(error)
    assert tree(tmp_path) == {}


def test_other_errors_of_a_library_are_not_explained_away(tmp_path: Path) -> None:
    absent = FileNotFoundError(errno.ENOENT, "No such file or directory", "checkpoint")

    assert fails(FileNotFoundError, tmp_path / "out", raises(absent)) is absent


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_parent_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)

    error = fails(ResourceError, tmp_path / "out")

    assert error.id == "bundle/no-permission"
    assert tree(tmp_path) == {}


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_read_only_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        assert fails(ResourceError, tmp_path / "out").id == "bundle/no-permission"
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_read_only_bundle_is_refused_at_the_start(tmp_path: Path) -> None:
    make(tmp_path / "out")
    (tmp_path / "out").chmod(0o555)
    try:
        with pytest.raises(ResourceError):
            BundleWriter(tmp_path / "out").__enter__()
    finally:
        (tmp_path / "out").chmod(0o755)


def test_writers_in_many_threads(tmp_path: Path) -> None:
    threads, rounds = 4, 8
    barrier = threading.Barrier(threads)
    errors: list[BaseException] = []

    def work(mark: bytes) -> None:
        try:
            for _ in range(rounds):
                with BundleWriter(tmp_path / "out") as writer:
                    fill(writer, mark)
                    manifest = copy.deepcopy(MANIFEST)
                    barrier.wait(60)
                    writer.finish(manifest)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    marks = [bytes([65 + i]) * 6 for i in range(threads)]
    workers = [threading.Thread(target=work, args=(mark,)) for mark in marks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert errors == []
    assert mark_of(tmp_path / "out") in marks
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
