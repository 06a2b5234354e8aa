"""Target models: one architecture per file, named after `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgecc.errors import UnsupportedError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets import qwen3

BuildTarget = Callable[[ModuleWeights, TextConfig, Sequence[int], int], None]

TARGETS: Mapping[str, BuildTarget] = {"qwen3": qwen3.build}
"""`model_type` to the function that builds the graph."""


def get_target(config: TextConfig) -> BuildTarget:
    """The builder of a target architecture.

    Raises:
        UnsupportedError: edgecc has no frontend for it.
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
