"""How each weight of a checkpoint is stored: decided from tensors, compared with the metadata."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgecc.errors import Diagnostic, InputError, Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.fp8 import fp8_parts
from edgecc.frontends.quantization.layouts import foreign_layout, foreign_tensors, unsupported
from edgecc.frontends.quantization.modelopt import (
    ALGORITHMS,
    WEIGHT_ONLY,
    Declaration,
    form,
    read_declaration,
)
from edgecc.frontends.quantization.nvfp4 import nvfp4_parts
from edgecc.ir.encodings import Dense, Encoding
from edgecc.ir.types import DType, format_shape

_MODELOPT = ("modelopt", "modelopt_fp4")
_PACKED = {DType.U8: nvfp4_parts, DType.F8E4M3: fp8_parts}
_CACHE_SCALES = (".k_scale", ".v_scale")
_DENSE = (DType.BF16, DType.F16, DType.F32, DType.F64)


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """How one weight is stored.

    Attributes:
        encoding: Its layout.
        parts: Component name of the encoding -> tensor in the checkpoint.
        module: The module it belongs to (or the tensor's own name).
        shape: Logical shape.
    """

    encoding: Encoding
    parts: Mapping[str, str]
    module: str
    shape: tuple[int, ...]


def read_quantization(checkpoint: Checkpoint) -> Quantization:
    """Find out which quantization method a checkpoint declares.

    Raises:
        InputError: The metadata has a wrong type.
        UnsupportedError: The declared method, or one that tensor names give away, is not supported.
    """
    block, side = _metadata(checkpoint)
    if block is not None:
        _check_method(block)
    if block is not None or side is not None:
        return Quantization(checkpoint, read_declaration(block, side))
    if (foreign := foreign_tensors(checkpoint.tensors)) is not None:
        producer, name, count = foreign
        raise unsupported(
            producer, checkpoint.location(name), f"{count} such tensors, and no metadata about them"
        )
    return Quantization(checkpoint, None)


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

    def weight(self, module: str, shape: tuple[int, ...]) -> EncodedWeight:
        """The weight `module + ".weight"` of a linear layer, embedding or norm.

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
        key = f"{module}.weight"
        if (layout := foreign_layout(self.checkpoint.tensors, module, shape)) is not None:
            raise unsupported(layout, f"{self.checkpoint.role}: {module}")
        read_parts = _PACKED.get(self.checkpoint.info(key).dtype)
        if read_parts is None:
            weight = self._dense(key, module, shape)
        else:
            weight_only = self._expected(module) in WEIGHT_ONLY
            encoding, parts = read_parts(self.checkpoint, module, shape, weight_only=weight_only)
            weight = EncodedWeight(encoding, parts, module, shape)
            # A scale that weight-only execution leaves out still belongs to this weight.
            self.consumed |= {f"{module}.input_scale"} & self.checkpoint.tensors.keys()
        self._cross_check(weight)
        return self._consume(weight)

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
        for component in ("weight_scale", "weight_scale_2"):
            if (scale := f"{module}.{component}") in self.checkpoint.tensors:
                raise InputError(
                    "quant/stray-scale",
                    f"the weight is unquantized ({stored}) but {scale} is stored beside it",
                    where=where,
                    help="two exports are mixed in this folder: fetch the checkpoint again",
                )
        return EncodedWeight(Dense(info.dtype), {"weight": key}, module, shape)

    def _expected(self, module: str) -> str | None:
        return self.declaration.expects(module) if self.declaration is not None else None

    def _cross_check(self, weight: EncodedWeight) -> None:
        expected = self._expected(weight.module)
        packed = not isinstance(weight.encoding, Dense)
        if packed and expected is None:
            self._not_declared.add(weight.module)
        elif packed and form(weight.encoding) not in ALGORITHMS.get(expected or "", ()):
            self._otherwise[weight.module] = f"{form(weight.encoding)}, declared {expected}"
        # Metadata speaks of linear layers: norms and embedding tables are never meant.
        linear = len(weight.shape) == 2 and "embed" not in weight.module.rpartition(".")[2]
        if linear and expected is not None and not packed:
            self._not_packed.add(weight.module)

    def _consume(self, weight: EncodedWeight) -> EncodedWeight:
        self.consumed.update(weight.parts.values())
        encoding = weight.encoding
        name = encoding.dtype.value if isinstance(encoding, Dense) else encoding.kind
        self._encodings[weight.module] = name
        return weight

    def _declaration_notes(self, declaration: Declaration) -> list[Diagnostic]:
        modules = {name.rpartition(".")[0] for name in self.checkpoint.tensors}
        unused = list(declaration.excluded.unused(modules))
        if declaration.quantized is not None:
            unused += declaration.quantized.unused(modules)
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


def _metadata(checkpoint: Checkpoint) -> tuple[Fields | None, Fields | None]:
    """`quantization_config` of config.json, and `quantization` of hf_quant_config.json."""
    top = Fields(checkpoint.config, f"{checkpoint.role}/config.json")
    if "compression_config" in top:
        raise unsupported("compressed-tensors", top.at("compression_config"))
    if "quantization" in top:
        raise unsupported("MLX", top.at("quantization"))
    places = (top, top.section("text_config"))
    blocks = (place.section("quantization_config") for place in places if place is not None)
    block = next((found for found in blocks if found is not None and found.values), None)
    side = checkpoint.json("hf_quant_config.json")
    if side is None:
        return block, None
    return block, Fields(side, f"{checkpoint.role}/hf_quant_config.json").section("quantization")


def _check_method(block: Fields) -> None:
    """Raise for every method but ModelOpt's."""
    if block.values.get("load_in_4bit") or block.values.get("load_in_8bit"):
        raise unsupported("bitsandbytes", block.where)
    method = block.string("quant_method", default="").lower()
    producer = block.section("producer")
    by_modelopt = producer is not None and producer.string("name", default="") == "modelopt"
    if method in _MODELOPT or (not method and ("quant_algo" in block or by_modelopt)):
        return
    raise unsupported(repr(method) if method else "an unnamed method", block.at("quant_method"))


def _listed(
    id: str, message: str, names: list[str], where: str, severity: Severity = Severity.WARNING
) -> list[Diagnostic]:
    if not names:
        return []
    shown = (*names[:5], f"and {len(names) - 5} more") if len(names) > 5 else tuple(names)
    return [Diagnostic(id, f"{len(names)} {message}", where, shown, severity=severity)]
