from __future__ import annotations

import inspect
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Builder, DType, Module, Role, SymbolRange, Value, print_module, sym
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.elementwise import CastAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.canonicalize import Canonicalize
from edgecc.passes.dce import Dce
from edgecc.passes.shape_rules import RULES
from helpers.modules import check_pass, modules
from helpers.pairs import FEWER, pair, pair_inputs, pair_options

B, T = sym("b"), sym("t")


class Shapes(Builder):
    """Shorter spellings of data movement; axis 1 unless told otherwise."""

    def __init__(self) -> None:
        symbols = {"b": SymbolRange(0, 4), "t": SymbolRange(1, 9)}
        super().__init__(Module("m", symbols=symbols), "main")

    def take(self, name: str, *shape) -> Value:
        return self.input(name, DType.F32, shape, Role.ACTIVATION)

    def slice(self, x: Value, start: int, stop: int, axis: int = 1) -> Value:
        return self.op("slice", x, attrs=SliceAttributes(axis, start, stop))

    def split(self, x: Value, *sizes: int, axis: int = 1) -> tuple[Value, ...]:
        return self.node("split", (x,), attrs=SplitAttributes(axis, sizes)).results

    def concat(self, *values: Value, axis: int = 1) -> Value:
        return self.op("concat", *values, attrs=AxisAttributes(axis))

    def pad(self, x: Value, after: int, value: int = 0, axis: int = 1) -> Value:
        return self.op("pad", x, attrs=PadAttributes(axis, after, value))

    def tail(self, x: Value, like: Value, axis: int = 1) -> Value:
        return self.op("tail", x, like, attrs=AxisAttributes(axis))

    def cast(self, x: Value, dtype: str) -> Value:
        return self.op("cast", x, attrs=CastAttributes(dtype))

    def drop(self, x: Value, axis: int) -> Value:
        return self.op("squeeze", x, attrs=AxisAttributes(axis))

    def grow(self, x: Value, axis: int) -> Value:
        return self.op("unsqueeze", x, attrs=AxisAttributes(axis))

    def give(self, *values: Value) -> None:
        for value in values:
            self.output(value, f"out{len(self.graph.outputs)}", Role.ACTIVATION)


def run(b: Shapes, *outputs: Value, changed: bool = True) -> list[str]:
    """Canonicalize, see that nothing is left dead, and return outputs as expressions."""
    b.give(*outputs)
    assert check_pass(Canonicalize(), b.module) is changed
    assert not Dce().run(b.module, PassContext())
    return [expression(o.value) for o in b.graph.outputs]


def expression(value: Value) -> str:
    node = value.producer
    if node is None:
        return value.name
    attrs = [str(getattr(node.attrs, f)) for f in type(node.attrs).__dataclass_fields__]
    text = f"{node.op.name}({', '.join([*map(expression, node.operands), *attrs])})"
    return text + (f"[{value.index}]" if len(node.results) > 1 else "")


def apply(make, changed: bool = True) -> list[str]:
    """Run on values made from x `[b, 8]`, y `[b, 3]`, z `[b, 5]`."""
    b = Shapes()
    made = make(b, b.take("x", B, 8), b.take("y", B, 3), b.take("z", B, 5))
    return run(b, *(made if isinstance(made, tuple) else (made,)), changed=changed)


