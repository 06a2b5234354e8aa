"""The EAGLE3 frontend against an independent float64 draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.errors import InputError, Severity, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.core import Module
from edgecc.ir.encodings import NVFP4
from edgecc.ir.verifier import verify
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import VOCAB, Array, Tensors, edit_json, edit_tensors, nvfp4, write_target
from helpers.eagle3 import DRAFT_IDS, Eagle3Draft, Eagle3Output, write_eagle3
from helpers.lifted import Lifted
from helpers.reference import Target

TOLERANCE = 2e-6
"""Relative. The rotary tables are float32; everything else is float64 on both sides."""

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 64, 33, 83]
TAPS = (0, 1, 2)
SMALL = {"layers": 3, "hidden": 32, "head_dim": 16, "intermediate": 48, "quantized": False}

Change = Callable[[Tensors], Tensors | None]


class Pair:
    """A small pair, by edgecc and by the reference.

    Args:
        folder: Where to write it.
        target: Arguments of `write_target`.
        steps: Proposals to lift for.
        garbage: What the caches hold where nothing has been written.
        change: Edits the draft's tensors; the reference reads them as they were before.
        draft: Arguments of `write_eagle3`.
    """

    def __init__(
        self,
        folder: Path,
        target: Mapping[str, Any] | None = None,
        *,
        steps: int = 4,
        garbage: float = 0.0,
        change: Change | None = None,
        respell: Change | None = None,
        **draft: Any,
    ) -> None:
        self.target_path = write_target(folder / "target", **{**SMALL, **(target or {})})
        self.reference = Target(self.target_path)
        draft.setdefault("target_hidden", self.reference.config["hidden_size"])
        draft.setdefault("target_layer_ids", list(TAPS))
        layers = draft["target_layer_ids"]
        self.layers: Sequence[int] = layers if isinstance(layers, list) else TAPS
        draft.setdefault("taps", len(self.layers))
        self.draft_path = write_eagle3(folder / "draft", **draft)
        if change is not None:
            edit_tensors(self.draft_path, change)
        ids = draft.get("draft_ids", DRAFT_IDS)
        self.steps = steps
        self.draft = Eagle3Draft(
            self.draft_path,
            self.reference,
            range(VOCAB) if ids is None else ids,
            NUM_TOKENS,
            norm_before_residual=bool(draft.get("norm_before_residual")),
            norm_output=bool(draft.get("norm_output")),
        )
        if respell is not None:
            edit_tensors(self.draft_path, respell)
        self.lifted = Lifted(
            self.target_path, self.draft_path, num_speculative_tokens=steps, garbage=garbage
        )

    def expected(self, ids: Sequence[int], newest: int) -> Eagle3Output:
        """One round of the reference after a prompt and the first token."""
        features = self.reference.run(ids).taps(self.layers)
        return self.draft.run(features, [*ids[1:], newest], self.steps)

    def found(self, ids: Sequence[int], newest: int) -> dict[str, Array]:
        """One round of the lifted graphs, the prompt all at once."""
        self.lifted.reset()
        return self.lifted.draft_chain(self.lifted.target(ids)["hidden_tap"], [*ids[1:], newest])

    def check(self, ids: Sequence[int] = IDS, newest: int = 79) -> None:
        """Both agree on everything one round computes."""
        agree(self.found(ids, newest), self.expected(ids, newest))


def close(found: Array, expected: Array) -> bool:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max()) <= TOLERANCE * float(np.abs(expected).max())


def agree(found: Mapping[str, Array], expected: Eagle3Output) -> None:
    assert found["proposals"].tolist() == expected.tokens
    assert close(found["draft_logits"], expected.logits)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 32},
        {"heads": 4, "kv_heads": 4, "head_dim": 8},
        {"heads": 6, "kv_heads": 1, "head_dim": 10},
        {"heads": 1, "kv_heads": 1, "head_dim": 2},
        {"intermediate": 16},
    ],
    ids=str,
)
def test_sizes_of_its_own(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """The target has other heads: nothing of its attention may leak into the draft."""
    Pair(tmp_path, {"heads": 2, "kv_heads": 1, "head_dim": 24}, **sizes).check()


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_steps(tmp_path: Path, steps: int) -> None:
    pair = Pair(tmp_path, steps=steps)
    assert pair.found(IDS, 79)["proposals"].shape == (steps,)
    pair.check()


def test_fewer_proposals_are_the_first_ones(tmp_path: Path) -> None:
    """Self-check 9."""
    whole = Pair(tmp_path / "a", steps=6).found(IDS, 79)
    for steps in (1, 3):
        found = Pair(tmp_path / str(steps), steps=steps).found(IDS, 79)
        assert found["proposals"].tolist() == whole["proposals"][:steps].tolist()
        assert np.array_equal(found["draft_logits"], whole["draft_logits"][:steps])


@pytest.mark.parametrize("layers", [(0,), (-1, 0, 1), (0, 2), (-1, 0, 1, 2)], ids=str)
def test_tapped_layers(tmp_path: Path, layers: tuple[int, ...]) -> None:
    """DeepSpec's drafts read another number of states than three."""
    Pair(tmp_path, target_layer_ids=list(layers)).check()


