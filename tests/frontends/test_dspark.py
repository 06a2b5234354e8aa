"""The DSpark frontend against an independent float64 draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.errors import InputError, Severity, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift
from edgecc.ir.core import Module
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import (
    DROP,
    Array,
    Tensors,
    edit_json,
    edit_tensors,
    nvfp4,
    write_draft,
    write_target,
)
from helpers.lifted import Lifted
from helpers.reference import Draft, DraftOutput, Target

TOLERANCE = 2e-6
"""Relative. The rotary tables are float32; everything else is float64 on both sides."""

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 64, 33, 83]
VOCAB = 288


def close(found: Array, expected: Array) -> bool:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max()) <= TOLERANCE * float(np.abs(expected).max())


class Pair:
    """A small pair, by edgecc and by the reference.

    Args:
        folder: Where to write it.
        target: Arguments of `write_target`.
        draft: Arguments of `write_draft`.
        steps: Proposals to lift for.
        first: The first slot that predicts, for the reference.
    """

    def __init__(
        self,
        folder: Path,
        target: Mapping[str, Any] | None = None,
        *,
        steps: int | None = None,
        first: int = 0,
        garbage: float = 0.0,
        change: Callable[[Tensors], Tensors | None] | None = None,
        **draft: Any,
    ) -> None:
        small = {"layers": 3, "hidden": 32, "head_dim": 16, "intermediate": 48}
        self.target_path = write_target(
            folder / "target", **{**small, "quantized": False, **(target or {})}
        )
        self.reference = Target(self.target_path)
        layers = self.reference.config["num_hidden_layers"]
        sizes = {**small, "layers": 2, "target_layers": layers, "target_layer_ids": (0, 2)}
        arguments = {**sizes, "target_hidden": self.reference.config["hidden_size"], **draft}
        self.draft_path = write_draft(folder / "draft", **arguments)
        if change is not None:
            edit_tensors(self.draft_path, change)
        self.lifted = Lifted(
            self.target_path, self.draft_path, num_speculative_tokens=steps, garbage=garbage
        )
        config = self.lifted.module.metadata["draft"]
        assert isinstance(config, dict)
        self.layers: Sequence[int] = arguments["target_layer_ids"]
        self.block = int(str(config["block_size"]))
        self.steps = int(str(config["num_speculative_tokens"]))
        self.draft = Draft(
            self.draft_path,
            self.reference,
            block_size=self.block,
            mask_token_id=int(str(config["mask_token_id"])),
            num_tokens=NUM_TOKENS,
            first=first,
        )

    def expected(self, ids: Sequence[int], anchor: int) -> DraftOutput:
        """One round of the reference after a prompt."""
        features = self.reference.run(ids).taps(self.layers)
        return self.draft.run(features, anchor, self.steps)

    def found(self, ids: Sequence[int], anchor: int) -> dict[str, Array]:
        """One round of the lifted graphs after a prompt, all of it at once."""
        self.lifted.reset()
        return self.lifted.draft(self.lifted.target(ids)["hidden_tap"], anchor)

    def check(self, ids: Sequence[int] = IDS, anchor: int = 79) -> None:
        """Both agree on everything one round computes."""
        agree(self.found(ids, anchor), self.expected(ids, anchor))


def agree(found: Mapping[str, Array], expected: DraftOutput) -> None:
    steps = len(expected.tokens)
    assert found["proposals"].tolist() == expected.tokens
    if "base_logits" in found:
        assert close(found["base_logits"], expected.base_logits[:steps])
    assert close(found["draft_logits"], expected.logits)
    assert ("confidence" in found) == (expected.confidence is not None)
    if expected.confidence is not None:
        assert close(found["confidence"], expected.confidence)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 32},
        {"heads": 4, "kv_heads": 4, "head_dim": 8, "hidden": 32},
        {"heads": 6, "kv_heads": 1, "head_dim": 10, "hidden": 32},
        {"heads": 1, "kv_heads": 1, "head_dim": 2, "hidden": 32, "layers": 1},
        {"intermediate": 16, "layers": 3},
    ],
    ids=str,
)
def test_sizes_of_its_own(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """The target has other heads: nothing of its attention may leak into the draft."""
    Pair(tmp_path, {"heads": 2, "kv_heads": 1, "head_dim": 24}, **sizes).check()


@pytest.mark.parametrize("layers", [(0,), (-1,), (2,), (-1, 2), (0, 1, 2), (-1, 0, 1, 2)], ids=str)
def test_tapped_layers(tmp_path: Path, layers: tuple[int, ...]) -> None:
    Pair(tmp_path, target_layer_ids=layers).check()


@pytest.mark.parametrize(("block", "steps"), [(1, 1), (2, 1), (2, 2), (5, 3), (7, 7), (7, 1)])
def test_blocks_and_fewer_proposals(tmp_path: Path, block: int, steps: int) -> None:
    pair = Pair(tmp_path, block_size=block, steps=steps)
    assert (pair.block, pair.steps) == (block, steps)
    pair.check()


def test_fewer_proposals_are_the_first_ones(tmp_path: Path) -> None:
    whole = Pair(tmp_path / "a", block_size=6).found(IDS, 79)["proposals"].tolist()
    for steps in (1, 3, 5):
        pair = Pair(tmp_path / str(steps), block_size=6, steps=steps)
        assert pair.found(IDS, 79)["proposals"].tolist() == whole[:steps]


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}


@pytest.mark.parametrize("mine", [YARN, LLAMA3, LINEAR, PLAIN], ids=lambda r: r["rope_type"])
@pytest.mark.parametrize("its", [YARN, LLAMA3, PLAIN], ids=lambda r: r["rope_type"])
def test_rotary_embeddings_are_independent(
    tmp_path: Path, mine: dict[str, object], its: dict[str, object]
) -> None:
    Pair(tmp_path, {"rope_parameters": its}, rope_parameters=mine).check(list(range(30)))


@pytest.mark.parametrize(
    "target",
    [{"quantized": True}, {"quantized": True, "quantized_head": False}, {"tied": True}],
    ids=str,
)
def test_borrowed_from(tmp_path: Path, target: dict[str, object]) -> None:
    Pair(tmp_path, target).check()


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("embedding", [True, False])
def test_own_tensors_are_used(tmp_path: Path, head: bool, embedding: bool) -> None:
    Pair(tmp_path, {"quantized": True}, own_head=head, own_embedding=embedding).check()


def test_own_embedding_that_differs_in_the_mask_row_only(tmp_path: Path) -> None:
    target = write_target(
        tmp_path / "t", layers=3, hidden=32, head_dim=16, intermediate=48, quantized=False
    )
    table = Target(target).embedding.astype(ml_dtypes.bfloat16)
    table[VOCAB - 1] *= -3

    def own_row(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = table

    pair = Pair(tmp_path / "own", change=own_row)
    pair.check()
    borrowed = Pair(tmp_path / "borrowed").found(IDS, 79)
    assert not close(pair.found(IDS, 79)["base_logits"], borrowed["base_logits"])


def quantize(*modules: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.endswith(modules):
                module = name.removesuffix(".weight")
                tensors |= nvfp4(module, tensors[name])

    return change


@pytest.mark.parametrize(
    "modules",
    [
        ("lm_head.weight",),
        ("_proj.weight", "fc.weight", "markov_w2.weight"),
        ("markov_w1.weight", "markov_w2.weight"),
    ],
    ids="+".join,
)
def test_quantized_parts(tmp_path: Path, modules: tuple[str, ...]) -> None:
    Pair(tmp_path, own_head=True, markov_rank=16, change=quantize(*modules)).check()


@pytest.mark.parametrize("rank", [1, 5, 8, 40])
def test_markov_ranks(tmp_path: Path, rank: int) -> None:
    Pair(tmp_path, markov_rank=rank).check()


def test_the_markov_bias_decides(tmp_path: Path) -> None:
    """A head strong enough to make a permutation: each proposal is known from the one before."""

    def permute(tensors: Tensors) -> None:
        rank = NUM_TOKENS
        w1 = np.zeros((VOCAB, rank), dtype=np.float32)
        w2 = np.zeros((VOCAB, rank), dtype=np.float32)
        for token in range(NUM_TOKENS):
            w1[token, token] = 1e4
            w2[(token * 7 + 3) % NUM_TOKENS, token] = 1
        tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"] = w1, w2

    pair = Pair(
        tmp_path, markov_rank=NUM_TOKENS, block_size=4, confidence_head=False, change=permute
    )
    token, expected = 11, []
    for _ in range(4):
        token = (token * 7 + 3) % NUM_TOKENS
        expected.append(token)
    assert pair.found(IDS, 11)["proposals"].tolist() == expected


def test_padding_rows_are_never_proposed(tmp_path: Path) -> None:
    def loud(tensors: Tensors) -> None:
        tensors["markov_head.markov_w2.weight"][NUM_TOKENS:] = 1e3
        tensors["markov_head.markov_w1.weight"][:] = 1

    pair = Pair(tmp_path, change=loud)
    found = pair.found(IDS, 79)
    assert found["draft_logits"].argmax(axis=-1).min() >= NUM_TOKENS
    assert found["proposals"].max() < NUM_TOKENS
    pair.check()


def test_confidence_without_the_markov_embedding(tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        weight = tensors["confidence_head.proj.weight"]
        tensors["confidence_head.proj.weight"] = weight[:, :32]

    Pair(tmp_path, change=narrow, confidence_head_with_markov=False).check()


def test_confidence_without_bias(tmp_path: Path) -> None:
    Pair(tmp_path, change=lambda t: {k: v for k, v in t.items() if "proj.bias" not in k}).check()


def test_confidence_bias(tmp_path: Path) -> None:
    def shift(tensors: Tensors) -> None:
        tensors["confidence_head.proj.bias"] = np.array([0.75], dtype=np.float32)

    Pair(tmp_path, change=shift).check()


@pytest.mark.parametrize("declared", [True, False])
def test_a_confidence_head_exists_if_it_is_stored(tmp_path: Path, declared: bool) -> None:
    stored = not declared
    pair = Pair(tmp_path, confidence_head=stored, enable_confidence_head=declared)
    assert ("confidence" in pair.found(IDS, 79)) is stored
    pair.check()
    assert warnings_of(pair.lifted.module) == ["draft/confidence-flag"]


def add_biases(*modules: str) -> Callable[[Tensors], None]:
    random = np.random.default_rng(5)

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            module = name.removesuffix(".weight")
            if module != name and module.endswith(modules):
                size = tensors[name].shape[0]
                tensors[f"{module}.bias"] = random.standard_normal(size).astype(np.float32)

    return change


@pytest.mark.parametrize(
    "modules",
    [("fc",), ("q_proj", "k_proj", "v_proj"), ("o_proj", "down_proj"), ("fc", "_proj")],
    ids="+".join,
)
@pytest.mark.parametrize("announced", [False, True])
def test_a_bias_exists_if_it_is_stored(
    tmp_path: Path, modules: tuple[str, ...], announced: bool
) -> None:
    Pair(tmp_path, change=add_biases(*modules), attention_bias=announced).check()


@pytest.mark.parametrize("window", [1, 3, 6, 50])
def test_windows_end_at_each_slot(tmp_path: Path, window: int) -> None:
    """Causal, over context and block; layers without one see the whole block."""
    kinds = ["sliding_attention", "full_attention"]
    Pair(tmp_path, layer_types=kinds, sliding_window=window).check()


def test_bias_flags_that_disagree_are_reported(tmp_path: Path) -> None:
    module = Pair(tmp_path / "a", change=add_biases("q_proj")).lifted.module
    assert warnings_of(module) == ["config/bias-flag"]
    module = Pair(tmp_path / "b", attention_bias=True).lifted.module
    assert warnings_of(module) == ["config/bias-flag"]
    module = Pair(tmp_path / "c", attention_bias=True, change=add_biases("v_proj")).lifted.module
    assert warnings_of(module) == []


def warnings_of(module: Module) -> list[str]:
    reader = module.weights.readers["draft"]
    assert isinstance(reader, Checkpoint)
    return [f.id for f in reader.findings if f.severity is Severity.WARNING]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose caches are full of garbage."""
    return Pair(tmp_path_factory.mktemp("dspark"), {"rope_parameters": LLAMA3}, garbage=1e3)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_rounds_on_new_features_equal_one_round_on_all(
    pair: Pair, counts: list[int], seed: int
) -> None:
    """Self-checks 2 and 4: context rows are written once, and block rows leave no trace."""
    ids = np.random.default_rng(seed).integers(0, NUM_TOKENS, sum(counts) + 1).tolist()
    features = pair.reference.run(ids[:-1]).taps(pair.layers)
    pair.lifted.reset()
    for count in counts:
        start = pair.lifted.lengths["draft"]
        found = pair.lifted.draft(features[start : start + count], ids[start + count])
        agree(found, pair.draft.run(features[: start + count], ids[start + count], pair.steps))


