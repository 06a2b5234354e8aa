from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.devices import ONNX_DEVICES
from edgecc.errors import PassError, UsageError
from edgecc.ir import Module
from edgecc.passes import PASSES, Pass, PassContext, get_pass, registered
from edgecc.passes.bind_shared_weights import BindSharedWeightsOptions
from edgecc.passes.default import default_pipeline
from edgecc.passes.lower_encodings import LowerEncodingsOptions
from edgecc.passes.pipeline import parse_pipeline, print_pipeline
from edgecc.passes.repeat import Repeat


@pytest.mark.parametrize("device", ONNX_DEVICES.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("copy", [False, True])
def test_default_pipelines_round_trip(device, copy):
    text = print_pipeline(default_pipeline(device, copy_head=copy, linear_form="dense"))
    assert print_pipeline(parse_pipeline(text)) == text
    assert "lower-encodings{form=dense,device=" in text


PASS_TEXTS = st.sampled_from(sorted(PASSES)) | st.sampled_from(
    ["lower-encodings{form=int8-split}", "bind-shared-weights{copy=true}", "legalize{device=cpu}"]
)


@given(
    st.recursive(
        PASS_TEXTS,
        lambda inner: st.lists(inner, min_size=1).map(lambda p: f"repeat({','.join(p)})"),
    )
)
def test_any_pipeline_round_trips(text):
    assert print_pipeline(parse_pipeline(text)) == text


def test_options_become_the_dataclass():
    bind, lower = parse_pipeline(
        ' bind-shared-weights{ copy = true } , lower-encodings{device=cpu,form="int8-split"} '
    )
    assert bind.options == BindSharedWeightsOptions(copy=True)
    assert lower.options == LowerEncodingsOptions("int8-split", "cpu")


@pytest.mark.parametrize(
    ("text", "message", "caret"),
    [
        ("", "expected a pass name", 0),
        ("dce,", "expected a pass name", 4),
        ("dce dce", "expected ',' or the end", 4),
        ("dce,nope", "unknown pass 'nope'", 4),
        ("legalize{devic=cpu}", "legalize has no option 'devic'", 9),
        ("legalize{device}", "expected '='", 15),
        ("legalize{device=", "expected a value", 16),
        ("legalize{device=cpu", "expected ','", 19),
        ("legalize{device=cpu,device=cpu}", "option device is given twice", 20),
        ("dce{a=1}", "dce has no option 'a'", 4),
        ("bind-shared-weights{copy=1}", "expected true or false", 25),
        ("dedupe-weights{min-bytes=x}", "expected a number", 25),
        ("repeat(dce", "expected ')'", 10),
        ("dce;dce", "expected ',' or the end", 3),
    ],
)
def test_errors_have_a_caret(text, message, caret):
    with pytest.raises(UsageError) as caught:
        parse_pipeline(text)
    (finding,) = caught.value.diagnostics
    assert message in finding.message
    assert finding.notes[0] == text
    assert finding.notes[1].index("^") == caret


class Countdown(Pass):
    """Changes something a number of times."""

    name = "countdown"

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def run(self, module: Module, ctx: PassContext) -> bool:
        self.left -= 1
        return self.left >= 0


def test_repeat_runs_until_nothing_changes():
    item = Countdown(3)
    assert Repeat([item]).run(Module("m"), PassContext()) is True
    assert item.left == -1
    assert Repeat([Countdown(0)]).run(Module("m"), PassContext()) is False


def test_repeat_gives_up():
    with pytest.raises(PassError, match="still changing after 64 rounds: countdown"):
        Repeat([Countdown(1000)]).run(Module("m"), PassContext())


@pytest.mark.parametrize("name", sorted(PASSES))
def test_the_names_of_every_pass_agree(name):
    cls = get_pass(name)
    module, _, attribute = PASSES[name].partition(":")
    assert cls.name == name
    assert module == f"edgecc.passes.{name.replace('-', '_')}"
    assert attribute == "".join(word.capitalize() for word in name.split("-"))


def test_other_packages_add_passes(monkeypatch):
    @dataclass(frozen=True)
    class Point:
        name: str
        value: str

    added = Point("countdown", f"{__name__}:Countdown")
    clash = Point("dce", "other.package:Dce")
    registered.cache_clear()
    try:
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [added])
        assert registered()["countdown"] == added.value
        registered.cache_clear()
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [clash])
        with pytest.raises(UsageError, match=r"defined by edgecc\.passes\.dce:Dce and by other"):
            registered()
    finally:
        registered.cache_clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"d\\qce"', "bad string"),
        ('"dce', "bad string"),
        ('assign-precision{keep="a\tb"}', "bad string"),
        ("repeat(" * 2000 + "dce" + ")" * 2000, "more than 16 times"),
    ],
)
def test_odd_text_is_a_usage_error(text, message):
    with pytest.raises(UsageError, match=message):
        parse_pipeline(text)


@pytest.mark.parametrize("value", ["no.such.module:X", "json:nothing", "json:dumps", "json:"])
def test_a_pass_that_does_not_load_names_its_entry_point(monkeypatch, value):
    point = EntryPoint("strange", value, "edgecc.passes")
    registered.cache_clear()
    try:
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
        with pytest.raises(UsageError, match=f"entry point {value}") as caught:
            get_pass("strange")
        assert caught.value.id == "pass/broken"
    finally:
        registered.cache_clear()
