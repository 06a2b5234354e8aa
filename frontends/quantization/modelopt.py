"""NVIDIA ModelOpt's unified Hugging Face export: metadata.

Metadata is in `config.json` (`quantization_config`), in `hf_quant_config.json`, or in both, and its
lists are incomplete in practice. So it only says what to *expect*; stored tensors decide.
Formats: ModelOpt 0.47.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from edgecc.errors import Diagnostic, Severity
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.layouts import unsupported
from edgecc.frontends.quantization.patterns import ModulePatterns
from edgecc.ir.encodings import FP8, Encoding

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "NVFP4": ("nvfp4",),
    "W4A16_NVFP4": ("nvfp4",),
    "FP8": ("fp8 tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8 channel",),
    "FP8_PB_WO": ("fp8 block", "fp8 tensor"),  # a single block has a scalar
}
"""What can be read: the name in upper case, and the forms its weights are stored in."""

WEIGHT_ONLY = ("W4A16_NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
"""Algorithms without a static activation scale; one that is stored was not calibrated."""

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
        UnsupportedError: An algorithm that cannot be read is declared.
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
    elif algorithm and algorithm not in ALGORITHMS:
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


def form(encoding: Encoding) -> str:
    """How `ALGORITHMS` calls the form a weight is stored in."""
    return f"{encoding.kind} {encoding.scaling}" if isinstance(encoding, FP8) else encoding.kind


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
    counts = Counter(algorithm for algorithm in layers.values() if algorithm not in ALGORITHMS)
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
