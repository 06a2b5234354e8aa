"""Lifting pairs: what belongs together, what does not, and what the module says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgecc.errors import InputError, LegalizeError, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.core import Module
from edgecc.ir.encodings import NVFP4, Dense
from edgecc.ir.types import DType, SymbolRange
from edgecc.ir.verifier import verify
from edgecc.ir.weights import Stored, Unbound
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.dedupe_weights import DedupeWeights, DedupeWeightsOptions
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import (
    Tensors,
    edit_json,
    edit_tensors,
    hub_layout,
    read_tensors,
    write_draft,
    write_target,
)

PAIRS = Path(__file__).parents[1] / "data" / "pairs"

dedupe = DedupeWeights(DedupeWeightsOptions(min_bytes=1))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("lift") / "t")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("lift") / "d")


def unbound(module: Module) -> dict[str, str]:
    return {s: w.source.role for s, w in module.weights.items() if isinstance(w.source, Unbound)}


class TestModule:
    def test_pair(self, target: Path, draft: Path) -> None:
        module = lift(target, draft)
        assert module.name == "t+d"
        assert list(module.graphs) == ["target", "draft"]
        assert unbound(module) == {
            "draft.embed_tokens.weight": "embed_tokens",
            "draft.lm_head.weight": "lm_head",
        }
        assert not verify(module)

    def test_target_alone(self, target: Path) -> None:
        module = lift(target)
        assert list(module.graphs) == ["target"]
        assert not unbound(module)
        roles = [o.role.value for o in module.graphs["target"].outputs]
        assert "hidden_tap" not in roles
        assert not verify(module)

    def test_draft_alone_verifies_but_has_no_bytes(self, draft: Path) -> None:
        module = lift(None, draft)
        assert list(module.graphs) == ["draft"]
        assert not verify(module)
        with pytest.raises(LegalizeError, match="has no bytes"):
            module.weights.read("draft.lm_head.weight")
        with pytest.raises(InputError, match="there is no target") as caught:
            BindSharedWeights().run(module, PassContext())
        assert caught.value.id == "bind/no-target"
        assert "this draft needs a target" in caught.value.diagnostics[0].help

    def test_nothing(self) -> None:
        with pytest.raises(UsageError, match="give a target, a draft, or both"):
            lift(None)

    def test_metadata(self, target: Path, draft: Path) -> None:
        module = lift(target, draft, LiftOptions(max_model_len=100, num_speculative_tokens=3))
        assert module.metadata == {
            "target": {
                "model_type": "qwen3",
                "hidden_size": 64,
                "num_layers": 4,
                "vocab_size": 288,
                "num_tokens": NUM_TOKENS,
                "eos_token_ids": [NUM_TOKENS - 3, NUM_TOKENS - 1],
                "max_position_embeddings": 512,
            },
            "draft": {
                "method": "dspark",
                "block_size": 4,
                "num_speculative_tokens": 3,
                "slot_layout": "anchor-predicts",
                "mask_token_id": 287,
                "target_layer_ids": [1, 3],
                "max_position_embeddings": 512,
            },
            "limits": {
                "max_model_len": 100,
                "max_input_len": 99,
                "prefill_chunk": 128,
                "max_batch_size": 1,
            },
        }

    def test_precisions_are_reported_for_each(self, target: Path, draft: Path) -> None:
        """B05: the draft's precision comes from its own files."""
        decisions = lift(target, draft).decisions
        assert "target weights as stored: bf16 x 1, nvfp4 x 29" in decisions
        assert "draft weights as stored: bf16 x 18" in decisions
        module = lift(target, draft)
        encodings = {
            type(w.encoding)
            for s, w in module.weights.items()
            if s.startswith("draft.") and isinstance(w.source, Stored)
        }
        assert encodings == {Dense}

    def test_symbols_cover_prompts_and_verifications(self, target: Path, draft: Path) -> None:
        module = lift(target, draft, LiftOptions(prefill_chunk=32))
        assert module.symbols["t"] == module.symbols["r"] == SymbolRange(1, 32)
        assert module.symbols["c"] == SymbolRange(1, 32)
        assert module.symbols["b"] == SymbolRange(1, 1)
        assert "c" not in lift(target).symbols

    def test_sharded_and_linked_checkpoints(self, tmp_path: Path, draft: Path) -> None:
        plain = write_target(tmp_path / "a")
        sharded = write_target(tmp_path / "b", shards=3)
        linked = hub_layout(plain, tmp_path / "cache")
        digests = [
            {s: m.weights.digest(s) for s in m.weights if s.startswith("target.")}
            for m in (lift(p, draft) for p in (plain, sharded, linked))
        ]
        assert digests[0].keys() == digests[1].keys() == digests[2].keys()
        packed = [s for s in digests[0] if s.endswith("proj.weight")]
        assert len(packed) == 28
        assert all(d[s] == digests[0][s] for d in digests for s in packed)


