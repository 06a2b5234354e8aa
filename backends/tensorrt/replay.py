"""Lowering of recurrent layers that first replay the accepted rows of a log.

How many rows are replayed is known on the device only, and sizes are the host's. So the rows of the
log and the new ones are put in one order, those to replay first, the new ones behind them, and
those that are not to be replayed at the end, where they count for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edgecc.backends.tensorrt.delta_rule import DeltaInputs, delta_rule
from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.backends.tensorrt.shape import count_up, cut_tensor, join
from edgecc.backends.tensorrt.state import convolve, heads_of, rows_of
from edgecc.backends.tensorrt.weights import table
from edgecc.ir.core import Node
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.types import Dim, DType


@lowers("logged_delta_net")
def logged_delta_net(e: Emitter, node: Node) -> None:
    """Convolution, SiLU and delta rule over the replayed and the new rows at once.

    Raises:
        LegalizeError: Log and call have too many rows.
    """
    attrs = node.attrs
    assert isinstance(attrs, GatedDeltaNetAttributes)
    x, _, _, conv_state, delta_state, log, *_ = node.operands
    *wide, replay, commit = e.operands(node)
    rows, a, b, before, state, logged = (e.cast(t, DType.F32) for t in wide)
    batch, count, channels = x.type.shape
    fresh = join(e, [rows, a, b], 2)
    joined = join(e, [logged, fresh], 1)
    order = _Order(e, batch, count, int(str(log.type.shape[1])), replay, commit, fresh, joined)
    everything = order.take(joined, order.arranged())

    heads = heads_of(attrs, delta_state)
    widths = (int(str(channels)), heads.value_heads, heads.value_heads)
    inputs, gate_a, gate_b = _columns(e, everything, (batch, order.total), widths)
    window = join(e, [e.transpose(before, (0, 2, 1)), inputs], 1)
    taps, *weights = (table(e, w) for w in node.weights)
    mixed = convolve(e, window, inputs, (batch, order.total, channels), taps)
    mixed = e.binary("PROD", mixed, e.activation("SIGMOID", mixed))
    keys = heads.key_heads * heads.key_dim
    split = (keys, keys, heads.value_heads * heads.value_dim)
    q, k, v = _columns(e, mixed, (batch, order.total), split)
    made, after = delta_rule(
        rows_of(e, node, order.total, everything),
        heads,
        DeltaInputs(q, k, v, gate_a, gate_b, state, *weights),
        live=order.live(),
        kept=order.kept(),
    )
    conv_after = order.take(window, order.behind(int(str(conv_state.type.shape[2]))))
    log_after = e.network.add_gather(join(e, [fresh, logged], 1), order.log(), 1)
    results = (
        order.take(made, order.new()),
        e.transpose(conv_after, (0, 2, 1)),
        after,
        e.out("gather", log_after),
    )
    e.result(node, *(e.cast(t, r.type.dtype) for t, r in zip(results, node.results, strict=True)))


def _columns(e: Emitter, x: Tensor, lead: tuple[Dim, Dim], widths: Sequence[int]) -> list[Tensor]:
    """The pieces of the last axis."""
    edges = np.cumsum((0, *widths)).tolist()
    return [cut_tensor(e, x, (*lead, edges[-1]), 2, *edge) for edge in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class _Order:
    """Where rows of the log and of the call stand in the common order.

    What all layers of a model share is computed once.

    Attributes:
        e: Emitter.
        batch: Sequences.
        count: New rows.
        logged: Rows of the log.
        replay: Rows of the log that count, i64 `[b]`.
        commit: New rows that are final, i64 `[b]`.
        fresh: The new rows, as axis 1.
        joined: The rows of the log and behind them the new ones.
    """

    e: Emitter
    batch: Dim
    count: Dim
    logged: int
    replay: Tensor
    commit: Tensor
    fresh: Tensor
    joined: Tensor

    @property
    def total(self) -> Dim:
        """Rows of the log and of the call."""
        return self.count + self.logged

    def take(self, rows: Tensor, index: Tensor) -> Tensor:
        """Rows by number, for each sequence its own: `[b, n, width]` and i64 `[b, n]`."""
        layer = self.e.layer("gather", self.e.network.add_gather(rows, index, 1))
        layer.num_elementwise_dims = 1
        return layer.get_output(0)

    def arranged(self) -> Tensor:
        """Which joined row comes where: i64 `[b, total]`."""
        e = self.e

        def index() -> Tensor:
            replay, numbers = self._column(self.replay), self._numbers()
            behind = e.binary("SUM", numbers, e.binary("SUB", self._number(self.logged), replay))
            last = e.binary("SUB", self._total(), self._number(1))
            behind = e.binary("MIN", behind, last)  # rows at the end repeat the last one
            return self._choose("order", e.binary("LESS", numbers, replay), numbers, behind)

        return self._once("order", index)

    def new(self) -> Tensor:
        """Where the new rows are, i64 `[b, count]`."""
        e = self.e

        def index() -> Tensor:
            numbers = e.reshape(count_up(e, self.count, self.fresh, 1), (1, self.count))
            return e.binary("SUM", numbers, self._column(self.replay))

        return self._once("new", index)

    def behind(self, count: int) -> Tensor:
        """As many rows as the state of the convolution has, behind the rows that stay.

        They are rows of the window: of that state, and of the common order behind it.
        """
        e = self.e

        def index() -> Tensor:
            numbers = e.constant(np.arange(count, dtype=np.int64)[None])
            return e.binary("SUM", numbers, self._stay())

        return self._once(f"behind {count}", index)

    def log(self) -> Tensor:
        """What the log is after the call: i64 `[logged]` in the new rows and the log behind them.

        Rows that the new ones do not reach stay.
        """
        e = self.e

        def index() -> Tensor:
            numbers = e.constant(np.arange(self.logged, dtype=np.int64))
            count = self._new_count()
            stay = e.binary("SUM", numbers, count)
            return self._choose("log order", e.binary("LESS", numbers, count), numbers, stay)

        return self._once("log", index)

    def live(self) -> Tensor:
        """1 for replayed and new rows, 0 for padding and what is not replayed."""
        e = self.e

        def mask() -> Tensor:
            commit = self._column(self.commit)
            none = e.binary("EQUAL", commit, self._number(0))
            count = e.reshape(self._new_count(), (1, 1))
            real = self._choose("real", none, count, commit)
            return self._before(e.binary("SUM", self._column(self.replay), real))

        return self._once("live", mask)

    def kept(self) -> Tensor:
        """1 for the rows that the new state has seen: replayed ones and final ones."""
        return self._once("kept", lambda: self._before(self._stay()))

    def _before(self, end: Tensor) -> Tensor:
        """1 for rows before an end i64 `[b, 1]`, as `[b, 1, 1, rows, 1]`."""
        inside = self.e.cast(self.e.binary("LESS", self._numbers(), end), DType.F32)
        return self.e.reshape(inside, (self.batch, 1, 1, self.total, 1))

    def _choose(self, kind: str, condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        return self.e.out(kind, self.e.network.add_select(condition, yes, no))

    def _numbers(self) -> Tensor:
        """0, 1, ... for all rows, i64 `[1, total]`."""
        e = self.e
        numbers = count_up(e, self.total, self.joined, 1)
        return self._once("numbers", lambda: e.reshape(numbers, (1, self.total)))

    def _stay(self) -> Tensor:
        """How many rows stay, i64 `[b, 1]`."""
        both = (self.replay, self.commit)
        return self._once("stay", lambda: self._column(self.e.binary("SUM", *both)))

    def _total(self) -> Tensor:
        """All rows, i64 `[1, 1]`."""
        return self.e.reshape(self.e.size_of(self.total, self.joined, 1), (1, 1))

    def _new_count(self) -> Tensor:
        """The new rows, i64 `[1]`."""
        return self.e.size_of(self.count, self.fresh, 1)

    def _column(self, numbers: Tensor) -> Tensor:
        return self.e.reshape(numbers, (self.batch, 1))

    def _number(self, number: int) -> Tensor:
        return self.e.constant(np.full((1, 1), number, dtype=np.int64))

    def _once(self, what: str, make: Callable[[], Tensor]) -> Tensor:
        sizes = (str(self.count), self.logged)
        return self.e.once(("replay", what, sizes, self.replay.name, self.commit.name), make)
