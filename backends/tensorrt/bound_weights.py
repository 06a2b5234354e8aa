"""Inputs that hold weights, at load: one device buffer for each distinct array, and who binds it.

The host's side only: what buffers there are, their bytes block by block from the mapped weight
file, and the buffer of each input of each engine. The runtime allocates and copies. Nothing of the
compiler is imported, and a bundle may come from anywhere: what does not fit raises BundleError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from edgecc.backends.base import Array
from edgecc.backends.layouts import Parts
from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.schema import validator
from edgecc.backends.tensorrt import forms
from edgecc.errors import BundleError

Key: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...], tuple[int, ...]]
"""Form, type, tensors and block: what tells one array from another."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array that engines bind.

    Attributes:
        id: Its place among the buffers.
        dtype: Element type of the engines, for example `bf16`, `i8`, `f4e2m1`.
        shape: In elements.
        nbytes: Bytes of the buffer.
        form: How it is made, one of `forms.FORMS`.
        tensors: Tensors of the weight file, by component.
        block: Rows and columns that share a scale, if the form asks.
    """

    id: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    form: str
    tensors: tuple[tuple[str, str], ...]
    block: tuple[int, ...]


class BoundWeights:
    """Buffers of one artifact.

    Args:
        artifact: Its part of the manifest; `engines.<graph>.bound` and `tensors` are used.
        file: The mapped weight file; None if the artifact binds nothing.

    Attributes:
        buffers: Each distinct array once, in the order in which engines name them.

    Raises:
        BundleError: An entry is damaged, a tensor is missing, or a form cannot be made of it.
    """

    def __init__(self, artifact: Mapping[str, Any], file: WeightFile | None) -> None:
        _check(artifact)
        self._file = file
        self._inputs: dict[str, dict[str, int]] = {}
        found: dict[Key, Buffer] = {}
        for engine, facts in artifact["engines"].items():
            self._inputs[engine] = {}
            for item in facts.get("bound", ()):
                key = _key(item)
                if key not in found:
                    found[key] = self._buffer(len(found), item, engine)
                elif found[key].shape != tuple(item["shape"]):
                    raise _damaged(f"{engine}: {item['name']!r} has another shape elsewhere")
                if item["name"] in self._inputs[engine]:
                    raise _damaged(f"{engine}: {item['name']!r} is bound twice")
                self._inputs[engine][item["name"]] = found[key].id
        self.buffers = tuple(found.values())

    def inputs(self, engine: str) -> Mapping[str, int]:
        """Input name to buffer id, of an engine.

        Raises:
            BundleError: There is no such engine.
        """
        if engine not in self._inputs:
            raise _damaged(f"there is no engine {engine!r}")
        return self._inputs[engine]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in self.buffers)

    def blocks(self, buffer: Buffer) -> Iterator[tuple[int, Array]]:
        """The content as `(offset, bytes)`, in order and without gaps.

        Bytes are contiguous u8 arrays: views of the mapped file where an array lies as it is
        stored, and a few megabytes of memory at a time else.
        """
        parts = self._parts(buffer.tensors)
        offset = 0
        if buffer.form == "stored":
            (array,) = parts.values()
            yield 0, _bytes(array)
            return
        for _, block in forms.row_blocks(buffer.form, parts, buffer.dtype, buffer.block):
            data = _bytes(block)
            yield offset, data
            offset += data.nbytes

    def _buffer(self, index: int, item: Mapping[str, Any], engine: str) -> Buffer:
        form, dtype, tensors, block = _key(item)
        where = f"{engine}: {item['name']!r}"
        if form not in forms.FORMS:
            raise BundleError(
                "bundle/unknown-form",
                f"{where} has an unknown form {form!r}",
                where="bundle.json",
                help="the bundle was made by a newer edgecc: update, or compile again",
            )
        try:
            shape = forms.shape_of(form, self._parts(tensors), dtype, block)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _damaged(f"{where} cannot be made of {dict(tensors)}: {error}") from error
        if shape != tuple(item["shape"]):
            raise _damaged(f"{where} is {list(shape)}, the manifest says {item['shape']}")
        bits = 4 if dtype == "f4e2m1" else 8 * np.dtype(forms.NUMPY[dtype]).itemsize
        return Buffer(index, dtype, shape, prod(shape) * bits // 8, form, tensors, block)

    def _parts(self, tensors: tuple[tuple[str, str], ...]) -> Parts:
        if self._file is None:
            raise _damaged("engines bind weights, and there is no weight file")
        return {component: self._file.tensor(name) for component, name in tensors}


def _key(item: Mapping[str, Any]) -> Key:
    tensors = tuple(sorted(item["tensors"].items()))
    return item["form"], item["dtype"], tensors, tuple(item.get("block", ()))


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _check(artifact: Mapping[str, Any]) -> None:
    schema = validator("edgecc.backends.tensorrt", "bound_weights.schema.json")
    error = next(iter(schema.iter_errors(artifact)), None)
    if error is not None:
        raise _damaged(f"{error.json_path}: {error.message}")


def _damaged(finding: str) -> BundleError:
    return BundleError(
        "bundle/bound-weights",
        f"the weights of the engines cannot be bound: {finding[:300]}",
        where="bundle.json",
        help="copy the bundle again from where it was made, or compile it again",
    )
