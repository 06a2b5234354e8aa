"""Llama, Mistral, Qwen2 and Qwen3 with all their variants against transformers itself.

Each model is random, and saved by transformers. Prompts are longer than every window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc
from edgecc.backends.runtime import Generator
from edgecc.errors import Severity
from edgecc.roles import Role
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import Array, write_draft
from helpers.dense_models import LAYERS, MODELS, Model, load, save
from helpers.lifted import Lifted

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOLERANCE = 1e-4
"""Relative; transformers computes in float32."""

INTERPRETED = (
    *("llama3-scaling", "llama-biases", "llama-dynamic", "mistral-window-odd-heads", "ministral"),
    *("mistral3", "qwen2-tied-yarn", "qwen2-window", "qwen2-vl", "qwen3-window"),
)
COMPILED = (("llama-biases", "cpu"), ("mistral-window", "cpu"), ("qwen2-window", "onnx"))
"""What every run of the tests has; all other models, and devices, are slow ones."""

PROMPT = np.random.default_rng(5).integers(0, NUM_TOKENS, 41)
NEW_TOKENS = 24


@dataclass(frozen=True)
class Both:
    """One checkpoint, its draft, and what transformers computes with it."""

    model: Model
    path: Path
    draft: Path
    reference: Any

    def expected(self, ids: Sequence[int] = tuple(PROMPT)) -> tuple[Array, Array]:
        """Logits of all rows, and the embedding with the outputs of all layers but the last."""
        with torch.no_grad():
            out = self.reference(torch.tensor([list(map(int, ids))]), output_hidden_states=True)
        states = [s[0].numpy() for s in out.hidden_states[:-1]]  # the last is normed
        return out.logits[0].numpy(), np.concatenate(states, axis=1)

    def greedy(self) -> list[int]:
        """Tokens after the prompt."""
        ids = torch.tensor(PROMPT[None])
        out = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        return out[0, len(PROMPT) :].tolist()


def make(name: str, folder: Path) -> Both:
    model = MODELS[name]
    path = save(model, folder / "target")
    draft = write_draft(
        folder / "draft",
        hidden=32,
        layers=1,
        heads=2,
        head_dim=16,
        vocab=NUM_TOKENS,
        mask_token_id=NUM_TOKENS - 2,
        target_layers=LAYERS,
        target_layer_ids=range(-1, LAYERS - 1),
    )
    return Both(model, path, draft, load(model, path))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in INTERPRETED else pytest.mark.slow) for name in MODELS
    ],
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return make(request.param, tmp_path_factory.mktemp("dense"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(pair, marks=() if pair in COMPILED else pytest.mark.slow)
        for pair in product(MODELS, ("cpu", "onnx"))
    ],
    ids=lambda p: "-".join(p),
)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Both, Generator]:
    folder = tmp_path_factory.mktemp("compiled")
    name, device = request.param
    pair = make(name, folder)
    out = folder / "bundle"
    edgecc.compile(
        pair.path, pair.draft, out=out, device=device, max_model_len=96, prefill_chunk=48
    )
    return pair, edgecc.load(out)


def relative(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_logits_and_states(both: Both) -> None:
    """In chunks, with rejected rows between them."""
    lifted = Lifted(both.path, both.draft, garbage=1e3, max_model_len=96)
    found = []
    for rows, wrong in ((13, 0), (1, 4), (19, 0), (3, 7), (5, 1)):
        start = lifted.lengths["target"]
        ids = [*PROMPT[start : start + rows].tolist(), *[17] * wrong]
        out = lifted.target(ids, keep=rows)
        found.append((out["logits"][:rows], out["hidden_tap"][:rows]))
    for have, want in zip(zip(*found, strict=True), both.expected(), strict=True):
        assert relative(np.concatenate(have), want) < TOLERANCE


def test_nothing_is_odd_about_them(both: Both) -> None:
    """No warning about biases that no key announces, and no tensor of unknown use."""
    module = Lifted(both.path).module
    findings = [f for r in module.weights.readers.values() for f in r.findings]  # type: ignore[attr-defined]
    assert [f for f in findings if f.severity is Severity.WARNING] == []
    assert not [d for d in module.decisions if "not used" in d]
    windows = {n.attrs.window for n in module.graphs["target"].nodes if n.op.name == "attention"}  # type: ignore[attr-defined]
    wanted = both.model.config.get("sliding_window")
    assert windows - {None} == ({wanted} if wanted else set())


def test_the_bundle_computes_the_same(compiled: tuple[Both, Generator]) -> None:
    pair, generator = compiled
    logits, states = pair.expected()
    target = generator.engine.entry("target")
    inputs = {
        Role.TOKEN_IDS: PROMPT[None],
        Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
        Role.LOGIT_ROWS: np.arange(len(PROMPT)),
    }
    out = target.run(inputs, [Role.LOGITS, Role.HIDDEN_TAP])
    assert relative(out[Role.LOGITS][0], logits) < TOLERANCE
    assert relative(out[Role.HIDDEN_TAP][0], states) < TOLERANCE


def test_greedy_tokens(compiled: tuple[Both, Generator]) -> None:
    """Plain and speculative, as transformers generates them."""
    pair, generator = compiled
    expected = pair.greedy()
    for options in ({"speculation": False}, {}, {"num_speculative_tokens": 2}):
        result = generator.generate(
            token_ids=PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, **options
        )
        assert result.token_ids == expected, options


@pytest.mark.parametrize("device", ["cpu", "onnx"])
def test_windows_of_sequences_side_by_side(
    device: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each sequence has a window of its own, wherever the others are."""
    folder = tmp_path_factory.mktemp("batch")
    pair = make("qwen2-window" if device == "onnx" else "mistral-window", folder)
    sizes = {"max_model_len": 96, "prefill_chunk": 16, "max_batch_size": 2}
    edgecc.compile(pair.path, pair.draft, out=folder / "bundle", device=device, **sizes)
    with edgecc.load(folder / "bundle") as generator:
        options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        prompts = [PROMPT[:n] for n in (41, 3, 17)]
        singles = [generator.generate(token_ids=p, **options).token_ids for p in prompts]
        requests = [generator.request(token_ids=p, **options) for p in prompts]
        found = [answer.token_ids for answer in generator.generate_batch(requests)]
    assert singles[0] == pair.greedy()
    assert found == singles