@pytest.mark.parametrize("key", ["norm_before_residual", "norm_output"])
def test_variants_of_the_residual(tmp_path: Path, key: str) -> None:
    plain = Pair(tmp_path / "a").found(IDS, 79)
    pair = Pair(tmp_path / "b", **{key: True})
    assert not close(pair.found(IDS, 79)["draft_logits"], plain["draft_logits"])
    pair.check()
    Pair(tmp_path / "c", **{key: False}).check()


def test_head_norms_of_queries_and_keys(tmp_path: Path) -> None:
    """DeepSpec's variant; SafeAILab's drafts have none although their targets do."""

    def add(tensors: Tensors) -> None:
        random = np.random.default_rng(8)
        for which in "qk":
            weight = 1 + 0.3 * random.standard_normal(16)
            tensors[f"midlayer.self_attn.{which}_norm.weight"] = weight.astype(np.float32)

    pair = Pair(tmp_path / "a", change=add)
    pair.check()
    plain = Pair(tmp_path / "b").found(IDS, 79)
    assert not close(pair.found(IDS, 79)["draft_logits"], plain["draft_logits"])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_embedding_of_its_own(tmp_path: Path, rope: dict[str, object]) -> None:
    Pair(tmp_path, rope_parameters=rope).check(list(range(30)))


def test_few_trained_positions_do_not_end_the_tables(tmp_path: Path) -> None:
    """Facts 3.10: a public draft says 2048 and runs beyond."""
    pair = Pair(tmp_path, max_position_embeddings=8)
    pair.check(list(range(20)))
    assert [d for d in pair.lifted.module.decisions if "made for 8 positions" in d]


@pytest.mark.parametrize("modules", [("fc",), ("q_proj", "v_proj"), ("o_proj", "down_proj")])
def test_a_bias_exists_if_it_is_stored(tmp_path: Path, modules: tuple[str, ...]) -> None:
    random = np.random.default_rng(5)

    def add(tensors: Tensors) -> None:
        for name in list(tensors):
            module = name.removesuffix(".weight")
            if module != name and module.endswith(modules):
                bias = random.standard_normal(tensors[name].shape[0])
                tensors[f"{module}.bias"] = bias.astype(np.float32)

    Pair(tmp_path, change=add).check()


