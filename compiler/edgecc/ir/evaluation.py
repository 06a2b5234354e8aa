"""What every evaluator of graphs does around the arithmetic: find, order, check, drop.

Only sizes and names are looked at here, so that evaluators on other tensors than NumPy's refuse the
same calls with the same words and still share no arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from edgecc.errors import RequestError, did_you_mean
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.types import DimExpr, TensorType

T = TypeVar("T")


def find_graph(module: Module, name: str) -> Graph:
    """The graph called `name`.

    Raises:
        RequestError: There is none.
    """
    if name not in module.graphs:
        raise RequestError(
            "run/unknown-graph", f"no graph @{name}", help=did_you_mean(name, module.graphs)
        )
    return module.graphs[name]


def positional(graph: Graph, inputs: Mapping[str, T]) -> list[T]:
    """The inputs of a graph by position.

    Raises:
        RequestError: One is missing or unknown.
    """
    names = {i.name for i in graph.inputs}
    if names != set(inputs):
        raise RequestError(
            "run/inputs", f"graph @{graph.name} takes {sorted(names)}, got {sorted(inputs)}"
        )
    return [inputs[i.name] for i in graph.inputs]


def check_cast(
    what: str, found: np.dtype[Any], wanted: np.dtype[Any], expected: TensorType
) -> None:
    """Check that elements of an input can become `wanted` without losing their kind.

    Raises:
        RequestError: They cannot: fractions where integers are wanted, for example.
    """
    if not np.can_cast(found, wanted, "same_kind"):
        raise RequestError("run/dtype", f"{what}: expected {expected}, got {found}")


def match_shape(
    what: str, shape: Sequence[int], expected: TensorType, binding: dict[str, int]
) -> None:
    """Check a shape against a type and learn the values of symbols that alone make an axis.

    Args:
        what: What has the shape, for messages.
        shape: The sizes.
        expected: The type.
        binding: Values of symbols so far; grows.

    Raises:
        RequestError: They do not match.
    """
    fits = len(shape) == expected.rank
    for size, dim in zip(shape, expected.shape, strict=False):
        wanted = dim
        if isinstance(dim, DimExpr):
            if len(dim.terms) == 1 and dim.terms[0][1] > 0:
                ((symbol, factor),) = dim.terms
                binding.setdefault(symbol, max(size - dim.constant, 0) // factor)
            wanted = dim.substitute(binding)
        fits &= not isinstance(wanted, int) or wanted == size
    if not fits:
        raise RequestError("run/shape", f"{what}: expected {expected}, got shape {tuple(shape)}")


def last_uses(nodes: Sequence[Node], kept: Iterable[Value]) -> dict[int, list[Value]]:
    """Node index to the values nobody needs after it.

    Args:
        nodes: What is evaluated, in order.
        kept: Values that are needed at the end.
    """
    last: dict[Value, int] = {}
    for index, node in enumerate(nodes):
        for value in (*node.operands, *node.results):
            last[value] = index
    for value in kept:
        last.pop(value, None)
    dead: dict[int, list[Value]] = {}
    for value, index in last.items():
        dead.setdefault(index, []).append(value)
    return dead
