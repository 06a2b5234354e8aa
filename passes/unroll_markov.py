"""`unroll-markov`: the sequential Markov head as straight-line code."""

from __future__ import annotations

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops.sampling import ArgmaxAttributes, MarkovChainAttributes
from edgecc.ir.ops.shape import AxisAttributes, SliceAttributes
from edgecc.ir.rewriter import Rewriter
from edgecc.passes.base import NoOptions, Pass, PassContext


class UnrollMarkov(Pass[NoOptions]):
    """Unroll `markov_chain` into embedding, linear, add and argmax, step by step.

    What it does
        Each of the N steps becomes: look the previous token up in `w1`, multiply by `w2`, add the
        base logits of the slot, take the argmax; the token feeds the next step.

    Why
        One engine call then returns all N proposals: no round trip to the host between dependent
        tokens. An unrolled chain was as fast as a loop and needs no control flow in the engine.

    Example:
        ```
        %tokens, %logits, %e = markov_chain(%base, %anchor, @w1, @w2) {steps = 2, limit = 90}
        ```
        becomes two copies of
        ```
        %e0 = embedding(%anchor, @w1)
        %bias0 = linear(%e0, @w2)
        %logits0 = add(%slot0, %bias0)
        %token0 = argmax(%logits0) {limit = 90}
        ```
        and three `concat`.

    Options
        None.

    Requires and ensures
        Ensures `markov-unrolled`.

    Exactness
        Exact.

    Limits
        The vanilla head only; other head types have no op yet.
    """

    name = "unroll-markov"
    ensures = ("markov-unrolled",)

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Unroll every chain."""
        changed = False
        for graph in module.graphs.values():
            for node in [n for n in graph.nodes if n.op.name == "markov_chain"]:
                self._unroll(module, graph, node)
                steps = node.attrs.steps  # type: ignore[attr-defined]
                done = f"{steps} step{'s' if steps > 1 else ''}"
                self.remark(ctx, f"@{graph.name}", done, applied=True)
                changed = True
        return changed

    def _unroll(self, module: Module, graph: Graph, chain: Node) -> None:
        rewriter = Rewriter(module, graph, self.name)
        attrs = chain.attrs
        assert isinstance(attrs, MarkovChainAttributes)
        base, previous = chain.operands
        w1, w2 = chain.weights
        columns: tuple[list[Value], list[Value], list[Value]] = ([], [], [])

        def emit(op: str, *operands: Value, **kwargs: object) -> Value:
            return rewriter.insert(chain, op, operands, **kwargs).result  # type: ignore[arg-type]

        for step in range(attrs.steps):
            slot = emit(
                "slice", base, attrs=SliceAttributes(1, step, step + 1), names=(f"slot{step}",)
            )
            slot = emit("squeeze", slot, attrs=AxisAttributes(1))
            embedding = emit("embedding", previous, weights=(w1,), names=(f"e{step}",))
            bias = emit("linear", embedding, weights=(w2,), names=(f"bias{step}",))
            logits = emit("add", slot, bias, names=(f"logits{step}",))
            previous = emit(
                "argmax", logits, attrs=ArgmaxAttributes(attrs.limit), names=(f"token{step}",)
            )
            for column, value in zip(columns, (previous, logits, embedding), strict=True):
                column.append(emit("unsqueeze", value, attrs=AxisAttributes(1)))
        joined = [emit("concat", *column, attrs=AxisAttributes(1)) for column in columns]
        rewriter.replace(chain, joined)
