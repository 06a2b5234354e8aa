"""What a scale may be, so that the values of a weight are numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_F32_MAX = float(np.finfo(np.float32).max)
_F32_TINY = float(np.finfo(np.float32).smallest_subnormal)
E2M1_RANGE = (0.5, 6.0)
"""The smallest magnitude of an FP4 code but zero, and the largest one."""
E4M3_RANGE = (2.0**-9, 448.0)
"""The same of an FP8 code."""


@dataclass(frozen=True, slots=True)
class ScaleRange:
    """Scales with which every value of a weight is a float32 number, and none but zero is zero.

    A producer takes a scale from the largest magnitude of what it scales, a float32 number itself:
    one beyond the range cannot come from there.

    Attributes:
        least: The smallest such scale.
        most: The largest one.
        reason: Why there is no more, for the message; empty if any positive number will do.
    """

    least: float = 0.0
    most: float = math.inf
    reason: str = ""

    @classmethod
    def of_factor(cls, smallest: float, largest: float) -> ScaleRange:
        """For a factor of values between `smallest` and `largest`."""
        reason = f"the values, up to {largest:g} times the scale, would not be float32 numbers"
        return cls(_F32_TINY / smallest, _F32_MAX / largest, reason)

    @classmethod
    def of_divisor(cls, smallest: float, largest: float) -> ScaleRange:
        """For a divisor of values between `smallest` and `largest`."""
        reason = f"the values, up to {largest:g} over the scale, would not be float32 numbers"
        return cls(largest / _F32_MAX, smallest / _F32_TINY, reason)

    def refuses(self, value: float) -> str:
        """What was expected instead of a value; empty if it is in the range."""
        if not (math.isfinite(value) and value > 0):
            return "expected a finite positive number"
        if not self.least <= value <= self.most:
            return f"expected {self.least:.2g} to {self.most:.2g}: {self.reason}"
        return ""


ANY_SCALE = ScaleRange()
FP8_SCALES = ScaleRange.of_factor(*E4M3_RANGE)
