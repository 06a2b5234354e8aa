"""Two `edgecc serve` that want the same bundle of one cache; one of them may be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from edgecc.backends.cache import BundleStore
from helpers.checkpoints import write_target
from helpers.command_line import SMALL, process
from helpers.serving import Served, served

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and locks of POSIX")


def stopped_while_it_compiles(server: Served, folder: Path) -> None:
    """Stop a server as soon as a file of its bundle is there."""
    deadline = time.monotonic() + 120
    while not any(path.is_file() for path in folder.glob("*.partial/*/.*/**/*")):
        assert server.process.poll() is None, server.lines
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(server.process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_one_compiles_and_the_other_waits(tmp_path: Path, then: signal.Signals) -> None:
    target = write_target(tmp_path / "target", **SMALL)
    folder = tmp_path / "cache" / "bundles"
    options = (target, "--cache-dir", tmp_path / "cache", "--max-model-len", 64)
    with served(*options) as first:
        stopped_while_it_compiles(first, folder)
        with served(*options) as second:
            second.wait_for("waiting for it")
            os.kill(first.process.pid, then)
            servers = [second] if then == signal.SIGKILL else [first, second]
            names = {
                httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] for server in servers
            }
            (found,) = BundleStore(tmp_path / "cache").scan()
            assert process("cache", "prune", "--all", "--cache-dir", tmp_path / "cache").code == 0
            assert found.path.is_dir()  # it is served

    assert found.in_use
    assert names == {"target"}
    assert [path.name for path in folder.iterdir()] == [found.path.name]
    compiled = [any("compiling" in line for line in s.lines) for s in (first, second)]
    assert compiled == [True, then == signal.SIGKILL]
    verified = process("verify", found.path)
    assert verified.code == 0, verified.err
    (row,) = process("cache", "ls", "--cache-dir", tmp_path / "cache").out.splitlines()
    assert row.endswith("just now  bundle target for cpu")
    listed = process("cache", "ls", "--json", "--cache-dir", tmp_path / "cache").out
    (entry,) = json.loads(listed)["entries"]
    assert (entry["bundle"], entry["in_use"]) == (str(found.path), False)
    assert process("cache", "prune", "--all", "--cache-dir", tmp_path / "cache").code == 0
    assert list(folder.iterdir()) == []
