"""Compiling into the cache is killed at any moment: the next one has a whole bundle, and no litter.

A process kills itself (SIGKILL) right before its n-th access to a file of the cache: opening,
making, renaming, removing. Imports take most of the time, so one process compiles undisturbed and
then forks another one for each moment.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from edgecc.backends.bundle import Bundle
from edgecc.backends.cache import BundleStore
from helpers.checkpoints import write_draft, write_target
from helpers.command_line import SMALL, TAPS, environment, process
from helpers.goldens import DRAFT, TARGET

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and locks of POSIX")

PROGRAM = """
import json, os, signal, sys
import edgecc
from pathlib import Path
from edgecc.bundle_cache import cached_bundle

calm, cache, target, draft = map(Path, sys.argv[1:5])

def compile(root, length=64, kill_at=-1):
    options = {"max_model_len": length, "prefill_chunk": 16, "verify": "none"}
    count = 0

    def access(event, arguments):
        nonlocal count
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        if not str(arguments[0]).startswith(str(root)):
            return
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    sys.addaudithook(access)
    with cached_bundle(
        root, target, draft, options,
        lambda out: edgecc.compile(target, draft, out=out, **options),
    ):
        print(json.dumps(count), flush=True)

compile(calm)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        compile(cache, *json.loads(line))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(json.dumps("killed" if os.WTERMSIG(status) == signal.SIGKILL else status), flush=True)
    elif status:
        print(json.dumps(f"status {status}"), flush=True)
"""


class Compiler:
    """Compiles into a cache, in processes of its own.

    Attributes:
        root: The cache.
        accesses: How often its files are accessed if all goes well.
        expected: What came of an undisturbed compile.
    """

    def __init__(self, root: Path, calm: Path, pipes: tuple[IO[str], IO[str]]) -> None:
        self.root = root
        self._in, self._out = pipes
        self.accesses: int = json.loads(self._out.readline())
        (self.expected,) = BundleStore(calm).scan()

    def run(self, *, length: int = 64, kill_at: int = -1) -> int | str:
        """`killed`, or how often files of the cache were accessed."""
        print(json.dumps([length, kill_at]), file=self._in, flush=True)
        answer: int | str = json.loads(self._out.readline())
        return answer

    def left(self) -> list[str]:
        """What lies there besides whole bundles."""
        store = BundleStore(self.root)
        names = set(os.listdir(store.directory)) if store.directory.exists() else set()
        return sorted(names - {found.path.name for found in store.scan()})

    def empty(self) -> None:
        """Remove all bundles: else there is nothing to compile."""
        for found in BundleStore(self.root).scan():
            assert BundleStore(self.root).remove(found.path)

    def check(self) -> Path:
        """Without a kill all is well; returns the bundle."""
        assert isinstance(self.run(), int)
        assert self.left() == []
        path = self.root / "bundles" / self.expected.path.name
        manifest = (path / "bundle.json").read_bytes()  # it has the hashes of all files
        assert manifest == (self.expected.path / "bundle.json").read_bytes()
        Bundle.open(path).verify_hashes()
        return path


@contextmanager
def compiler(folder: Path, target: Path, draft: Path) -> Iterator[Compiler]:
    calm, cache = folder / "calm", folder / "cache"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, (calm, cache, target, draft))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            yield Compiler(cache, calm, (running.stdin, running.stdout))
        finally:
            running.kill()


def check_moments(compiler: Compiler, moments: int) -> None:
    """Kill at so many moments, spread evenly, and go on in what the killed ones left."""
    chance = random.Random(1)
    times = [int((i + chance.random()) * compiler.accesses / moments) for i in range(moments)]
    chance.shuffle(times)
    for moment in times:
        compiler.empty()
        assert compiler.run(kill_at=moment) == "killed"
        assert len(compiler.left()) <= 1
        for found in BundleStore(compiler.root).scan():
            Bundle.open(found.path).verify_hashes()
    # What is left of one bundle goes when another one is compiled, too.
    assert isinstance(compiler.run(length=48), int)
    assert compiler.left() == []
    verified = process("verify", compiler.check())
    assert verified.code == 0, verified.err


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    target = write_target(tmp_path / "target", **SMALL)
    return target, write_draft(tmp_path / "draft", hidden=32, layers=1, **TAPS)


def test_killed_at_some_moments(tmp_path: Path, small: tuple[Path, Path]) -> None:
    with compiler(tmp_path, *small) as running:
        check_moments(running, 12)


@pytest.mark.slow
def test_killed_at_many_moments_with_the_shipped_pair(tmp_path: Path) -> None:
    with compiler(tmp_path, TARGET, DRAFT) as running:
        check_moments(running, 60)


def test_killed_while_a_damaged_bundle_is_replaced(
    tmp_path: Path, small: tuple[Path, Path]
) -> None:
    """At each of the last accesses: those that publish it and clean up."""
    with compiler(tmp_path, *small) as running:
        for back in range(1, 9):
            path = running.check()
            (path / "bundle.json").write_text("{", encoding="utf-8")
            assert running.run(kill_at=running.accesses - back) == "killed"
        running.check()
