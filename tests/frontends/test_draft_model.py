"""Language models as drafts: lifted against transformers, and what does not fit together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgecc.errors import EdgeccError, InputError, Severity, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import read_text_config
from edgecc.frontends.drafts import read_draft
from edgecc.frontends.drafts.draft_model import DraftModel
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.interpreter import Interpreter
from edgecc.ir.weights import Derived
from edgecc.roles import Role
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import edit_json, write_target
from helpers.command_line import SMALL
from helpers.dense_models import MODELS, load, save
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target

PROMPT = np.random.default_rng(5).integers(0, NUM_TOKENS, 23).tolist()
STEPS = 4
TOLERANCE = 1e-4
"""Relative; transformers computes in float32."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_target(folder / "t", **SMALL, quantized=False, vocab=NUM_TOKENS + 21)


def write_small(folder: Path, **options: object) -> Path:
    """A draft with other rows of padding than the target."""
    return write_target(folder / "d", **{**SMALL, "quantized": False, "seed": 4, **options})


@pytest.mark.parametrize(
    "name",
    [
        *("llama-tied", "llama-biases", "llama3-scaling", "mistral-window", "qwen2-tied-yarn"),
        *("qwen3-window", "ministral", "llama-one-kv-head"),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, target: Path, name: str) -> None:
    """Prompt in two pieces, then its own choices one by one: proposals and logits of a round."""
    torch = pytest.importorskip("torch")
    model = MODELS[name]
    draft = save(model, tmp_path / "d", seed=2)
    module = lift(target, draft, LiftOptions(max_model_len=64, num_speculative_tokens=STEPS))
    reference, known = load(model, draft), list(PROMPT)
    graph = module.graphs["draft"]
    memory = {
        i.name: np.full([1, *map(int, map(str, i.value.type.shape[1:]))], 50.0)
        for i in graph.by_role(Role.KV_CACHE)
    }
    interpreter, length, tokens = Interpreter(module, np.float64), 0, PROMPT[:9]
    for _ in range(STEPS + 1):
        given = {"token_ids": np.array([tokens]), "cache_length": np.array([length])}
        rows = {"logit_rows": np.arange(len(tokens))}
        out = interpreter.run("draft", {**given, **rows, **memory})
        memory = {name: out.pop(name) for name in memory}
        with torch.no_grad():
            every = reference(torch.tensor([[*known[:length], *tokens]])).logits[0].numpy()
        expected = every[length:]
        assert np.abs(out["draft_logits"][0] - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert out["proposals"][0].tolist() == expected[:, :NUM_TOKENS].argmax(axis=1).tolist()
        length += len(tokens)
        tokens = PROMPT[length:]
        if not tokens:
            tokens = [int(out["proposals"][0, -1])]
            known += tokens


def test_graphs_and_facts(target: Path, tmp_path: Path) -> None:
    module = lift(target, write_small(tmp_path), LiftOptions(max_model_len=64))
    assert "speculation by method draft_model: the draft stores model.embed_tokens.weight" in (
        module.decisions
    )
    assert not module.graphs["target"].by_role(Role.HIDDEN_TAP)
    roles = {i.role for i in module.graphs["draft"].inputs}
    assert roles == {Role.TOKEN_IDS, Role.CACHE_LENGTH, Role.LOGIT_ROWS, Role.KV_CACHE}
    draft = module.metadata["draft"]
    assert isinstance(draft, dict)
    assert draft["num_speculative_tokens"] == 5
    assert {s.partition(".")[0] for s in module.weights} == {"target", "draft"}


def test_without_a_target(tmp_path: Path) -> None:
    assert set(lift(None, write_small(tmp_path)).graphs) == {"draft"}


def test_a_quantized_draft_keeps_its_encodings(target: Path, tmp_path: Path) -> None:
    module = lift(target, write_small(tmp_path, quantized=True))
    kinds = {s: str(w.encoding) for s, w in module.weights.items() if "down_proj" in s}
    found = {kind for s, kind in kinds.items() if s.startswith("draft")}
    assert found == {"nvfp4<block=16, input_scale>"}
    assert {kind for s, kind in kinds.items() if s.startswith("target")} == {"dense<bf16>"}


def test_ids_without_a_token_are_never_proposed(target: Path, tmp_path: Path) -> None:
    """The target's tokens count, whatever rows the draft has."""
    module = lift(target, write_small(tmp_path, vocab=NUM_TOKENS + 5))
    (node,) = (n for n in module.graphs["draft"].nodes if n.op.name == "argmax")
    assert "259" in str(node.attrs)
    assert not any(isinstance(w.source, Derived) and "d2t" in s for s, w in module.weights.items())


def edit_vocabulary(path: Path, change: Callable[[dict[str, int]], object]) -> None:
    file = path / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    change(content["model"]["vocab"])
    file.write_text(json.dumps(content), "utf-8")


def test_two_tokens_with_one_id(target: Path, tmp_path: Path) -> None:
    draft = write_small(tmp_path)
    edit_vocabulary(draft, lambda vocab: vocab.update(a=vocab["b"], b=vocab["a"]))
    with pytest.raises(InputError, match="token 97 is 'b', the target's is 'a'") as caught:
        lift(target, draft)
    assert caught.value.id == "draft/tokenizer"
    assert "2 of 259 ids differ" in caught.value.diagnostics[0].notes[0]


def test_too_few_rows(target: Path, tmp_path: Path) -> None:
    """Both sizes, and how many of them count."""
    other = write_target(tmp_path / "t", **SMALL, quantized=False, vocab=NUM_TOKENS + 21)
    edit_vocabulary(other, lambda vocab: vocab.update(zzz=NUM_TOKENS + 15))
    draft = write_small(tmp_path, vocab=NUM_TOKENS + 5)
    with pytest.raises(InputError, match="has 264 rows, the target's 280, 275 of which") as caught:
        lift(other, draft)
    assert caught.value.id == "bind/vocab-mismatch"


@pytest.mark.parametrize("lacking", ["target", "draft"])
def test_without_a_tokenizer_sizes_must_be_equal(tmp_path: Path, lacking: str) -> None:
    same, more = (
        lift_pair(tmp_path / str(rows), lacking, rows) for rows in (NUM_TOKENS, NUM_TOKENS + 8)
    )
    assert isinstance(same, list)
    assert [d.id for d in same if d.id.startswith("draft/")] == ["draft/tokenizer-unknown"]
    assert isinstance(more, InputError)
    assert more.id == "bind/vocab-mismatch"
    assert f"has 267 rows, the target's 259, and there is no {lacking}/tokenizer.json" in str(more)


def lift_pair(folder: Path, lacking: str, rows: int) -> list[object] | InputError:
    """Findings about a draft of so many rows, or the error."""
    folder.mkdir()
    target = write_target(
        folder / "t", **SMALL, quantized=False, vocab=NUM_TOKENS, tokenizer=lacking != "target"
    )
    draft = write_small(folder, vocab=rows, tokenizer=lacking != "draft")
    with Checkpoint.open(target, role="target") as one, Checkpoint.open(draft, role="draft") as two:
        model = read_draft(two)
        assert isinstance(model, DraftModel)
        try:
            model.check_tokens(one, read_text_config(one))
        except InputError as error:
            return error
        return list(two.findings)


def test_tokens_that_one_of_them_lacks_are_told(target: Path, tmp_path: Path) -> None:
    draft = write_small(tmp_path)
    edit_vocabulary(draft, lambda vocab: vocab.pop("a"))
    with Checkpoint.open(draft, role="draft") as two, Checkpoint.open(target, role="t") as one:
        model = read_draft(two)
        model.check_tokens(one, read_text_config(one))
        (found,) = (d for d in two.findings if d.id == "draft/tokens-differ")
    assert found.severity is Severity.NOTE
    assert "1 tokens are unknown to the draft" in found.message
    assert found.notes == ("'a' is 97",)


@pytest.mark.parametrize(
    ("write", "error", "id"),
    [
        (
            lambda p: write_hybrid_target(p / "d", HybridSizes(layer_types=(LINEAR, FULL))),
            UnsupportedError,
            "draft/recurrent",
        ),
        (lambda p: write_small(p, model_type="gemma3"), UnsupportedError, "target/architecture"),
        (lambda p: write_small(p, num_experts=8), UnsupportedError, "target/experts"),
        (lambda p: write_small(p, hidden_act="relu"), UnsupportedError, "target/activation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(
    target: Path, tmp_path: Path, write: Callable[[Path], Path], error: type[EdgeccError], id: str
) -> None:
    with pytest.raises(error) as caught:
        lift(target, write(tmp_path))
    assert id in {d.id for d in caught.value.diagnostics}
    assert all(d.where.startswith("draft") for d in caught.value.diagnostics)


def test_a_head_that_is_missing_is_the_drafts(target: Path, tmp_path: Path) -> None:
    draft = write_small(tmp_path, tied=True)
    edit_json(draft / "config.json", tie_word_embeddings=False)
    with pytest.raises(InputError, match="the draft has no lm_head") as caught:
        lift(target, draft)
    assert caught.value.id == "bind/no-lm-head"


@pytest.mark.parametrize("steps", [0, -3])
def test_numbers_of_proposals(target: Path, tmp_path: Path, steps: int) -> None:
    with pytest.raises(UsageError, match="choose at least 1"):
        lift(target, write_small(tmp_path), LiftOptions(num_speculative_tokens=steps))


def test_the_method_by_name(target: Path, tmp_path: Path) -> None:
    draft = write_small(tmp_path)
    module = lift(target, draft, LiftOptions(spec_method="draft_model"))
    assert any("it was asked for, and the draft stores" in d for d in module.decisions)
    with pytest.raises(UsageError, match="the draft is one of method draft_model"):
        lift(target, draft, LiftOptions(spec_method="eagle3"))
