"""What a recipe is: see `edgecc.ir.recipes`, which lists all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from edgecc.ir.encodings import Encoding, IntShape
from edgecc.ir.weights import Derived, Param, Parts, Weight, WeightTable


class Recipe(ABC):
    """One way to make a weight."""

    name: ClassVar[str]
    expands: ClassVar[bool] = False
    repacks: ClassVar[bool] = False
    """Whether it only gives stored codes another order: as good as stored itself."""
    inputs: ClassVar[int | None] = 1
    """How many inputs it takes; None: at least one."""
    sources: ClassVar[int | None] = None
    """Of how many inputs, counted from the first, it has the values; None: of all. The others take
    part in a scale only."""

    def check(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """Shape and encoding of the result.

        Raises:
            ValueError: The number of inputs is wrong, or they cannot be combined.
        """
        wanted = self.inputs
        if len(inputs) != wanted and (wanted is not None or not inputs):
            expected = "at least 1" if wanted is None else wanted
            raise ValueError(f"{self.name} takes {expected} inputs, got {len(inputs)}")
        return self.result(inputs, params)

    @abstractmethod
    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """Shape and encoding for the right number of inputs; see `check`."""

    @abstractmethod
    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Component arrays of rows `start:stop` of the result."""