class TestSizes:
    @pytest.mark.parametrize(("asked", "found"), [(None, 512), (2, 2), (100, 100), (512, 512)])
    def test_model_length(self, target: Path, asked: int | None, found: int) -> None:
        module = lift(target, options=LiftOptions(max_model_len=asked))
        limits = module.metadata["limits"]
        assert isinstance(limits, dict)
        assert limits["max_model_len"] == found
        (cache,) = [i for i in module.graphs["target"].inputs if i.name == "k_cache.0"]
        assert cache.value.type.shape[1:] == (2, found + 1, 32)

    def test_long_models_get_short_caches_unless_asked(self, tmp_path: Path) -> None:
        path = write_target(tmp_path / "t", layers=1, max_position_embeddings=262144)
        limits = lift(path).metadata["limits"]
        assert isinstance(limits, dict)
        assert limits["max_model_len"] == 8192

    @pytest.mark.parametrize("length", [513, 10**9])
    def test_beyond_the_trained_length(self, target: Path, length: int) -> None:
        with pytest.raises(UsageError, match="exceeds the 512 positions") as caught:
            lift(target, options=LiftOptions(max_model_len=length))
        assert caught.value.id == "usage/max-model-len"

    def test_a_length_without_room_for_a_prompt(self, target: Path) -> None:
        with pytest.raises(UsageError, match="holds no prompt"):
            lift(target, options=LiftOptions(max_model_len=1))

    @pytest.mark.parametrize("steps", [1, 2, 3, 4])
    def test_steps_up_to_the_block(self, target: Path, draft: Path, steps: int) -> None:
        module = lift(target, draft, LiftOptions(num_speculative_tokens=steps))
        (proposals,) = [o for o in module.graphs["draft"].outputs if o.name == "proposals"]
        assert proposals.value.type.shape[1] == steps

    @pytest.mark.parametrize("steps", [5, 7, 10**6])
    def test_steps_beyond_the_block(self, target: Path, draft: Path, steps: int) -> None:
        with pytest.raises(UsageError, match="proposes at most 4") as caught:
            lift(target, draft, LiftOptions(num_speculative_tokens=steps))
        assert caught.value.id == "usage/speculative-tokens"
        assert "choose 1..4" in caught.value.diagnostics[0].help

    @pytest.mark.parametrize(("chunk", "fits"), [(4, False), (5, True), (6, True)])
    def test_a_chunk_holds_a_verification(
        self, target: Path, draft: Path, chunk: int, fits: bool
    ) -> None:
        options = LiftOptions(prefill_chunk=chunk)
        if fits:
            assert lift(target, draft, options).symbols["t"] == SymbolRange(1, chunk)
        else:
            with pytest.raises(UsageError, match=r"at most 4 rows .* draft has 5") as caught:
                lift(target, draft, options)
            assert "--prefill-chunk 5 or more" in caught.value.diagnostics[0].help

    def test_a_chunk_of_one_row_without_draft(self, target: Path) -> None:
        assert lift(target, options=LiftOptions(prefill_chunk=1)).symbols["t"] == SymbolRange(1, 1)

    @pytest.mark.parametrize("batch", [1, 3, 64])
    def test_several_sequences(self, target: Path, draft: Path, batch: int) -> None:
        module = lift(target, draft, LiftOptions(max_batch_size=batch))
        assert module.symbols["b"] == SymbolRange(1, batch)
        limits = module.metadata["limits"]
        assert isinstance(limits, dict)
        assert limits["max_batch_size"] == batch

    @pytest.mark.parametrize("batch", [0, -1, 65])
    def test_too_many_sequences(self, target: Path, batch: int) -> None:
        with pytest.raises(UsageError, match=f"--max-batch-size {batch} is not from 1 to 64"):
            lift(target, options=LiftOptions(max_batch_size=batch))

    def test_a_draft_made_for_fewer_positions(self, target: Path, tmp_path: Path) -> None:
        short = write_draft(tmp_path / "d", max_position_embeddings=48)
        (line,) = [d for d in lift(target, short).decisions if "48 positions" in d]
        assert "decoding goes on without it" in line
        module = lift(target, short, LiftOptions(max_model_len=48))
        assert not [d for d in module.decisions if "48 positions" in d]