MATCHES = {
    "cast to its own type": (lambda b, x, y, z: b.cast(x, "f32"), ["x"]),
    "cast of cast: f64 and back": (lambda b, x, y, z: b.cast(b.cast(x, "f64"), "f32"), ["x"]),
    "cast of cast: bf16 widened and back": (
        lambda b, x, y, z: b.cast(b.cast(b.cast(x, "bf16"), "f32"), "bf16"),
        ["cast(x, bf16)"],
    ),
    "slice of all": (lambda b, x, y, z: b.slice(x, 0, 8), ["x"]),
    "slice of slice": (
        lambda b, x, y, z: b.slice(b.slice(x, 1, 7), 2, 4),
        ["slice(x, 1, 3, 5)"],
    ),
    "slice of concat: first part": (
        lambda b, x, y, z: b.slice(b.concat(y, z), 0, 3),
        ["y"],
    ),
    "slice of concat: within the last part": (
        lambda b, x, y, z: b.slice(b.concat(y, z), 4, 8),
        ["slice(z, 1, 1, 5)"],
    ),
    "slice of concat: whole parts": (
        lambda b, x, y, z: b.slice(b.concat(y, z, x, y), 3, 16),
        ["concat(z, x, 1)"],
    ),
    "slice of concat: between empty parts": (
        lambda b, x, y, z: (lambda e: b.slice(b.concat(e, e, y, e, z, e), 0, 3))(b.take("e", B, 0)),
        ["y"],
    ),
    "slice of pad": (lambda b, x, y, z: b.slice(b.pad(x, 2), 3, 8), ["slice(x, 1, 3, 8)"]),
    "slice of pad: all of it": (lambda b, x, y, z: b.slice(b.pad(x, 2), 0, 8), ["x"]),
    "split into one": (lambda b, x, y, z: b.split(x, 8), ["x"]),
    "split of concat": (lambda b, x, y, z: b.split(b.concat(y, z), 3, 5), ["y", "z"]),
    "concat of one": (lambda b, x, y, z: b.concat(x), ["x"]),
    "concat of concats": (
        lambda b, x, y, z: b.concat(b.concat(y, b.concat(z, x)), z, b.concat(y)),
        ["concat(y, z, x, z, y, 1)"],
    ),
    "concat of pieces": (lambda b, x, y, z: b.concat(*b.split(x, 2, 5, 1)), ["x"]),
    "concat of pieces: among others": (
        lambda b, x, y, z: b.concat(y, *b.split(x, 2, 6), z, *b.split(x, 3, 5)),
        ["concat(y, x, z, x, 1)"],
    ),
    "concat of slices: all": (
        lambda b, x, y, z: (lambda s: (b.concat(s, b.slice(x, 2, 7), b.slice(x, 7, 8)), s))(
            b.slice(x, 0, 2)
        ),
        ["x", "slice(x, 1, 0, 2)"],
    ),
    "concat of slices: one for two": (
        lambda b, x, y, z: b.concat(b.slice(x, 1, 2), b.slice(x, 2, 7), y),
        ["concat(slice(x, 1, 1, 7), y, 1)"],
    ),
    "unsqueeze of squeeze": (
        lambda b, x, y, z: b.grow(b.drop(b.take("u", B, 1, 2), 1), 1),
        ["u"],
    ),
    "squeeze of unsqueeze": (lambda b, x, y, z: b.drop(b.grow(x, 1), 1), ["x"]),
    "pad by nothing": (lambda b, x, y, z: b.pad(x, 0, 7), ["x"]),
    "pad of pad": (lambda b, x, y, z: b.pad(b.pad(x, 1, 7), 2, 7), ["pad(x, 1, 3, 7)"]),
    "tail of all": (lambda b, x, y, z: b.tail(x, b.take("u", T, 8)), ["x"]),
    "tail of tail": (lambda b, x, y, z: b.tail(b.tail(x, z), y), ["tail(x, y, 1)"]),
    "tail of concat": (lambda b, x, y, z: b.tail(b.concat(x, z), z), ["z"]),
    "tail of concat: fewer": (
        lambda b, x, y, z: b.tail(b.concat(x, z), y),
        ["tail(z, y, 1)"],
    ),
    "tail of concat: two parts": (
        lambda b, x, y, z: b.tail(b.concat(x, y, z), x),
        ["concat(y, z, 1)"],
    ),
}


@pytest.mark.parametrize("name", MATCHES)
def test_matches(name):
    make, expected = MATCHES[name]
    assert apply(make) == expected


