"""Expressions of checkpoints that could take for ever are told from their text."""

from __future__ import annotations

import re

import pytest

from edgecc.errors import InputError
from edgecc.frontends.quantization.patterns import ModulePatterns
from edgecc.frontends.quantization.regex_cost import costly

COSTLY = [
    r"(.+)+\.Z$",
    r"(.*.*)*x",
    r"(a|a)*b",
    r"(?:a|ab|b)+$",
    r"(a?){50}",
    r"((a*)b)*",
    r"(?P<n>a+)*",
    r"(?i)(a+)+",
    r"(a{2,}){3}",
    r"(?=(a+)+b)c",
    ".*" * 6,
    "a?" * 30 + "a" * 30,
]
USUAL = [
    r".*lm_head",
    r"^lm_head$|^model\.embed.*$",
    r"model\.layers\.\d+\..*(q|k|v)_proj$",
    r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj.*",
    r"(?:model\.)?visual.*",
    r"(?!.*visual).*self_attn.*",
    r"(?i)X.*",
    r"(ab)*",
    r"[(a+)*]+",
    r"a\(+\)*",
    r".*[\]*+?|]x",
]


@pytest.mark.parametrize("expression", COSTLY)
def test_costly(expression: str) -> None:
    re.compile(expression)
    assert costly(expression)
    with pytest.raises(InputError, match="may take too long to match") as caught:
        ModulePatterns([f"re:{expression}"], "config.json: ignore")
    (found,) = caught.value.diagnostics
    assert (found.id, found.where) == ("quant/bad-pattern", "config.json: ignore")


@pytest.mark.parametrize("expression", ["(.*.*)*x", "((a*)b)*"])
def test_costly_without_a_mark(expression: str) -> None:
    with pytest.raises(InputError, match="may take too long to match"):
        ModulePatterns([expression], "config.json: modules_to_not_convert", anywhere=True)


@pytest.mark.parametrize("expression", USUAL)
def test_usual(expression: str) -> None:
    re.compile(expression)
    assert costly(expression) == ""
    assert ModulePatterns([f"re:{expression}"], "config.json: ignore").patterns
