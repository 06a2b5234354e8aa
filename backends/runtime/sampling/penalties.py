"""Biases and penalties: logits changed by what the request asks and by the tokens so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from edgecc.backends.base import FloatArray, IntArray
from edgecc.backends.runtime.sampling.distribution import Doubles
from edgecc.backends.runtime.sampling.params import SamplingParams


class LogitChanges:
    """Changes logits of one sequence, token after token.

    Bias first, then the repetition penalty over prompt and answer, then frequency and presence
    penalties over the answer: the order of vLLM; transformers has the first two, in this order.

    Args:
        params: What to change.
        prompt: Ids of the prompt; ids that are no tokens are passed over.
        num_tokens: Tokens of the model.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int] | IntArray, num_tokens: int
    ) -> None:
        self._params = params
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self._answer: Counter[int] = Counter()
        self._seen: IntArray = np.empty(0, dtype=np.int64)
        if params.repetition_penalty != 1.0:
            ids = np.unique(np.asarray(prompt, dtype=np.int64))
            self._seen = ids[(ids >= 0) & (ids < num_tokens)]

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        if self._params.penalizes:
            self._answer[token] += 1

    def apply(self, logits: FloatArray) -> Doubles:
        """Changed logits.

        Args:
            logits: f32 `[V]` of the tokens.

        Returns:
            A new array, f64 `[V]`.
        """
        params = self._params
        result = logits.astype(np.float64)
        with np.errstate(invalid="ignore"):  # a banned token whose logit is infinite becomes NaN
            result[self._bias_ids] += self._bias
        ids = np.fromiter(self._answer, dtype=np.int64, count=len(self._answer))
        if params.repetition_penalty != 1.0:
            seen = np.union1d(self._seen, ids)
            values, penalty = result[seen], params.repetition_penalty
            result[seen] = np.where(values < 0, values * penalty, values / penalty)
        if ids.size:
            counts = np.fromiter(self._answer.values(), dtype=np.float64, count=len(ids))
            result[ids] -= params.frequency_penalty * counts + params.presence_penalty
        return result
