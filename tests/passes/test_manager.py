from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from edgecc.devices import get_device
from edgecc.errors import InputError, PassError, UsageError, VerifyError
from edgecc.ir import Module, print_module
from edgecc.ir.core import Output
from edgecc.passes.base import NoOptions, Pass, PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights, BindSharedWeightsOptions
from edgecc.passes.dce import Dce
from edgecc.passes.manager import PassManager
from edgecc.passes.repeat import Repeat
from helpers.pairs import PairOptions, pair

OWN = PairOptions(draft_head="own", draft_embedding="own")


class Recorder(Pass[NoOptions]):
    """Records that it ran; says whether it changed anything as it is told."""

    name = "record"

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.changes = changes
        self.seen: list[tuple[Module, PassContext]] = []

    def run(self, module: Module, ctx: PassContext) -> bool:
        self.seen.append((module, ctx))
        return self.changes


class Breaks(Pass[NoOptions]):
    """Returns a value that no node defines."""

    name = "break"

    def run(self, module: Module, ctx: PassContext) -> bool:
        output = module.graphs["target"].outputs[0]
        module.graphs["draft"].outputs.append(Output(output.value, "z", output.role))
        return True


class Needs(Recorder):
    """Requires heads."""

    name = "need"
    requires = ("heads-bound",)


class Promises(Recorder):
    """Ensures what it does not do."""

    name = "promise"
    ensures = ("markov-unrolled", "heads-bound")


class Fails(Pass[NoOptions]):
    """Raises what it is given."""

    name = "fail"

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def run(self, module: Module, ctx: PassContext) -> bool:
        raise self.error


def test_runs_passes_in_order_on_the_module_itself():
    module, ctx = pair(OWN), PassContext(get_device("cpu"))
    passes = [Recorder(), Recorder(True)]
    order: list[tuple[str, int, int]] = []
    manager = PassManager(passes, observer=lambda *seen: order.append(seen))
    assert manager.run(module, ctx) is module
    assert [p.seen for p in passes] == [[(module, ctx)]] * 2
    assert order == [("record", 0, 2), ("record", 1, 2)]
    assert [(t.name, t.changed) for t in manager.timings] == [("record", False), ("record", True)]


def test_names_stand_for_passes_with_default_options():
    manager = PassManager(["bind-shared-weights", Dce(), "unroll-markov"])
    assert [p.name for p in manager.passes] == ["bind-shared-weights", "dce", "unroll-markov"]
    assert str(manager) == "bind-shared-weights,dce,unroll-markov"
    copying = BindSharedWeights(BindSharedWeightsOptions(copy=True))
    assert str(PassManager([copying, "dce"])).lower() == "bind-shared-weights{copy=true},dce"
    module = manager.run(pair())
    assert not any(n.op.name == "markov_chain" for g in module.graphs.values() for n in g.nodes)


def test_unknown_names():
    with pytest.raises(UsageError, match="unknown pass 'dse'") as caught:
        PassManager(["dse"])
    assert "did you mean 'dce'?" in caught.value.diagnostics[0].help


def test_no_passes():
    module = pair(OWN)
    text = print_module(module)
    assert print_module(PassManager([]).run(module)) == text


def test_sizes_are_recorded():
    module = pair(OWN)
    manager = PassManager(["unroll-markov", "dce"])
    manager.run(module)
    last = manager.timings[-1]
    assert last.nodes == sum(len(g.nodes) for g in module.graphs.values())
    assert last.weights == len(module.weights)
    assert last.seconds > 0
    assert last.peak_bytes == 0


def test_memory_is_measured_on_request():
    class Allocates(Recorder):
        def run(self, module: Module, ctx: PassContext) -> bool:
            return len(bytearray(1 << 20)) < 0

    manager = PassManager([Allocates(), Recorder()], measure_memory=True)
    manager.run(pair(OWN))
    large, small = (t.peak_bytes for t in manager.timings)
    assert large >= 1 << 20 > small
    assert not tracemalloc.is_tracing()
    failing = PassManager([Fails(ValueError("x"))], measure_memory=True)
    with pytest.raises(PassError):
        failing.run(pair(OWN))
    assert not tracemalloc.is_tracing()


def test_a_pass_that_breaks_the_module_is_named():
    after = Recorder()
    manager = PassManager([Recorder(), Breaks(), after])
    with pytest.raises(PassError, match="output z is not defined") as caught:
        manager.run(pair(OWN))
    (found,) = caught.value.diagnostics
    assert (found.id, found.notes) == ("ir/undefined-output", ("after pass break",))
    assert caught.value.exit_code == 1
    assert after.seen == []


