"""`choose-tokens`: the target also says which token each row of logits chooses."""

from __future__ import annotations

from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Location, Module, Output
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.types import DimExpr
from edgecc.passes.base import NoOptions, Pass, PassContext
from edgecc.roles import Role


class ChooseTokens(Pass[NoOptions]):
    """Choose the target's greedy tokens in its graph.

    What it does
        Gives graphs with logits an output `chosen_tokens`: the index of the largest logit of each
        row, among the ids that are tokens. Rows of the head that only pad it are left out.

    Why
        On a GPU a round of greedy decoding then reads back a few integers, and the draft's
        proposals go to the target without passing the host. Logits of a large vocabulary are
        megabytes a round.

    Example:
        `return logits = %logits logits` with 151669 tokens becomes
        ```
        %chosen = argmax(%logits) {limit = 151669} : i64[b, r]
        return logits = %logits logits, chosen_tokens = %chosen chosen_tokens
        ```

    Options
        None.

    Requires and ensures
        Nothing. It belongs before `outline-shared`, so that the choice becomes part of what runs
        behind a shared head, and before `assign-precision`, which keeps float32 what is chosen by.

    Exactness
        Exact: the outputs that were there keep their values.

    Limits
        Needs the number of tokens, which lifting writes into the metadata of the module.
    """

    name = "choose-tokens"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Add the output to every graph the runtime starts that has logits."""
        target = module.metadata.get("target")
        count = target.get("num_tokens") if isinstance(target, dict) else None
        changed = False
        for graph in module.entries():
            logits = graph.outputs_by_role(Role.LOGITS)
            if not logits or graph.outputs_by_role(Role.CHOSEN_TOKENS):
                continue
            if not isinstance(count, int) or count < 1:
                self.remark(ctx, f"@{graph.name}", "the number of tokens is unknown", applied=False)
                continue
            self._choose(module, graph, logits[0], count)
            self.remark(ctx, f"@{graph.name}", f"the best of {count} tokens a row", applied=True)
            changed = True
        return changed

    def _choose(self, module: Module, graph: Graph, logits: Output, count: int) -> None:
        width = logits.value.type.shape[-1]
        limit = count if isinstance(width, DimExpr) else min(count, width)
        builder = Builder(module, graph)
        if logits.value.producer is not None:
            origin = logits.value.producer.location
            builder.location = Location(origin.origin, (*origin.passes, self.name))
        attrs = ArgmaxAttributes(limit)
        chosen = builder.op("argmax", logits.value, attrs=attrs, name="chosen")
        names = {o.name for o in graph.outputs}
        name = Role.CHOSEN_TOKENS.value
        while name in names:
            name += "_"
        builder.output(chosen, name, Role.CHOSEN_TOKENS)
