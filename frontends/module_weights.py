"""Turns the tensors of one checkpoint into entries of a module's weight table."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cached_property

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint, TensorInfo
from edgecc.frontends.gather import Gather
from edgecc.frontends.quantization import EncodedWeight, Quantization
from edgecc.frontends.quantization.names import as_weight, value_tensor
from edgecc.ir.core import Module
from edgecc.ir.encodings import Dense, Encoding, IntShape
from edgecc.ir.rope import RopeParams
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, Param, Stored, StoredPart, Unbound, Weight

UNREADABLE = "unreadable"
"""Role of the stand-in for a stored weight that cannot be used."""


class ModuleWeights:
    """Adds weights of one checkpoint to a module, under `<owner>.<tensor name>`.

    Args:
        module: Module whose table is extended.
        checkpoint: Where the tensors are.
        quantization: How each linear layer is stored.
        names: Canonical tensor names to stored ones, where a checkpoint spells them differently.
        prefix: Canonical prefix and the stored one, for names that are not stored: messages say
            what was looked for.
        owner: Whose network they belong to, if not that of the checkpoint's role; it has no other
            tensors than those in `names`.

    Attributes:
        owner: What their symbols begin with.
        errors: What is wrong with single tensors: an unbound weight stands in for each, so that one
            run finds all of them. Whoever builds a network raises them at its end.
    """

    def __init__(
        self,
        module: Module,
        checkpoint: Checkpoint,
        quantization: Quantization,
        names: Mapping[str, str] | None = None,
        prefix: tuple[str, str] = ("", ""),
        owner: str | None = None,
    ) -> None:
        self.module = module
        self.checkpoint = checkpoint
        self.quantization = quantization
        self._names = dict(names or {})
        self._prefix = prefix
        self.errors = Gather()
        self.owner = owner or checkpoint.role
        self._scope = checkpoint.tensors if owner is None else frozenset(self._names.values())
        module.weights.readers[checkpoint.role] = checkpoint

    def has(self, name: str) -> bool:
        """Whether the checkpoint stores a tensor (by canonical name) in any encoding."""
        stored = self._spelled(name)
        if stored in self.checkpoint.tensors:
            return True
        module = stored.removesuffix(".weight")
        return module != stored and value_tensor(self.checkpoint.tensors, module) is not None

    def names(self) -> Mapping[str, str]:
        """Canonical to stored names, where they were given."""
        return self._names

    def matrix(self, module: str, rows: int, columns: int) -> str:
        """A linear or embedding weight `[rows, columns]`, packed or dense; returns its symbol."""
        name = f"{module}.weight"
        with self.errors.step():
            stored = self._stored(name).removesuffix(".weight")
            found = self.quantization.weight(stored, (rows, columns))
            if found.recipe:
                return self._derive(name, found)
            return self._add(name, (rows, columns), found.encoding, found.parts)
        return self.unbound(name, rows, columns, UNREADABLE)

    def vector(self, name: str, size: int) -> str:
        """A dense vector, such as a norm weight or a bias; returns its symbol."""
        return self.dense(name, (size,))

    def dense(self, name: str, shape: IntShape) -> str:
        """A dense floating-point parameter of any rank; returns its symbol."""
        return self._dense(name, shape, shape)

    def kernel(self, name: str, rows: int, kernel: IntShape) -> str:
        """A convolution whose stride is its kernel, as a matrix over flat patches; its symbol.

        Args:
            name: Of the tensor `[rows, *kernel]`.
            rows: Output channels.
            kernel: Input channels and the sizes of a patch.
        """
        return self._dense(name, (rows, *kernel), (rows, math.prod(kernel)))

    def one_plus(self, name: str, size: int) -> str:
        """A vector stored as its offset from one: `1 + w` in float32; returns its symbol."""
        offset = self.vector(name, size)
        return self.module.weights.derive(f"{offset}+1", "add_one", (offset,))

    def stored_name(self, name: str) -> str:
        """How the checkpoint spells a canonical tensor name, or that of a module's weight."""
        stored = self._stored(name)
        packed = value_tensor(self.checkpoint.tensors, stored.removesuffix(".weight"))
        return packed if name.endswith(".weight") and packed is not None else stored

    def ids(self, name: str, size: int) -> str:
        """A table of `size` ids or offsets of ids, i64; returns its symbol.

        Raises:
            InputError: The stored tensor has another shape or dtype.
        """
        stored = self._stored(name)
        info = self.checkpoint.info(stored)
        if info.shape != (size,) or info.dtype is not DType.I64:
            raise InputError(
                "checkpoint/shape",
                f"expected an i64 tensor of shape [{size}], found {info.dtype.value} "
                f"{list(info.shape)}",
                where=self.checkpoint.location(stored),
                help="config and weights are of different models or revisions: fetch both again",
            )
        self.quantization.consumed.add(stored)
        return self._add(name, (size,), Dense(info.dtype), {"weight": stored})

    def unbound(self, name: str, rows: int, columns: int, role: str) -> str:
        """A matrix the checkpoint does not have and borrows; returns its symbol."""
        where = f"{self.checkpoint.role}: {self._spelled(name)}"
        weight = Weight((rows, columns), Dense(DType.BF16), Unbound(role, (where,)))
        return self.module.weights.add(self._symbol(name), weight)

    def own_or_borrowed(self, module: str, rows: int, columns: int) -> str:
        """The matrix of a module if the checkpoint stores it, else an unbound one of that role."""
        if self.has(f"{module}.weight"):
            return self.matrix(module, rows, columns)
        return self.unbound(f"{module}.weight", rows, columns, module)

    def size(self, name: str) -> tuple[int, int] | None:
        """Rows and columns of a stored matrix, None if it is not stored or not in a known layout.

        Args:
            name: `module.weight`, however its values are called.
        """
        return self.quantization.size(self._stored(name).removesuffix(".weight"))

    def columns(self, name: str) -> int | None:
        """Logical columns of a stored matrix, None if it is not stored or not in a known layout."""
        size = self.size(name)
        return size[1] if size is not None else None

    def rope_tables(self, rope: RopeParams, length: int, name: str = "rope") -> tuple[str, str]:
        """Cosine and sine tables for positions below `length`; returns their symbols."""
        params: list[tuple[str, Param]] = [("length", length)]
        params += [(k, v) for k, v in asdict(rope).items() if v is not None]
        symbols = []
        for part in ("cos", "sin"):
            source = Derived("rope_table", (), tuple(sorted([*params, ("part", part)])))
            weight = Weight((length, rope.dim // 2), Dense(DType.F32), source)
            symbols.append(self.module.weights.add(self._symbol(f"{name}.{part}"), weight))
        return symbols[0], symbols[1]

    def unused(self, ignorable: Iterable[str]) -> list[str]:
        """Names of stored tensors nothing has asked for, known ones left out."""
        patterns = tuple(ignorable)
        return [
            name
            for name in self.checkpoint.tensors
            if name in self._scope
            and name not in self.quantization.consumed
            and not any(fnmatch.fnmatchcase(name, p) for p in patterns)
        ]

    def _dense(self, name: str, stored: IntShape, shape: IntShape) -> str:
        """A dense parameter as it is stored, under the shape that it is used in."""
        with self.errors.step():
            info = self._floating(name, stored)
            return self._add(name, shape, Dense(info.dtype), {"weight": self._stored(name)})
        weight = Weight(shape, Dense(DType.BF16), Unbound(UNREADABLE, (name,)))
        return self.module.weights.add(self._symbol(name), weight)

    def _floating(self, name: str, shape: IntShape) -> TensorInfo:
        """What is known of a dense floating-point tensor, which counts as read from here on."""
        stored = self._stored(name)
        info = self.checkpoint.info(stored)
        if info.shape != shape or not info.dtype.is_float:
            raise InputError(
                "checkpoint/shape",
                f"expected a floating-point tensor of shape {list(shape)}, found "
                f"{info.dtype.value} {list(info.shape)}",
                where=self.checkpoint.location(stored),
                help="config and weights are of different models or revisions: fetch both again",
            )
        self.quantization.consumed.add(stored)
        return info

    def _add(self, name: str, shape: IntShape, encoding: Encoding, parts: Mapping[str, str]) -> str:
        stored = tuple(
            StoredPart(component, self.checkpoint.info(key).file, key)
            for component, key in parts.items()
        )
        weight = Weight(shape, encoding, Stored(self.checkpoint.role, stored))
        return self.module.weights.add(self._symbol(name), weight)

    def _derive(self, name: str, found: EncodedWeight) -> str:
        """A weight that is stored in another order than that of its encoding."""
        module = name.removesuffix(".weight")
        inputs = []
        for component, key in found.parts.items():
            info = self.checkpoint.info(key)
            part = f"{module}.{component}"
            inputs.append(self._add(part, info.shape, Dense(info.dtype), {"weight": key}))
        table = self.module.weights
        return table.derive(self._symbol(name), found.recipe, tuple(inputs), **found.params)

    def _symbol(self, name: str) -> str:
        return f"{self.owner}.{name}"

    def _stored(self, name: str) -> str:
        return self._spelled(name) if self.has(name) else self._as_neighbours(name)

    def _spelled(self, name: str) -> str:
        if name in self._names:
            return self._names[name]
        module = name.removesuffix(".weight")
        if module != name and (packed := value_tensor(self._names, module)) is not None:
            return as_weight(self._names[packed])
        canonical, stored = self._prefix
        if name.startswith(canonical):
            return stored + name.removeprefix(canonical)
        return name

    def _as_neighbours(self, name: str) -> str:
        """A name that is not stored, spelled like the nearest one that is: for messages."""
        prefix = name
        while dot := prefix.rfind(".") + 1:
            prefix = prefix[: dot - 1]
            if prefix in self._spellings:
                return self._spellings[prefix] + name[dot - 1 :]
        return self._spelled(name)

    @cached_property
    def _spellings(self) -> Mapping[str, str]:
        """Parts that canonical names begin with, to how the first stored name spells them."""
        found: dict[str, str] = {}
        for canonical, stored in self._names.items():
            for dot in (i for i, char in enumerate(canonical) if char == "."):
                if stored.endswith(canonical[dot:]):
                    found.setdefault(canonical[:dot], stored.removesuffix(canonical[dot:]))
        return found
