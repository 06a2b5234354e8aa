"""Runs golden cases: what really becomes of a module, and the laws every case must keep.

Nothing here knows pytest or Hypothesis. Stored weights get bytes made up from the names of their
tensors: the same name holds the same bytes in every checkpoint, so a case shows equal or different
tensors by how it names them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.devices import get_device
from edgecc.errors import EdgeccError, InternalError
from edgecc.ir import Interpreter, Module, Role, print_module, verify_or_raise
from edgecc.ir.encodings import Component
from edgecc.ir.parser import parse_module
from edgecc.ir.printer import FORMAT_VERSION
from edgecc.ir.replay import REPLAY_ROLES, with_replay_inputs
from edgecc.ir.types import substitute
from edgecc.ir.weights import Stored
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.manager import PassManager
from edgecc.passes.pipeline import parse_pipeline
from edgecc.testing.golden import Case, Kind, Outcome

Array: TypeAlias = NDArray[Any]

_HEADER = f'edgecc.module v{FORMAT_VERSION} "golden"'
_BLANK_LINES = re.compile(r"\n{3,}")


class GoldenError(AssertionError):
    """A case that does not hold; the message is for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a case: the outcome, and the module before and after."""

    case: Case
    outcome: Outcome
    before: Module
    after: Module
    passes: list[Pass[Any]]
    changed: list[bool]


def parse_case(case: Case, *, file: str = "<text>") -> Module:
    """The module of a case; stored weights can be read.

    Raises:
        InputError: It is not IR; lines are those of the file.
        VerifyError: It is not a valid module.
    """
    module = parse_module(_HEADER + "\n" * (case.line - 1) + case.before, file=file)
    verify_or_raise(module, f"case {case.title!r}")
    _attach(module)
    return module


def run_case(case: Case, *, file: str = "<text>") -> Ran:
    """Run the pipeline of a case.

    Raises:
        EdgeccError: The case is wrong (text, pipeline, device), or a pass is (PassError).
    """
    before, after = parse_case(case, file=file), parse_case(case, file=file)
    ctx = PassContext(get_device(case.device) if case.device else None)
    manager = PassManager(parse_pipeline(case.pipeline))
    try:
        manager.run(after, ctx)
    except InternalError:
        raise
    except EdgeccError as error:
        outcome = Outcome(Kind.ERROR, tuple(str(error).splitlines()))
    else:
        notes, text = tuple(map(str, ctx.remarks)), _body(case, after)
        same = text == _body(case, before)
        outcome = Outcome(Kind.UNCHANGED, notes) if same else Outcome(Kind.AFTER, notes, text)
    changed = [timing.changed for timing in manager.timings]
    return Ran(case, outcome, before, after, manager.passes, changed)


def module_body(module: Module, *, locations: bool = False) -> str:
    """The printed module without its first line, and without hashes, which are caches."""
    text = print_module(module, locations=locations, hashes=False).partition("\n")[2]
    return _BLANK_LINES.sub("\n\n", text).strip("\n")


def _body(case: Case, module: Module) -> str:
    """With the locations of nodes, if the case has any."""
    return module_body(module, locations=" loc(" in case.before)


def check_laws(ran: Ran) -> None:
    """Check what holds for every case, whatever is expected of it.

    The passes say truly whether they changed anything, running them again changes nothing (unless
    one says that it is not idempotent), the text parses to the same module, and outputs keep their
    values: bit for bit, or within the tolerance the passes declare. Values of graphs that read an
    unbound weight before are not compared.

    Raises:
        GoldenError: One does not hold.
    """
    if ran.outcome.kind is Kind.ERROR:
        return
    _require(
        any(ran.changed) is (ran.outcome.kind is Kind.AFTER),
        f"the passes report changed={ran.changed}, but the module is {ran.outcome.kind.value}",
    )
    text = _body(ran.case, ran.after)
    again = parse_module(f"{_HEADER}\n{text}")
    _require(_body(ran.case, again) == text, "the text does not parse to the same module")
    _check_values(ran)
    if all(p.idempotent for p in ran.passes):
        _check_second_run(ran, text)


def _check_second_run(ran: Ran, text: str) -> None:
    ctx = PassContext(get_device(ran.case.device) if ran.case.device else None)
    manager = PassManager(ran.passes)
    manager.run(ran.after, ctx)
    second = _body(ran.case, ran.after)
    _require(second == text, f"a second run changes the module again:\n{second}")
    _require(
        len(ran.passes) > 1 or not manager.timings[0].changed,
        "a second run reports a change and makes none",
    )


def _check_values(ran: Ran) -> None:
    tolerance = max(p.tolerance for p in ran.passes)
    graphs = [g for g in ran.before.entries() if not list(ran.before.unbound_weights(g))]
    compared = not graphs
    for graph in graphs:
        inputs = made_up_inputs(ran.before, graph.name)
        old = Interpreter(ran.before).run(graph.name, inputs)
        now = ran.after.graphs[graph.name]
        new = Interpreter(ran.after).run(graph.name, with_replay_inputs(now, inputs))
        added = {o.name for o in now.outputs if o.role in REPLAY_ROLES} - old.keys()
        for name in new.keys() - added:
            what = f"@{graph.name}, output {name}"
            _require(name in old, f"{what} was not there before")
            _require(_close(new[name], old[name], tolerance), f"{what}: the values differ")
            compared = True
    _require(compared, "no output is left to compare")


def _close(a: Array, b: Array, tolerance: float) -> bool:
    if tolerance == 0 or a.shape != b.shape or not np.issubdtype(a.dtype, np.floating):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    reach = np.abs(b).max(initial=0)
    return bool(np.abs(a - b).max(initial=0) <= tolerance * reach)


def made_up_inputs(module: Module, graph: str) -> dict[str, Array]:
    """Inputs of a graph: two of everything a symbol counts if it may, normal deviates, 0 and 1.

    Small numbers are valid token ids, rows and lengths alike, as long as the tables and caches of
    a case have a few rows.
    """
    sizes = {name: min(max(2, r.low), r.high) for name, r in module.symbols.items()}
    made: dict[str, Array] = {}
    for item in module.graphs[graph].inputs:
        rng = _rng(item.name)
        shape = [int(str(d)) for d in substitute(item.value.type.shape, sizes)]
        if item.value.type.dtype.is_float:
            made[item.name] = rng.standard_normal(shape).astype(np.float32)
        elif item.role is Role.CACHE_LENGTH:
            made[item.name] = np.ones(shape, np.int64)
        else:
            made[item.name] = rng.integers(0, 2, shape)
    return made


@dataclass(frozen=True, slots=True)
class _MadeUpTensors:
    """A reader of a checkpoint that does not exist: bytes follow from the name of the tensor."""

    components: Mapping[str, Component] = field(default_factory=dict)

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Rows of a tensor."""
        component, rng = self.components[key], _rng(key)
        dtype = np.dtype(component.dtype.numpy)
        if not component.dtype.is_float:
            raw = rng.integers(0, 256, (*component.shape, dtype.itemsize), np.uint8)
            array = raw.view(dtype)[..., 0]
        elif dtype.itemsize == 1 or not component.shape:  # scales: positive, around one
            array = rng.uniform(0.25, 2, component.shape)
        else:
            array = rng.standard_normal(component.shape) / 2
        array = np.asarray(array).astype(dtype)
        return array if start is None else array[start:stop]


def _attach(module: Module) -> None:
    tensors: dict[str, dict[str, Component]] = {}
    for weight in module.weights.values():
        if isinstance(weight.source, Stored):
            components = weight.encoding.components(weight.shape)
            found = tensors.setdefault(weight.source.checkpoint, {})
            found.update({p.key: components[p.component] for p in weight.source.parts})
    for name, found in tensors.items():
        module.weights.readers[name] = _MadeUpTensors(found)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise GoldenError(message)
