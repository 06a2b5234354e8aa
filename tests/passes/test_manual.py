"""Manuals of passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import dedent

import pytest

from edgecc.devices import DEVICES
from edgecc.errors import UsageError
from edgecc.passes import manual as module
from edgecc.passes.assign_precision import AssignPrecision
from edgecc.passes.base import NoOptions, Pass
from edgecc.passes.dce import Dce
from edgecc.passes.manual import Manual, Option, manual_of
from edgecc.passes.quantize import Quantize
from edgecc.passes.repeat import Repeat


@dataclass(frozen=True)
class Options:
    max_width: int = 8
    parts: list = field(default_factory=list)


class Widen(Pass[Options]):
    """Make things wider,
    as wide as they go.

    What it does
        First line.

            indented

        After a blank line.
    Example:
        ```
        %x
        ```
    Options
        `max-width`: how wide.
    """

    name = "widen"
    options_type = Options
    requires = ("narrow", "thin")
    ensures = ("wide",)
    tolerance = 1e-3

    def run(self, module, ctx):
        return False


def test_parts():
    assert manual_of(Widen) == Manual(
        name="widen",
        summary="Make things wider, as wide as they go.",
        sections={
            "What it does": "First line.\n\n    indented\n\nAfter a blank line.",
            "Example": "```\n%x\n```",
            "Options": "`max-width`: how wide.",
        },
        options=(Option("max-width", "int", "8"), Option("parts", "list", "none")),
        requires=("narrow", "thin"),
        ensures=("wide",),
        tolerance=1e-3,
        devices=(),
    )


def test_text():
    text = dedent(
        """\
        widen

        Make things wider, as wide as they go.

        What it does
            First line.

                indented

            After a blank line.

        Example
            ```
            %x
            ```

        Options
            `max-width`: how wide.

        option max-width: int, default 8
        option parts: list, default none
        requires: narrow, thin
        ensures: wide
        values: relative error up to 0.001
        default pipelines: none"""
    )
    assert str(manual_of(Widen)) == text


def test_a_pass_that_says_nothing():
    class Silent(Pass[NoOptions]):
        name = "silent"

        def run(self, module, ctx):
            return False

    manual = manual_of(Silent)
    assert (manual.summary, manual.sections, manual.options) == ("", {}, ())
    assert "values: exact" in str(manual)
    assert "requires: nothing" in str(manual)


def test_defaults_are_spelled_as_in_pipelines():
    defaults = {option.name: option.default for option in manual_of(Quantize).options}
    assert defaults == {
        "format": "nvfp4",
        "include": "*",
        "exclude": '""',
        "head": "false",
        "group": "0",
    }


def test_a_tolerance_that_follows_from_the_options():
    assert manual_of(Quantize).values == "relative error up to 0.5"
    assert manual_of(AssignPrecision).values == "relative error up to 0.25"


@pytest.mark.parametrize("error", [TypeError("missing"), UsageError("pass/bad-option", "no")])
def test_a_pass_that_cannot_be_made_without_options(error):
    class Picky(Widen):
        def __init__(self, options=None):
            raise error

    assert manual_of(Picky).tolerance == Widen.tolerance


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: Repeat([Repeat([p])])])
def test_devices_whose_default_pipeline_has_it(monkeypatch, wrap):
    monkeypatch.setattr(
        module, "default_pipeline", lambda d: [wrap(Widen())] if d.name == "onnx" else [Dce()]
    )
    assert manual_of(Widen).devices == ("onnx",)
    assert manual_of(Dce).devices == tuple(d for d in DEVICES if d != "onnx")
