"""Sequences that are decoded together, against each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.base import Array, Role
from edgecc.backends.runtime import Decoder, PlainDecoder, Round, Session, SpeculativeDecoder
from edgecc.backends.runtime.calls import Entry
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.backends.runtime.scheduler import Scheduler
from edgecc.errors import BackendError, InternalError

from .fakes import Pair, Slots, by_hash, continue_greedily, make_pair

NUM_TOKENS = 37


@dataclass(frozen=True)
class Wanted:
    """A sequence: what it decodes, when it joins and when it leaves."""

    prompt: tuple[int, ...]
    count: int
    proposals: int  # 0: plain
    threshold: float
    stops: frozenset[int]
    joins: int
    leaves: int  # steps after joining; more than it needs: never


WANTED = st.builds(
    Wanted,
    prompt=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=30).map(tuple),
    count=st.integers(0, 30),
    proposals=st.integers(0, 7),
    threshold=st.sampled_from([0.0, 0.0, 0.3, 0.6, 1.0]),
    stops=st.frozensets(st.integers(0, NUM_TOKENS - 1), max_size=1),
    joins=st.integers(0, 12),
    leaves=st.sampled_from([1, 2, 3, 5, 99, 99, 99, 99]),
)


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, Any]:
    capacity = draw(st.integers(8, 48))
    return {
        "capacity": capacity,
        "max_model_len": draw(st.integers(max(2, capacity - 9), capacity)),
        "prefill_chunk": draw(st.integers(8, 12)),
        "plan": [draw(st.integers(0, 7))],
        "junk": draw(st.booleans()),
        "log_rows": draw(st.sampled_from([0, 8])),
        "draft_positions": draw(st.sampled_from([20, 10_000])),
        "method": draw(st.sampled_from(["dspark", "eagle3"])),
    }


def decoder(session: Session, pair: Pair, wanted: Wanted) -> Decoder:
    if not wanted.proposals:
        return PlainDecoder(session, pair.model)
    assert pair.model.draft is not None
    return SpeculativeDecoder(
        session,
        pair.model,
        pair.model.draft,
        wanted.proposals,
        confidence_threshold=wanted.threshold,
    )


class Together:
    """A scheduler over fakes, one of each kind for each slot."""

    def __init__(self, options: dict[str, Any], slots: int, batch_size: int) -> None:
        self.pairs = [make_pair(**options) for _ in range(slots)]
        self.target = Slots([p.target for p in self.pairs], batch_size)
        self.draft = Slots([p.draft for p in self.pairs], batch_size)
        self.pair = self.pairs[0]
        entries: Any = {Entry.TARGET: self.target, Entry.DRAFT: self.draft}
        self.scheduler = Scheduler(entries, self.session)
        self.made: dict[int, list[Round]] = {}
        self.ended: set[int] = set()

    def session(self) -> Session:
        target, draft = self.target, self.draft
        draft_info = self.pair.model.draft
        assert draft_info is not None
        chunk = self.pair.model.prefill_chunk
        proposer = PROPOSERS[draft_info.method]
        return Session(target, draft, prefill_chunk=chunk, proposer=proposer)  # type: ignore[arg-type]

    def join(self, wanted: Wanted) -> int:
        ticket = self.scheduler.join(
            lambda session: decoder(session, self.pair, wanted).steps(
                list(wanted.prompt), wanted.count, wanted.stops
            )
        )
        self.made[ticket] = []
        return ticket

    def step(self) -> None:
        for outcome in self.scheduler.step():
            assert outcome.error is None
            assert outcome.ticket not in self.ended
            if outcome.round is not None:
                self.made[outcome.ticket].append(outcome.round)
            if outcome.ended:
                self.ended.add(outcome.ticket)


def alone(options: dict[str, Any], wanted: Wanted) -> list[Round]:
    pair = make_pair(**options)
    return list(
        decoder(pair.session, pair, wanted).rounds(list(wanted.prompt), wanted.count, wanted.stops)
    )


def facts(rounds: Sequence[Round]) -> list[tuple[Any, ...]]:
    """All of a round but its times."""
    return [(r.tokens, r.proposed, r.accepted, r.is_prompt, r.finish_reason) for r in rounds]


@given(
    options=pairs(),
    slots=st.integers(1, 4),
    wanted=st.lists(WANTED, min_size=1, max_size=7),
    data=st.data(),
)
def test_in_any_order_each_is_what_it_is_alone(
    options: dict[str, Any], slots: int, wanted: list[Wanted], data: st.DataObject
) -> None:
    """Joining whenever there is room from a step on, leaving in the middle, slots used again."""
    together = Together(options, slots, data.draw(st.integers(1, slots)))
    waiting = sorted(enumerate(wanted), key=lambda item: item[1].joins)
    running: dict[int, tuple[int, int]] = {}  # by ticket: which, and the steps it has left
    made: dict[int, list[Round]] = {}
    step = 0
    while waiting or running:
        while waiting and together.scheduler.free and waiting[0][1].joins <= step:
            index, item = waiting.pop(0)
            running[together.join(item)] = index, item.leaves
        together.step()
        for ticket, (index, left) in list(running.items()):
            made[index] = together.made[ticket]
            running[ticket] = index, left - 1
            if ticket in together.ended:
                del running[ticket]
            elif left == 1:
                together.scheduler.leave(ticket)
                del running[ticket]
        step += 1
        assert step < 500
    assert together.scheduler.free == slots
    for index, item in enumerate(wanted):
        expected, found = facts(alone(options, item)), facts(made[index])
        whole = item.leaves == 99
        assert found == (expected if whole else expected[: len(found)])
        choose = by_hash(NUM_TOKENS)
        tokens = [token for r in made[index] for token in r.tokens]
        assert tokens == continue_greedily(item.prompt, len(tokens), choose)


def plain(prompt: Sequence[int], count: int = 12) -> Wanted:
    return Wanted(tuple(prompt), count, 0, 0.0, frozenset(), 0, 99)


def speculative(prompt: Sequence[int], count: int = 12) -> Wanted:
    return Wanted(tuple(prompt), count, 7, 0.0, frozenset(), 0, 99)


OPTIONS: dict[str, Any] = {"capacity": 64, "prefill_chunk": 8, "plan": [2]}


def test_calls_are_made_together() -> None:
    """Four sequences of other lengths: after their prompts one target call a round."""
    together = Together(OPTIONS, 4, 4)
    for length in (1, 3, 5, 8):
        together.join(speculative([length] * length, 40))
    for _ in range(4):
        together.step()
    together.target.sizes.clear()
    together.step()
    assert together.target.sizes == [4]


def test_prompts_are_read_a_chunk_a_step_while_others_go_on() -> None:
    together = Together(OPTIONS, 2, 2)
    first = together.join(plain([1, 2], 20))
    together.step()
    second = together.join(plain([3] * 30, 20))
    for chunk in range(1, 4):
        together.step()
        assert len(together.made[first]) == 1 + chunk
        assert not together.made[second]
    together.step()
    assert len(together.made[second]) == 1
    together.target.sizes.clear()
    together.step()
    assert together.target.sizes == [2]


def test_prompts_are_read_in_the_order_they_came() -> None:
    together = Together(OPTIONS, 3, 3)
    tickets = [together.join(plain([n] * 16)) for n in range(3)]
    order = []
    for _ in range(6):
        before = {ticket: len(together.made[ticket]) for ticket in tickets}
        together.step()
        order += [t for t in tickets if together.made[t] and not before[t]]
    assert order == tickets


def test_slots_that_are_not_needed_are_not_touched() -> None:
    together = Together(OPTIONS, 4, 4)
    for _ in range(3):
        a, b = together.join(speculative([1, 2])), together.join(plain([3]))
        together.step()
        together.step()
        together.scheduler.leave(a)
        together.step()
        together.scheduler.leave(b)
    assert together.target.used | together.draft.used == {0, 1}


def test_a_gap_takes_part() -> None:
    """A free slot between two sequences does not split their call."""
    together = Together(OPTIONS | {"log_rows": 8}, 3, 3)
    tickets = [together.join(speculative([n, n], 30)) for n in range(3)]
    for _ in range(4):
        together.step()
    together.scheduler.leave(tickets[1])
    together.target.sizes.clear()
    together.step()
    assert together.target.sizes == [3]


PLANS = {"dspark": [2, 4, 0, 7], "eagle3": [2, 4, 1, 7]}
"""Proposals that are accepted in each slot; one more feature is new then."""


def with_plans(method: str, plans: Sequence[int]) -> tuple[Together, dict[str, Any]]:
    options: dict[str, Any] = {"capacity": 160, "prefill_chunk": 64, "method": method}
    together = Together(options | {"plan": [0]}, 4, 4)
    for pair, plan in zip(together.pairs, plans, strict=True):
        pair.draft.plan = [plan]
    return together, options


@pytest.mark.parametrize("method", PLANS)
def test_drafts_with_other_numbers_of_new_features_are_called_together(method: str) -> None:
    """Those with fewer get features once more in front, as long as there are any."""
    together, _ = with_plans(method, PLANS[method])
    for length in (60, 20, 2, 30):
        together.join(speculative([1] * length, 70))
    for _ in range(9):
        together.step()
    together.draft.sizes.clear()
    before = [len(pair.draft.tokens) for pair in together.pairs]
    together.step()
    assert together.draft.sizes == [4]
    after = [len(pair.draft.tokens) for pair in together.pairs]
    new = [b - a for a, b in zip(before, after, strict=True)]
    assert new == [plan + 1 for plan in PLANS[method]]


def test_a_chain_with_one_new_feature_is_called_with_others_of_one() -> None:
    """A kernel for a single row may have other bits, so what is alone with one row stays so."""
    together, _ = with_plans("eagle3", [0, 2, 0, 4])
    for length in (60, 20, 20, 30):
        together.join(speculative([1] * length, 70))
    for _ in range(9):
        together.step()
    together.draft.sizes.clear()
    together.step()
    # Slots 0 and 2 with that between them, which then goes on with slot 3.
    assert sorted(together.draft.sizes) == [3, 3]


def test_the_first_draft_call_of_a_prompt_is_made_apart() -> None:
    """It has more new features than others have kept: nobody is padded to that, nor computes it."""
    together, options = with_plans("dspark", [1, 1, 1, 1])
    wanted = [speculative([1] * length, 20) for length in (4, 4, 60)]
    tickets = [together.join(item) for item in wanted]
    sizes: list[list[int]] = []
    while len(together.ended) < 3:
        together.draft.sizes.clear()
        together.step()
        sizes.append(sorted(together.draft.sizes))
    assert [1, 2] in sizes  # the round after the long prompt
    assert [3] in sizes
    for ticket, item in zip(tickets, wanted, strict=True):
        assert facts(together.made[ticket]) == facts(alone(options | {"plan": [1]}, item))


@pytest.mark.parametrize(
    ("method", "plans"),
    [(method, plans) for method in PLANS for plans in ([2, 4, 2, 4], [0, 4, 0, 4])],
)
def test_a_sequence_between_two_others_keeps_what_it_wrote(method: str, plans: list[int]) -> None:
    """A slot whose call is made first and lies in that of two others, or is one of theirs.

    What the others' call does there must not be written over its newest rows.
    """
    together, options = with_plans(method, plans)
    wanted = [speculative([1] * length, 40) for length in (60, 2, 1, 60)]
    tickets = [together.join(item) for item in wanted]
    while len(together.ended) < 4:
        together.step()
    for ticket, item, plan in zip(tickets, wanted, plans, strict=True):
        expected = alone(options | {"plan": [plan]}, item)
        assert facts(together.made[ticket]) == facts(expected)


def test_padding_never_passes_the_end_of_the_caches() -> None:
    """A sequence at its last positions beside one that verifies seven proposals."""
    options = OPTIONS | {"capacity": 24, "plan": [0]}  # a token a round: both run for long
    together = Together(options, 2, 2)
    wanted = [speculative([2], 20), plain([1] * 12, 11)]
    tickets = [together.join(item) for item in wanted]
    while len(together.ended) < 2:
        together.step()
    for ticket, item in zip(tickets, wanted, strict=True):
        assert facts(together.made[ticket]) == facts(alone(options, item))
    assert {1, 2} <= set(together.target.sizes)


class Broken(Slots):
    """Refuses calls of more than one sequence, or gives one of them no numbers."""

    refuses = False
    spoils: int | None = None

    def run(self, inputs: Any, outputs: Any, *, slot: int = 0) -> dict[Role, Array]:
        results = super().run(inputs, outputs, slot=slot)
        if self.refuses:
            raise BackendError("test/refused", "refused")
        if self.spoils is not None and Role.LOGITS in results:
            index = self.spoils - slot
            if 0 <= index < len(results[Role.LOGITS]):
                results[Role.LOGITS][index] = np.nan
        return results


def broken(options: dict[str, Any], slots: int) -> tuple[Together, Broken]:
    together = Together(options, slots, slots)
    target = Broken(together.target.fakes, slots)
    together.target = target
    entries: Any = {Entry.TARGET: target, Entry.DRAFT: together.draft}
    together.scheduler = Scheduler(entries, together.session)
    return together, target


def test_one_whose_numbers_are_bad_fails_alone() -> None:
    together, target = broken(OPTIONS, 3)
    tickets = [together.join(plain([n, n], 6)) for n in range(3)]
    for _ in range(3):
        together.step()
    target.spoils = 1
    outcomes = together.scheduler.step()
    failed = [o for o in outcomes if o.error is not None]
    assert [o.ticket for o in failed] == [tickets[1]]
    assert failed[0].ended
    assert failed[0].error.id == "runtime/logits-not-a-number"  # type: ignore[union-attr]
    target.spoils = None
    for outcome in outcomes:
        if outcome.round is not None:
            together.made[outcome.ticket].append(outcome.round)
    while tickets[2] not in together.ended:
        together.step()
    assert facts(together.made[tickets[2]]) == facts(alone(OPTIONS, plain([2, 2], 6)))
    assert together.scheduler.free == 3


def test_a_call_that_fails_ends_those_that_took_part() -> None:
    together, target = broken(OPTIONS, 2)
    for n in range(2):
        together.join(plain([n, n]))
    for _ in range(2):
        together.step()
    target.refuses = True
    assert [o.error.id for o in together.scheduler.step() if o.error] == ["test/refused"] * 2
    target.refuses = False
    assert together.scheduler.free == 2
    again = together.join(plain([5, 6], 4))
    while again not in together.ended:
        together.step()
    assert facts(together.made[again]) == facts(alone(OPTIONS, plain([5, 6], 4)))


def test_no_room_for_a_token() -> None:
    together = Together(OPTIONS, 1, 1)
    ticket = together.join(plain([1], 0))
    together.step()
    assert ticket in together.ended
    assert not together.made[ticket]


def test_joining_needs_a_slot() -> None:
    together = Together(OPTIONS, 1, 1)
    together.join(plain([1]))
    with pytest.raises(InternalError, match="no slot is free"):
        together.join(plain([2]))
