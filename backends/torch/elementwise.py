"""Elementwise arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.backends.torch.tensors import round_to
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.elementwise import CastAttributes, GeluAttributes
from edgecc.ir.types import DType


def add(call: Call[Attributes]) -> Tensor:
    """Sum."""
    return torch.add(*call.operands)


def sub(call: Call[Attributes]) -> Tensor:
    """Difference."""
    return torch.sub(*call.operands)


def mul(call: Call[Attributes]) -> Tensor:
    """Product."""
    return torch.mul(*call.operands)


def silu(call: Call[Attributes]) -> Tensor:
    """Swish with slope 1."""
    return functional.silu(call.operands[0])


def sigmoid(call: Call[Attributes]) -> Tensor:
    """Logistic function."""
    return torch.sigmoid(call.operands[0])


def tanh(call: Call[Attributes]) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(call.operands[0])


def swiglu(call: Call[Attributes]) -> Tensor:
    """Swish of the gate times up."""
    gate, up = call.operands
    return functional.silu(gate) * up


def cast(call: Call[CastAttributes]) -> Tensor:
    """Rounded to the wanted type, and held as before."""
    return round_to(call.operands[0], DType(call.attrs.dtype))


def gelu(call: Call[GeluAttributes]) -> Tensor:
    """`torch.nn.functional.gelu`."""
    return functional.gelu(call.operands[0], approximate=call.attrs.approximate)


KERNELS: Mapping[str, Kernel] = {
    "add": add,
    "cast": cast,
    "gelu": gelu,
    "mul": mul,
    "silu": silu,
    "sigmoid": sigmoid,
    "sub": sub,
    "swiglu": swiglu,
    "tanh": tanh,
}