class TestPairs:
    """Checkpoints that do not belong together."""

    def test_packed_width_that_equals_the_draft_width(self, target: Path, tmp_path: Path) -> None:
        """B02: the target's packed head has 32 columns, which is this draft's hidden size."""
        assert read_tensors(target)["lm_head.weight"].shape == (288, 32)
        narrow = write_draft(tmp_path / "d", hidden=32, target_hidden=64)
        module = lift(target, narrow)
        with pytest.raises(InputError, match=r"hidden size 32, .* 64 columns") as caught:
            BindSharedWeights().run(module, PassContext())
        assert caught.value.id == "bind/hidden-mismatch"

    def test_features_of_another_width(self, target: Path, tmp_path: Path) -> None:
        other = write_draft(tmp_path / "d", target_hidden=48)
        with pytest.raises(InputError, match="has 96 columns, expected 2 tapped") as caught:
            lift(target, other)
        assert caught.value.id == "draft/fc-width"

    @pytest.mark.parametrize("own", [True, False])
    @pytest.mark.parametrize("vocab", [260, 304])
    def test_another_vocabulary(self, target: Path, tmp_path: Path, vocab: int, own: bool) -> None:
        """Own tables do not help: anchors are ids of the target."""
        other = write_draft(
            tmp_path / "d", vocab=vocab, mask_token_id=259, own_head=own, own_embedding=own
        )
        with pytest.raises(InputError, match=f"vocabulary has {vocab} rows, .* 288") as caught:
            lift(target, other)
        assert caught.value.id == "bind/vocab-mismatch"

    def test_unsupported_targets_are_named_first(self, draft: Path, tmp_path: Path) -> None:
        path = write_target(tmp_path / "t", model_type="phi3", head_dim=16)
        with pytest.raises(UnsupportedError, match="no frontend for model_type 'phi3'"):
            lift(path, draft)

    @pytest.mark.parametrize(
        "name",
        [
            "tiny-qwen3-nvfp4",
            "tiny-qwen3-dspark",
            "tiny-qwen3-eagle3",
        ],
    )
    def test_published_layouts(self, name: str) -> None:
        module = lift(PAIRS / name) if "nvfp4" in name else lift(None, PAIRS / name)
        assert not verify(module)


