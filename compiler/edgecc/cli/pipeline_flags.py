"""Flags of commands that run a pipeline on IR text: which passes, for which device, on what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgecc.errors import UsageError

if TYPE_CHECKING:
    from edgecc.devices import Device
    from edgecc.passes import Pass

F = TypeVar("F", bound=Callable[..., Any])

check_option = click.option(
    "--check",
    type=click.IntRange(0, 10_000),
    default=0,
    metavar="N",
    help="Compare values before and after each pass on N sets of random inputs.",
)

_FLAGS = (
    click.option(
        "-p",
        "--pass-pipeline",
        default="",
        metavar="PIPELINE",
        help="For example bind-shared-weights,fuse-qkv,lower-encodings{device=cpu}.",
    ),
    click.option("-o", "--output", metavar="FILE", help="Default: standard output."),
    click.option("--device", metavar="NAME", help="Device for passes that ask for one."),
    click.option("--default-pipeline", is_flag=True, help="Run what compile runs for --device."),
    click.option(
        "--checkpoint",
        "checkpoints",
        multiple=True,
        metavar="ROLE=DIR",
        help="Where a checkpoint lies now, instead of the folder the text names.",
    ),
    check_option,
)


def pipeline_options(function: F) -> F:
    """Add the flags."""
    for option in reversed(_FLAGS):
        function = option(function)
    return function


def pipeline(flags: Mapping[str, Any]) -> tuple[list[Pass[Any]], Device | None]:
    """The passes and the device the flags ask for.

    Raises:
        UsageError: The pipeline is no pipeline, or the flags contradict each other.
        UnsupportedError: No such device.
    """
    from edgecc.devices import DEVICES, get_device
    from edgecc.passes.default import default_pipeline
    from edgecc.passes.pipeline import parse_pipeline

    device = get_device(flags["device"]) if flags["device"] else None
    passes = parse_pipeline(flags["pass_pipeline"]) if flags["pass_pipeline"] else []
    if not flags["default_pipeline"]:
        return passes, device
    if passes:
        raise UsageError(
            "usage/pipeline",
            "--default-pipeline and --pass-pipeline are both given",
            help="leave one of them out",
        )
    if device is None:
        raise UsageError(
            "usage/pipeline",
            "--default-pipeline needs a device: the default passes depend on it",
            help=f"add --device NAME, one of {', '.join(sorted(DEVICES))}",
        )
    return default_pipeline(device), device
