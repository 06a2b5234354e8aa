"""The rules of all ops, one module per family, named as in `edgecc.ir.ops`."""

from edgecc.testing.families import (
    attention,
    constant,
    control,
    elementwise,
    matmul,
    norm,
    quantization,
    sampling,
    shape,
    state,
    vision,
)
from edgecc.testing.rules import Rule

RULES: tuple[Rule, ...] = tuple(
    rule
    for family in (
        elementwise,
        norm,
        matmul,
        shape,
        sampling,
        attention,
        state,
        constant,
        control,
        quantization,
        vision,
    )
    for rule in family.RULES
)
"""Every rule, simplest first. An op without one fails a test."""

__all__ = ["RULES"]
