"""Which tensors a bundle's weight file holds, and writing them.

Weights are stored as they are encoded: packed stays packed. A matrix that an expanding recipe makes
(`dequantize`, `narrow`, `int8_codes`) is not stored, what it is made of is; whoever loads the
bundle applies the recipe. Vectors are small and stored as graphs use them. Several devices share
one file: a tensor of one name lies there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgecc.backends.base import Progress
from edgecc.backends.weight_file import TensorSpec, WeightFileWriter, WrittenFile, file_size
from edgecc.errors import InternalError, LegalizeError
from edgecc.ir.core import Module
from edgecc.ir.encodings import FP8, MXFP4, NVFP4, Dense, Encoding, Int4, Int8
from edgecc.ir.recipes import RECIPES
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, WeightTable

WEIGHT_FILE = "weights/weights.safetensors"

SAFETENSORS_DTYPES: Mapping[DType, str] = {
    DType.F64: "F64",
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F8E4M3: "F8_E4M3",
    DType.F8E8M0: "F8_E8M0",
    DType.I64: "I64",
    DType.I32: "I32",
    DType.I8: "I8",
    DType.U8: "U8",
    DType.BOOL: "BOOL",
}
LAYOUTS: Mapping[type[Encoding], str] = {
    NVFP4: "nvfp4",
    MXFP4: "mxfp4",
    FP8: "fp8",
    Int8: "int8",
    Int4: "int4",
    Dense: "dense",
}
"""Names that loaders know: `edgecc.backends.layouts`; `fp8-block` where FP8 has block scales."""
_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the weight file: a component of a weight of the module."""

    name: str
    symbol: str
    component: str
    dtype: str
    shape: tuple[int, ...]


def tensor_name(symbol: str, component: str) -> str:
    """Name in the weight file: `x.weight` and `x.weight_scale`, like in checkpoints."""
    return symbol if component == "weight" else f"{symbol.removesuffix('.weight')}.{component}"


def stored_tensor(table: WeightTable, symbol: str, component: str) -> StoredTensor:
    """A component of a weight as a tensor of the weight file."""
    weight = table[symbol]
    found = weight.encoding.components(weight.shape)[component]
    dtype = SAFETENSORS_DTYPES[found.dtype]
    return StoredTensor(tensor_name(symbol, component), symbol, component, dtype, found.shape)


def stored_symbol(table: WeightTable, symbol: str) -> str:
    """The weight whose bytes are stored for a weight: itself, or what a matrix is expanded from."""
    symbol = table.resolve(symbol)
    weight = table[symbol]
    source = weight.source
    if isinstance(source, Derived) and RECIPES[source.recipe].expands and len(weight.shape) > 1:
        return table.resolve(source.inputs[0])
    return symbol


def layout_of(encoding: Encoding) -> str:
    """The layout by which a loader knows an encoding.

    Raises:
        LegalizeError: Nothing loads it.
    """
    layout = LAYOUTS.get(type(encoding))
    if layout is None:
        raise LegalizeError("bundle/layout", f"no loader expands {encoding}")
    by_block = isinstance(encoding, FP8) and encoding.scaling == "block"
    return "fp8-block" if by_block else layout


@dataclass(slots=True)
class StoredWeights:
    """The tensors of one weight file, of one module or of several clones of one."""

    _owners: dict[str, tuple[Module, StoredTensor]] = field(default_factory=dict)

    def add(self, module: Module, tensors: Iterable[StoredTensor]) -> None:
        """Add tensors of a module; those that are there already are not stored twice.

        Raises:
            InternalError: A tensor of the same name is another one.
        """
        for tensor in tensors:
            owner, other = self._owners.setdefault(tensor.name, (module, tensor))
            if owner is not module and not _equal(owner, other, module, tensor):
                raise InternalError(
                    "bundle/other-tensor",
                    f"two devices store different tensors under the name {tensor.name}",
                    where=module.weights.origin(tensor.symbol),
                    help="compile for one device at a time, and please report this message",
                )

    def __len__(self) -> int:
        return len(self._owners)

    def ordered(self) -> list[StoredTensor]:
        """In file order: wide elements first, so that every tensor is aligned to its elements."""
        tensors = (tensor for _, tensor in self._owners.values())
        return sorted(tensors, key=lambda t: -_WIDTHS.get(t.dtype, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return file_size(self._specs())

    def write(self, directory: Path, progress: Progress) -> WrittenFile:
        """Write the file, block of rows by block of rows: memory does not depend on its size.

        Args:
            directory: Bundle being written.
            progress: Told about bytes written.

        Raises:
            ResourceError: The disk refused.
        """
        (directory / WEIGHT_FILE).parent.mkdir(exist_ok=True)
        done, total = 0, sum(spec.nbytes for spec in self._specs())
        progress("weights", 0, total)
        with WeightFileWriter(directory / WEIGHT_FILE, self._specs()) as file:
            for tensor in self.ordered():
                module, _ = self._owners[tensor.name]
                weight = module.weights[tensor.symbol]
                by_rows = weight.encoding.components(weight.shape)[tensor.component].rows
                for _, _, parts in module.weights.row_blocks(tensor.symbol):
                    block = parts[tensor.component]
                    file.write(tensor.name, block)
                    done += block.nbytes
                    progress("weights", done, total)
                    if not by_rows:
                        break
        return file.finish()

    def _specs(self) -> list[TensorSpec]:
        return [TensorSpec(t.name, t.dtype, t.shape) for t in self.ordered()]


def places(tensors: Iterable[StoredTensor], file: WrittenFile) -> dict[str, dict[str, Any]]:
    """`tensors` of an artifact: type, shape and offset in the file, by name, in file order."""
    return {
        t.name: {"dtype": t.dtype, "shape": list(t.shape), "offset": file.offsets[t.name][0]}
        for t in sorted(tensors, key=lambda t: file.offsets[t.name][0])
    }


def _equal(a: Module, first: StoredTensor, b: Module, second: StoredTensor) -> bool:
    """Whether two tensors have the same bytes; reads them only where their sources differ."""
    if first != second:
        return False
    sources = ([(s, m.weights[s]) for s in m.weights.dependencies(first.symbol)] for m in (a, b))
    return next(sources) == next(sources) or (
        a.weights.digest(first.symbol) == b.weights.digest(second.symbol)
    )
