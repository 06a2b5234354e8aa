"""Whether two versions of a module compute the same: evaluated on random inputs and compared.

Both versions are evaluated in float64. What differs then comes from the change itself and not from
rounding: float32 sums in another order differ in their last bits, which would hide errors of that
size, or force a wider tolerance. With tolerance 0 all bits must be equal.

Not every output can be compared. One that needs an unbound weight has no value. And where a numeric
change is allowed, two nearly equal logits may swap places: what depends on a chosen token is then
free to differ altogether. Such outputs are found by data dependence and left out, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgecc.errors import EdgeccError, InternalError
from edgecc.ir.analysis import live_nodes
from edgecc.ir.clone import cache_rows, clone_module, with_smaller_caches
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import Array
from edgecc.ir.interpreter import Inputs, evaluate
from edgecc.ir.random_inputs import random_inputs
from edgecc.ir.replay import REPLAY_ROLES, with_replay_inputs
from edgecc.ir.rewriter import Rewriter
from edgecc.ir.sampled_weights import SampledWeights
from edgecc.ir.weights import Parts
from edgecc.roles import Role

CACHE_ROWS = 48
"""Rows of caches during a comparison: room for the few rows of random inputs at either end."""

SHAPES_ONLY = frozenset({"advance", "position_ids", "tail"})
"""Ops that look at the values of their first operand only, and at the shape of the others."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output that differs.

    Attributes:
        graph: Name of the graph.
        output: Name of the output; empty if the graph could not be evaluated any more.
        seed: Of the random inputs.
        message: What differs where, or why it could not be evaluated.
    """

    graph: str
    output: str
    seed: int
    message: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found.

    Attributes:
        difference: The first difference, or None.
        compared: Outputs that were compared, as `graph.output`.
        skipped: Outputs that were not, with the reason.
    """

    difference: Difference | None = None
    compared: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def compare_modules(
    before: Module, after: Module, *, seeds: Sequence[int] = (0,), tolerance: float = 0.0
) -> Comparison:
    """Evaluate the entries of two versions of a module and compare their outputs.

    Args:
        before: The reference.
        after: What it became; outputs that it has dropped are not compared.
        seeds: One set of random inputs each.
        tolerance: 0 for equal bits; else the largest difference allowed, relative to the largest
            absolute value of the output.

    Raises:
        EdgeccError: The reference cannot be evaluated.
    """
    return Comparer(seeds).compare(before, after, tolerance)


@dataclass(slots=True)
class _Known:
    """What the last module gave on which inputs."""

    inputs: dict[int, Inputs]
    values: dict[int, dict[str, Array]]
    digests: Mapping[str, str | None]


class Comparer:
    """Compares a chain of versions, each with the one before; see `compare_modules`.

    What a version gave is kept, so that each is evaluated once.

    Args:
        seeds: One set of random inputs each.
    """

    def __init__(self, seeds: Sequence[int] = (0,)) -> None:
        self.seeds = tuple(seeds)
        self._tiles: dict[str, Parts] = {}
        self._known: _Known | None = None

    def compare(
        self, before: Module, after: Module, tolerance: float = 0.0, *, chained: bool = False
    ) -> Comparison:
        """Compare two versions.

        Args:
            before: The reference.
            after: What it became.
            tolerance: See `compare_modules`.
            chained: Whether `before` computes what `after` of the last call does.

        Raises:
            EdgeccError: The reference cannot be evaluated.
        """
        broken = _interface_difference(before, after)
        if broken is not None:
            return Comparison(broken)
        wanted, skipped = _comparable(before, after, exact=tolerance == 0)
        pairs = [(graph, output) for graph, outputs in wanted.items() for output in outputs]
        names = [f"{graph}.{output}" for graph, output in pairs]
        old, new = (
            replace(m, weights=SampledWeights(m.weights, tiles=self._tiles))
            for m in _evaluable(before, after, wanted)
        )
        known = self._known if chained and self._still_known(before, names) else None
        self._known = None
        inputs, values = {}, {}
        for seed in self.seeds:
            inputs[seed] = known.inputs[seed] if known else random_inputs(old, seed)
            chosen = {graph: a for graph, a in inputs[seed].items() if wanted.get(graph)}
            expected = known.values[seed] if known else _values(old, chosen)
            found = _outcome(new, chosen, seed)
            if isinstance(found, Difference):
                return Comparison(found, (), skipped)
            difference = _first_difference(pairs, expected, found, tolerance, seed)
            if difference is not None:
                return Comparison(difference, (), skipped)
            values[seed] = found
        self._known = _Known(inputs, values, _digests(after))
        return Comparison(None, tuple(names), skipped)

    def _still_known(self, before: Module, names: Sequence[str]) -> bool:
        """Whether all values were computed, and from the same samples as now."""
        known = self._known
        return (
            known is not None
            and known.digests == _digests(before)
            and all(values.keys() >= set(names) for values in known.values.values())
        )


