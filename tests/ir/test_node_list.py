"""NodeList against a plain Python list, and the labels behind its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir.core import Location, Node
from edgecc.ir.node_list import NodeList
from edgecc.ir.ops import Attributes, get_op


def node() -> Node:
    return Node(get_op("add"), (), (), Attributes(), (), (), Location())


def check(found: NodeList, expected: list[Node]) -> None:
    assert list(found) == expected
    assert list(reversed(found)) == expected[::-1]
    assert len(found) == len(expected)
    assert found == expected
    orders = [found.order(n) for n in expected]
    assert orders == sorted(set(orders))


edits = st.lists(st.tuples(st.sampled_from("ibar"), st.integers(0, 1 << 16)), max_size=60)


@given(edits)
def test_edits_do_what_they_do_to_a_list(steps):
    found, expected = NodeList(), []
    for kind, seed in steps:
        new, at = node(), seed % len(expected) if expected else 0
        if kind == "i":
            found.insert(at, new)
            expected.insert(at, new)
        elif kind == "b" and expected:
            found.insert_before(expected[at], new)
            expected.insert(at, new)
        elif kind == "a":
            found.append(new)
            expected.append(new)
        elif kind == "r" and expected:
            found.remove(expected.pop(at))
        check(found, expected)


@pytest.mark.parametrize("place", ["front", "back", "same gap", "before one anchor", "alternating"])
def test_labels_stay_ordered_where_there_is_no_room_left(place):
    first, last = node(), node()
    found = NodeList([first, last])
    expected = [first, last]
    for i in range(500):
        new = node()
        at = {
            "front": 0,
            "back": len(expected),
            "same gap": 1,
            "before one anchor": len(expected) - 1,
            "alternating": len(expected) // 2 + i % 2,
        }[place]
        found.insert(at, new)
        expected.insert(at, new)
    check(found, expected)


def test_access_by_number_is_that_of_a_list():
    nodes = [node() for _ in range(5)]
    found = NodeList(nodes)
    assert [found[i] for i in range(-5, 5)] == [*nodes, *nodes]
    assert found[1:4] == nodes[1:4]
    assert found[::-2] == nodes[::-2]
    assert found.index(nodes[3]) == 3
    assert found.pop() is nodes[4]
    del found[0]
    assert found == nodes[1:4]
    new = node()
    found[1] = new
    assert found == [nodes[1], new, nodes[3]]
    found.reverse()
    check(found, [nodes[3], new, nodes[1]])
    del found[:2]
    assert found == [nodes[1]]
    with pytest.raises(IndexError, match="no node 1 among 1"):
        found[1]
    found.clear()
    check(found, [])


def test_nodes_that_are_not_there_are_refused():
    found = NodeList([node()])
    stranger = node()
    for call in (found.remove, found.order, lambda n: found.insert_before(n, node())):
        with pytest.raises(ValueError, match="not in the list"):
            call(stranger)
    assert stranger not in found


def test_iteration_goes_on_while_nodes_come_and_go():
    nodes = [node() for _ in range(6)]
    found = NodeList(nodes)
    seen = []
    for item in found:
        seen.append(item)
        if item is nodes[1]:  # itself and the two behind it
            for gone in nodes[1:4]:
                found.remove(gone)
        if item is nodes[4]:
            found.insert_before(nodes[4], node())
            found.insert_before(nodes[5], new := node())
    assert seen == [nodes[0], nodes[1], nodes[4], new, nodes[5]]


def test_insertion_takes_about_the_same_time_in_a_long_list():
    """Guards against a scan for each insertion: 64 times the nodes must not take 64 times as long.

    Counted in steps of the algorithm, not seconds: labels written.
    """

    def written(count: int) -> float:
        found = NodeList([node(), node()])
        anchor = found[1]
        labels = 0
        spread = found._spread

        def counting(cell):
            nonlocal labels
            before = {n: found.order(n) for n in found}
            spread(cell)
            labels += sum(found.order(n) != label for n, label in before.items())

        found._spread = counting
        for _ in range(count):
            found.insert_before(anchor, node())
        return labels / count

    assert written(1024) < 4 * written(64) + 8