class TestOwnTensors:
    """B26 and B29 of the drafts' facts: what the draft ships is kept, equal bytes are shared."""

    def pair(self, folder: Path, change: Any = None, **draft: Any) -> Module:
        target = write_target(folder / "t", quantized=False, layers=1)
        path = write_draft(folder / "d", layers=1, target_layers=1, target_layer_ids=(0,), **draft)
        if change is not None:
            edit_tensors(path, lambda tensors: change(tensors, read_tensors(target)))
        module = lift(target, path)
        BindSharedWeights().run(module, PassContext())
        return module

    @staticmethod
    def copy_tables(tensors: Tensors, target: Tensors) -> Tensors:
        """What DeepSpec ships: frozen copies of the target's head and embedding."""
        return {
            **tensors,
            "lm_head.weight": target["lm_head.weight"],
            "embed_tokens.weight": target["model.embed_tokens.weight"],
        }

    def test_equal_tables_become_one(self, tmp_path: Path) -> None:
        module = self.pair(tmp_path, self.copy_tables)
        assert not unbound(module)
        assert dedupe.run(module, PassContext())
        table = module.weights
        for mine, its in (
            ("draft.lm_head.weight", "target.lm_head.weight"),
            ("draft.embed_tokens.weight", "target.model.embed_tokens.weight"),
        ):
            assert table.resolve(mine) == table.resolve(its)

    def test_different_tables_are_kept(self, tmp_path: Path) -> None:
        module = self.pair(tmp_path, own_head=True, own_embedding=True)
        dedupe.run(module, PassContext())
        table = module.weights
        for mine in ("draft.lm_head.weight", "draft.embed_tokens.weight"):
            assert table.resolve(mine) == mine
            assert isinstance(table[mine].source, Stored)

    def test_one_row_makes_a_different_table(self, tmp_path: Path) -> None:
        def own_mask_row(tensors: Tensors, target: Tensors) -> Tensors:
            copied = self.copy_tables(tensors, target)
            copied["embed_tokens.weight"][287] *= 2
            return copied

        module = self.pair(tmp_path, own_mask_row)
        dedupe.run(module, PassContext())
        mine = "draft.embed_tokens.weight"
        assert module.weights.resolve(mine) == mine

    def test_a_tie_in_the_draft_moves_nothing(self, tmp_path: Path) -> None:
        """`tie_word_embeddings` of a draft describes its target: the head is still borrowed."""
        module = self.pair(tmp_path, own_embedding=True, tie_word_embeddings=True)
        resolved = module.weights.resolve("draft.lm_head.weight")
        assert resolved == "target.lm_head.weight"

    def test_the_borrowed_head_keeps_its_precision(self, target: Path, draft: Path) -> None:
        """B01: bound by reference, packed as it is."""
        module = lift(target, draft)
        BindSharedWeights().run(module, PassContext())
        weight = module.weights["draft.lm_head.weight"]
        assert isinstance(weight.encoding, NVFP4)
        assert module.weights.resolve("draft.lm_head.weight") == "target.lm_head.weight"
        (line,) = [d for d in module.decisions if d.startswith("draft.lm_head")]
        assert "target.lm_head.weight" in line
        assert "shared, 0 bytes copied" in line

    def test_the_head_of_a_tied_target(self, draft: Path, tmp_path: Path) -> None:
        tied = write_target(tmp_path / "t", tied=True)
        module = lift(tied, draft)
        BindSharedWeights().run(module, PassContext())
        donor = module.weights.resolve("draft.lm_head.weight")
        assert donor == "target.model.embed_tokens.weight"
        assert module.weights[donor].encoding == Dense(DType.BF16)


