"""What an encoding is: components, their shapes, exact dequantization, spelling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, ClassVar, TypeAlias

from numpy.typing import NDArray

from edgecc.ir.types import DType

Array: TypeAlias = NDArray[Any]
IntShape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of an encoded weight.

    Attributes:
        dtype: Element type as stored.
        shape: Shape as stored (packed dimensions count bytes).
        rows: Whether axis 0 runs over the rows of the weight, so that a block of rows can be cut.
        row_group: How many rows of the weight one step along axis 0 stands for: 128 for the scales
            of 128 x 128 blocks, 2 where a byte holds a value of two rows. The last group may be
            partial.
        below: What integers are that index something: from zero to this, which is left out. None
            for all others.
    """

    dtype: DType
    shape: IntShape
    rows: bool = True
    row_group: int = 1
    below: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes."""
        return self.dtype.nbytes(prod(self.shape))

    def cut(self, start: int, stop: int) -> tuple[int, int]:
        """The range of axis 0 that holds rows `start:stop` of the weight, or more than those."""
        return start // self.row_group, -(-stop // self.row_group)


class Encoding(ABC):
    """Layout of one weight. Subclasses are frozen dataclasses."""

    kind: ClassVar[str]

    @abstractmethod
    def components(self, shape: IntShape) -> dict[str, Component]:
        """Component tensors of a weight of logical `shape`, in storage order.

        Raises:
            ValueError: The encoding cannot hold this shape (odd or indivisible width, rank).
        """

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact values of a block of rows, float32 (integers stay integers).

        Args:
            parts: Component arrays; those with `rows` hold the same block of rows, which starts at
                a multiple of `row_group`.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Spelling in IR text, for example `nvfp4<block=16>`."""

    def nbytes(self, shape: IntShape) -> int:
        """Bytes all components of a weight of logical `shape` take."""
        return sum(c.nbytes for c in self.components(shape).values())

    def row_group(self, shape: IntShape) -> int:
        """Blocks of rows may start at multiples of this: every component can be cut there."""
        return lcm(*(c.row_group for c in self.components(shape).values()))


def require_matrix(kind: str, shape: IntShape, *, columns: int = 1, rows: int = 1) -> IntShape:
    """The shape, if it is `[N, K]` with N and K multiples of `rows` and `columns`.

    Raises:
        ValueError: It is not.
    """
    if len(shape) != 2 or shape[0] % rows or shape[1] % columns:
        needs = [
            f"{axis} a multiple of {size}"
            for axis, size in (("N", rows), ("K", columns))
            if size > 1
        ]
        wanted = " with " + " and ".join(needs) if needs else ""
        raise ValueError(f"{kind} needs a [N, K] weight{wanted}, found {list(shape)}")
    return shape


def require_positive(name: str, value: int) -> None:
    """Check a block size.

    Raises:
        ValueError: It is below 1.
    """
    if value < 1:
        raise ValueError(f"{name} must be positive, found {value}")


def spell(kind: str, *arguments: str) -> str:
    """`kind<a, b>`; empty arguments are left out."""
    return f"{kind}<{', '.join(filter(None, arguments))}>"
