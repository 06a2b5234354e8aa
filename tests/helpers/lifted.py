"""Lifted graphs run by the interpreter, with the bookkeeping of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.core import Module
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.types import DimExpr
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.roles import Role

Array: TypeAlias = NDArray[Any]


class Lifted:
    """A target, or a pair, lifted and bound; each graph keeps caches and states between calls.

    Args:
        target: Folder of the target.
        draft: Folder of the draft.
        garbage: What the caches hold where nothing has been written.
        dtype: Type of the evaluation.
        options: Fields of `LiftOptions`.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | None = None,
        *,
        garbage: float = 0.0,
        dtype: type[np.floating[Any]] = np.float64,
        **options: Any,
    ) -> None:
        options.setdefault("max_model_len", 64)
        self.module: Module = lift(target, draft, LiftOptions(**options))
        self._interpreter = self.prepare(dtype)
        self._garbage = {Role.KV_CACHE: garbage, Role.STATE: 0.0, Role.STATE_LOG: 0.0}
        self._memory: dict[str, dict[str, Array]] = {}
        self.lengths: dict[str, int] = {}
        self.reset()

    def prepare(self, dtype: type[np.floating[Any]]) -> Interpreter:
        """Run passes on the module, and make what evaluates it."""
        BindSharedWeights().run(self.module, PassContext())
        return Interpreter(self.module, dtype)

    def reset(self) -> None:
        """Empty all caches and states."""
        self.lengths = dict.fromkeys(self.module.graphs, 0)
        self._memory = {
            name: {
                item.name: np.full(
                    [1 if isinstance(d, DimExpr) else d for d in item.value.type.shape], filling
                )
                for role, filling in self._garbage.items()
                for item in graph.by_role(role)
            }
            for name, graph in self.module.graphs.items()
        }

    def target(self, ids: Sequence[int], keep: int | None = None) -> dict[str, Array]:
        """Run new tokens; logits `[T, V]` of each, taps `[T, n*H]`.

        Args:
            ids: The tokens.
            keep: How many of them stay in caches and states; all unless given.
        """
        kept = len(ids) if keep is None else keep
        before = dict(self._memory["target"])
        out = self._run("target", self._tokens(ids), kept)
        if kept < len(ids) and self.module.graphs["target"].by_role(Role.STATE):
            self._memory["target"] = before
            self.lengths["target"] -= kept
            if kept:
                self._run("target", self._tokens(ids[:kept]), kept)
        return out

    @staticmethod
    def _tokens(ids: Sequence[int]) -> dict[str, Array]:
        return {"token_ids": np.array([ids]), "logit_rows": np.arange(len(ids))}

    def draft(self, features: Array, anchor: int) -> dict[str, Array]:
        """Run one round on new features `[c, n*H]`; outputs without the batch axis."""
        inputs = {"features": features[None], "anchor": np.array([anchor])}
        return self._run("draft", inputs, len(features))

    def draft_chain(self, features: Array, following: Sequence[int]) -> dict[str, Array]:
        """Run one round of an EAGLE3 draft; outputs without the batch axis.

        Args:
            features: New features `[c, n*H]`.
            following: For each of them the token after it; the last is the newest committed one.
        """
        inputs = {"features": features[None], "next_token_ids": np.array([following])}
        return self._run("draft", inputs, len(features))

    def _run(self, graph: str, inputs: dict[str, Array], keep: int) -> dict[str, Array]:
        length = np.array([self.lengths[graph]])
        rows = inputs["token_ids"].shape[1] if graph == "target" else 0
        counts = {Role.REPLAY_LENGTH: 0, Role.COMMIT_LENGTH: rows}  # nothing is left to a log
        for item in self.module.graphs[graph].inputs:
            if item.role in counts:
                inputs[item.name] = np.array([counts[item.role]])
        out = self._interpreter.run(
            graph, {**inputs, "cache_length": length, **self._memory[graph]}
        )
        self._memory[graph] = {name: out.pop(name) for name in self._memory[graph]}
        self.lengths[graph] += keep
        return {name: value[0] for name, value in out.items()}