def test_verification_can_be_switched_off():
    after = Recorder()
    PassManager([Breaks(), after], verify_each=False).run(pair(OWN))
    assert len(after.seen) == 1


def test_a_module_that_was_broken_before_is_not_blamed_on_a_pass():
    module, first = pair(OWN), Recorder()
    Breaks().run(module, PassContext())
    with pytest.raises(VerifyError, match="before the first pass") as caught:
        PassManager([first]).run(module)
    assert not isinstance(caught.value, PassError)
    assert first.seen == []


def test_what_a_pass_requires_is_checked():
    needs = Needs()
    with pytest.raises(VerifyError, match="is bound to nothing") as caught:
        PassManager([needs]).run(pair())
    assert needs.seen == []
    assert len(caught.value.diagnostics) == 2
    for found in caught.value.diagnostics:
        assert found.id == "bind/unbound-weight"
        assert found.notes[-1] == "pass need requires heads-bound"
    PassManager(["bind-shared-weights", needs]).run(pair())
    assert len(needs.seen) == 1


def test_what_a_pass_ensures_is_checked():
    with pytest.raises(PassError, match="the Markov chain is still one op") as caught:
        PassManager([Promises()]).run(pair(OWN))
    assert caught.value.diagnostics[0].notes == ("pass promise ensures markov-unrolled",)
    PassManager([Promises()]).run(pair(OWN, draft=False))


def test_errors_of_a_pass_are_passed_on_with_its_name():
    error = InputError("bind/no-target", "there is no target", help="give one")
    with pytest.raises(InputError, match="there is no target") as caught:
        PassManager([Recorder(), Fails(error)]).run(pair(OWN))
    assert caught.value is error
    assert caught.value.__notes__ == ["in pass fail"]


@pytest.mark.parametrize("error", [ValueError("no"), AssertionError("no"), KeyError("no")])
def test_a_crash_of_a_pass_is_a_diagnostic(error):
    with pytest.raises(PassError) as caught:
        PassManager([Fails(error)]).run(pair(OWN))
    assert caught.value.id == "pass/crash"
    assert f"pass fail failed: {type(error).__name__}: " in str(caught.value)
    assert caught.value.__cause__ is error
    assert "this is a bug in the pass: --debug shows the traceback" in str(caught.value)


def test_interrupts_are_not_caught():
    class Interrupts(Recorder):
        def run(self, module: Module, ctx: PassContext) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PassManager([Interrupts()]).run(pair(OWN))


def test_dumps(tmp_path):
    module = pair()
    folder = tmp_path / "new" / "dumps"
    before = print_module(module, locations=True)
    PassManager(["bind-shared-weights", "dce"], dump_dir=folder).run(module)
    names = ["000-input.eir", "001-bind-shared-weights.eir", "002-dce.eir"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert (folder / names[0]).read_text("utf-8") == before
    assert (folder / names[2]).read_text("utf-8") == print_module(module, locations=True)


def test_dumps_end_with_the_last_good_module(tmp_path):
    passes: list[Pass[Any]] = [Recorder(), Breaks()]
    with pytest.raises(PassError):
        PassManager(passes, dump_dir=tmp_path).run(pair(OWN))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000-input.eir", "001-record.eir"]


@pytest.mark.parametrize("answer", [None, "yes", 1])
@pytest.mark.parametrize("wrap", [list, lambda passes: [Repeat(passes)]])
def test_a_pass_says_whether_it_changed_anything(answer, wrap):
    with pytest.raises(PassError, match="pass record returned") as caught:
        PassManager(wrap([Recorder(answer)])).run(pair(OWN))
    assert caught.value.id == "pass/no-answer"


def test_a_crash_within_repeat_names_the_pass():
    with pytest.raises(PassError, match="pass fail failed: KeyError: 'x'"):
        PassManager([Repeat([Fails(KeyError("x"))])]).run(pair(OWN))


def test_properties_hold_within_repeat():
    module = pair()
    with pytest.raises(VerifyError, match="pass need requires heads-bound"):
        PassManager([Repeat([Needs()])]).run(module)
    with pytest.raises(PassError, match="pass promise ensures"):
        PassManager([Repeat([Promises()])]).run(module)


def test_no_memory_is_no_bug():
    with pytest.raises(MemoryError):
        PassManager([Fails(MemoryError())]).run(pair(OWN))


@pytest.mark.parametrize("passes", ["dce", [None], [3], [Dce]])
def test_what_is_no_pass(passes):
    with pytest.raises(UsageError) as caught:
        PassManager(passes)
    assert caught.value.id == "usage/passes"


def test_a_number_of_checks():
    with pytest.raises(UsageError):
        PassManager([Dce()], check=-1)
