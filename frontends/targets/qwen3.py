"""Qwen3 dense (`Qwen3ForCausalLM`, `model_type` qwen3), as in transformers' modeling_qwen3.

Queries and keys are normed per head, with one weight for all heads of a layer, before they are
rotated. Layers from `max_window_layers` on have windows where `use_sliding_window` is set.
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
    build_dense(weights, config, taps, capacity, head_norms=True, proposes=proposes)