class TestTables:
    """Head and embedding: own ones win, missing ones are the target's."""

    @pytest.mark.parametrize("embedding", [True, False])
    def test_own_reduced_head(self, tmp_path: Path, embedding: bool) -> None:
        pair = Pair(tmp_path, {"quantized": True}, own_embedding=embedding)
        mine = "draft.embed_tokens.weight"
        assert (pair.lifted.module.weights.resolve(mine) == mine) is embedding
        pair.check()

    @pytest.mark.parametrize(
        "target",
        [{"quantized": True}, {"quantized": True, "quantized_head": False}, {"tied": True}],
    )
    def test_borrowed_head(self, tmp_path: Path, target: dict[str, object]) -> None:
        """Full vocabulary and no head: bound in the target's precision."""
        pair = Pair(tmp_path, target, draft_ids=None, own_head=False)
        table = pair.lifted.module.weights
        packed = isinstance(table["draft.lm_head.weight"].encoding, NVFP4)
        assert packed is (target == {"quantized": True})
        assert table.resolve("draft.lm_head.weight").startswith("target.")
        pair.check()

    def test_own_full_head(self, tmp_path: Path) -> None:
        Pair(tmp_path, draft_ids=None).check()

    @pytest.mark.parametrize("embedding", [True, False])
    def test_a_tie_in_the_draft_moves_nothing(self, tmp_path: Path, embedding: bool) -> None:
        """AngelSlim's released config says tied, and ships a separate reduced head."""
        Pair(tmp_path, tie_word_embeddings=True, own_embedding=embedding).check()

    def test_a_tie_without_a_head_takes_the_targets(self, tmp_path: Path) -> None:
        pair = Pair(
            tmp_path, tie_word_embeddings=True, own_embedding=True, own_head=False, draft_ids=None
        )
        resolved = pair.lifted.module.weights.resolve("draft.lm_head.weight")
        assert resolved == "target.lm_head.weight"
        pair.check()

    def test_hidden_size_of_its_own(self, tmp_path: Path) -> None:
        """With tables of its own only `fc` knows the target's width."""
        Pair(tmp_path, {"hidden": 48}, own_embedding=True, target_hidden_size=48).check()

    def test_another_hidden_size_cannot_borrow(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "t", **{**SMALL, "hidden": 48})
        draft = write_eagle3(tmp_path / "d", target_hidden=48, target_layer_ids=list(TAPS))
        module = lift(target, draft)
        with pytest.raises(InputError, match=r"hidden size 32, .* 48 columns") as caught:
            BindSharedWeights().run(module, PassContext())
        assert caught.value.id == "bind/hidden-mismatch"

    def test_a_quantized_draft(self, tmp_path: Path) -> None:
        def pack(tensors: Tensors) -> None:
            for name in list(tensors):
                if name.endswith(("_proj.weight", "lm_head.weight")):
                    tensors |= nvfp4(name.removesuffix(".weight"), tensors[name])

        Pair(tmp_path, change=pack, heads=4, head_dim=16).check()


def test_padding_rows_are_never_proposed(tmp_path: Path) -> None:
    """A map whose last rows mean rows of the target without a token."""
    ids = [*DRAFT_IDS, NUM_TOKENS, VOCAB - 1]

    def loud(tensors: Tensors) -> None:
        tensors["lm_head.weight"][-2:] = tensors["lm_head.weight"][5] * 50

    pair = Pair(tmp_path, draft_ids=ids, change=loud)
    found = pair.found(IDS, 79)
    assert found["draft_logits"].argmax(axis=-1).max() >= len(DRAFT_IDS)
    assert found["proposals"].max() < NUM_TOKENS
    pair.check()


def test_the_map_is_used_for_the_next_token_too(tmp_path: Path) -> None:
    """Another map gives other tokens, and so other logits from the second step on."""
    shifted = [i + 1 for i in DRAFT_IDS[:-1]] + [VOCAB - 20]
    first = Pair(tmp_path / "a").found(IDS, 79)
    pair = Pair(tmp_path / "b", draft_ids=sorted(set(shifted)), change=None)
    pair.check()
    second = pair.found(IDS, 79)
    size = min(first["draft_logits"].shape[1], second["draft_logits"].shape[1])
    assert not close(second["draft_logits"][1, :size], first["draft_logits"][1, :size])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose caches are full of garbage."""
    return Pair(tmp_path_factory.mktemp("eagle3"), steps=3, garbage=1e3)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_rounds_on_new_features_equal_one_round_on_all(
    pair: Pair, counts: list[int], seed: int
) -> None:
    """Self-checks 2 and 4: rows of the draft's own states leave no trace in the next round."""
    ids = np.random.default_rng(seed).integers(0, NUM_TOKENS, sum(counts) + 1).tolist()
    features = pair.reference.run(ids[:-1]).taps(pair.layers)
    pair.lifted.reset()
    for count in counts:
        start = pair.lifted.lengths["draft"]
        end = start + count
        found = pair.lifted.draft_chain(features[start:end], ids[start + 1 : end + 1])
        agree(found, pair.draft.run(features[:end], ids[1 : end + 1], pair.steps))


