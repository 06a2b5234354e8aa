"""Which weight makes a reference overflow: asked only after it did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgecc.errors import InputError
from edgecc.ir.core import Module, Node
from edgecc.ir.encodings import Array, Dense
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.ops.base import round_to


class OverflowFinder(Interpreter):
    """Evaluates like the interpreter and remembers where values first stop being numbers.

    Args:
        module: Module to evaluate.
    """

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self._read: dict[str, None] = {}  # weights, in the order of the nodes that read them
        self._first: Node | None = None

    def node(self, node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
        """See `Interpreter`."""
        results = super().node(node, operands)
        if self._first is None:
            self._read.update(dict.fromkeys(node.weights))
            rounded = (
                round_to(array, value.type.dtype)
                for value, array in zip(node.results, results, strict=True)
            )
            if not all(np.all(np.isfinite(array)) for array in rounded):
                self._first = node
        return results

    def error(self, names: Sequence[str]) -> InputError:
        """What to tell the user.

        Of the weights read until the values overflowed, the one with the largest value is named: a
        node that overflows may read a sound weight and what a damaged one before it left.

        Args:
            names: Outputs that are no numbers.
        """
        weights = self.module.weights
        sizes = {w: float(weights.absolute_maximum(w)) for w in self._read if self._scales(w)}
        worst = max(sizes, key=sizes.__getitem__, default=None)
        notes = [f"first in {self._first!r}"] if self._first is not None else []
        if worst is not None:
            notes.append(
                f"{worst} has the largest value of the {len(sizes)} weights up to there: "
                f"{sizes[worst]:.3g}; trained weights are rarely beyond 100"
            )
        return InputError(
            "golden/not-finite",
            f"the reference computes {', '.join(names)} that are no numbers: the values overflow "
            "float32",
            where=weights.origin(worst) if worst is not None else "target",
            notes=tuple(notes),
            help="the checkpoint is damaged: fetch or export it again",
        )

    def _scales(self, symbol: str) -> bool:
        """Whether a weight multiplies what flows: token ids and maps do not."""
        encoding = self.module.weights[symbol].encoding
        return not isinstance(encoding, Dense) or encoding.dtype.is_float
