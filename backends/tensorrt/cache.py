"""KV caches that one call updates several times, as drafts do that run their layer step by step.

The update layer takes a network input and gives a network output, so a cache has one in a network.
Of the updates of a chain, each behind the rows of the one before, the last writes the rows of all.
What is read in between is put together: the cache as it came, and behind it the rows that are new.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edgecc.backends.tensorrt.emitter import Emitter, Tensor
from edgecc.backends.tensorrt.shape import count_up, join
from edgecc.errors import LegalizeError
from edgecc.ir.core import Node, Value, site
from edgecc.ir.types import Dim, DType

_NEVER = np.iinfo(np.int64).max
"""Place of a row that no query sees."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A cache and its updates up to one version of it.

    Attributes:
        cache: The graph input.
        updates: The nodes, in order; at least one.
    """

    cache: Value
    updates: tuple[Node, ...]

    @classmethod
    def of(cls, version: Value) -> Chain:
        """The updates that lead to a version of a cache."""
        nodes: list[Node] = []
        while (node := version.producer) is not None and node.op.name == "cache_update":
            nodes.insert(0, node)
            version = node.operands[0]
        return cls(version, tuple(nodes))

    @property
    def start(self) -> Value:
        """The first row written, for each sequence."""
        return self.updates[0].operands[2]

    @property
    def capacity(self) -> int:
        """Rows of the cache."""
        return int(str(self.cache.type.shape[2]))

    @property
    def rows(self) -> Dim:
        """How many rows are written."""
        total: Dim = 0
        for node in self.updates:
            total = total + node.operands[1].type.shape[1]
        return total

    @property
    def is_inner(self) -> bool:
        """Whether another update follows."""
        return bool(_later_updates(self.updates[-1]))

    def check(self, e: Emitter) -> None:
        """Refuse updates that one layer cannot make.

        Raises:
            LegalizeError: One does not start behind the rows of the one before, or a version is
                wanted that a later one overwrites.
        """
        for before, after in pairwise(self.updates):
            outputs = (o.value for o in e.graph.outputs)
            if len(_later_updates(before)) > 1 or before.result in outputs:
                raise LegalizeError(
                    "tensorrt/cache-versions",
                    "a cache is wanted as it is before an update, which overwrites it",
                    where=site(e.graph, after),
                )
            if not _follows(before, after):
                raise LegalizeError(
                    "tensorrt/cache-rows",
                    "a second update of a cache must start behind the rows of the first",
                    where=site(e.graph, after),
                )

    def write(self, e: Emitter) -> Tensor:
        """The cache with the rows of all updates; the layer works in place."""
        start = self.start
        index = e.once(("index", start), lambda: e.cast(e.value(start), DType.I32))
        mode, cache = e.trt.KVCacheMode.LINEAR, e.value(self.cache)
        return e.out("cache", e.network.add_kv_cache_update(cache, self._rows(e), index, mode))

    def read(self, e: Emitter) -> Tensor:
        """Keys or values for attention, `[b, kv_heads, keys, D]`."""
        if not self.is_inner:
            return e.value(self.updates[-1].result)
        return e.once(
            ("keys", self.updates[-1]), lambda: join(e, [e.value(self.cache), self._rows(e)], 2)
        )

    def places(self, e: Emitter) -> Tensor:
        """Which row of the sequence each key is, i64 `[b or 1, 1, 1, keys]`."""
        capacity = self.capacity
        numbers = e.constant(np.arange(capacity, dtype=np.int64).reshape(1, 1, 1, capacity))
        if not self.is_inner:
            return numbers
        start = self.start
        first = e.reshape(e.value(start), (start.type.shape[0], 1, 1, 1))
        never = e.constant(np.full((1, 1, 1, 1), _NEVER, dtype=np.int64))
        written = e.binary("LESS", numbers, first)
        kept = e.out("places", e.network.add_select(written, numbers, never))
        new = e.reshape(count_up(e, self.rows, self._rows(e), 2), (1, 1, 1, self.rows))
        return join(e, [kept, e.binary("SUM", first, new)], 3)

    def key(self) -> object:
        """What places depend on."""
        return (self.start, str(self.rows), self.capacity) if self.is_inner else self.capacity

    def _rows(self, e: Emitter) -> Tensor:
        """What is written, `[b, kv_heads, rows, D]`."""
        found = [_rows_of(e, node) for node in self.updates]
        if len(found) == 1:
            return found[0]
        return e.once(("rows", self.updates), lambda: join(e, found, 2))


def _rows_of(e: Emitter, node: Node) -> Tensor:
    """What one update writes."""
    cache, new, _ = node.operands
    _, heads, _, width = cache.type.shape

    def make() -> Tensor:
        split = e.reshape(e.value(new), (*new.type.shape[:2], heads, width))
        return e.transpose(split, (0, 2, 1, 3))

    return e.once(("rows", node), make)


def _later_updates(node: Node) -> list[Node]:
    return [
        user
        for user in node.result.users()
        if user.op.name == "cache_update" and user.operands[0] is node.result
    ]


def _follows(before: Node, after: Node) -> bool:
    """Whether an update starts where the one before ends."""
    step = after.operands[2].producer
    if step is None or step.op.name != "advance":
        return False
    start, like = step.operands
    rows = before.operands[1].type.shape[1]
    return start is before.operands[2] and like.type.shape[1] == rows
