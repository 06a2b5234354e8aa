"""Mistral dense (`MistralForCausalLM`, `model_type` mistral), as in modeling_mistral.

No biases. All layers have the window `sliding_window`, none where it is null. Ministral
(`MinistralForCausalLM`, `model_type` ministral) is the same network whose `layer_types` say which
layers have it. The width of a head is not always that of the model divided by the heads (Nemo).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.frontends.config import TextConfig
from edgecc.frontends.layer_kinds import FULL, SLIDING
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
    check_variant(config, (FULL, SLIDING))
    build_dense(weights, config, taps, capacity, proposes=proposes)
