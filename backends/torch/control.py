"""Calling another graph of the module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops.control import CallAttributes


def call(call: Call[CallAttributes]) -> tuple[Tensor, ...]:
    """Evaluate the callee."""
    return call.run(call.attrs.callee, call.operands)


KERNELS: Mapping[str, Kernel] = {"call": call}
