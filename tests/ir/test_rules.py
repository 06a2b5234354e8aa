"""The driver of rewrite rules: order, fixed point, clean-up, and reports."""

from __future__ import annotations

import pytest

from edgecc.errors import PassError
from edgecc.ir import Builder, DType, Module, Role, verify
from edgecc.ir.patterns import op, var
from edgecc.ir.rules import Rule, apply_rules


class DoubleSilu(Rule):
    """silu(silu(x)) becomes sigmoid(x): no algebra, but easy to see."""

    pattern = op("silu", op("silu", var("x")))
    explains = True

    def rewrite(self, match, rewriter):
        return [rewriter.insert(match.root, "sigmoid", (match.value("x"),)).result]


class SigmoidOfSilu(Rule):
    """What DoubleSilu leaves can match again: sigmoid(silu(x)) becomes x."""

    pattern = op("sigmoid", op("silu", var("x")))

    def rewrite(self, match, rewriter):
        return [match.value("x")]


class Swap(Rule):
    def __init__(self, old: str, new: str) -> None:
        self.pattern = op(old, var("x"))
        self.new = new

    def rewrite(self, match, rewriter):
        return [rewriter.insert(match.root, self.new, (match.value("x"),)).result]


def chain(*ops: str) -> Builder:
    b = Builder(Module("m"), "main").at("origin")
    x = b.input("x", DType.F32, (4,), Role.ACTIVATION)
    for name in ops:
        x = b.op(name, x, name=name[:2])
    b.output(x, "y", Role.ACTIVATION)
    return b


def apply(b: Builder, *rules: Rule) -> tuple[bool, list[str]]:
    events: list[str] = []
    changed = apply_rules(
        b.module,
        b.graph,
        rules,
        "test-pass",
        lambda rule, where, message, applied: events.append(
            f"{'+' if applied else '-'} {where}: {message}"
        ),
    )
    assert verify(b.module) == []
    return changed, events


def ops(b: Builder) -> list[str]:
    return [n.op.name for n in b.graph.nodes]


def test_matched_nodes_nobody_reads_are_erased():
    b = chain("silu", "silu", "silu")
    changed, events = apply(b, DoubleSilu())
    assert changed
    assert ops(b) == ["sigmoid", "silu"]
    assert events == [
        "+ @main, silu of origin: DoubleSilu",
        "- @main, silu of origin: x of silu is made by sigmoid, expected silu",
    ]
    assert b.graph.nodes[0].location.passes == ("test-pass",)


def test_matched_nodes_with_other_readers_stay():
    b = chain("silu", "silu")
    b.output(b.graph.nodes[0].result, "inner", Role.ACTIVATION)
    assert apply(b, DoubleSilu())[0]
    assert sorted(ops(b)) == ["sigmoid", "silu"]


def test_a_rewrite_makes_the_next_possible():
    """silu silu silu silu: the pairs become sigmoids in order, then nothing matches."""
    b = chain("silu", "silu", "silu", "silu", "silu", "silu")
    apply(b, DoubleSilu(), SigmoidOfSilu())
    assert ops(b) == ["sigmoid", "sigmoid", "sigmoid"]
    b = chain("silu", "silu", "silu", "silu", "sigmoid")
    apply(b, SigmoidOfSilu())
    assert ops(b) == ["silu", "silu", "silu"]


def test_users_of_a_rewritten_value_are_visited_again():
    """sigmoid comes first in the list, and matches only once its operand has changed."""
    b = chain("sigmoid", "sigmoid")
    changed, _ = apply(b, Swap("sigmoid", "silu"), DoubleSilu())
    assert changed
    assert set(ops(b)) <= {"silu", "sigmoid"}


def test_nothing_to_do_is_reported_as_such():
    b = chain("sigmoid", "silu")
    assert apply(b, SigmoidOfSilu()) == (False, [])
    assert ops(b) == ["sigmoid", "silu"]


def test_rules_that_explain_say_why_not_once():
    b = chain("sigmoid", "silu", "sigmoid")
    changed, events = apply(b, DoubleSilu())
    assert not changed
    assert events == ["- @main, silu of origin: x of silu is made by sigmoid, expected silu"]


def test_a_refused_match_outranks_one_that_was_not_found():
    class Refuses(DoubleSilu):
        def check(self, match):
            return "not on Mondays"

    class Longer(DoubleSilu):
        pattern = op("silu", op("silu", op("silu", op("mul"))))

    b = chain("silu", "silu", "silu")
    _, events = apply(b, Longer(), Refuses())
    assert [e.rsplit(": ", 1)[1] for e in events] == [
        "x of silu is a graph input, expected silu",
        "not on Mondays",
        "not on Mondays",
    ]


def test_dead_nodes_are_left_alone():
    b = chain("sigmoid")
    b.op("silu", b.op("silu", b.graph.inputs[0].value))
    assert not apply(b, DoubleSilu())[0]
    assert len(b.graph.nodes) == 3


def test_rules_that_undo_each_other_are_named():
    b = chain("silu")
    with pytest.raises(PassError, match="still rewriting @main") as caught:
        apply(b, Swap("silu", "sigmoid"), Swap("sigmoid", "silu"))
    assert caught.value.id == "pass/no-fixed-point"
    assert "Swap" in caught.value.diagnostics[0].notes[0]
    assert caught.value.diagnostics[0].help


def test_earlier_rules_win():
    class Gone(Rule):
        pattern = op("silu", var("x"))

        def rewrite(self, match, rewriter):
            return [match.value("x")]

    b = chain("silu", "silu")
    apply(b, DoubleSilu(), Gone())
    assert ops(b) == []
    b = chain("silu", "silu", "sigmoid")
    apply(b, Gone(), DoubleSilu())
    assert ops(b) == ["sigmoid"]


def test_the_name_of_the_root_goes_on():
    b = chain("silu", "silu")
    b.graph.nodes[1].result.name = "wanted"
    apply(b, DoubleSilu())
    assert b.graph.nodes[0].result.name == "wanted"
