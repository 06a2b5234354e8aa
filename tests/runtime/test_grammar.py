"""Grammars as requests give them: what is read, what is refused, and what fits them."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime import Grammar
from edgecc.backends.runtime.grammar import GrammarCompiler
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import RequestError, UnsupportedError
from helpers.byte_tokenizer import NUM_TOKENS as NUM_BYTES
from helpers.byte_tokenizer import byte_tokenizer

from .test_generator import TOKENIZER
from .test_generator import make as make_generator

NUM_TOKENS, END = 4095, 4094

pytest.importorskip("llguidance")

GRAMMARS = GrammarCompiler(TOKENIZER, NUM_TOKENS)


def walk(grammar: Grammar, seed: int, most: int = 300) -> tuple[str, bool]:
    """A text by chance, and whether it has ended."""
    chance, tokens = random.Random(seed), []
    constraint = GRAMMARS.compile(grammar).start({END})
    while len(tokens) < most and not constraint.finished:
        tokens.append(chance.choice(np.flatnonzero(constraint.allowed).tolist()))
        constraint.advance(tokens[-1])
    return TOKENIZER.decode(tokens), constraint.finished


NAMES = st.sampled_from(["a", "b", "name", "größe", 'q"', "x y"])
SCALARS = st.sampled_from(
    [
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-z]{2}-[0-9]+$", "maxLength": 8},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "grün", 3, None, [1, "x"]]},
        {"const": {"k": 1}},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    ]
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda item, low, more: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.dictionaries(NAMES, inner, max_size=3).flatmap(
            lambda properties: st.builds(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": sorted(required),
                    "additionalProperties": False,
                },
                st.sets(st.sampled_from(sorted(properties))) if properties else st.just(set()),
            )
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    )


SCHEMAS = st.recursive(SCALARS, containers, max_leaves=5)


@given(SCHEMAS, st.integers(0, 2**32))
def test_what_ends_is_valid(schema: Any, seed: int) -> None:
    text, ended = walk(Grammar.json_schema(schema), seed)
    if ended:
        jsonschema.validate(json.loads(text), schema)


def test_walks_do_end() -> None:
    """Else the test above would check nothing."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = schema | {"additionalProperties": False}
    assert all(walk(Grammar.json_schema(closed), seed, 1000)[1] for seed in range(20))


@given(st.integers(0, 2**32))
def test_any_object(seed: int) -> None:
    text, ended = walk(Grammar.json_object(), seed)
    assert not ended or isinstance(json.loads(text), dict)


PATTERNS = [
    "[0-9]{3}-[0-9]{2}",
    "^(yes|no)$",
    r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
    "(ab|c)*d",
    r"[^\x00-\x7f]{2}",
    "é+x?",
    "a/b|c\\\\d",
]


@given(st.sampled_from(PATTERNS), st.integers(0, 2**32))
def test_what_ends_matches(pattern: str, seed: int) -> None:
    text, ended = walk(Grammar.regex(pattern), seed)
    assert not ended or re.fullmatch(pattern, text)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5), st.integers(0, 2**32))
def test_choices_of_any_text(choices: list[str], seed: int) -> None:
    text, ended = walk(Grammar.choice(choices), seed)
    assert ended
    assert text in choices


def test_white_space_has_an_end() -> None:
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "null"}, "minItems": 1})
    constraint = GRAMMARS.compile(grammar).start({END})
    for space in ("", " ", "\n", "\n\t\t", "\n" + " " * 32):
        text = TOKENIZER.encode("[" + space + "null")
        assert constraint.count_allowed(text) == len(text)
    for space in ("  ", "\n\n", "\t", "\n" + " " * 33):
        text = TOKENIZER.encode("[" + space + "null")
        assert constraint.count_allowed(text) < len(text)


def test_special_tokens_are_no_text() -> None:
    """What a schema or a pattern spells as a special token is spelled, and ends nothing."""
    constraint = GRAMMARS.compile(Grammar.choice(["<|im_end|>!"])).start({END})
    assert not constraint.allowed[[4092, 4093, 4094]].any()
    text, ended = walk(Grammar.choice(["<|im_end|>!"]), 0)
    assert (text, ended) == ("<|im_end|>!", True)


@pytest.mark.parametrize("text", ['~"a"', "~/a.*/"])
def test_special_tokens_are_no_part_of_a_complement(text: str) -> None:
    """Their text is not decoded, so that an "a" would be all that is left."""
    constraint = GRAMMARS.compile(Grammar.lark(f"start: A\nA: {text}")).start({END})
    assert not constraint.allowed[[4092, 4093]].any()
    assert constraint.allowed[END]


def test_special_tokens_that_a_grammar_names() -> None:
    constraint = GRAMMARS.compile(Grammar.lark('start: <|im_start|> "a"')).start({END})
    assert np.flatnonzero(constraint.allowed).tolist() == [4093]


@pytest.mark.parametrize("text", ['start: <[*]> "a"', 'start: a "b"\na[stop=""]: /[a-c]*/'])
def test_no_end_before_a_text_is_complete(text: str) -> None:
    """A range of all ids has the one that stands for the end as well."""
    constraint = GRAMMARS.compile(Grammar.lark(text)).start({END})
    assert constraint.allowed.any()
    assert not constraint.allowed[END]
    assert not constraint.count_allowed((END,))


