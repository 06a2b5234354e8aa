"""Limits of chi-square tests."""

from __future__ import annotations

import math


def chi_square_limit(degrees: int) -> float:
    """What a sound sample exceeds once in about 1000 seeds, by Wilson and Hilferty.

    Tests have fixed seeds, so that a sound program passes always, or never.
    """
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3