def test_a_whole_speculative_sequence(pair: Pair) -> None:
    """Greedy drafting and verification by the lifted graphs gives the reference's greedy text."""
    reference, committed = list(IDS), list(IDS)
    while len(reference) < len(IDS) + 10:
        reference.append(int(pair.reference.run(reference).logits[-1, :NUM_TOKENS].argmax()))
    pair.lifted.reset()
    out = pair.lifted.target(committed)
    features = out["hidden_tap"]
    committed.append(int(out["logits"][-1, :NUM_TOKENS].argmax()))
    while len(committed) < len(reference):
        following = committed[len(committed) - len(features) :]
        proposals = pair.lifted.draft_chain(features, following)["proposals"].tolist()
        assert proposals == pair.expected(committed[:-1], committed[-1]).tokens
        rows = pair.lifted.target([committed[-1], *proposals], keep=0)
        choices = rows["logits"][:, :NUM_TOKENS].argmax(axis=-1).tolist()
        accepted = next((i for i, p in enumerate(proposals) if choices[i] != p), len(proposals))
        committed += choices[: accepted + 1]
        features = rows["hidden_tap"][: accepted + 1]
        pair.lifted.lengths["target"] += accepted + 1
    assert committed[: len(reference)] == reference


@pytest.mark.parametrize("row", [0, 5, len(IDS) - 1])
def test_every_row_is_seen(pair: Pair, row: int) -> None:
    features = pair.reference.run(IDS).taps(pair.layers)
    following = [*IDS[1:], 79]
    pair.lifted.reset()
    plain = pair.lifted.draft_chain(features, following)["draft_logits"]
    features[row] *= -1
    pair.lifted.reset()
    by_state = pair.lifted.draft_chain(features, following)["draft_logits"]
    features[row] *= -1
    following[row] += 1
    pair.lifted.reset()
    by_token = pair.lifted.draft_chain(features, following)["draft_logits"]
    assert np.abs(by_state - plain).max() > 1e-4
    assert np.abs(by_token - plain).max() > 1e-4


def rename(*pairs: tuple[str, str]) -> Change:
    def change(tensors: Tensors) -> Tensors:
        renamed = {}
        for name, value in tensors.items():
            for old, new in pairs:
                if name.startswith(old):
                    name = new + name.removeprefix(old)
                    break
            renamed[name] = value
        return renamed

    return change


