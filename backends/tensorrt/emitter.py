"""Turns one IR graph into one TensorRT network, op by op.

Lowerings are functions registered with `@lowers("op")` in the module of their op family. The
emitter holds what they share: tensors of values, names of layers, small constants, sizes that are
known at run time only. Networks are strongly typed: every type is that of the IR value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from edgecc.backends.base import Array
from edgecc.backends.layouts import Parts
from edgecc.backends.onnx.emitter import output_names
from edgecc.backends.tensorrt.library import DATA_TYPES
from edgecc.backends.tensorrt.names import PlanNames
from edgecc.backends.tensorrt.operands import Operand
from edgecc.errors import LegalizeError
from edgecc.ir.core import Graph, Module, Node, Value, site
from edgecc.ir.printer import value_names
from edgecc.ir.types import Dim, DType

Lowering: TypeAlias = Callable[["Emitter", Node], None]
Tensor: TypeAlias = Any
"""An `ITensor` of the library."""

LOWERINGS: dict[str, Lowering] = {}


def lowers(op: str) -> Callable[[Lowering], Lowering]:
    """Register the lowering of an IR op."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS[op] = function
        return function

    return register


@dataclass(slots=True)
class WeightUse:
    """What a weight is in a network.

    Attributes:
        precision: For people.
        constant: Its arrays that lie in the plan.
        bound: Its arrays that are inputs.
    """

    precision: str
    constant: set[Operand] = field(default_factory=set)
    bound: set[Operand] = field(default_factory=set)


