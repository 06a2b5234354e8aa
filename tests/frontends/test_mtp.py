"""The multi-token-prediction block of a target as its draft, against float64 NumPy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from edgecc.errors import EdgeccError, InputError, UnsupportedError, UsageError
from edgecc.frontends.drafts import KINDS
from edgecc.frontends.drafts.mtp import Mtp
from edgecc.frontends.lift import lift
from edgecc.frontends.mtp_block import MTP_FILES, mtp_names
from edgecc.frontends.options import LiftOptions
from edgecc.frontends.spec_methods import SPEC_METHODS
from edgecc.ir.core import Module
from edgecc.ir.encodings import NVFP4, Dense
from edgecc.ir.types import DType
from edgecc.ir.weights import Alias, Stored, Unbound
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.roles import Role
from helpers.byte_tokenizer import NUM_TOKENS, write_tokenizer
from helpers.checkpoints import (
    DROP,
    VOCAB,
    Tensors,
    edit_json,
    edit_tensors,
    nvfp4,
    write_target,
)
from helpers.eagle3 import write_eagle3
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.lifted import Array, Lifted
from helpers.mtp import STRIDE, MtpDraft, MtpOutput, make_predictable

TOLERANCE = 2e-6
"""Relative. The rotary tables are float32; everything else is float64 on both sides."""

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 64, 33, 83]
MTP = LiftOptions(max_model_len=64, spec_method="mtp")


class Block:
    """A small target with its block, by edgecc and by the reference.

    Args:
        folder: Where to write it.
        sizes: Of the target.
        steps: Proposals to lift for.
        garbage: What the caches hold where nothing has been written.
        target: Arguments of `write_hybrid_target`.
    """

    def __init__(
        self,
        folder: Path,
        sizes: HybridSizes | None = None,
        *,
        steps: int = 4,
        garbage: float = 0.0,
        **target: Any,
    ) -> None:
        target.setdefault("mtp", 1)
        self.path = write_hybrid_target(folder / "t", sizes, **target)
        self.reference, self.steps = MtpDraft(self.path), steps
        self.lifted = Lifted(
            self.path, spec_method="mtp", num_speculative_tokens=steps, garbage=garbage
        )

    def expected(self, ids: Sequence[int], newest: int) -> MtpOutput:
        """One round of the reference after a prompt and the first token."""
        states = self.reference.states(ids)
        return self.reference.propose(states, [*ids[1:], newest], self.steps, VOCAB)

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


def agree(found: Mapping[str, Array], expected: MtpOutput) -> None:
    assert found["proposals"].tolist() == expected.tokens
    assert close(found["draft_logits"], expected.logits)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"layer_types": (FULL,)},
        {"layer_types": (LINEAR,)},
        {"layer_types": (FULL, LINEAR)},
        {"layer_types": (LINEAR, FULL, FULL)},
        {"heads": 4, "kv_heads": 1, "head_dim": 8, "sections": (1, 1, 0)},
        {"heads": 1, "kv_heads": 1, "head_dim": 16, "hidden": 24},
        {"rotary": 0.25, "sections": (1, 1, 0)},
        {"rotary": 1.0, "sections": (4, 2, 2)},
        {"intermediate": 16},
    ],
)
def test_sizes(tmp_path: Path, sizes: dict[str, Any]) -> None:
    Block(tmp_path, HybridSizes(**sizes)).check()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_take_turns(tmp_path: Path, layers: int) -> None:
    Block(tmp_path, mtp=layers, steps=2 * layers).check()


@pytest.mark.parametrize("target", [{"mixed": True}, {"tied": True}])
def test_targets(tmp_path: Path, target: dict[str, Any]) -> None:
    """The head is the target's, packed or the embedding table."""
    Block(tmp_path, **target).check()


def test_padding_rows_are_never_proposed(tmp_path: Path) -> None:
    """A tokenizer says where they begin; the head answers them most strongly here."""
    path = write_hybrid_target(tmp_path / "t", mtp=1)
    write_tokenizer(path)

    def change(tensors: Tensors) -> None:
        head = tensors["lm_head.weight"].astype(np.float32)
        head[NUM_TOKENS:] *= 9
        tensors["lm_head.weight"] = head.astype(ml_dtypes.bfloat16)

    edit_tensors(path, change)
    lifted, reference = Lifted(path, spec_method="mtp"), MtpDraft(path)
    out = lifted.draft_chain(lifted.target(IDS)["hidden_tap"], [*IDS[1:], 79])
    expected = reference.propose(reference.states(IDS), [*IDS[1:], 79], 3, NUM_TOKENS)
    agree(out, expected)
    assert expected.logits.argmax(axis=1).max() >= NUM_TOKENS > max(expected.tokens)


