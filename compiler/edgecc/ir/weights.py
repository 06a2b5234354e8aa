"""The weight table: symbols, what they hold, and where the bytes come from.

A graph refers to weights by symbol. The table maps a symbol to a `Weight`: logical shape, encoding
and a lazy source. Nothing is read until a backend or the interpreter asks, and then by blocks of
rows, so memory use follows the largest block and not the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from edgecc.errors import InputError, InternalError, LegalizeError
from edgecc.ir.encodings import Array, Component, Encoding, IntShape
from edgecc.ir.types import DType

Parts: TypeAlias = dict[str, Array]
Param: TypeAlias = int | float | str | bool

BLOCK_BYTES = 8 << 20
"""Float32 bytes of one streamed block of rows: large enough for speed, small beside any model."""


class TensorReader(Protocol):
    """Row access to the tensors of one checkpoint."""

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Rows `start:stop` along axis 0 of a stored tensor, in its stored dtype."""
        ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One component of a stored weight: which tensor of which file."""

    component: str
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes in a checkpoint's safetensors files."""

    checkpoint: str
    parts: tuple[StoredPart, ...]

    def __str__(self) -> str:
        part = self.parts[0]
        return f"{self.checkpoint}/{part.file}: {part.key}"


@dataclass(frozen=True, slots=True)
class Derived:
    """Computed from other weights by a recipe (`edgecc.ir.recipes`): data, not a closure."""

    recipe: str
    inputs: tuple[str, ...]
    params: tuple[tuple[str, Param], ...] = ()

    def __str__(self) -> str:
        arguments = [f"@{i}" for i in self.inputs] + [f"{k}={v}" for k, v in self.params]
        return f"{self.recipe}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True)