def test_rules_are_covered_and_in_the_manual():
    titles = {rule.__name__.replace("_", " ") for rules in RULES.values() for rule in rules}
    assert {name.partition(":")[0] for name in MATCHES} == titles
    manual = inspect.cleandoc(Canonicalize.__doc__ or "")
    rows = [line for line in manual.splitlines() if line.lstrip().startswith("| `")]
    for op, rules in RULES.items():
        assert sum(row.lstrip().startswith(f"| `{op}`") for row in rows) >= len(rules)


def two_users(b, x, y, z):
    inner = b.concat(y, z)
    return b.concat(inner, x), b.op("silu", inner)


def returned(b, x, y, z):
    inner = b.concat(y, z)
    return b.concat(inner, x), inner


def read_twice(b, x, y, z):
    inner = b.concat(y, z)
    return b.concat(inner, inner)


def shared_slices(b, x, y, z):
    first = b.slice(x, 0, 2)
    return b.concat(first, b.slice(x, 2, 7)), first


NEAR_MISSES = {
    "narrowed and widened": lambda b, x, y, z: b.cast(b.cast(x, "bf16"), "f32"),
    "between two narrow types": lambda b, x, y, z: b.cast(b.cast(b.cast(x, "f16"), "bf16"), "f16"),
    "widened and narrowed to another type": lambda b, x, y, z: b.cast(
        b.cast(b.cast(x, "f16"), "f32"), "bf16"
    ),
    "first element left out": lambda b, x, y, z: b.slice(x, 1, 8),
    "last element left out": lambda b, x, y, z: b.slice(x, 0, 7),
    "slices of other axes": lambda b, x, y, z: b.slice(b.slice(b.take("u", 4, 4), 0, 3), 1, 2, 0),
    "a part and a bit": lambda b, x, y, z: b.slice(b.concat(y, z), 0, 4),
    "a bit and a part": lambda b, x, y, z: b.slice(b.concat(y, z), 2, 8),
    "some padding": lambda b, x, y, z: b.slice(b.pad(x, 2), 0, 9),
    "only padding": lambda b, x, y, z: b.slice(b.pad(x, 2), 8, 10),
    "padded along another axis": lambda b, x, y, z: b.slice(b.pad(x, 2, axis=0), 0, 3),
    "other sizes": lambda b, x, y, z: b.split(b.concat(y, z), 5, 3),
    "fewer pieces": lambda b, x, y, z: b.split(b.concat(y, z, x), 3, 13),
    "joined along another axis": lambda b, x, y, z: b.split(b.concat(x, x, axis=0), 3, 5),
    "two users": two_users,
    "returned": returned,
    "read twice": read_twice,
    "nested in another axis": lambda b, x, y, z: (
        b.concat(b.concat(x, x, axis=0), axis=1)
        if False
        else b.concat(b.concat(x, x, axis=0), b.take("u", 2 * B, 1))
    ),
    "pieces in another order": lambda b, x, y, z: b.concat(*reversed(b.split(x, 3, 5))),
    "not all pieces": lambda b, x, y, z: b.concat(*b.split(x, 3, 2, 3)[:2]),
    "not from the first piece": lambda b, x, y, z: b.concat(*b.split(x, 3, 2, 3)[1:]),
    "pieces of two splits": lambda b, x, y, z: b.concat(b.split(x, 3, 5)[0], b.split(x, 4, 4)[1]),
    "pieces along another axis": lambda b, x, y, z: b.concat(
        *b.split(b.take("u", 4, 4), 2, 2, axis=0)
    ),
    "a gap between slices": lambda b, x, y, z: b.concat(b.slice(x, 0, 2), b.slice(x, 3, 8)),
    "overlapping slices": lambda b, x, y, z: b.concat(b.slice(x, 0, 3), b.slice(x, 2, 8)),
    "slices of two values": lambda b, x, y, z: b.concat(
        b.slice(x, 0, 2), b.slice(b.take("u", B, 8), 2, 8)
    ),
    "shared slices": shared_slices,
    "another axis dropped": lambda b, x, y, z: b.drop(b.grow(b.take("u", B, 1), 1), 2),
    "another axis grown": lambda b, x, y, z: b.grow(b.drop(b.take("u", 1, B), 0), 1),
    "another padding": lambda b, x, y, z: b.pad(b.pad(x, 1, 7), 2, 8),
    "padding of two axes": lambda b, x, y, z: b.pad(b.pad(x, 1), 2, axis=0),
    "a tail that may be shorter": lambda b, x, y, z: b.tail(
        b.take("u", B, T + 1), b.take("v", B, T)
    ),
    "tails of two axes": lambda b, x, y, z: b.tail(
        b.tail(b.take("u", T + 1, 8), b.take("v", T, 8), axis=0), y
    ),
    "a tail of a part and a bit": lambda b, x, y, z: b.tail(b.concat(x, y), z),
    "a tail of a bit of a part": lambda b, x, y, z: b.tail(b.concat(z, y, y), z),
    "a tail of parts of unknown size": lambda b, x, y, z: b.tail(b.concat(b.take("u", B, T), y), z),
}


