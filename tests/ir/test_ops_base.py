"""Rules every op obeys, whatever it computes."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

from edgecc.errors import RequestError, UnsupportedError
from edgecc.ir import Module
from edgecc.ir.ops import OPS, Attributes, Op, Trait, TypeRuleError, WeightView, get_op
from edgecc.ir.ops.base import check_indices
from helpers.weights import dense, packed


@pytest.mark.parametrize("name", OPS)
def test_documentation(name):
    op = type(OPS[name])
    for part in (op, op.infer, op.evaluate, op.attributes):
        text = inspect.cleandoc(part.__doc__ or "")
        assert len(text) > 5, f"{part} has no docstring"
        assert text.split("\n")[0].rstrip().endswith((".", ";")), f"{part}: {text}"
    if op.attributes is not Attributes:
        for field in dataclasses.fields(op.attributes):
            assert f"`{field.name}`" in op.attributes.__doc__ or field.name in ("heads", "kv_heads")


@pytest.mark.parametrize("name", OPS)
def test_declaration(name):
    op = OPS[name]
    assert op.name == name
    assert name.isidentifier()
    assert name == name.lower()
    for group in (op.operands, op.weights, op.results):
        assert isinstance(group, tuple)
        assert len(set(group)) == len(group)
    assert op.operands or op.weights
    required = [w for w in op.weights if not w.endswith("?")]
    assert list(op.weights[: len(required)]) == required, "optional weights come last"
    assert Trait.COMMUTATIVE not in op.traits or len(op.operands) == 2
    assert repr(op) == f"<op {name}>"


@pytest.mark.parametrize("name", OPS)
def test_attributes_are_values(name):
    kind = OPS[name].attributes
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in vars(kind)
    assert kind.__hash__ is not None


def test_tables_and_names_agree():
    assert all(get_op(name) is op for name, op in OPS.items())
    assert len({type(op) for op in OPS.values()}) == len(OPS)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("liner", "did you mean linear"), ("Silu", "silu"), ("zzz", "see the op table")],
)
def test_unknown_op(name, hint):
    with pytest.raises(UnsupportedError, match=f"unknown op '{name}'") as caught:
        get_op(name)
    assert caught.value.id == "ir/unknown-op"
    assert hint in caught.value.diagnostics[0].help


class TwoPlus(Op[Attributes]):
    """One operand, then any number; one weight, then at most one."""

    name = "two_plus"
    operands = ("x", "more")
    weights = ("w", "bias?")
    variadic = True

    def infer(self, operands, weights, attrs, scope):
        return ()

    def evaluate(self, operands, weights, attrs, ctx):
        return ()


@pytest.mark.parametrize(
    ("operands", "weights", "fine"),
    [(1, 1, True), (2, 2, True), (9, 1, True), (0, 1, False), (1, 0, False), (1, 3, False)],
)
def test_counts(operands, weights, fine):
    if fine:
        TwoPlus().check_counts(operands, weights)
    else:
        with pytest.raises(TypeRuleError, match="expects"):
            TwoPlus().check_counts(operands, weights)


def test_weight_view_is_dequantized_in_the_evaluation_dtype():
    module, made = Module("m"), packed(np.random.default_rng(0), 6, 8)
    module.weights.add("w", made.weight)
    module.weights.add("ids", dense(np.array([1, 2])))
    for dtype in (np.float32, np.float64):
        view = WeightView(module.weights, "w", np.dtype(dtype))
        for found in (view.dense(), np.concatenate([b for *_, b in view.blocks()])):
            assert found.dtype == dtype
            assert np.array_equal(found, made.values)
        assert np.array_equal(view.rows(np.array([[5], [0]])), made.values[[[5], [0]]])
        assert view.rows(np.zeros((0, 2), np.int64)).shape == (0, 2, 8)
    assert WeightView(module.weights, "ids", np.dtype(np.float32)).dense().dtype == np.int64


def test_weight_view_follows_aliases():
    module = Module("m")
    module.weights.add("w", dense(np.ones((2, 2))))
    module.weights.add("other", dense(np.zeros((3, 3))))
    module.weights.alias("other", "w")
    view = WeightView(module.weights, "other", np.dtype(np.float32))
    assert view.weight.shape == (2, 2)
    assert np.array_equal(view.dense(), np.ones((2, 2)))


def test_check_indices():
    check_indices("x", np.array([0, 4]), 5)
    check_indices("x", np.zeros(0, np.int64), 0)
    for bad in ([0, 5], [-1], [[1], [7]]):
        with pytest.raises(RequestError, match=r"x: index -?\d is outside 0\.\.4"):
            check_indices("x", np.array(bad), 5)
