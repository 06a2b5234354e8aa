"""Flags all commands share, and flags other tools have that are refused with an explanation."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from edgecc.cli.output import Console, use_color
from edgecc.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

KNOWN_ELSEWHERE = {
    "--tensor-parallel-size": "vLLM",
    "--tp": "SGLang",
    "--pipeline-parallel-size": "vLLM",
    "--gpu-memory-utilization": "vLLM",
    "--enforce-eager": "vLLM",
    "--kv-cache-dtype": "vLLM",
    "--enable-lora": "vLLM",
    "--speculative-algorithm": "SGLang",
    "--speculative-eagle-topk": "SGLang",
    "--speculative-num-draft-tokens": "SGLang",
    "--eagle-top-k": "TensorRT Edge-LLM",
    "--trust-remote-code": "transformers",
}

LOG_LEVELS = {"error": -1, "warning": 0, "info": 1, "debug": 2}
"""Values of `EDGECC_LOG` and the verbosity they mean: -1 is `-q`, 1 is `-v`."""

_LEVELS_HELP = "choose one of " + ", ".join(LOG_LEVELS)


class Command(click.Command):
    """A command that recognizes flags of neighbouring tools."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, naming the tool a foreign flag belongs to."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            tool = KNOWN_ELSEWHERE.get(error.option_name)
            if tool is None:
                raise
            raise click.UsageError(
                f"{error.option_name} is known from {tool}, edgecc does not support it", ctx
            ) from error


def common(function: F) -> F:
    """Add `-v`, `-q`, `--color`, `--progress`, `--debug`; the command gets a `console`."""

    @click.option("-v", "--verbose", count=True, help="Say more about what is done.")
    @click.option("-q", "--quiet", is_flag=True, help="Errors and warnings only.")
    @click.option(
        "--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True
    )
    @click.option(
        "--progress",
        type=click.Choice(["auto", "plain", "none"]),
        default="auto",
        show_default=True,
        help="Bar on a terminal, one line per stage otherwise.",
    )
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def wrapped(
        verbose: int, quiet: bool, color: str, progress: str, debug: bool, **rest: Any
    ) -> Any:
        verbosity = -1 if quiet else verbose or _log_level()
        console = Console(verbosity, color=use_color(color), debug=debug, progress=progress)
        return function(console=console, **rest)

    return wrapped  # type: ignore[return-value]


spec_method_option = click.option(
    "--spec-method",
    "--spec-type",
    default="auto",
    show_default=True,
    metavar="METHOD",
    help="dspark, dflash or eagle3; draft_model, a small language model; mtp, the target's own "
    "multi-token-prediction block; ngram, which looks proposals up in the text so far; auto goes "
    "by the tensors of the draft.",
)
"""Kind of draft."""


confidence_threshold_option = click.option(
    "--confidence-threshold",
    type=float,
    metavar="P",
    help="Verify no proposal that the draft's confidence head gives less than P, 0 to 1.",
)


def prompt_lookup_options(function: F) -> F:
    """How many tokens have to repeat where proposals are looked up."""
    for bound, text in (
        ("max", "Look up what followed up to N repeated tokens."),
        ("min", "Fewest tokens that have to repeat; default: the most."),
    ):
        flag = click.option(
            f"--prompt-lookup-{bound}", type=click.IntRange(min=1), metavar="N", help=text
        )
        function = flag(function)
    return function


offline_option = click.option(
    "--offline",
    "--local-files-only",
    "offline",
    is_flag=True,
    help="Do not ask the model hub: take what its cache has. HF_HUB_OFFLINE=1 says the same.",
)
"""For commands that take ids of the hub."""

components_option = click.option(
    "--components",
    default="text",
    show_default=True,
    metavar="PARTS",
    help="text; all, which adds the vision tower of a multimodal target; or a list of target, "
    "draft and vision.",
)


def num_threads_option(function: F) -> F:
    """`--num-threads`; `num_threads` says what it comes to."""
    return click.option(
        "--num-threads",
        type=click.IntRange(min=1),
        metavar="N",
        help="Threads of the engine; default: $EDGECC_NUM_THREADS, or chosen by size.",
    )(function)


def num_threads(value: int | None) -> int | None:
    """The flag, else `EDGECC_NUM_THREADS`, else None.

    Raises:
        UsageError: The variable is no positive number.
    """
    text = os.environ.get("EDGECC_NUM_THREADS")
    if value is not None or not text:
        return value
    # The length first: Python refuses to read a number of thousands of digits.
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < 1:
        raise UsageError(
            "usage/num-threads", f"EDGECC_NUM_THREADS is {text[:40]!r}, expected a positive number"
        )
    return int(text)


def _log_level() -> int:
    """Verbosity by `EDGECC_LOG`.

    Raises:
        UsageError: It is no level.
    """
    text = os.environ.get("EDGECC_LOG", "").lower()
    if text and text not in LOG_LEVELS:
        raise UsageError("usage/log-level", f"EDGECC_LOG is {text!r}", help=_LEVELS_HELP)
    return LOG_LEVELS.get(text, 0)
