"""Local rules of `canonicalize`: data movement and casts that undo other ones.

A rule takes one node and returns the values that stand for its results, or None where it does not
apply. What it inserts moves less than before, or stands nearer to the inputs, so rules come to an
end. The table of all rules is in the manual of the pass.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from edgecc.ir.core import Node, Value
from edgecc.ir.ops.shape import PadAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.types import Dim, DType
from edgecc.passes.shape_editor import Editor, axis_of

Rule: TypeAlias = Callable[[Editor, Node], Sequence[Value] | None]


def slice_of_all(editor: Editor, node: Node) -> Sequence[Value] | None:
    """A slice of the full range is its operand."""
    attrs, (x,) = _slice(node), node.operands
    return (x,) if (attrs.start, attrs.stop) == (0, x.type.shape[attrs.axis]) else None


def slice_of_slice(editor: Editor, node: Node) -> Sequence[Value] | None:
    """Two slices of one axis are one."""
    attrs, inner = _slice(node), _made_by(node.operands[0], "slice", node)
    if inner is None:
        return None
    start = _slice(inner).start
    moved = SliceAttributes(attrs.axis, start + attrs.start, start + attrs.stop)
    return (editor.slice(node, inner.operands[0], moved),)


def slice_of_concat(editor: Editor, node: Node) -> Sequence[Value] | None:
    """What lies within one part is a slice of that part; whole parts are joined alone."""
    attrs, inner = _slice(node), _made_by(node.operands[0], "concat", node)
    edges = editor.edges(inner) if inner is not None else None
    if inner is None or edges is None:
        return None
    first, last = bisect_right(edges, attrs.start) - 1, bisect_left(edges, attrs.stop) - 1
    low = edges[first]
    if first == last:
        moved = SliceAttributes(attrs.axis, attrs.start - low, attrs.stop - low)
        return (editor.slice(node, inner.operands[first], moved),)
    if (attrs.start, attrs.stop) == (low, edges[last + 1]):
        return (editor.concat(node, inner.operands[first : last + 1], attrs.axis),)
    return None


def slice_of_pad(editor: Editor, node: Node) -> Sequence[Value] | None:
    """A slice without padding is a slice of what was padded."""
    attrs, inner = _slice(node), _made_by(node.operands[0], "pad", node)
    if inner is None:
        return None
    size = inner.operands[0].type.shape[attrs.axis]
    if not isinstance(size, int) or attrs.stop > size:
        return None
    return (editor.slice(node, inner.operands[0], attrs),)


def split_into_one(editor: Editor, node: Node) -> Sequence[Value] | None:
    """A split into one piece is its operand."""
    return node.operands if len(node.results) == 1 else None


def split_of_concat(editor: Editor, node: Node) -> Sequence[Value] | None:
    """Splitting what was joined, into the same sizes, gives the operands."""
    inner = _made_by(node.operands[0], "concat", node)
    if inner is None:
        return None
    sizes = tuple(o.type.shape[axis_of(node)] for o in inner.operands)
    return inner.operands if sizes == _split(node).sizes else None


def concat_of_one(editor: Editor, node: Node) -> Sequence[Value] | None:
    """A concatenation of one value is that value."""
    return node.operands if len(node.operands) == 1 else None


def concat_of_concats(editor: Editor, node: Node) -> Sequence[Value] | None:
    """Nested concatenations of one axis are one, if nothing else reads the inner ones.

    Left to the outermost, so that a long chain is flattened once.
    """
    axis = axis_of(node)
    if _feeds_concat(editor, node.result, axis):
        return None
    flat: list[Value] = []
    waiting = list(reversed(node.operands))
    while waiting:
        value = waiting.pop()
        inner = _made_by(value, "concat", node)
        if inner is not None and _feeds_concat(editor, value, axis):
            waiting.extend(reversed(inner.operands))
        else:
            flat.append(value)
    return None if len(flat) == len(node.operands) else (editor.concat(node, flat, axis),)


def concat_of_pieces(editor: Editor, node: Node) -> Sequence[Value] | None:
    """All pieces of one split, in order, are what was split."""
    joined: list[Value] = []
    index = 0
    while index < len(node.operands):
        value = node.operands[index]
        split = _made_by(value, "split", node)
        if split is not None and _follow(node.operands, index, split.results):
            joined.append(split.operands[0])
            index += len(split.results)
        else:
            joined.append(value)
            index += 1
    if len(joined) == len(node.operands):
        return None
    return (editor.concat(node, joined, axis_of(node)),)


def concat_of_slices(editor: Editor, node: Node) -> Sequence[Value] | None:
    """Neighbouring slices of one value are one slice, if that is all or nothing else reads them."""
    runs: list[list[Value]] = []
    for value in node.operands:
        last = _made_by(runs[-1][-1], "slice", node) if runs else None
        this = _made_by(value, "slice", node)
        if last is not None and this is not None and _continues(last, this):
            runs[-1].append(value)
        else:
            runs.append([value])
    joined: list[Value] = []
    for run in runs:
        joined.extend(_merged(editor, node, run))
    if len(joined) == len(node.operands):
        return None
    return (editor.concat(node, joined, axis_of(node)),)


def unsqueeze_of_squeeze(editor: Editor, node: Node) -> Sequence[Value] | None:
    """The axis that was dropped comes back."""
    inner = _made_by(node.operands[0], "squeeze", node)
    return inner.operands if inner is not None else None


def squeeze_of_unsqueeze(editor: Editor, node: Node) -> Sequence[Value] | None:
    """The new axis is dropped again."""
    inner = _made_by(node.operands[0], "unsqueeze", node)
    return inner.operands if inner is not None else None


def pad_by_nothing(editor: Editor, node: Node) -> Sequence[Value] | None:
    """Padding by zero elements changes nothing."""
    return node.operands if _pad(node).after == 0 else None


def pad_of_pad(editor: Editor, node: Node) -> Sequence[Value] | None:
    """Two paddings of one axis with one value are one."""
    attrs, inner = _pad(node), _made_by(node.operands[0], "pad", node)
    if inner is None or _pad(inner).value != attrs.value:
        return None
    both = PadAttributes(attrs.axis, _pad(inner).after + attrs.after, attrs.value)
    return (editor.insert(node, "pad", inner.operands, attrs=both).result,)


def tail_of_all(editor: Editor, node: Node) -> Sequence[Value] | None:
    """The last rows, as many as there are, are all rows."""
    x, like = node.operands
    axis = axis_of(node)
    return (x,) if x.type.shape[axis] == like.type.shape[axis] else None


def tail_of_tail(editor: Editor, node: Node) -> Sequence[Value] | None:
    """The last of the last rows are the last rows."""
    inner = _made_by(node.operands[0], "tail", node)
    if inner is None:
        return None
    operands = (inner.operands[0], node.operands[1])
    return (editor.insert(node, "tail", operands, attrs=node.attrs).result,)


def tail_of_concat(editor: Editor, node: Node) -> Sequence[Value] | None:
    """The last rows, as many as the last parts have, are those parts; fewer are of the last one."""
    inner, axis = _made_by(node.operands[0], "concat", node), axis_of(node)
    if inner is None:
        return None
    wanted, total = node.operands[1].type.shape[axis], 0
    size: Dim = 0
    for part in reversed(inner.operands):
        size, total = size + part.type.shape[axis], total + 1
        if size == wanted:
            return (editor.concat(node, inner.operands[-total:], axis),)
        excess = size - wanted
        if isinstance(excess, int) and excess > 0:
            break
    if total != 1:
        return None
    operands = (inner.operands[-1], node.operands[1])
    return (editor.insert(node, "tail", operands, attrs=node.attrs).result,)


def cast_to_its_own_type(editor: Editor, node: Node) -> Sequence[Value] | None:
    """A cast to the type of its operand does nothing."""
    (x,) = node.operands
    return (x,) if x.type == node.result.type else None


def cast_of_cast(editor: Editor, node: Node) -> Sequence[Value] | None:
    """What was widened and is narrowed again is as it was."""
    inner = node.operands[0].producer
    if inner is None or inner.op.name != "cast":
        return None
    (x,) = inner.operands
    widens = (x.type.dtype, inner.result.type.dtype) in _WIDENINGS
    return (x,) if widens and x.type == node.result.type else None


_WIDENINGS = frozenset(
    [(narrow, DType.F32) for narrow in (DType.BF16, DType.F16)]
    + [(narrow, DType.F64) for narrow in (DType.BF16, DType.F16, DType.F32)]
)
"""Casts that lose nothing."""

RULES: Mapping[str, Sequence[Rule]] = {
    "cast": (cast_to_its_own_type, cast_of_cast),
    "slice": (slice_of_all, slice_of_slice, slice_of_concat, slice_of_pad),
    "split": (split_into_one, split_of_concat),
    "concat": (concat_of_one, concat_of_concats, concat_of_pieces, concat_of_slices),
    "unsqueeze": (unsqueeze_of_squeeze,),
    "squeeze": (squeeze_of_unsqueeze,),
    "pad": (pad_by_nothing, pad_of_pad),
    "tail": (tail_of_all, tail_of_tail, tail_of_concat),
}
"""Rules by the op of the node they replace, in the order they are tried."""


def _made_by(value: Value, op: str, user: Node) -> Node | None:
    """The producer of a value, if it is such an op and works on the same axis as the user."""
    node = value.producer
    return (
        node if node is not None and node.op.name == op and axis_of(node) == axis_of(user) else None
    )


def _slice(node: Node) -> SliceAttributes:
    assert isinstance(node.attrs, SliceAttributes)
    return node.attrs


def _split(node: Node) -> SplitAttributes:
    assert isinstance(node.attrs, SplitAttributes)
    return node.attrs


def _pad(node: Node) -> PadAttributes:
    assert isinstance(node.attrs, PadAttributes)
    return node.attrs


def _feeds_concat(editor: Editor, value: Value, axis: int) -> bool:
    """Whether a concatenation of that axis is the only one who reads the value, once."""
    user = editor.only_user(value)
    return user is not None and user.op.name == "concat" and axis_of(user) == axis


def _follow(values: Sequence[Value], index: int, wanted: Sequence[Value]) -> bool:
    """Whether the wanted values stand in order from an index on."""
    if index + len(wanted) > len(values):
        return False
    return all(values[index + i] is value for i, value in enumerate(wanted))


def _continues(first: Node, second: Node) -> bool:
    same = first.operands == second.operands
    return same and _slice(first).stop == _slice(second).start


def _merged(editor: Editor, node: Node, run: Sequence[Value]) -> Sequence[Value]:
    """One slice for a run of neighbouring ones, or the run if that would copy more."""
    first, last = run[0].producer, run[-1].producer
    if len(run) == 1 or first is None or last is None:
        return run
    x, both = (
        first.operands[0],
        SliceAttributes(axis_of(node), _slice(first).start, _slice(last).stop),
    )
    whole = (both.start, both.stop) == (0, x.type.shape[both.axis])
    if not whole and any(editor.only_user(value) is None for value in run):
        return run
    return [editor.slice(node, x, both)]
