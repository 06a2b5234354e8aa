"""Several sequences at a time: tokens, acceptance and bits are those of each of them alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgecc
from edgecc.backends.base import Role
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.errors import RequestError

SLOTS = 3
LENGTH = 160
TOKEN = st.integers(0, 4094)


@pytest.fixture(scope="module")
def batched(pair, tmp_path_factory):
    """The pair for three sequences at a time, with short caches so that edges are near."""
    out = tmp_path_factory.mktemp("pair") / "bundle"
    edgecc.compile(
        pair.target,
        pair.draft,
        out=out,
        max_model_len=LENGTH,
        prefill_chunk=32,
        max_batch_size=SLOTS,
    )
    with edgecc.load(out) as opened:
        yield opened


REQUESTS = st.fixed_dictionaries(
    {
        "length": st.one_of(st.integers(1, 40), st.sampled_from([64, 100, LENGTH - 1, LENGTH - 3])),
        "max_new_tokens": st.integers(1, 24),
        "proposals": st.integers(0, 7),
        "threshold": st.sampled_from([0.0, 0.0, 0.2, 0.5]),
        "stops_at": st.one_of(st.none(), st.integers(0, 12)),
        "joins": st.integers(0, 6),
        "leaves": st.sampled_from([2, 4, 99, 99, 99]),
        "temperature": st.sampled_from([0.0, 0.0, 0.8]),
    }
)


def make_request(generator, wanted, seed):
    ids = np.random.default_rng(seed).integers(0, 4095, wanted["length"])
    steps = wanted["proposals"]
    return generator.request(
        token_ids=ids,
        max_new_tokens=wanted["max_new_tokens"],
        speculation=steps > 0,
        num_speculative_tokens=steps or None,
        confidence_threshold=wanted["threshold"] * generator.model.draft.tells_confidence,
        ignore_eos=True,
        temperature=wanted["temperature"],
        seed=seed,
    )


def alone(generator, request):
    return generator.generate(
        token_ids=request.token_ids,
        max_new_tokens=request.max_new_tokens,
        speculation=request.num_speculative_tokens > 0,
        num_speculative_tokens=request.num_speculative_tokens or None,
        confidence_threshold=request.confidence_threshold,
        ignore_eos=True,
        sampling=request.sampling,
    )


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(REQUESTS, min_size=2, max_size=6), seed=st.integers(0, 10**6))
def test_any_order_of_joining_and_leaving(batched, wanted, seed):
    requests = [make_request(batched, w, seed + i) for i, w in enumerate(wanted)]
    singles = [alone(batched, request) for request in requests]
    found = {index: [] for index in range(len(wanted))}
    accepted = {}
    cancelled = set()
    with batched.batch() as batch:
        waiting = sorted(range(len(wanted)), key=lambda i: wanted[i]["joins"])
        tickets, step = {}, 0
        while waiting or batch:
            while waiting and wanted[waiting[0]]["joins"] <= step:
                index = waiting.pop(0)
                tickets[batch.submit(requests[index])] = index, step
            for progress in batch.step():
                assert progress.error is None
                index, _ = tickets[progress.ticket]
                assert index not in cancelled
                found[index] += progress.chunk.token_ids
                accepted[index] = progress.chunk.stats.accepted_by_round
            step += 1
            for ticket, (index, joined) in tickets.items():
                if step - joined == wanted[index]["leaves"] and batch.cancel(ticket):
                    cancelled.add(index)
    for index, single in enumerate(singles):
        if index in cancelled:
            assert found[index] == single.token_ids[: len(found[index])]
        else:
            assert found[index] == single.token_ids
            assert accepted[index] == single.stats.accepted_by_round


def test_goldens_together(batched, goldens):
    """Each prompt with another number of proposals, and plain: more requests than slots."""
    prompts = [p for p in ("p0", "p1", "p2", "p3") if len(goldens[p]["ids"]) + 24 < LENGTH]
    requests, expected = [], []
    for steps in range(8):
        prompt = prompts[steps % len(prompts)]
        requests.append(
            batched.request(
                token_ids=goldens[prompt]["ids"],
                max_new_tokens=24,
                speculation=steps > 0,
                num_speculative_tokens=steps or None,
            )
        )
        expected.append(goldens[prompt]["greedy"].tolist()[:24])
    found = batched.generate_batch(requests)
    assert [answer.token_ids for answer in found] == expected


def test_stop_strings_and_text_in_a_batch(batched):
    prompts = ["The", "A cat sat on", "1 2 3 4", "def f(x):"]
    singles = [batched.generate(p, max_new_tokens=20, ignore_eos=True) for p in prompts]
    cut = [answer.text[2:5] for answer in singles]
    stopped = [
        batched.generate(p, max_new_tokens=20, ignore_eos=True, stop=stop or ())
        for p, stop in zip(prompts, cut, strict=True)
    ]
    requests = [
        batched.request(p, max_new_tokens=20, ignore_eos=True, stop=stop or ())
        for p, stop in zip(prompts, cut, strict=True)
    ]
    found = batched.generate_batch(requests)
    assert [(f.text, f.token_ids, f.finish_reason) for f in found] == [
        (s.text, s.token_ids, s.finish_reason) for s in stopped
    ]
    assert any(f.finish_reason == "stop" for f in found)


def call(ids, lengths, replay, commit, *, logs):
    inputs = {
        Role.TOKEN_IDS: np.stack(ids).astype(np.int64),
        Role.CACHE_LENGTH: np.array(lengths, dtype=np.int64),
        Role.LOGIT_ROWS: np.arange(len(ids[0])),
    }
    if logs:
        inputs[Role.REPLAY_LENGTH] = np.array(replay, dtype=np.int64)
        inputs[Role.COMMIT_LENGTH] = np.array(commit, dtype=np.int64)
    return inputs


WANTED = (Role.LOGITS, Role.HIDDEN_TAP)
ROUND = st.tuples(st.integers(1, 8), st.integers(1, 8))
"""Rows of a sequence's call, and how many of them stay, if there are so many."""


