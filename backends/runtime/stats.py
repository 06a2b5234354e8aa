"""What speculation did to one request, and when to doubt it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgecc.backends.runtime.round import Round


class SpeculationWarning(UserWarning):
    """Acceptance that a sound pair does not show: the output is right, the speed may not be."""


@dataclass(slots=True)
class Stats:
    """Counts and times of one request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        new_tokens: Tokens of the answer, as handed out.
        prompt_seconds: Time until the first token, tokenizing left out.
        target_seconds: Time in target calls after the prompt.
        draft_seconds: Time in draft calls after the prompt.
        host_seconds: Everything else after the prompt: acceptance, text, stop rules; in a batch
            also the time in which only others went on.
        accepted_by_round: Accepted proposals of each round after the prompt, in order.
        proposed_by_round: Proposals of each of these rounds.
        withheld_by_round: Further proposals of each of them, which the draft was not sure enough
            of to have them verified.
        warnings: What looked wrong, as text.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prompt_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    host_seconds: float = 0.0
    accepted_by_round: list[int] = field(default_factory=list)
    proposed_by_round: list[int] = field(default_factory=list)
    withheld_by_round: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, step: Round) -> None:
        """Count one round. `new_tokens` is left to the caller, which may cut the round further."""
        seconds = step.seconds
        if step.is_prompt:
            self.prompt_seconds += seconds.target + seconds.draft + seconds.host
            return
        self.target_seconds += seconds.target
        self.draft_seconds += seconds.draft
        self.host_seconds += seconds.host
        self.accepted_by_round.append(step.accepted)
        self.proposed_by_round.append(len(step.proposed))
        self.withheld_by_round.append(step.withheld)

    @property
    def rounds(self) -> int:
        """Target calls after the prompt, with and without proposals."""
        return len(self.accepted_by_round)

    @property
    def proposed(self) -> int:
        """Proposals verified."""
        return sum(self.proposed_by_round)

    @property
    def accepted(self) -> int:
        """Proposals accepted; stop tokens are not counted."""
        return sum(self.accepted_by_round)

    @property
    def withheld(self) -> int:
        """Proposals that were not verified, because of the confidence threshold."""
        return sum(self.withheld_by_round)

    @property
    def tokens_per_step(self) -> float:
        """Tokens committed per target call after the prompt: accepted ones and its own."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Per slot, the share accepted among the rounds that reached it (all before accepted)."""
        reached: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        outcomes = Counter(zip(self.proposed_by_round, self.accepted_by_round, strict=True))
        for (slots, kept), count in outcomes.items():
            for slot in range(min(kept + 1, slots)):
                reached[slot] += count
            for slot in range(kept):
                accepted[slot] += count
        return [accepted[slot] / reached[slot] for slot in range(len(reached))]

    @property
    def decode_seconds(self) -> float:
        """Time after the prompt."""
        return self.target_seconds + self.draft_seconds + self.host_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens handed out after the first, per second of the time after the prompt."""
        seconds = self.decode_seconds
        return max(0, self.new_tokens - 1) / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """All of it, JSON-compatible, times in seconds."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "rounds": self.rounds,
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
            "withheld_tokens": self.withheld,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_by_position": self.acceptance_by_position,
            "prompt_seconds": self.prompt_seconds,
            "decode_seconds": self.decode_seconds,
            "target_seconds": self.target_seconds,
            "draft_seconds": self.draft_seconds,
            "host_seconds": self.host_seconds,
            "tokens_per_second": self.tokens_per_second,
            "warnings": list(self.warnings),
        }

    def render(self) -> str:
        """A short table, without a newline at its end."""
        rows = [
            ("prompt", f"{self.prompt_tokens} tokens in {self.prompt_seconds:.3f} s"),
            ("answer", f"{self.new_tokens} tokens in {self.decode_seconds:.3f} s"),
            ("speed", f"{self.tokens_per_second:.1f} tokens/s after the first"),
            ("steps", f"{self.rounds} target calls, {self.tokens_per_step:.2f} tokens each"),
        ]
        if self.proposed:
            shares = " ".join(f"{share:.2f}" for share in self.acceptance_by_position)
            rows.append(("accepted", f"{self.accepted} of {self.proposed} proposals"))
            rows.append(("by position", shares))
        if self.withheld:
            rows.append(("withheld", f"{self.withheld} proposals of low confidence"))
        if self.decode_seconds:
            parts = (
                ("target", self.target_seconds),
                ("draft", self.draft_seconds),
                ("host", self.host_seconds),
            )
            split = ", ".join(f"{name} {part / self.decode_seconds:.0%}" for name, part in parts)
            rows.append(("time", split))
        rows += [("warning", text) for text in self.warnings]
        return "\n".join(f"{name:<12}{text}" for name, text in rows)