@pytest.mark.parametrize("name", sorted(NEAR_MISSES.keys() - {"a tail of parts of unknown size"}))
def test_near_misses(name):
    apply(NEAR_MISSES[name], changed=False)


def test_symbolic_sizes():
    """Equal for all values of the symbols, or left alone."""
    b = Shapes()
    u, v, w = b.take("u", T, B), b.take("v", 7, B), b.take("w", T, B)
    joined = b.concat(u, v, axis=0)
    found = run(b, b.tail(joined, v, axis=0), b.tail(joined, b.concat(w, v, axis=0), axis=0))
    assert found == ["v", "concat(u, v, 0)"]


def test_names_and_locations():
    b = Shapes()
    x = b.take("x", B, 8)
    inner = b.at("model.a").slice(x, 1, 7)
    outer = b.at("model.b").op("slice", inner, attrs=SliceAttributes(1, 2, 4), name="kept")
    run(b, outer)
    (node,) = b.graph.nodes
    assert node.result.name == "kept"
    assert str(node.location) == "model.b <- canonicalize"


def test_remarks():
    b, ctx = Shapes(), PassContext()
    b.give(b.at("model.a").slice(b.take("x", B, 8), 0, 8))
    check_pass(Canonicalize(), b.module, ctx=ctx)
    assert [str(r) for r in ctx.remarks] == [
        "canonicalize: applied at @main, slice of model.a: slice of all"
    ]


def test_outputs_may_become_inputs():
    b = Shapes()
    x = b.take("x", B, 8)
    run(b, b.slice(x, 0, 8), b.concat(*b.split(x, 4, 4)))
    assert [o.value for o in b.graph.outputs] == [x, x]
    assert not b.graph.nodes


def test_rules_meet():
    """What one rule leaves is what another takes, against the order of the nodes too."""
    b = Shapes()
    x, y = b.take("x", B, 8), b.take("y", B, 3)
    parts = b.concat(b.slice(x, 0, 4), b.pad(b.slice(x, 4, 8), 0), y)
    left, right = b.split(b.slice(parts, 0, 8), 4, 4)
    assert run(b, b.drop(b.grow(b.concat(left, right), 0), 0)) == ["x"]


def test_a_user_less_lets_a_rule_apply():
    """The inner `concat` has a second user until that one is simplified."""
    b = Shapes()
    y, z = b.take("y", B, 3), b.take("z", B, 5)
    inner = b.concat(y, z)
    assert run(b, b.concat(inner, y), b.slice(inner, 0, 3)) == ["concat(y, z, y, 1)", "y"]


