"""Log-probabilities of the target's own distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgecc.backends.base import FloatArray
from edgecc.backends.runtime.sampling.distribution import finite_best, largest


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a token was, and what else was.

    Attributes:
        token_id: The token chosen.
        logprob: Its natural logarithm of probability; -inf for a token that had none.
        top: The most probable tokens with theirs, best first; of equal ones the first ids first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def as_dict(self) -> dict[str, object]:
        """JSON-compatible: -inf, which JSON has not, is None."""
        first, *top = (
            {"token_id": token, "logprob": value if math.isfinite(value) else None}
            for token, value in ((self.token_id, self.logprob), *self.top)
        )
        return {**first, "top": top}


def token_logprobs(logits: FloatArray, token: int, count: int) -> TokenLogprobs:
    """Log-softmax of a row at the token chosen and at the most probable ones.

    Args:
        logits: f32 `[V]` of the tokens, as the target gave them.
        token: The token chosen.
        count: How many of the most probable tokens to return.

    Raises:
        BackendError: The largest logit is infinite.
    """
    best = finite_best(logits)
    # Sums of 32-bit terms in 64 bits: the logarithm is off by less than 1e-7.
    total = best + float(np.log(np.exp(logits - np.float32(best)).sum(dtype=np.float64)))
    top = largest(logits, count) if count else np.empty(0, dtype=np.int64)
    order = top[np.argsort(-logits[top], kind="stable")]
    pairs = tuple((int(i), float(logits[i]) - total) for i in order)
    return TokenLogprobs(token, float(logits[token]) - total, pairs)
