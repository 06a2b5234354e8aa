"""Targets that draft with their own multi-token-prediction block, from checkpoint to text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc
import edgecc.inspection
from edgecc.backends.runtime import Generator, Round, Session, SpeculativeDecoder
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.backends.runtime.verify import verify_bundle
from helpers.checkpoints import DROP
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.mtp import MtpDraft, make_predictable

pytestmark = pytest.mark.filterwarnings(
    "ignore:no proposed token:UserWarning", "ignore:each proposed token:UserWarning"
)
"""Pairs that no real one is like."""

SIZES = HybridSizes()
LENGTH, CHUNK = 96, 8

MIXES: dict[str, tuple[Sequence[str], int, dict[str, Any], float | None]] = {
    "random": ((LINEAR, LINEAR, LINEAR, FULL), 1, {}, None),
    "predictable": ((LINEAR, LINEAR, LINEAR, FULL), 1, {}, 0.0),
    "partly": ((LINEAR, FULL, LINEAR), 1, {}, 0.8),
    "attention": ((FULL, FULL), 1, {}, 0.8),
    "recurrent": ((LINEAR, LINEAR), 1, {}, 0.8),
    "two-layers": ((FULL, LINEAR), 2, {}, 0.8),
    "mixed": ((LINEAR, LINEAR, LINEAR, FULL), 1, {"mixed": True}, None),
}
"""Layers of the target, layers of the block, how it is written, how well it is predicted."""


def checkpoint(folder: Path, name: str) -> Path:
    layers, mtp, options, noise = MIXES[name]
    path = write_hybrid_target(
        folder / "t", replace(SIZES, layer_types=layers), mtp=mtp, eos_token_id=DROP, **options
    )
    return path if noise is None else make_predictable(path, noise)


@pytest.fixture(scope="module", params=MIXES)
def generator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("mtp") / request.param
    target = checkpoint(folder, request.param)
    steps = 6 if MIXES[request.param][1] == 2 else 7
    edgecc.compile(
        target,
        out=folder / "bundle",
        spec_method="mtp",
        num_speculative_tokens=steps,
        max_model_len=LENGTH,
        prefill_chunk=CHUNK,
    )
    with edgecc.load(folder / "bundle") as opened:
        opened.checkpoint = target
        opened.mix = request.param
        yield opened


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def rounds_of(
    generator: Generator, ids: Sequence[int], count: int, stops: Collection[int] = ()
) -> list[Round]:
    """Speculative decoding round by round."""
    model, engine = generator.model, generator.engine
    session = Session(
        engine.entry("target"),
        engine.entry("draft"),
        prefill_chunk=model.prefill_chunk,
        proposer=PROPOSERS[model.draft.method],
    )
    return list(SpeculativeDecoder(session, model, model.draft).rounds(ids, count, stops))


def plain(generator: Generator, ids: Sequence[int], count: int) -> list[int]:
    return generator.generate(token_ids=ids, max_new_tokens=count, speculation=False).token_ids


@pytest.mark.parametrize("length", [1, 8, 9, 29])
def test_speculation_changes_no_token(generator: Generator, length: int) -> None:
    """Prompts from one token to several chunks, every number of proposals."""
    ids = prompt_of(length)
    expected = plain(generator, ids, 24)
    for steps in range(1, generator.model.draft.num_speculative_tokens + 1):
        found = generator.generate(token_ids=ids, max_new_tokens=24, num_speculative_tokens=steps)
        assert found.token_ids == expected, steps


def test_every_round_of_the_reference(generator: Generator) -> None:
    """Proposals of each round are those of a block that computes the whole text anew."""
    ids, reference = prompt_of(19), MtpDraft(generator.checkpoint)
    first, *rounds = rounds_of(generator, ids, 20)
    tokens = [*ids, *first.tokens]
    states = reference.states([*tokens, *(t for step in rounds for t in step.tokens)])
    for step in rounds:
        known, most = states[: len(tokens) - 1], generator.model.num_tokens
        expected = reference.propose(known, tokens[1:], len(step.proposed), most)
        assert list(step.proposed) == expected.tokens
        tokens += step.tokens


def test_acceptance(generator: Generator) -> None:
    """What these pairs are for: nothing, everything, and all kinds of rounds."""
    rounds = [
        n
        for length in (3, 11, 20)
        for n in generator.generate(
            token_ids=prompt_of(length), max_new_tokens=40
        ).stats.accepted_by_round
    ]
    most = generator.model.draft.num_speculative_tokens
    if generator.mix == "predictable":
        assert rounds == [most] * len(rounds)
    elif MIXES[generator.mix][3]:
        assert len(set(rounds)) > 2
        assert max(rounds) == most


@pytest.mark.parametrize("room", [1, 2, 7, 8, 9])
def test_the_last_positions(generator: Generator, room: int) -> None:
    ids = prompt_of(LENGTH - room)
    found = generator.generate(token_ids=ids, max_new_tokens=50)
    assert found.token_ids == plain(generator, ids, 50)
    assert (len(found.token_ids), found.finish_reason) == (room, "length")


def test_a_stop_token_in_the_middle(generator: Generator) -> None:
    """Of a round, where tokens behind it would be accepted as well."""
    ids = prompt_of(5)
    text = plain(generator, ids, 24)
    for place in range(3, 9):
        rounds = rounds_of(generator, ids, 24, {text[place]})
        tokens = [t for step in rounds for t in step.tokens]
        assert tokens == text[: text.index(text[place]) + 1]
        assert rounds[-1].finish_reason == "stop"


@pytest.mark.parametrize("device", ["cpu", "onnx"])
def test_a_bundle_of_it(tmp_path: Path, device: str) -> None:
    """The head is in the file once; the bundle says where the draft is from, and is verified."""
    target = checkpoint(tmp_path, "mixed")
    out = tmp_path / "bundle"
    report = edgecc.compile(
        target, out=out, spec_method="mtp", max_model_len=LENGTH, device=device, draft_outputs=True
    )
    assert report.bundle is not None
    manifest = report.bundle.manifest
    assert manifest["draft"]["method"] == "mtp"
    assert manifest["draft"]["num_speculative_tokens"] == 3
    assert manifest["provenance"]["draft"] is None
    assert [s["role"] for s in manifest["shared"]] == ["embed_tokens", "lm_head"]
    heads = [n for n, w in manifest["weights"].items() if w["role"] == "lm_head"]
    assert heads == ["target.lm_head.weight"]
    assert edgecc.inspection.inspect_path(out)["draft"]["checkpoint"] == target.name
    for check in verify_bundle(out, prompts=2, max_new_tokens=8).checks:
        assert check.passed, check


@pytest.mark.parametrize("name", ["partly", "two-layers"])
def test_several_at_a_time(tmp_path: Path, name: str) -> None:
    """Answers and rounds are those of each request alone.

    Of two layers that take turns, each step only writes to the caches of the other one.
    """
    target, out = checkpoint(tmp_path, name), tmp_path / "bundle"
    edgecc.compile(
        target,
        out=out,
        spec_method="mtp",
        num_speculative_tokens=4,
        max_model_len=LENGTH,
        prefill_chunk=CHUNK,
        max_batch_size=3,
    )
    prompts = [prompt_of(n) for n in (1, 9, 20, 5)]
    with edgecc.load(out) as several:
        requests = [several.request(token_ids=ids, max_new_tokens=20) for ids in prompts]
        for ids, found in zip(prompts, several.generate_batch(requests), strict=True):
            alone = several.generate(token_ids=ids, max_new_tokens=20)
            assert found.token_ids == alone.token_ids
            assert found.stats.accepted_by_round == alone.stats.accepted_by_round
