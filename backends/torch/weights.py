"""Weights on a device: packed bytes are read through the table and decoded by PyTorch.

Reading is lazy and by blocks of rows, as for the interpreter, so that a model larger than memory
can be evaluated. On request, decoded weights stay on the device within a budget of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from edgecc.backends.torch.encodings import decode
from edgecc.backends.torch.tensors import to_tensor
from edgecc.ir.encodings import Array, Dense
from edgecc.ir.ops.base import check_indices
from edgecc.ir.weights import Derived, Weight, WeightTable

Block: TypeAlias = tuple[int, int, Tensor]
Identity: TypeAlias = tuple[tuple[str, Weight], ...]


class WeightStore:
    """The weights of one table as tensors.

    Args:
        table: Where they are.
        dtype: What floating-point values are held in; integers stay what they are.
        device: Where the tensors go.
        keep_bytes: Decoded weights up to this many bytes altogether are kept for the next use; 0
            keeps nothing.
    """

    def __init__(
        self, table: WeightTable, dtype: torch.dtype, device: torch.device, keep_bytes: int = 0
    ) -> None:
        self.table = table
        self.dtype = dtype
        self.device = device
        self.keep_bytes = keep_bytes
        self._kept: dict[str, tuple[Identity, Tensor]] = {}

    def __getitem__(self, symbol: str) -> TorchWeight:
        return TorchWeight(self, symbol)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that are kept now."""
        return sum(tensor.nbytes for _, tensor in self._kept.values())

    def kept(self, symbol: str) -> Tensor | None:
        """The whole weight, rows first, if it is kept or the budget has room to keep it."""
        if not self.keep_bytes:
            return None
        symbol = self.table.resolve(symbol)
        # Passes change tables in place: a kept tensor is only good for the very same sources.
        identity = tuple((s, self.table[s]) for s in self.table.dependencies(symbol))
        if symbol in self._kept:
            known, tensor = self._kept[symbol]
            if known == identity:
                return tensor
            del self._kept[symbol]
        if self.kept_bytes + self._nbytes(self.table[symbol]) > self.keep_bytes:
            return None
        tensor = torch.cat([block for _, _, block in self.stream(symbol)])
        self._kept[symbol] = identity, tensor
        return tensor

    def stream(self, symbol: str) -> Iterator[Block]:
        """Decoded blocks of rows that together are the whole weight: at least one.

        A scalar is one block of shape `[1]`.
        """
        symbol = self._packed(symbol)
        weight = self.table[symbol]
        if not weight.shape or not weight.shape[0]:
            values = self.decode(symbol, self.table.read(symbol))
            shape = weight.shape or (1,)
            yield 0, shape[0], values.reshape(shape)
            return
        for start, stop, parts in self.table.row_blocks(symbol):
            yield start, stop, self.decode(symbol, parts)

    def pick(self, symbol: str, rows: list[int]) -> Tensor:
        """Decoded rows, in the order given; each is one read of packed bytes.

        A read is the whole group of rows that the encoding stores together.
        """
        symbol = self._packed(symbol)
        if not rows:
            return self.decode(symbol, self.table.read(symbol, 0, 0))
        weight = self.table[symbol]
        group = weight.encoding.row_group(weight.shape)
        picked = []
        for row in rows:
            first = row - row % group
            last = min(first + group, weight.shape[0])
            values = self.decode(symbol, self.table.read(symbol, first, last))
            picked.append(values[row - first : row - first + 1])
        return torch.cat(picked)

    def decode(self, symbol: str, parts: Mapping[str, Array]) -> Tensor:
        """Values of component arrays, in the dtype of the store."""
        tensors = {name: to_tensor(array, self.device) for name, array in parts.items()}
        values = decode(self.table[symbol].encoding, tensors)
        return values.to(self.dtype) if values.dtype.is_floating_point else values

    def _nbytes(self, weight: Weight) -> int:
        """Bytes of the decoded weight."""
        encoding = weight.encoding
        if isinstance(encoding, Dense) and not encoding.dtype.is_float:
            return encoding.nbytes(weight.shape)
        return prod(weight.shape) * self.dtype.itemsize

    def _packed(self, symbol: str) -> str:
        """The symbol, or the packed weight it is the dequantization of: decoding is done here."""
        symbol = self.table.resolve(symbol)
        source = self.table[symbol].source
        if isinstance(source, Derived) and source.recipe == "dequantize":
            packed = self._packed(source.inputs[0])
            if not isinstance(self.table[packed].encoding, Dense):
                return packed
        return symbol


class TorchWeight:
    """One weight operand of a node.

    Args:
        store: What reads it.
        symbol: Its name in the table.
    """

    def __init__(self, store: WeightStore, symbol: str) -> None:
        self._store = store
        self.symbol = symbol
        self.weight: Weight = store.table[store.table.resolve(symbol)]

    def dense(self) -> Tensor:
        """All values, in the logical shape."""
        kept = self._store.kept(self.symbol)
        if kept is None:
            kept = torch.cat([block for _, _, block in self._store.stream(self.symbol)])
        return kept.reshape(self.weight.shape)

    def blocks(self) -> Iterator[Block]:
        """Blocks of rows `(start, stop, values)`, at least one; one only where it is kept."""
        kept = self._store.kept(self.symbol)
        if kept is None:
            yield from self._store.stream(self.symbol)
        else:
            yield 0, self.weight.shape[0], kept

    def rows(self, indices: Tensor) -> Tensor:
        """Rows by i64 index `[...]`: `[..., *row]`. Only rows that occur are read.

        Raises:
            RequestError: There is no such row.
        """
        unique, inverse = torch.unique(indices, return_inverse=True)
        check_indices(f"table @{self.symbol}", unique.cpu().numpy(), self.weight.shape[0])
        kept = self._store.kept(self.symbol)
        if kept is not None:
            return kept[indices]
        return self._store.pick(self.symbol, unique.tolist())[inverse]