def test_a_user_more_makes_a_concat_the_outermost():
    b = Shapes()
    y, z = b.take("y", B, 3), b.take("z", B, 5)
    inner = b.concat(b.concat(y, z), y)
    outer = b.concat(b.slice(inner, 0, 11), z)
    assert run(b, b.concat(inner, y), outer) == [
        "concat(concat(y, z, y, 1), y, 1)",
        "concat(concat(y, z, y, 1), z, 1)",
    ]


@pytest.mark.parametrize("shape", ["chain of concats", "chain of slices", "slices of one concat"])
def test_work_grows_with_the_number_of_nodes(shape):
    """Eight times the nodes, far from 64 times the function calls."""

    def build(count: int) -> Shapes:
        b = Shapes()
        x, value = b.take("x", B, 1), b.take("y", B, count + 1)
        if shape == "chain of slices":
            for i in range(count):
                value = b.slice(value, 0, count - i)
        elif shape == "chain of concats":
            for _ in range(count):
                value = b.concat(value, x)
        else:
            joined = b.concat(*[x] * (count // 2))
            for i in range(count // 2):
                x = b.op("add", x, b.slice(joined, i, i + 1))
            b.give(x)
        b.give(value)
        return b

    def calls(count: int) -> int:
        module, seen = build(count).module, 0

        def tick(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += 1

        sys.setprofile(tick)
        try:
            assert Canonicalize().run(module, PassContext())
        finally:
            sys.setprofile(None)
        return seen

    assert calls(800) < 16 * calls(100)


def test_a_call_nobody_reads_stays():
    """Its graph would count as an entry; `dce` removes both."""
    module = Module("m")
    module.symbols["b"] = SymbolRange(1, 2)
    callee = Builder(module, "f")
    callee.output(callee.input("x", DType.I64, (B, 3), Role.ACTIVATION), "y", Role.ACTIVATION)
    caller = Builder(module, "g")
    x = caller.input("x", DType.I64, (B, 3), Role.ACTIVATION)
    called = caller.op("call", x, attrs=CallAttributes("f"))
    caller.op("concat", called, attrs=AxisAttributes(1))
    check_pass(Canonicalize(), module)
    assert [n.op.name for n in module.graphs["g"].nodes] == ["call"]


@given(modules(dead=True))
def test_random_modules(module):
    check_pass(Canonicalize(), module)


MOVES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
    max_size=12,
)


def move(b: Shapes, pool: list[Value], kind: int, *numbers: int) -> list[Value]:
    """One random movement of values of the pool, which all have three axes, the first `b`."""
    first, second, third = numbers
    x = pool[first % len(pool)]
    axis = 1 + second % 2
    size = x.type.shape[axis]
    assert isinstance(size, int)
    cut = third % size
    if kind == 0:
        return [b.slice(x, cut, size, axis), b.slice(x, 0, cut + 1, axis)]
    if kind == 1:
        return list(b.split(x, *((cut, size - cut) if cut else (size,)), axis=axis))
    if kind == 2:
        return [b.pad(x, third % 3, 1, axis)]
    if kind == 3:
        return [b.grow(b.drop(b.slice(x, cut, cut + 1, axis), axis), 1)]
    others = [v for v in pool if v.type.shape[3 - axis] == x.type.shape[3 - axis]]
    other = others[third % len(others)]
    if kind == 4 and other.type.shape[axis] <= size:
        return [b.tail(x, other, axis)]
    return [b.concat(*((x, other, x) if kind == 5 else (other, x)), axis=axis)]


@given(MOVES, st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_random_movements(moves, outputs):
    b = Shapes()
    pool = [b.take("x", B, 3, 2), b.take("y", B, 2, 4)]
    for kind, *numbers in moves:
        pool += move(b, pool, kind, *numbers)
    b.give(*(pool[i % len(pool)] for i in outputs))
    check_pass(Canonicalize(), b.module)


@FEWER
@given(pair_options())
def test_random_pairs(options):
    module = pair(options)
    text = print_module(module)
    if "unbound" not in text:
        check_pass(Canonicalize(), module, pair_inputs(module, options))
