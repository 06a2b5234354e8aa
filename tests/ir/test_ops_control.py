from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgecc.errors import RequestError
from edgecc.ir import Builder, Interpreter, Module, Role, SymbolRange, verify
from edgecc.ir.ops import TypeRuleError, control
from edgecc.ir.ops.base import GraphSignature
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.shape import AxisAttributes
from helpers.ops import Array, infer, tensor, values
from helpers.weights import dense


def signature(inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, GraphSignature]:
    types = [tuple(map(tensor, group)) for group in (inputs, outputs)]
    return {"f": GraphSignature(*types)}


def call(inputs: Sequence[str], operands: Sequence[str], outputs: Sequence[str]) -> list[str]:
    return infer("call", operands, (), CallAttributes("f"), signature(inputs, outputs))


def test_the_family_is_call():
    assert [op.name for op in control.OPS] == ["call"]


@pytest.mark.parametrize(
    ("inputs", "operands", "outputs", "expected"),
    [
        (["f32[h, 4]"], ["f32[t, 4]"], ["f32[h, 7]", "i64[h]"], ["f32[t, 7]", "i64[t]"]),
        (["f32[h, 4]"], ["f32[3, 4]"], ["f32[2*h + 1]"], ["f32[7]"]),
        (["f32[h, 4]"], ["f32[c + 7, 4]"], ["f32[h - 7]"], ["f32[c]"]),
        (["f32[h + 2]", "i64[h]"], ["f32[t]", "i64[t - 2]"], ["f32[h]"], ["f32[t - 2]"]),
        (["f32[h, k]"], ["f32[k, h]"], ["f32[k, h]"], ["f32[h, k]"]),
        (["f32[2*h]", "f32[h]"], ["f32[2*t]", "f32[t]"], ["f32[3*h]"], ["f32[3*t]"]),
        ([], [], ["f32[2]"], ["f32[2]"]),
        (["f32[h + 2]"], ["f32[2]"], ["f32[h]"], ["f32[0]"]),
    ],
)
def test_symbols_of_the_callee_are_bound_by_the_operands(inputs, operands, outputs, expected):
    assert call(inputs, operands, outputs) == expected


@pytest.mark.parametrize(
    ("inputs", "operands", "outputs", "message"),
    [
        (["f32[h]"], [], ["f32[h]"], "number of inputs: expected 1, got 0"),
        (["f32[h]"], ["f32[t]"] * 2, ["f32[h]"], "number of inputs: expected 1, got 2"),
        (["f32[h]"], ["i64[t]"], ["f32[h]"], "dtype of an input of @f"),
        (["f32[h]"], ["f32[t, 1]"], ["f32[h]"], "rank of an input of @f: expected 1, got 2"),
        (["f32[h, 4]"], ["f32[t, 5]"], ["f32[h]"], "shape of an input of @f"),
        (["f32[h, 4]"], ["f32[t, k]"], ["f32[h]"], "shape of an input of @f"),
        (["f32[h, h]"], ["f32[t, c]"], ["f32[h]"], "shape of an input of @f"),
        (["f32[h]", "f32[2*h]"], ["f32[t]", "f32[3*t]"], ["f32[h]"], "shape of an input"),
        (["f32[2*h]"], ["f32[2*t]"], ["f32[h]"], "symbol h of the callee is bound by no input"),
        (["f32[4]"], ["f32[4]"], ["f32[h]"], "symbol h of the callee is bound by no input"),
        (["f32[h + 3]"], ["f32[2]"], ["f32[h]"], r"an axis of 2 is not h \+ 3"),
    ],
)
def test_refuses(inputs, operands, outputs, message):
    with pytest.raises(TypeRuleError, match=message):
        call(inputs, operands, outputs)


def test_unknown_callee():
    with pytest.raises(TypeRuleError, match="no graph @g"):
        infer("call", [], (), CallAttributes("g"), signature([], []))


def module_with_chain() -> tuple[Module, Array, Array]:
    """`main` calls `middle` on twice as many rows, which calls `leaf`, which has a weight."""
    rng = np.random.default_rng(1)
    w1, w2 = values(rng, 3, 4), values(rng, 2, 3)
    module = Module("chain")
    module.symbols.update({s: SymbolRange(0, 64) for s in ("t", "h", "k")})
    module.weights.add("w1", dense(w1))
    module.weights.add("w2", dense(w2))

    main = Builder(module, "main")
    x = main.input("x", *_split("f32[t, 4]"), Role.ACTIVATION)
    leaf = Builder(module, "leaf")
    y = leaf.input("y", *_split("f32[k, 3]"), Role.ACTIVATION)
    leaf.output(leaf.op("linear", y, weights=("w2",)), "out", Role.ACTIVATION)
    leaf.output(y, "same", Role.ACTIVATION)
    middle = Builder(module, "middle")
    z = middle.input("z", *_split("f32[h, 4]"), Role.ACTIVATION)
    inner = middle.node(
        "call", [middle.op("linear", z, weights=("w1",))], attrs=CallAttributes("leaf")
    )
    for i, result in enumerate(inner.results):
        middle.output(result, f"r{i}", Role.ACTIVATION)
    twice = main.op("concat", x, x, attrs=AxisAttributes(0))
    outer = main.node("call", [twice], attrs=CallAttributes("middle"))
    for i, result in enumerate(outer.results):
        main.output(result, f"r{i}", Role.ACTIVATION)
    return module, w1, w2


def _split(text: str):
    made = tensor(text)
    return made.dtype, made.shape


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chains_of_calls(dtype):
    module, w1, w2 = module_with_chain()
    assert verify(module) == []
    assert [str(v.type) for v in module.graphs["main"].nodes[1].results] == [
        "f32[2*t, 2]",
        "f32[2*t, 3]",
    ]
    x = values(np.random.default_rng(2), 5, 4)
    found = Interpreter(module, dtype).run("main", {"x": x})
    hidden = np.concatenate([x, x]) @ w1.T
    np.testing.assert_allclose(found["r1"], hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["r0"], hidden @ w2.T, rtol=1e-5, atol=1e-6)
    assert found["r0"].dtype == dtype


def test_sizes_are_checked_inside_the_callee():
    module = Module("sizes")
    module.symbols.update({s: SymbolRange(0, 64) for s in ("t", "c", "h")})
    main, f = Builder(module, "main"), Builder(module, "f")
    inner = [f.input(n, *_split("f32[h]"), Role.ACTIVATION) for n in ("a", "b")]
    f.output(f.op("add", *inner), "y", Role.ACTIVATION)
    outer = [main.input(n, *_split("f32[t]"), Role.ACTIVATION) for n in ("a", "b")]
    main.output(main.op("call", *outer, attrs=CallAttributes("f")), "y", Role.ACTIVATION)
    with pytest.raises(RequestError, match=r"@f: input %b: expected f32\[h\], got shape \(3,\)"):
        Interpreter(module)._call("f", [np.zeros(2), np.zeros(3)])
