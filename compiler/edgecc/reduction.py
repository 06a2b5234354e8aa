"""Delta debugging of modules: the smallest one that still fails.

Any predicate will do. The module is cut down greedily: whole graphs, then outputs, then nodes by
halves (their results become inputs), then single nodes by one of their operands, inputs, weights,
metadata, and in the end sizes; again and again until nothing more can go. Every candidate verifies,
no candidate is tried twice, and the order is fixed, so that the result is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgecc import reduction_edits as edits
from edgecc.errors import EdgeccError
from edgecc.ir.compare import fingerprint
from edgecc.ir.core import Module
from edgecc.ir.verifier import verify

Fails = Callable[[Module], bool]
"""Whether a module still shows the failure. Must not change it."""

OnProgress = Callable[[int, int, int], None]
"""Told the number of nodes, of weights, and of candidates tried, after every step that worked."""

BUDGET = 2000
"""Most candidates that are tried."""

_INLINE_BYTES = 256 << 10
"""Larger weights are not written into the module: they are left where they are."""


def reduce(
    module: Module,
    fails: Fails,
    *,
    budget: int = BUDGET,
    progress: OnProgress | None = None,
) -> Module:
    """The smallest module found that still fails.

    Args:
        module: A module that verifies and fails; it is not changed.
        fails: The predicate.
        budget: Most calls of it.
        progress: Told about every step.
    """
    return _Reducer(module, fails, budget, progress).run()


class _Reducer:
    def __init__(
        self, module: Module, fails: Fails, budget: int, progress: OnProgress | None
    ) -> None:
        self.module = module
        self.fails = fails
        self.budget = budget
        self.progress = progress
        self.tried: set[str] = {fingerprint(module)}

    def run(self) -> Module:
        changed = True
        while changed:
            before = self.module
            self.graphs()
            self.each_graph(edits.without_outputs, lambda m, g: len(m.graphs[g].outputs))
            self.each_graph(edits.without_nodes, lambda m, g: len(m.graphs[g].nodes))
            self.unused_weights()
            self.earlier_outputs()
            self.bypasses()
            self.each_graph(edits.without_inputs, lambda m, g: len(m.graphs[g].inputs))
            self.unused_weights()
            self.facts()
            self.sizes()
            self.inline_weights()
            changed = self.module is not before
        return self.module

    def attempt(self, make: Callable[[], Module | None]) -> bool:
        """Make a candidate; keep it if it is valid, new, and fails."""
        if len(self.tried) > self.budget:
            return False
        try:
            candidate = make()
        except (EdgeccError, ValueError):  # the edit is not possible here
            return False
        if candidate is None or verify(candidate):
            return False
        known = fingerprint(candidate)
        if known in self.tried:
            return False
        self.tried.add(known)
        if not self.fails(candidate):
            return False
        self.module = candidate
        if self.progress is not None:
            nodes = sum(len(g.nodes) for g in candidate.graphs.values())
            self.progress(nodes, len(candidate.weights), len(self.tried))
        return True

    def first(self, candidates: Iterable[Callable[[], Module | None]]) -> bool:
        return any(self.attempt(make) for make in candidates)

    def graphs(self) -> None:
        for name in list(self.module.graphs):
            if len(self.module.graphs) > 1 and name in self.module.graphs:
                self.attempt(lambda name=name: edits.without_graph(self.module, name))  # type: ignore[misc]

    def each_graph(
        self,
        edit: Callable[[Module, str, int, int], Module | None],
        count: Callable[[Module, str], int],
    ) -> None:
        """Remove ranges of something from every graph: all of it, halves, quarters, ... single."""
        for graph in list(self.module.graphs):
            size = count(self.module, graph)
            while size > 0:
                stop = count(self.module, graph)
                while stop > 0:  # from the end: users go before what they use
                    start = max(stop - size, 0)
                    self.attempt(lambda g=graph, a=start, b=stop: edit(self.module, g, a, b))  # type: ignore[misc]
                    stop = start
                size //= 2

    def earlier_outputs(self) -> None:
        for graph in list(self.module.graphs):
            for index in reversed(range(len(self.module.graphs[graph].outputs))):
                while self.first(
                    lambda g=graph, i=index, o=o: edits.earlier(self.module, g, i, o)  # type: ignore[misc]
                    for o in range(_operands(self.module, graph, index))
                ):
                    pass

    def bypasses(self) -> None:
        for graph in list(self.module.graphs):
            for index in reversed(range(len(self.module.graphs[graph].nodes))):
                self.attempt(lambda g=graph, i=index: edits.bypassed(self.module, g, i))  # type: ignore[misc]

    def unused_weights(self) -> None:
        unused = edits.unused_weights(self.module)
        if unused and not self.attempt(lambda: edits.without_weights(self.module, unused)):
            for symbol in reversed(unused):
                self.attempt(lambda s=symbol: edits.without_weights(self.module, [s]))  # type: ignore[misc]

    def inline_weights(self) -> None:
        for symbol in list(self.module.weights):
            if self.module.weights[symbol].nbytes <= _INLINE_BYTES:
                self.attempt(lambda s=symbol: edits.inlined(self.module, [s]))  # type: ignore[misc]

    def facts(self) -> None:
        while self.first(lambda m=m: m for m in edits.without_facts(self.module)):  # type: ignore[misc]
            pass

    def sizes(self) -> None:
        """Halve all sizes together, then each alone, as often as it goes; then try the smallest."""
        while self.attempt(lambda: self._halved(edits.dimensions(self.module))):
            pass
        for size in edits.dimensions(self.module):
            smaller = size
            while smaller > 1 and self.attempt(lambda s=smaller: self._halved([s])):  # type: ignore[misc]
                smaller //= 2
        for size in edits.dimensions(self.module):
            if size > 1:
                self.attempt(lambda s=size: edits.resized(self.module, {s: 1}))  # type: ignore[misc]

    def _halved(self, sizes: list[int]) -> Module | None:
        """Even sizes halved, odd ones rounded up (`vocabulary - 1` stays below it)."""
        mapping = {s: (s + 1) // 2 for s in sizes if s > 1}
        return edits.resized(self.module, mapping) if mapping else None


def _operands(module: Module, graph: str, output: int) -> int:
    producer = module.graphs[graph].outputs[output].value.producer
    return len(producer.operands) if producer is not None else 0
