"""Which tensors go into the weight file, and how the models refer to them.

Weights are written as they are encoded: packed stays packed. A weight an expanding recipe makes
(`dequantize`, `int8_codes`) is not written; its initializer points at the packed bytes, and either
the model widens them itself (standard dialect) or the engine supplies the expanded tensor when it
loads the model. Vectors are small and written widened. So is what `constant` reads, because ONNX
Runtime computes with constants before the engine can supply them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import TensorProto

from edgecc.backends.weight_file import TensorSpec
from edgecc.errors import LegalizeError
from edgecc.ir.core import Graph, Module
from edgecc.ir.encodings import FP8, NVFP4, Component, Dense, Encoding, Int4, Int8
from edgecc.ir.recipes import RECIPES
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, Weight

SAFETENSORS_DTYPES: Mapping[DType, str] = {
    DType.F64: "F64",
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F8E4M3: "F8_E4M3",
    DType.I64: "I64",
    DType.I32: "I32",
    DType.I8: "I8",
    DType.U8: "U8",
    DType.BOOL: "BOOL",
}
ONNX_DTYPES: Mapping[str, int] = {
    "F64": TensorProto.DOUBLE,
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN,
    "I64": TensorProto.INT64,
    "I32": TensorProto.INT32,
    "I8": TensorProto.INT8,
    "U8": TensorProto.UINT8,
    "BOOL": TensorProto.BOOL,
}
FORMS: Mapping[type[Encoding], str] = {
    NVFP4: "nvfp4-f32",
    FP8: "fp8-f32",
    Int8: "int8-f32",
    Int4: "int4-f32",
    Dense: "widen-f32",
}
"""How `dequantize` is written into a manifest; `fp8-block-f32` where FP8 has block scales."""
_UNUSED = ("input_scale",)
"""Components no ONNX lowering reads: activations are not quantized."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the weight file: a component of a weight of the module."""

    name: str
    symbol: str
    component: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expansion:
    """How the engine makes initializers of a model from packed tensors when it loads it.

    Attributes:
        form: One of `FORMS`, or `nvfp4-int8`.
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
    """The weight file of one module: its tensors, and after `place_at` their offsets.

    Attributes:
        module: Whose weights are stored.
        location: Path of the weight file relative to the models.
        tensors: By name, in file order.
        offsets: Absolute offset and bytes of each tensor.
    """

    module: Module
    location: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    offsets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    _placements: dict[str, Placement] = field(default_factory=dict)
    _widened: set[str] = field(default_factory=set)

    def collect(self, graphs: Iterable[Graph]) -> list[TensorSpec]:
        """Find every tensor the graphs need, and return the layout of the file.

        Wide elements come first, so that every tensor is aligned to its element size.
        """
        found: dict[str, StoredTensor] = {}
        graphs = list(graphs)
        nodes = (n for g in graphs for n in g.nodes if n.op.name == "constant")
        self._widened = {self.module.weights.resolve(w) for n in nodes for w in n.weights}
        for graph in graphs:
            for symbol in graph.used_weights():
                for tensor in self.place(self.module.weights.resolve(symbol)).tensors:
                    found[tensor.name] = tensor
        specs = {t.name: TensorSpec(t.name, t.dtype, t.shape) for t in found.values()}
        width = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
        ordered = sorted(found.values(), key=lambda t: -width.get(t.dtype, 1))
        self.tensors = {t.name: t for t in ordered}
        return [specs[t.name] for t in ordered]

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
        expands = isinstance(source, Derived) and RECIPES[source.recipe].expands
        expands = expands and len(weight.shape) > 1 and symbol not in self._widened
        if isinstance(source, Derived) and expands:
            base = table.resolve(source.inputs[0])
            tensors = _tensors(base, table[base])
            form = _form(source.recipe, table[base])
            names = (symbol,) if form != "nvfp4-int8" else (symbol, f"{symbol}.weight_scale")
            parts = tuple((t.component, t.name) for t in tensors)
            dtype = "U8" if form == "nvfp4-int8" else "F32"
            shape = _kernel_shape(weight, form)
            encoding = table[base].encoding
            block = encoding.block if form == "fp8-block-f32" else None  # type: ignore[attr-defined]
            return Placement(symbol, shape, dtype, tensors, Expansion(form, names, parts, block))
        tensors = _tensors(symbol, weight)
        if len(tensors) != 1:
            raise LegalizeError(
                "onnx/encoding",
                f"{weight.encoding} has no ONNX initializer",
                where=f"weight @{symbol}",
                help="run lower-encodings before lowering",
            )
        return Placement(tensors[0].name, tensors[0].shape, tensors[0].dtype, tensors)


def _tensors(symbol: str, weight: Weight) -> tuple[StoredTensor, ...]:
    components: dict[str, Component] = weight.encoding.components(weight.shape)
    return tuple(
        StoredTensor(
            tensor_name(symbol, name),
            symbol,
            name,
            SAFETENSORS_DTYPES[component.dtype],
            component.shape,
        )
        for name, component in components.items()
        if name not in _UNUSED
    )


def tensor_name(symbol: str, component: str) -> str:
    """Name in the weight file: `x.weight` and `x.weight_scale`, like in checkpoints."""
    return symbol if component == "weight" else f"{symbol.removesuffix('.weight')}.{component}"


def _form(recipe: str, base: Weight) -> str:
    if recipe == "int8_codes":
        return "nvfp4-int8"
    encoding = base.encoding
    if isinstance(encoding, FP8) and encoding.scaling == "block":
        return "fp8-block-f32"
    form = FORMS.get(type(encoding))
    if form is None:
        raise LegalizeError("onnx/encoding", f"no expansion of {encoding} by {recipe}")
    return form


def _kernel_shape(weight: Weight, form: str) -> tuple[int, ...]:
    """MatMulNBits wants its 8-bit codes as `[N, K/16, 16]`."""
    if form != "nvfp4-int8":
        return weight.shape
    rows, columns = weight.shape
    return rows, columns // 16, 16
