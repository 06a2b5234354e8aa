"""The nodes of a graph in execution order: a list that inserts, removes and compares in O(log n).

A doubly linked list whose cells carry integer labels in list order, so that "does a stand before b"
compares two labels. When neighbours leave no room for a label between them, the labels of a small
range around are spread anew: the list labeling of Bender, Cole, Demaine, Farach-Colton and Zito,
"Two simplified algorithms for maintaining order in a list" (2002), O(log n) amortized an insertion.

Access by number walks the list: it is there for people and tests, not for passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from edgecc.ir.core import Node

_LABEL_BITS = 62
"""Labels are below 2**62: small integers for Python, room for millions of nodes."""

_DENSITY = 1.4
"""A range of 2**i labels may hold (2 / 1.4)**i nodes before a larger one is spread instead."""


class _Cell:
    """One place of the list. A removed cell keeps `next`, so that an iterator on it goes on."""

    __slots__ = ("label", "next", "node", "previous", "removed")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.label = 0
        self.previous = self
        self.next = self
        self.removed = False


class NodeList(MutableSequence["Node"]):
    """Nodes in execution order.

    Iteration goes on correctly while nodes are inserted or removed: it sees what stands behind the
    present node when it moves on.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._end = _Cell(None)  # closes the ring; label 0 as the beginning, see _label_after
        self._cells: dict[Node, _Cell] = {}
        self._length = 0
        for node in nodes:
            self.append(node)

    # --- what passes use ----------------------------------------------------------------------

    def insert_before(self, anchor: Node, node: Node) -> None:
        """Put a node right before another.

        Raises:
            ValueError: The anchor is not in the list.
        """
        self._insert(self._cell(anchor), node)

    def append(self, value: Node) -> None:
        """Put a node at the end."""
        self._insert(self._end, value)

    def remove(self, value: Node) -> None:
        """Take a node out.

        Raises:
            ValueError: It is not in the list.
        """
        self._unlink(self._cell(value))

    def order(self, node: Node) -> int:
        """A number that grows along the list: compare two of them before the next insertion.

        Raises:
            ValueError: The node is not in the list.
        """
        return self._cell(node).label

    def __contains__(self, value: object) -> bool:
        return value in self._cells

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Node]:
        cell = self._end.next
        while cell.node is not None:
            yield cell.node
            cell = cell.next
            while cell.removed:
                cell = cell.next

    def __reversed__(self) -> Iterator[Node]:
        cell = self._end.previous
        while cell.node is not None:
            before = cell.previous
            yield cell.node
            cell = before

    # --- by number ----------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> list[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | list[Node]:
        if isinstance(index, slice):
            return list(self)[index]
        node = self._at(index).node
        assert node is not None
        return node

    def __setitem__(self, index: int | slice, value: Node | Iterable[Node]) -> None:
        nodes: list[Node] = list(self)
        nodes[index] = value  # type: ignore[index, assignment]
        self.clear()
        self.extend(nodes)

    def __delitem__(self, index: int | slice) -> None:
        for cell in [self._at(index)] if isinstance(index, int) else self._slice(index):
            self._unlink(cell)

    def insert(self, index: int, value: Node) -> None:
        """Put a node before the one that has this number now."""
        inside = -self._length <= index < self._length
        self._insert(self._at(index) if inside else self._end, value)

    def clear(self) -> None:
        """Take all nodes out."""
        for cell in self._slice(slice(None)):
            self._unlink(cell)

    def reverse(self) -> None:
        """Turn the order around."""
        self[:] = list(reversed(list(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NodeList | list):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    # --- cells --------------------------------------------------------------------------------

    def _cell(self, node: Node) -> _Cell:
        cell = self._cells.get(node)
        if cell is None:
            raise ValueError(f"{node!r} is not in the list")
        return cell

    def _slice(self, index: slice) -> list[_Cell]:
        cells = []
        cell = self._end.next
        while cell is not self._end:
            cells.append(cell)
            cell = cell.next
        return cells[index]

    def _at(self, index: int) -> _Cell:
        if not -self._length <= index < self._length:
            raise IndexError(f"no node {index} among {self._length}")
        cell = self._end
        for _ in range(index + 1 if index >= 0 else -index):
            cell = cell.next if index >= 0 else cell.previous
        return cell

    def _insert(self, successor: _Cell, node: Node) -> None:
        cell = _Cell(node)
        previous = successor.previous
        cell.previous, cell.next = previous, successor
        previous.next = successor.previous = cell
        self._cells[node] = cell
        self._length += 1
        # Appending is by far the most frequent: it leaves gaps for later insertions.
        high = (
            min(previous.label + (1 << 32), 1 << _LABEL_BITS)
            if successor is self._end
            else successor.label
        )
        cell.label = (previous.label + high) // 2
        if cell.label == previous.label:
            self._spread(cell)

    def _unlink(self, cell: _Cell) -> None:
        cell.previous.next, cell.next.previous = cell.next, cell.previous
        cell.removed = True
        self._length -= 1
        assert cell.node is not None
        if self._cells.get(cell.node) is cell:
            del self._cells[cell.node]

    def _spread(self, cell: _Cell) -> None:
        """Give the nodes of the smallest range that is not too full evenly spaced labels."""
        first = last = cell
        count, limit = 1, 1.0
        for bits in range(1, _LABEL_BITS + 1):
            low = cell.label >> bits << bits
            high = low + (1 << bits)
            while first.previous is not self._end and first.previous.label >= low:
                first, count = first.previous, count + 1
            while last.next is not self._end and last.next.label < high:
                last, count = last.next, count + 1
            limit *= 2 / _DENSITY
            step = (1 << bits) // (count + 1)
            if count <= limit and step > 0:
                break
        label = low
        while True:
            label += step
            first.label = label
            if first is last:
                return
            first = first.next
