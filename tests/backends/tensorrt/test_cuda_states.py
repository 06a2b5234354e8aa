"""States between calls, with CUDA alone: zeroed, written to the other place, in captured graphs.

An engine that is made of copies takes the place of a plan, so that the runtime's own part runs on
any GPU (`pytest -m gpu`) as on a simulated one. Its state remembers the last token and the one
before, and beside them the counts it was passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgecc.backends.base import Role
from edgecc.backends.interface import Interface
from edgecc.backends.tensorrt.cuda import Cuda, Stream, load_runtime
from edgecc.backends.tensorrt.device import DeviceState
from edgecc.backends.tensorrt.executable import TrtExecutable
from edgecc.backends.tensorrt.rounds import INTEGER, TrtRounds
from helpers.simulated_cuda import SimulatedCuda

ROWS = 4
"""Rows of a call, numbers of a state, and rows of a log."""

COUNTS = ("cache_length", "replay_length", "commit_length")
SHAPES: Mapping[str, tuple[int, ...]] = {
    "token_ids": (1, ROWS),
    "logit_rows": (ROWS,),
    "state": (1, ROWS),
    "log": (1, ROWS, 1),
    **dict.fromkeys(COUNTS, (1,)),
}
OUTPUTS = {"chosen": "chosen_tokens", "state_after": "state", "log_after": "state_log"}
ALIASES = {"state_after": "state", "log_after": "log"}


def port(name: str, role: str, shape: tuple[int, ...], **more: object) -> dict[str, Any]:
    return {"name": name, "role": role, "dtype": "i64", "shape": shape, **more}


def shape_of(output: str) -> tuple[int, ...]:
    return SHAPES[ALIASES.get(output, "state")]


ENTRY = {
    "inputs": [port(n, "state_log" if n == "log" else n, s) for n, s in SHAPES.items()],
    "outputs": [
        port(n, role, shape_of(n), value=n, alias=ALIASES.get(n)) for n, role in OUTPUTS.items()
    ],
}
STEP = {
    "graph": "target",
    "inputs": {n: n for n in SHAPES},
    "outputs": {n: n for n in OUTPUTS},
}


class Copies:
    """A plan and its context: `state_after` is token, token before, rows replayed, committed."""

    scratch_bytes = last_profile = 0

    def __init__(self) -> None:
        self.stream: Stream
        self.places: dict[str, int] = {}

    def largest(self, name: str) -> tuple[int, ...]:
        return SHAPES[name]

    def profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 0

    def context(self, *_: int) -> Copies:
        made = Copies()
        made.stream = self.stream
        return made

    def set_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        assert dict(shapes) == SHAPES
        return {name: shape_of(name) for name in OUTPUTS}

    def bind(self, addresses: Mapping[str, int]) -> None:
        self.places.update(addresses)

    def capturable(self, stream: int) -> bool:
        return True

    def enqueue(self, stream: int) -> None:
        at, copy = self.places, self.stream.copy
        after = at["state_after"]
        copy(after, at["token_ids"], INTEGER)
        copy(after + INTEGER, at["state"], INTEGER)
        copy(after + 2 * INTEGER, at["replay_length"], INTEGER)
        copy(after + 3 * INTEGER, at["commit_length"], INTEGER)
        copy(at["log_after"], at["token_ids"], ROWS * INTEGER)
        copy(at["chosen"], after, ROWS * INTEGER)


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def parts(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The executable of such an engine, and rounds over it."""
    pytest.importorskip("cuda.bindings", reason="pip install cuda-bindings")
    runtime = load_runtime()
    cuda = Cuda(runtime if request.param == "real" else SimulatedCuda(runtime))
    plan = Copies()
    state = DeviceState(cuda, {"target": plan})  # type: ignore[dict-item]
    plan.stream = state.stream
    engines = {"target": {"outputs": ENTRY["outputs"]}}
    target = TrtExecutable(state, [STEP], engines, Interface(ENTRY), min_rows=ROWS)
    rounds = TrtRounds(state, target, None)
    yield SimpleNamespace(target=target, rounds=rounds, state=state)
    rounds.close()
    state.close()


def call(parts: SimpleNamespace, token: int, start: int, replay: int, commit: int) -> list[int]:
    inputs = {
        Role.TOKEN_IDS: [[token] * ROWS],
        Role.LOGIT_ROWS: range(ROWS),
        Role.CACHE_LENGTH: [start],
        Role.REPLAY_LENGTH: [replay],
        Role.COMMIT_LENGTH: [commit],
    }
    arrays = {role: np.array(values, dtype=np.int64) for role, values in inputs.items()}
    found: list[int] = parts.target.run(arrays, [Role.CHOSEN_TOKENS])[Role.CHOSEN_TOKENS][
        0
    ].tolist()
    return found


def test_a_call_reads_what_the_one_before_wrote(parts) -> None:
    before = 0
    for start, token in enumerate((5, 9, 2, 7)):
        assert call(parts, token, start, start % 3, 1) == [token, before, start % 3, 1]
        before = token


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_rounds_and_their_graphs(parts, length) -> None:
    """Sequences end in either place; the next one begins with zeros all the same."""
    for sequence in range(3):
        before = 0
        for start in range(length):
            token = 100 * sequence + start + 1
            found = parts.rounds.run(np.array([token]), start, 0, 0, replay=start % ROWS)
            assert found.chosen.tolist() == [token, before, start % ROWS, 1]
            before = token
    works = parts.rounds._works
    assert set(works) == {(0, 0), (0, 1)}
    assert all(work.graph is not None for work in works.values())


def test_calls_and_rounds_in_turn(parts) -> None:
    before = 0
    for start, token in enumerate(range(11, 31)):
        if start % 3:
            found = parts.rounds.run(np.array([token]), start, 0, 0).chosen.tolist()
        else:
            found = call(parts, token, start, 0, 1)
        assert found[:2] == [token, before]
        before = token