def _digests(module: Module) -> dict[str, str | None]:
    return {s: module.weights.known_digest(s) for s in module.weights}


def _first_difference(
    outputs: Sequence[tuple[str, str]],
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    tolerance: float,
    seed: int,
) -> Difference | None:
    for graph, output in outputs:
        name = f"{graph}.{output}"
        message = _difference(before[name], after[name], tolerance)
        if message:
            return Difference(graph, output, seed, message)
    return None


def _interface_difference(before: Module, after: Module) -> Difference | None:
    """A graph that is gone, takes other inputs, or has outputs it did not have."""
    for graph in before.entries():
        found = after.graphs.get(graph.name)
        if found is None:
            return Difference(graph.name, "", 0, "the graph is gone")
        old, new = (
            {(i.name, i.value.type.shape, i.role) for i in g.inputs} for g in (graph, found)
        )
        if old - new or any(role not in REPLAY_ROLES for *_, role in new - old):
            changed = sorted({name for name, *_ in old ^ new})
            return Difference(graph.name, "", 0, f"other inputs: {', '.join(changed)}")
        kept, made = ({(o.name, o.role, o.alias) for o in g.outputs} for g in (graph, found))
        extra = {name for name, role, _ in made - kept if role is not Role.STATE_LOG}
        if extra:  # fewer are fine
            changed = sorted(extra)
            return Difference(graph.name, "", 0, f"other outputs: {', '.join(changed)}")
    return None