class Walk:
    """A sequence on its way through calls of the target, alone or in a call of several."""

    def __init__(self, target, prompt, slot):
        self.target, self.slot = target, slot
        self.logs = target.log_rows > 0
        for start in range(0, len(prompt), 32):
            chunk = prompt[start : start + 32]
            inputs = call([chunk], [start], [0], [len(chunk)], logs=self.logs)
            target.run(inputs, (), slot=slot)
        self.start, self.replay = len(prompt), 0

    def keep(self, rows, accepted):
        self.start += min(rows, accepted)
        self.replay = 0 if rows == 1 else min(rows, accepted)


def step(walks, ids, rows):
    """One call for all walks; the bits of each one's own rows."""
    longest = max(rows)
    padded = [np.r_[own[:n], np.zeros(longest - n)] for own, n in zip(ids, rows, strict=True)]
    starts, replays = [w.start for w in walks], [w.replay for w in walks]
    inputs = call(padded, starts, replays, [int(n == 1) for n in rows], logs=walks[0].logs)
    results = walks[0].target.run(inputs, WANTED, slot=walks[0].slot)
    return [
        [results[role][index, :own].tobytes() for role in WANTED] for index, own in enumerate(rows)
    ]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=SLOTS),
    rounds=st.lists(st.tuples(ROUND, ROUND, ROUND), min_size=2, max_size=2),
    last=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_rows_have_the_bits_of_a_single_sequence(batched, lengths, rounds, last, seed):
    """Prompts of any length, rows that are accepted and replayed, steps that are final."""
    target, count = batched.engine.entry("target"), len(lengths)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 4095, n) for n in lengths]
    ids = rng.integers(0, 4095, (len(rounds), count, 8))
    expected = []
    for index, prompt in enumerate(prompts):
        walk, made = Walk(target, prompt, 0), []
        for turn, plan in enumerate(rounds):
            rows, accepted = plan[index]
            made += step([walk], [ids[turn, index]], [rows])
            walk.keep(rows, accepted)
        expected.append(made)
    first = SLOTS - count if last else 0
    walks = [Walk(target, prompt, first + index) for index, prompt in enumerate(prompts)]
    for turn, plan in enumerate(rounds):
        found = step(walks, ids[turn], [rows for rows, _ in plan[:count]])
        assert found == [made[turn] for made in expected]
        for walk, (rows, accepted) in zip(walks, plan, strict=False):
            walk.keep(rows, accepted)


@pytest.fixture(scope="module")
def drafting(pair, tmp_path_factory):
    """The pair for two sequences, with all that the draft computes."""
    out = tmp_path_factory.mktemp("pair") / "drafting"
    edgecc.compile(
        pair.target,
        pair.draft,
        out=out,
        max_model_len=LENGTH,
        prefill_chunk=64,
        max_batch_size=2,
        draft_outputs=True,
    )
    with edgecc.load(out) as opened:
        yield opened


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    known=st.integers(8, 40), new=st.integers(1, 8), again=st.integers(1, 7), seed=st.integers(0)
)
def test_features_given_once_more_change_no_bit(drafting, pair, known, new, again, seed):
    """Proposals and logits, and those of a later call that reads the rows written twice."""
    target, draft = (drafting.engine.entry(name) for name in ("target", "draft"))
    proposer = PROPOSERS[pair.method]
    again, new = min(again, known), max(new, proposer.fewest_rows)
    ids = np.random.default_rng(seed).integers(0, 4095, known + new + 4)
    counts = call([ids[:-1]], [0], [0], [len(ids) - 1], logs=target.log_rows > 0)
    features = target.run(counts, (Role.HIDDEN_TAP,))[Role.HIDDEN_TAP].copy()
    following = ids[1:]
    outputs = (Role.PROPOSALS, Role.DRAFT_LOGITS)

    def run(first, end, slot):
        inputs = {
            Role.FEATURES: np.ascontiguousarray(features[:, first:end]),
            proposer.role: proposer.tokens(following[first:end].tolist()),
            Role.CACHE_LENGTH: np.array([first]),
        }
        found = draft.run(inputs, outputs, slot=slot)
        return [found[role].tobytes() for role in outputs]

    for slot in range(2):
        run(0, known, slot)
    assert run(known - again, known + new, 1) == run(known, known + new, 0)
    last = known + new, known + new + 3
    assert run(*last, 1) == run(*last, 0)


def test_a_batch_keeps_others_out(batched):
    with batched.batch() as batch:
        assert batch.slots == SLOTS
        with pytest.raises(RequestError, match="another request is running"):
            batched.generate(token_ids=[1], max_new_tokens=1)
    assert batched.generate(token_ids=[1], max_new_tokens=1, ignore_eos=True).token_ids


def test_slots_that_do_not_exist(batched):
    target = batched.engine.entry("target")
    counts = call([[1, 2]] * 2, [0, 0], [0, 0], [2, 2], logs=target.log_rows > 0)
    with pytest.raises(RequestError, match="2 sequences from a slot on, after which 1 are held"):
        target.run(counts, (Role.LOGITS,), slot=SLOTS - 1)
