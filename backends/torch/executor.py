"""Evaluates graphs with eager PyTorch, on CPU or CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from edgecc.backends.torch import (
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
from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.backends.torch.tensors import numpy_dtype, round_to, to_array, to_tensor, torch_dtype
from edgecc.backends.torch.weights import WeightStore
from edgecc.errors import RequestError, UnsupportedError, UsageError, did_you_mean
from edgecc.ir.analysis import ancestors
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import Array
from edgecc.ir.evaluation import check_cast, find_graph, last_uses, match_shape, positional
from edgecc.ir.types import TensorType

Tensors: TypeAlias = Mapping[str, Array | Tensor]

KERNELS: Mapping[str, Kernel] = {
    name: kernel
    for family in (
        *(matmul, norm, elementwise, quantization, attention, state),
        *(shape, sampling, control, constant, vision),
    )
    for name, kernel in family.KERNELS.items()
}
"""Every kernel by the name of its op."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What floating-point values can be held in."""


class TorchExecutor:
    """Evaluates the graphs of one module, eagerly, op by op.

    The calls are those of `edgecc.ir.Interpreter`, and so are the messages when one is refused.
    Values are dropped after their last use. Subclass and override `node` to observe or replace ops.

    Args:
        module: Module to evaluate; unbound weights raise when they are read.
        dtype: What every floating-point value is held in: float64, float32, bfloat16 or float16.
        device: `cpu`, `cuda`, `cuda:1` ...
        keep_bytes: Decoded weights up to this many bytes stay on the device between uses. 0 reads
            and decodes them anew each time, so that memory follows the largest one.

    Raises:
        UsageError: There is no such dtype or device name.
        UnsupportedError: The device is not there.
    """

    def __init__(
        self,
        module: Module,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        *,
        keep_bytes: int = 0,
    ) -> None:
        if dtype not in DTYPES:
            valid = ", ".join(str(d) for d in DTYPES)
            raise UsageError("torch/dtype", f"cannot evaluate in {dtype}", help=f"valid: {valid}")
        self.module = module
        self.dtype = dtype
        self.device = _device(device)
        self.weights = WeightStore(module.weights, dtype, self.device, keep_bytes)

    def run(self, graph: str, inputs: Tensors) -> dict[str, Array]:
        """Evaluate a graph, as `Interpreter.run` does.

        Args:
            graph: Name of the graph.
            inputs: Arrays or tensors by input name.

        Returns:
            Arrays by output name; floating-point ones in the dtype of the executor.

        Raises:
            RequestError: There is no such graph, or an input is missing, unknown, of the wrong
                shape, or not of integers where the graph wants them.
            UnsupportedError: An op, encoding or element type has no counterpart in PyTorch.
        """
        return {name: to_array(t) for name, t in self.run_tensors(graph, inputs).items()}

    def run_tensors(
        self, graph: str, inputs: Tensors, outputs: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Evaluate a graph and leave the results on the device.

        Args:
            graph: Name of the graph.
            inputs: Arrays or tensors by input name. They are never written to, but an output that
                is an input as it came may be the same tensor.
            outputs: Names of the wanted outputs; what only others need is not computed. All unless
                given.

        Returns:
            Tensors by output name, in the order of the graph.

        Raises:
            RequestError: See `run`; or the graph has no such output.
            UnsupportedError: See `run`.
        """
        target = find_graph(self.module, graph)
        arguments = positional(target, inputs)
        wanted = {o.name: o.value for o in target.outputs}
        for name in outputs or ():
            if name not in wanted:
                raise RequestError(
                    "run/outputs",
                    f"graph @{graph} has no output {name!r}",
                    help=did_you_mean(name, wanted),
                )
        nodes: Sequence[Node] = target.nodes
        if outputs is not None:
            wanted = {name: value for name, value in wanted.items() if name in outputs}
            needed = ancestors(target, wanted.values())
            nodes = [node for node in nodes if node in needed]
        with torch.no_grad():
            found = self._evaluate(target, nodes, arguments, list(wanted.values()))
        return dict(zip(wanted, found, strict=True))

    def node(self, node: Node, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Evaluate one node on operand values.

        Raises:
            UnsupportedError: The op has no kernel.
        """
        if node.op.name not in KERNELS:
            raise UnsupportedError(
                "torch/op",
                f"the torch backend has no kernel for the op {node.op.name}",
                where=repr(node),
                help="write one in the file of its family in backends/torch",
            )
        weights = tuple(self.weights[w] for w in node.weights)
        call: Call[Any] = Call(tuple(operands), weights, node.attrs, self._call)
        results = KERNELS[node.op.name](call)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    def _call(self, name: str, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        graph = self.module.graphs[name]
        return self._evaluate(graph, graph.nodes, operands, [o.value for o in graph.outputs])

    def _evaluate(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        inputs: Sequence[Array | Tensor],
        wanted: Sequence[Value],
    ) -> tuple[Tensor, ...]:
        binding: dict[str, int] = {}
        values: dict[Value, Tensor] = {}
        for item, given in zip(graph.inputs, inputs, strict=True):
            what = f"@{graph.name}: input %{item.name}"
            tensor = self._take(what, given, item.value.type)
            match_shape(what, tensor.shape, item.value.type, binding)
            values[item.value] = round_to(tensor, item.value.type.dtype)
        last = last_uses(nodes, wanted)
        for index, node in enumerate(nodes):
            results = self.node(node, [values[o] for o in node.operands])
            for value, tensor in zip(node.results, results, strict=True):
                match_shape(f"@{graph.name}: {node!r}", tensor.shape, value.type, binding)
                values[value] = round_to(tensor, value.type.dtype)
            for value in last.get(index, ()):
                del values[value]
        return tuple(values[v] for v in wanted)

    def _take(self, what: str, given: Array | Tensor, expected: TensorType) -> Tensor:
        """An input on the device, in the dtype it is computed in."""
        dtype = self.dtype if expected.dtype.is_float else torch_dtype(expected.dtype)
        kind = numpy_dtype(torch.float32 if expected.dtype.is_float else dtype)
        if isinstance(given, Tensor):
            check_cast(what, numpy_dtype(given.dtype), kind, expected)
            return given.detach().to(self.device, dtype)
        array = np.asarray(given)
        check_cast(what, array.dtype, kind, expected)
        if expected.dtype.is_float and array.dtype.itemsize > 4:
            kind = np.dtype(np.float64)  # one rounding to the dtype of the executor, not two
        return to_tensor(array.astype(kind), self.device).to(dtype)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(
            "torch/device", f"no device {device!r}", help="valid: cpu, cuda, cuda:N"
        ) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            "torch/no-device",
            f"PyTorch sees no device {found}",
            notes=[f"it sees {torch.cuda.device_count()} CUDA devices"],
            help="use device cpu, or install a PyTorch built for this machine's driver",
        )
    return found
