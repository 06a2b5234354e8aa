"""Turns one IR graph into one ONNX model, op by op.

Lowerings are functions registered with `@lowers("op", ...)` in the module of their op family. The
emitter holds what they share: names of values, initializers, small constants, and values that are
computed once per graph (lengths, zero padding).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgecc.backends.base import Array
from edgecc.backends.interface import slot_name
from edgecc.backends.onnx.storage import (
    ONNX_DTYPES,
    Expansion,
    Placement,
    Storage,
)
from edgecc.backends.onnx.widen import FUNCTIONS, widen
from edgecc.backends.stored_weights import SAFETENSORS_DTYPES
from edgecc.devices import Dialect
from edgecc.errors import LegalizeError
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.printer import value_names
from edgecc.ir.types import Dim, DimExpr, DType

OPSET = 24
IR_VERSION = 11
CONTRIB = "com.microsoft"

T = TypeVar("T")
Lowering: TypeAlias = Callable[["Emitter", Node], None]

ONNX_TYPES: Mapping[DType, int] = {
    DType.F64: TensorProto.DOUBLE,
    DType.F32: TensorProto.FLOAT,
    DType.F16: TensorProto.FLOAT16,
    DType.BF16: TensorProto.BFLOAT16,
    DType.F8E4M3: TensorProto.FLOAT8E4M3FN,
    DType.I64: TensorProto.INT64,
    DType.I32: TensorProto.INT32,
    DType.I8: TensorProto.INT8,
    DType.U8: TensorProto.UINT8,
    DType.BOOL: TensorProto.BOOL,
}
"""Element types that occur in lowered graphs."""

LOWERINGS: dict[tuple[str, Dialect], Lowering] = {}


def lowers(op: str, *dialects: Dialect) -> Callable[[Lowering], Lowering]:
    """Register a lowering of an IR op, for all dialects unless some are named."""

    def register(function: Lowering) -> Lowering:
        for dialect in dialects or tuple(Dialect):
            LOWERINGS[op, dialect] = function
        return function

    return register


class Emitter:
    """State of lowering one graph.

    Args:
        module: Owner of the graph.
        graph: A graph without calls.
        dialect: Operators that may be used.
        storage: Where each weight lies in the weight file.
    """

    def __init__(self, module: Module, graph: Graph, dialect: Dialect, storage: Storage) -> None:
        self.module = module
        self.graph = graph
        self.dialect = dialect
        self.storage = storage
        self.expansions: dict[str, Expansion] = {}
        self.functions: dict[str, onnx.FunctionProto] = {}
        self.slots = sequences(module)
        self._names = _onnx_names(graph, module.weights)
        self._by_slot = by_slot(module, graph, dialect)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._memo: dict[object, Any] = {}
        self._counter = 0
        self._scope = ""

    def lower(self) -> onnx.ModelProto:
        """The model.

        Raises:
            LegalizeError: An op has no lowering in this dialect.
        """
        for node in self.graph.nodes:
            lowering = LOWERINGS.get((node.op.name, self.dialect))
            if lowering is None:
                raise LegalizeError(
                    "onnx/no-lowering",
                    f"{node.op.name} has no lowering in the {self.dialect.value} dialect",
                    where=f"graph @{self.graph.name}, {node!r}",
                    notes=[f"comes from {node.location}"] if str(node.location) else [],
                )
            self._scope = self._names[node.results[0]]
            lowering(self, node)
        labels = output_names(self.graph)
        outputs = [
            info
            for n, o in zip(labels, self.graph.outputs, strict=True)
            for info in self._output(n, o.value)
        ]
        proto = helper.make_graph(
            self._nodes,
            self.graph.name,
            [info for i in self.graph.inputs for info in self._infos(i.name, i.value)],
            outputs,
            initializer=list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)]
        if self.dialect is Dialect.ORT_CONTRIB:
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        if self.functions:
            opsets.append(helper.make_opsetid(FUNCTIONS, 1))
        return helper.make_model(
            proto,
            opset_imports=opsets,
            ir_version=IR_VERSION,
            producer_name="edgecc",
            functions=list(self.functions.values()),
        )

    def name(self, value: Value) -> str:
        """ONNX name of an IR value."""
        return self._names[value]

    def op(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: int | Sequence[str] = 1,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Append a node; returns its output names (fresh ones when a count is given)."""
        if isinstance(outputs, int):
            outputs = [self.fresh(op) for _ in range(outputs)]
        node = helper.make_node(
            op,
            list(inputs),
            list(outputs),
            name=f"{self._scope}/{op}.{len(self._nodes)}",
            domain=domain,
            **attributes,
        )
        self._nodes.append(node)
        return list(outputs)

    def result(self, node: Node, op: str, inputs: Sequence[str], **kwargs: Any) -> None:
        """Append a node whose outputs are the results of an IR node."""
        self.op(op, inputs, [self.name(r) for r in node.results], **kwargs)

    def operands(self, node: Node) -> list[str]:
        """ONNX names of a node's operands."""
        return [self.name(o) for o in node.operands]

    def constant(self, array: Array) -> str:
        """A small constant inside the model, deduplicated by content."""
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._memo:
            name = f"const.{len(self._memo)}"
            self._initializers[name] = numpy_helper.from_array(array, name)
            self._memo[key] = name
        return str(self._memo[key])

    def ints(self, *values: int) -> str:
        """A constant i64 vector."""
        return self.constant(np.array(values, dtype=np.int64))

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make()` gives, a name or several, computed once per graph and key.

        The nodes land where the first user is, which is before all later ones.
        """
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found

    def size(self, value: Value, axis: int) -> str:
        """Size of an axis as an i64 vector of one element, constant where it is known."""
        dim = value.type.shape[axis]
        if isinstance(dim, int):
            return self.ints(dim)
        return self.once(
            ("size", str(dim)),
            lambda: self.op("Shape", [self.name(value)], start=axis, end=axis + 1)[0],
        )

    def weight(self, symbol: str) -> str:
        """Name of the value that holds a weight, dense: an initializer, or what expands it."""
        resolved = self.module.weights.resolve(symbol)
        placement = self.storage.place(resolved)
        if placement.expansion is not None and self.dialect is Dialect.STANDARD:
            return self.once(("expanded", resolved), lambda: self._expand(placement))
        self._initializer(placement.name, placement.dtype, placement.shape, placement)
        if placement.expansion is not None:
            self.expansions[placement.name] = placement.expansion
        return placement.name

    def weight_part(self, symbol: str, component: str) -> str:
        """Name of a further initializer an expansion makes (block scales)."""
        resolved = self.module.weights.resolve(symbol)
        weight = self.module.weights[resolved]
        part = weight.encoding.components(weight.shape)[component]
        name = f"{resolved}.{component}"
        placement = self.storage.place(resolved)
        self._initializer(name, SAFETENSORS_DTYPES[part.dtype], part.shape, placement)
        return name

    def rename_last(self, old: str, new: str) -> None:
        """Give the output of the last node another name."""
        outputs = self._nodes[-1].output
        outputs[list(outputs).index(old)] = new

    def _initializer(
        self, name: str, dtype: str, shape: tuple[int, ...], placement: Placement
    ) -> None:
        if name not in self._initializers:
            self._initializers[name] = self.storage.external(
                name, ONNX_DTYPES[dtype], shape, placement.tensors[0].name
            )

    def _expand(self, placement: Placement) -> str:
        """Widen a packed weight with standard operators inside the model."""
        for tensor in placement.tensors:
            self._initializers[tensor.name] = self.storage.external(
                tensor.name, ONNX_DTYPES[tensor.dtype], tensor.shape, tensor.name
            )
        return widen(self, placement, {t.component: t.name for t in placement.tensors})

    def fresh(self, hint: str) -> str:
        """A name nothing else has."""
        self._counter += 1
        return f"{self._scope}/{hint}.out{self._counter}"

    def branch(
        self, label: str, count: int, element: int, fill: Callable[[Sequence[str]], None]
    ) -> onnx.GraphProto:
        """A branch of an `If`.

        What `once` is to keep for the whole graph must have been made before.

        Args:
            label: Names its nodes within the model.
            count: How many outputs it has.
            element: Their element type.
            fill: Appends its nodes, given the names of its outputs.
        """
        outer, scope = self._nodes, self._scope
        outputs = [self.fresh(label) for _ in range(count)]
        self._nodes, self._scope = [], f"{scope}/{label}"
        try:
            fill(outputs)
            infos = [helper.make_tensor_value_info(name, element, None) for name in outputs]
            return helper.make_graph(self._nodes, self._scope, [], infos)
        finally:
            self._nodes, self._scope = outer, scope

    def _infos(self, name: str, value: Value) -> list[onnx.ValueInfoProto]:
        """What an input or output is: one, or one for each slot."""
        element = ONNX_TYPES[value.type.dtype]
        shape = [d if isinstance(d, int) else str(d) for d in value.type.shape]
        if value not in self._by_slot:
            return [helper.make_tensor_value_info(name, element, shape)]
        return [  # of one sequence, or of none
            helper.make_tensor_value_info(slot_name(name, slot), element, [None, *shape[1:]])
            for slot in range(self.slots)
        ]

    def _output(self, label: str, value: Value) -> list[onnx.ValueInfoProto]:
        if label != self.name(value):  # an input returned as it is, or a value returned twice
            self._scope = label
            self.op("Identity", [self.name(value)], [label])
        return self._infos(label, value)


def _onnx_names(graph: Graph, weights: Collection[str]) -> dict[Value, str]:
    """Names of all values; what is returned has the name of its output, and nothing else does.

    Raises:
        LegalizeError: A weight has the name of an input or output, which both are fixed.
    """
    labels = output_names(graph)
    inputs = {i.value for i in graph.inputs}
    for name in (*(i.name for i in graph.inputs), *labels):
        if name in weights:
            raise LegalizeError(
                "onnx/name-clash",
                f"weight @{name} has the name of an input or output of graph @{graph.name}",
                where=f"graph @{graph.name}",
                help="give one of them another name in the IR text: ONNX has one set of names",
            )
    names = value_names(graph)
    for value, name in names.items():
        if value not in inputs and (name in labels or name in weights):
            names[value] = f"{name}/value"
    for label, output in reversed(list(zip(labels, graph.outputs, strict=True))):
        if output.value not in inputs:
            names[output.value] = label
    return names


def output_names(graph: Graph) -> list[str]:
    """ONNX names of the outputs: an updated cache cannot have the name of its input."""
    taken = {i.name for i in graph.inputs}
    return [
        f"present.{o.name}" if o.alias is not None or o.name in taken else o.name
        for o in graph.outputs
    ]


def sequences(module: Module) -> int:
    """Most sequences of one call: the number that the module was lifted for."""
    limits = module.metadata.get("limits")
    return int(str(limits.get("max_batch_size", 1))) if isinstance(limits, dict) else 1


def by_slot(module: Module, graph: Graph, dialect: Dialect) -> frozenset[Value]:
    """Inputs and outputs that the model of a graph has once for each slot, see `slots`."""
    if dialect is not Dialect.ORT_CONTRIB or sequences(module) == 1:
        return frozenset()
    nodes = [n for n in graph.nodes if n.op.name == "cached_attention"]
    return frozenset(v for n in nodes for v in (*n.operands[3:5], *n.results[1:]))


def is_static(dim: Dim) -> bool:
    """Whether a dimension is known at compile time."""
    return not isinstance(dim, DimExpr)
