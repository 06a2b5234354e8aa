"""Values that depend on no input."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops import Attributes


def constant(call: Call[Attributes]) -> Tensor:
    """The decoded weight."""
    return call.weights[0].dense()


KERNELS: Mapping[str, Kernel] = {"constant": constant}
