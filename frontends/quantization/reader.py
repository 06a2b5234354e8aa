"""How each weight of a checkpoint is stored: decided from tensors, compared with the metadata."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from edgecc.errors import Diagnostic, InputError, Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization import fp4, fp8, words
from edgecc.frontends.quantization.declaration import Declaration, Scheme, form
from edgecc.frontends.quantization.layouts import foreign_layout, unsupported
from edgecc.frontends.quantization.metadata import read_declaration
from edgecc.frontends.quantization.names import as_weight, value_tensor, value_tensors
from edgecc.frontends.quantization.stored import EncodedWeight
from edgecc.ir.encodings import Dense
from edgecc.ir.types import DType, format_shape

Reader: TypeAlias = Callable[[Checkpoint, str, tuple[int, ...], "Scheme | None"], EncodedWeight]
_CACHE_SCALES = (".k_scale", ".v_scale")
_DENSE = (DType.BF16, DType.F16, DType.F32, DType.F64)
_SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")
_WORDS: Mapping[str, Reader] = {"awq": words.read_awq, "gptq": words.read_gptq}


def read_quantization(checkpoint: Checkpoint) -> Quantization:
    """Find out which quantization method a checkpoint declares.

    Raises:
        InputError: The metadata has a wrong type, or is missing.
        UnsupportedError: The declared method, or one that tensor names give away, is not supported.
    """
    return Quantization(checkpoint, read_declaration(checkpoint))


class Quantization:
    """Precision of every weight of one checkpoint. A draft has its own, never its target's.

    Attributes:
        checkpoint: The checkpoint.
        declaration: What its metadata says, None if nothing.
        consumed: Names of all tensors that have been asked for.
    """

    def __init__(self, checkpoint: Checkpoint, declaration: Declaration | None) -> None:
        """Use `read_quantization`."""
        self.checkpoint, self.declaration = checkpoint, declaration
        self.consumed: set[str] = set()
        self._encodings: dict[str, str] = {}
        self._not_packed: set[str] = set()
        self._otherwise: dict[str, str] = {}
        self._not_declared: set[str] = set()
        self._other_groups: dict[str, str] = {}

    def weight(self, module: str, shape: tuple[int, ...]) -> EncodedWeight:
        """The weight of a linear layer, embedding or norm: `module + ".weight"`, or packed.

        The layout follows from the dtype of the weight and the tensors beside it, never from
        shapes: a packed matrix of half the width can have the very shape a dense one should have.

        Args:
            module: Module name as in the checkpoint.
            shape: Logical shape the model needs.

        Raises:
            InputError: The weight or one of its scales is missing, has a wrong dtype or shape, or a
                global scale is not a positive number.
            UnsupportedError: The module is stored in a layout edgecc cannot read.
        """
        if (layout := foreign_layout(self.checkpoint.tensors, module, shape)) is not None:
            raise unsupported(layout, f"{self.checkpoint.role}: {module}")
        read = self._reader(module)
        if read is None:
            weight = self._dense(f"{module}.weight", module, shape)
        else:
            scheme = self.declaration.reads(module) if self.declaration is not None else None
            weight = read(self.checkpoint, module, shape, scheme)
        self._cross_check(weight)
        return self._consume(weight)

    def size(self, module: str) -> tuple[int, int] | None:
        """Rows and columns of a stored matrix; None if it is not stored or not in a known layout.

        What reading would refuse is not checked.
        """
        key = value_tensor(self.checkpoint.tensors, module)
        shape = self.checkpoint.info(key).shape if key is not None else ()
        blocks = key is not None and key.endswith("_blocks")
        if key is None or len(shape) != (3 if blocks else 2):
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        dtype = self.checkpoint.info(key).dtype
        if key.endswith(".qweight"):
            by_row = self._method == "gptq"
            return (columns, 8 * rows) if by_row else (8 * columns, rows)
        if dtype is DType.I32 and key.endswith(".weight_packed"):
            return rows, 8 * columns
        if dtype.is_float:
            return rows, columns
        return (rows, 2 * columns) if dtype is DType.U8 else None  # FP4: two codes a byte

    @property
    def _method(self) -> str:
        return self.declaration.method if self.declaration is not None else ""

    def _reader(self, module: str) -> Reader | None:
        """Who reads the layout of a module, by the tensor with its values; None: it is dense.

        Raises:
            InputError: There is no such tensor, or more than one.
            UnsupportedError: It is packed in an order that the metadata does not tell.
        """
        key = value_tensor(self.checkpoint.tensors, module) or f"{module}.weight"
        dtype = self.checkpoint.info(key).dtype
        if others := [n for n in value_tensors(self.checkpoint.tensors, module) if n != key]:
            raise InputError(
                "quant/two-weights",
                f"the weight is stored twice: {others[0]} is there as well",
                where=self.checkpoint.location(key),
                help="two exports are mixed in this folder: fetch the checkpoint again",
            )
        if key.endswith("_blocks"):
            return fp4.read_blocks
        if key.endswith(".qweight"):
            if self._method not in _WORDS:
                raise unsupported(
                    f"AWQ or GPTQ below metadata of {self._method or 'no method'}",
                    self.checkpoint.location(key),
                )
            return _WORDS[self._method]
        if key.endswith(".weight_packed"):
            return fp4.read_bytes if dtype is DType.U8 else words.read_packed
        return {DType.U8: fp4.read_bytes, DType.F8E4M3: fp8.read_fp8}.get(dtype)

    def tensor(self, key: str, shape: tuple[int, ...]) -> EncodedWeight:
        """A dense parameter by its full name: a bias, a table.

        Raises:
            InputError: The tensor is missing, or has a wrong dtype or shape.
            UnsupportedError: Its dtype has no counterpart in the IR.
        """
        return self._consume(self._dense(key, key, shape))

    @property
    def findings(self) -> list[Diagnostic]:
        """Contradictions between metadata and the weights asked for so far, and unused patterns."""
        if self.declaration is None:
            declared: list[Diagnostic] = []
        else:
            declared = [*self.declaration.findings, *self._declaration_notes(self.declaration)]
        where = (
            self.declaration.where if self.declaration else f"{self.checkpoint.role}/config.json"
        )
        return [
            *declared,
            *_listed(
                "quant/declared-not-stored",
                "modules are declared quantized but stored unquantized; they are read as stored",
                sorted(self._not_packed),
                where,
            ),
            *_listed(
                "quant/stored-otherwise",
                "modules are stored in another format than declared; they are read as stored",
                [f"{module}: {what}" for module, what in sorted(self._otherwise.items())],
                where,
            ),
            *_listed(
                "quant/group-size",
                "modules have groups of another size than declared; the stored scales count",
                [f"{module}: {what}" for module, what in sorted(self._other_groups.items())],
                where,
            ),
            *_listed(
                "quant/stored-not-declared",
                "modules are stored quantized but not declared so; they are read as stored",
                sorted(self._not_declared),
                where,
            ),
        ]

    def summary(self) -> str:
        """Encodings of the weights asked for so far with their counts: `nvfp4 x 29, bf16 x 18`."""
        counts = Counter(self._encodings.values())
        return ", ".join(f"{name} x {count}" for name, count in sorted(counts.items()))

    def cache_decision(self) -> str | None:
        """What is made of a declared precision of the KV cache, None if none is declared.

        ModelOpt's constant-scale recipe declares FP8 and stores no scales, which means 1. Keeping
        the values wider than declared is always possible and loses nothing.
        """
        declared = self.declaration.kv_cache if self.declaration is not None else None
        if not declared:
            return None
        scales = sum(1 for name in self.checkpoint.tensors if name.endswith(_CACHE_SCALES))
        stored = f"{scales} scales are stored" if scales else "no scales are stored, which means 1"
        return f"{declared} is declared ({stored}); kept in float32, which is at least as accurate"

    def unused(self, known_ignorable: Iterable[str] = ()) -> list[str]:
        """Tensors nobody asked for, sorted.

        Args:
            known_ignorable: Globs of tensor names that are expected to be left over.
        """
        patterns = tuple(known_ignorable)
        return sorted(
            name
            for name in self.checkpoint.tensors.keys() - self.consumed
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )

    def _dense(self, key: str, module: str, shape: tuple[int, ...]) -> EncodedWeight:
        info = self.checkpoint.info(key)
        where = self.checkpoint.location(key)
        stored = f"{info.dtype.value} {format_shape(info.shape)}"
        if info.dtype not in _DENSE:
            raise InputError(
                "quant/bad-dtype", f"stored as {stored}, expected floating point", where=where
            )
        if info.shape != shape:
            raise InputError(
                "quant/bad-shape",
                f"stored as {stored}, expected {format_shape(shape)}",
                where=where,
                help="config and weights may be of different revisions: fetch both again",
            )
        for component in _SCALES:
            if (scale := f"{module}.{component}") in self.checkpoint.tensors:
                raise InputError(
                    "quant/stray-scale",
                    f"the weight is unquantized ({stored}) but {scale} is stored beside it",
                    where=where,
                    help="two exports are mixed in this folder: fetch the checkpoint again",
                )
        return EncodedWeight(Dense(info.dtype), {"weight": key}, module, shape)

    def _expected(self, module: str) -> Scheme | None:
        return self.declaration.expects(module) if self.declaration is not None else None

    def _cross_check(self, weight: EncodedWeight) -> None:
        expected = self._expected(weight.module)
        packed = not isinstance(weight.encoding, Dense)
        if packed and expected is None:
            self._not_declared.add(weight.module)
        elif packed and expected is not None and not expected.allows(weight.encoding):
            self._otherwise[weight.module] = f"{form(weight.encoding)}, declared {expected.name}"
        elif packed and expected is not None and expected.group is not None:
            self._compare_groups(weight, expected.group)
        # Metadata speaks of linear layers: norms and embedding tables are never meant.
        linear = len(weight.shape) == 2 and "embed" not in weight.module.rpartition(".")[2]
        if linear and expected is not None and not packed:
            self._not_packed.add(weight.module)

    def _compare_groups(self, weight: EncodedWeight, declared: int) -> None:
        stored = getattr(weight.encoding, "group", None)
        wanted = weight.shape[1] if declared == -1 else declared
        if stored not in (None, wanted):
            self._other_groups[weight.module] = f"groups of {stored} columns, declared {declared}"

    def _consume(self, weight: EncodedWeight) -> EncodedWeight:
        # What weight-only execution leaves out still belongs to the weight.
        self.consumed.update(weight.parts.values(), weight.beside)
        encoding = weight.encoding
        name = encoding.dtype.value if isinstance(encoding, Dense) else encoding.kind
        self._encodings[weight.module] = name
        return weight

    def _declaration_notes(self, declaration: Declaration) -> list[Diagnostic]:
        modules = {as_weight(n).rpartition(".")[0] for n in self.checkpoint.tensors}
        unused = [*declaration.excluded.unused(modules), *declaration.patterns.unused(modules)]
        found = _listed(
            "quant/unused-pattern",
            "patterns of the quantization config name no stored module",
            unused,
            declaration.where,
            Severity.NOTE,
        )
        if declaration.kv_cache:
            found.append(
                Diagnostic(
                    "quant/kv-cache",
                    f"a KV cache in {declaration.kv_cache} is declared; edgecc keeps it in 16 or 32"
                    " bits, which is at least as accurate",
                    where=declaration.where,
                    severity=Severity.NOTE,
                )
            )
        return found


def _listed(
    id: str, message: str, names: list[str], where: str, severity: Severity = Severity.WARNING
) -> list[Diagnostic]:
    if not names:
        return []
    shown = (*names[:5], f"and {len(names) - 5} more") if len(names) > 5 else tuple(names)
    return [Diagnostic(id, f"{len(names)} {message}", where, shown, severity=severity)]
