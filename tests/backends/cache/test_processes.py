"""Several processes at once, and processes that are killed while they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cache_entries import Bench, key
from helpers.command_line import environment

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and locks of POSIX")

TESTS = str(Path(__file__).parents[2])

KILLED = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from helpers.cache_entries import Bench, key
bench = Bench(Path(sys.argv[1]))
moment = sys.argv[2]
original = getattr(os, moment)
def stop(*arguments):
    if moment == "rename":
        assert ".partial-" in str(arguments[0])
    print("now", flush=True)
    time.sleep(60)
setattr(os, moment, stop)
bench.put(key(), bytes(100_000))
"""

RACE = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from helpers.cache_entries import Bench, key
root, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
bench = Bench(root / f"own-{seed}", max_bytes=40_000)
from edgecc.backends.cache import ArtifactCache, Store
bench.cache = ArtifactCache(root / "cache", max_bytes=40_000, report=bench.reported.append)
store = Store(root / "cache")
hits = 0
print("ready", flush=True)
sys.stdin.readline()
for turn in range(rounds):
    name = draw.choice("abcd")
    content = name.encode() * 5000 + bytes([seed])  # builders need not give the same bytes
    what = draw.random()
    if what < 0.45:
        found = bench.get(key(name=name))
        assert found is None or (found[:-1], len(found)) == (content[:-1], 5001), "wrong bytes"
        hits += found is not None
    elif what < 0.85:
        assert bench.put(key(name=name), content)
    elif what < 0.95:
        store.prune(max_bytes=draw.choice([0, 6000, 40_000]))
    else:
        store.remove(store.path(key(name=name)))
assert bench.ids() == [], bench.reported
print(hits)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments), TESTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )


@pytest.mark.parametrize("moment", ["fsync", "rename"])
def test_killed_while_writing(tmp_path: Path, moment: str) -> None:
    process = start(KILLED, tmp_path, moment)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    bench = Bench(tmp_path)
    living = bench.store.prune(max_bytes=10**9, everything=True)
    assert (living.leftovers, living.removed) == (0, ())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = bench.names() - {"CACHEDIR.TAG"}
    assert left.startswith(".partial-")
    assert bench.get(key()) is None
    assert bench.store.scan() == []
    done = bench.store.prune(max_bytes=10**9)
    assert done.leftovers == 1
    assert done.freed_bytes >= 100_000
    assert bench.names() == {"CACHEDIR.TAG"}
    assert bench.reported == []


def test_the_next_put_cleans_up(tmp_path: Path) -> None:
    process = start(KILLED, tmp_path, "rename")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    bench = Bench(tmp_path)
    assert bench.put(key())
    assert bench.names() == {"CACHEDIR.TAG", key().digest}


def test_everybody_at_once(tmp_path: Path) -> None:
    """Four processes get, put, prune and remove the same few keys; nobody ever gets wrong bytes."""
    processes = [start(RACE, tmp_path, seed, 60) for seed in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers = [process.communicate("go\n") for process in processes]
    assert [(p.returncode, err) for p, (_, err) in zip(processes, answers, strict=True)] == [
        (0, "")
    ] * 4
    assert sum(int(out) for out, _ in answers) > 0
    left = set(os.listdir(tmp_path / "cache")) - {"CACHEDIR.TAG"}
    assert left <= {key(name=name).digest for name in "abcd"}