def test_a_whole_speculative_sequence(pair: Pair) -> None:
    """Greedy drafting and verification by the lifted graphs gives the reference's greedy text."""
    reference, committed = list(IDS), list(IDS)
    while len(reference) < len(IDS) + 14:
        reference.append(int(pair.reference.run(reference).logits[-1, :NUM_TOKENS].argmax()))
    pair.lifted.reset()
    out = pair.lifted.target(committed)
    features = out["hidden_tap"]
    committed.append(int(out["logits"][-1, :NUM_TOKENS].argmax()))
    while len(committed) < len(reference):
        proposals = pair.lifted.draft(features, committed[-1])["proposals"].tolist()
        expected = pair.expected(committed[:-1], committed[-1])
        assert proposals == expected.tokens
        rows = pair.lifted.target([committed[-1], *proposals], keep=0)
        choices = rows["logits"][:, :NUM_TOKENS].argmax(axis=-1).tolist()
        accepted = next((i for i, p in enumerate(proposals) if choices[i] != p), len(proposals))
        committed += choices[: accepted + 1]
        features = rows["hidden_tap"][: accepted + 1]
        pair.lifted.lengths["target"] += accepted + 1
    assert committed[: len(reference)] == reference


def test_slots_see_each_other_both_ways(tmp_path: Path) -> None:
    """Self-check 3: another embedding in slot 1 changes slot 0."""

    def other_mask(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"][VOCAB - 1] *= -2

    plain = Pair(tmp_path / "a", block_size=2, own_embedding=True)
    changed = Pair(tmp_path / "b", block_size=2, own_embedding=True, change=other_mask)
    first, second = plain.found(IDS, 79), changed.found(IDS, 79)
    assert np.abs(first["base_logits"][0] - second["base_logits"][0]).max() > 1e-3


def test_every_context_row_is_seen(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    features = pair.reference.run(IDS).taps(pair.layers)
    plain = pair.found(IDS, 79)["base_logits"]
    for row in (0, 5, len(IDS) - 1):
        changed = features.copy()
        changed[row] *= -1
        pair.lifted.reset()
        found = pair.lifted.draft(changed, 79)["base_logits"]
        assert np.abs(found - plain).max() > 1e-4, row


def test_hidden_size_of_its_own(tmp_path: Path) -> None:
    """With a head and an embedding of its own, only `fc` knows the target's width."""
    Pair(tmp_path, {"hidden": 48}, hidden=32, own_head=True, own_embedding=True).check()


Change = Callable[[Tensors], Tensors | None]


def rename(old: str, new: str) -> Change:
    return lambda tensors: {
        (new + name.removeprefix(old) if name.startswith(old) else name): value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        rename("", "model."),
        rename("markov_head.", "logit_head.markov_head."),
        rename("confidence_head.", "model.logit_head.confidence_head."),
        rename("fc.", "encoder.fc."),
        rename("hidden_norm.", "encoder.output_norm_enc."),
        rename("fc.", "context_proj."),
        rename("hidden_norm.", "context_norm."),
        rename("norm.", "final_norm."),
        rename("layers.0.", "midlayer."),
    ],
)
def test_tensor_names_of_other_writers(tmp_path: Path, change: Change) -> None:
    canonical, other = Pair(tmp_path / "a"), Pair(tmp_path / "b", change=change)
    expected, found = canonical.found(IDS, 79), other.found(IDS, 79)
    assert found["proposals"].tolist() == expected["proposals"].tolist()
    assert np.array_equal(found["draft_logits"], expected["draft_logits"])


class TestRefused:
    """Drafts whose tensors are not those of the network that is built."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> tuple[Path, Path]:
        target = write_target(tmp_path / "t", tokenizer=False, quantized=False)
        return target, write_draft(tmp_path / "d", own_head=True)

    @pytest.mark.parametrize(
        ("name", "shape", "id"),
        [
            ("mask_embedding", (64,), "draft/mask-embedding"),
            ("layers.0.self_attn.attention_sink_bias", (4,), "draft/attention"),
            ("layers.1.self_attn.qkv_proj.weight", (256, 64), "draft/fused-qkv"),
            ("layers.0.layer_scalar", (1,), "checkpoint/unread-parameter"),
            ("layers.0.pre_feedforward_layernorm.weight", (64,), "checkpoint/unread-parameter"),
            ("norm.bias", (64,), "checkpoint/unread-parameter"),
            ("fc.lora_A.weight", (4, 192), "checkpoint/unread-parameter"),
            ("confidence_head.proj.base_layer.bias", (1,), "checkpoint/unread-parameter"),
            ("markov_head.markov_w2.bias", (288,), "checkpoint/unread-parameter"),
        ],
    )
    def test_other_networks(
        self, folder: tuple[Path, Path], name: str, shape: tuple[int, ...], id: str
    ) -> None:
        value = np.zeros(shape, dtype=np.float32)
        edit_tensors(folder[1], lambda tensors: {**tensors, name: value})
        with pytest.raises(UnsupportedError) as caught:
            lift(*folder)
        assert caught.value.id == id
        assert name.removesuffix(".weight").rpartition(".")[2] in str(caught.value)

    def test_identical_vocabularies_may_have_a_map(self, folder: tuple[Path, Path]) -> None:
        maps = {"d2t": np.zeros(288, dtype=np.int64), "t2d": np.ones(288, dtype=np.bool_)}
        edit_tensors(folder[1], lambda tensors: {**tensors, **maps})
        assert "draft" in lift(*folder).graphs

    @pytest.mark.parametrize(
        ("change", "id", "words"),
        [
            (lambda t: t.pop("norm.weight"), "checkpoint/missing-tensor", ("norm.weight",)),
            (lambda t: t.pop("fc.weight"), "checkpoint/missing-tensor", ("fc.weight",)),
            (
                lambda t: t.pop("markov_head.markov_w2.weight"),
                "checkpoint/missing-tensor",
                ("markov_w2",),
            ),
            (
                lambda t: t.update({"fc.weight": t["fc.weight"][:, :96]}),
                "draft/fc-width",
                ("96", "2 tapped layers", "64", "128"),
            ),
            (
                lambda t: t.update({"confidence_head.proj.weight": np.zeros((1, 70), "f4")}),
                "quant/bad-shape",
                ("70", "72"),
            ),
            (
                lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:96]}),
                "draft/no-vocabulary-map",
                ("96", "288", "d2t"),
            ),
            (
                lambda t: t.update({"embed_tokens.weight": np.zeros((96, 64), "f4")}),
                "quant/bad-shape",
                ("96", "288"),
            ),
            (
                lambda t: t.update({"model.norm.weight": t["norm.weight"]}),
                "draft/duplicate-tensor",
                ("norm.weight", "model.norm.weight"),
            ),
            (
                lambda t: t.update({"norm.weight": np.zeros(0, "f4")}),
                "checkpoint/shape",
                ("[64]", "[0]"),
            ),
        ],
    )
    def test_missing_or_odd_tensors(
        self, folder: tuple[Path, Path], change: Any, id: str, words: tuple[str, ...]
    ) -> None:
        def apply(tensors: Tensors) -> None:
            change(tensors)

        edit_tensors(folder[1], apply)
        with pytest.raises(InputError) as caught:
            lift(*folder)
        assert caught.value.id == id
        for word in words:
            assert word in str(caught.value)

    @pytest.mark.parametrize("rank", [0, 4, 256])
    def test_rank_against_tensors(self, folder: tuple[Path, Path], rank: int) -> None:
        edit_json(folder[1] / "config.json", markov_rank=rank)
        with pytest.raises(InputError, match=f"markov_rank is {rank}.*has 8 columns") as caught:
            lift(*folder)
        assert caught.value.id == "draft/markov-rank"

    def test_a_rank_that_only_the_tensors_know(self, folder: tuple[Path, Path]) -> None:
        edit_json(folder[1] / "config.json", markov_rank=DROP)
        assert "draft" in lift(*folder).graphs
