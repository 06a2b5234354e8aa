"""Normalizations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes


def rms_norm(call: Call[RmsNormAttributes]) -> Tensor:
    """`torch.nn.functional.rms_norm` over each group of the last axis."""
    (x,) = call.operands
    weight = call.weights[0].dense()
    grouped = torch.unflatten(x, -1, (call.attrs.groups, weight.shape[0]))
    return functional.rms_norm(grouped, weight.shape, weight, call.attrs.eps).flatten(-2)


def add_rms_norm(call: Call[AddRmsNormAttributes]) -> tuple[Tensor, Tensor]:
    """The sum and its `torch.nn.functional.rms_norm`, the other way around."""
    total = torch.add(*call.operands)
    weight = call.weights[0].dense()
    return functional.rms_norm(total, weight.shape, weight, call.attrs.eps), total


def layer_norm(call: Call[LayerNormAttributes]) -> Tensor:
    """`torch.nn.functional.layer_norm`."""
    (x,) = call.operands
    weight, bias = (w.dense() for w in call.weights)
    return functional.layer_norm(x, weight.shape, weight, bias, call.attrs.eps)


KERNELS: Mapping[str, Kernel] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
}
