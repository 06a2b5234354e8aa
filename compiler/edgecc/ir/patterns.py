"""Patterns over graphs: what a rewrite looks for, written like the graph it should find.

```python
op("swiglu", op("linear", var("x"), label="gate"), op("linear", var("x"), label="up"))
```
matches a `swiglu` of two linear layers that read one value. A pattern is rooted at its last node
and follows operands backwards. Where it does not match, the answer is a `NoMatch` that says what
was found and expected at the place where the match got furthest: the raw material of "why was this
not fused?".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops import Trait

Condition: TypeAlias = Callable[[Node], str]
"""Looks at a node; answers why it does not qualify, or nothing."""


@dataclass(frozen=True, slots=True)
class NoMatch:
    """Why a pattern does not match at a node.

    Attributes:
        reason: What was found and what was expected.
        node: The node where the match ended.
        depth: How many nodes had matched before: of several attempts the furthest one counts.
    """

    reason: str
    node: Node
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What a pattern found.

    Attributes:
        module: Owner of the graph.
        graph: Where.
        root: The node the pattern is rooted at.
        nodes: Labelled nodes of the pattern; a `through` chain has the node at its far end.
        values: Values bound by `var`.
        matched: All nodes that took part, from the root backwards, each once.
    """

    module: Module
    graph: Graph
    root: Node
    nodes: Mapping[str, Node]
    values: Mapping[str, Value]
    matched: tuple[Node, ...]

    def __getitem__(self, label: str) -> Node:
        return self.nodes[label]

    def value(self, label: str) -> Value:
        """The value bound by `var(label)`."""
        return self.values[label]


@dataclass(slots=True)
class _Bindings:
    nodes: dict[str, Node] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    matched: tuple[Node, ...] = ()

    def with_value(self, label: str, value: Value) -> _Bindings:
        return _Bindings(self.nodes, {**self.values, label: value}, self.matched)

    def with_node(self, label: str, node: Node) -> _Bindings:
        nodes = {**self.nodes, label: node} if label else self.nodes
        matched = self.matched if node in self.matched else (*self.matched, node)
        return _Bindings(nodes, self.values, matched)


class _Attempt:
    """One attempt to match: remembers the failure that got furthest."""

    def __init__(self, root: Node) -> None:
        self.failure = NoMatch("", root, -1)

    def fail(self, reason: str, node: Node, bound: _Bindings) -> None:
        if len(bound.matched) > self.failure.depth:
            self.failure = NoMatch(reason, node, len(bound.matched))


class Pattern(ABC):
    """Something a value can match."""

    @abstractmethod
    def bind(
        self, value: Value, what: str, user: Node, bound: _Bindings, attempt: _Attempt
    ) -> Iterator[_Bindings]:
        """All ways to match a value.

        Args:
            value: The value.
            what: How messages call it, for example "gate of swiglu".
            user: The node that reads it.
            bound: What is bound so far.
            attempt: Where failures are noted.
        """

    @property
    @abstractmethod
    def depth(self) -> int:
        """Most nodes on a path of the pattern; a `through` chain counts as two."""


@dataclass(frozen=True)
class Var(Pattern):
    """Any value; the same label twice means the same value. See `var`."""

    label: str

    @property
    def depth(self) -> int:
        """A variable holds no node."""
        return 0

    def bind(
        self, value: Value, what: str, user: Node, bound: _Bindings, attempt: _Attempt
    ) -> Iterator[_Bindings]:
        """Once, unless the label stands for another value."""
        known = bound.values.get(self.label)
        if known is None:
            yield bound.with_value(self.label, value)
        elif known is value:
            yield bound
        else:
            attempt.fail(f"{what} is %{value.name}, expected %{known.name} as before", user, bound)


