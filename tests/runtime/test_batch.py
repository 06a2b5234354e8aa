"""Batches of requests over fakes: queues, joining, leaving, errors, text."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.base import Role
from edgecc.backends.runtime import Batch, Chunk, Generation, Generator, SpeculationWarning
from edgecc.errors import BackendError, RequestError

from .fakes import Slots, by_hash, by_script, continue_greedily, make_pair
from .test_generator import END, PROMPT, TOKENIZER

NUM_TOKENS = 37


class Engine:
    """Several slots of fakes as an engine."""

    def __init__(self, slots: int, batch_size: int | None = None, **options: Any) -> None:
        self.pairs = [make_pair(**options) for _ in range(slots)]
        self.target = Slots([p.target for p in self.pairs], batch_size or slots)
        self.draft = None
        if self.pairs[0].engine.draft is not None:
            self.draft = Slots([p.draft for p in self.pairs], batch_size or slots)
        self.model = self.pairs[0].model
        self.closed = False

    def entry(self, name: str) -> Slots:
        found = {"target": self.target, "draft": self.draft}[name]
        assert found is not None
        return found

    def close(self) -> None:
        self.closed = True


def make(slots: int, **options: Any) -> tuple[Generator, Engine]:
    engine = Engine(slots, **({"capacity": 96, "prefill_chunk": 8, "plan": [3]} | options))
    return Generator(engine, engine.model), engine  # type: ignore[arg-type]


def expected(prompt: list[int], count: int) -> list[int]:
    return continue_greedily(prompt, count, by_hash(NUM_TOKENS))


@given(
    slots=st.integers(1, 3),
    wanted=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 7)), max_size=8
    ),
)
def test_answers_come_in_the_order_of_the_requests(
    slots: int, wanted: list[tuple[int, int, int]]
) -> None:
    """More requests than slots wait for their turn."""
    generator, engine = make(slots)
    prompts = [[i, *range(length - 1)] for i, (length, _, _) in enumerate(wanted)]
    requests = [
        generator.request(
            token_ids=prompt,
            max_new_tokens=count,
            speculation=steps > 0,
            num_speculative_tokens=steps or None,
        )
        for prompt, (_, count, steps) in zip(prompts, wanted, strict=True)
    ]
    found = generator.generate_batch(requests)
    assert [f.token_ids for f in found] == [
        expected(prompt, count) for prompt, (_, count, _) in zip(prompts, wanted, strict=True)
    ]
    assert [f.prompt_tokens for f in found] == [length for length, _, _ in wanted]
    assert max(engine.target.sizes, default=0) <= slots


def test_requests_are_served_in_the_order_they_came() -> None:
    generator, _ = make(2)
    with generator.batch() as batch:
        tickets = [
            batch.submit(generator.request(token_ids=[i], max_new_tokens=4, speculation=False))
            for i in range(5)
        ]
        assert (len(batch), batch.waiting, batch.slots) == (5, 5, 2)
        first: list[int] = []
        ended: list[int] = []
        while batch:
            for progress in batch.step():
                if progress.ticket not in first:
                    first.append(progress.ticket)
                if progress.ended:
                    ended.append(progress.ticket)
        assert first == ended == tickets


def take(batch: Batch, steps: int = 10_000) -> dict[int, list[Chunk]]:
    found: dict[int, list[Chunk]] = {}
    while batch and steps:
        for progress in batch.step():
            assert progress.chunk is not None
            found.setdefault(progress.ticket, []).append(progress.chunk)
        steps -= 1
    return found


def test_requests_join_a_running_batch() -> None:
    generator, _ = make(3)
    prompts = [[1] * 4, [2], [3] * 17]
    with generator.batch() as batch:
        found: dict[int, list[Chunk]] = {}
        for prompt in prompts:
            batch.submit(generator.request(token_ids=prompt, max_new_tokens=12))
            for ticket, chunks in take(batch, 2).items():
                found.setdefault(ticket, []).extend(chunks)
        for ticket, chunks in take(batch).items():
            found.setdefault(ticket, []).extend(chunks)
    answers = [Generation.of(found[ticket]) for ticket in range(3)]
    assert [a.token_ids for a in answers] == [expected(p, 12) for p in prompts]


def test_cancelling() -> None:
    """A running request and a waiting one; a slot that is free is used by the next."""
    generator, engine = make(1)
    with generator.batch() as batch:
        requests = [
            generator.request(token_ids=[i, i], max_new_tokens=9, speculation=False)
            for i in range(3)
        ]
        running, waiting, last = map(batch.submit, requests)
        assert set(take(batch, 3)) == {running}
        assert batch.cancel(waiting)
        assert batch.cancel(running)
        assert not batch.cancel(running)
        assert not batch.cancel(99)
        found = take(batch)
    assert Generation.of(found[last]).token_ids == expected([2, 2], 9)
    assert set(found) == {last}
    assert engine.target.used == {0}


def test_a_stop_string_frees_the_slot() -> None:
    text = "one two three four five six"
    choose = by_script(len(PROMPT), [*TOKENIZER.encode(text), END], then=300)
    engine = Engine(
        1,
        choose=choose,
        vocab_size=4096,
        num_tokens=4095,
        capacity=256,
        prefill_chunk=16,
        eos_token_ids=[END],
        plan=[7],
    )
    generator = Generator(engine, engine.model, TOKENIZER)  # type: ignore[arg-type]
    wanted: list[dict[str, Any]] = [{"stop": "three"}, {}, {"stop": ["six", "two"]}]
    single = [generator.generate(token_ids=PROMPT, **w) for w in wanted]
    found = generator.generate_batch([generator.request(token_ids=PROMPT, **w) for w in wanted])
    assert [(f.text, f.token_ids, f.finish_reason) for f in found] == [
        (s.text, s.token_ids, s.finish_reason) for s in single
    ]
    assert [f.text for f in found] == ["one two ", text, "one "]


def test_a_batch_and_single_requests_keep_each_other_out() -> None:
    generator, _ = make(2)
    with generator.batch(), pytest.raises(RequestError, match="another request is running"):
        generator.generate(token_ids=[1], max_new_tokens=1)
    stream = generator.stream(token_ids=[1], max_new_tokens=9)
    next(stream)
    with pytest.raises(RequestError, match="another request is running"):
        generator.batch()
    stream.close()
    with generator.batch() as batch:
        batch.close()
        assert generator.generate(token_ids=[1], max_new_tokens=2).token_ids == expected([1], 2)
    assert generator.generate(token_ids=[1], max_new_tokens=2).token_ids == expected([1], 2)


def test_what_is_not_answered_is_dropped_when_a_batch_closes() -> None:
    generator, _ = make(1)
    with generator.batch() as batch:
        for _ in range(2):
            batch.submit(generator.request(token_ids=[1], max_new_tokens=9))
        batch.step()
    assert not batch
    with pytest.raises(RequestError, match="the batch is closed"):
        batch.submit(generator.request(token_ids=[1]))


def test_a_batch_that_is_dropped_keeps_nobody_out() -> None:
    generator, _ = make(1)
    batch = generator.batch()
    batch.submit(generator.request(token_ids=[1], max_new_tokens=9))
    batch.step()
    del batch
    gc.collect()
    assert generator.generate(token_ids=[1], max_new_tokens=2).token_ids == expected([1], 2)


@pytest.mark.parametrize("requests", [None, 5, [5], ["ab"], [None]])
def test_what_is_no_request(requests: Any) -> None:
    generator, _ = make(1)
    with pytest.raises(RequestError) as caught:
        generator.generate_batch(requests)
    assert caught.value.id == "request/bad-request"
    assert generator.generate(token_ids=[1], max_new_tokens=2).token_ids == expected([1], 2)


def test_a_closed_generator() -> None:
    generator, engine = make(2)
    batch = generator.batch()
    batch.submit(generator.request(token_ids=[1], max_new_tokens=9))
    batch.step()
    generator.close()
    assert engine.closed
    with pytest.raises(RequestError, match="the generator is closed"):
        batch.step()
    batch.close()
    with pytest.raises(RequestError, match="the generator is closed"):
        generator.batch()


def spoil(engine: Engine, slot_to_spoil: int, calls: int) -> None:
    """From a number of calls on, one slot of the target has no numbers."""
    run, counted = engine.target.run, [0]

    def spoiled(inputs: Any, outputs: Any, *, slot: int = 0) -> Any:
        results = run(inputs, outputs, slot=slot)
        counted[0] += 1
        if counted[0] > calls and Role.LOGITS in results:
            index = slot_to_spoil - slot
            if 0 <= index < len(results[Role.LOGITS]):
                results[Role.LOGITS][index] = np.nan
        return results

    engine.target.run = spoiled  # type: ignore[method-assign]


def test_a_request_that_fails_does_not_end_the_others() -> None:
    generator, engine = make(2)
    spoil(engine, 1, 4)
    with generator.batch() as batch:
        for i in range(2):
            batch.submit(generator.request(token_ids=[i], max_new_tokens=12, speculation=False))
        failed, tokens = [], []
        while batch:
            for progress in batch.step():
                if progress.error is not None:
                    assert progress.ended
                    failed.append((progress.ticket, progress.error.id))
                elif progress.ticket == 0:
                    assert progress.chunk is not None
                    tokens += progress.chunk.token_ids
    assert failed == [(1, "runtime/logits-not-a-number")]
    assert tokens == expected([0], 12)


def test_a_failure_ends_generate_batch() -> None:
    generator, engine = make(2)
    spoil(engine, 1, 3)
    requests = [generator.request(token_ids=[i], max_new_tokens=12) for i in range(2)]
    with pytest.raises(BackendError, match="not a number"):
        generator.generate_batch(requests)
    assert generator.generate(token_ids=[1], max_new_tokens=2).token_ids == expected([1], 2)


def test_a_warning_about_acceptance_comes_once() -> None:
    generator, _ = make(2, plan=[0], capacity=200)
    requests = [generator.request(token_ids=[i], max_new_tokens=60) for i in range(2)]
    with pytest.warns(SpeculationWarning, match="no proposed token was accepted") as caught:
        found = generator.generate_batch(requests)
    assert len(caught) == 1
    assert sum(len(f.stats.warnings) for f in found) == 1


def test_statistics_are_those_of_each_request() -> None:
    generator, _ = make(2, plan=[7])
    wanted: list[dict[str, Any]] = [
        {"token_ids": [1, 2], "max_new_tokens": 17},
        {"token_ids": [3] * 9, "max_new_tokens": 5, "speculation": False},
    ]
    found = generator.generate_batch([generator.request(**w) for w in wanted])
    for answer, w in zip(found, wanted, strict=True):
        single = generator.generate(**w)
        for field in ("accepted_by_round", "proposed_by_round", "new_tokens", "prompt_tokens"):
            assert getattr(answer.stats, field) == getattr(single.stats, field)
        assert answer.stats.target_seconds > 0
