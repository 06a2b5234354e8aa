"""Passes that are a set of rewrite rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from edgecc.ir.core import Module
from edgecc.ir.rules import Rule, apply_rules
from edgecc.passes.base import O_co, Pass, PassContext


class RewritePass(Pass[O_co]):
    """Applies rules to every graph until none matches; remarks tell where and why not."""

    @abstractmethod
    def rules(self, module: Module, ctx: PassContext) -> Sequence[Rule]:
        """The rules, in order of preference, with whatever they need to know about the module."""

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Rewrite all graphs; return whether anything changed."""

        def report(rule: Rule, where: str, message: str, applied: bool) -> None:
            self.remark(ctx, where, message, applied=applied)

        rules = self.rules(module, ctx)
        changed = False
        for graph in module.graphs.values():
            changed |= apply_rules(module, graph, rules, self.name, report)
        return changed
