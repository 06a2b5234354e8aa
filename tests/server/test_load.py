"""Many clients at once, some of whom leave: `edgecc serve` as a process, watched from outside.

`pytest -m slow -s tests/server/test_load.py` shows what it took.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.serving import Served, served

httpx = pytest.importorskip("httpx")
psutil = pytest.importorskip("psutil")

PROMPTS = ("def f(x):", "the", "import os\n", "class A:", "x = 1", "# " + "a long prompt " * 12)
SHORT = (1, 5, 20)
LENGTHS = (*SHORT, 60, 120)
GROWTH = 16 * 2**20
"""Bytes that a server may grow by under a load that it has seen before."""


@dataclass(frozen=True)
class Plan:
    """A request, and when its client leaves: after so many lines, or so many seconds."""

    prompt: str
    length: int
    stream: bool
    leave_after: int | None
    patience_s: float


def plans(count: int, lengths: Sequence[int], seed: int) -> list[Plan]:
    chance = random.Random(seed)
    return [
        Plan(
            chance.choice(PROMPTS),
            chance.choice(lengths),
            chance.random() < 0.6,
            chance.randrange(8) if chance.random() < 0.25 else None,
            chance.uniform(0.001, 0.2) if chance.random() < 0.1 else 120.0,
        )
        for _ in range(count)
    ]


class Load:
    """Clients of one server; they share connections, as making a client takes long.

    Attributes:
        outcomes: How many requests were `complete`, and how many clients `left`.
        refused: Answers with 429; each of them is tried again.
        tokens: Of complete answers.
        aborted: Requests that the server dropped because their clients had left.
    """

    def __init__(self, client: Any, expected: dict[tuple[str, int], str]) -> None:
        self.client = client
        self.expected = expected
        self.outcomes: Counter[str] = Counter()
        self.refused = 0
        self.tokens = 0
        self.aborted = 0.0
        self._lock = threading.Lock()

    def run(self, plans: Sequence[Plan], clients: int) -> None:
        with ThreadPoolExecutor(clients) as pool:
            for outcome in pool.map(self._client, plans):
                self.outcomes[outcome] += 1

    def _client(self, plan: Plan) -> str:
        body = {
            "prompt": plan.prompt,
            "max_tokens": plan.length,
            "temperature": 0,
            "stream": plan.stream,
        }
        timeout = httpx.Timeout(120, read=plan.patience_s)
        while True:
            try:
                with self.client.stream(
                    "POST", "/v1/completions", json=body, timeout=timeout
                ) as answer:
                    if answer.status_code != 429:
                        return self._read(answer, plan)
                    answer.read()
                    assert answer.json()["error"]["type"] == "rate_limit_error"
                    assert int(answer.headers["retry-after"]) > 0
            except httpx.ReadTimeout:
                assert plan.patience_s < 1
                return "left"
            with self._lock:
                self.refused += 1
            time.sleep(0.2)  # sooner than it was asked to: that is what a load is

    def _read(self, answer: Any, plan: Plan) -> str:
        assert answer.status_code == 200
        lines = []
        for line in answer.iter_lines():
            if plan.leave_after is not None and len(lines) >= plan.leave_after:
                return "left"
            lines.append(line)
        text, tokens = _streamed(lines) if plan.stream else _whole(lines)
        assert text == self.expected[plan.prompt, plan.length]
        with self._lock:
            self.tokens += tokens
        return "complete"


def _streamed(lines: Sequence[str]) -> tuple[str, int]:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in ("stop", "length")
    return "".join(choice["text"] for choice in choices), 0


def _whole(lines: Sequence[str]) -> tuple[str, int]:
    value = json.loads("".join(lines))
    return value["choices"][0]["text"], value["usage"]["completion_tokens"]


@pytest.fixture
def process(bundle: Path) -> Iterator[Served]:
    options = ("--served-model-name", "tiny", "--num-threads", 1, "--max-queued-requests", 16)
    with served(bundle, *options) as server:
        yield server


def expected(client: Any, lengths: Sequence[int]) -> dict[tuple[str, int], str]:
    """Each answer alone."""
    return {
        (prompt, length): client.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": length, "temperature": 0}
        ).json()["choices"][0]["text"]
        for prompt in PROMPTS
        for length in lengths
    }


def metrics(client: Any) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def ended(client: Any, reason: str) -> float:
    name = f'edgecc_request_success_total{{finished_reason="{reason}",model_name="tiny"}}'
    return metrics(client).get(name, 0.0)


def wait_until_idle(client: Any) -> None:
    deadline = time.monotonic() + 60
    label = '{model_name="tiny"}'
    while time.monotonic() < deadline:
        found = metrics(client)
        busy = [found[f"edgecc_num_requests_{name}{label}"] for name in ("running", "waiting")]
        if busy == [0, 0]:
            return
        time.sleep(0.1)
    raise AssertionError(busy)


def check_load(process: Served, count: int, clients: int, lengths: Sequence[int]) -> Load:
    """A load twice over: the second one must find the server as the first one did."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with httpx.Client(base_url=process.url, timeout=120, limits=limits) as client:
        return _check_load(process, client, count, clients, lengths)


def _check_load(
    process: Served, client: Any, count: int, clients: int, lengths: Sequence[int]
) -> Load:
    facts = psutil.Process(process.process.pid)
    alone = expected(client, lengths)
    before = {reason: ended(client, reason) for reason in ("stop", "length", "abort", "error")}
    tokens = metrics(client)['edgecc_generation_tokens_total{model_name="tiny"}']
    load = Load(client, alone)
    seen = []
    for seed in range(2):
        load.run(plans(count, lengths, seed), clients)
        wait_until_idle(client)
        seen.append((facts.memory_info().rss, facts.num_fds()))
        assert client.get("/health").status_code == 200
        assert client.get("/health/ready").status_code == 200

    counts = {reason: ended(client, reason) - before[reason] for reason in before}
    (first, files), (second, files_later) = seen
    print(
        f"\n{2 * count} requests of {clients} clients: {dict(load.outcomes)}, {load.refused} times"
        f" refused; ended {counts}; resident {first / 1e6:.1f} MB, then {second / 1e6:.1f} MB"
    )
    assert load.outcomes.total() == 2 * count
    assert load.outcomes["left"] > 0
    assert counts["error"] == 0
    # Whoever leaves may have been answered already, or was not read yet.
    finished = counts["stop"] + counts["length"]
    assert load.outcomes["complete"] <= finished
    assert finished + counts["abort"] <= 2 * count
    load.aborted = counts["abort"]
    grown = metrics(client)['edgecc_generation_tokens_total{model_name="tiny"}'] - tokens
    assert grown >= load.tokens
    assert second - first < GROWTH
    assert files_later <= files + 2  # a client may be asking for metrics
    # Every slot still answers as it did.
    load.run([Plan(p, lengths[-1], True, None, 120.0) for p in PROMPTS * 2], 3)
    return load


def test_a_small_load(process: Served) -> None:
    check_load(process, 40, 12, SHORT)


@pytest.mark.slow
def test_a_load(process: Served) -> None:
    load = check_load(process, 200, 32, LENGTHS)

    assert load.refused > 0
    assert load.aborted > 0
