"""Prompt lookup: proposals without a draft, from what followed the same tokens before.

Plain data that the compiler and the runtime share.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import UsageError

NGRAM = "ngram"
"""The speculation method that needs no draft, by the name that vLLM has for it."""

DEFAULT_LENGTH = 5
"""Tokens that have to repeat where nothing is said, as in vLLM."""

DEFAULT_PROPOSALS = 5
"""Proposals of a round where nothing is said."""


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """How many of the last tokens have to repeat: as many as possible from `max` down to `min`.

    Attributes:
        min: Fewest tokens, at least 1.
        max: Most tokens.
    """

    min: int
    max: int

    def __post_init__(self) -> None:
        """Check both numbers.

        Raises:
            UsageError: One is no whole number from 1, or they are in the wrong order.
        """
        for name, value in (("min", self.min), ("max", self.max)):
            if type(value) is not int or value < 1:
                raise UsageError(
                    "usage/prompt-lookup",
                    f"prompt_lookup_{name} must be a whole number of at least 1, not {value!r}",
                )
        if self.min > self.max:
            raise UsageError(
                "usage/prompt-lookup",
                f"prompt_lookup_min is {self.min}, more than prompt_lookup_max, {self.max}",
                help="give both, or one of them for both",
            )

    @classmethod
    def of(cls, min: int | None, max: int | None) -> PromptLookup:
        """Both numbers from those that were given: one stands for both, as in vLLM.

        Raises:
            UsageError: See `PromptLookup`.
        """
        low = min if min is not None else max
        high = max if max is not None else min
        return cls(DEFAULT_LENGTH if low is None else low, DEFAULT_LENGTH if high is None else high)
