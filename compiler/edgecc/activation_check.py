"""Are quantized activations right? What can be said about rounding that is chaotic as a whole.

A value that is rounded to 16 numbers goes up or down by its last bit, and after a few layers two
correct evaluations of one network differ by as much as either does from the unrounded one. So the
rounding is taken out where graphs are compared, and looked at where it happens: each op has to use
the scale that is stored with the weights it is multiplied by, and to lose no more than its format
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from edgecc.backends.base import Array
from edgecc.backends.runtime.golden import QUANTIZED, Check, relative_rms
from edgecc.ir.core import Module, Node
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.ir.recipes import activation_scale

LOCAL_TOLERANCE: Mapping[str, float] = {"nvfp4": 0.125, "fp8": 0.04}
"""Largest relative error (root mean square) of one rounding. In NVFP4 single values are off by up
to 17/96 of the largest in their block, in FP8 by 1/16 of themselves; the inputs of all layers
of the shipped checkpoints lose 0.06 to 0.10 and 0.023 to 0.029. Values that saturate lose more."""

QUANTIZED_TOLERANCE = QUANTIZED.values
"""Largest relative error (root mean square) of logits and hidden states with all roundings: the
same before a build and on the device."""


class ActivationProbe(Interpreter):
    """Evaluates as if activations were not quantized, and measures what each rounding would lose.

    Attributes:
        errors: By encoding, the relative errors (root mean square) of all roundings.
    """

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.errors: dict[str, list[float]] = {}

    def node(self, node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Evaluate one node; what would be rounded goes through."""
        results = super().node(node, operands)
        attrs = node.attrs
        if not isinstance(attrs, FakeQuantizeAttributes):
            return results
        x = operands[0].astype(np.float64)
        self.errors.setdefault(attrs.encoding, []).append(relative_rms(results[0], x))
        return (operands[0],)


def activation_checks(
    module: Module,
    errors: Mapping[str, Sequence[float]],
    rounded: Mapping[str, Array],
    expected: Mapping[str, Array],
) -> Iterator[Check]:
    """What is known about the roundings of a module.

    Args:
        module: After all passes.
        errors: Of single roundings, by encoding; see `ActivationProbe`.
        rounded: Golden tensors of the module as it is.
        expected: Golden tensors of the reference.
    """
    if not errors:
        return
    wrong, count = _other_scales(module)
    yield Check("activation scales", wrong / count, 0.0, wrong == 0)
    for encoding, found in errors.items():
        bound, worst = LOCAL_TOLERANCE[encoding.partition("<")[0]], max(found)
        yield Check(f"activations in {encoding}", worst, bound, worst <= bound)
    for name in ("logits", "hidden_tap"):
        if name in expected:
            error = relative_rms(rounded[name], expected[name])
            passed = error <= QUANTIZED_TOLERANCE
            yield Check(f"quantized {name}", error, QUANTIZED_TOLERANCE, passed)


def _other_scales(module: Module) -> tuple[int, int]:
    """How many layers read activations rounded by another scale than that of their weight.

    Returns:
        The number, and that of all layers that read rounded activations.
    """
    read, wrong, count = module.weights.read, 0, 0
    for graph in module.graphs.values():
        for node in graph.nodes:
            first = node.operands[0].producer if node.op.name == "linear" else None
            if first is None or first.op.name != "fake_quantize":
                continue
            stored = activation_scale(read(node.weights[0], 0, 1))
            used = read(first.weights[0])["weight"]
            count += 1
            wrong += stored is None or stored != used
    return wrong, max(1, count)
