"""Texts held to a grammar: what is chosen, plain and speculative, alone and in batches."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime import (
    FinishReason,
    Generator,
    Grammar,
    PlainDecoder,
    Round,
    SpeculativeDecoder,
)
from edgecc.backends.runtime.grammar import CompiledGrammar, Constraint, GrammarCompiler
from edgecc.backends.runtime.sampling import SamplingParams, token_logprobs
from edgecc.errors import RequestError
from helpers.toy_tokenizer import END, NUM_TOKENS, OTHER_SPECIAL, PIECES, toy_tokenizer

from .fakes import Pair, fold, make_pair, on_device, random_logits
from .sampling import reference
from .test_batch import Engine
from .test_generator import PROMPT, TOKENIZER
from .test_generator import make as make_generator

pytest.importorskip("llguidance")

LOGITS = random_logits(NUM_TOKENS)
TOY = toy_tokenizer()
GRAMMARS = GrammarCompiler(TOY, NUM_TOKENS)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    top_k=st.sampled_from([0, 2]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    logit_bias=st.sampled_from([{}, {2: 3.0, 5: -2.0}]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 2]),
)


@st.composite
def languages(draw: st.DrawFn) -> tuple[Grammar, frozenset[str]]:
    """A grammar with all its texts: words, each one to three times, in one of several notations."""
    words = draw(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
    most = draw(st.integers(1, 3))
    texts = {
        "".join(found)
        for count in range(1, most + 1)
        for found in itertools.product(words, repeat=count)
    }
    either = "|".join(words)
    lark = "start: TEXT\nTEXT: " + " ".join(["WORD"] + ["WORD?"] * (most - 1))
    lark += "\nWORD: " + " | ".join(f'"{word}"' for word in words)
    grammar = draw(
        st.sampled_from(
            [
                Grammar.regex(f"({either}){{1,{most}}}"),
                Grammar.choice(sorted(texts)),
                Grammar.lark(lark),
            ]
        )
    )
    return grammar, frozenset(texts)


def written(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens if token < END)


def allowed_by_definition(language: frozenset[str], text: str, stops: set[int]) -> list[int]:
    """Tokens after which some text of the language is still possible, and stops where it is one."""
    pieces = [
        token
        for token, piece in enumerate(PIECES)
        if any(whole.startswith(text + piece) for whole in language)
    ]
    return pieces + (sorted(stops) if text in language else [])


def allowed(compiled: CompiledGrammar, answer: Sequence[int], stops: set[int]) -> list[int]:
    """What a grammar allows after an answer that is told token by token."""
    constraint = compiled.start(stops)
    for token in answer:
        constraint.advance(token)
    return np.flatnonzero(constraint.allowed).tolist()


@given(languages(), st.sampled_from([set(), {END}, {END, OTHER_SPECIAL}]), st.data())
def test_masks(language, stops, data):
    """Tokens that some text goes on with, however it is cut into tokens."""
    grammar, texts = language
    compiled, answer = GRAMMARS.compile(grammar), []
    while not (answer and answer[-1] in stops):
        expected = allowed_by_definition(texts, written(answer), stops)
        assert allowed(compiled, answer, stops) == expected
        if not expected:
            return
        answer.append(data.draw(st.sampled_from(expected)))


def row_after(tokens: Sequence[int]) -> np.ndarray:
    state = 0
    for token in tokens:
        state = fold(state, token)
    return LOGITS(state)


def by_definition(
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    stops: set[int],
    language: frozenset[str],
) -> tuple[list[int], FinishReason]:
    """Token by token, from the set of all texts."""
    answer: list[int] = []
    while len(answer) < count:
        possible = allowed_by_definition(language, written(answer), stops)
        row = row_after([*prompt, *answer])
        masked = [x if i in possible else -math.inf for i, x in enumerate(row.tolist())]
        answer.append(reference.next_token(masked, params, prompt, answer))
        more = allowed_by_definition(language, written(answer), set())
        if answer[-1] in stops or not more:
            return answer, FinishReason.STOP
    return answer, FinishReason.LENGTH


def pair_of(**options: Any) -> Pair:
    return make_pair(vocab_size=11, num_tokens=NUM_TOKENS, logits=LOGITS, **options)


def decode(
    pair: Pair,
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    wanted: int,
    stops: set[int],
    constraint: Constraint,
) -> list[Round]:
    decoder: Any
    if not wanted:
        decoder = PlainDecoder(pair.session, pair.model)
    else:
        assert pair.model.draft is not None
        decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft, wanted)
    return list(decoder.rounds(prompt, count, stops, params, constraint=constraint))


@given(
    languages(),
    st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=12),
    st.integers(1, 20),
    PARAMS,
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.integers(0, 7),
    st.sampled_from([set(), {END}, {END, OTHER_SPECIAL}]),
    st.booleans(),
    st.sampled_from([0, 8]),
    st.booleans(),
)
def test_the_text_is_the_one_the_target_writes_alone(
    language, prompt, count, params, plan, wanted, stops, junk, log_rows, device
):
    """Whatever a draft proposes that knows nothing of the grammar: B34, for any grammar."""
    grammar, texts = language
    pair = pair_of(plan=plan, junk=junk, log_rows=log_rows, capacity=71, max_model_len=64)
    if device:
        pair, rounds = on_device(pair)
    constraint = GRAMMARS.compile(grammar).start(stops)
    made = decode(pair, prompt, count, params, wanted, stops, constraint)
    tokens = [token for one in made for token in one.tokens]
    expected, reason = by_definition(prompt, count, params, stops, texts)
    assert (tokens, made[-1].finish_reason) == (expected, reason)
    if reason is FinishReason.STOP:
        assert written(tokens) in texts
    assert not device or rounds.ran == []
    for one in made:
        assert len(one.logprobs) == (0 if params.logprobs is None else len(one.tokens))
    found = [item for one in made for item in one.logprobs]
    assert found == [
        token_logprobs(row_after([*prompt, *tokens[:place]]), token, params.logprobs or 0)
        for place, token in enumerate(tokens)
        if params.logprobs is not None
    ]


@given(languages(), st.lists(st.integers(0, NUM_TOKENS), max_size=9))
def test_only_proposals_that_may_be_chosen_are_verified(language, proposals):
    grammar, texts = language
    stops = {END}
    constraint = GRAMMARS.compile(grammar).start(stops)
    count, told = constraint.count_allowed(proposals), []
    for proposal in proposals:
        if proposal not in allowed_by_definition(texts, written(told), stops) or END in told:
            break
        told.append(proposal)
    assert count == len(told)
    assert count == constraint.count_allowed(proposals), "asking has moved it"


@given(languages(), st.integers(0, 999), st.integers(0, 5))
def test_the_distribution_is_the_targets_among_what_is_allowed(language, seed, temperature):
    """All texts enumerated, each with the product of its renormalised probabilities."""
    from edgecc.backends.runtime.sampling import Sampler

    grammar, texts = language
    params = SamplingParams(temperature=0.5 + temperature / 4, seed=seed)
    total = 0.0
    compiled = GRAMMARS.compile(grammar)
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        tokens, share = waiting.pop()
        constraint = compiled.start({END})
        for token in tokens:
            constraint.advance(token)
        if constraint.finished:
            total += share
            continue
        row = row_after([seed % END, *tokens])
        found = Sampler(params, [seed % END], NUM_TOKENS, constraint).distribution(row)
        weights = np.exp(row.astype(np.float64) / params.temperature)
        possible = allowed_by_definition(texts, written(tokens), {END})
        weights[[i for i in range(NUM_TOKENS) if i not in possible]] = 0
        np.testing.assert_allclose(
            found.dense(NUM_TOKENS), weights / weights.sum(), rtol=0, atol=1e-12
        )
        if len(tokens) < 4:
            ahead = found.dense(NUM_TOKENS)
            waiting += [((*tokens, i), share * ahead[i]) for i in np.flatnonzero(ahead).tolist()]
        else:
            total += share
    assert total == pytest.approx(1.0, abs=1e-9)


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.none() | languages(),
            st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=9),
            st.integers(0, 12),
            st.integers(0, 7),
            PARAMS,
        ),
        max_size=5,
    ),
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
)
def test_batches(slots, wanted, plan):
    """Requests with and without grammars side by side."""
    options = {"vocab_size": 11, "num_tokens": NUM_TOKENS, "logits": LOGITS, "plan": plan}
    engine: Any = Engine(slots, capacity=96, eos_token_ids=[END], **options)
    generator = Generator(engine, engine.model, toy_tokenizer())
    requests = [
        generator.request(
            token_ids=prompt,
            max_new_tokens=count,
            speculation=steps > 0,
            num_speculative_tokens=steps or None,
            sampling=params,
            grammar=language and language[0],
        )
        for language, prompt, count, steps, params in wanted
    ]
    together = generator.generate_batch(requests)
    for answer, request, (language, prompt, count, _, params) in zip(
        together, requests, wanted, strict=True
    ):
        if language is not None:
            expected, reason = by_definition(prompt, count, params, {END}, language[1])
            assert (answer.token_ids, answer.finish_reason) == (expected, reason)
        (alone,) = generator.generate_batch([request])
        assert (alone.token_ids, alone.text) == (answer.token_ids, answer.text)


@pytest.mark.parametrize("plan", [[0], [7], [3, 7, 0]])
def test_a_draft_that_proposes_letters_where_digits_are_due(plan: list[int]) -> None:
    """B34: the text matches, is the one without speculation, and nothing escapes the mask."""
    generator, _ = make_generator(text="letters and no digits at all, over and over", plan=plan)
    grammar = Grammar.regex("[0-9]{3}-[0-9]{2}")
    plain = generator.generate(token_ids=PROMPT, speculation=False, grammar=grammar)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", plain.text)
    assert plain.finish_reason is FinishReason.STOP
    for wanted in (1, 4, None):
        found = generator.generate(token_ids=PROMPT, num_speculative_tokens=wanted, grammar=grammar)
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)


def test_refused_proposals_are_not_verified() -> None:
    generator, pair = make_generator(text="123 is what the target writes", plan=[7])
    found = generator.generate(token_ids=PROMPT, grammar=Grammar.regex("[0-9]{3}x"))
    assert found.text == "123x"
    assert found.stats.proposed < 7, "a whole block was verified"
    rows = [rows for _, rows, _ in pair.target.calls[1:]]
    assert max(rows) <= 3


def test_a_stop_string_and_the_length_end_a_text_before_its_end() -> None:
    generator, _ = make_generator(text="aaaa stop here", plan=[7])
    grammar = Grammar.regex("[a-z ]{30}")
    stopped = generator.generate(token_ids=PROMPT, grammar=grammar, stop="stop")
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == "aaaa "
    short = generator.generate(token_ids=PROMPT, grammar=grammar, max_new_tokens=2)
    assert short.finish_reason is FinishReason.LENGTH


def test_end_tokens_come_where_the_text_is_complete() -> None:
    """The target ends too early, and is held to go on; without end tokens it goes on to the end."""
    generator, _ = make_generator(script=[4094] * 40, plan=[7])
    grammar = Grammar.regex("[0-9]{2,4}")
    found = generator.generate(token_ids=PROMPT, grammar=grammar)
    assert re.fullmatch("[0-9]{2}", found.text)
    assert found.token_ids[-1] == 4094
    whole = generator.generate(token_ids=PROMPT, grammar=grammar, ignore_eos=True)
    assert re.fullmatch("[0-9]{4}", whole.text)
    assert whole.finish_reason is FinishReason.STOP
    assert 4094 not in whole.token_ids


def test_a_bias_that_bans_all_that_is_allowed() -> None:
    generator, _ = make_generator(text="a")
    banned = dict.fromkeys(TOKENIZER.encode("yes") + TOKENIZER.encode("y"), -math.inf)
    with pytest.raises(RequestError, match="bans each token") as caught:
        generator.generate(token_ids=PROMPT, grammar=Grammar.regex("y{9}"), logit_bias=banned)
    assert caught.value.id == "grammar/all-banned"
    assert generator.generate(token_ids=PROMPT, max_new_tokens=1).token_ids, "the next request"
