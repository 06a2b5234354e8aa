from __future__ import annotations

import pytest

from edgecc.errors import InputError
from edgecc.ir import Module, parse_module
from edgecc.passes import Pass, PassContext
from edgecc.passes.instruments import Instrument, PrintIr
from edgecc.passes.manager import PassManager

TEXT = """edgecc.module v1 "m"
symbol t: 1..4
graph @main(
  %x: f32[t, 2] activation
) {
  %dead = add(%x, %x) : f32[t, 2]
  %y = mul(%x, %x) : f32[t, 2]
  return
    y = %y activation
}
"""


class Refuse(Pass):
    """Refuses every module."""

    name = "refuse"

    def run(self, module: Module, ctx: PassContext) -> bool:
        raise InputError("test/refused", "no")


class Record(Instrument):
    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    def before(self, item, index, module):
        self.events.append(("before", item.name, str(index)))

    def after(self, item, index, module, changed):
        self.events.append(("after", item.name, str(changed)))

    def failed(self, item, index, module, error):
        self.events.append(("failed", item.name, type(error).__name__))


def test_instruments_hear_every_pass():
    record = Record()
    manager = PassManager(["dce", "dce", Refuse()], instruments=[record])
    with pytest.raises(InputError):
        manager.run(parse_module(TEXT))
    assert record.events == [
        ("before", "dce", "0"),
        ("after", "dce", "True"),
        ("before", "dce", "1"),
        ("after", "dce", "False"),
        ("before", "refuse", "2"),
        ("failed", "refuse", "InputError"),
    ]


def printed(**options) -> list[str]:
    texts: list[str] = []
    manager = PassManager(["dce", "dce"], instruments=[PrintIr(texts.append, **options)])
    manager.run(parse_module(TEXT))
    return texts


def test_print_ir():
    assert printed() == []
    before = printed(before=["dce"])
    assert [t.split("\n")[0] for t in before] == ["// ---- before 1: dce", "// ---- before 2: dce"]
    assert "%dead" in before[0]
    assert "%dead" not in before[1]
    assert len(printed(after=["dce"])) == 2
    assert len(printed(after=["fuse-qkv"])) == 0
    assert len(printed(after=None)) == 2
    (change,) = printed(after=None, on_change=True)
    assert change.startswith("// ---- after 1: dce\n")
    parse_module(change)  # what is printed can be read again, its title is a comment
