"""A test of the tests: `check_pass` over `modules()` catches mistakes people make in passes."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from edgecc.ir import Module, parse_module, print_module
from edgecc.passes.base import Pass, PassContext
from edgecc.testing import check_pass, modules
from helpers import seeded_bugs

BUGS = {
    name: cls
    for name, cls in vars(seeded_bugs).items()
    if inspect.isclass(cls)
    and cls.__module__ == seeded_bugs.__name__
    and not inspect.isabstract(cls)
}

FIRST = settings(
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
"""The first examples, always the same, and no shrinking."""

HOW = {
    "WrongAxis": "axis|axes|sizes|cannot replace",
    "ForgetsLimit": "differs for inputs|index . is outside",
    "ReadsAnotherWeight": "differs for inputs|is stored . times",
    "LeavesStaleUse": "lists a use that is not there|does not know this use",
    "UsesBeforeDefinition": "not defined before its use",
    "LosesOrigin": "does not say where it comes from",
    "WrongType": "recorded as",
    "LosesAlias": "the interface of @",
    "DropsAliasedOutput": "the interface of @",
    "RenamesOutput": "the interface of @",
    "CopiesAliases": "one weight became 2",
    "OneWeightPerUse": "one weight became 2",
    "StacksSharedWeight": "is stored 2 times",
    "LeavesOrphan": "which nobody reads",
    "SaysNothingChanged": "run returned False, but the module did change",
    "SaysSomethingChanged": "run returned True, but the module did not change",
    "NeverDone": "a second run returned True",
    "OrderOfAddresses": "is not deterministic",
    "BreaksPromise": "ensures markov-unrolled",
    "Crashes": "too many values to unpack",
}
"""What the failure says; wrong values for all others."""


def test_there_are_enough_of_them():
    assert len(BUGS) >= 30
    assert set(HOW) <= set(BUGS)


@functools.cache
def corpus() -> tuple[str, ...]:
    """The first modules Hypothesis draws, as text: the same ones for every bug, to save time."""
    texts: dict[str, None] = {}

    @settings(FIRST, max_examples=700)
    @given(modules())
    def collect(module: Module) -> None:
        texts[print_module(module, locations=True)] = None

    collect()
    return tuple(texts)


def caught_by(made: Pass[Any], text: str) -> Exception | None:
    """What `check_pass` says of a pass on a module."""
    try:
        check_pass(made, parse_module(text))
    except Exception as error:
        return error
    return None


def does_something(made: Pass[Any], text: str) -> bool:
    """Whether it is worth asking: on most modules, a mistake has no occasion."""
    module = parse_module(text)
    try:
        changed = made.run(module, PassContext())
    except Exception:
        return True
    return changed or bool(made.ensures) or print_module(module, locations=True) != text


@pytest.mark.parametrize("name", BUGS)
def test_caught(name):
    asked = (text for text in corpus() if does_something(BUGS[name](), text))
    errors = filter(None, (caught_by(BUGS[name](), text) for text in asked))
    how = HOW.get(name, "differs for inputs")
    found = next((error for error in errors if re.search(how, str(error))), None)
    assert found is not None
    notes = "\n".join(found.__notes__)
    assert "edgecc opt -p 'seeded-bug' - <<'EOF'\nedgecc.module v1" in notes


def test_caught_by_hypothesis():
    """The way users write it."""

    @settings(FIRST, max_examples=100)
    @given(modules(ops=["swiglu", "silu", "linear"]))
    def test_pass(module: Module) -> None:
        check_pass(seeded_bugs.SwapsOperands(), module)

    with pytest.raises(AssertionError, match="differs for inputs"):
        test_pass()


class Nothing(Pass):
    """The smallest correct pass."""

    name = "nothing"

    def run(self, module: Module, ctx: PassContext) -> bool:
        return False


@given(modules(dead=True))
def test_a_correct_pass_survives(module):
    assert not check_pass(Nothing(), module)
