"""Probabilities of a row of logits, and tokens from them.

Rows have as many entries as the model has tokens, 248,320 for the largest models, so nothing is
sorted that a partition can cut off, and what is cut off first is never exponentiated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.backends.base import IntArray
from edgecc.backends.runtime.sampling.params import SamplingParams
from edgecc.errors import BackendError

Doubles: TypeAlias = NDArray[np.float64]

_NEAR = -10.0
"""Weights below exp of this are computed in 32 bits."""

_ZERO = -1000.0
"""Exp of this is 0, in 64 bits as well."""

_PART = 1 << 14
"""Numbers computed at once: a part and what comes of it fit into a core's caches."""

_BINS_PER_UNIT, _MOST_BINS = 64, 4096
"""Of the histogram of keys: its last bin takes weights below exp(-64), which no share reaches."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Weights of the tokens that are possible; all others have none.

    Attributes:
        ids: i64 `[n]`, ascending.
        weights: f64 `[n]`, none negative, in any scale.
    """

    ids: IntArray
    weights: Doubles

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """One token, always: what a draft's choice of the best one amounts to."""
        return cls(np.array([token]), np.ones(1))

    @classmethod
    def of(cls, probabilities: Doubles) -> Distribution:
        """Of weights of all tokens, f64 `[V]`."""
        ids = np.flatnonzero(probabilities)
        return cls(ids, probabilities[ids])

    def token(self, uniform: float) -> int:
        """The token at a place of the distribution function.

        Args:
            uniform: In [0, 1). Tokens take up intervals in the order of their ids.
        """
        parts = _parts(len(self.weights))
        sums = np.cumsum([self.weights[part].sum() for part in parts])
        place = uniform * float(sums[-1])
        chosen = _reached(sums, place)
        if chosen:
            place -= float(sums[chosen - 1])
        inside = _reached(np.cumsum(self.weights[parts[chosen]]), place)
        return int(self.ids[parts[chosen].start + inside])

    def probability(self, token: int) -> float:
        """Of one token."""
        return float(self.probabilities(np.array([token]))[0])

    def probabilities(self, ids: IntArray) -> Doubles:
        """Of some tokens, f64 as `ids`."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        weights = np.where(self.ids[places] == ids, self.weights[places], 0.0)
        return np.asarray(weights / self.weights.sum(), dtype=np.float64)

    def dense(self, num_tokens: int) -> Doubles:
        """Probabilities of all tokens, f64 `[num_tokens]`."""
        result = np.zeros(num_tokens)
        result[self.ids] = self.weights / self.weights.sum()
        return result


def sampled_distribution(logits: NDArray[Any], params: SamplingParams) -> Distribution:
    """Temperature, then `top_k`, `top_p` and `min_p`, each on what the one before has left.

    Args:
        logits: `[V]` of the tokens, after biases and penalties, none of them NaN.
        params: With a temperature.

    Returns:
        The tokens that are left, at least one.

    Raises:
        BackendError: The largest logit is infinite, so there are no probabilities.
    """
    best = finite_best(logits)
    ids = _candidates(logits, best, params)
    shifted = (logits if ids is None else logits[ids]).astype(np.float64)
    shifted -= best
    shifted /= params.temperature
    np.maximum(shifted, _ZERO, out=shifted)
    weights = _exp(shifted)
    if params.top_p < 1.0:
        kept = _nucleus(shifted, weights, params.top_p)
        ids, weights = (kept if ids is None else ids[kept]), weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)  # the largest weight is 1
        ids, weights = (kept if ids is None else ids[kept]), weights[kept]
    return Distribution(np.arange(len(weights)) if ids is None else ids, weights)


def finite_best(logits: NDArray[Any]) -> float:
    """The largest logit of a row.

    Raises:
        BackendError: It is infinite, so there are no probabilities.
    """
    best = float(logits.max())
    if not np.isfinite(best):
        raise BackendError(
            "runtime/infinite-logits",
            f"the largest logit is {best}: no probabilities follow from that",
            help="run `edgecc verify` on the bundle: it finds the first layer that differs",
        )
    return best


def largest(values: NDArray[Any], count: int) -> IntArray:
    """Places of exactly `count` largest values, ascending; of equal values the first ones.

    Args:
        values: `[n]`, none NaN.
        count: From 1 to n.
    """
    if count >= len(values):
        return np.arange(len(values))
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(above)]
    places = np.concatenate([above, equal])
    places.sort()
    return places


def _candidates(logits: NDArray[Any], best: float, params: SamplingParams) -> IntArray | None:
    """What `top_k`, or `min_p` where nothing comes before it, leaves; None means all."""
    if params.top_k > 0:
        return largest(logits, params.top_k) if params.top_k < len(logits) else None
    if params.min_p > 0.0 and params.top_p == 1.0:
        # A little more than what is kept: the exact rule follows.
        reach = params.temperature * (np.log(params.min_p) - 1e-3)
        return np.flatnonzero(logits >= best + reach)
    return None


def _parts(count: int) -> list[slice]:
    """Pieces of an array: fresh memory for whole rows costs more than computing them."""
    return [slice(first, min(first + _PART, count)) for first in range(0, count, _PART)]


def _reached(sums: Doubles, place: float) -> int:
    """Where ascending sums exceed a place; the last that adds something, if rounding hides it."""
    last = np.searchsorted(sums, sums[-1], side="left")
    return int(min(np.searchsorted(sums, place, side="right"), last))


def _exp(shifted: Doubles) -> Doubles:
    """Of numbers up to 0, in 64 bits where the weight is and within 2e-7 of it elsewhere."""
    weights = np.empty_like(shifted)
    for part in _parts(len(shifted)):
        weights[part] = _exp_part(shifted[part])
    return weights


def _exp_part(shifted: Doubles) -> Doubles:
    near = np.flatnonzero(shifted >= _NEAR)
    if 2 * len(near) > len(shifted):
        return np.exp(shifted)
    coarse = shifted.astype(np.float32)
    weights = shifted - coarse
    weights += 1.0  # exp(a + b) is exp(a) * (1 + b) for so small a rest
    weights *= np.exp(coarse, out=coarse)
    weights[near] = np.exp(shifted[near])
    return weights


def _nucleus(keys: Doubles, weights: Doubles, share: float) -> IntArray:
    """Places of the fewest largest keys whose weights have a share of the whole, ascending.

    A histogram finds the narrow range of keys where the share is reached; only that is sorted.

    Args:
        keys: `[n]`, none positive: what weights are compared by; of equal keys the first come
            first.
        weights: `[n]`.
        share: From 0 to 1; at least one place is kept.
    """
    masses = np.zeros(_MOST_BINS)
    for part in _parts(len(keys)):
        bins = np.minimum(keys[part] * -_BINS_PER_UNIT, _MOST_BINS - 1).astype(np.intp)
        masses += np.bincount(bins, weights[part], minlength=_MOST_BINS)
    sums = np.cumsum(masses)
    need = share * float(sums[-1])
    cut = int(np.searchsorted(sums, need, side="left"))
    before = float(sums[cut - 1]) if cut else 0.0
    # The bounds of a bin are exact: they are multiples of a power of 2.
    upper = -cut / _BINS_PER_UNIT
    lower = -(cut + 1) / _BINS_PER_UNIT if cut < _MOST_BINS - 1 else -np.inf
    places = np.flatnonzero((keys <= upper) & (keys > lower))
    order = places[np.argsort(-keys[places], kind="stable")]
    count = int(np.searchsorted(before + np.cumsum(weights[order]), need, side="left")) + 1
    result = np.concatenate([np.flatnonzero(keys > upper), order[:count]])
    result.sort()
    return result
