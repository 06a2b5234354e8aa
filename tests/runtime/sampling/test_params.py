"""What a request may ask of sampling, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgecc.backends.runtime.sampling import (
    SamplingParams,
    params_from_generation_config,
    resolve_sampling,
)
from edgecc.errors import RequestError

LIMITS = {"num_tokens": 100, "vocab_size": 128}


def test_greedy_is_the_default():
    params = resolve_sampling(None, {}, **LIMITS)
    assert params == SamplingParams()
    assert params.greedy
    assert not params.needs_logits
    assert params.seed is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e300),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("logprobs", -1),
        ("logprobs", 1.5),
        ("logprobs", 101),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: "x"}),
        ("logit_bias", dict.fromkeys(range(100), -math.inf)),
    ],
)
def test_values_that_are_refused(name: str, value: Any):
    with pytest.raises(RequestError) as caught:
        resolve_sampling(None, {"temperature": 1.0, name: value}, **LIMITS)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.id == "request/bad-" + name.replace("_", "-")
    assert name in diagnostic.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_k", -1),
        ("top_k", 10**12),
        ("top_p", 0),
        ("top_p", 1),
        ("min_p", 1.0),
        ("seed", -1),
        ("seed", 2**64 - 1),
        ("seed", np.int64(-5)),
        ("logprobs", 0),
        ("logprobs", 100),
        ("logit_bias", {np.int64(3): -math.inf, 4: 100}),
    ],
)
def test_values_at_the_limits(name: str, value: Any):
    found = resolve_sampling(None, {"temperature": 1.0, name: value}, **LIMITS)
    assert getattr(found, name) == value


@pytest.mark.parametrize(
    ("token", "note"), [(100, "rows 100 to 127 of its head are padding"), (128, "has 128 rows")]
)
def test_a_bias_on_no_token(token: int, note: str):
    with pytest.raises(RequestError, match=f"names token {token}") as caught:
        resolve_sampling(None, {"logit_bias": {token: 1.0}}, **LIMITS)
    assert note in caught.value.diagnostics[0].notes[0]


def test_an_option_that_is_none():
    with pytest.raises(RequestError, match="no option 'temprature'") as caught:
        resolve_sampling(None, {"temprature": 1.0}, **LIMITS)
    assert "did you mean 'temperature'" in caught.value.diagnostics[0].help
    with pytest.raises(RequestError, match="must be SamplingParams"):
        resolve_sampling({"temperature": 1.0}, {}, **LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_options_that_need_a_temperature(option: dict[str, Any]):
    with pytest.raises(RequestError, match="without a temperature"):
        resolve_sampling(None, option, **LIMITS)
    assert resolve_sampling(None, {**option, "temperature": 0.0}, **LIMITS).greedy
    base = SamplingParams(temperature=0.5)
    assert not resolve_sampling(base, option, **LIMITS).greedy
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert resolve_sampling(None, neutral, **LIMITS).greedy


def test_options_replace_fields():
    base = SamplingParams(temperature=0.5, top_k=20, seed=3)
    found = resolve_sampling(base, {"top_k": 5}, **LIMITS)
    assert (found.temperature, found.top_k, found.seed) == (0.5, 5, 3)
    assert base.top_k == 20


def test_a_seed_is_drawn_where_one_is_needed():
    seeds = {resolve_sampling(None, {"temperature": 1.0}, **LIMITS).seed for _ in range(5)}
    assert None not in seeds
    assert len(seeds) == 5
    assert resolve_sampling(None, {"temperature": 1.0, "seed": 9}, **LIMITS).seed == 9


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"temperature": 1.0}, True),
        ({"presence_penalty": 0.5}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"logprobs": 0}, True),
        ({"seed": 4}, False),
        ({"temperature": 1e-6, "top_k": 4}, False),
    ],
)
def test_what_needs_logits(options: dict[str, Any], needed: bool):
    assert SamplingParams(**options).needs_logits is needed


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"temperature": None, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
    ],
)
def test_what_a_checkpoint_recommends(config: dict[str, Any], expected: dict[str, Any]):
    assert params_from_generation_config(config) == SamplingParams(**expected)


def test_a_recommendation_that_is_out_of_range():
    with pytest.raises(RequestError, match="temperature must be a number"):
        params_from_generation_config({"temperature": "hot"})


def test_parameters_are_values():
    one = SamplingParams(temperature=1, logit_bias={3: 1})
    assert one == SamplingParams(temperature=1.0, logit_bias={3: 1.0})
    assert hash(one) == hash(SamplingParams(temperature=1.0, logit_bias={3: 1.0}))
    bias = {3: 1.0}
    kept = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert kept.logit_bias == {3: 1.0}