@given(
    cuts=st.lists(st.integers(1, len(IDS) - 1), max_size=3, unique=True),
    layers=st.sampled_from([1, 2]),
)
def test_rows_may_come_in_any_chunks(
    blocks: dict[int, Block], cuts: list[int], layers: int
) -> None:
    """What a round leaves behind in the caches, and garbage beyond them, do no harm."""
    block = blocks[layers]
    states = block.reference.states(IDS)
    block.lifted.reset()
    following, bounds = [*IDS[1:], 79], [0, *sorted(cuts), len(IDS)]
    for first, stop in itertools.pairwise(bounds):
        out = block.lifted.draft_chain(states[first:stop], following[first:stop])
    agree(out, block.expected(IDS, 79))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Block]:
    return {
        n: Block(tmp_path_factory.mktemp("mtp"), mtp=n, garbage=1e3, steps=2 * n) for n in (1, 2)
    }


def test_the_first_proposals_do_not_depend_on_how_many(tmp_path: Path) -> None:
    long = Block(tmp_path / "a", steps=6).found(IDS, 79)["proposals"].tolist()
    assert Block(tmp_path / "b", steps=2).found(IDS, 79)["proposals"].tolist() == long[:2]


def test_a_tap_after_the_final_norm(tmp_path: Path) -> None:
    block = Block(tmp_path)
    assert close(block.lifted.target(IDS)["hidden_tap"], block.reference.states(IDS))


def test_a_predictable_target_is_predicted(tmp_path: Path) -> None:
    """The helper of the tests of whole rounds does what it says."""
    path = make_predictable(write_hybrid_target(tmp_path / "t", mtp=1), 0.0)
    block = MtpDraft(path)
    logits = block.run(IDS).logits
    assert logits.argmax(axis=1).tolist() == [(t + STRIDE) % NUM_TOKENS for t in IDS]
    newest = int(logits[-1].argmax())
    tokens = block.propose(block.states(IDS), [*IDS[1:], newest], 3, NUM_TOKENS).tokens
    assert tokens == [(newest + STRIDE * (i + 1)) % NUM_TOKENS for i in range(3)]


def respelled(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(n) if n.startswith("mtp.") else n: v for n, v in tensors.items()}


def as_speculators(name: str) -> str:
    for ours, theirs in (
        ("mtp.fc.", "input_proj."),
        ("mtp.pre_fc_norm_embedding.", "token_layernorm."),
        ("mtp.pre_fc_norm_hidden.", "hidden_layernorm."),
        ("mtp.norm.", "final_layernorm."),
        ("mtp.layers.0.", ""),
    ):
        if name.startswith(ours):
            return f"mtp_layers.0.{theirs}{name.removeprefix(ours)}"
    raise AssertionError(name)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"model.{name}",
        lambda name: f"language_model.{name}",
        lambda name: f"model.language_model.{name}",
        as_speculators,
    ],
)
def test_names(tmp_path: Path, rename: Callable[[str], str]) -> None:
    block = Block(tmp_path)
    expected = block.found(IDS, 79)["draft_logits"]
    edit_tensors(block.path, lambda tensors: respelled(tensors, rename))
    block.lifted = Lifted(block.path, spec_method="mtp", num_speculative_tokens=4)
    assert np.array_equal(block.found(IDS, 79)["draft_logits"], expected)
    assert not [d for d in block.lifted.module.decisions if "not used" in d or "left out" in d]


def test_wrapped_class(tmp_path: Path) -> None:
    """Keys nested, the language model under another prefix; the block is where it always is."""
    block = Block(tmp_path / "a")
    path = write_hybrid_target(tmp_path / "b" / "t", mtp=1, multimodal=True)
    expected = block.found(IDS, 79)["draft_logits"]
    block.lifted = Lifted(path, spec_method="mtp", num_speculative_tokens=4)
    assert np.array_equal(block.found(IDS, 79)["draft_logits"], expected)


