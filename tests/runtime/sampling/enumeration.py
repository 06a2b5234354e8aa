"""Rules of acceptance with every random decision taken both ways, each with its probability.

What a rule commits is then an exact distribution, and no sample of one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from edgecc.backends.runtime.sampling import Distribution, Purpose
from edgecc.backends.runtime.sampling.rejection import Chance

Prefix: TypeAlias = tuple[int, ...]
Model: TypeAlias = Callable[[Prefix], np.ndarray]
"""Probabilities of the next token, f64 `[V]`, after the tokens of an answer."""

Rule: TypeAlias = Callable[
    [Sequence[int], Sequence[Distribution], Callable[[int], Distribution], Chance], tuple[int, int]
]


class _Script(Chance):
    """Takes the first decisions as told, later ones the first way, and remembers all of them."""

    def __init__(self, told: Sequence[int]) -> None:
        self.told = told
        self.taken: list[tuple[int, np.ndarray]] = []

    def accepts(self, index: int, probability: float) -> bool:
        return not self._take(np.array([probability, 1 - probability]))

    def token(self, index: int, distribution: Distribution, purpose: Purpose) -> int:
        dense = distribution.dense(int(distribution.ids[-1]) + 1)
        return self._take(dense)

    def _take(self, ways: np.ndarray) -> int:
        place = len(self.taken)
        way = self.told[place] if place < len(self.told) else int(np.flatnonzero(ways)[0])
        self.taken.append((way, ways))
        return way


def outcomes(run: Callable[[Chance], tuple[int, int]]) -> dict[tuple[int, int], float]:
    """All results of a rule with their probabilities."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    open_: list[list[int]] = [[]]
    while open_:
        script = _Script(open_.pop())
        result = run(script)
        found[result] += float(np.prod([ways[way] for way, ways in script.taken]))
        for place in range(len(script.told), len(script.taken)):
            begin = [way for way, _ in script.taken[:place]]
            way, ways = script.taken[place]
            open_ += [[*begin, int(w)] for w in np.flatnonzero(ways) if w != way]
    return found


def drafts_of(draft: Model, proposals: Prefix) -> list[Distribution]:
    return [Distribution.of(draft(proposals[:i])) for i in range(len(proposals))]


def after_a_round(
    rule: Rule, target: Model, draft: Model, count: int, num_tokens: int
) -> tuple[dict[Prefix, float], float]:
    """The first `count + 1` tokens of an answer if its first round proposes `count`.

    Later tokens, where the round commits fewer, come from the target.

    Returns:
        Their distribution, and how many proposals are accepted on average.
    """
    found: dict[Prefix, float] = defaultdict(float)
    accepted = 0.0
    for proposals in itertools.product(range(num_tokens), repeat=count):
        drafts = drafts_of(draft, proposals)
        chance = float(np.prod([d.probability(x) for d, x in zip(drafts, proposals, strict=True)]))
        if not chance:
            continue

        def run(decide: Chance, xs: Prefix = proposals) -> tuple[int, int]:
            return rule(xs, drafts_of(draft, xs), lambda i: Distribution.of(target(xs[:i])), decide)

        for (kept, token), share in outcomes(run).items():
            accepted += chance * share * kept
            committed = (*proposals[:kept], token)
            for rest, probability in continuations(target, committed, count + 1).items():
                found[rest] += chance * share * probability
    return found, accepted


def continuations(target: Model, prefix: Prefix, length: int) -> Mapping[Prefix, float]:
    """All answers of a length that begin with a prefix, as the target alone writes them."""
    if len(prefix) == length:
        return {prefix: 1.0}
    found: dict[Prefix, float] = {}
    for token, probability in enumerate(target(prefix)):
        if probability:
            rest = continuations(target, (*prefix, token), length)
            found.update({answer: probability * share for answer, share in rest.items()})
    return found


def ended(answers: Mapping[Prefix, float], stop: int) -> dict[Prefix, float]:
    """The same answers, each cut after its first stop token."""
    found: dict[Prefix, float] = defaultdict(float)
    for answer, share in answers.items():
        end = answer.index(stop) + 1 if stop in answer else len(answer)
        found[answer[:end]] += share
    return found


def total_variation(one: Mapping[Prefix, float], other: Mapping[Prefix, float]) -> float:
    keys = {*one, *other}
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in keys) / 2
