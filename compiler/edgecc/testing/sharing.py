"""Which bytes a module stores, and how often: what passes must not make more of.

Three numbers are compared before and after. How many weights hold equal content (a pass may not
copy bytes), how many of the weights that end up in a bundle hold the rows of one weight (stacking a
weight that is read elsewhere as well would store it twice), and which weights are read at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from edgecc.ir.core import Module
from edgecc.ir.recipes import RECIPES, stored_forms
from edgecc.ir.weights import Derived, Unbound, WeightTable


class Sharing:
    """How often the content of each weight was stored when this was made."""

    def __init__(self, module: Module) -> None:
        self._symbols = set(module.weights)
        self._contents = Counter(_contents(module).values())
        self._copies = _copies(module)

    def problems(self, module: Module) -> Iterator[str]:
        """What the module now stores that it did not before."""
        contents = _contents(module)
        reachable = _reachable(module)
        for symbol in module.weights:
            if symbol not in self._symbols and symbol not in reachable:
                yield f"the pass adds weight @{symbol}, which nobody reads"
        for content, count in Counter(contents.values()).items():
            if count > max(1, self._contents[content]):
                names = ", ".join(f"@{s}" for s, c in contents.items() if c == content)
                yield f"one weight became {count} with equal content: {names}"
        for content, count in _copies(module).items():
            if content in self._copies and count > self._copies[content]:
                names = ", ".join(f"@{s}" for s, c in contents.items() if c == content)
                yield f"{names} is stored {count} times, was {self._copies[content]} times"


def storage(module: Module) -> set[str]:
    """Weights that nodes depend on, aliases followed."""
    return {s for s in _reachable(module) if module.weights.resolve(s) == s}


def _read(module: Module) -> set[str]:
    return {module.weights.resolve(w) for g in module.graphs.values() for w in g.used_weights()}


def _reachable(module: Module) -> set[str]:
    used = (s for g in module.graphs.values() for s in g.used_weights())
    return {d for s in used for d in module.weights.dependencies(s)}


def _content(table: WeightTable, symbol: str) -> str:
    """The same for weights of equal bytes, or made from the same weights in the same way."""
    symbol = table.resolve(symbol)
    source = table[symbol].source
    if isinstance(source, Derived):
        inputs = ", ".join(map(table.resolve, source.inputs))
        return f"{source.recipe}({inputs}; {source.params})"
    if isinstance(source, Unbound):
        return f"unbound {symbol}"
    return table.digest(symbol)


def _contents(module: Module) -> dict[str, str]:
    return {s: _content(module.weights, s) for s in sorted(storage(module))}


def _copies(module: Module) -> Counter[str]:
    """How many of the tensors in a bundle hold each content."""
    table = module.weights
    stored = {form for symbol in _read(module) for form in stored_forms(table, symbol)}
    return Counter(
        content
        for symbol in stored
        for content in {_content(table, d) for d in _made_of(table, symbol)}
    )


def _made_of(table: WeightTable, symbol: str) -> set[str]:
    """A weight and those whose values it has; what only takes part in a scale is not among them."""
    source = table[symbol].source
    if isinstance(source, Derived):
        inputs = source.inputs[: RECIPES[source.recipe].sources]
        return {symbol}.union(*(_made_of(table, table.resolve(i)) for i in inputs))
    return {symbol}
