"""Qwen2 and Qwen2.5 dense (`Qwen2ForCausalLM`, `model_type` qwen2), as in modeling_qwen2.

Query, key and value projections always have biases, the output projection never has; no key of the
config says so. Layers from `max_window_layers` on have windows where `use_sliding_window` is set.

The language models of Qwen2-VL and Qwen2.5-VL are the same network with rotary embedding by three
positions of a token (`mrope`): they are equal for text, which is all that is read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgecc.frontends.config import TextConfig
from edgecc.frontends.layer_kinds import FULL, SLIDING
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets.common import check_variant
from edgecc.frontends.targets.dense import build_dense

LEFT_OUT: Mapping[str, Sequence[str]] = {"vision tower": ("model.visual.*", "visual.*")}
"""Parts of a checkpoint that are no part of the language model, with globs of their tensors."""


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
