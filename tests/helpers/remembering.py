"""An interpreter that keeps dequantized weights, for tests that call small graphs many times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from edgecc.ir import Interpreter, Module
from edgecc.ir.core import Node
from edgecc.ir.ops.base import EvalContext, WeightView
from edgecc.ir.weights import BLOCK_BYTES

Array: TypeAlias = NDArray[Any]


class _View(WeightView):
    """Reads a weight once."""

    _blocks: list[tuple[int, int, Array]] | None = None
    _dense: Array | None = None

    def dense(self) -> Array:
        if self._dense is None:
            self._dense = super().dense()
        return self._dense

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int, Array]]:
        if self._blocks is None:
            self._blocks = list(super().blocks(block_bytes))
        yield from self._blocks


class RememberingInterpreter(Interpreter):
    """The same arithmetic, without reading weights again."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self._views: dict[str, _View] = {}

    def node(self, node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
        for symbol in node.weights:
            if symbol not in self._views:
                self._views[symbol] = _View(self.module.weights, symbol, self.dtype)
        views = [self._views[symbol] for symbol in node.weights]
        return tuple(
            node.op.evaluate(operands, views, node.attrs, EvalContext(self.dtype, self._call))
        )
