"""Greedy choice."""

from __future__ import annotations

from edgecc.backends.base import FloatArray
from edgecc.errors import BackendError


def best_token(row: FloatArray, num_tokens: int) -> int:
    """The token with the largest logit; of equal ones the first.

    Args:
        row: Logits f32 `[V]`.
        num_tokens: Ids from here on are padding rows and are never chosen.

    Raises:
        BackendError: The row has a NaN. `argmax` answers the position of the first one, so that a
            single comparison finds out.
    """
    candidates = row[:num_tokens]
    token = int(candidates.argmax())
    best = candidates[token]
    if best != best:
        raise BackendError(
            "runtime/logits-not-a-number",
            f"the target's logit for token {token} is not a number",
            help="run `edgecc verify` on the bundle: it finds the first layer that differs",
        )
    return token
