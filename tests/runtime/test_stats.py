"""Numbers of a request, and the warnings about rates that a sound pair does not show."""

from __future__ import annotations

import json

import pytest

from edgecc.backends.runtime import FinishReason, Round, Seconds, Stats
from edgecc.backends.runtime.stats import BLOCK_CAUSES, CAUSES, AcceptanceMonitor, Causes

SECONDS = Seconds(target=0.5, draft=0.25, host=0.25)


def verified(
    accepted: int, proposed: int = 3, reason: FinishReason | None = None, withheld: int = 0
) -> Round:
    tokens = (0,) * (accepted + 1)
    return Round(
        tokens, (0,) * proposed, accepted, SECONDS, finish_reason=reason, withheld=withheld
    )


def example() -> Stats:
    stats = Stats(prompt_tokens=5)
    stats.add(Round((1,), (), 0, SECONDS, is_prompt=True))
    for accepted, proposed in [(0, 3), (3, 3), (1, 3), (3, 3), (0, 0)]:
        stats.add(verified(accepted, proposed, withheld=4 if proposed == 0 else 0))
    stats.new_tokens = 13
    return stats


def test_as_dict() -> None:
    assert example().as_dict() == {
        "prompt_tokens": 5,
        "new_tokens": 13,
        "rounds": 5,
        "proposed_tokens": 12,
        "accepted_tokens": 7,
        "withheld_tokens": 4,
        "tokens_per_step": 12 / 5,
        "acceptance_by_position": [3 / 4, 2 / 3, 1.0],
        "prompt_seconds": 1.0,
        "decode_seconds": 5.0,
        "target_seconds": 2.5,
        "draft_seconds": 1.25,
        "host_seconds": 1.25,
        "tokens_per_second": 12 / 5,
        "warnings": [],
    }
    assert json.loads(json.dumps(example().as_dict())) == example().as_dict()


def test_render() -> None:
    stats = example()
    stats.warnings.append("something looks wrong")
    assert stats.render().splitlines() == [
        "prompt      5 tokens in 1.000 s",
        "answer      13 tokens in 5.000 s",
        "speed       2.4 tokens/s after the first",
        "steps       5 target calls, 2.40 tokens each",
        "accepted    7 of 12 proposals",
        "by position 0.75 0.67 1.00",
        "withheld    4 proposals of low confidence",
        "time        target 50%, draft 25%, host 25%",
        "warning     something looks wrong",
    ]


def test_nothing_generated() -> None:
    stats = Stats(prompt_tokens=3)
    assert stats.as_dict()["tokens_per_second"] == 0.0
    assert stats.tokens_per_step == 0.0
    assert stats.acceptance_by_position == []
    assert stats.render().splitlines()[1:] == [
        "answer      0 tokens in 0.000 s",
        "speed       0.0 tokens/s after the first",
        "steps       0 target calls, 0.00 tokens each",
    ]


def findings(rounds: list[Round], causes: Causes = BLOCK_CAUSES) -> list[tuple[int, str]]:
    monitor = AcceptanceMonitor(causes)
    found = [(place, monitor.observe(step)) for place, step in enumerate(rounds, start=1)]
    return [(place, finding) for place, finding in found if finding is not None]


def test_no_acceptance_is_reported_once() -> None:
    ((place, finding),) = findings([verified(0)] * 300)
    assert place == 64
    for cause in ("another target", "block layout", "mask token", "tapped layers", "chat template"):
        assert cause in finding


@pytest.mark.parametrize(
    ("method", "named", "not_named"),
    [
        ("dspark", ("block layout", "mask token", "rotary embedding"), "vocabulary map"),
        ("dflash", ("block layout", "mask token", "rotary embedding"), "vocabulary map"),
        ("eagle3", ("vocabulary map", "tapped layers", "rotary embedding"), "mask token"),
        ("mtp", ("final norm", "rounded too coarsely"), "tapped layers"),
    ],
)
def test_causes_are_those_of_the_kind_of_draft(
    method: str, named: tuple[str, ...], not_named: str
) -> None:
    ((_, none),) = findings([verified(0)] * 64, CAUSES[method])
    assert all(cause in none for cause in (*named, "chat template", "temperature"))
    assert not_named not in none
    ((_, every),) = findings([verified(3)] * 256, CAUSES[method])
    assert "the text repeats itself" in every


def test_full_acceptance_is_reported_once() -> None:
    ((place, finding),) = findings([verified(3)] * 600)
    assert place == 256
    assert "the draft is the target" in finding


def test_full_acceptance_of_what_a_draft_is_sure_of_is_no_finding() -> None:
    """Rounds with a threshold that left something out neither count nor start the count again."""
    sure, doubted = verified(3, withheld=2), verified(1, withheld=2)
    assert findings([sure] * 600) == []
    ((place, _),) = findings([verified(3), sure] * 256)
    assert place == 2 * 256 - 1
    assert findings(([verified(3)] * 255 + [doubted]) * 2) == []
    ((place, _),) = findings([verified(0, withheld=1)] * 64)
    assert place == 64


def test_both_findings_in_one_life() -> None:
    found = findings([verified(0)] * 64 + [verified(3)] * 256 + [verified(0)] * 64)
    assert [place for place, _ in found] == [64, 320]


@pytest.mark.parametrize("other", [verified(1), verified(2)])
def test_ordinary_rounds_start_the_count_again(other: Round) -> None:
    assert findings(([verified(0)] * 63 + [other]) * 3) == []
    assert findings(([verified(3)] * 255 + [other]) * 2) == []


def test_rounds_that_prove_nothing_are_left_out() -> None:
    stopped = verified(0, reason=FinishReason.STOP)
    assert findings([verified(0, proposed=0), stopped] * 100) == []
    mixed = [verified(3), stopped, verified(0, proposed=0)] * 256
    assert [place for place, _ in findings(mixed)] == [256 * 3 - 2]
