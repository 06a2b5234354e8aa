"""NVIDIA ModelOpt's unified Hugging Face export: metadata, and NVFP4 weights.

Metadata is in `config.json` (`quantization_config`), in `hf_quant_config.json`, or in both, and its
lists are incomplete in practice. So it only says what to *expect*; stored tensors decide.
Formats: ModelOpt 0.47.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgecc.errors import Diagnostic, InputError, Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.layouts import unsupported
from edgecc.frontends.quantization.patterns import ModulePatterns
from edgecc.ir.encodings import NVFP4
from edgecc.ir.types import DType, format_shape

WEIGHT_ONLY = "W4A16_NVFP4"
_ALGORITHMS = ("NVFP4", WEIGHT_ONLY)
_MIXED = "MIXED_PRECISION"
_EXCLUDE_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert")


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a checkpoint's metadata says about its weights.

    Attributes:
        algorithm: Upper case; empty if weights are declared unquantized.
        layers: Algorithms of a mixed-precision export, by module pattern.
        quantized: The patterns of `layers`; None if all linear layers are quantized.
        excluded: Modules left out.
        kv_cache: Declared precision of the KV cache, if any.
        findings: Contradictions between the two files.
        where: File and key, for messages.
    """

    algorithm: str
    layers: Mapping[str, str]
    quantized: ModulePatterns | None
    excluded: ModulePatterns
    kv_cache: str | None
    findings: tuple[Diagnostic, ...]
    where: str

    def expects(self, module: str) -> str | None:
        """The algorithm a linear module should be stored in, or None for unquantized."""
        if self.quantized is not None:
            pattern = self.quantized.match(module)
            return self.layers[pattern] if pattern is not None else None
        if not self.algorithm or self.excluded.match(module) is not None:
            return None
        return self.algorithm


def read_declaration(block: Fields | None, side: Fields | None) -> Declaration:
    """Combine `quantization_config` and the `quantization` object of `hf_quant_config.json`.

    Raises:
        InputError: A key has a wrong type.
        UnsupportedError: An algorithm other than NVFP4 and W4A16_NVFP4 is declared.
    """
    sources = [fields for fields in (block, side) if fields is not None]
    where = sources[0].where
    named = [(s, s.string("quant_algo", default="").upper()) for s in sources]
    algorithms = {algorithm for s, algorithm in named if algorithm}
    findings: tuple[Diagnostic, ...] = ()
    if len(algorithms) > 1:
        findings = (
            Diagnostic(
                "quant/metadata-disagrees",
                f"two files name different algorithms: {', '.join(sorted(algorithms))}",
                where=where,
                notes=tuple(f"{s.at('quant_algo')} is {a}" for s, a in named),
                severity=Severity.WARNING,
            ),
        )
    algorithm = next((a for _, a in named if a), "")
    layers = next((found for s in sources if (found := _layers(s))), {})
    if algorithm == _MIXED:
        _check_layers(layers, where)
    elif algorithm and algorithm not in _ALGORITHMS:
        raise unsupported(f"ModelOpt {algorithm}", where)
    return Declaration(
        algorithm=algorithm,
        layers=layers,
        quantized=ModulePatterns(layers, where) if algorithm == _MIXED else None,
        excluded=ModulePatterns(
            (p for s in sources for key in _EXCLUDE_KEYS for p in s.strings(key) or ()), where
        ),
        kv_cache=next((kv for s in sources if (kv := _kv_cache(s))), None),
        findings=findings,
        where=where,
    )


def nvfp4_parts(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], *, weight_only: bool
) -> tuple[NVFP4, dict[str, str]]:
    """Encoding and component tensors of a packed weight, checked.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        shape: Logical `[N, K]` the model needs.
        weight_only: Leave a stored `input_scale` out: the producer did not calibrate for it.

    Raises:
        InputError: A scale is missing, of a wrong dtype or shape, or not a positive number; or the
            packed weight does not have the shape the model needs.
    """
    key = f"{module}.weight"
    if len(shape) != 2:
        raise _bad(
            "quant/bad-shape",
            f"stored as bytes, but this parameter is not a matrix: {format_shape(shape)}",
            checkpoint.location(key),
        )
    parts = {"weight": key}
    for component in ("weight_scale", "weight_scale_2"):
        parts[component] = _sidecar(checkpoint, module, component)
    _check_matrix(checkpoint, parts, shape)
    _check_scalar(checkpoint, parts["weight_scale_2"])
    input_scale = f"{module}.input_scale"
    if input_scale in checkpoint.tensors and not weight_only:
        _check_scalar(checkpoint, input_scale)
        parts["input_scale"] = input_scale
    return NVFP4(input_scale="input_scale" in parts), parts


