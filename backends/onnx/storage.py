"""How models refer to the tensors of the weight file.

What lies there is said by `edgecc.backends.stored_weights`. The initializer of a weight that an
expanding recipe makes (`dequantize`, `int8_codes`) points at the packed bytes, and either the model
widens them itself (standard dialect) or the engine supplies the expanded tensor when it loads the
model. What `constant` reads is stored widened, because ONNX Runtime computes with constants before
the engine can supply them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import TensorProto

from edgecc.backends.stored_weights import (
    StoredTensor,
    layout_of,
    stored_symbol,
    stored_tensor,
)
from edgecc.errors import LegalizeError
from edgecc.ir.core import Graph, Module
from edgecc.ir.encodings import ACTIVATION_SCALES
from edgecc.ir.weights import Derived, Weight, WeightTable

ONNX_DTYPES: Mapping[str, int] = {
    "F64": TensorProto.DOUBLE,
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN,
    "F8_E8M0": TensorProto.UINT8,  # read by a table: engines have no kernels for the type
    "I64": TensorProto.INT64,
    "I32": TensorProto.INT32,
    "I8": TensorProto.INT8,
    "U8": TensorProto.UINT8,
    "BOOL": TensorProto.BOOL,
}
_UNUSED = ACTIVATION_SCALES
"""Components no ONNX lowering reads: activations are not quantized."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """How the engine makes initializers of a model from packed tensors when it loads it.

    Attributes:
        form: One of `edgecc.backends.onnxruntime.expand.FORMS`.
        initializers: Names in the model, in the order the form makes them.
        parts: Component names to tensors of the weight file.
        block: Rows and columns that share a scale, of `fp8-block-f32`.
    """

    form: str
    initializers: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    block: tuple[int, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "form": self.form,
            "initializers": list(self.initializers),
            "parts": dict(self.parts),
            **({"block": list(self.block)} if self.block else {}),
        }


@dataclass(frozen=True, slots=True)
class Placement:
    """How one weight appears in a model.

    Attributes:
        name: Name of its (first) initializer.
        shape: Shape of that initializer.
        dtype: Its safetensors dtype.
        tensors: Tensors of the weight file it is made of.
        expansion: Set when the engine or the model has to expand it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tensors: tuple[StoredTensor, ...]
    expansion: Expansion | None = None


@dataclass(slots=True)
class Storage:
    """How the weights of one module appear in models.

    Attributes:
        module: Whose weights are stored.
        location: Path of the weight file relative to the models.
        offsets: Absolute offset and bytes of each tensor, known when the file is written.
    """

    module: Module
    location: str
    offsets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    _placements: dict[str, Placement] = field(default_factory=dict)
    _widened: set[str] = field(default_factory=set)

    def collect(self, graphs: Iterable[Graph]) -> list[StoredTensor]:
        """Find every tensor the graphs need."""
        found: dict[str, StoredTensor] = {}
        graphs = list(graphs)
        nodes = (n for g in graphs for n in g.nodes if n.op.name == "constant")
        self._widened = {self.module.weights.resolve(w) for n in nodes for w in n.weights}
        for graph in graphs:
            for symbol in graph.used_weights():
                for tensor in self.place(self.module.weights.resolve(symbol)).tensors:
                    found[tensor.name] = tensor
        return list(found.values())

    def place(self, symbol: str) -> Placement:
        """How a (resolved) weight appears in models."""
        if symbol not in self._placements:
            self._placements[symbol] = self._place(symbol)
        return self._placements[symbol]

    def external(self, name: str, dtype: int, shape: tuple[int, ...], tensor: str) -> TensorProto:
        """An initializer whose data lies in the weight file."""
        offset, length = self.offsets[tensor]
        proto = TensorProto(name=name, data_type=dtype, dims=shape)
        proto.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.location), ("offset", offset), ("length", length)):
            proto.external_data.add(key=key, value=str(value))
        return proto

    def _place(self, symbol: str) -> Placement:
        table = self.module.weights
        weight = table[symbol]
        source = weight.source
        base = stored_symbol(table, symbol)
        if isinstance(source, Derived) and base != symbol and symbol not in self._widened:
            tensors = _tensors(table, base)
            form = _form(source.recipe, table[base])
            names = (symbol,) if form != "nvfp4-int8" else (symbol, f"{symbol}.weight_scale")
            parts = tuple((t.component, t.name) for t in tensors)
            dtype = "U8" if form == "nvfp4-int8" else "F32"
            shape = _kernel_shape(weight, form)
            encoding = table[base].encoding
            block = encoding.block if form == "fp8-block-f32" else None  # type: ignore[attr-defined]
            return Placement(symbol, shape, dtype, tensors, Expansion(form, names, parts, block))
        tensors = _tensors(table, symbol)
        if len(tensors) != 1:
            raise LegalizeError(
                "onnx/encoding",
                f"{weight.encoding} has no ONNX initializer",
                where=f"weight @{symbol}",
                help="run lower-encodings before lowering",
            )
        return Placement(tensors[0].name, tensors[0].shape, tensors[0].dtype, tensors)


def _tensors(table: WeightTable, symbol: str) -> tuple[StoredTensor, ...]:
    components = table[symbol].encoding.components(table[symbol].shape)
    return tuple(stored_tensor(table, symbol, n) for n in components if n not in _UNUSED)


def _form(recipe: str, base: Weight) -> str:
    if recipe == "int8_codes":
        return "nvfp4-int8"
    layout = layout_of(base.encoding)
    return "widen-f32" if layout == "dense" else f"{layout}-f32"


def _kernel_shape(weight: Weight, form: str) -> tuple[int, ...]:
    """MatMulNBits wants its 8-bit codes as `[N, K/16, 16]`."""
    if form != "nvfp4-int8":
        return weight.shape
    rows, columns = weight.shape
    return rows, columns // 16, 16
