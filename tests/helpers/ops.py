"""One op at a time: types from text, shape rules, and references against an independent formula."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.ir import Builder, DType, Interpreter, Module, Role, SymbolRange, TensorType, Weight
from edgecc.ir.ops import OPS, Attributes, get_op
from edgecc.ir.ops.base import GraphSignature
from edgecc.ir.types import Dim, sym, symbols_of

Array: TypeAlias = NDArray[Any]


class Evaluator(Protocol):
    """Evaluates graphs of one module: the interpreter, or an oracle with the same interface."""

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs of a graph by name."""
        ...


MakeEvaluator: TypeAlias = Callable[[Module, type[np.floating[Any]]], Evaluator]
"""Makes the evaluator of a module in float32 or float64."""


def tensor(text: str) -> TensorType:
    """The type spelled `f32[b, 2*t + 1, 8]`."""
    found = re.fullmatch(r"(\w+)\[(.*)\]", text)
    assert found is not None, text
    return TensorType(DType(found[1]), tuple(_dim(d) for d in found[2].split(",") if d.strip()))


def _dim(text: str) -> Dim:
    total: Dim = 0
    for term in re.findall(r"-?\s*[\w*]+", text):
        value: Dim = -1 if term[0] == "-" else 1
        for factor in term.lstrip("- ").split("*"):
            value = value * int(factor) if factor.isdigit() else value * sym(factor)
        total = total + value
    return total


def infer(
    op: str,
    types: Sequence[str],
    weights: Sequence[Weight] = (),
    attrs: Attributes | None = None,
    scope: Mapping[str, GraphSignature] | None = None,
) -> list[str]:
    """Result types of an op, as text.

    Raises:
        TypeRuleError: The operands do not fit.
    """
    rule = get_op(op)
    attrs = Attributes() if attrs is None else attrs
    rule.check_counts(len(types), len(weights))
    rule.check_attributes(attrs)
    found = rule.infer([tensor(t) for t in types], list(weights), attrs, scope or {})
    return [str(t) for t in found]


def run_op(
    op: str,
    operands: Sequence[Array],
    weights: Sequence[Weight] = (),
    attrs: Attributes | None = None,
    *,
    dtype: type[np.floating[Any]] = np.float32,
    types: Sequence[str] = (),
    evaluator: MakeEvaluator = Interpreter,
) -> list[Array]:
    """Results of an op on arrays, computed on a graph of one node.

    Args:
        op: Name of the op.
        operands: Arrays; floating-point ones become f32 inputs.
        weights: Weights of the op.
        attrs: Its attributes.
        dtype: Type of the evaluation.
        types: Types of the inputs, for example with symbols; default those of the arrays.
        evaluator: What computes them.
    """
    module = Module("one op")
    builder = Builder(module, "main")
    inputs = []
    for i, array in enumerate(operands):
        kind = DType.F32 if array.dtype.kind == "f" else DType.of(array.dtype)
        made = tensor(types[i]) if types else TensorType(kind, array.shape)
        for symbol in symbols_of(made.shape):
            module.symbols[symbol] = SymbolRange(0, 1 << 20)
        inputs.append(builder.input(f"x{i}", made.dtype, made.shape, Role.ACTIVATION))
    symbols = [module.weights.add(f"w{i}", w) for i, w in enumerate(weights)]
    node = builder.node(op, inputs, symbols, attrs)
    for i, result in enumerate(node.results):
        builder.output(result, f"y{i}", Role.ACTIVATION)
    values = evaluator(module, dtype).run("main", {f"x{i}": a for i, a in enumerate(operands)})
    return list(values.values())


@dataclass(frozen=True)
class Case:
    """An op on arrays and what a formula written down in the test gives.

    Attributes:
        operands: Float64 (with values that float32 holds) and int64 arrays.
        expected: Float64 and int64 arrays.
        weights: Weights of the op.
        attrs: Its attributes.
        types: Operand types with symbols; the results must be the same with them.
        results: Result types with those symbols.
    """

    operands: tuple[Array, ...]
    expected: tuple[Array, ...]
    weights: tuple[Weight, ...] = ()
    attrs: Attributes | None = None
    types: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


Cases: TypeAlias = Mapping[str, Callable[[np.random.Generator], Case]]


def check_reference(
    op: str, case: Case, *, tolerance: float = 3e-6, evaluator: MakeEvaluator = Interpreter
) -> None:
    """Compare an op with its expected values in float32 and float64, with and without symbols."""
    for dtype, bound in ((np.float32, tolerance), (np.float64, 1e-13)):
        options: Any = {"dtype": dtype, "evaluator": evaluator}
        found = run_op(op, case.operands, case.weights, case.attrs, **options)
        assert len(found) == len(case.expected)
        for value, expected in zip(found, case.expected, strict=True):
            assert value.shape == expected.shape
            if expected.dtype.kind == "f":
                assert value.dtype == dtype
                scale = max(1.0, float(np.abs(expected).max(initial=0)))
                np.testing.assert_allclose(value, expected, rtol=0, atol=bound * scale)
            else:
                assert value.dtype == expected.dtype
                np.testing.assert_array_equal(value, expected)
        symbolic = run_op(op, case.operands, case.weights, case.attrs, types=case.types, **options)
        assert_same_bits(symbolic, found)
    assert infer(op, case.types, case.weights, case.attrs) == list(case.results)


def assert_same_bits(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Check that arrays are equal bit for bit, zeros and NaNs included."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


def check_rows(
    op: str,
    operands: Sequence[Array],
    weights: Sequence[Weight] = (),
    attrs: Attributes | None = None,
    *,
    axis: int = 0,
    shared: Sequence[int] = (),
    result_axis: int | None = None,
) -> None:
    """Check that rows computed one by one have the bits of rows computed together.

    Args:
        op: Name of the op.
        operands: Arrays with several rows along `axis`.
        weights: Weights of the op.
        attrs: Its attributes.
        axis: Axis of the rows.
        shared: Operands that have no row axis.
        result_axis: Axis of the rows in the results; default `axis`.
    """
    out_axis = axis if result_axis is None else result_axis
    count = next(o.shape[axis] for i, o in enumerate(operands) if i not in shared)
    assert count > 1
    for dtype in (np.float32, np.float64):
        together = run_op(op, operands, weights, attrs, dtype=dtype)
        for row in range(count):
            single = [
                o if i in shared else np.take(o, [row], axis=axis) for i, o in enumerate(operands)
            ]
            alone = run_op(op, single, weights, attrs, dtype=dtype)
            assert_same_bits(alone, [np.take(r, [row], axis=out_axis) for r in together])


def values(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """Float64 array of normal deviates that float32 holds exactly."""
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(np.float64)


def family(ops: Sequence[Any]) -> set[str]:
    """Names of the ops of one module, all of them in the table."""
    names = {op.name for op in ops}
    assert names <= set(OPS)
    return names