def _check_matrix(checkpoint: Checkpoint, parts: Mapping[str, str], shape: tuple[int, ...]) -> None:
    rows, columns = shape
    block = NVFP4().block
    weight, scale = checkpoint.info(parts["weight"]), checkpoint.info(parts["weight_scale"])
    location = checkpoint.location(parts["weight"])
    if weight.shape != (rows, columns // 2) or columns % 2:
        held = f"packed NVFP4 u8 {format_shape(weight.shape)}"
        if len(weight.shape) == 2:
            held += f" holds {format_shape((weight.shape[0], 2 * weight.shape[1]))} values"
        raise _bad(
            "quant/bad-shape",
            f"{held}, expected {format_shape(shape)} values",
            location,
            "dtype and scales say that two values share a byte, whatever the shape looks like",
        )
    if columns % block:
        raise _bad(
            "quant/bad-shape",
            f"{columns} columns are not a multiple of the block {block}",
            location,
        )
    expected = (rows, columns // block)
    if scale.dtype is not DType.F8E4M3 or scale.shape != expected:
        raise _bad(
            "quant/bad-scale",
            f"the block scales are {scale.dtype.value} {format_shape(scale.shape)},"
            f" expected {DType.F8E4M3.value} {format_shape(expected)} (one per {block} columns)",
            checkpoint.location(parts["weight_scale"]),
        )


def _check_scalar(checkpoint: Checkpoint, key: str) -> None:
    info = checkpoint.info(key)
    if info.dtype is not DType.F32 or info.shape not in ((), (1,)):
        raise _bad(
            "quant/bad-scale",
            f"the scale is {info.dtype.value} {format_shape(info.shape)}, expected one f32",
            checkpoint.location(key),
        )
    value = float(np.asarray(checkpoint.read(key)).reshape(()))
    if not (math.isfinite(value) and value > 0):
        raise _bad(
            "quant/bad-scale",
            f"the scale is {value}, expected a finite positive number",
            checkpoint.location(key),
        )


def _sidecar(checkpoint: Checkpoint, module: str, component: str) -> str:
    key = f"{module}.{component}"
    if key in checkpoint.tensors:
        return key
    elsewhere = [name for name in checkpoint.tensors if name.endswith(f".{key}")][:3]
    raise InputError(
        "quant/missing-scale",
        f"the weight is packed (u8) but its {component} is missing",
        where=checkpoint.location(f"{module}.weight"),
        notes=(
            "assumed format: ModelOpt NVFP4 (weight, weight_scale, weight_scale_2)",
            f"looked for {key} in {checkpoint.role}: {', '.join(checkpoint.files[:4])}",
            *(f"not used, because it is another module's: {name}" for name in elsewhere),
        ),
        help="the export is incomplete: fetch or export the checkpoint again",
    )


def _bad(id: str, message: str, where: str, *notes: str) -> InputError:
    return InputError(
        id,
        message,
        where=where,
        notes=notes,
        help="config and weights may be of different revisions: fetch both again",
    )


def _layers(fields: Fields) -> dict[str, str]:
    """`quantized_layers`: module -> algorithm in upper case."""
    section = fields.section("quantized_layers")
    if section is None:
        return {}
    found: dict[str, str] = {}
    for module in section.values:
        entry = section.section(module)
        found[module] = entry.string("quant_algo", default="").upper() if entry else ""
    return {module: algorithm for module, algorithm in found.items() if algorithm}


def _check_layers(layers: Mapping[str, str], where: str) -> None:
    counts = Counter(algorithm for algorithm in layers.values() if algorithm not in _ALGORITHMS)
    if counts:
        listed = ", ".join(f"{name} ({count} modules)" for name, count in sorted(counts.items()))
        first = next(m for m, a in layers.items() if a in counts)
        raise unsupported(f"ModelOpt {listed}", where, f"for example {first}: {layers[first]}")


def _kv_cache(fields: Fields) -> str | None:
    """Declared precision of the KV cache; some producers write a string for the object."""
    if isinstance(fields.values.get("kv_cache_scheme"), str):
        return fields.string("kv_cache_scheme")
    if (scheme := fields.section("kv_cache_scheme")) is not None:
        return f"{scheme.string('type', default='')}{scheme.integer('num_bits', default=8)}"
    return fields.string("kv_cache_quant_algo", default=None)
