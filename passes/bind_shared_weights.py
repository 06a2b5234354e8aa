"""`bind-shared-weights`: give a draft the head and the embedding it was trained to borrow."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import InputError
from edgecc.ir.core import Graph, Module, Node
from edgecc.ir.weights import Unbound, Weight
from edgecc.passes.base import Pass, PassContext
from edgecc.roles import Role

TARGET = "target"
ROLES = ("lm_head", "embed_tokens")


@dataclass(frozen=True, slots=True)
class BindSharedWeightsOptions:
    """`copy`: bind to a physical copy instead of the same bytes (experiments, bug reports)."""

    copy: bool = False


class BindSharedWeights(Pass[BindSharedWeightsOptions]):
    """Bind unbound draft weights to the tensors the target really uses.

    What it does
        Every weight whose source is `unbound lm_head` or `unbound embed_tokens` becomes an alias of
        the weight the target computes its logits with, or looks its token ids up in, in the
        target's precision: packed weights stay packed, no bytes are copied. What the target really
        uses is read off its graph, so tied embeddings and quantized heads need no rule of their
        own. A draft that ships its own tensor has nothing unbound and is not changed.

    Why
        Drafts of the SpecForge family ship neither head nor embedding: they were trained through
        the frozen ones of their target. A copy costs memory (0.7 GB for a 27B pair) and risks that
        the head that drafts differs from the head that verifies.

    Example:
        ```
        weight @draft.lm_head.weight : dense<bf16> [4096, 256] = unbound "lm_head"
        ```
        becomes
        ```
        weight @draft.lm_head.weight : nvfp4<block=16> [4096, 256] = alias @target.lm_head.weight
        ```

    Options
        `copy`: bind to a copy of the bytes instead.

    Requires and ensures
        Ensures `heads-bound`.

    Exactness
        Exact: values did not exist before.

    Limits
        The hidden sizes and vocabularies must be equal; a reduced draft vocabulary needs a head of
        its own.
    """

    name = "bind-shared-weights"
    options_type = BindSharedWeightsOptions
    ensures = ("heads-bound",)

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Bind all unbound weights.

        Raises:
            InputError: There is no target, or its tensor does not fit.
        """
        unbound = {
            s: w
            for s, w in module.weights.items()
            if isinstance(w.source, Unbound) and w.source.role in ROLES
        }
        for symbol, weight in unbound.items():
            donor = self._donor(module, symbol, weight)
            self._check(module, symbol, weight, donor)
            self._bind(module, symbol, donor)
            self.remark(ctx, f"@{symbol}", f"bound to @{donor}", applied=True)
        return bool(unbound)

    def _donor(self, module: Module, symbol: str, weight: Weight) -> str:
        assert isinstance(weight.source, Unbound)
        role = weight.source.role
        graph = module.graphs.get(TARGET)
        if graph is None:
            raise InputError(
                "bind/no-target",
                f"the draft has no {role} and there is no target to take it from",
                where=f"weight @{symbol}",
                notes=[f"looked for {p}" for p in weight.source.looked_for],
                help="this draft needs a target: edgecc compile TARGET --draft DRAFT",
            )
        donor = head_of(graph) if role == "lm_head" else embedding_of(graph)
        if donor is None:
            raise InputError(
                f"bind/no-{role.replace('_', '-')}",
                f"neither the draft nor the target has the tensor {role}",
                where=f"weight @{symbol}",
                notes=[f"looked for {p}" for p in weight.source.looked_for],
                help="use the target this draft was trained for, with its head included",
            )
        return module.weights.resolve(donor)

    def _check(self, module: Module, symbol: str, weight: Weight, donor: str) -> None:
        found = module.weights[donor]
        facts = [
            f"the target's tensor is {module.weights.origin(donor)}, {found.encoding} "
            f"{list(found.shape)}"
        ]
        for name in module.weights.dependencies(donor):
            source = module.weights[name].source
            if isinstance(source, Unbound):
                raise InputError(
                    "bind/target-unbound", f"the target's {source.role} is unbound", notes=facts
                )
        for shape in (weight.shape, found.shape):
            if len(shape) != 2:
                raise InputError(
                    "bind/no-matrix",
                    f"{list(shape)} is no matrix: rows and columns were expected",
                    where=f"weight @{symbol}",
                    notes=facts,
                )
        if found.shape[1] != weight.shape[1]:
            raise InputError(
                "bind/hidden-mismatch",
                f"the draft works on hidden size {weight.shape[1]}, the target's tensor has "
                f"{found.shape[1]} columns",
                where=f"weight @{symbol}",
                notes=facts,
                help="use the target this draft was trained for",
            )
        if found.shape[0] != weight.shape[0]:
            raise InputError(
                "bind/vocab-mismatch",
                f"the draft expects a vocabulary of {weight.shape[0]} rows, the target's tensor "
                f"has {found.shape[0]}",
                where=f"weight @{symbol}",
                notes=facts,
                help="use the target this draft was trained for; a reduced draft vocabulary "
                "needs a head of its own",
            )

    def _bind(self, module: Module, symbol: str, donor: str) -> None:
        table = module.weights
        role = table[symbol].source.role  # type: ignore[union-attr]
        if self.options.copy:
            # Reading the same bytes under another symbol is a second tensor for every later stage.
            donor = table.derive(f"{symbol}.copy", "concat_rows", (donor,))
        table.alias(symbol, donor)
        how = "copied" if self.options.copy else "shared, 0 bytes copied"
        module.decisions.append(f"{symbol} -> {donor} ({role}, {table[donor].encoding}, {how})")


def head_of(graph: Graph) -> str | None:
    """The weight a graph computes its logits with, or None; they may be widened afterwards."""
    for output in graph.outputs_by_role(Role.LOGITS):
        node: Node | None = output.value.producer
        if node is not None and node.op.name == "cast":
            node = node.operands[0].producer
        if node is not None and node.op.name == "linear":
            return node.weights[0]
    return None


def embedding_of(graph: Graph) -> str | None:
    """The table a graph looks its token ids up in, or None."""
    for item in graph.by_role(Role.TOKEN_IDS):
        for user in item.value.users():
            if user.op.name == "embedding":
                return user.weights[0]
    return None
