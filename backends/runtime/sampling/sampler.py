"""The tokens of one sequence, chosen one after another from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgecc.backends.base import FloatArray, IntArray
from edgecc.backends.runtime.grammar import Constraint
from edgecc.backends.runtime.sampling.distribution import (
    Distribution,
    Doubles,
    finite_best,
    sampled_distribution,
)
from edgecc.backends.runtime.sampling.greedy import best_token
from edgecc.backends.runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from edgecc.backends.runtime.sampling.params import SamplingParams
from edgecc.backends.runtime.sampling.penalties import LogitChanges
from edgecc.backends.runtime.sampling.streams import Purpose, RandomStream
from edgecc.errors import InternalError, RequestError


class Sampler:
    """Chooses tokens as `SamplingParams` says. It knows nothing of drafts and rounds.

    A draft that proposes its best tokens needs no other rule: the target's token of each row is
    chosen as if there were no draft, a proposal is accepted if it is that token, and what follows
    the first difference is not looked at. So the probability of acceptance is the target's of the
    proposal, which is as much as any lossless rule can accept from such a draft. And since random
    numbers go by position, the text is the same with any draft, any number of proposals, or none.

    Args:
        params: How to choose; with a seed, unless greedy.
        prompt: Ids of the prompt.
        num_tokens: Ids from here on are padding rows and are never chosen.
        constraint: What the text must follow, if it must; told each token that is chosen.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] | IntArray,
        num_tokens: int,
        constraint: Constraint | None = None,
    ) -> None:
        if not params.greedy and params.seed is None:
            raise InternalError("runtime/no-seed", "sampling needs a seed")
        self.params = params
        self._num_tokens = num_tokens
        self._position = len(prompt)
        self._stream = RandomStream(params.seed or 0)
        changes = bool(params.logit_bias) or params.penalizes
        self._changes = LogitChanges(params, prompt, num_tokens) if changes else None
        self._constraint = constraint
        self._logprobs: list[TokenLogprobs] = []

    @property
    def needs_logits(self) -> bool:
        """Whether the token with the target's largest logit is not all that is asked for."""
        return self.params.needs_logits or self._constraint is not None

    @property
    def finished(self) -> bool:
        """Whether nothing can be added to the text that is chosen so far."""
        return self._constraint is not None and self._constraint.finished

    def possible(self, proposals: tuple[int, ...]) -> tuple[int, ...]:
        """The proposals before the first that will not be chosen, whatever the logits are.

        Args:
            proposals: Tokens that may follow those chosen so far.
        """
        if self._constraint is None:
            return proposals
        return proposals[: self._constraint.count_allowed(proposals)]

    def choose(self, row: FloatArray) -> int:
        """The next token. Each call commits it: rows come in order, each token once.

        Args:
            row: Logits f32 `[V]` that follow the prompt and all tokens chosen so far.

        Raises:
            BackendError: The row has a NaN, or no probabilities follow from it.
            RequestError: A bias bans each token that the grammar allows, or the grammar turns out
                to be too complex.
        """
        token = best_token(row, self._num_tokens)
        if not self.needs_logits:
            return token
        logits = row[: self._num_tokens]
        if self._constraint is not None or self._changes is not None or not self.params.greedy:
            token = self._choose(logits)
        if self.params.logprobs is not None:
            self._logprobs.append(token_logprobs(logits, token, self.params.logprobs))
        if self._changes is not None:
            self._changes.add(token)
        if self._constraint is not None:
            self._constraint.advance(token)
        self._position += 1
        return token

    def distribution(self, row: FloatArray) -> Distribution:
        """What the next token is drawn from; with a temperature only."""
        return sampled_distribution(self._changed(row[: self._num_tokens]), self.params)

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the tokens chosen since the last call; empty unless asked for."""
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    def _changed(self, logits: FloatArray) -> FloatArray | Doubles:
        changed = logits if self._changes is None else self._changes.apply(logits)
        if self._constraint is None:
            return changed
        masked = np.where(self._constraint.allowed, changed, -np.inf)
        if self._changes is not None and masked.max() == -np.inf:
            raise RequestError(
                "grammar/all-banned",
                "logit_bias bans each token that the grammar allows",
                help="leave one of them out, or the grammar",
            )
        return masked

    def _choose(self, logits: FloatArray) -> int:
        if self.params.greedy:
            changed = self._changed(logits)
            finite_best(changed)  # else a banned token could be the best
            return int(changed.argmax())
        uniform = self._stream.uniform(self._position, Purpose.TOKEN)
        return self.distribution(logits).token(uniform)
