"""Sampling: which token follows a row of the target's logits.

`SamplingParams` says how, a `Sampler` chooses the tokens of one sequence. Proposals of drafts that
sample themselves are accepted by the rules of `rejection`.
"""

from __future__ import annotations

from edgecc.backends.runtime.sampling.distribution import Distribution, sampled_distribution
from edgecc.backends.runtime.sampling.greedy import best_token
from edgecc.backends.runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from edgecc.backends.runtime.sampling.params import (
    SamplingOptions,
    SamplingParams,
    params_from_generation_config,
    resolve_sampling,
)
from edgecc.backends.runtime.sampling.sampler import Sampler
from edgecc.backends.runtime.sampling.streams import Purpose, RandomStream

__all__ = [
    "Distribution",
    "Purpose",
    "RandomStream",
    "Sampler",
    "SamplingOptions",
    "SamplingParams",
    "TokenLogprobs",
    "best_token",
    "params_from_generation_config",
    "resolve_sampling",
    "sampled_distribution",
    "token_logprobs",
]
