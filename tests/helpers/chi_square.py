"""Chi-square tests of samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def chi_square_limit(degrees: int) -> float:
    """What a sound sample exceeds once in about 1000 seeds, by Wilson and Hilferty.

    Tests have fixed seeds, so that a sound program passes always, or never.
    """
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def check_counts(counts: Counter[T], shares: Mapping[T, float]) -> None:
    """Check a sample against the probabilities of all that can come.

    Outcomes expected fewer than five times are one group.
    """
    total = counts.total()
    assert set(counts) <= {outcome for outcome, share in shares.items() if share}
    common = [outcome for outcome, share in shares.items() if share * total >= 5]
    groups = [(counts[outcome], shares[outcome] * total) for outcome in common]
    rest = total - sum(expected for _, expected in groups)
    if rest > 1:
        groups.append((total - sum(found for found, _ in groups), rest))
    statistic = sum((found - expected) ** 2 / expected for found, expected in groups)
    assert statistic < chi_square_limit(len(groups) - 1)
