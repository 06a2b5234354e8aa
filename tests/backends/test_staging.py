"""Processes that are killed in the middle, several at once, and disks that refuse.

Each test runs a small program that makes bundles, in a process of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import edgecc.errors
from edgecc.backends import staging
from edgecc.backends.bundle import Bundle
from edgecc.backends.staging import StagedDirectory
from edgecc.errors import BundleError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and locks of POSIX")

EXAMPLE = Path(__file__).parent / "bundle.example.json"

PROGRAM = """
import json, os, resource, select, signal, sys
from pathlib import Path
from edgecc.backends.bundle_writer import BundleWriter
from edgecc.errors import EdgeccError

example, out, mark, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].encode(), sys.argv[4:]

def pause(moment):
    if moment in how:
        print(moment, flush=True)
        # A signal that arrives just before a read without time limit would wait for the read.
        while not select.select([sys.stdin], [], [], 0.02)[0]:
            pass
        os.read(0, 1)

def make():
    with BundleWriter(out) as writer:
        writer.write_file("tokenizer/tokenizer.json", b"{}")
        writer.write_file("weights/cpu.safetensors", b"weights")
        pause("writing")
        (writer.directory / "cpu-target.onnx").write_bytes(mark)
        (writer.directory / "cpu-draft.onnx").write_bytes(b"draft")
        if "large" in how:
            with (writer.directory / "large").open("wb") as file:
                for _ in range(64):
                    file.write(bytes(65536))
        pause("written")
        rename, moments = os.rename, ["moving", "moved"]
        def slow(source, target):
            rename(source, target)
            if moments:
                pause(moments.pop(0))
        os.rename = slow
        writer.finish(json.loads(example.read_text()))
        os.rename = rename

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` hands down an ignored one
if "limit" in how:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
if "handled" in how:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))
if "ignored" in how:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    for _ in range(20 if "repeat" in how else 1):
        make()
except EdgeccError as error:
    print(error.id)
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def command(out: Path, mark: str, *how: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(EXAMPLE), str(out), mark, *how]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(edgecc.errors.__file__).parents[1])}


@contextmanager
def started(out: Path, mark: str, *how: str) -> Iterator[subprocess.Popen[str]]:
    """A running program; it is killed at the end if it still runs."""
    with subprocess.Popen(
        command(out, mark, *how),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def reaches(process: subprocess.Popen[str], moment: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{moment}\n"


def go_on(process: subprocess.Popen[str]) -> int:
    """Let a waiting program run to its end; answer its exit code."""
    process.communicate("\n", timeout=60)
    return process.returncode


def make(out: Path, mark: str) -> None:
    subprocess.run(command(out, mark), env=environment(), check=True)


def mark_of(out: Path) -> str:
    bundle = Bundle.open(out)
    bundle.verify_hashes()
    return bundle.file("cpu-target.onnx").read_text()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
@pytest.mark.parametrize("moment", ["writing", "written", "moving"])
def test_interrupted_program_cleans_up(
    tmp_path: Path, number: signal.Signals, code: int, moment: str
) -> None:
    make(tmp_path / "out", "old")

    with started(tmp_path / "out", "new", moment) as process:
        reaches(process, moment)
        process.send_signal(number)
        assert process.wait(60) == code

    assert mark_of(tmp_path / "out") == "old"
    assert names(tmp_path) == ["out"]
    make(tmp_path / "out", "new")
    assert mark_of(tmp_path / "out") == "new"


def test_interrupted_first_program_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path / "a" / "out", "new", "written") as process:
        reaches(process, "written")
        process.terminate()
        assert process.wait(60) == 143

    assert names(tmp_path) == []


@pytest.mark.parametrize("moment", ["writing", "written"])
def test_killed_program_leaves_nothing_that_loads(tmp_path: Path, moment: str) -> None:
    with started(tmp_path / "out", "dead", moment) as process:
        reaches(process, moment)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL

    assert len(names(tmp_path)) == 1
    with pytest.raises(BundleError):
        Bundle.open(tmp_path / "out")
    with pytest.raises(BundleError):
        Bundle.open(next(tmp_path.iterdir()) / "new")
    make(tmp_path / "out", "new")
    assert mark_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def test_killed_program_leaves_the_old_bundle(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")

    with started(tmp_path / "out", "new", "written") as process:
        reaches(process, "written")
        process.kill()

    assert mark_of(tmp_path / "out") == "old"
    make(tmp_path / "out", "new")
    assert mark_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def test_old_bundle_comes_back_after_a_kill_between_the_renames(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    with started(tmp_path / "out", "dead", "moving") as process:
        reaches(process, "moving")
        process.kill()
    assert names(tmp_path) != ["out"]

    with started(tmp_path / "out", "new", "written") as process:
        reaches(process, "written")
        assert mark_of(tmp_path / "out") == "old"
        assert go_on(process) == 0

    assert mark_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def test_kill_after_the_renames_keeps_the_new_bundle(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    with started(tmp_path / "out", "new", "moved") as process:
        reaches(process, "moved")
        process.kill()
    assert mark_of(tmp_path / "out") == "new"

    with started(tmp_path / "out", "newer", "written") as process:
        reaches(process, "written")
        assert mark_of(tmp_path / "out") == "new"
        process.terminate()
        process.wait(60)

    assert mark_of(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def test_remains_of_others_are_left_alone(tmp_path: Path) -> None:
    others = [
        ".other.partial-1-00000000",
        ".out.partial-x-00000000",
        ".out.partial-1-0",
        ".out.partial-1-00000000.bak",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.partial-1-0000000f").write_text("a file")
    (tmp_path / ".out.partial-1-00000001").symlink_to(".other.partial-1-00000000")
    before = names(tmp_path)

    make(tmp_path / "out", "new")

    assert names(tmp_path) == sorted([*before, "out"])


@pytest.mark.parametrize("kind", ["no module", "no locks"])
def test_without_locks_nothing_but_remains_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    make(tmp_path / "out", "old")
    with started(tmp_path / "out", "dead", "written") as process:
        reaches(process, "written")
        process.kill()
    remains = names(tmp_path)
    if kind == "no module":
        monkeypatch.setattr(staging, "fcntl", None)
    else:
        monkeypatch.setattr(staging.fcntl, "flock", flock)

    with StagedDirectory(tmp_path / "out", lambda: None) as stage:
        (stage.directory / "file").touch()
        stage.publish()

    assert names(tmp_path / "out") == ["file"]
    assert names(tmp_path) == remains


def test_handlers_of_the_program_come_first(tmp_path: Path) -> None:
    with started(tmp_path / "out", "new", "written", "handled", "ignored") as process:
        reaches(process, "written")
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(60) == 99

    assert names(tmp_path) == []


def test_handlers_are_taken_back(tmp_path: Path) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]

    with StagedDirectory(tmp_path / "out", lambda: None) as stage:
        during = signal.getsignal(signal.SIGTERM)
        stage.publish()

    assert during is not signal.SIG_DFL
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == before


def test_other_threads_leave_signals_alone(tmp_path: Path) -> None:
    seen: list[object] = []

    def work() -> None:
        with StagedDirectory(tmp_path / "out", lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_last_of_two_programs_wins(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(out, "one", "written") as one, started(out, "two", "written") as two:
        reaches(one, "written")
        reaches(two, "written")
        assert go_on(two) == 0
        assert mark_of(out) == "two"
        assert go_on(one) == 0

    assert mark_of(out) == "one"
    assert names(tmp_path) == ["out"]


def test_program_starting_while_another_moves_waits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    with started(out, "one", "moving") as one:
        reaches(one, "moving")  # the old bundle is away, the new one not there yet
        with started(out, "two", "written") as two:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
            reaches(two, "written")
            assert mark_of(out) == "one"
            assert go_on(two) == 0
        one.wait(60)

    assert mark_of(out) == "two"
    assert names(tmp_path) == ["out"]


def test_programs_that_write_again_and_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(out, "one", "repeat") as one, started(out, "two", "repeat") as two:
        for process in (one, two):
            _, problems = process.communicate(timeout=120)
            assert (process.returncode, problems) == (0, "")

    assert mark_of(out) in ("one", "two")
    assert names(tmp_path) == ["out"]


# --- disks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True], ids=["first", "again"])
def test_file_size_limit(tmp_path: Path, old: bool) -> None:
    if old:
        make(tmp_path / "out", "old")
    before = names(tmp_path)

    answer = subprocess.run(
        command(tmp_path / "out", "new", "large", "limit"),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (answer.returncode, answer.stdout) == (6, "bundle/disk-full\n")
    assert names(tmp_path) == before
    if old:
        assert mark_of(tmp_path / "out") == "old"


def on_own_mount(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount things: in name spaces of its own, they end with it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    own = [unshare, "--user", "--map-root-user", "--mount"]
    probe = subprocess.run(
        [*own, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if probe.returncode:
        pytest.skip("may not mount here")
    return subprocess.run(
        [
            *own,
            "sh",
            "-euc",
            script,
            "sh",
            str(tmp_path),
            *command(tmp_path / "out", "new", "large"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_full_disk(tmp_path: Path) -> None:
    script = """
        disk=$1; shift
        mount -t tmpfs -o size=2m tmpfs "$disk"
        set +e; "$@"; echo "exit $?"; ls -A "$disk"
        mount -o remount,size=32m "$disk"
        "$@"; echo "exit $?"; ls -A "$disk"
    """
    answer = on_own_mount(tmp_path, script)

    assert answer.stdout == "bundle/disk-full\nexit 6\nexit 0\nout\n", answer.stderr
    assert "No space left on device" in answer.stderr
    assert "bytes free" in answer.stderr


def test_read_only_disk(tmp_path: Path) -> None:
    script = """
        disk=$1; shift
        mount -t tmpfs -o ro tmpfs "$disk"
        set +e; "$@"; echo "exit $?"; ls -A "$disk"
    """
    answer = on_own_mount(tmp_path, script)

    assert answer.stdout == "bundle/no-permission\nexit 6\n", answer.stderr
    assert "Read-only file system" in answer.stderr


def test_output_is_a_mount_point(tmp_path: Path) -> None:
    script = """
        disk=$1; shift
        mkdir "$disk/out"; mount -t tmpfs tmpfs "$disk/out"
        set +e; "$@"; echo "exit $?"; ls -A "$disk"
    """
    answer = on_own_mount(tmp_path, script)

    assert answer.stdout == "bundle/output-in-use\nexit 2\nout\n", answer.stderr
