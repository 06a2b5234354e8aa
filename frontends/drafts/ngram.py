"""Speculation without a draft: the runtime looks proposals up in the text so far.

Nothing is built for it. The target's graph has to take the rows of a verification, and the bundle
has to say how many tokens must repeat.
"""

from __future__ import annotations

from edgecc.errors import UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.options import LiftOptions
from edgecc.ir.core import Json
from edgecc.prompt_lookup import DEFAULT_PROPOSALS, NGRAM, PromptLookup


class Ngram:
    """Prompt lookup, with its numbers.

    Attributes:
        steps: N, proposals per round.
        rows: The same: rows a round puts behind the context.
        rows_from: The option they follow from, for messages.
        lookup: How many tokens have to repeat.

    Args:
        options: What was asked for.

    Raises:
        UsageError: The numbers of tokens contradict each other.
    """

    method = NGRAM

    def __init__(self, options: LiftOptions) -> None:
        self.steps = options.num_speculative_tokens or DEFAULT_PROPOSALS
        self.rows = self.steps
        self.rows_from = "num_speculative_tokens"
        self.lookup = PromptLookup.of(options.prompt_lookup_min, options.prompt_lookup_max)

    @property
    def decision(self) -> str:
        """What will be done, as a line."""
        low, high = self.lookup.min, self.lookup.max
        repeated = f"{high}" if low == high else f"{high} to {low}"
        return (
            f"speculation by method {NGRAM}: it was asked for; up to {self.steps} tokens that "
            f"followed the last {repeated} before"
        )

    def metadata(self) -> dict[str, Json]:
        """What a runtime has to know."""
        return {
            "method": NGRAM,
            "num_speculative_tokens": self.steps,
            "prompt_lookup_min": self.lookup.min,
            "prompt_lookup_max": self.lookup.max,
        }


def choose_ngram(
    target: Checkpoint | None, draft: Checkpoint | None, options: LiftOptions
) -> Ngram:
    """Prompt lookup, for a target alone.

    Raises:
        UsageError: There is no target, or a draft as well; numbers contradict each other.
    """
    if draft is not None or target is None:
        raise UsageError(
            "usage/spec-method",
            f"--spec-method {NGRAM} looks proposals up and needs no draft"
            + (f", --draft names {draft.name}" if draft is not None else ""),
            help="leave out --draft; a bundle with a draft can look up at run time, see "
            "--prompt-lookup-max of edgecc run"
            if target is not None
            else "give the target alone",
        )
    return Ngram(options)


def check_lookup_options(options: LiftOptions) -> None:
    """Check that numbers of tokens to look up come with the method that does.

    Raises:
        UsageError: They do not.
    """
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if getattr(options, name) is not None and options.spec_method != NGRAM:
            raise UsageError(
                "usage/prompt-lookup",
                f"--{name.replace('_', '-')} goes with --spec-method {NGRAM}, not with "
                f"{options.spec_method}",
                help="a bundle with a draft takes it at run time",
            )
