"""Texts held to grammars, by the shipped pairs on the CPU."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from edgecc.backends.runtime import FinishReason, Grammar, SamplingParams

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "arguments": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "maxItems": 3,
        },
        "kind": {"enum": ["function", "class"]},
    },
    "required": ["name", "arguments", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 7}])
def test_speculation_changes_nothing(generator, goldens, options):
    """A draft that knows no grammar: the text is valid, and the one that is written without it."""
    arguments = {
        "token_ids": goldens["p1"]["ids"],
        "max_new_tokens": 220,
        "grammar": Grammar.json_schema(SCHEMA),
        "sampling": SamplingParams(**options, logprobs=1),
    }
    plain = generator.generate(speculation=False, **arguments)
    assert plain.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(plain.text), SCHEMA)
    accepted = 0
    for steps in (1, 7):
        found = generator.generate(num_speculative_tokens=steps, **arguments)
        assert (found.token_ids, found.text) == (plain.token_ids, plain.text)
        assert [item.token_id for item in found.logprobs] == found.token_ids
        accepted += found.stats.accepted
    assert accepted > 0


def test_lookup_is_held_to_it_as_well(generator, goldens):
    from edgecc import PromptLookup

    prompt = [*goldens["p1"]["ids"], *generator.tokenizer.encode(" 555-12 555-12 55")]
    arguments = {"token_ids": prompt, "grammar": Grammar.regex("[0-9]{3}(-[0-9]{2}){3}")}
    plain = generator.generate(speculation=False, **arguments)
    found = generator.generate(prompt_lookup=PromptLookup(1, 3), **arguments)
    assert found.token_ids == plain.token_ids
    assert re.fullmatch("[0-9]{3}(-[0-9]{2}){3}", found.text)


def test_a_choice(generator, goldens):
    ids = goldens["p0"]["ids"]
    found = generator.generate(token_ids=ids, grammar=Grammar.choice(["yes", "no", "née"]))
    assert found.text in ("yes", "no", "née")
    assert found.finish_reason is FinishReason.STOP
