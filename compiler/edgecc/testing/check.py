"""What every pass must keep, as one call.

`check_pass` is for property tests over random modules, but takes any module that verifies and is
small enough to be evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import numpy as np

from edgecc.ir.core import Graph, Module, Output
from edgecc.ir.encodings import Array
from edgecc.ir.interpreter import evaluate
from edgecc.ir.parser import parse_module
from edgecc.ir.printer import print_module
from edgecc.ir.random_inputs import random_inputs
from edgecc.ir.replay import REPLAY_ROLES, with_replay_inputs
from edgecc.ir.verifier import check_property, verify
from edgecc.passes.base import Pass, PassContext
from edgecc.testing.numbers import chosen_outputs, compare_arrays
from edgecc.testing.sharing import Sharing

Inputs: TypeAlias = Mapping[str, Mapping[str, Array]]
"""Arrays by graph and input name."""

SEEDS = (0, 1)
"""Inputs are drawn twice by default: sizes of symbols differ, and may be zero."""


def check_pass(
    made: Pass[Any],
    module: Module,
    inputs: Inputs | None = None,
    ctx: PassContext | None = None,
    *,
    tolerance: float | None = None,
    may_copy: bool = False,
) -> bool:
    """Run a pass on a module and check everything that holds for all passes.

    - The module verifies before and after, `requires` and `ensures` hold.
    - Graphs the runtime starts stay, with their inputs, outputs, roles and aliases; logs of states,
      with the counts that go with them, may be added.
    - Values are equal: bit for bit, or floats within the tolerance of the pass.
    - The answer whether anything changed is true; a second run changes nothing, unless the pass
      says that it is not `idempotent`.
    - Running on a copy of the module gives the same text: nothing depends on addresses.
    - The result reads back from its text.
    - Every weight the pass adds is read; no bytes are stored, and nothing derived from them, more
      often than before.
    - New nodes say which checkpoint module they come from, if all nodes did before.

    Graphs that read unbound weights are not evaluated.

    Args:
        made: The pass with its options.
        module: A module that verifies; it is changed in place.
        inputs: What to evaluate on, by graph and input; random inputs by default.
        ctx: Context of the pass; remarks are added to it.
        tolerance: Largest difference of floats, relative to the largest element of the tensor;
            default that of the pass. 0 compares bits.
        may_copy: Whether the pass was asked to store bytes twice.

    Returns:
        Whether the pass changed the module.

    Raises:
        AssertionError: One of these does not hold. A note has the module before the pass as IR text
            and the command that runs the pass on it; errors that the pass raises get it as well.
    """
    ctx = ctx or PassContext()
    _require_verified(module, "the module does not verify before the pass")
    _require_properties(module, made.requires, f"{made.name} requires")
    text = print_module(module, locations=True)
    with _reproducible(made, text, ctx):
        bound = made.tolerance if tolerance is None else tolerance
        return _check(made, module, inputs, ctx, bound, may_copy)


def _check(
    made: Pass[Any],
    module: Module,
    inputs: Inputs | None,
    ctx: PassContext,
    tolerance: float,
    may_copy: bool,
) -> bool:
    before = _Snapshot(module, inputs)
    changed = made.run(module, ctx)

    _require_verified(module, "the module does not verify after the pass")
    _require_properties(module, made.ensures, f"{made.name} ensures")
    before.require_same_interface(module)
    before.require_same_values(module, tolerance)
    before.require_origins(module)
    before.require_true_answer(module, changed)
    if not may_copy:
        before.require_same_sharing(module)
    _require_round_trip(module)
    before.require_same_on_copy(made, module, PassContext(ctx.device))
    if made.idempotent:
        _require_idempotent(made, module, PassContext(ctx.device))
    return changed


def assert_equivalent(
    before: Module, after: Module, inputs: Inputs | None = None, *, tolerance: float = 0.0
) -> None:
    """Check that two modules compute the same.

    Args:
        before: The reference.
        after: What to check; its graphs take the same inputs.
        inputs: What to evaluate on, by graph and input; random inputs of `before` by default.
        tolerance: See `check_pass`. With one, outputs that depend on an argmax are not compared:
            the smallest difference may flip a choice.

    Raises:
        AssertionError: They do not; says which output differs, and where first.
    """
    for arrays in _choose_inputs(before, inputs):
        _compare(after, evaluate(before, arrays), arrays, tolerance, chosen_outputs(before))


def interface(graph: Graph) -> list[tuple[object, ...]]:
    """What the runtime sees of a graph: names, roles and types of inputs and outputs, aliases."""
    inputs = [(i.name, i.role, i.value.type) for i in graph.inputs]
    return [*inputs, *((o.name, o.role, o.value.type, o.alias) for o in graph.outputs)]


def module_text(module: Module, *, locations: bool = False) -> str:
    """The printed module without the hashes that are printed once they are known."""
    return print_module(module, locations=locations, hashes=False)


class _Snapshot:
    """A module as it was, to compare with."""

    def __init__(self, module: Module, inputs: Inputs | None) -> None:
        self.text = module_text(module)
        self.full_text = module_text(module, locations=True)
        self.decisions = list(module.decisions)
        self.interfaces = {g.name: interface(g) for g in module.entries()}
        self.readers = dict(module.weights.readers)
        self.sharing = Sharing(module)
        self.had_origins = all(n.location.origin for g in module.graphs.values() for n in g.nodes)
        self.chosen = chosen_outputs(module)
        self.inputs = _choose_inputs(module, inputs)
        self.values = [evaluate(module, arrays) for arrays in self.inputs]

    def copy(self) -> Module:
        """The module again, read from its text."""
        module = parse_module(self.full_text)
        module.weights.readers.update(self.readers)
        return module

    def require_same_interface(self, module: Module) -> None:
        """Entries are the same, and look the same to the runtime."""
        found = {g.name: interface(g) for g in module.entries()}
        if list(found) != list(self.interfaces):
            _fail(f"entries were {list(self.interfaces)}, are {list(found)}")
        for name, expected in self.interfaces.items():
            kept = [p for p in found[name] if p in expected or p[1] not in REPLAY_ROLES]
            if kept != expected:
                _fail(f"the interface of @{name} was {expected}, is {found[name]}")

    def require_same_values(self, module: Module, tolerance: float) -> None:
        """All outputs have the values they had."""
        for arrays, values in zip(self.inputs, self.values, strict=True):
            _compare(module, values, arrays, tolerance, self.chosen)

    def require_true_answer(self, module: Module, changed: bool) -> None:
        """The pass says whether it changed anything."""
        really = module_text(module) != self.text or module.decisions != self.decisions
        if changed is not really:
            _fail(f"run returned {changed}, but the module {'did' if really else 'did not'} change")

    def require_same_sharing(self, module: Module) -> None:
        """No copies, and no weights that nobody reads, are new."""
        for problem in self.sharing.problems(module):
            _fail(problem)

    def require_origins(self, module: Module) -> None:
        """Every node still says where it comes from."""
        for graph in module.graphs.values() if self.had_origins else ():
            for node in graph.nodes:
                if not node.location.origin and node.op.name != "call":
                    _fail(f"{node!r} in @{graph.name} does not say where it comes from")

    def require_same_on_copy(self, made: Pass[Any], module: Module, ctx: PassContext) -> None:
        """The result does not depend on where objects lie in memory."""
        copy = self.copy()
        made.run(copy, ctx)
        if module_text(copy) != module_text(module):
            _fail(
                "the pass is not deterministic: on a copy of the module it gave\n"
                + module_text(copy)
                + "\ninstead of\n"
                + module_text(module)
            )


def _require_verified(module: Module, message: str) -> None:
    findings = verify(module)
    if findings:
        _fail("\n".join([message, *(f.render() for f in findings)]))


def _require_properties(module: Module, names: tuple[str, ...], who: str) -> None:
    for name in names:
        findings = check_property(module, name)
        if findings:
            _fail("\n".join([f"{who} {name}", *(f.render() for f in findings)]))


def _require_round_trip(module: Module) -> None:
    text = print_module(module, locations=True)
    again = print_module(parse_module(text), locations=True)
    if again != text:
        _fail(f"the result does not read back from its text:\n{text}\nreads as\n{again}")


def _require_idempotent(made: Pass[Any], module: Module, ctx: PassContext) -> None:
    text = module_text(module)
    again = made.run(module, ctx)
    if again or module_text(module) != text:
        _fail(f"a second run returned {again} and gave\n{module_text(module)}\ninstead of\n{text}")


def _choose_inputs(module: Module, inputs: Inputs | None) -> list[dict[str, dict[str, Array]]]:
    """Inputs of the entries that can be evaluated."""
    runnable = [g.name for g in module.entries() if not list(module.unbound_weights(g))]
    sets = [random_inputs(module, seed) for seed in SEEDS] if inputs is None else [inputs]
    return [{g: dict(given[g]) for g in runnable if g in given} for given in sets]


def _compare(
    after: Module,
    expected: Mapping[str, Array],
    inputs: dict[str, dict[str, Array]],
    tolerance: float,
    chosen: set[str],
) -> None:
    found = evaluate(
        after, {name: with_replay_inputs(after.graphs[name], a) for name, a in inputs.items()}
    )
    logs = {f"{n}.{o.name}" for n, g in after.graphs.items() for o in _logs(g)} - expected.keys()
    found = {name: values for name, values in found.items() if name not in logs}
    if list(found) != list(expected):
        _fail(f"outputs were {list(expected)}, are {list(found)}")
    for name, values in expected.items():
        if tolerance and name in chosen:
            continue
        difference = compare_arrays(found[name], values, tolerance)
        if difference:
            graph = next(g for g in inputs if name.startswith(f"{g}."))
            shapes = ", ".join(f"%{n} {list(np.shape(a))}" for n, a in inputs[graph].items())
            _fail(f"output {name} differs for inputs {shapes}: {difference}")


def _logs(graph: Graph) -> list[Output]:
    return [o for o in graph.outputs if o.role in REPLAY_ROLES]


@contextmanager
def _reproducible(made: Pass[Any], text: str, ctx: PassContext) -> Iterator[None]:
    """Add what reproduces it to whatever is raised."""
    try:
        yield
    except Exception as error:
        device = f" --device {ctx.device.name}" if ctx.device else ""
        error.add_note(
            f"To reproduce:\nedgecc opt -p '{made}'{device} - <<'EOF'\n{text.rstrip()}\nEOF"
        )
        raise


def _fail(message: str) -> NoReturn:
    raise AssertionError(message)
