"""Which modules a quantization config names, whatever dialect it is written in.

Producers write exact names, parents of modules, shell globs (`*` crosses dots), or `re:` followed
by a regular expression matched from the start. Lists of modules that are not converted also hold
parts of names, such as `visual` or `mlp.gate`, and expressions without a mark. Names may carry the
wrappers of another class (`model.language_model.layers...`), so both sides are compared with and
without them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from edgecc.errors import InputError
from edgecc.frontends.quantization.regex_cost import costly

_WRAPPERS = ("model.", "language_model.")
_GLOB = re.compile(r"[*?\[]")


class ModulePatterns:
    """A list of patterns, compiled.

    Attributes:
        patterns: As written.
    """

    def __init__(self, patterns: Iterable[str], where: str, *, anywhere: bool = False) -> None:
        """Compile the patterns.

        Args:
            patterns: In any of the dialects.
            where: File and key, for messages.
            anywhere: Whether a name without a mark may also be the middle of a module's name, and
                an expression: `modules_to_not_convert` of AutoAWQ and transformers.

        Raises:
            InputError: A `re:` pattern is not a regular expression, or an expression may take too
                long to match.
        """
        self.patterns = tuple(dict.fromkeys(patterns))
        self._exact: dict[str, str] = {}
        self._compiled: dict[str, re.Pattern[str]] = {}
        for pattern in self.patterns:
            if pattern.startswith("re:"):
                self._compiled[pattern] = _regex(pattern[3:], where)
            elif anywhere:
                self._compiled[pattern] = _part(pattern, where)
            elif _GLOB.search(pattern):
                self._compiled[pattern] = re.compile(fnmatch.translate(without_wrappers(pattern)))
            else:
                self._exact.setdefault(without_wrappers(pattern), pattern)

    def match(self, module: str) -> str | None:
        """The first pattern that names a module or one of its parents, as written, or None."""
        bare = without_wrappers(module)
        for parent in _parents(bare):
            if parent in self._exact:
                return self._exact[parent]
        for pattern, compiled in self._compiled.items():
            if compiled.match(module) or compiled.match(bare):
                return pattern
        return None

    def unused(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Patterns that name none of the modules."""
        names = [(module, without_wrappers(module)) for module in modules]
        parents = {parent for _, bare in names for parent in _parents(bare)}

        def names_any(pattern: str) -> bool:
            compiled = self._compiled.get(pattern)
            if compiled is None:
                return without_wrappers(pattern) in parents
            return any(compiled.match(full) or compiled.match(bare) for full, bare in names)

        return tuple(pattern for pattern in self.patterns if not names_any(pattern))


def without_wrappers(name: str) -> str:
    """A module name or pattern without leading `model.` and `language_model.`."""
    while True:
        for wrapper in _WRAPPERS:
            if name.startswith(wrapper):
                name = name[len(wrapper) :]
                break
        else:
            return name


def _parents(module: str) -> list[str]:
    """The module and everything above it: `a.b.c`, `a.b`, `a`."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _part(pattern: str, where: str) -> re.Pattern[str]:
    """Whole parts of a module's name, anywhere in it; or an expression from its start."""
    text = without_wrappers(pattern.strip("."))
    anywhere = rf"(?:.*\.)?{re.escape(text)}(?:\.|$)"
    try:
        compiled = re.compile(rf"{anywhere}|(?:{text})(?:\.|$)")
    except (re.error, RecursionError, OverflowError):  # a glob, or a name
        glob = fnmatch.translate(text) if _GLOB.search(text) else anywhere
        return re.compile(rf"{anywhere}|{glob}")
    _check_cost(text, where)
    return compiled


def _regex(text: str, where: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(
            "quant/bad-pattern", f"not a regular expression: {text!r} ({error})", where=where
        ) from error
    _check_cost(text, where)
    return compiled


def _check_cost(text: str, where: str) -> None:
    if reason := costly(text):
        raise InputError(
            "quant/bad-pattern",
            f"the regular expression {text!r} may take too long to match: {reason}",
            where=where,
            help="name the modules with a simpler expression, or one by one",
        )
