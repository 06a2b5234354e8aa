"""Passes with planted bugs, and one that is numerically off by a known amount."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgecc import passes
from edgecc.ir import DType, Module, Rewriter
from edgecc.ir.core import Graph, Node
from edgecc.passes.base import NoOptions, Pass, PassContext
from helpers.weights import dense


class _Planted(Pass[NoOptions]):
    """Visits every node; `visit` says whether it changed something."""

    def run(self, module: Module, ctx: PassContext) -> bool:
        changed = [
            self.visit(module, graph, node)
            for graph in module.graphs.values()
            for node in graph.nodes
        ]
        return any(changed)

    def visit(self, module: Module, graph: Graph, node: Node) -> bool:
        raise NotImplementedError


class SwapGate(_Planted):
    """Swaps gate and up of every activation."""

    name = "swap-gate"

    def visit(self, module: Module, graph: Graph, node: Node) -> bool:
        if node.op.name != "swiglu" or self.name in node.location.passes:
            return False
        rewriter = Rewriter(module, graph, self.name)
        made = rewriter.insert(node, "swiglu", node.operands[::-1])
        rewriter.replace(node, made.results)
        return True


class ForgetCausal(_Planted):
    """Lets queries see later rows."""

    name = "forget-causal"

    def visit(self, module: Module, graph: Graph, node: Node) -> bool:
        if node.op.name != "attention" or not node.attrs.causal:  # type: ignore[attr-defined]
            return False
        node.attrs = replace(node.attrs, causal=False, window=None)  # type: ignore[call-arg]
        return True


class CrashOnAdd(_Planted):
    """Fails on sums of something computed."""

    name = "crash-on-add"

    def visit(self, module: Module, graph: Graph, node: Node) -> bool:
        if node.op.name == "add" and node.operands[1].producer is not None:
            raise KeyError(node.operands[1].name)
        return False


class LoseUse(_Planted):
    """Leaves a use behind that the verifier finds."""

    name = "lose-use"

    def visit(self, module: Module, graph: Graph, node: Node) -> bool:
        if node.op.name != "rms_norm":
            return False
        node.operands[0].uses.clear()
        return True


class Scale(_Planted):
    """Scales the result of norms by 1 + 2**-7 (bf16 holds it), through their f32 weights."""

    name = "scale"
    tolerance = 0.1

    def visit(self, module: Module, graph: Graph, node: Node) -> bool:
        if node.op.name != "rms_norm" or node.weights[0].endswith(".scaled"):
            return False
        values = module.weights.dense(node.weights[0]) * np.float32(1 + 2**-7)
        symbol = f"{node.weights[0]}.scaled"
        if symbol not in module.weights:
            module.weights.add(symbol, dense(values, DType.F32))
        Rewriter(module, graph, self.name).replace_weights(node, [symbol])
        return True


PLANTED = (SwapGate, ForgetCausal, CrashOnAdd, LoseUse)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the planted passes known to pipelines."""
    known = {**passes.PASSES, **{c.name: f"{__name__}:{c.__name__}" for c in PLANTED}}
    monkeypatch.setattr(passes, "registered", lambda: known)
