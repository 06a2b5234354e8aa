"""Requests, text and streams over a fake pair and the small pair's real tokenizer."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.base import Array, Role
from edgecc.backends.runtime import (
    ChatTemplates,
    Chunk,
    FinishReason,
    Generation,
    Generator,
    SpeculationWarning,
    Tokenizer,
)
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.backends.runtime.stats import CAUSES, OTHER_CAUSES
from edgecc.errors import RequestError

from .fakes import FakeEngine, Pair, by_hash, by_script, make_pair

PAIR = Path(__file__).parents[1] / "data" / "pairs" / "tiny-qwen3-nvfp4"
TOKENIZER = Tokenizer.from_directory(PAIR)
CHAT = ChatTemplates.from_directory(PAIR)
END, END_OF_TEXT = 4094, 4092
PROMPT = [472, 2241, 65]


def make(
    *, text: str | None = None, script: Sequence[int] | None = None, **options: Any
) -> tuple[Generator, Pair]:
    """A generator whose model writes the text, then its end token; or tokens by hash."""
    defaults: dict[str, Any] = {"capacity": 256, "prefill_chunk": 16}
    options = defaults | {"eos_token_ids": [END, END_OF_TEXT]} | options
    if text is not None:
        script = [*TOKENIZER.encode(text), END]
    choose = by_hash(4095) if script is None else by_script(len(PROMPT), script, then=300)
    pair = make_pair(choose=choose, vocab_size=4096, num_tokens=4095, **options)
    engine: Any = pair.engine
    return Generator(engine, pair.model, TOKENIZER, CHAT), pair


def joined(chunks: Sequence[Chunk]) -> tuple[list[int], str]:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, "".join(chunk.text for chunk in chunks)


def both(text: str, **arguments: Any) -> Generation:
    """What is generated, which must be the same with each number of proposals and without."""
    generator, _ = make(text=text, plan=[2, 7, 0, 5])
    plain = generator.generate(token_ids=PROMPT, speculation=False, **arguments)
    for wanted in (1, 3, 7, None):
        found = generator.generate(token_ids=PROMPT, num_speculative_tokens=wanted, **arguments)
        assert found.token_ids == plain.token_ids
        assert (found.text, found.finish_reason) == (plain.text, plain.finish_reason)
    return plain


def test_a_text_up_to_the_end_token() -> None:
    text = "def f(n):\n    return n  # \u65e5\u672c \U0001f642\n"
    found = both(text)
    assert found.text == text
    assert found.token_ids == [*TOKENIZER.encode(text), END]
    assert found.finish_reason is FinishReason.STOP
    assert found.prompt_tokens == len(PROMPT)


def test_prompts_as_text_ids_and_messages_are_the_same() -> None:
    generator, pair = make()
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = [4093, 1319, 198, 3462, 4094, 198, 4093, 1572, 198]
    first = generator.generate(text, max_new_tokens=8)
    assert pair.target.tokens[: len(ids)] == ids
    assert first.prompt_tokens == len(ids)
    array = np.array(ids, dtype=np.int32)
    messages = [{"role": "user", "content": "hi"}]
    same: list[dict[str, Any]] = [{"token_ids": ids}, {"token_ids": array}, {"messages": messages}]
    for prompt in same:
        found = generator.generate(**prompt, max_new_tokens=8)
        assert found.token_ids == first.token_ids


def test_the_length_limit() -> None:
    for count in range(1, 12):
        found = both("one two three four five six seven", max_new_tokens=count)
        full = both("one two three four five six seven")
        assert found.token_ids == full.token_ids[:count]
        stopped = len(full.token_ids) <= count
        assert found.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_zero_tokens_asked() -> None:
    generator, pair = make()
    found = generator.generate("a prompt", max_new_tokens=0)
    assert (found.token_ids, found.text, found.finish_reason) == ([], "", FinishReason.LENGTH)
    assert found.prompt_tokens == len(TOKENIZER.encode("a prompt"))
    assert found.stats.as_dict()["new_tokens"] == 0
    assert pair.target.calls == []
    (chunk,) = generator.stream("a prompt", max_new_tokens=0)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", [], FinishReason.LENGTH)


def test_ignoring_the_end_goes_on_and_shows_no_special_tokens() -> None:
    script = [*TOKENIZER.encode("a b"), END, *TOKENIZER.encode(" c"), END_OF_TEXT]
    generator, _ = make(script=script)
    count = len(script)
    found = generator.generate(token_ids=PROMPT, ignore_eos=True, max_new_tokens=count)
    assert found.token_ids == script
    assert (found.text, found.finish_reason) == ("a b c", FinishReason.LENGTH)


def test_each_end_token_ends_the_text() -> None:
    for end in (END, END_OF_TEXT):
        generator, _ = make(script=[*TOKENIZER.encode("x = 1"), end, 300])
        found = generator.generate(token_ids=PROMPT)
        assert (found.text, found.finish_reason) == ("x = 1", FinishReason.STOP)
        assert found.token_ids[-1] == end


def test_an_end_token_that_is_an_ordinary_token_is_not_part_of_the_text() -> None:
    end = TOKENIZER.encode("\n\n")[0]
    generator, _ = make(script=[*TOKENIZER.encode("x = 1"), end], eos_token_ids=[end])
    for stop in ((), "zzz"):
        found = generator.generate(token_ids=PROMPT, stop=stop)
        assert (found.text, found.token_ids[-1]) == ("x = 1", end)


# --- streams ------------------------------------------------------------------------------------


@dataclass
class Asked:
    prompt: list[int]
    plan: list[int]
    wanted: int | None
    max_new_tokens: int
    ignore_eos: bool


ASKED = st.builds(
    Asked,
    prompt=st.lists(st.integers(0, 4094), min_size=1, max_size=30),
    plan=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    wanted=st.one_of(st.none(), st.integers(1, 7)),
    max_new_tokens=st.integers(0, 60),
    ignore_eos=st.booleans(),
)


@pytest.mark.filterwarnings("ignore::edgecc.backends.runtime.SpeculationWarning")
@given(asked=ASKED, choices=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), max_size=3))
def test_streams_speculation_and_stop_strings_change_nothing(
    asked: Asked, choices: list[tuple[int, int]]
) -> None:
    generator, _ = make(plan=asked.plan)
    common: dict[str, Any] = {
        "token_ids": asked.prompt,
        "max_new_tokens": asked.max_new_tokens,
        "ignore_eos": asked.ignore_eos,
    }
    whole = generator.generate(**common, speculation=False)
    shown = whole.token_ids
    if whole.finish_reason is FinishReason.STOP:
        shown = shown[:-1]
    assert whole.text == TOKENIZER.decode(shown)

    # Stop strings taken from the text itself: they begin and end anywhere in its tokens.
    starts = [(start % (len(whole.text) or 1), length) for start, length in choices]
    stops = [s for start, length in starts if (s := whole.text[start : start + length])]
    plain = generator.generate(**common, speculation=False, stop=stops)
    ends = [(whole.text.find(stop) + len(stop), whole.text.find(stop)) for stop in stops]
    assert plain.text == (whole.text[: min(ends)[1]] if ends else whole.text)
    assert plain.token_ids == whole.token_ids[: len(plain.token_ids)]
    if ends:
        assert plain.finish_reason is FinishReason.STOP

    heard: list[str] = []
    drafted = generator.generate(
        **common, num_speculative_tokens=asked.wanted, stop=stops, on_text=heard.append
    )
    assert drafted.token_ids == plain.token_ids
    assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason)
    assert "".join(heard) == plain.text
    assert "" not in heard
    assert drafted.stats.new_tokens == len(plain.token_ids)

    chunks = list(generator.stream(**common, num_speculative_tokens=asked.wanted, stop=stops))
    assert joined(chunks) == (plain.token_ids, plain.text)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is plain.finish_reason


@pytest.mark.parametrize(
    "text", ["na\u00efve \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f680!", "abc"]
)
@pytest.mark.parametrize("plan", [[0], [1], [7], [2, 0, 5]])
def test_no_chunk_has_half_a_character(text: str, plan: list[int]) -> None:
    generator, _ = make(text=text, plan=plan)
    chunks = list(generator.stream(token_ids=PROMPT))
    assert joined(chunks)[1] == text
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk.text for chunk in chunks)
    assert all(chunk.token_ids for chunk in chunks)


def test_a_character_cut_by_the_length_shows_as_a_replacement() -> None:
    count = len(TOKENIZER.encode("a\u65e5")) - 1
    found = both("a\u65e5", max_new_tokens=count)
    assert found.text == "a\N{REPLACEMENT CHARACTER}"
    assert found.finish_reason is FinishReason.LENGTH


def test_a_stop_string_over_two_tokens_of_one_block() -> None:
    text = "total = compute(values)\n\nprint(total)\n"
    found = both(text, stop=["s)\n\npri"])
    assert found.text == "total = compute(value"
    assert found.finish_reason is FinishReason.STOP
    # Up to and with the token that completes the stop, whatever came in the same block.
    assert TOKENIZER.decode(found.token_ids).startswith("total = compute(values)\n\npri")
    assert "s)\n\npri" not in TOKENIZER.decode(found.token_ids[:-1])


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("c d", "a b "),
        (["d e", "c d"], "a b "),
        (["b c d", "c d"], "a "),
        (["zzz", "a"], ""),
        (["f g!"], "a b c d e f g"),
        (["e", "e f g"], "a b c d "),
    ],
)
def test_which_stop_string_ends_the_text(stop: str | list[str], text: str) -> None:
    assert both("a b c d e f g", stop=stop).text == text


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    generator, _ = make(text="one END two ENDED three", plan=[0])
    seen = ""
    for chunk in generator.stream(token_ids=PROMPT, stop="ENDED"):
        seen += chunk.text
        assert "one END two ".startswith(seen)
    assert seen == "one END two "


def test_text_held_back_comes_when_no_stop_follows() -> None:
    assert both("one EN", stop="END").text == "one EN"
    assert both("one EN and more", stop="END", max_new_tokens=2).text in "one EN and more"


def test_chunks_carry_growing_stats() -> None:
    generator, _ = make(text="one two three four five six", plan=[2])
    seen = []
    for chunk in generator.stream(token_ids=PROMPT):
        seen.append(chunk.stats.new_tokens)
        assert chunk.stats.prompt_tokens == len(PROMPT)
    assert seen[0] == 1
    assert seen == sorted(seen)
    assert seen[-1] == len(TOKENIZER.encode("one two three four five six")) + 1


# --- one request at a time ----------------------------------------------------------------------


def test_a_second_request_is_refused_while_one_runs() -> None:
    generator, _ = make(text="one two three four five", plan=[0])
    stream = generator.stream(token_ids=PROMPT)
    next(stream)
    with pytest.raises(RequestError) as caught:
        generator.generate(token_ids=PROMPT)
    assert caught.value.id == "request/busy"
    assert joined(list(stream))[1].endswith("five")
    assert generator.generate(token_ids=PROMPT).text == "one two three four five"


def test_closing_or_dropping_a_stream_ends_its_request() -> None:
    generator, _ = make(text="one two three four five", plan=[0])
    stream: Any = generator.stream(token_ids=PROMPT)
    next(stream)
    stream.close()
    assert generator.generate(token_ids=PROMPT).text == "one two three four five"
    stream = generator.stream(token_ids=PROMPT)
    next(stream)
    del stream
    gc.collect()
    assert generator.generate(token_ids=PROMPT).text == "one two three four five"


def test_an_error_in_the_callers_function_ends_the_request() -> None:
    generator, _ = make(text="one two three four five", plan=[0])

    def refuse(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match=r"^one$") as caught:
        generator.generate(token_ids=PROMPT, on_text=refuse)
    # The traceback keeps the frames of the failed call alive.
    assert caught.tb is not None
    assert generator.generate(token_ids=PROMPT).text == "one two three four five"


def test_a_failed_request_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, pair = make(text="one two three four five", plan=[1])
    run = pair.target.run

    def fail(inputs: Mapping[Role, Array], outputs: Sequence[Role]) -> dict[Role, Array]:
        if len(pair.target.calls) > 2:
            raise OSError("the device is gone")
        return run(inputs, outputs)

    monkeypatch.setattr(pair.target, "run", fail)
    with pytest.raises(OSError, match="gone"):
        generator.generate(token_ids=PROMPT)
    monkeypatch.undo()
    assert generator.generate(token_ids=PROMPT).text == "one two three four five"


def test_a_generator_closes_its_engine() -> None:
    generator, pair = make()
    with generator as opened:
        assert opened is generator
        assert pair.engine.closed == 0
    assert pair.engine.closed == 1
    with pytest.raises(RequestError, match="the generator is closed") as caught:
        generator.generate("a")
    assert caught.value.id == "request/closed"


def test_a_stream_is_not_taken_further_once_its_generator_is_closed() -> None:
    generator, pair = make(text="one two three four five", plan=[0])
    stream = generator.stream(token_ids=PROMPT)
    next(stream)
    generator.close()
    calls = len(pair.target.calls)
    with pytest.raises(RequestError, match="the generator is closed"):
        next(stream)
    assert len(pair.target.calls) == calls


# --- requests that cannot be run ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "identifier"),
    [
        ({}, "request/one-prompt"),
        ({"prompt": "a", "token_ids": [1]}, "request/one-prompt"),
        ({"prompt": ""}, "request/empty-prompt"),
        ({"token_ids": []}, "request/empty-prompt"),
        ({"token_ids": np.zeros(0, dtype=np.int64)}, "request/empty-prompt"),
        ({"messages": []}, "request/empty-prompt"),
        ({"prompt": "\ud800"}, "request/not-unicode"),
        ({"token_ids": [4095]}, "request/token-out-of-range"),
        ({"token_ids": [1, 2, 4096]}, "request/token-out-of-range"),
        ({"token_ids": [-1]}, "request/token-out-of-range"),
        ({"token_ids": [2**63]}, "request/token-out-of-range"),
        ({"token_ids": [2**80]}, "request/token-out-of-range"),
        ({"token_ids": [1.0]}, "request/bad-token-ids"),
        ({"token_ids": [True]}, "request/bad-token-ids"),
        ({"token_ids": "12"}, "request/bad-token-ids"),
        ({"token_ids": 12}, "request/bad-token-ids"),
        ({"token_ids": {1, 2}}, "request/bad-token-ids"),
        ({"prompt": 12}, "request/bad-prompt"),
        ({"prompt": b"bytes"}, "request/bad-prompt"),
        ({"prompt": [1, 2]}, "request/bad-prompt"),
        ({"token_ids": [[1, 2]]}, "request/bad-token-ids"),
        ({"token_ids": [[1], [1, 2]]}, "request/bad-token-ids"),
        ({"token_ids": [1, None]}, "request/bad-token-ids"),
        ({"prompt": "a", "max_new_tokens": -1}, "request/bad-max-new-tokens"),
        ({"prompt": "a", "max_new_tokens": 1.5}, "request/bad-max-new-tokens"),
        ({"prompt": "a", "max_new_tokens": True}, "request/bad-max-new-tokens"),
        ({"prompt": "a", "num_speculative_tokens": 0}, "request/bad-num-speculative-tokens"),
        ({"prompt": "a", "num_speculative_tokens": 8}, "request/bad-num-speculative-tokens"),
        ({"prompt": "a", "num_speculative_tokens": "3"}, "request/bad-num-speculative-tokens"),
        ({"prompt": "a", "stop": ""}, "request/bad-stop"),
        ({"prompt": "a", "stop": ["x", ""]}, "request/bad-stop"),
        ({"prompt": "a", "stop": [3]}, "request/bad-stop"),
        ({"prompt": "a", "stop": None}, "request/bad-stop"),
        ({"prompt": "a", "stop": 3}, "request/bad-stop"),
        ({"prompt": "a " * 300}, "request/prompt-too-long"),
    ],
)
def test_requests_that_cannot_be_run(arguments: dict[str, Any], identifier: str) -> None:
    generator, pair = make()
    for call in (generator.generate, generator.stream):
        with pytest.raises(RequestError) as caught:
            call(**arguments)
        assert caught.value.id == identifier
        assert caught.value.exit_code == 2
    assert pair.target.calls == []
    assert generator.generate("still alive", max_new_tokens=2).prompt_tokens == 4


@pytest.mark.parametrize(("length", "made"), [(62, 2), (63, 1), (64, None), (65, None)])
def test_a_prompt_needs_room_for_one_token(length: int, made: int | None) -> None:
    generator, _ = make(capacity=64)
    if made is None:
        with pytest.raises(RequestError, match=f"{length} tokens.* 64") as caught:
            generator.generate(token_ids=[1] * length)
        assert caught.value.id == "request/prompt-too-long"
    else:
        found = generator.generate(token_ids=[1] * length, ignore_eos=True)
        assert len(found.token_ids) == made
        assert found.finish_reason is FinishReason.LENGTH


def test_a_prompt_longer_than_the_bundle_takes() -> None:
    generator, _ = make(max_input_len=10)
    assert generator.generate(token_ids=[1] * 10, max_new_tokens=1).prompt_tokens == 10
    with pytest.raises(RequestError, match=r"11 tokens.* 10") as caught:
        generator.generate(token_ids=[1] * 11)
    assert caught.value.id == "request/prompt-too-long"


def test_ids_out_of_range_are_named() -> None:
    generator, _ = make()
    with pytest.raises(RequestError, match="rows 4095 to 4095 of its embedding are padding"):
        generator.generate(token_ids=[1, 4095])
    with pytest.raises(RequestError, match=r"id 5000 at position 1.* 0 to 4094"):
        generator.generate(token_ids=[1, 5000, 6000])


def test_a_bundle_without_a_draft() -> None:
    generator, pair = make(text="x = 1", plan=None)
    found = generator.generate(token_ids=PROMPT)
    assert found.text == "x = 1"
    assert found.stats.proposed == 0
    assert all(Role.HIDDEN_TAP not in outputs for _, _, outputs in pair.target.calls)
    with pytest.raises(RequestError) as caught:
        generator.generate(token_ids=PROMPT, num_speculative_tokens=1)
    assert caught.value.id == "request/no-draft"


def test_a_bundle_without_a_tokenizer() -> None:
    pair = make_pair(plan=[3])
    engine: Any = pair.engine
    generator = Generator(engine, pair.model)
    found = generator.generate(token_ids=[1, 2, 3], max_new_tokens=5)
    assert (len(found.token_ids), found.text) == (5, "")
    with pytest.raises(RequestError) as caught:
        generator.generate("text")
    assert caught.value.id == "request/no-tokenizer"
    with pytest.raises(RequestError) as caught:
        generator.generate(token_ids=[1], stop="x")
    assert caught.value.id == "request/bad-stop"
    with pytest.raises(RequestError) as caught:
        generator.generate(messages=[{"role": "user", "content": "x"}])
    assert caught.value.id == "chat/no-template"


def test_speculation_can_be_left_out() -> None:
    generator, pair = make(text="one two three four five six")
    found = generator.generate(token_ids=PROMPT, speculation=False, num_speculative_tokens=3)
    assert found.stats.proposed == 0
    assert found.stats.tokens_per_step == 1.0
    assert pair.draft.calls == []


# --- doubtful acceptance ------------------------------------------------------------------------


def test_a_draft_that_is_never_right_is_reported_once() -> None:
    generator, _ = make(plan=[0])
    asked: dict[str, Any] = {"token_ids": PROMPT, "ignore_eos": True, "max_new_tokens": 40}
    assert generator.generate(**asked).stats.warnings == []
    with pytest.warns(SpeculationWarning, match="no proposed token was accepted in 64 rounds"):
        found = generator.generate(**asked)
    assert len(found.stats.warnings) == 1
    assert "warning" in found.stats.render()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generator.generate(**asked | {"max_new_tokens": 200}).stats.warnings == []


@pytest.mark.parametrize("method", PROPOSERS)
def test_every_kind_of_draft_is_watched(method: str) -> None:
    generator, _ = make(plan=[0], method=method)
    with pytest.warns(SpeculationWarning) as caught:
        generator.generate(token_ids=PROMPT, ignore_eos=True, max_new_tokens=70)
    causes = CAUSES.get(method, OTHER_CAUSES)
    assert [str(w.message).partition("Likely causes: ")[2] for w in caught] == [causes.none]


def test_a_draft_that_is_always_right_is_reported() -> None:
    generator, _ = make(plan=[1], proposals=1, capacity=600)
    with pytest.warns(SpeculationWarning, match="accepted in 256 rounds"):
        generator.generate(token_ids=PROMPT, ignore_eos=True, max_new_tokens=590)


def test_the_engine_is_asked_for_a_draft_only_if_there_is_one() -> None:
    pair = make_pair(plan=None)
    asked: list[str] = []

    class Recording(FakeEngine):
        def entry(self, name: str) -> Any:
            asked.append(name)
            return super().entry(name)

    engine: Any = Recording(pair.engine.target, None)
    Generator(engine, pair.model)
    assert asked == ["target"]