@pytest.mark.parametrize("header", ["{}", '{"no_forcing": false}'])
def test_a_header_of_its_own_forces_no_tokens(header: str) -> None:
    """Examples of llguidance have one. A special token would be the only spelling left."""
    text = f'%llguidance {header}\nstart: "<|im_end|>"  // spelled'
    constraint = GRAMMARS.compile(Grammar.lark(text)).start({END})
    assert np.flatnonzero(constraint.allowed).tolist() == TOKENIZER.encode("<")


def test_errors_name_the_line_of_the_grammar() -> None:
    with pytest.raises(RequestError, match=r"1\(8\)"):
        GRAMMARS.compile(Grammar.lark("start: /a/ & /b/"))


BAD: list[tuple[Any, str]] = [
    (lambda: Grammar.json_schema("{"), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema([1]), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"a": {1}}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"a": float("nan")}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema('{"items":' * 5000), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema('{"items":' * 300 + "{}" + "}" * 300), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"type": "strin"}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"properties": 5}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"not": {}}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"$ref": "http://127.0.0.1/a.json"}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"$ref": "#/$defs/a"}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"$ref": "#"}), "grammar/no-token"),
    (lambda: Grammar.json_schema({"type": "string", "format": "?"}), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema(False), "grammar/bad-json-schema"),
    (lambda: Grammar.json_schema({"description": "a" * 300_000}), "grammar/too-long"),
    (lambda: Grammar.regex("[0-9"), "grammar/bad-regex"),
    (lambda: Grammar.regex("(?=a)a"), "grammar/bad-regex"),
    (lambda: Grammar.regex(r"(a)\1"), "grammar/bad-regex"),
    (lambda: Grammar.regex(""), "grammar/bad-regex"),
    (lambda: Grammar.regex(5), "grammar/bad-regex"),
    (lambda: Grammar.choice([]), "grammar/bad-choice"),
    (lambda: Grammar.choice("abc"), "grammar/bad-choice"),
    (lambda: Grammar.choice(["a", ""]), "grammar/bad-choice"),
    (lambda: Grammar.choice(["a", 1]), "grammar/bad-choice"),
    (lambda: Grammar.choice(["\ud800"]), "grammar/bad-choice"),
    (lambda: Grammar.regex("\ud800"), "grammar/bad-regex"),
    (lambda: Grammar.json_schema('{"const": "\\ud800"}'), "grammar/bad-json-schema"),
    (lambda: Grammar.lark('begin: "a"'), "grammar/bad-lark"),
    (lambda: Grammar.lark("start: start"), "grammar/no-token"),
    (lambda: Grammar.lark("start: " + "(" * 9999 + '"a"' + ")" * 9999), "grammar/bad-lark"),
]


@pytest.mark.parametrize(("make", "identifier"), BAD)
def test_what_is_refused(make: Any, identifier: str) -> None:
    with pytest.raises(RequestError) as caught:
        GRAMMARS.compile(make())
    assert caught.value.id == identifier
    assert len(str(caught.value)) < 1500, "a message that quotes all of it"


@pytest.mark.parametrize("pattern", ["a{99999999}", "((a{100}){100}){100}", "([a-z]{1,99}){1,99}b"])
def test_work_is_bounded(pattern: str) -> None:
    """Some are refused once they turn out to be too large; none is worked on for minutes."""
    begin = time.process_time()
    with suppress(RequestError):
        follow(Grammar.regex(pattern), 100)
    assert time.process_time() - begin < 60  # without limits it takes many minutes


def test_what_turns_out_to_be_too_complex() -> None:
    with pytest.raises(RequestError) as caught:
        follow(Grammar.regex("([a-z]{1,99}){1,99}b"), 100)
    assert caught.value.id == "grammar/too-complex"


def follow(grammar: Grammar, steps: int) -> None:
    constraint = GRAMMARS.compile(grammar).start({END})
    for _ in range(steps):
        constraint.advance(int(np.flatnonzero(constraint.allowed)[-1]))


def test_what_is_no_grammar_at_all() -> None:
    generator, _ = make_generator()
    bad: Any = {"type": "object"}
    with pytest.raises(RequestError, match="must be a Grammar"):
        generator.generate(token_ids=[1], grammar=bad)


def test_llguidance_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "edgecc.backends.runtime.grammar.matchers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match="need llguidance") as caught:
        GrammarCompiler(TOKENIZER, NUM_TOKENS).compile(Grammar.regex("a"))
    assert "edgecc[grammar]" in str(caught.value)
    assert not make_generator()[0].prepare_grammars()


def test_what_is_prepared_is_used() -> None:
    generator, _ = make_generator()
    assert generator.prepare_grammars()
    assert generator.request(token_ids=[1], grammar=Grammar.regex("a")).grammar is not None


def test_bytes_of_a_character_come_one_by_one() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    constraint = GrammarCompiler(tokenizer, NUM_BYTES).compile(Grammar.regex("[äö]")).start(())
    tokens = []
    while not constraint.finished:
        tokens.append(int(np.flatnonzero(constraint.allowed)[0]))
        constraint.advance(tokens[-1])
    assert bytes(tokens).decode() == "ä"


def test_several_threads_compile() -> None:
    grammars = [Grammar.regex(f"[ab]{{{i}}}") for i in range(1, 50)]
    with ThreadPoolExecutor(4) as pool:
        compiled = list(pool.map(GRAMMARS.compile, grammars * 2))
    for index, one in enumerate(compiled[:49], 1):
        constraint = one.start(())
        for _ in range(index):
            assert not constraint.finished
            constraint.advance(TOKENIZER.encode("a")[0])
        assert constraint.finished