@pytest.mark.parametrize("file", MTP_FILES)
def test_a_file_that_no_index_lists(tmp_path: Path, file: str) -> None:
    block = Block(tmp_path)
    expected = block.found(IDS, 79)["draft_logits"]
    tensors = load_file(block.path / "model.safetensors")
    own = {n: tensors.pop(n) for n in list(tensors) if n.startswith("mtp.")}
    edit_tensors(block.path, lambda _: tensors)
    save_file(own, block.path / file)
    block.lifted = Lifted(block.path, spec_method="mtp", num_speculative_tokens=4)
    assert np.array_equal(block.found(IDS, 79)["draft_logits"], expected)
    plain = lift(block.path)
    assert not [s for s in plain.weights if "mtp" in s]


def test_a_file_beside_that_repeats_a_tensor(tmp_path: Path) -> None:
    path = write_hybrid_target(tmp_path / "t", mtp=1)
    save_file({"mtp.norm.weight": np.ones(32, np.float32)}, path / "mtp.safetensors")
    lift(path)
    with pytest.raises(InputError, match="and in another weight file") as caught:
        lift(path, options=MTP)
    assert caught.value.diagnostics[0].where == "target/mtp.safetensors"


def test_own_embedding_and_head(tmp_path: Path) -> None:
    random = np.random.default_rng(7)

    def change(tensors: Tensors) -> None:
        for name in ("embed_tokens", "lm_head"):
            values = random.standard_normal((VOCAB, 32))
            tensors[f"mtp.{name}.weight"] = values.astype(ml_dtypes.bfloat16)

    path = write_hybrid_target(tmp_path / "t", mtp=1, mtp_use_dedicated_embeddings=True)
    edit_tensors(path, change)
    block = MtpDraft(path)
    lifted = Lifted(path, spec_method="mtp")
    out = lifted.draft_chain(lifted.target(IDS)["hidden_tap"], [*IDS[1:], 79])
    agree(out, block.propose(block.states(IDS), [*IDS[1:], 79], 3, VOCAB))
    assert not any(isinstance(w.source, Alias) for w in lifted.module.weights.values())


class TestModule:
    """What is in the lifted module."""

    def lifted(self, tmp_path: Path, **target: Any) -> Module:
        return lift(write_hybrid_target(tmp_path / "t", mtp=1, **target), options=MTP)

    def test_the_head_exists_once(self, tmp_path: Path) -> None:
        module = self.lifted(tmp_path, mixed=True)
        for name in ("draft.lm_head.weight", "draft.embed_tokens.weight"):
            assert isinstance(module.weights[name].source, Unbound)
        BindSharedWeights().run(module, PassContext())
        source = module.weights["draft.lm_head.weight"].source
        assert source == Alias("target.lm_head.weight")
        assert isinstance(module.weights["draft.lm_head.weight"].encoding, NVFP4)

    def test_precision_is_that_of_the_tensors(self, tmp_path: Path) -> None:
        """The metadata speaks of every layer of that number, and of all linear layers."""
        sizes = HybridSizes(layer_types=(FULL,))
        path = write_hybrid_target(tmp_path / "t", sizes, mtp=1, mixed=True)
        config = json.loads((path / "config.json").read_text())
        quantized = config["quantization_config"]["quantized_layers"]
        assert "model.layers.0.self_attn.q_proj" in quantized
        quantized["mtp.fc"] = {"quant_algo": "NVFP4"}
        edit_json(path / "config.json", quantization_config=config["quantization_config"])
        module = lift(path, options=MTP)
        own = {s: w for s, w in module.weights.items() if isinstance(w.source, Stored)}
        for symbol, weight in own.items():
            if symbol.startswith("draft."):
                assert weight.encoding == Dense(DType.BF16), symbol
        assert not module.weights.readers["target"].findings
        assert "draft weights as stored: bf16 x 8" in module.decisions

    def test_a_packed_block(self, tmp_path: Path) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=1, mixed=True)

        def change(tensors: Tensors) -> None:
            tensors |= nvfp4("mtp.fc", tensors["mtp.fc.weight"])

        edit_tensors(path, change)
        module = lift(path, options=MTP)
        assert isinstance(module.weights["draft.fc.weight"].encoding, NVFP4)
        (finding,) = module.weights.readers["target"].findings
        assert finding.id == "quant/stored-not-declared"

    def test_decisions(self, tmp_path: Path) -> None:
        decisions = self.lifted(tmp_path).decisions
        assert (
            "speculation by method mtp: it was asked for, and the target stores its "
            "multi-token-prediction block (15 tensors)" in decisions
        )
        assert "draft reads the target's states after its final norm" in decisions
        assert not [d for d in decisions if "left out" in d]

    def test_metadata(self, tmp_path: Path) -> None:
        assert self.lifted(tmp_path).metadata["draft"] == {
            "method": "mtp",
            "num_speculative_tokens": 3,
            "max_position_embeddings": 512,
        }

    def test_interface(self, tmp_path: Path) -> None:
        graph = self.lifted(tmp_path).graphs["draft"]
        assert {i.role for i in graph.inputs} == {
            Role.FEATURES,
            Role.NEXT_TOKEN_IDS,
            Role.CACHE_LENGTH,
            Role.KV_CACHE,
        }
        roles = [o.role for o in graph.outputs]
        assert roles == [Role.PROPOSALS, Role.DRAFT_LOGITS, Role.KV_CACHE, Role.KV_CACHE]

    def test_without_it_a_target_says_that_it_could(self, tmp_path: Path) -> None:
        decisions = lift(write_hybrid_target(tmp_path / "t", mtp=1)).decisions
        assert (
            "no draft: --spec-method mtp would draft with the target's multi-token-prediction block"
            in decisions
        )
        assert [d for d in decisions if "block (15 tensors) is left out" in d]


