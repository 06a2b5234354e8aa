"""Where weights are: constants inside of plans, or inputs that the runtime binds at load.

Constants let the builder arrange weights for its kernels, but building takes up to four times their
bytes of memory and each plan has copies of its own. Inputs cost nothing to build and are shared by
all engines that take them. Under either policy an array that two engines take is an input: it lies
in the bundle once, and on the device once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from edgecc.backends.base import Holding
from edgecc.backends.stored_weights import WEIGHT_FILE, StoredTensor, stored_tensor
from edgecc.backends.tensorrt.operands import Operand, graph_operands
from edgecc.ir.core import Module

EMBED_LIMIT = 2 << 30
"""`auto` embeds at most so many bytes: building takes up to four times that."""

SHARED_BYTES = 64 << 10
"""Smaller arrays are constants of each engine that takes them, as `dedupe-weights` leaves them."""


class WeightPolicy(StrEnum):
    """Spellings of `--weights` but for `auto`."""

    EMBED = "embed"
    BIND = "bind"


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where the weights of one module are.

    Attributes:
        policy: What was chosen.
        reason: Why, for people.
        bound: Arrays that are inputs, in the order of graphs and nodes.
        constant: Those that are constants of the one engine that takes them, or small.
        shared: The bound ones that more than one engine takes.
    """

    policy: WeightPolicy
    reason: str
    bound: tuple[Operand, ...]
    constant: tuple[Operand, ...]
    shared: tuple[Operand, ...]

    def tensors(self, module: Module) -> list[StoredTensor]:
        """What the weight file has to hold for the bound arrays."""
        found = {
            t.name: t
            for o in self.bound
            for t in (stored_tensor(module.weights, o.symbol, c) for c in o.components)
        }
        return list(found.values())

    def held(self, module: Module) -> dict[str, Holding]:
        """Where the bytes of each weight lie, by the symbol the weight file would have."""
        bound = set(self.bound)
        plans: Counter[str] = Counter()
        for graph in module.graphs.values():
            named = [o.symbol for o in graph_operands(module, graph) if o not in bound]
            nodes = (n for n in graph.nodes if n.op.name == "constant")
            named += [module.weights.resolve(w) for n in nodes for w in n.weights]
            plans.update(dict.fromkeys(named, 1))
        filed = {o.symbol: Holding(WEIGHT_FILE) for o in self.bound}
        return {s: Holding(None, count) for s, count in plans.items()} | filed

    @property
    def embedded_bytes(self) -> int:
        """Bytes of the constants."""
        return sum(o.nbytes for o in self.constant)

    def decisions(self) -> Iterator[str]:
        """What was chosen, one sentence each."""
        yield self.reason
        if self.policy is WeightPolicy.EMBED and self.shared:
            size = sum(o.nbytes for o in self.shared)
            names = ", ".join(dict.fromkeys(o.symbol for o in self.shared))
            yield (
                f"{names}: {size / 1e6:.1f} MB that several engines take are bound at load, "
                f"so that they exist once"
            )


def plan_weights(module: Module, choice: str) -> WeightPlan:
    """Decide for a module that is legalized for a device whose engines can hold weights.

    Args:
        module: After all passes.
        choice: `auto`, `embed` or `bind`.

    Raises:
        LegalizeError: An encoding has no form in TensorRT.
    """
    takers: Counter[Operand] = Counter()
    for graph in module.graphs.values():
        takers.update(dict.fromkeys(graph_operands(module, graph), 1))
    total = sum(o.nbytes for o in takers)
    policy = _policy(choice, total)
    shared = {o for o, n in takers.items() if n > 1 and o.nbytes >= SHARED_BYTES}
    bound = takers.keys() if policy is WeightPolicy.BIND else shared
    return WeightPlan(
        policy,
        _reason(choice, policy, total),
        tuple(o for o in takers if o in bound),
        tuple(o for o in takers if o not in bound),
        tuple(o for o in takers if o in shared),
    )


def _policy(choice: str, total: int) -> WeightPolicy:
    if choice != "auto":
        return WeightPolicy(choice)
    return WeightPolicy.EMBED if total <= EMBED_LIMIT else WeightPolicy.BIND


def _reason(choice: str, policy: WeightPolicy, total: int) -> str:
    asked = "as asked for" if choice != "auto" else _compared(policy)
    if policy is WeightPolicy.EMBED:
        return (
            f"engines hold {total / 1e6:.1f} MB of weights, {asked}; building takes up to four "
            f"times that"
        )
    return f"weights are inputs of the engines, {total / 1e6:.1f} MB bound at load, {asked}"


def _compared(policy: WeightPolicy) -> str:
    relation = "at most" if policy is WeightPolicy.EMBED else "more than"
    return f"{relation} {EMBED_LIMIT / 1e6:.0f} MB"
