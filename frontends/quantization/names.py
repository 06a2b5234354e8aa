"""How the tensors of one weight are called, by every producer.

A weight has one tensor that holds its values, and sidecars that say how to read them.
"""

from __future__ import annotations

from collections.abc import Container

VALUES = (".weight", ".weight_packed", ".qweight", "_blocks")
"""What follows the name of a module in the name of the tensor with its values: ModelOpt and
unquantized, compressed-tensors, AutoAWQ and GPTQ, gpt-oss."""


def as_weight(name: str) -> str:
    """The name of a tensor, `module.weight` for whatever tensor holds the values of a module."""
    ending = next((e for e in VALUES[1:] if name.endswith(e)), None)
    return name if ending is None else f"{name.removesuffix(ending)}.weight"


def value_tensor(tensors: Container[str], module: str) -> str | None:
    """The tensor that holds the values of a module, None if none is stored."""
    return next(iter(value_tensors(tensors, module)), None)


def value_tensors(tensors: Container[str], module: str) -> list[str]:
    """All tensors that hold values of a module: one, unless two exports are mixed."""
    return [module + ending for ending in VALUES if module + ending in tensors]