class TestMethods:
    """What was asked for against what is there."""

    def test_all_that_can_be_lifted(self) -> None:
        assert ("auto", *KINDS, Mtp.method, "ngram") == SPEC_METHODS

    @pytest.mark.parametrize(("name", "meant"), [("qwen3_5_mtp", "mtp"), ("ngram_gpu", "ngram")])
    def test_names_that_vllm_has_for_the_same(self, tmp_path: Path, name: str, meant: str) -> None:
        target = write_hybrid_target(tmp_path / "t", mtp=1)
        module = lift(target, None, LiftOptions(max_model_len=64, spec_method=name))
        draft = module.metadata["draft"]
        assert isinstance(draft, dict)
        assert draft["method"] == meant

    @pytest.mark.parametrize("name", SPEC_METHODS)
    def test_own_names_mean_themselves(self, name: str) -> None:
        assert LiftOptions(spec_method=name).spec_method == name

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("deepseek_mtp", "only blocks of Qwen3.5 targets are built, as mtp"),
            ("mimo_mtp", "only blocks of Qwen3.5 targets are built, as mtp"),
            ("eagle", "reads one hidden state"),
            ("medusa", "without knowing each other"),
            ("mlp_speculator", "from one hidden state"),
            ("suffix", "ngram looks up in the text so far"),
        ],
    )
    def test_other_methods_of_vllm(self, tmp_path: Path, name: str, reason: str) -> None:
        target = write_hybrid_target(tmp_path / "t", mtp=1)
        with pytest.raises(UnsupportedError, match=f"method '{name}' is not supported") as caught:
            lift(target, None, LiftOptions(spec_method=name))
        (found,) = caught.value.diagnostics
        assert found.id == "draft/kind"
        assert "known from vLLM" in found.notes[0]
        assert reason in found.notes[0]
        assert "draft_model" in found.help

    def test_auto_says_by_what(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "t", layers=3, hidden=32, head_dim=16, quantized=False)
        draft = write_eagle3(tmp_path / "d", target_layer_ids=[0, 1, 2])
        for method, why in (("auto", ""), ("eagle3", "it was asked for, and ")):
            options = LiftOptions(max_model_len=64, spec_method=method)
            line = f"speculation by method eagle3: {why}the draft stores d2t"
            assert line in lift(target, draft, options).decisions

    @pytest.mark.parametrize(
        ("method", "with_draft", "error", "id"),
        [
            ("mtp", True, UsageError, "usage/spec-method"),
            ("dspark", True, UsageError, "usage/spec-method"),
            ("dspark", False, UsageError, "usage/spec-method"),
            ("medusa", False, UnsupportedError, "draft/kind"),
            ("mpt", False, UnsupportedError, "draft/kind"),
        ],
    )
    def test_refusals(
        self, tmp_path: Path, method: str, with_draft: bool, error: type[EdgeccError], id: str
    ) -> None:
        target = write_hybrid_target(tmp_path / "t", mtp=1)
        draft = write_eagle3(tmp_path / "d") if with_draft else None
        with pytest.raises(error) as caught:
            lift(target, draft, LiftOptions(spec_method=method))
        assert caught.value.diagnostics[0].id == id
        assert caught.value.diagnostics[0].help

    def test_a_block_alone(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="a block of the target's own checkpoint"):
            lift(None, write_hybrid_target(tmp_path / "t", mtp=1), MTP)

    @pytest.mark.parametrize("declared", [0, 1])
    def test_no_block(self, tmp_path: Path, declared: int) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp_num_hidden_layers=declared)
        with pytest.raises(InputError, match="has no multi-token-prediction block") as caught:
            lift(path, options=MTP)
        (found,) = caught.value.diagnostics
        assert (found.id, found.where) == (
            "draft/no-mtp",
            "target/config.json: mtp_num_hidden_layers",
        )
        assert "some exports leave the block out" in found.help or not declared

    def test_another_family(self, tmp_path: Path) -> None:
        path = write_target(tmp_path / "t")
        edit_tensors(path, lambda ts: {**ts, "mtp.fc.weight": np.ones((4, 8), np.float32)})
        with pytest.raises(UnsupportedError, match="of model_type 'qwen3' are not supported"):
            lift(path, options=MTP)

    @pytest.mark.parametrize(
        ("layers", "steps", "most"),
        [(1, None, 3), (2, None, 4), (3, None, 3), (2, 2, 2), (2, 6, 6)],
    )
    def test_steps(self, tmp_path: Path, layers: int, steps: int | None, most: int) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=layers)
        options = LiftOptions(spec_method="mtp", num_speculative_tokens=steps)
        draft = lift(path, options=options).metadata["draft"]
        assert isinstance(draft, dict)
        assert draft["num_speculative_tokens"] == most

    @pytest.mark.parametrize("steps", [1, 3])
    def test_steps_that_are_no_whole_turns(self, tmp_path: Path, steps: int) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=2)
        options = LiftOptions(spec_method="mtp", num_speculative_tokens=steps)
        with pytest.raises(UsageError, match="speculative tokens with a block of 2 layers"):
            lift(path, options=options)

    def test_more_steps_than_a_call_verifies(self, tmp_path: Path) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=1)
        options = LiftOptions(spec_method="mtp", num_speculative_tokens=10**9)
        with pytest.raises(UsageError, match="a verification of this draft has 1000000001"):
            lift(path, options=options)


