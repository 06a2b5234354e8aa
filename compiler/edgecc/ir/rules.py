"""Rewrite rules and the driver that applies them until none does.

A rule has a pattern, a check and a rewrite. The driver owns the dangers: it visits nodes in
execution order, goes back to what a rewrite may have made possible, erases matched nodes that
nobody reads any more, and stops with an error when rules feed each other forever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from edgecc.errors import PassError
from edgecc.ir.core import Graph, Module, Node, Value, site
from edgecc.ir.patterns import Match, NoMatch, OpPattern, match
from edgecc.ir.rewriter import Rewriter

Report: TypeAlias = Callable[["Rule", str, str, bool], None]
"""Told the rule, where, what was done or why not, and whether it was done."""


_COMPLETE = 1 << 30
"""Depth of a match that was found and refused: further than any that was not found."""


class Rule(ABC):
    """One rewrite. Rules hold no state between matches.

    Class attributes:
        pattern: What to look for.
        explains: Whether nodes that only begin to match are reported, with the reason. Fusions do;
            clean-ups, which rarely match, do not.
    """

    pattern: ClassVar[OpPattern]
    explains: ClassVar[bool] = False

    def check(self, match: Match) -> str:
        """Why the rule must not be applied to a match; empty when it may."""
        return ""

    @abstractmethod
    def rewrite(self, match: Match, rewriter: Rewriter) -> Sequence[Value] | None:
        """Build what comes instead.

        Returns:
            Values in place of the results of the root, of the same types; None when the rule has
            replaced by itself whatever it wanted to.
        """

    def done(self, match: Match) -> str:
        """What was done, for the report; called after the rewrite."""
        return type(self).__name__


def apply_rules(
    module: Module, graph: Graph, rules: Sequence[Rule], pass_name: str, report: Report
) -> bool:
    """Apply rules to one graph until none matches.

    Args:
        module: Owner of the graph.
        graph: Graph to rewrite.
        rules: In order of preference.
        pass_name: Goes into the locations of new nodes.
        report: Told about every application, and at the end about nodes that no rule matched
            although one that explains begins with them: the reason that came closest.

    Returns:
        Whether anything changed.

    Raises:
        PassError: Rules undo each other's work.
    """
    return _Driver(module, graph, rules, pass_name, report).run()


class _Recorder(Rewriter):
    """A rewriter that knows what it inserted and whose operands it changed."""

    def __init__(self, module: Module, graph: Graph, pass_name: str) -> None:
        super().__init__(module, graph, pass_name)
        self.touched: list[Node] = []
        self.inserted: list[Node] = []

    def insert(self, *args: Any, **kwargs: Any) -> Node:
        """Insert, and remember the node."""
        node = super().insert(*args, **kwargs)
        self.touched.append(node)
        self.inserted.append(node)
        return node

    def replace_value(self, old: Value, new: Value) -> None:
        """Replace, and remember whose operands changed: others who read the new value did not."""
        users = old.users()
        super().replace_value(old, new)
        self.touched += users


class _Driver:
    def __init__(
        self, module: Module, graph: Graph, rules: Sequence[Rule], pass_name: str, report: Report
    ) -> None:
        self.module, self.graph, self.pass_name, self.report = module, graph, pass_name, report
        self.rules: dict[str, list[Rule]] = {}
        for rule in rules:
            for name in rule.pattern.ops:
                self.rules.setdefault(name, []).append(rule)
        self.depth = max((rule.pattern.depth for rule in rules), default=0)
        self.limit = 64 + 16 * len(graph.nodes)
        self.outputs = {o.value for o in graph.outputs}
        self.refused: dict[Node, tuple[Rule, NoMatch]] = {}
        self.rewritten: set[Node] = set()

    def run(self) -> bool:
        waiting = deque(n for n in self.graph.nodes if n.op.name in self.rules)
        queued = set(waiting)
        applied: list[str] = []
        while waiting:
            node = waiting.popleft()
            queued.discard(node)
            touched = self._visit(node, applied) if self._alive(node) else []
            for again in self._around(touched):
                if again not in queued:
                    queued.add(again)
                    waiting.append(again)
            if len(applied) > self.limit:
                self._give_up(applied)
        for node, (rule, why) in self.refused.items():
            if self._alive(node):
                self.report(rule, site(self.graph, node), why.reason, False)
        return bool(applied)

    def _visit(self, node: Node, applied: list[str]) -> list[Node]:
        """Apply the first rule that matches at a node; returns the nodes it touched."""
        self.refused.pop(node, None)
        for rule in self.rules[node.op.name]:
            found = match(rule.pattern, self.module, self.graph, node)
            if isinstance(found, Match):
                reason = rule.check(found)
                if not reason:
                    applied.append(type(rule).__name__)
                    return self._apply(rule, found)
                found = NoMatch(reason, node, _COMPLETE)
            known = self.refused.get(node)
            better = known is None or known[1].depth < found.depth
            if rule.explains and better and node not in self.rewritten:
                self.refused[node] = rule, found
        return []

    def _apply(self, rule: Rule, found: Match) -> list[Node]:
        rewriter = _Recorder(self.module, self.graph, self.pass_name)
        where = site(self.graph, found.root)
        self.rewritten.add(found.root)
        values = rule.rewrite(found, rewriter)
        self.rewritten.update(rewriter.inserted)  # nobody asks why what was made is not remade
        message = rule.done(found)
        if values is not None:
            rewriter.replace(found.root, values)
        self.outputs = {o.value for o in self.graph.outputs}
        for old in found.matched:
            if old in self.graph.nodes and not self._alive(old):
                rewriter.touched += [o.producer for o in old.operands if o.producer is not None]
                rewriter.erase(old)
        self.report(rule, where, message, True)
        # The root comes back too: another rule may match what it is now.
        return [*rewriter.touched, found.root]

    def _around(self, touched: Sequence[Node]) -> list[Node]:
        """The touched nodes and those behind them whose patterns reach back to one."""
        found = dict.fromkeys(n for n in touched if n in self.graph.nodes)
        ring = list(found)
        for _ in range(self.depth - 1):
            ring = [u for n in ring for r in n.results for u in r.users() if u not in found]
            found.update(dict.fromkeys(ring))
        return [n for n in found if n.op.name in self.rules]

    def _alive(self, node: Node) -> bool:
        """Whether the node is in the graph and somebody reads it."""
        return node in self.graph.nodes and any(r.uses or r in self.outputs for r in node.results)

    def _give_up(self, applied: Sequence[str]) -> None:
        last = " and ".join(dict.fromkeys(applied[-8:]))
        raise PassError(
            "pass/no-fixed-point",
            f"{self.pass_name}: still rewriting @{self.graph.name} after {self.limit} steps",
            notes=[f"the last rules were {last}"],
            help="these rules undo each other's work",
        )