class Inline:
    """Bytes held by the module itself: small constants only."""

    parts: tuple[tuple[str, bytes], ...]

    def __str__(self) -> str:
        return "inline"


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a weight: same bytes, same encoding, no copy."""

    symbol: str

    def __str__(self) -> str:
        return f"alias @{self.symbol}"


@dataclass(frozen=True, slots=True)
class Unbound:
    """A weight a graph needs and its checkpoint does not have.

    Attributes:
        role: What is missing: `lm_head` or `embed_tokens`.
        looked_for: Places that were searched, for the error message.
    """

    role: str
    looked_for: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"unbound {self.role}"


Source: TypeAlias = Stored | Derived | Inline | Alias | Unbound


@dataclass(frozen=True, slots=True)
class Weight:
    """One entry of the table. Knowing shape, bytes and origin costs no I/O.

    Attributes:
        shape: Logical shape; a linear weight is `[out, in]`.
        encoding: How the values are stored. An unbound weight has the encoding of what is expected
            in its place, which binding replaces.
        source: Where the bytes come from.
    """

    shape: IntShape
    encoding: Encoding
    source: Source

    @property
    def nbytes(self) -> int:
        """Stored bytes of all components."""
        return self.encoding.nbytes(self.shape)


class WeightTable(Mapping[str, Weight]):
    """Symbols to weights, in insertion order, with the readers of the checkpoints they live in."""

    def __init__(self) -> None:
        self._weights: dict[str, Weight] = {}
        self.readers: dict[str, TensorReader] = {}
        self.checked: dict[str, object] = {}
        """Belongs to the verifier: what each entry was made from when it was found to be right."""
        self._digests: dict[tuple[tuple[str, Weight], ...], str] = {}
        self._stated: dict[tuple[tuple[str, Weight], ...], str] = {}
        self._maxima: dict[tuple[tuple[str, Weight], ...], np.float32] = {}

    def __getitem__(self, symbol: str) -> Weight:
        return self._weights[symbol]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def copy(self) -> WeightTable:
        """A table with the same entries and readers; what is learned about bytes is shared."""
        table = WeightTable()
        table._weights = dict(self._weights)
        table.readers = dict(self.readers)
        table._digests = self._digests  # by entry, so that they hold for both
        table._stated = self._stated
        table._maxima = self._maxima
        return table

    def add(self, symbol: str, weight: Weight) -> str:
        """Add a new entry and return its symbol.

        Raises:
            InternalError: The symbol is taken by a different weight.
        """
        if self._weights.setdefault(symbol, weight) != weight:
            raise InternalError("ir/duplicate-weight", f"weight @{symbol} is defined twice")
        return symbol

    def rebind(self, symbol: str, weight: Weight) -> None:
        """Replace what an existing symbol stands for."""
        if symbol not in self._weights:
            raise InternalError("ir/unknown-weight", f"no weight @{symbol}")
        self._weights[symbol] = weight

    def remove(self, symbol: str) -> None:
        """Forget an entry. Used by dead-code elimination only."""
        del self._weights[symbol]

    def resolve(self, symbol: str) -> str:
        """The symbol at the end of a chain of aliases.

        Raises:
            InternalError: No such symbol, or the chain leads to nothing or runs in a circle.
        """
        if symbol not in self._weights:
            raise InternalError("ir/unknown-weight", f"no weight @{symbol}")
        end, seen = symbol, {symbol: None}
        while isinstance(source := self._weights[end].source, Alias):
            end = source.symbol
            if end in seen or end not in self._weights:
                raise InternalError(
                    "ir/bad-alias", f"alias @{symbol} leads to {' -> '.join([*seen, end])}"
                )
            seen[end] = None
        return end

    def dependencies(self, symbol: str) -> Iterator[str]:
        """The symbol, and everything its bytes are made from, each once.

        Raises:
            InternalError: One of them is unknown.
        """
        seen: set[str] = set()
        waiting = [symbol]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            if name not in self._weights:
                raise InternalError("ir/unknown-weight", f"no weight @{name}")
            seen.add(name)
            yield name
            source = self._weights[name].source
            if isinstance(source, Alias):
                waiting.append(source.symbol)
            elif isinstance(source, Derived):
                waiting += reversed(source.inputs)

    def unbound(self, symbol: str) -> Iterator[str]:
        """What is bound to nothing among the symbol and everything its bytes are made from."""
        for name in self.dependencies(symbol):
            if isinstance(self._weights[name].source, Unbound):
                yield name

    def read(self, symbol: str, start: int = 0, stop: int | None = None) -> Parts:
        """Component arrays of rows `start:stop` (components without rows come whole).

        Encodings that store several rows together are read by whole groups: `start` is a multiple
        of the encoding's row group, and the rest of the last group comes as well.

        Raises:
            LegalizeError: The weight is unbound.
            InternalError: The table has no reader of the weight's checkpoint, or `start` is inside
                a group.
        """
        weight = self._weights[self.resolve(symbol)]
        components = weight.encoding.components(weight.shape)
        source = weight.source
        start, stop = _whole_groups(weight, start, stop)
        if isinstance(source, Stored):
            if source.checkpoint not in self.readers:
                raise InputError(
                    "ir/no-reader",
                    f"weight @{symbol} is in checkpoint {source.checkpoint!r}, which is not open",
                    where=str(source),
                    help="read IR text with edgecc.read_ir(file), which opens the checkpoints it "
                    "names, or open them with edgecc.ir_source.attach_checkpoints(module)",
                )
            reader = self.readers[source.checkpoint]
            return {
                p.component: _stored(reader, p.key, components[p.component], start, stop)
                for p in source.parts
            }
        if isinstance(source, Inline):
            arrays = {
                name: np.frombuffer(data, components[name].dtype.numpy).reshape(
                    components[name].shape
                )
                for name, data in source.parts
            }
            return {
                n: a[slice(*components[n].cut(start, stop))] if components[n].rows else a
                for n, a in arrays.items()
            }
        if isinstance(source, Derived):
            from edgecc.ir.recipes import RECIPES  # recipes read tables: the one cycle of the IR

            return RECIPES[source.recipe].rows(self, weight, source, start, stop)
        raise LegalizeError(
            "bind/unbound-weight",
            f"weight @{symbol} has no bytes: {source}",
            help="compile the draft together with its target, so that it can be bound",
        )

    def dense(self, symbol: str, start: int = 0, stop: int | None = None) -> Array:
        """Exact values of rows `start:stop` (float32 for every floating-point encoding)."""
        weight = self._weights[self.resolve(symbol)]
        if not weight.shape:
            return weight.encoding.dequantize(self.read(symbol))
        stop = weight.shape[0] if stop is None else stop
        first = start - start % weight.encoding.row_group(weight.shape)
        values = weight.encoding.dequantize(self.read(symbol, first, stop))
        return values[start - first : stop - first]

    def row_blocks(
        self, symbol: str, block_bytes: int = BLOCK_BYTES
    ) -> Iterator[tuple[int, int, Parts]]:
        """Blocks `(start, stop, parts)` that together are the whole weight, in row order.

        Where a block has fewer rows than `stop - start`, they repeat: `edgecc.ir.sampled_weights`.
        """
        weight = self._weights[self.resolve(symbol)]
        if not weight.shape:
            yield 0, 0, self.read(symbol)
            return
        row = 4 * int(np.prod(weight.shape[1:], dtype=np.int64))
        group = weight.encoding.row_group(weight.shape)
        step = max(1, block_bytes // max(1, row) // group) * group
        for start in range(0, weight.shape[0], step):
            stop = min(start + step, weight.shape[0])
            yield start, stop, self.read(symbol, start, stop)

    def absolute_maximum(self, symbol: str) -> np.float32:
        """The largest magnitude in a weight, cached; streams the weight once. 0 if it is empty."""
        key = self._digest_key(self.resolve(symbol))
        if key not in self._maxima:
            encoding = self._weights[self.resolve(symbol)].encoding
            found = np.float32(0)
            for _, _, parts in self.row_blocks(symbol):
                values = encoding.dequantize(parts)
                found = max(found, np.float32(np.max(np.abs(values), initial=0)))
            self._maxima[key] = found
        return self._maxima[key]

    def digest(self, symbol: str) -> str:
        """SHA-256 over shape, encoding and all component bytes, cached; streams the weight once.

        Raises:
            InputError: IR text states another hash: the bytes changed since it was written.
        """
        symbol = self.resolve(symbol)
        weight = self._weights[symbol]
        key = self._digest_key(symbol)
        if key not in self._digests:
            hashes = {c: hashlib.sha256() for c in weight.encoding.components(weight.shape)}
            components = weight.encoding.components(weight.shape)
            for start, _, parts in self.row_blocks(symbol):
                for name, array in parts.items():
                    if components[name].rows or start == 0:
                        hashes[name].update(np.ascontiguousarray(array).view(np.uint8).data)
            total = hashlib.sha256(f"{weight.shape} {weight.encoding}".encode())
            for name, part in hashes.items():
                total.update(name.encode() + part.digest())
            found = total.hexdigest()
            stated = self._stated.get(key, found)
            if stated != found:
                raise InputError(
                    "ir/hash-mismatch",
                    f"weight @{symbol} has hash {found}, the IR text says {stated}",
                    where=self.origin(symbol),
                    help="the checkpoint changed since the text was written: lift it again",
                )
            self._digests[key] = found
        return self._digests[key]

    def known_digest(self, symbol: str) -> str | None:
        """The digest if it was computed, or stated by IR text; reads nothing. None for aliases."""
        if isinstance(self._weights[symbol].source, Alias) or not (self._digests or self._stated):
            return None
        try:
            key = self._digest_key(symbol)
        except InternalError:  # made from a weight that is not there: print it all the same
            return None
        return self._digests.get(key) or self._stated.get(key)

    def state_digest(self, symbol: str, digest: str) -> None:
        """Note what IR text says about the bytes; it is checked when they are read for a digest."""
        self._stated[self._digest_key(symbol)] = digest

    def _digest_key(self, symbol: str) -> tuple[tuple[str, Weight], ...]:
        return tuple((s, self._weights[s]) for s in self.dependencies(symbol))

    def origin(self, symbol: str) -> str:
        """Where the bytes come from, as one readable line."""
        from edgecc.ir.recipes import RECIPES

        weight = self._weights[self.resolve(symbol)]
        if isinstance(weight.source, Derived) and weight.source.inputs:
            given = weight.source.inputs
            inputs = given[: RECIPES[weight.source.recipe].sources] or given
            return f"{weight.source.recipe} of " + ", ".join(map(self.origin, inputs))
        return str(weight.source)

    def derive(self, symbol: str, recipe: str, inputs: tuple[str, ...], **params: Param) -> str:
        """Add a derived weight, its shape and encoding computed by the recipe; return its symbol.

        Raises:
            InternalError: No such recipe.
            ValueError: The recipe cannot take these inputs.
        """
        from edgecc.ir.recipes import RECIPES

        if recipe not in RECIPES:
            raise InternalError("ir/unknown-recipe", f"unknown recipe {recipe}")
        source = Derived(recipe, tuple(inputs), tuple(sorted(params.items())))
        resolved = [self._weights[self.resolve(i)] for i in inputs]
        shape, encoding = RECIPES[recipe].check(resolved, dict(params))
        return self.add(symbol, Weight(shape, encoding, source))

    def derive_shared(
        self, symbol: str, recipe: str, inputs: tuple[str, ...], **params: Param
    ) -> str:
        """An equal derived weight that exists, else a new one as by `derive`; return its symbol.

        For passes: two equal weights would be two tensors in a bundle.

        Raises:
            InternalError: No such recipe, or the symbol is taken by a different weight.
            ValueError: The recipe cannot take these inputs.
        """
        made = recipe, tuple(sorted(params.items()))
        wanted = [self.resolve(i) for i in inputs]
        for name in (symbol, *self._weights):
            source = self._weights[name].source if name in self._weights else None
            if (
                isinstance(source, Derived)
                and (source.recipe, source.params) == made
                and all(i in self._weights for i in source.inputs)
                and [self.resolve(i) for i in source.inputs] == wanted
            ):
                return name
        return self.derive(symbol, recipe, inputs, **params)

    def alias(self, symbol: str, target: str) -> None:
        """Make an existing entry another name of `target`, taking over its encoding.

        Other names of the entry follow it: they take over the encoding as well.

        Raises:
            InternalError: `target` is a name of the entry itself, or one of them is unknown.
        """
        end = self.resolve(target)
        if end == symbol:
            raise InternalError("ir/bad-alias", f"@{target} already leads to @{symbol}")
        self.rebind(symbol, replace(self._weights[end], source=Alias(target)))
        for name in self._names_of(symbol):
            self.rebind(name, replace(self._weights[end], source=self._weights[name].source))

    def _names_of(self, symbol: str) -> list[str]:
        """Aliases that lead to an entry."""
        found = [symbol]
        for end in found:
            found += [
                name
                for name, weight in self._weights.items()
                if isinstance(weight.source, Alias)
                and weight.source.symbol == end
                and name not in found
            ]
        return found[1:]


def _whole_groups(weight: Weight, start: int, stop: int | None) -> tuple[int, int]:
    """The range, its end moved to the end of a row group or of the weight.

    Raises:
        InternalError: The range starts inside a group.
    """
    if not weight.shape:
        return 0, 0
    rows, group = weight.shape[0], weight.encoding.row_group(weight.shape)
    if start % group:
        raise InternalError(
            "ir/row-group", f"{weight.encoding} is read by groups of {group} rows, not from {start}"
        )
    stop = rows if stop is None else stop
    return start, min(-(-stop // group) * group, max(rows, stop))


def _stored(reader: TensorReader, key: str, component: Component, start: int, stop: int) -> Array:
    """One component from a file, which may spell the axes after the first in another way.

    Producers store E8M0 exponents as u8.
    """
    if not component.rows:
        return _viewed(reader.read(key), component).reshape(component.shape)
    block = _viewed(reader.read(key, *component.cut(start, stop)), component)
    return block.reshape((-1, *component.shape[1:]))


def _viewed(array: Array, component: Component) -> Array:
    bytes_of_exponents = component.dtype is DType.F8E8M0 and array.dtype == np.uint8
    return array.view(component.dtype.numpy) if bytes_of_exponents else array