class TestDamage:
    """Blocks that are not what the config says."""

    def fails(self, path: Path, id: str, error: type[EdgeccError] = InputError) -> str:
        with pytest.raises(error) as caught:
            lift(path, options=MTP)
        (found,) = caught.value.diagnostics
        assert found.id == id
        return found.where

    def test_a_missing_tensor(self, tmp_path: Path) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=1)
        edit_tensors(path, lambda ts: {n: v for n, v in ts.items() if n != "mtp.fc.weight"})
        assert self.fails(path, "checkpoint/missing-tensor") == "target"

    @pytest.mark.parametrize(
        ("declared", "id"), [(2, "checkpoint/missing-layers"), (0, "config/bad-value")]
    )
    def test_another_count_of_layers(self, tmp_path: Path, declared: int, id: str) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=1, mtp_num_hidden_layers=declared)
        assert self.fails(path, id).endswith("mtp_num_hidden_layers")

    def test_surplus_layers(self, tmp_path: Path) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=2, mtp_num_hidden_layers=1)
        assert self.fails(path, "checkpoint/surplus-layers").endswith("mtp_num_hidden_layers")

    def test_no_count(self, tmp_path: Path) -> None:
        """Then the tensors say it."""
        path = write_hybrid_target(tmp_path / "t", mtp=2, mtp_num_hidden_layers=DROP)
        assert len(lift(path, options=MTP).graphs["draft"].by_role(Role.KV_CACHE)) == 4

    def test_no_gate(self, tmp_path: Path) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=1)
        name = "mtp.layers.0.self_attn.q_proj.weight"
        edit_tensors(path, lambda ts: {**ts, name: ts[name][: len(ts[name]) // 2]})
        assert self.fails(path, "target/no-gate") == f"target/model.safetensors: {name}"

    def test_a_parameter_that_is_not_read(self, tmp_path: Path) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=1)
        name = "mtp.layers.0.self_attn.sinks"
        edit_tensors(path, lambda ts: {**ts, name: np.ones(4, np.float32)})
        self.fails(path, "checkpoint/unread-parameter", UnsupportedError)

    def test_a_promised_embedding(self, tmp_path: Path) -> None:
        path = write_hybrid_target(tmp_path / "t", mtp=1, mtp_use_dedicated_embeddings=True)
        assert self.fails(path, "draft/no-embedding").endswith("mtp_use_dedicated_embeddings")

    def test_two_spellings(self) -> None:
        with pytest.raises(InputError, match=r"are both mtp\.fc\.weight"):
            mtp_names(["mtp.fc.weight", "model.mtp.fc.weight"], "target")