@pytest.mark.parametrize(
    "respell",
    [
        rename(("midlayer.", "layers.0.")),
        rename(("", "model.")),
        rename(("midlayer.", "model.layers.0.")),
        rename(*[(f"midlayer.self_attn.{p}", f"midlayer.self_attn.qkv_proj.{p}") for p in "qkv"]),
        lambda tensors: {**tensors, "target_model.norm.weight": np.ones(4, np.float32)},
        lambda tensors: {**tensors, "verifier_lm_head.weight": np.ones((4, 4), np.float32)},
    ],
    ids=["speculators", "prefix", "both", "grouped", "target", "verifier"],
)
def test_spellings_of_other_writers(tmp_path: Path, respell: Change) -> None:
    pair = Pair(tmp_path, respell=respell)
    assert not [d for d in pair.lifted.module.decisions if "not used" in d]
    pair.check()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten layers: the default taps are outputs of 1, 4 and 6."""
    return write_target(tmp_path_factory.mktemp("t") / "t", **{**SMALL, "layers": 10})


class TestModule:
    """What the module says about the draft."""

    def test_default_taps(self, target: Path, tmp_path: Path) -> None:
        """Engines write inputs of 2, n/2, n-3: one more than the outputs."""
        module = lift(target, write_eagle3(tmp_path / "d"), LiftOptions(max_model_len=64))
        assert taps(module) == [1, 4, 6]
        (line,) = [d for d in module.decisions if "reads the outputs" in d]
        assert "[1, 4, 6] (from 0; read from EAGLE3's default" in line
        (output,) = [o for o in module.graphs["target"].outputs if o.name == "hidden_tap"]
        assert output.value.type.shape[2] == 96
        assert not verify(module)

    def test_metadata(self, target: Path, tmp_path: Path) -> None:
        draft = write_eagle3(tmp_path / "d")
        assert lift(target, draft).metadata["draft"] == {
            "method": "eagle3",
            "num_speculative_tokens": 7,
            "target_layer_ids": [1, 4, 6],
            "draft_vocab_size": len(DRAFT_IDS),
            "max_position_embeddings": 512,
        }

    def test_sizes(self, target: Path, tmp_path: Path) -> None:
        draft = write_eagle3(tmp_path / "d", ttt_length=5)
        module = lift(target, draft, LiftOptions(max_model_len=100))
        graph = module.graphs["draft"]
        assert graph.input("k_cache.0").value.type.shape[1:] == (2, 105, 16)
        assert [i.role.value for i in graph.inputs] == [
            "features",
            "next_token_ids",
            "cache_length",
            "kv_cache",
            "kv_cache",
        ]
        shapes = {o.name: o.value.type.shape[1:] for o in graph.outputs}
        assert shapes["proposals"] == (5,)
        assert shapes["draft_logits"] == (5, len(DRAFT_IDS))

    def test_the_draft_alone(self, tmp_path: Path) -> None:
        """Without a target the default taps are unknown, their number is not."""
        draft = write_eagle3(tmp_path / "d", target_hidden=48, target_hidden_size=48)
        module = lift(None, draft)
        assert not verify(module)
        assert module.graphs["draft"].input("features").value.type.shape[2] == 3 * 48
        metadata = module.metadata["draft"]
        assert isinstance(metadata, dict)
        assert "target_layer_ids" not in metadata
        assert not [d for d in module.decisions if "reads the outputs" in d]

    @pytest.mark.parametrize(("steps", "chunk", "fits"), [(8, 9, True), (8, 8, False)])
    def test_a_chunk_holds_a_verification(
        self, target: Path, tmp_path: Path, steps: int, chunk: int, fits: bool
    ) -> None:
        draft = write_eagle3(tmp_path / "d")
        options = LiftOptions(num_speculative_tokens=steps, prefill_chunk=chunk)
        if fits:
            assert "draft" in lift(target, draft, options).graphs
        else:
            with pytest.raises(UsageError, match="verification of this draft has 9") as caught:
                lift(target, draft, options)
            assert caught.value.diagnostics[0].where == "num_speculative_tokens"

    def test_no_steps(self, target: Path, tmp_path: Path) -> None:
        draft = write_eagle3(tmp_path / "d")
        with pytest.raises(UsageError, match="0 speculative tokens"):
            lift(target, draft, LiftOptions(num_speculative_tokens=0))


def taps(module: Module) -> list[int]:
    metadata = module.metadata["draft"]
    assert isinstance(metadata, dict)
    found = metadata["target_layer_ids"]
    assert isinstance(found, list)
    return [int(str(i)) for i in found]


class TestRefused:
    """Drafts that do not fit their target, or whose tensors are not those of the network."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> tuple[Path, Path]:
        target = write_target(tmp_path / "t", **SMALL, tokenizer=False)
        return target, write_eagle3(tmp_path / "d", target_layer_ids=list(TAPS))

    @pytest.mark.parametrize(
        ("change", "id", "words"),
        [
            (lambda t: t.pop("fc.weight"), "checkpoint/missing-tensor", ("fc.weight",)),
            (lambda t: t.pop("norm.weight"), "checkpoint/missing-tensor", ("norm.weight",)),
            (
                lambda t: t.pop("midlayer.hidden_norm.weight"),
                "checkpoint/missing-tensor",
                ("no tensor midlayer.hidden_norm.weight",),
            ),
            (
                lambda t: t.pop("midlayer.self_attn.k_proj.weight"),
                "checkpoint/missing-tensor",
                ("no tensor midlayer.self_attn.k_proj.weight",),
            ),
            (
                lambda t: t.update({"fc.weight": t["fc.weight"][:, :64]}),
                "draft/fc-width",
                ("64 columns", "3 tapped layers", "32", "96"),
            ),
            (
                lambda t: t.update(
                    {
                        f"midlayer.self_attn.{p}_proj.weight": t[
                            f"midlayer.self_attn.{p}_proj.weight"
                        ][:, :32]
                        for p in "qkv"
                    }
                ),
                "quant/bad-shape",
                ("k_proj", "[32, 32]", "[32, 64]"),
            ),
            (
                lambda t: t.update({"norm.weight": np.zeros(0, "f4")}),
                "checkpoint/shape",
                ("norm.weight", "[32]", "[0]"),
            ),
            (
                lambda t: t.update({"layers.0.hidden_norm.weight": np.zeros(32, "f4")}),
                "draft/duplicate-tensor",
                ("hidden_norm",),
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

    @pytest.mark.parametrize(
        ("name", "shape", "id"),
        [
            ("midlayer.self_attn.qkv_proj.weight", (128, 64), "draft/fused-qkv"),
            ("midlayer.self_attn.q_proj.pre_quant_scale", (64,), "quant/unsupported-method"),
            (
                "midlayer.self_attn.qkv_proj.q_proj._pre_quant_scale",
                (64,),
                "checkpoint/unread-parameter",
            ),
            ("midlayer.mlp.up_proj.lora_A", (64,), "checkpoint/unread-parameter"),
            ("fc_norm.weight", (96,), "draft/kind"),
            ("fc_norm.0.weight", (32,), "draft/kind"),
            ("mask_embedding", (32,), "draft/kind"),
            ("layers.1.mlp.up_proj.weight", (48, 32), "checkpoint/surplus-layers"),
        ],
    )
    def test_other_networks(
        self, folder: tuple[Path, Path], name: str, shape: tuple[int, ...], id: str
    ) -> None:
        value = np.zeros(shape, dtype=np.float32)
        edit_tensors(folder[1], lambda tensors: {**tensors, name: value})
        with pytest.raises((UnsupportedError, InputError)) as caught:
            lift(*folder)
        assert caught.value.id == id
        assert name in str(caught.value)

    @pytest.mark.parametrize(
        ("changes", "id", "words"),
        [
            ({"target_layer_ids": [0, 1, 3]}, "draft/tapped-layers", ("[0, 1, 3]", "3 layers")),
            (
                {"target_layer_ids": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
                "draft/tapped-layers",
                ("[0, 1, 3]", "3 layers", "config.json: eagle_aux_hidden_state_layer_ids"),
            ),
            (
                {"target_layer_ids": None},
                "draft/tapped-layers",
                ("at least 7 layers, this one has 3", "n/2"),
            ),
            ({"target_layer_ids": [0, 1]}, "draft/fc-width", ("96 columns", "2 tapped")),
            ({"num_target_layers": 4}, "draft/target-layers", ("4 layers", "3")),
            ({"target_hidden_size": 48}, "draft/target-hidden", ("48", "32")),
            ({"vocab_size": 300}, "bind/vocab-mismatch", ("300 rows", "288")),
        ],
    )
    def test_another_target(
        self,
        folder: tuple[Path, Path],
        changes: dict[str, object],
        id: str,
        words: tuple[str, ...],
    ) -> None:
        edit_json(folder[1] / "config.json", **changes)
        with pytest.raises(InputError) as caught:
            lift(*folder)
        assert caught.value.id == id
        for word in words:
            assert word in str(caught.value)

    def test_biases_are_reported(self, folder: tuple[Path, Path]) -> None:
        edit_json(folder[1] / "config.json", attention_bias=True)
        reader = lift(*folder).weights.readers["draft"]
        assert isinstance(reader, Checkpoint)
        warnings = [f.id for f in reader.findings if f.severity is Severity.WARNING]
        assert warnings == ["config/bias-flag"]


@pytest.mark.parametrize(
    ("declared", "told"), [("qwen3", []), (None, []), ("qwen3_5_text", ["draft/target-family"])]
)
def test_the_family_the_draft_was_trained_for(
    declared: str | None, told: list[str], tmp_path: Path
) -> None:
    """Sizes alone would not show that it is another target."""
    target = write_target(tmp_path / "t", **SMALL, tokenizer=False)
    draft = write_eagle3(tmp_path / "d", target_layer_ids=list(TAPS))
    edit_json(draft / "config.json", target_model_type=declared)
    reader = lift(target, draft).weights.readers["draft"]
    assert isinstance(reader, Checkpoint)
    assert [f.id for f in reader.findings if f.id == "draft/target-family"] == told
