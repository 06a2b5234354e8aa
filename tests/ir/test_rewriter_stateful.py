"""Random edits of a graph against a program kept as a plain list, which is rebuilt from scratch.

An edit of the graph is allowed exactly when it would be on the list, has the same effect there, and
afterwards the graph prints what a builder makes of the list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edgecc.errors import InternalError
from edgecc.ir import (
    Builder,
    DType,
    Interpreter,
    Location,
    Module,
    Node,
    Rewriter,
    Role,
    Value,
    print_module,
    verify,
)
from edgecc.ir.ops.shape import SliceAttributes, SplitAttributes
from helpers.weights import dense

WIDE, NARROW = 4, 2
"""Values have one of two types."""

INPUTS = {"x": WIDE, "y": NARROW}
WEIGHTS = ("w0", "w1", "w0.alias")

Ref = tuple[str, int]
"""A line by its id, or an input by its name; and which result."""


@dataclass(frozen=True)
class Line:
    """One statement of the naive program."""

    id: str
    op: str
    operands: tuple[Ref, ...]
    weight: str | None
    origin: Location


def widths(line: Line) -> list[int]:
    """Sizes of its results."""
    if line.op == "split":
        return [NARROW, NARROW]
    if line.op == "slice":
        return [NARROW]
    return [WIDE if line.op == "linear" else -1]


def attributes(op: str) -> object | None:
    return {"split": SplitAttributes(0, (2, 2)), "slice": SliceAttributes(0, 1, 3)}.get(op)


def new_module() -> Module:
    module = Module("m")
    for seed, symbol in enumerate(WEIGHTS[:2]):
        values = np.random.default_rng(seed).standard_normal((WIDE, WIDE))
        module.weights.add(symbol, dense(values))
    module.weights.add(WEIGHTS[2], module.weights["w0"])
    module.weights.alias(WEIGHTS[2], "w0")
    return module


class RewriterMachine(RuleBasedStateMachine):
    """The graph and the list, edited together."""

    @initialize()
    def start(self) -> None:
        self.program: list[Line] = []
        self.outputs: list[Ref] = []
        self.count = 0
        self.module = new_module()
        builder = Builder(self.module, "main").at("start")
        inputs = {n: builder.input(n, DType.F32, (w,), Role.ACTIVATION) for n, w in INPUTS.items()}
        node = builder.node("linear", (inputs["x"],), ("w0",), names=("v0",))
        self.inputs = inputs
        self.nodes: dict[str, Node] = {}
        line = Line(self._new_id(), "linear", (("x", 0),), "w0", Location("start"))
        self._add(0, line, node)
        builder.output(node.result, "out", Role.ACTIVATION)
        self.outputs.append((line.id, 0))
        self.rewriter = Rewriter(self.module, builder.graph, "edit")

    # The list

    def _new_id(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def _add(self, index: int, line: Line, node: Node) -> None:
        self.program.insert(index, line)
        self.nodes[line.id] = node

    def _line(self, seed: int) -> Line:
        return self.program[seed % len(self.program)]

    def _refs(self) -> list[Ref]:
        made = [(p.id, i) for p in self.program for i in range(len(widths(p)))]
        return [*((name, 0) for name in INPUTS), *made]

    def _width(self, ref: Ref) -> int:
        if ref[0] in INPUTS:
            return INPUTS[ref[0]]
        line = next(p for p in self.program if p.id == ref[0])
        width = widths(line)[ref[1]]
        return self._width(line.operands[0]) if width < 0 else width

    def _position(self, id: str) -> int:
        return next((i for i, p in enumerate(self.program) if p.id == id), -1)

    def _value(self, ref: Ref) -> Value:
        return self.inputs[ref[0]] if ref[0] in INPUTS else self.nodes[ref[0]].results[ref[1]]

    def _uses(self, id: str) -> bool:
        read = [*self.outputs, *(o for p in self.program for o in p.operands)]
        return any(ref[0] == id for ref in read)

    def _substitute(self, old: Ref, new: Ref) -> None:
        def change(line: Line) -> Line:
            if line.id == new[0]:
                return line
            return replace(line, operands=tuple(new if o == old else o for o in line.operands))

        self.program = [change(line) for line in self.program]
        self.outputs = [new if o == old else o for o in self.outputs]

    def _late_enough(self, old: Ref, new: Ref) -> bool:
        """Whether all readers of `old` stand after the line of `new`."""
        place = self._position(new[0])
        readers = [p for p in self.program if old in p.operands and p.id != new[0]]
        return all(self._position(p.id) > place for p in readers)

    def _evaluate(self) -> list[bytes]:
        rng = np.random.default_rng(0)
        arrays = {n: rng.standard_normal(w).astype(np.float32) for n, w in INPUTS.items()}
        return [a.tobytes() for a in Interpreter(self.module).run("main", arrays).values()]

    # Edits

    SEED = st.integers(0, 1 << 16)

    @rule(
        anchor=SEED,
        a=SEED,
        b=SEED,
        op=st.sampled_from(["silu", "add", "linear", "slice", "split"]),
        weight=st.sampled_from(WEIGHTS),
    )
    def insert(self, anchor: int, a: int, b: int, op: str, weight: str) -> None:
        at = self._line(anchor)
        refs = self._refs()
        wide = [r for r in refs if self._width(r) == WIDE]
        first = refs[a % len(refs)] if op in ("silu", "add") else wide[a % len(wide)]
        same = [r for r in refs if self._width(r) == self._width(first)]
        operands = (first, same[b % len(same)]) if op == "add" else (first,)
        location = Location(at.origin.origin, (*at.origin.passes, "edit"))
        read = weight if op == "linear" else None
        line = Line(self._new_id(), op, operands, read, location)
        index = self._position(at.id)
        arguments = (self.nodes[at.id], op, [self._value(o) for o in operands])
        given = {
            "weights": (weight,) if read else (),
            "attrs": attributes(op),
            "names": [f"{line.id}_{i}" for i in range(len(widths(line)))],
        }
        if all(self._position(o[0]) < index for o in operands):
            values = self._evaluate()
            self._add(index, line, self.rewriter.insert(*arguments, **given))
            assert self._evaluate() == values
        else:
            with pytest.raises(InternalError, match="is not defined before"):
                self.rewriter.insert(*arguments, **given)

    @rule(old=SEED, new=SEED)
    def replace_value(self, old: int, new: int) -> None:
        refs = self._refs()
        before, after = refs[old % len(refs)], refs[new % len(refs)]
        if self._width(before) == self._width(after) and self._late_enough(before, after):
            self.rewriter.replace_value(self._value(before), self._value(after))
            self._substitute(before, after)
        else:
            with pytest.raises(InternalError, match=r"cannot replace|stands before"):
                self.rewriter.replace_value(self._value(before), self._value(after))

    @rule(seed=SEED)
    def erase(self, seed: int) -> None:
        line = self._line(seed)
        node = self.nodes[line.id]
        if self._uses(line.id):
            with pytest.raises(InternalError, match="is still used"):
                self.rewriter.erase(node)
        elif len(self.program) > 1:
            values = self._evaluate()
            self.rewriter.erase(node)
            self.program.remove(line)
            assert self._evaluate() == values
            with pytest.raises(InternalError, match="is not part of graph"):
                self.rewriter.erase(node)

    @rule(seed=SEED)
    def replace(self, seed: int) -> None:
        """Replace a node by a copy of itself right before it: nothing but locations changes."""
        line = self._line(seed)
        old = self.nodes[line.id]
        names = [r.name for r in old.results]
        values = self._evaluate()
        copy = self.rewriter.insert(old, line.op, old.operands, old.weights, old.attrs)
        self.rewriter.replace(old, copy.results)
        location = Location(line.origin.origin, (*line.origin.passes, "edit"))
        self.program[self._position(line.id)] = replace(line, origin=location)
        self.nodes[line.id] = copy
        assert [r.name for r in copy.results] == names
        assert self._evaluate() == values

    @rule(seed=SEED, weight=st.sampled_from(WEIGHTS))
    def replace_weights(self, seed: int, weight: str) -> None:
        line = self._line(seed)
        node = self.nodes[line.id]
        if line.weight is None:
            with pytest.raises(InternalError, match="expects weights"):
                self.rewriter.replace_weights(node, (weight,))
            return
        table = self.module.weights
        same, values = table.resolve(weight) == table.resolve(line.weight), self._evaluate()
        self.rewriter.replace_weights(node, (weight,))
        location = Location(line.origin.origin, (*line.origin.passes, "edit"))
        changed = replace(line, weight=weight, origin=location)
        self.program[self._position(line.id)] = changed
        if same:
            assert self._evaluate() == values

    # What always holds

    @invariant()
    def the_module_verifies(self) -> None:
        assert verify(self.module) == []

    @invariant()
    def the_graph_is_what_a_builder_makes_of_the_list(self) -> None:
        module = new_module()
        builder = Builder(module, "main")
        values: dict[Ref, Value] = {
            (n, 0): builder.input(n, DType.F32, (w,), Role.ACTIVATION) for n, w in INPUTS.items()
        }
        for line in self.program:
            builder.location = line.origin
            node = builder.node(
                line.op,
                [values[o] for o in line.operands],
                (line.weight,) if line.weight else (),
                attributes(line.op),
                [r.name for r in self.nodes[line.id].results],
            )
            values.update({(line.id, i): r for i, r in enumerate(node.results)})
        for ref in self.outputs:
            builder.output(values[ref], "out", Role.ACTIVATION)
        found = print_module(self.module, locations=True)
        assert found == print_module(module, locations=True)

    @invariant()
    def uses_are_those_of_the_operands(self) -> None:
        graph = self.rewriter.graph
        uses = {self._value(ref): set() for ref in self._refs()}
        for node in graph.nodes:
            for index, value in enumerate(node.operands):
                uses[value].add((node, index))
        assert all(set(value.uses) == found for value, found in uses.items())


TestRewriterMachine = RewriterMachine.TestCase
TestRewriterMachine.settings = settings(stateful_step_count=20)
