"""Lossless acceptance, by enumeration: what is committed has the target's distribution."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime.sampling import Distribution, Purpose, RandomStream
from edgecc.backends.runtime.sampling.rejection import (
    Chance,
    RoundChance,
    accept_block,
    accept_tokens,
    end_at_stop,
)
from helpers.chi_square import check_counts

from .enumeration import (
    Model,
    Prefix,
    Rule,
    after_a_round,
    continuations,
    ended,
    outcomes,
    total_variation,
)

RULES = [accept_tokens, accept_block]


def coupled(proposals, drafts, target, chance: Chance) -> tuple[int, int]:
    """What the decoder does with proposals that are the draft's best tokens."""
    for index, proposal in enumerate(proposals):
        token = chance.token(index, target(index), Purpose.TOKEN)
        if token != proposal:
            return index, token
    return len(proposals), chance.token(len(proposals), target(len(proposals)), Purpose.TOKEN)


def random_model(seed: int, num_tokens: int, *, zeros: float = 0.0, sharp: float = 1.0) -> Model:
    """Probabilities that depend on all of the prefix; some are 0."""

    @cache
    def model(prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        weights = rng.gamma(1 / sharp, size=num_tokens) + 1e-9
        gone = rng.random(num_tokens) < zeros
        gone[rng.integers(num_tokens)] = False
        weights[gone] = 0.0
        return weights / weights.sum()

    return model


def best_of(model: Model) -> Model:
    """A draft that always proposes its best token."""

    def certain(prefix: Prefix) -> np.ndarray:
        p = model(prefix)
        return (np.arange(len(p)) == p.argmax()).astype(float)

    return certain


@given(
    st.integers(0, 10_000),
    st.sampled_from([(2, 3), (3, 3), (4, 2), (8, 1), (3, 0)]),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([1.0, 4.0]),
    st.sampled_from(RULES),
)
def test_tokens_are_distributed_as_the_targets(seed, sizes, zeros, sharp, rule):
    num_tokens, count = sizes
    target = random_model(seed, num_tokens, zeros=zeros, sharp=sharp)
    draft = random_model(seed + 1, num_tokens, zeros=zeros)
    found, _ = after_a_round(rule, target, draft, count, num_tokens)
    assert total_variation(found, continuations(target, (), count + 1)) < 1e-12


@given(st.integers(0, 10_000), st.sampled_from([(2, 3), (3, 2)]))
def test_drafts_that_propose_their_best_token(seed, sizes):
    """All three rules are lossless, and none accepts more than the coupled one."""
    num_tokens, count = sizes
    target = random_model(seed, num_tokens)
    draft = best_of(random_model(seed + 1, num_tokens))
    expected = continuations(target, (), count + 1)
    means = []
    for rule in (coupled, *RULES):
        found, accepted = after_a_round(rule, target, draft, count, num_tokens)
        assert total_variation(found, expected) < 1e-12
        means.append(accepted)
    assert means == pytest.approx([means[0]] * 3, abs=1e-12)


@given(st.integers(0, 10_000), st.sampled_from([(2, 3), (3, 2)]))
def test_block_verification_accepts_no_fewer(seed, sizes):
    num_tokens, count = sizes
    target, draft = random_model(seed, num_tokens), random_model(seed + 1, num_tokens)
    _, by_token = after_a_round(accept_tokens, target, draft, count, num_tokens)
    _, by_block = after_a_round(accept_block, target, draft, count, num_tokens)
    assert by_block >= by_token - 1e-12


def test_block_verification_accepts_more():
    """The example of its authors: two tokens, of which the draft takes each for the other."""
    target: Model = lambda prefix: np.array([1 / 3, 2 / 3])  # noqa: E731
    draft: Model = lambda prefix: np.array([2 / 3, 1 / 3])  # noqa: E731
    _, by_token = after_a_round(accept_tokens, target, draft, 2, 2)
    _, by_block = after_a_round(accept_block, target, draft, 2, 2)
    assert by_token == pytest.approx(10 / 9)
    assert by_block == pytest.approx(11 / 9)


def test_a_slot_accepts_what_both_distributions_share():
    p, q = np.array([0.1, 0.6, 0.3]), np.array([0.5, 0.2, 0.3])
    for rule in RULES:
        _, accepted = after_a_round(rule, lambda _: p, lambda _: q, 1, 3)
        assert accepted == pytest.approx(np.minimum(p, q).sum())


@pytest.mark.parametrize("rule", RULES)
def test_equal_models_accept_all(rule):
    model = random_model(5, 3, zeros=0.3)
    _, accepted = after_a_round(rule, model, model, 3, 3)
    assert accepted == pytest.approx(3)


@pytest.mark.parametrize("rule", RULES)
def test_a_proposal_the_target_cannot_choose_is_rejected(rule):
    target = Distribution(np.array([1, 4]), np.array([3.0, 1.0]))
    draft = Distribution(np.array([0, 4]), np.array([1.0, 1.0]))
    found = outcomes(lambda chance: rule([0], [draft], lambda _: target, chance))
    # What is left of the target, 0.75 of token 1: token 4 was the draft's as often.
    assert found == pytest.approx({(0, 1): 1.0})


@pytest.mark.parametrize("rule", RULES)
def test_a_target_equal_but_for_rounding_leaves_itself(rule):
    """A rejection that rounding alone could bring still has a token to commit."""

    class Never(RoundChance):
        def accepts(self, index: int, probability: float) -> bool:
            return False

    same = Distribution(np.array([3, 5]), np.array([1.0, 1.0]))
    chance = Never(RandomStream(1), 0)
    kept, token = rule([3], [same], lambda _: same, chance)
    assert kept == 0
    assert token in (3, 5)


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_a_plan_that_is_empty(rule):
    target = Distribution(np.array([2]), np.array([1.0]))
    assert rule([], [], lambda _: target, RoundChance(RandomStream(1), 0)) == (0, 2)


@cache
def row_of(model: Model, prefix: Prefix) -> Distribution:
    return Distribution.of(model(prefix))


def write(
    rule: Rule, target: Model, draft: Model, seed: int, length: int, stops: frozenset[int]
) -> Prefix:
    """A text of rounds of three proposals that the draft samples."""
    stream, answer = RandomStream(seed), ()
    while len(answer) < length and not stops & {*answer}:
        chance = RoundChance(stream, len(answer))
        proposals: list[int] = []
        drafts: list[Distribution] = []
        for slot in range(3):
            drafts.append(row_of(draft, (*answer, *proposals)))
            proposals.append(chance.token(slot, drafts[-1], Purpose.PROPOSAL))
        begin = answer
        kept, token = rule(
            proposals,
            drafts,
            lambda i, b=begin, x=tuple(proposals): row_of(target, (*b, *x[:i])),
            chance,
        )
        kept, token = end_at_stop(proposals, kept, token, stops)
        answer = (*answer, *proposals[:kept], token)
    return answer[:length]


TEXTS = 40_000
"""Of `test_many_texts_with_stops_and_a_limit`: more than 100,000 tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("certain", [False, True], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("rule", RULES)
def test_many_texts_with_stops_and_a_limit(rule: Rule, certain: bool):
    """Texts of four tokens at most that end at token 0, wherever in a round it comes."""
    num_tokens, length = 6, 4
    target, draft = random_model(21, num_tokens), random_model(22, num_tokens)
    draft = best_of(draft) if certain else draft
    counts = Counter(write(rule, target, draft, s, length, frozenset({0})) for s in range(TEXTS))
    assert sum(map(len, counts.elements())) > 100_000
    check_counts(counts, ended(continuations(target, (), length), stop=0))


@pytest.mark.parametrize("rule", RULES)
def test_many_rounds_with_real_random_numbers(rule: Rule):
    """Chi-square of three tokens written by rounds of three proposals, in each of 1500 texts."""
    num_tokens, length, texts = 3, 3, 1500
    target, draft = random_model(11, num_tokens), random_model(12, num_tokens)
    counts = Counter(write(rule, target, draft, s, length, frozenset()) for s in range(texts))
    check_counts(counts, continuations(target, (), length))


@pytest.mark.parametrize(
    ("accepted", "stops", "expected"),
    [
        (3, {9}, (3, 8)),
        (3, {6}, (1, 6)),
        (3, {7, 5}, (0, 5)),
        (1, {6, 7}, (1, 8)),
        (2, {8}, (2, 8)),
        (0, {5}, (0, 8)),
    ],
)
def test_stop_tokens_among_accepted_proposals(accepted, stops, expected):
    assert end_at_stop([5, 6, 7], accepted, 8, stops) == expected
