"""Expressions that call another graph."""

from __future__ import annotations

from edgecc.testing.expressions import Call, Expr, Wanted, leaves
from edgecc.testing.rules import Grower, Rule, anything


def _call(grow: Grower, wanted: Wanted) -> Expr:
    """A graph that gives the wanted tensor, and perhaps another one that nobody reads."""
    body = [grow(wanted)]
    if grow.pick(False, True):
        body.insert(grow.number(0, 1), grow(wanted))
    arguments = tuple(grow(leaf.wanted) for leaf in leaves(*body))
    return Call(tuple(body), arguments, len(body) - 1)


RULES = (Rule("call", anything, _call),)
