"""Whether an expression of a checkpoint may be matched, or backtracking could go on for hours.

`re` has no limit of time. Lists of modules need little of its language, so what can take
exponential time is told from the text: a repeated group that holds a choice or another repeat, as
in `(a|a)*` and `(a+)+`. Repeats that follow one another cost a power of the name's length, so their
number is limited.
"""

from __future__ import annotations

import re

MOST_REPEATS = 5
"""Unbounded or counted repeats of one expression."""

MOST_OPTIONAL = 8
"""Optional parts of one expression: each doubles what may be tried."""

_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"  # an escape, a class
    r"|(?P<open>\((?:\?(?:P<\w*>|P[=>]|[:=!>]|<[=!]|#|[aiLmsux-]+[:)]?|\())?)"
    r"|(?P<close>\))|(?P<choice>\|)"
    r"|(?P<repeat>[*+]|\{\d*,?\d*\})[?+]?|(?P<optional>\?)[?+]?|.",
    re.DOTALL,
)


def costly(expression: str) -> str:
    """Why an expression may take too long to match; empty if it will not.

    Args:
        expression: A regular expression that `re` compiles.
    """
    repeats = optional = 0
    branching = [False]  # by open group: it can match one text in several ways
    closed = False  # the group that the token before ended could
    for found in _TOKEN.finditer(expression):
        after, closed = closed, False
        kind = found.lastgroup
        if kind == "open":
            branching.append(False)
        elif kind == "close":
            closed = branching.pop() if len(branching) > 1 else False
            branching[-1] |= closed
        elif kind == "repeat":
            if after:
                return "a group with a choice or a repeat in it is repeated"
            repeats += 1
        elif kind == "optional":
            optional += 1
        if kind in ("choice", "repeat", "optional"):
            branching[-1] = True
    if repeats > MOST_REPEATS:
        return f"it has {repeats} repeats, at most {MOST_REPEATS} are matched"
    if optional > MOST_OPTIONAL:
        return f"it has {optional} optional parts, at most {MOST_OPTIONAL} are matched"
    return ""
