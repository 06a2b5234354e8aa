"""Options that choose modules by name: `include` and `exclude` of `quantize` and its relatives."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from edgecc.errors import UsageError

Names = tuple[str, ...]


def module_names(symbol: str) -> Names:
    """Names of a weight's module: as in the checkpoint, and with the role in front.

    `target.model.layers.0.mlp.up_proj.weight` gives `model.layers.0.mlp.up_proj` and
    `target.model.layers.0.mlp.up_proj`.
    """
    full = symbol.removesuffix(".weight")
    return full.partition(".")[2] or full, full


def patterns(text: str) -> list[str]:
    """The patterns of an option, which separates them by commas."""
    return [p for p in (part.strip() for part in text.split(",")) if p]


def matches(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether one of the names fits one of the patterns."""
    return any(fnmatch.fnmatchcase(name, p) for p in wanted for name in names)


def not_selected(names: Names, include: str, exclude: str) -> str:
    """Why `include` and `exclude` leave a module out; empty when they do not."""
    if not matches(names, patterns(include)):
        return "not included"
    found = next((p for p in patterns(exclude) if matches(names, [p])), "")
    return f"excluded by {found}" if found else ""


def check_patterns(
    pass_name: str,
    option: str,
    text: str,
    what: str,
    known: Sequence[Names],
    examples: Sequence[Names] | None = None,
) -> None:
    """Refuse patterns that name nothing: a typo would choose what was not meant.

    Args:
        pass_name: Whose option it is.
        option: `include` or `exclude`.
        text: Its value.
        what: What the patterns are to name.
        known: Names of all those.
        examples: Names of what the pass is for, if those are others.

    Raises:
        UsageError: A pattern names none; the first example is shown.
    """
    shown = known if examples is None else examples
    for pattern in patterns(text):
        if pattern != "*" and not any(matches(names, [pattern]) for names in known):
            raise UsageError(
                f"{pass_name}/no-match",
                f"{pass_name}: {option} {pattern!r} names no {what}",
                help=f"for example {shown[0][0]}" if shown else "the module has none",
            )
