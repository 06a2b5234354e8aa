"""Reduction: planted bugs in a lifted pair shrink to a handful of nodes, the same every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import edgecc
from edgecc.ir import NVFP4, Module, Stored, Unbound, parse_module, print_module, verify
from edgecc.ir.clone import clone_module
from edgecc.passes.base import Pass
from edgecc.passes.pipeline import parse_pipeline
from edgecc.reduction import reduce
from edgecc.reproduction import (
    Failure,
    KeepReproducer,
    Reproduction,
    Runner,
    command_line,
    reproduce,
    write_new,
)
from helpers import planted
from helpers.modules import modules
from helpers.pairs import PairOptions, pair

DATA = Path(__file__).parent / "data" / "pairs"
OWN = PairOptions(draft_head="own", draft_embedding="own")


@pytest.fixture(scope="module")
def lifted() -> Module:
    return edgecc.lift(DATA / "tiny-qwen3-nvfp4", DATA / "tiny-qwen3-dspark", max_model_len=256)


def count(module: Module, op: str = "") -> int:
    return sum(n.op.name == op or not op for g in module.graphs.values() for n in g.nodes)


def cases(*ops: str) -> Callable[[Module], bool]:
    return lambda module: all(count(module, op) for op in ops)


@given(modules(dead=True))
def test_any_module_shrinks_to_nothing(module: Module) -> None:
    text = print_module(module)
    made = reduce(module, lambda m: True)
    assert print_module(module) == text
    assert len(made.graphs) == 1
    assert count(made) == 0
    assert not made.weights
    assert not made.symbols


def test_what_cannot_shrink_stays() -> None:
    module = pair(OWN, draft=False)
    assert reduce(module, lambda m: False) is module


def test_one_op_of_a_pair_is_left_alone() -> None:
    for op in ("take_rows", "markov_chain", "cache_update", "swiglu"):
        made = reduce(pair(OWN), cases(op))
        assert verify(made) == []
        assert [n.op.name for g in made.graphs.values() for n in g.nodes] == [op]
        assert parse_module(print_module(made))


def test_two_ops_that_depend_on_each_other() -> None:
    """A norm that reads a sum: what lies between other nodes is cut out."""

    def fails(module: Module) -> bool:
        return any(
            n.op.name == "rms_norm" and o.producer is not None and o.producer.op.name == "add"
            for g in module.graphs.values()
            for n in g.nodes
            for o in n.operands
        )

    made = reduce(pair(PairOptions(layers=2, draft_head="own", draft_embedding="own")), fails)
    assert count(made) == 2
    assert [w.shape for w in made.weights.values()] == [(1,)]


def test_encodings_stay_and_bytes_come_into_the_module(lifted: Module) -> None:
    def fails(module: Module) -> bool:
        table = module.weights
        return any(
            isinstance(table[table.resolve(w)].encoding, NVFP4)
            and not isinstance(table[table.resolve(w)].source, Unbound)
            for g in module.graphs.values()
            for w in g.used_weights()
        )

    made = reduce(lifted, fails)
    (weight,) = made.weights.values()
    assert isinstance(weight.encoding, NVFP4)
    assert not isinstance(weight.source, Stored)
    assert weight.shape[1] == 16  # a block
    assert not made.checkpoints
    assert len(print_module(made)) < 1500


def test_a_reduction_is_the_same_every_time_and_counts() -> None:
    steps: list[tuple[int, int, int]] = []
    first = reduce(pair(OWN), cases("rope"), progress=lambda *step: steps.append(step))
    assert print_module(first) == print_module(reduce(pair(OWN), cases("rope")))
    assert steps[-1][0] == 1
    assert [s[2] for s in steps] == sorted(s[2] for s in steps)


def test_a_budget_ends_it() -> None:
    tried = []
    reduce(pair(OWN), lambda m: bool(tried.append(m)), budget=7)  # type: ignore[func-returns-value]
    assert len(tried) == 7


def shrinks(module: Module, bug: type[Pass[Any]], check: int, id: str, op: str, most: int) -> None:
    passes: list[Pass[Any]] = [
        *parse_pipeline("bind-shared-weights,drop-outputs,dce"),
        bug(),
        *parse_pipeline("fuse-qkv,dce"),
    ]
    text = print_module(module)
    runner = Runner(check=check)
    found = reproduce(module, passes, runner)
    assert print_module(module) == text
    assert found is not None
    assert found.failure.id == id
    assert found.failure.pass_name == bug.name
    assert [p.name for p in found.passes] == [bug.name]
    assert count(found.module, op) >= 1
    assert count(found.module) <= most
    assert len(print_module(found.module)) < 2000
    again = parse_module(print_module(found.module))
    assert runner.failure(again, found.passes) == found.failure


def test_wrong_values_in_a_lifted_pair_shrink_to_the_op_that_is_wrong(lifted: Module) -> None:
    shrinks(lifted, planted.SwapGate, 1, "check/mismatch", "swiglu", 1)


def test_a_crash_in_a_lifted_pair_shrinks_to_what_crashes(lifted: Module) -> None:
    shrinks(lifted, planted.CrashOnAdd, 0, "pass/crash", "add", 2)


def test_a_broken_module_shrinks_to_what_breaks_it(lifted: Module) -> None:
    shrinks(lifted, planted.LoseUse, 0, "ir/lost-use", "rms_norm", 1)


def test_a_lost_mask_shrinks_to_attention() -> None:
    module = pair(PairOptions(layers=2, draft_head="own"))
    shrinks(module, planted.ForgetCausal, 4, "check/mismatch", "attention", 1)


def test_passes_that_are_needed_together_stay_together() -> None:
    """`legalize` refuses what `lower-encodings` has not lowered; `dce` has no part in it."""
    passes = parse_pipeline("dce,unroll-markov,dce,legalize{device=cpu}")
    found = reproduce(pair(PairOptions()), passes, Runner())
    assert found is not None
    assert found.failure.pass_name == "legalize"
    assert [p.name for p in found.passes] == ["legalize"]


def test_a_requirement_belongs_to_the_pass_that_has_it() -> None:
    found = reproduce(pair(PairOptions()), parse_pipeline("dce,lower-encodings,dce"), Runner())
    assert found is not None
    assert found.failure == Failure("bind/unbound-weight", "lower-encodings", "")
    assert [p.name for p in found.passes] == ["lower-encodings"]


def test_what_works_is_not_reproduced() -> None:
    assert reproduce(pair(OWN), parse_pipeline("fuse-qkv,dce"), Runner(check=1)) is None


def test_the_command_names_all_that_is_needed() -> None:
    passes = tuple(parse_pipeline("lower-encodings{form=dense},dce"))
    found = Reproduction(pair(), passes, Failure("x", "y"))
    assert command_line("a b.eir", found, Runner(check=3)) == (
        "edgecc opt 'a b.eir' -p 'lower-encodings{form=dense},dce' --check 3"
    )


def test_a_mismatch_keeps_a_file_and_overwrites_none(tmp_path: Path) -> None:
    module, bug = pair(OWN), planted.SwapGate()
    keep = KeepReproducer(Runner(check=1), tmp_path / "new")
    for number in (1, 2):
        path = tmp_path / "new" / f"edgecc-swap-gate-{number}.eir"
        notes = keep(clone_module(module), bug, None)  # type: ignore[arg-type]
        assert notes == [
            f"reproduce: edgecc opt {path} -p swap-gate --check 1",
            f"make it smaller: edgecc reduce {path} -p swap-gate --check 1 "
            f"-o {path.with_suffix('.small.eir')}",
        ]
        assert Runner(check=1).failure(parse_module(path.read_text()), [bug]) is not None
    first = (tmp_path / "new" / "edgecc-swap-gate-1.eir").read_bytes()
    assert first == (tmp_path / "new" / "edgecc-swap-gate-2.eir").read_bytes()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep = KeepReproducer(Runner(check=1), tmp_path / "file")
    (note,) = keep(pair(OWN), planted.SwapGate(), None)  # type: ignore[arg-type]
    assert note.startswith("what reproduces it could not be written: ")


def test_names_of_files_are_plain(tmp_path: Path) -> None:
    assert write_new(tmp_path, "repeat(a,b)", "x").name == "edgecc-repeat-a-b--1.eir"
