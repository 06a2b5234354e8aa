"""The confidence threshold: less is verified, and the text stays what it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime import (
    Generator,
    LookupInfo,
    ModelInfo,
    PlainDecoder,
    Round,
    SpeculativeDecoder,
)
from edgecc.backends.runtime.proposals import ConfidenceThreshold, Proposals
from edgecc.backends.runtime.sampling import SamplingParams
from edgecc.errors import RequestError
from edgecc.prompt_lookup import PromptLookup

from .fakes import (
    Pair,
    by_hash,
    confidence_after,
    continue_greedily,
    fold,
    make_pair,
    on_device,
    random_logits,
)

NUM_TOKENS = 37
PROMPT = [3, 1, 4, 1, 5]
TEMPERATURE = SamplingParams(temperature=0.8, seed=5)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


THRESHOLDS = st.one_of(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.floats(0, 1))


@given(st.lists(st.floats(-40, 40, width=32), max_size=7), THRESHOLDS)
def test_the_first_slot_below_it_ends_the_proposals(scores: list[float], value: float) -> None:
    """By the definition; where rounding decides, either is right."""
    tokens = list(range(10, 10 + len(scores)))
    kept = ConfidenceThreshold(value).kept(Proposals(tokens, scores))
    assert list(kept) == tokens[: len(kept)]
    near = 1e-12
    assert all(sigmoid(s) >= value - near for s in scores[: len(kept)])
    if len(kept) < len(tokens):
        assert sigmoid(scores[len(kept)]) < value + near


@pytest.mark.parametrize("value", [1e-300, 0.5, 1.0])
def test_what_is_no_number_is_not_sure(value: float) -> None:
    proposals = Proposals([1, 2, 3], [50.0, math.nan, 50.0])
    assert len(ConfidenceThreshold(value).kept(proposals)) == (value < 1)
    assert list(ConfidenceThreshold(0.0).kept(proposals)) == [1, 2, 3]


def decode(
    pair: Pair,
    count: int,
    wanted: int,
    threshold: float,
    *,
    prompt: Sequence[int] = PROMPT,
    sampling: SamplingParams | None = None,
) -> list[Round]:
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(
        pair.session, pair.model, pair.model.draft, wanted, confidence_threshold=threshold
    )
    return list(decoder.rounds(prompt, count, (), sampling))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for made in rounds for token in made.tokens]


def scores_after(prefix: Sequence[int], proposals: Sequence[int]) -> list[float]:
    """What the fake draft says about each of the proposals after a prefix, and of the next one."""
    state, scores = 0, []
    for place, token in enumerate([*prefix, *proposals], 1):
        state = fold(state, token)
        if place >= len(prefix):
            scores.append(sigmoid(confidence_after(state)))
    return scores


@given(
    prompt=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=20),
    count=st.integers(1, 40),
    plan=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    wanted=st.integers(1, 7),
    threshold=THRESHOLDS,
    log_rows=st.sampled_from([0, 8]),
    device=st.booleans(),
)
def test_greedy_text_stays(
    prompt: list[int],
    count: int,
    plan: list[int],
    wanted: int,
    threshold: float,
    log_rows: int,
    device: bool,
) -> None:
    """By calls and by rounds on the device; each round verifies what the draft was sure of."""
    pair = make_pair(plan=plan, capacity=71, max_model_len=64, log_rows=log_rows, confidence=True)
    rounds = decode(on_device(pair)[0] if device else pair, count, wanted, threshold, prompt=prompt)
    made = tokens_of(rounds)
    assert made == continue_greedily(prompt, len(made), by_hash(NUM_TOKENS))
    assert len(made) == min(count, 64 - len(prompt))
    done = 1
    for step in rounds[1:]:
        *sure, following = scores_after([*prompt, *made[:done]], step.proposed)
        assert all(score > threshold - 1e-6 for score in sure)
        assert not step.withheld or 0 < threshold > following - 1e-6
        assert len(step.proposed) + step.withheld <= wanted
        done += len(step.tokens)


def test_fewer_rows_are_verified() -> None:
    """A round without a proposal the draft is sure of is a plain step."""
    pair = make_pair(capacity=64, confidence=True)
    rounds = decode(pair, 30, 7, 0.5)
    assert {step.withheld for step in rounds[1:]} >= {3, 7}
    _, *calls = pair.target.calls
    assert [rows for _, rows, _ in calls] == [1 + len(step.proposed) for step in rounds[1:]]
    assert len(pair.draft.calls) == len(rounds) - 1
    everything = decode(make_pair(capacity=64), 30, 7, 0.0)
    assert sum(len(r.proposed) for r in rounds) < sum(len(r.proposed) for r in everything)
    assert all(step.withheld == 0 for step in everything)


@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0])
def test_rounds_on_the_device_account_as_calls_do(threshold: float) -> None:
    def facts(rounds: list[Round]) -> list[tuple[object, ...]]:
        return [(r.tokens, r.proposed, r.accepted, r.withheld) for r in rounds]

    options: dict[str, Any] = {"plan": [7, 2, 0], "max_model_len": 64, "confidence": True}
    calls = decode(make_pair(capacity=64, **options), 40, 5, threshold)
    device, ran = on_device(make_pair(capacity=71, **options))
    assert facts(decode(device, 40, 5, threshold)) == facts(calls)
    assert len(ran.ran) == len(calls) - 1


@given(st.integers(0, 2**32), THRESHOLDS, st.integers(1, 7))
def test_sampled_text_stays(seed: int, threshold: float, wanted: int) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, seed=seed)

    def pair() -> Pair:
        return make_pair(vocab_size=9, num_tokens=7, logits=random_logits(7), plan=[7, 1])

    plain = pair()
    expected = PlainDecoder(plain.session, plain.model).rounds(PROMPT, 25, (), params)
    found = decode(pair(), 25, wanted, threshold, sampling=params)
    assert tokens_of(found) == tokens_of(list(expected))


# --- requests -------------------------------------------------------------------------------------


def opened(pair: Pair, model: ModelInfo | None = None) -> Generator:
    return Generator(pair.engine, model or pair.model)


def test_a_request_has_it() -> None:
    pair = make_pair(confidence=True)
    with opened(pair) as generator:
        plain = generator.generate(token_ids=PROMPT, max_new_tokens=30, speculation=False)
        found = generator.generate(token_ids=PROMPT, max_new_tokens=30, confidence_threshold=0.5)
        assert found.token_ids == plain.token_ids
        assert found.stats.withheld == sum(found.stats.withheld_by_round) > 0
        request = generator.request(token_ids=PROMPT, confidence_threshold=np.float32(0.5))
        assert request.confidence_threshold == 0.5
        assert generator.request(token_ids=PROMPT).confidence_threshold == 0.0


def test_zero_needs_no_head() -> None:
    with opened(make_pair()) as generator:
        assert generator.request(token_ids=PROMPT, confidence_threshold=0).lookup is None


def test_plain_decoding_has_no_use_for_it() -> None:
    with opened(make_pair(confidence=True)) as generator:
        asked: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 9, "speculation": False}
        found = generator.generate(**asked, confidence_threshold=0.5)
        assert found.stats.withheld == 0


LOOKUP = LookupInfo(7, PromptLookup(1, 3))


@pytest.mark.parametrize(
    ("options", "asked", "id", "words"),
    [
        ({}, {}, "request/no-confidence", "draft (dspark) does not tell how sure it is"),
        ({"plan": None}, {}, "request/no-draft", "no draft"),
        (
            {"confidence": True},
            {"prompt_lookup": PromptLookup(1, 3)},
            "request/no-confidence",
            "looked up",
        ),
        *(
            (
                {"confidence": True},
                {"confidence_threshold": value},
                "request/bad-confidence-threshold",
                "from 0 to 1",
            )
            for value in (-0.1, 1.5, math.nan, math.inf, "0.5", True, [0.5])
        ),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], asked: dict[str, Any], id: str, words: str
) -> None:
    with opened(make_pair(**options)) as generator:
        with pytest.raises(RequestError) as caught:
            generator.request(token_ids=PROMPT, **{"confidence_threshold": 0.5, **asked})
        assert caught.value.id == id
        assert words in str(caught.value)


def test_lookups_of_a_bundle_without_a_draft() -> None:
    pair = make_pair(plan=None)
    numbers = {name: getattr(pair.model, name) for name in ModelInfo.__slots__}
    model = ModelInfo(**{**numbers, "lookup": LOOKUP})
    with opened(pair, model) as generator, pytest.raises(RequestError, match="looked up"):
        generator.request(token_ids=PROMPT, confidence_threshold=0.5)
