"""What a draft proposes, and how much of it is worth verifying by its own account."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposals:
    """Tokens after the newest committed one.

    Attributes:
        tokens: Ids, in order.
        confidence: By token: how sure the draft is that it is accepted if all before it are, before
            the sigmoid. Empty if it was not asked, or does not say.
    """

    tokens: Sequence[int] = ()
    confidence: Sequence[float] = ()


class ConfidenceThreshold:
    """Leaves out the first proposal the draft is not sure of, and all after it.

    A slot's confidence depends on the tokens before it and not on its own, so the choice does not
    favour any token, and what is verified is as lossless as before. Source: DeepSpec, the static
    threshold; 0 leaves out nothing.

    Args:
        value: Least confidence, a probability from 0 to 1.
    """

    def __init__(self, value: float) -> None:
        self.active = value > 0.0
        self._least = math.log(value) - math.log1p(-value) if 0.0 < value < 1.0 else math.inf

    def kept(self, proposals: Proposals) -> Sequence[int]:
        """The leading tokens that are to be verified, possibly none."""
        if not self.active:
            return proposals.tokens
        for slot, confidence in enumerate(proposals.confidence):
            if not confidence >= self._least:  # NaN is not sure either
                return proposals.tokens[:slot]
        return proposals.tokens
