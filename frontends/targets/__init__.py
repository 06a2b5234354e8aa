"""Target models: one architecture per file, named after `model_type`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from edgecc.errors import UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, config_fields
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets import llama, mistral, qwen2, qwen3, qwen3_5, qwen3_5_vision
from edgecc.ir.core import Json

BuildTarget = Callable[[ModuleWeights, TextConfig, Sequence[int], int], None]


class BuildDense(Protocol):
    """Like `BuildTarget`; given the tokens to choose from, graph `draft` in its place."""

    def __call__(
        self,
        weights: ModuleWeights,
        config: TextConfig,
        taps: Sequence[int],
        capacity: int,
        *,
        proposes: int | None = None,
    ) -> None:
        """See `edgecc.frontends.targets.dense.build_dense`."""


@dataclass(frozen=True, slots=True)
class VisionFrontend:
    """How the vision tower of an architecture becomes a graph, and its language model one for it.

    Attributes:
        part: What the tower is called among the parts that can be left out.
        has_tower: Whether a checkpoint stores one.
        build: Builds the tower; its last argument is the most tokens of an image. Returns what the
            runtime must know.
        build_target: Like that of the target, for a graph that reads images.
    """

    part: str
    has_tower: Callable[[ModuleWeights], bool]
    build: Callable[[ModuleWeights, TextConfig, int], dict[str, Json]]
    build_target: BuildTarget


@dataclass(frozen=True, slots=True)
class TargetFrontend:
    """How one architecture becomes a graph.

    Attributes:
        build: Builds the graph.
        left_out: Parts of its checkpoints that are not built, with globs of their tensors.
        vision: For architectures that read images.
        build_draft: Builds a draft, for those whose rows can be taken back.
    """

    build: BuildTarget
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    vision: VisionFrontend | None = None
    build_draft: BuildDense | None = None


_QWEN3_5 = TargetFrontend(
    qwen3_5.build,
    qwen3_5.LEFT_OUT,
    VisionFrontend(
        qwen3_5.VISION_TOWER,
        qwen3_5_vision.has_tower,
        qwen3_5_vision.build,
        partial(qwen3_5.build, images=True),
    ),
)

_WRAPPED = {
    "vision tower": ("model.vision_tower.*", "vision_tower.*"),
    "multimodal projector": ("model.multi_modal_projector.*", "multi_modal_projector.*"),
}
"""What classes that read images (LLaVA, Mistral 3) store beside a language model."""


def _dense(
    build: BuildDense, left_out: Mapping[str, Sequence[str]] | None = None
) -> TargetFrontend:
    return TargetFrontend(build, left_out or {}, build_draft=build)


_LLAMA = _dense(llama.build, _WRAPPED)
_MISTRAL = _dense(mistral.build, _WRAPPED)
_QWEN2 = _dense(qwen2.build, qwen2.LEFT_OUT)

TARGETS: Mapping[str, TargetFrontend] = {
    "llama": _LLAMA,
    "ministral": _MISTRAL,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen3": _dense(qwen3.build),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
}
"""Frontends by `model_type`."""

_EXPERTS = re.compile(r"moe|mixtral|deepseek_v|gpt_oss|llama4")
"""Occurs in the names of families whose layers choose among several MLPs."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def reject_experts(checkpoint: Checkpoint) -> None:
    """Refuse mixtures of experts before anything else, whatever their config lacks.

    Raises:
        InputError: The config is of another form.
        UnsupportedError: It is one.
    """
    top, text = config_fields(checkpoint)
    for fields in (text, top):
        found = [k for k in _EXPERT_COUNTS if fields.integer(k, minimum=0, default=0)]
        if _EXPERTS.search(fields.string("model_type", default="")):
            found.append("model_type")
        if found:
            raise UnsupportedError(
                "target/experts",
                f"{found[0]} is {fields.values[found[0]]!r}: mixture-of-experts layers are not "
                "supported",
                where=fields.at(found[0]),
                help=f"supported, all dense: {', '.join(TARGETS)}",
            )


def get_target(config: TextConfig) -> TargetFrontend:
    """The frontend of a target architecture.

    Raises:
        UnsupportedError: edgecc has none for it.
    """
    if config.model_type not in TARGETS:
        raise UnsupportedError(
            "target/architecture",
            f"no frontend for model_type {config.model_type!r} "
            f"({', '.join(config.architectures) or 'no architectures'})",
            where=f"{config.where}: model_type",
            help=f"supported: {', '.join(TARGETS)}",
        )
    return TARGETS[config.model_type]
