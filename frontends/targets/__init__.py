"""Target models: one architecture per file, named after `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgecc.errors import UnsupportedError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets import qwen3, qwen3_5

BuildTarget = Callable[[ModuleWeights, TextConfig, Sequence[int], int], None]


@dataclass(frozen=True, slots=True)
class TargetFrontend:
    """How one architecture becomes a graph.

    Attributes:
        build: Builds the graph.
        left_out: Parts of its checkpoints that are not built, with globs of their tensors.
    """

    build: BuildTarget
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)


_QWEN3_5 = TargetFrontend(qwen3_5.build, qwen3_5.LEFT_OUT)

TARGETS: Mapping[str, TargetFrontend] = {
    "qwen3": TargetFrontend(qwen3.build),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
}
"""Frontends by `model_type`."""


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