def _comparable(
    before: Module, after: Module, *, exact: bool
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Outputs to compare by graph, and the others with the reason."""
    wanted: dict[str, list[str]] = {}
    skipped = {}
    reasons = _Reasons(before, exact)
    for graph in before.entries():
        kept = {o.name for o in after.graphs[graph.name].outputs}
        found = reasons.outputs(graph, [""] * len(graph.inputs))
        wanted[graph.name] = []
        for output, reason in zip(graph.outputs, found, strict=True):
            if output.name not in kept:
                reason = "the pass has dropped it"
            if reason:
                skipped[f"{graph.name}.{output.name}"] = reason
            else:
                wanted[graph.name].append(output.name)
    return wanted, skipped


class _Reasons:
    """Why a value cannot be compared: empty if it can."""

    def __init__(self, module: Module, exact: bool) -> None:
        self.module = module
        self.exact = exact

    def outputs(self, graph: Graph, inputs: Sequence[str]) -> list[str]:
        """For each output, given the reasons of the inputs."""
        known: dict[Value, str] = {
            i.value: reason for i, reason in zip(graph.inputs, inputs, strict=True)
        }
        for node in graph.nodes:
            known.update(zip(node.results, self._node(node, known), strict=True))
        return [known[o.value] for o in graph.outputs]

    def _node(self, node: Node, known: Mapping[Value, str]) -> list[str]:
        operands = [known[o] for o in node.operands]
        if node.op.name in SHAPES_ONLY:  # a missing weight leaves them without a shape as well
            operands[1:] = [r for r in operands[1:] if r.startswith("@")]
        if node.op.name == "call":
            callee = self.module.graphs[str(getattr(node.attrs, "callee", ""))]
            # Evaluated as a whole: one missing weight leaves it without any result.
            missing = next(map(_was_unbound, self.module.unbound_weights(callee)), "")
            return [missing or r for r in self.outputs(callee, operands)]
        unbound = (name for w in node.weights for name in self.module.weights.unbound(w))
        reason = next((r for r in (*map(_was_unbound, unbound), *operands) if r), "")
        if not reason and not self.exact and _chooses(node):
            reason = f"it depends on the choice of {node.op.name}"
        return [reason] * len(node.results)


def _was_unbound(symbol: str) -> str:
    return f"@{symbol} was unbound before the pass"


def _chooses(node: Node) -> bool:
    """Whether a node makes integers out of floats: the smallest change of them may matter."""
    return (
        node.op.name not in SHAPES_ONLY
        and any(o.type.dtype.is_float for o in node.operands)
        and any(not r.type.dtype.is_float for r in node.results)
    )


def _evaluable(
    before: Module, after: Module, wanted: Mapping[str, list[str]]
) -> tuple[Module, Module]:
    """Copies that compute the wanted outputs only, over small caches."""
    pruned = [_pruned(m, wanted) for m in (before, after)]
    spare = min(cache_rows(before), default=0) - CACHE_ROWS
    if spare > 0:
        try:
            pruned = [with_smaller_caches(m, spare) for m in pruned]
            random_inputs(pruned[0], 0)
        except (EdgeccError, ValueError):  # some node has the capacity in an attribute
            pruned = [_pruned(m, wanted) for m in (before, after)]
    old, new = pruned
    return old, new


def _pruned(module: Module, wanted: Mapping[str, list[str]]) -> Module:
    made = clone_module(module)
    for name, outputs in wanted.items():
        graph = made.graphs[name]
        graph.outputs = [o for o in graph.outputs if o.name in outputs]
        live = live_nodes(graph)
        rewriter = Rewriter(made, graph, "compare")
        for node in reversed(list(graph.nodes)):
            if node not in live:
                rewriter.erase(node)
    return made


def _values(module: Module, inputs: Inputs) -> dict[str, Array]:
    with np.errstate(all="ignore"):  # infinities and NaNs are compared like other values
        return evaluate(module, inputs, np.float64)


def _outcome(module: Module, inputs: Inputs, seed: int) -> dict[str, Array] | Difference:
    """Values, or why there are none: what could be evaluated before must stay so."""
    found: dict[str, Array] = {}
    for graph, arrays in inputs.items():
        try:
            complete = with_replay_inputs(module.graphs[graph], arrays)
            found.update(_values(module, {graph: complete}))
        except EdgeccError as error:
            if isinstance(error, InternalError):
                raise
            message = f"cannot be evaluated any more: {error.diagnostics[0].message}"
            return Difference(graph, "", seed, message)
    return found


def _difference(before: Array, after: Array, tolerance: float) -> str:
    """Where and how two arrays differ by more than is allowed; empty if they do not."""
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return (
            f"{before.dtype} {list(before.shape)} before, {after.dtype} {list(after.shape)} after"
        )
    if tolerance == 0 or before.dtype.kind != "f":
        differs = _bits(before) != _bits(after)
        allowed = "no difference is allowed"
    else:
        bound = tolerance * float(np.max(np.abs(before), initial=0, where=np.isfinite(before)))
        same = (before == after) | (np.isnan(before) & np.isnan(after))
        with np.errstate(invalid="ignore"):
            differs = ~(same | (np.abs(before - after) <= bound))
        allowed = f"at most {bound:.3g} is allowed (tolerance {tolerance:g})"
    if not differs.any():
        return ""
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.max(
            np.abs(before.astype(float) - after.astype(float)), where=differs, initial=0
        )
    return (
        f"first at {list(index)}: {before[index]} before, {after[index]} after; {differs.sum()} of "
        f"{differs.size} elements differ, by {largest:.3g} at most; {allowed}"
    )


def _bits(array: Array) -> Array:
    return array.view(np.uint64) if array.dtype == np.float64 else array