@dataclass(frozen=True)
class OpPattern(Pattern):
    """A node of one of some ops; see `op`."""

    ops: tuple[str, ...]
    operands: tuple[Pattern, ...] | None
    label: str = ""
    result: int | None = None
    only_user: bool = False
    where: Condition | None = None

    @property
    def depth(self) -> int:
        """This node and the deepest operand."""
        return 1 + max((o.depth for o in self.operands or ()), default=0)

    def bind(
        self, value: Value, what: str, user: Node, bound: _Bindings, attempt: _Attempt
    ) -> Iterator[_Bindings]:
        """Match the producer of the value."""
        node, wanted = value.producer, " or ".join(self.ops)
        if node is None:
            attempt.fail(f"{what} is a graph input, expected {wanted}", user, bound)
        elif node.op.name not in self.ops:
            attempt.fail(f"{what} is made by {node.op.name}, expected {wanted}", user, bound)
        elif self.result is not None and value.index != self.result:
            attempt.fail(
                f"{what} is result {value.index} of {node.op.name}, expected {self.result}",
                user,
                bound,
            )
        elif self.only_user and len(value.users()) > 1:
            others = [u for u in value.users() if u is not user]
            attempt.fail(f"{what} is also read by {others[0]!r}", user, bound)
        else:
            yield from self.bind_node(node, bound, attempt)

    def bind_node(self, node: Node, bound: _Bindings, attempt: _Attempt) -> Iterator[_Bindings]:
        """Match a node of one of the ops: its condition, then its operands in every order."""
        known = bound.nodes.get(self.label) if self.label else None
        if known is not None and known is not node:
            attempt.fail(f"{node!r} is not {known!r}, as before", node, bound)
            return
        reason = self.where(node) if self.where else ""
        if reason:
            attempt.fail(reason, node, bound)
            return
        bound = bound.with_node(self.label, node)
        if self.operands is None:
            yield bound
            return
        if len(self.operands) != len(node.operands):
            attempt.fail(
                f"{node.op.name} has {len(node.operands)} operands, expected {len(self.operands)}",
                node,
                bound,
            )
            return
        for order in _orders(node):
            yield from self._bind_operands(node, order, 0, bound, attempt)

    def _bind_operands(
        self, node: Node, order: Sequence[int], index: int, bound: _Bindings, attempt: _Attempt
    ) -> Iterator[_Bindings]:
        assert self.operands is not None
        if index == len(order):
            yield bound
            return
        value = node.operands[order[index]]
        what = f"{_operand_name(node, order[index])} of {node.op.name}"
        for found in self.operands[index].bind(value, what, node, bound, attempt):
            yield from self._bind_operands(node, order, index + 1, found, attempt)


@dataclass(frozen=True)
class Through(Pattern):
    """Any number of nodes of some ops, then the inner pattern; see `through`."""

    ops: tuple[tuple[str, int], ...]
    inner: Pattern

    @property
    def depth(self) -> int:
        """At least one node in between; longer chains are found again when their end changes."""
        return 2 + self.inner.depth

    def bind(
        self, value: Value, what: str, user: Node, bound: _Bindings, attempt: _Attempt
    ) -> Iterator[_Bindings]:
        """Follow the chain as far as it goes."""
        follow = dict(self.ops)
        node = value.producer
        while node is not None and node.op.name in follow:
            index = follow[node.op.name]
            if index >= len(node.operands):  # a constant has nothing before it
                break
            bound = bound.with_node("", node)
            what, user = f"{_operand_name(node, index)} of {node.op.name}", node
            value = node.operands[index]
            node = value.producer
        yield from self.inner.bind(value, what, user, bound, attempt)


def var(label: str) -> Var:
    """Any value, called `label`; used twice it must be the same value."""
    return Var(label)


def op(
    ops: str | Sequence[str],
    *operands: Pattern,
    label: str = "",
    result: int | None = None,
    only_user: bool = False,
    where: Condition | None = None,
) -> OpPattern:
    """A node of one of the ops whose operands match; any operands when none are given.

    Args:
        ops: Name of the op, or several.
        operands: Patterns of the operands. Those of a commutative op match in either order.
        label: How the match calls the node. Used twice it must be the same node.
        result: Which result of the node the value must be.
        only_user: Whether the value may have no reader but the one the pattern comes from.
        where: A further condition on the node.
    """
    names = (ops,) if isinstance(ops, str) else tuple(ops)
    return OpPattern(names, operands or None, label, result, only_user, where)


def through(ops: Mapping[str, int] | Sequence[str], inner: Pattern) -> Through:
    """Skip backwards over nodes of some ops, none at all included, then match `inner`.

    Args:
        ops: Ops to skip, each with the operand to follow; the first one where only names are given.
        inner: What must come before them.
    """
    follow = ops if isinstance(ops, Mapping) else dict.fromkeys(ops, 0)
    return Through(tuple(follow.items()), inner)


def match(pattern: OpPattern, module: Module, graph: Graph, root: Node) -> Match | NoMatch:
    """Match a pattern at a node.

    Returns:
        The first match, trying the operands of commutative ops in their own order first; or why
        there is none, where the match got furthest.
    """
    if root.op.name not in pattern.ops:
        return NoMatch(f"{root.op.name}, expected {' or '.join(pattern.ops)}", root)
    attempt = _Attempt(root)
    for found in pattern.bind_node(root, _Bindings(), attempt):
        return Match(module, graph, root, found.nodes, found.values, found.matched)
    return attempt.failure


def _orders(node: Node) -> Iterator[Sequence[int]]:
    """Orders of the operands that mean the same."""
    own = range(len(node.operands))
    yield own
    if Trait.COMMUTATIVE in node.op.traits and len(own) == 2 and len(set(node.operands)) == 2:
        yield (1, 0)


def _operand_name(node: Node, index: int) -> str:
    names = node.op.operands
    return names[min(index, len(names) - 1)]
