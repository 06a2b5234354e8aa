"""Acceptance of proposals that a draft sampled, without a trace in the text.

Each rule takes proposals that were drawn from known distributions, keeps some of the first, and
adds one token, such that what is committed is distributed as if the target alone had written it.

The rules need the *corrected* distributions of the draft: those the proposals were really drawn
from, with the Markov bias, the temperature and the tokens of the target. `Distribution.certain`
describes a draft that proposes its best token: it is exact, but then the coupled choice of
`Sampler` accepts as much, and does not make the text depend on what was proposed.

Sources: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Sun et
al., "Block verification accelerates speculative decoding", 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from edgecc.backends.runtime.sampling.distribution import Distribution
from edgecc.backends.runtime.sampling.streams import Purpose, RandomStream


class Chance(Protocol):
    """Where the rules get their random decisions from."""

    def accepts(self, index: int, probability: float) -> bool:
        """Whether slot `index` is accepted; true with the given probability."""
        ...

    def token(self, index: int, distribution: Distribution, purpose: Purpose) -> int:
        """The token of slot `index`, drawn from a distribution."""
        ...


class RoundChance:
    """The decisions of one round from a stream of random numbers.

    Args:
        stream: Of the sequence.
        start: Position of the round's anchor: no other round of the sequence has the same.
    """

    def __init__(self, stream: RandomStream, start: int) -> None:
        self._stream = stream
        self._start = start

    def accepts(self, index: int, probability: float) -> bool:
        """See `Chance.accepts`."""
        return self._stream.uniform(self._start, Purpose.ACCEPT, index) < probability

    def token(self, index: int, distribution: Distribution, purpose: Purpose) -> int:
        """See `Chance.token`."""
        return distribution.token(self._stream.uniform(self._start, purpose, index))


def accept_tokens(
    proposals: Sequence[int],
    drafts: Sequence[Distribution],
    target: Callable[[int], Distribution],
    chance: Chance,
) -> tuple[int, int]:
    """Accept one proposal after another, each with probability min(1, p / q).

    Rows after the first rejection are not looked at.

    Args:
        proposals: m tokens.
        drafts: What each of them was drawn from: `drafts[i]` given the proposals before i.
        target: The target's distribution of row i, 0 to m, given the first i proposals.
        chance: The random decisions.

    Returns:
        How many proposals are accepted, and the token that follows them.
    """
    for index, (proposal, draft) in enumerate(zip(proposals, drafts, strict=True)):
        row = target(index)
        p, q = row.probability(proposal), draft.probability(proposal)
        if not chance.accepts(index, 1.0 if p >= q else p / q):
            return index, chance.token(index, _residual(1.0, row, draft), Purpose.CORRECTION)
    count = len(proposals)
    return count, chance.token(count, target(count), Purpose.TOKEN)


def accept_block(
    proposals: Sequence[int],
    drafts: Sequence[Distribution],
    target: Callable[[int], Distribution],
    chance: Chance,
) -> tuple[int, int]:
    """Accept the longest beginning that block verification lets pass.

    It decides about all proposals together and accepts no fewer of them on average than
    `accept_tokens`, more if drafts err in both directions. Where each draft is certain both accept
    the same.

    Args:
        proposals: m tokens.
        drafts: What each of them was drawn from, as for `accept_tokens`.
        target: The target's distribution of row i, as for `accept_tokens`.
        chance: The random decisions.

    Returns:
        How many proposals are accepted, and the token that follows them.
    """
    count = len(proposals)
    weights = [1.0]
    for index, (proposal, draft) in enumerate(zip(proposals, drafts, strict=True)):
        p, q = weights[-1] * target(index).probability(proposal), draft.probability(proposal)
        weights.append(1.0 if p >= q else p / q)
    for kept in range(count, 0, -1):
        weight = weights[kept]
        if kept == count:
            passes = weight
        else:
            excess = _excess(weight, target(kept), drafts[kept])
            passes = 1.0 if weight == 1.0 else excess / (excess + 1.0 - weight)
        if chance.accepts(kept, passes):
            break
    else:
        kept = 0
    if kept == count:
        return count, chance.token(count, target(count), Purpose.TOKEN)
    rest = _residual(weights[kept], target(kept), drafts[kept])
    return kept, chance.token(kept, rest, Purpose.CORRECTION)


def end_at_stop(
    proposals: Sequence[int], accepted: int, token: int, stop_ids: Collection[int]
) -> tuple[int, int]:
    """Drop what follows a stop token among the accepted proposals.

    Returns:
        How many proposals are accepted, and the token that follows them: the stop token, if there
        is one, as it is in greedy decoding.
    """
    for index, proposal in enumerate(proposals[:accepted]):
        if proposal in stop_ids:
            return index, proposal
    return accepted, token


def _residual(weight: float, row: Distribution, draft: Distribution) -> Distribution:
    """What is left of `weight * row` where it exceeds the draft."""
    p = row.probabilities(row.ids)
    rest = np.maximum(weight * p - draft.probabilities(row.ids), 0.0)
    # Nothing is left only if both are equal but for rounding: then the row itself is right.
    return Distribution(row.ids, rest if rest.any() else p)


def _excess(weight: float, row: Distribution, draft: Distribution) -> float:
    p = row.probabilities(row.ids)
    return float(np.maximum(weight * p - draft.probabilities(row.ids), 0.0).sum())
