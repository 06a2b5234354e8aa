"""What a request may ask of sampling, checked before the model runs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np

from edgecc.errors import RequestError, did_you_mean

GREEDY_BELOW = 1e-5
"""Temperatures below this one mean greedy decoding, as in vLLM."""

MAX_BIAS = 100.0
"""Largest size of a bias, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The default is greedy decoding.

    The target's logits are changed in this order: `logit_bias`, the three penalties, `temperature`,
    `top_k`, `top_p`, `min_p`; see `docs/sampling.md`.

    Attributes:
        temperature: Logits are divided by it. 0 means greedy: the token with the largest logit, of
            equal ones the first; `top_k`, `top_p`, `min_p` and `seed` then change nothing.
        top_k: Keep this many of the most probable tokens; 0 and -1 keep all.
        top_p: Keep the fewest of the most probable tokens that have at least this probability
            together. 0 keeps one token, 1 keeps all.
        min_p: Keep tokens with at least this share of the largest probability; 0 keeps all.
        repetition_penalty: Divides positive logits and multiplies negative ones of tokens that are
            in the prompt or in the answer; above 1 discourages them.
        presence_penalty: Subtracted from the logits of tokens that are in the answer.
        frequency_penalty: Subtracted as often as the token is in the answer.
        logit_bias: Added to the logits of tokens, by id; -inf bans one. Not to be changed.
        seed: Any 64-bit number, with or without sign. The same seed gives the same text. None
            draws one for each request.
        logprobs: Also return the log-probability of each token and of this many most probable ones,
            in the target's own distribution: before all of the above. None returns none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check each value for itself.

        Raises:
            RequestError: One is no number, or out of range.
        """
        checked: dict[str, object] = {
            name: _number(name, getattr(self, name), low, high)
            for name, (low, high) in _RANGES.items()
        }
        checked["top_k"] = _whole("top_k", self.top_k, -1, None)
        if self.logprobs is not None:
            checked["logprobs"] = _whole("logprobs", self.logprobs, 0, None)
        if self.seed is not None:
            checked["seed"] = _whole("seed", self.seed, -(2**63), 2**64 - 1)
        checked["logit_bias"] = _bias(self.logit_bias)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the best token is chosen, and no random number is needed."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalizes(self) -> bool:
        """Whether a choice depends on which tokens came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def with_new_seed(self) -> SamplingParams:
        """The same with a seed that is drawn now."""
        return replace(self, seed=secrets.randbits(64))

    @property
    def needs_logits(self) -> bool:
        """Whether the token with the target's largest logit is not all that is asked for."""
        changed = bool(self.logit_bias) or self.penalizes
        return changed or not self.greedy or self.logprobs is not None


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams` as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    logprobs: int | None


def resolve_sampling(
    sampling: SamplingParams | None,
    options: Mapping[str, Any],
    *,
    num_tokens: int,
    vocab_size: int,
) -> SamplingParams:
    """Parameters of one request.

    Args:
        sampling: Parameters to start from; None means the defaults.
        options: Fields that replace theirs.
        num_tokens: Tokens of the model.
        vocab_size: Rows of its head; ids from `num_tokens` on are padding.

    Returns:
        Parameters that fit the model, with a seed where random numbers are needed.

    Raises:
        RequestError: A name is unknown, a value out of range, a token is none of the model's, or an
            option only matters with a temperature, and there is none.
    """
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise RequestError(
            "request/bad-sampling", f"sampling must be SamplingParams, not {sampling!r}"
        )
    known = SamplingOptions.__annotations__
    for name in options:
        if name not in known:
            raise RequestError(
                "request/unknown-option",
                f"there is no option {name!r}",
                help=did_you_mean(name, known),
            )
    params = replace(SamplingParams() if sampling is None else sampling, **options)
    _check_temperature_given(params, options)
    _check_fits(params, num_tokens, vocab_size)
    if params.greedy or params.seed is not None:
        return params
    return params.with_new_seed()


def params_from_generation_config(config: Mapping[str, Any]) -> SamplingParams:
    """What the authors of a checkpoint recommend in its `generation_config.json`.

    Keys that are absent are neutral, as in vLLM: `top_k` is off, not 50 as in transformers.
    With `do_sample: false` decoding is greedy; the repetition penalty still holds.

    Raises:
        RequestError: A value is out of range.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("do_sample") is False:
        found = {name: found[name] for name in ("repetition_penalty",) if name in found}
        found["temperature"] = 0.0
    return SamplingParams(**{"temperature": 1.0, **found})


_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Least and largest value; infinity itself is never one."""


def _number(name: str, value: Any, low: float, high: float) -> float:
    if _is_number(value) and math.isfinite(value) and low <= value <= high:
        return float(value)
    span = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
    raise _bad(name, f"{name} must be a number, {span}, not {value!r}")


def _whole(name: str, value: Any, low: int, high: int | None) -> int:
    if _is_whole(value) and low <= value and (high is None or value <= high):
        return int(value)
    span = f", {low} or more," if high is None else " of 64 bits,"
    raise _bad(name, f"{name} must be a whole number{span} not {value!r}")


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _bad("logit_bias", f"logit_bias must map token ids to numbers, not {bias!r}")
    for token, value in bias.items():
        if not _is_whole(token) or token < 0:
            raise _bad("logit_bias", f"{token!r} in logit_bias is no token id")
        if not _is_number(value) or not (abs(value) <= MAX_BIAS or value == -math.inf):
            raise _bad(
                "logit_bias",
                f"logit_bias of token {token} must be a number from {-MAX_BIAS:g} to "
                f"{MAX_BIAS:g}, or -inf, not {value!r}",
            )
    return {int(token): float(value) for token, value in bias.items()}


def _check_temperature_given(params: SamplingParams, options: Mapping[str, Any]) -> None:
    """Narrowing a distribution that is never sampled is a slip, unless greedy was asked for."""
    if not params.greedy or "temperature" in options:
        return
    neutral = SamplingParams()
    for name in ("top_k", "top_p", "min_p"):
        if name in options and options[name] != getattr(neutral, name):
            raise RequestError(
                "request/no-temperature",
                f"{name} is {options[name]!r}, but decoding is greedy without a temperature",
                help="set a temperature as well: 1.0, or 0 if greedy decoding is meant",
            )


def _check_fits(params: SamplingParams, num_tokens: int, vocab_size: int) -> None:
    for token in params.logit_bias:
        if token >= num_tokens:
            padding = token < vocab_size
            raise RequestError(
                "request/token-out-of-range",
                f"logit_bias names token {token}: the model has tokens 0 to {num_tokens - 1}",
                notes=[
                    f"rows {num_tokens} to {vocab_size - 1} of its head are padding"
                    if padding
                    else f"its head has {vocab_size} rows"
                ],
            )
    if list(params.logit_bias.values()).count(-math.inf) >= num_tokens:
        raise _bad("logit_bias", "logit_bias bans every token")
    if params.logprobs is not None and params.logprobs > num_tokens:
        raise _bad(
            "logprobs", f"logprobs is {params.logprobs}, and the model has {num_tokens} tokens"
        )


def _bad(name: str, message: str) -> RequestError:
    return RequestError(f"request/bad-{name.replace('_', '-')}", message)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1000
    return isinstance(value, (float, np.integer, np.floating))


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