class Emitter:
    """State of lowering one graph.

    Args:
        library: The module `tensorrt_rtx` or `tensorrt`.
        network: An empty strongly typed network. It keeps pointers to the arrays of `arrays`.
        module: Owner of the graph.
        graph: A graph without calls.
        sizes: Symbols that have one size in all calls.
        bound: Arrays of weights that are inputs; all others are constants.

    Attributes:
        arrays: What the network points to: must live until the engine is built.
        nodes: IR node by layer name, for messages.
        names: What things are called in the plan.
        inputs: The bound arrays that the network takes, by input name.
        weights: What each weight is in the network, by symbol.
        exact_float32: Whether float32 products must not round their factors to TF32.
    """

    def __init__(
        self,
        library: Any,
        network: Any,
        module: Module,
        graph: Graph,
        sizes: Mapping[str, int],
        bound: Collection[Operand] = (),
    ) -> None:
        self.trt = library
        self.network = network
        self.module = module
        self.graph = graph
        self.sizes = sizes
        self.arrays: list[Array] = []
        self.nodes: dict[str, Node] = {}
        self.names = PlanNames(module, graph)
        self.inputs: dict[str, Operand] = {}
        self.weights: dict[str, WeightUse] = {}
        self.exact_float32 = False
        self._bound = bound
        self._parts: tuple[str, Parts] = ("", {})
        self._values: dict[Value, Tensor] = {}
        self._memo: dict[object, Tensor] = {}
        self._names = value_names(graph)
        self._node: Node | None = None
        self._count = 0

    def lower(self) -> None:
        """Fill the network.

        Raises:
            LegalizeError: An op has no lowering, or TensorRT refuses a layer.
        """
        for item in self.graph.inputs:
            shape = self.shape(item.value)
            self._values[item.value] = self._check(
                self.network.add_input(item.name, self.type(item.value.type.dtype), shape)
            )
        for node in self.graph.nodes:
            lowering = LOWERINGS.get(node.op.name)
            if lowering is None:
                raise LegalizeError(
                    "tensorrt/no-lowering",
                    f"{node.op.name} has no lowering to TensorRT",
                    where=site(self.graph, node),
                )
            self._node = node
            lowering(self, node)
        self._node = None
        inputs = {i.value for i in self.graph.inputs}
        marked: set[Value] = set()
        for name, output in zip(output_names(self.graph), self.graph.outputs, strict=True):
            tensor = self._values[output.value]
            if output.value in inputs or output.value in marked:
                tensor = self.layer("identity", self.network.add_identity(tensor)).get_output(0)
            tensor.name = name
            self.network.mark_output(tensor)
            marked.add(output.value)

    def type(self, dtype: DType) -> Any:
        """The library's element type.

        Raises:
            LegalizeError: It has none.
        """
        if dtype.value not in DATA_TYPES:
            raise LegalizeError("tensorrt/dtype", f"TensorRT has no element type {dtype.value}")
        return getattr(self.trt.DataType, DATA_TYPES[dtype.value])

    def shape(self, value: Value) -> tuple[int, ...]:
        """Sizes of a value, -1 where calls choose."""
        return tuple(-1 if not isinstance(d, int) else d for d in map(self.size, value.type.shape))

    def size(self, dim: Dim) -> Dim:
        """A dimension with the symbols replaced that have one size in all calls."""
        return dim if isinstance(dim, int) else dim.substitute(self.sizes)

    def largest(self, dim: Dim) -> int:
        """The largest size of a dimension in any call."""
        size = self.size(dim)
        if isinstance(size, int):
            return size
        ranges = self.module.symbols
        ends = ((ranges[s].high if c > 0 else ranges[s].low) * c for s, c in size.terms)
        return sum(ends) + size.constant

    def value(self, value: Value) -> Tensor:
        """The tensor of an IR value."""
        return self._values[value]

    def operands(self, node: Node) -> list[Tensor]:
        """Tensors of a node's operands."""
        return [self._values[o] for o in node.operands]

    def result(self, node: Node, *tensors: Tensor) -> None:
        """Tensors that are the results of a node."""
        self._values.update(zip(node.results, tensors, strict=True))

    def layer(self, kind: str, layer: Any) -> Any:
        """Name a new layer after the node it computes.

        Raises:
            LegalizeError: TensorRT did not make it; its reason is in its log.
        """
        self._check(layer)
        self._count += 1
        scope = self._names[self._node.results[0]] if self._node else self.names.graph
        layer.name = f"{scope}/{kind}.{self._count}"
        if self._node is not None:
            self.nodes[layer.name] = self._node
            layer.metadata = self.names.node(self._node)
        return layer

    def out(self, kind: str, layer: Any) -> Tensor:
        """The only output of a new layer."""
        return self.layer(kind, layer).get_output(0)

    def constant(self, array: Array) -> Tensor:
        """A small constant, deduplicated by content."""
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        return self.once(key, lambda: self.data(array, DType.of(array.dtype), array.shape))

    def data(self, array: Array, dtype: DType, shape: Sequence[int]) -> Tensor:
        """A constant whose elements lie in an array, which is not copied.

        Args:
            array: Bytes of the elements; 4-bit types have two a byte.
            dtype: Element type.
            shape: Of the elements.
        """
        array = np.ascontiguousarray(array)
        self.arrays.append(array)
        count = int(np.prod(shape, dtype=np.int64))
        weights = self.trt.Weights(self.type(dtype), array.ctypes.data, count)
        return self.out("constant", self.network.add_constant(tuple(shape), weights))

    def weight(self, symbol: str, precision: str, operand: Operand, *, bind: bool = True) -> Tensor:
        """An array of a weight: an input if it is bound, a constant else.

        Args:
            symbol: The weight.
            precision: What it is in the network, for people.
            operand: The array.
            bind: False where the builder has to know the values.
        """
        bound = bind and operand in self._bound
        use = self.weights.setdefault(self.module.weights.resolve(symbol), WeightUse(precision))
        (use.bound if bound else use.constant).add(operand)
        if bound:
            return self.once(("input", operand), lambda: self._input(operand))
        return self.once(("weight", operand), lambda: self._constant(operand))

    def _constant(self, operand: Operand) -> Tensor:
        array = operand.array(self._read(operand.symbol))
        return self.data(array, operand.dtype, operand.shape)

    def _input(self, operand: Operand) -> Tensor:
        name = self.names.input(operand)
        self.inputs[name] = operand
        made = self.network.add_input(name, self.type(operand.dtype), operand.shape)
        return self._check(made)

    def _read(self, symbol: str) -> Parts:
        """Components of a weight; the last one is kept, its arrays are asked for in turn."""
        if self._parts[0] != symbol:
            self._parts = (symbol, self.module.weights.read(symbol))
        return self._parts[1]

    def once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """The value of `make()`, computed once per graph and key."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """The tensor in another type, or as it is."""
        wanted = self.type(dtype)
        return x if x.dtype == wanted else self.out("cast", self.network.add_cast(x, wanted))

    def binary(self, op: str, a: Tensor, b: Tensor) -> Tensor:
        """An elementwise layer: SUM, PROD, DIV, SUB, LESS ..."""
        kind = getattr(self.trt.ElementWiseOperation, op)
        return self.out(op.lower(), self.network.add_elementwise(a, b, kind))

    def unary(self, op: str, x: Tensor) -> Tensor:
        """A unary layer: SQRT, RECIP ..."""
        return self.out(op.lower(), self.network.add_unary(x, getattr(self.trt.UnaryOperation, op)))

    def activation(self, kind: str, x: Tensor) -> Tensor:
        """An activation layer: SIGMOID ..."""
        layer = self.network.add_activation(x, getattr(self.trt.ActivationType, kind))
        return self.out(kind.lower(), layer)

    def reduce(self, op: str, x: Tensor, axis: int) -> Tensor:
        """A reduction over one axis, which stays as one of size 1: SUM, AVG ..."""
        kind = getattr(self.trt.ReduceOperation, op)
        return self.out(f"reduce {op.lower()}", self.network.add_reduce(x, kind, 1 << axis, True))

    def matmul(
        self, a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False
    ) -> Tensor:
        """Products of the matrices in the last two axes; axes of size 1 before them broadcast."""
        kinds = self.trt.MatrixOperation
        left, right = (kinds.TRANSPOSE if t else kinds.NONE for t in (transpose_a, transpose_b))
        return self.out("matmul", self.network.add_matrix_multiply(a, left, b, right))

    def transpose(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Axes in another order."""
        layer = self.layer("transpose", self.network.add_shuffle(x))
        layer.first_transpose = tuple(order)
        return layer.get_output(0)

    def reshape(self, x: Tensor, shape: Sequence[Dim]) -> Tensor:
        """Another shape; one size of it may be known at run time only.

        Raises:
            LegalizeError: More are.
        """
        sizes = [self.size(d) for d in shape]
        dims = tuple(d if isinstance(d, int) else -1 for d in sizes)
        if dims.count(-1) > 1:
            raise LegalizeError(
                "tensorrt/dynamic-shape",
                f"a reshape has two sizes that calls choose: {[str(d) for d in shape]}",
                where=site(self.graph, self._node) if self._node else f"@{self.graph.name}",
                help="compile with one sequence at a time",
            )
        layer = self.layer("reshape", self.network.add_shuffle(x))
        layer.reshape_dims = dims
        return layer.get_output(0)

    def run_size(self, value: Value, axis: int) -> Tensor:
        """The size of an axis, i64 `[1]`, constant where it is known."""
        return self.size_of(value.type.shape[axis], self.value(value), axis)

    def size_of(self, dim: Dim, tensor: Tensor, axis: int) -> Tensor:
        """The size of a dimension that a tensor has as an axis, i64 `[1]`."""
        size = self.size(dim)
        if isinstance(size, int):
            return self.constant(np.array([size], dtype=np.int64))
        return self.once(("size", str(size)), lambda: self._measure(tensor, axis))

    def _measure(self, tensor: Tensor, axis: int) -> Tensor:
        layer = self.network.add_slice(self.run_shape(tensor), (axis,), (1,), (1,))
        return self.out("size", layer)

    def run_shape(self, tensor: Tensor) -> Tensor:
        """The shape of a tensor, i64 `[rank]`."""
        return self.once(
            ("shape", tensor.name), lambda: self.out("shape", self.network.add_shape(tensor))
        )

    def _check(self, made: Any) -> Any:
        if made is None:
            node = self._node
            raise LegalizeError(
                "tensorrt/layer",
                "TensorRT refused a layer",
                where=site(self.graph, node) if node else f"graph @{self.graph.name}",
            )
        return made
