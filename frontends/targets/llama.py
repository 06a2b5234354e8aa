"""Llama 2 to 3.3 (`LlamaForCausalLM`, `model_type` llama), as in transformers' modeling_llama.

Biases on all four attention projections where `attention_bias` is set, on those of the MLP where
`mlp_bias` is. No windows. Llama 3.1 and later rescale the rotary frequencies (`llama3`).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.frontends.config import TextConfig
from edgecc.frontends.layer_kinds import FULL
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets.common import check_variant
from edgecc.frontends.targets.dense import build_dense


def build(
    weights: ModuleWeights,
    config: TextConfig,
    taps: Sequence[int],
    capacity: int,
    *,
    proposes: int | None = None,
) -> None:
    """Build graph `target`, or that of a draft; see `build_dense`.

    Raises:
        InputError: Config and tensors contradict each other.
        UnsupportedError: The config asks for something this frontend does not build.
    """
    check_variant(config, (FULL,))
    build_dense(weights, config, taps, capacity, proposes=proposes)
