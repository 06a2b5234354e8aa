"""From a config to its parameters, and to the same config with fewer layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.checkpoints import drafts, qwen3, qwen3_5
from benchmarks.checkpoints.parameters import Config, Parameter, language_section
from edgecc.errors import UnsupportedError, did_you_mean

ARCHITECTURES: Final[Mapping[str, Callable[[Config], list[Parameter]]]] = {
    "Qwen3ForCausalLM": qwen3.parameters,
    "Qwen3_5ForCausalLM": qwen3_5.parameters,
    "Qwen3_5ForConditionalGeneration": qwen3_5.parameters,
    "Qwen3DSparkModel": drafts.dspark,
    "DSparkDraftModel": drafts.dspark,
    "DSparkSpeculator": drafts.dspark,
    "Eagle3LlamaForCausalLM": drafts.eagle3,
    "LlamaForCausalLMEagle3": drafts.eagle3,
}
"""What can be written, by the first entry of `architectures`."""

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def parameters(config: Config) -> list[Parameter]:
    """All parameters a config asks for.

    Raises:
        UnsupportedError: No synthetic weights for its architecture.
    """
    name = next(iter(config.get("architectures") or ()), "")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            "synthetic/architecture",
            f"no synthetic weights for architecture {name!r}",
            where="config.json: architectures",
            help=did_you_mean(name, ARCHITECTURES),
        )
    return ARCHITECTURES[name](config)


def with_layers(config: Config, layers: int) -> dict[str, Any]:
    """The config with its first layers only; metadata of the others goes as well."""
    cut = copy.deepcopy(dict(config))
    text: Any = language_section(cut)
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:layers]
    text["num_hidden_layers"] = layers
    if "quantization_config" in cut:
        cut["quantization_config"] = without_layers(cut["quantization_config"], layers)
    return cut


def without_layers(metadata: Any, layers: int) -> Any:
    """JSON without what names decoder layers from a number on."""
    if isinstance(metadata, Mapping):
        kept = {k: v for k, v in metadata.items() if _kept(k, layers)}
        return {key: without_layers(value, layers) for key, value in kept.items()}
    if isinstance(metadata, list):
        return [without_layers(m, layers) for m in metadata if _kept(m, layers)]
    return metadata


def for_target_layers(config: Config, layers: int) -> dict[str, Any]:
    """A draft's config for a target with fewer layers: its taps move down, and some may meet."""
    cut = copy.deepcopy(dict(config))
    total = cut["num_target_layers"]
    for place in (cut, *(v for v in cut.values() if isinstance(v, dict))):
        for key in drafts.TAP_KEYS:
            if place.get(key) is not None:
                place[key] = sorted({i * layers // total for i in place[key]})
    cut["num_target_layers"] = layers
    return cut


def _kept(name: Any, layers: int) -> bool:
    found = _LAYER.search(name) if isinstance(name, str) and not name.startswith("mtp.") else None
    return found is None or int(found[1]) < layers