class TestInventory:
    """Tensors the config does not know, and layers it knows too many or too few of."""

    def checkpoint(self, folder: Path, layers: int = 4) -> Path:
        return write_target(folder / "t", quantized=False, tokenizer=False, layers=layers)

    def rename(self, path: Path, old: str, new: str) -> None:
        edit_tensors(path, lambda ts: {n.replace(old, new): a for n, a in ts.items()})

    def test_a_gap(self, tmp_path: Path) -> None:
        path = self.checkpoint(tmp_path)
        self.rename(path, "layers.2.", "layers.4.")
        with pytest.raises(InputError, match="but 1 of them are not stored: 2") as caught:
            lift(path)
        assert caught.value.id == "checkpoint/missing-layers"
        assert caught.value.diagnostics[0].notes == ("stored: 0-1, 3-4",)

    def test_more_layers_than_counted(self, tmp_path: Path) -> None:
        path = self.checkpoint(tmp_path)
        edit_json(path / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
        with pytest.raises(InputError, match=r"counts 3 layers, but model.layers.3.* is stored"):
            lift(path)

    def test_fewer_layers_than_counted(self, tmp_path: Path) -> None:
        path = self.checkpoint(tmp_path)
        edit_json(path / "config.json", num_hidden_layers=6, layer_types=["full_attention"] * 6)
        with pytest.raises(InputError, match="2 of them are not stored: 4, 5"):
            lift(path)

    def test_a_number_with_a_leading_zero_is_another_name(self, tmp_path: Path) -> None:
        path = self.checkpoint(tmp_path)
        self.rename(path, "layers.0.", "layers.00.")
        with pytest.raises(InputError, match="1 of them are not stored: 0"):
            lift(path)

    def test_a_draft_numbered_after_its_target(self, tmp_path: Path) -> None:
        path = write_draft(tmp_path / "d", layers=1)
        self.rename(path, "layers.0.", "layers.4.")
        with pytest.raises(InputError, match="not stored: 0") as caught:
            lift(None, path)
        assert caught.value.diagnostics[0].where == "draft/config.json: num_hidden_layers"

    @pytest.mark.parametrize("count", [10**5, 2**31 - 1])
    def test_absurd_counts_cost_nothing(self, tmp_path: Path, count: int) -> None:
        path = self.checkpoint(tmp_path, layers=1)
        edit_json(path / "config.json", num_hidden_layers=count, layer_types=None)
        with pytest.raises(InputError, match="at most the 14 tensors stored"):
            lift(path)

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "rotary_emb.inv_freq",
            "mtp.layers.0.self_attn.q_proj.weight",
            "mtp.fc.weight",
            "model.layers.0.self_attn.k_proj.k_scale",
            "model.layers.3.self_attn.v_proj.v_scale",
        ],
    )
    def test_known_extras_are_nothing(self, tmp_path: Path, name: str) -> None:
        path = self.checkpoint(tmp_path)
        edit_tensors(path, lambda ts: {**ts, name: np.ones(4, dtype=np.float32)})
        assert not [d for d in lift(path).decisions if "not used" in d]

    def test_unknown_extras_are_listed(self, tmp_path: Path) -> None:
        path = self.checkpoint(tmp_path)
        extra = {
            "value_head.weight": np.ones((1, 64), dtype=np.float32),
            "empty": np.ones((2, 0), dtype=np.float32),
            "model.layers.0.nothing": np.ones(0, dtype=np.float32),
        }
        edit_tensors(path, lambda ts: {**ts, **extra})
        (line,) = [d for d in lift(path).decisions if "not used" in d]
        assert line.startswith("target: 3 tensors are not used: ")
        assert all(name in line for name in extra)

    def test_many_unknown_extras_are_counted(self, tmp_path: Path) -> None:
        path = self.checkpoint(tmp_path)
        extra = {f"x.{i}": np.ones(1, dtype=np.float32) for i in range(30)}
        edit_tensors(path, lambda ts: {**ts, **extra})
        (line,) = [d for d in lift(path).decisions if "not used" in d]
        assert "30 tensors" in line
        assert line.endswith(" ...")

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.1.self_attn.sinks",
            "model.layers.2.self_attn.q_proj.lora_A",
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.post_feedforward_layernorm.weight",
            "model.norm.bias",
        ],
    )
    def test_parameters_of_another_network(self, tmp_path: Path, name: str) -> None:
        path = self.checkpoint(tmp_path)
        edit_tensors(path, lambda ts: {**ts, name: np.ones(4, dtype=np.float32)})
        with pytest.raises(UnsupportedError, match=name) as caught:
            lift(path)
        assert caught.value.id == "checkpoint/unread-parameter"
        assert caught.value.diagnostics[0].where == f"target/model.safetensors: {name}"


def test_checkpoints_stay_open_in_the_module(target: Path, draft: Path) -> None:
    module = lift(target, draft)
    for role in ("target", "draft"):
        reader = module.weights.readers[role]
        assert isinstance(reader, Checkpoint)
        assert reader.role == role
    values = module.weights.dense("target.lm_head.weight", 0, 2)
    assert values.shape == (2, 64)
    assert np.isfinite(values.astype(np.float32)).all()
