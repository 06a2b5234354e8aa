"""Plain elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgecc.ir.encodings.base import Array, Component, Encoding, IntShape, spell
from edgecc.ir.types import DType


@dataclass(frozen=True, slots=True)
class Dense(Encoding):
    """Plain elements of one dtype; one component, `weight`."""

    dtype: DType
    kind: ClassVar[str] = "dense"

    def components(self, shape: IntShape) -> dict[str, Component]:
        """One tensor of the weight's own shape."""
        return {"weight": Component(self.dtype, shape, rows=len(shape) > 0)}

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """The elements; 16-bit floats widen exactly to float32, float64 stays."""
        weight = parts["weight"]
        if self.dtype.is_float and self.dtype is not DType.F64:
            return weight.astype(np.float32)
        return weight

    def __str__(self) -> str:
        return spell(self.kind, self.dtype.value)
