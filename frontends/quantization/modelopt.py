"""NVIDIA ModelOpt's unified Hugging Face export: metadata.

Metadata is in `config.json` (`quantization_config`), in `hf_quant_config.json`, or in both, and its
lists are incomplete in practice. Formats: ModelOpt 0.47.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from edgecc.errors import Diagnostic, Severity
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.declaration import Declaration, Scheme, kv_cache
from edgecc.frontends.quantization.layouts import unsupported
from edgecc.frontends.quantization.patterns import ModulePatterns

METHODS = ("modelopt", "modelopt_fp4")

ALGORITHMS: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("NVFP4", ("nvfp4",)),
        Scheme("W4A16_NVFP4", ("nvfp4",), weight_only=True),
        Scheme("FP8", ("fp8 tensor",)),
        Scheme("FP8_PER_CHANNEL_PER_TOKEN", ("fp8 channel",), weight_only=True),
        # a single block has a scalar
        Scheme("FP8_PB_WO", ("fp8 block", "fp8 tensor"), weight_only=True),
        Scheme("MXFP4", ("mxfp4",), weight_only=True),
        Scheme("MXFP8", ("mxfp8",), weight_only=True),
    )
}
"""What can be read, by its name in upper case. Those without a static activation scale are read
without one that is stored, which was not calibrated."""

_MIXED = "MIXED_PRECISION"
_EXCLUDE_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert")


def read_modelopt(block: Fields | None, side: Fields | None) -> Declaration:
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
    layers: Mapping[str, str] = {}
    if algorithm == _MIXED:
        layers = next((found for s in sources if (found := _layers(s))), {})
        _check_layers(layers, where)
    elif algorithm and algorithm not in ALGORITHMS:
        raise unsupported(f"ModelOpt {algorithm}", where)
    return Declaration(
        method="modelopt",
        default=ALGORITHMS.get(algorithm),
        where=where,
        named={module: ALGORITHMS[name] for module, name in layers.items()},
        patterns=ModulePatterns(layers, where),
        excluded=ModulePatterns(
            (p for s in sources for key in _EXCLUDE_KEYS for p in s.strings(key) or ()), where
        ),
        excluded_first=False,
        kv_cache=next((kv for s in sources if (kv := kv_cache(s))), None),
        findings=findings,
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
    counts = Counter(algorithm for algorithm in layers.values() if algorithm not in ALGORITHMS)
    if counts:
        listed = ", ".join(f"{name} ({count} modules)" for name, count in sorted(counts.items()))
        first = next(m for m, a in layers.items() if a in counts)
        raise unsupported(f"ModelOpt {listed}", where, f"for example {first}: {layers[first]}")
