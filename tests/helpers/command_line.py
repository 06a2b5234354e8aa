"""The `edgecc` command, in process and as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from edgecc.cli import main

SMALL: dict[str, Any] = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "intermediate": 32,
}
"""Arguments of `write_target` and `write_draft` for checkpoints that compile in no time."""

TAPS: dict[str, Any] = {"target_layers": 1, "target_layer_ids": (0,)}
"""What `write_draft` needs for a target of one layer."""


@dataclass(frozen=True)
class Result:
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line on standard error."""
        return self.err.rstrip("\n").rpartition("\n")[2]

    @property
    def id(self) -> str:
        """The id of the error in the last line; empty if there was none."""
        head, _, _ = self.last.partition("]")
        return head.removeprefix("edgecc: error[") if head.startswith("edgecc: error[") else ""


Command: TypeAlias = Callable[..., Result]


def in_process(capture: Any) -> Command:
    """A function that runs `main` with pytest's `capsys` or `capfd`."""

    def run(*arguments: object) -> Result:
        capture.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capture.readouterr()
        return Result(code, out, err)

    return run


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the import path of the tests."""
    path = os.pathsep.join(p for p in sys.path if p)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EDGECC_")}
    return {**kept, "PYTHONPATH": path, **changes}


def arguments_of(*arguments: object) -> list[str]:
    """The command line of `python -m edgecc`."""
    return [sys.executable, "-m", "edgecc", *(str(argument) for argument in arguments)]


def process(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> Result:
    """Run `python -m edgecc` to its end."""
    done = subprocess.run(
        arguments_of(*arguments), capture_output=True, env=env or environment(), cwd=cwd
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())
