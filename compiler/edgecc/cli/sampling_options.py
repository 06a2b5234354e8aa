"""Flags of `edgecc run` that say how tokens are chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgecc.errors import UsageError

if TYPE_CHECKING:
    from edgecc.backends.runtime import Generator

F = TypeVar("F", bound=Callable[..., Any])

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "seed", "logprobs")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

_FLAGS = (
    click.option(
        "--sample", is_flag=True, help="Sample with the settings that the checkpoint recommends."
    ),
    click.option(
        "--temperature", type=float, metavar="T", help="Sample at T; 0, the default, is greedy."
    ),
    click.option("--top-k", type=int, metavar="K", help="Of the K most probable tokens only."),
    click.option("--top-p", type=float, metavar="P", help="Of the fewest with probability P."),
    click.option("--min-p", type=float, metavar="P", help="Of those with P of the best one's."),
    click.option("--seed", type=int, metavar="N", help="The same seed gives the same text."),
    click.option(
        "--repetition-penalty", type=float, metavar="X", help="Against tokens seen before; 1: off."
    ),
    click.option(
        "--presence-penalty", type=float, metavar="X", help="Against tokens of the answer; 0: off."
    ),
    click.option(
        "--frequency-penalty", type=float, metavar="X", help="The same for each time; 0: off."
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=X,...",
        help="Add X to the logits of tokens; -inf bans one.",
    ),
    click.option(
        "--logprobs", type=int, metavar="N", help="With --json: of each token and the N best ones."
    ),
)


def sampling_flags(function: F) -> F:
    """Add the flags; see `sampling_arguments`."""
    for option in reversed(_FLAGS):
        function = option(function)
    return function


def sampling_arguments(generator: Generator, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Generator.stream` from the flags.

    Raises:
        UsageError: A bias cannot be read, or log-probabilities have nowhere to go.
        RequestError: The checkpoint recommends what is out of range.
    """
    if flags["logprobs"] is not None and not flags["as_json"]:
        raise UsageError("usage/logprobs", "--logprobs goes with --json")
    names = (*_NUMBERS, *_PENALTIES)
    options = {name: flags[name] for name in names if flags[name] is not None}
    if flags["logit_bias"]:
        options["logit_bias"] = _logit_bias(flags["logit_bias"])
    sampling = generator.recommended_sampling if flags["sample"] else None
    return {"sampling": sampling, **options}


def _logit_bias(texts: tuple[str, ...]) -> dict[int, float]:
    found: dict[int, float] = {}
    for item in ",".join(texts).split(","):
        token, _, value = (part.strip() for part in item.partition("="))
        if not re.fullmatch(r"-?[0-9]{1,18}", token) or not re.fullmatch(_NUMBER, value):
            raise UsageError(
                "usage/logit-bias",
                f"--logit-bias has {item!r}, which is no token id with a number",
                help="for example --logit-bias 12=-5,77=-inf",
            )
        if int(token) in found:
            raise UsageError("usage/logit-bias", f"--logit-bias names token {token} twice")
        found[int(token)] = float(value)
    return found


_NUMBER = r"-inf|[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?"