@dataclass(frozen=True, slots=True)
class Causes:
    """Why acceptance may be what a sound pair does not show, as text.

    Attributes:
        none: Why no proposal is accepted, and what to look at.
        all: Why each proposal is.
    """

    none: str
    all: str


def _of_draft(training: str, wiring: str) -> Causes:
    """Causes that drafts of all kinds have, with those of a kind.

    Args:
        training: How its weights may not be those that belong to the target.
        wiring: What may be read wrongly.
    """
    return Causes(
        f"{training}; {wiring}; the prompts are far from what it was trained on (another chat "
        "template, thinking switched on or off); the temperature is so high that hardly a token "
        "can be foreseen. The text is right, but speculation only costs time: `edgecc inspect` "
        "shows what was paired, `edgecc verify` checks the numbers",
        "the text repeats itself; the draft is the target; proposals are compared with themselves, "
        "which `edgecc verify` would show as text that differs from plain decoding",
    )


_TRAINING = "the draft was trained for another target, fine-tune, precision or revision"

BLOCK_CAUSES = _of_draft(
    _TRAINING, "its block layout, mask token, tapped layers or rotary embedding are read wrongly"
)

CHAIN_CAUSES = _of_draft(
    _TRAINING, "its tapped layers, vocabulary map or rotary embedding are read wrongly"
)

MTP_CAUSES = _of_draft(
    "the block is of another revision than the model around it, or was rounded too coarsely",
    "the states that it reads are not those after the final norm",
)

OTHER_CAUSES = _of_draft(_TRAINING, "its tokenizer or its config is not the one it belongs with")

CAUSES: Mapping[str, Causes] = {
    "dspark": BLOCK_CAUSES,
    "dflash": BLOCK_CAUSES,
    "eagle3": CHAIN_CAUSES,
    "mtp": MTP_CAUSES,
}
"""By method of the draft; others have `OTHER_CAUSES`."""

LOOKUP_CAUSES = Causes(
    "the answer does not repeat what is in the prompt; too few tokens have to repeat "
    "(prompt_lookup_min); the temperature is so high that hardly a token can be foreseen. The text "
    "is right, but speculation only costs time",
    "the text repeats itself over and over",
)


class AcceptanceMonitor:
    """Watches rounds over all requests of a generator for rates that a sound pair does not show.

    Each kind of finding is reported once.

    Args:
        causes: What to name as likely causes.
    """

    NONE_LIMIT = 64
    """Rounds in a row without a single accepted token."""

    ALL_LIMIT = 256
    """Rounds in a row with each proposal accepted."""

    def __init__(self, causes: Causes = OTHER_CAUSES) -> None:
        self._causes = causes
        self._none = 0
        self._all = 0
        self._reported: set[str] = set()

    def observe(self, step: Round) -> str | None:
        """Count one round.

        Returns:
            A finding with its likely causes, the first time one is due.
        """
        proposed = len(step.proposed)
        # A stop token that the draft foresaw is not counted as accepted, yet proves nothing bad.
        if not proposed or (step.finish_reason is not None and step.accepted < proposed):
            return None
        self._none = 0 if step.accepted else self._none + 1
        # A draft that leaves out what it is not sure of may well have all of the rest accepted.
        if not step.withheld or step.accepted < proposed:
            self._all = self._all + 1 if step.accepted == proposed else 0
        if self._none >= self.NONE_LIMIT:
            return self._once(
                f"no proposed token was accepted in {self.NONE_LIMIT} rounds in a row. Likely "
                f"causes: {self._causes.none}"
            )
        if self._all >= self.ALL_LIMIT:
            return self._once(
                f"each proposed token was accepted in {self.ALL_LIMIT} rounds in a row. Likely "
                f"causes: {self._causes.all}"
            )
        return None

    def _once(self, finding: str) -> str | None:
        if finding in self._reported:
            return None
        self._reported.add(finding)
        return finding
