"""Published drafts by their shapes: counts of tensors and parameters, from headers without weights.

Sizes, layers that are read, mask tokens and totals are those of the public checkpoints and recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest

from edgecc.errors import Severity
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift
from edgecc.ir.core import Module
from edgecc.ir.verifier import verify
from edgecc.ir.weights import Unbound
from edgecc.roles import Role
from helpers.headers import Specs, bf16, write_headers

VOCAB = {"qwen3": 151936, "qwen3.5": 248320}
MASK = {"qwen3": 151669, "qwen3.5": 248070}


@dataclass(frozen=True, slots=True)
class Published:
    """A draft of five layers.

    Attributes:
        sizes: Hidden and MLP size, query heads, key/value heads.
        taps: Outputs of target layers that it reads.
        layers: Of the target.
        tensors: How many are stored.
        parameters: How many values they have.
        family: Of the vocabulary.
        heads: Whether it has a Markov and a confidence head.
        tables: Whether it ships copies of the target's embedding and head.
        block: Slots.
    """

    sizes: tuple[int, int, int, int]
    taps: tuple[int, ...]
    layers: int
    tensors: int
    parameters: int
    family: str = "qwen3"
    heads: bool = True
    tables: bool = False
    block: int = 7


QWEN3_4B, QWEN3_8B = (2560, 9728, 32, 8), (4096, 12288, 32, 8)
OF_36 = (1, 9, 17, 25, 33)
BARE: Mapping[str, Any] = {"heads": False, "block": 16}

PUBLISHED: Mapping[str, Published] = {
    "deepspec-qwen3-4b": Published(QWEN3_4B, OF_36, 36, 64, 1_393_133_569, tables=True),
    "deepspec-qwen3-8b": Published(QWEN3_8B, OF_36, 36, 64, 2_371_081_729, tables=True),
    "deepspec-qwen3-14b": Published(
        (5120, 17408, 40, 8), (1, 10, 19, 28, 37), 40, 64, 3_416_263_169, tables=True
    ),
    "specforge-qwen3-4b": Published(QWEN3_4B, OF_36, 36, 62, 615_221_249),
    "specforge-qwen3-8b": Published(QWEN3_8B, OF_36, 36, 62, 1_126_422_017),
    "z-lab-qwen3-4b": Published(QWEN3_4B, OF_36, 36, 58, 537_427_200, **BARE),
    "z-lab-qwen3-8b": Published(QWEN3_8B, OF_36, 36, 58, 1_048_626_432, **BARE),
    "dflash-27b": Published(
        (5120, 17408, 32, 8), (1, 16, 31, 46, 61), 64, 58, 1_730_213_120, "qwen3.5", **BARE
    ),
}


def layer(prefix: str, sizes: tuple[int, int, int, int], width: int | None = None) -> Specs:
    """Matrices of a layer with heads of 128, whose attention reads `width` values."""
    hidden, mlp, heads, kv = sizes
    width = hidden if width is None else width
    specs: Specs = {}
    for name, rows in (("q", heads * 128), ("k", kv * 128), ("v", kv * 128)):
        specs |= bf16(f"{prefix}.self_attn.{name}_proj.weight", rows, width)
    specs |= bf16(f"{prefix}.self_attn.o_proj.weight", hidden, heads * 128)
    for name in ("gate", "up"):
        specs |= bf16(f"{prefix}.mlp.{name}_proj.weight", mlp, hidden)
    specs |= bf16(f"{prefix}.mlp.down_proj.weight", hidden, mlp)
    for name in ("input_layernorm", "post_attention_layernorm"):
        specs |= bf16(f"{prefix}.{name}.weight", hidden)
    return specs


def block_draft(draft: Published) -> Specs:
    hidden, vocab = draft.sizes[0], VOCAB[draft.family]
    specs = bf16("fc.weight", hidden, len(draft.taps) * hidden)
    specs |= bf16("hidden_norm.weight", hidden) | bf16("norm.weight", hidden)
    for index in range(5):
        specs |= layer(f"layers.{index}", draft.sizes)
        for name in ("q_norm", "k_norm"):
            specs |= bf16(f"layers.{index}.self_attn.{name}.weight", 128)
    if draft.heads:
        specs |= bf16("markov_head.markov_w1.weight", vocab, 256)
        specs |= bf16("markov_head.markov_w2.weight", vocab, 256)
        specs |= bf16("confidence_head.proj.weight", 1, hidden + 256)
        specs |= bf16("confidence_head.proj.bias", 1)
    if draft.tables:
        specs |= bf16("embed_tokens.weight", vocab, hidden) | bf16("lm_head.weight", vocab, hidden)
    return specs


def config(sizes: tuple[int, int, int, int], vocab: int, **more: object) -> dict[str, Any]:
    hidden, mlp, heads, kv = sizes
    return {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": vocab,
        **more,
    }


def warnings_of(module: Module) -> list[str]:
    reader = module.weights.readers["draft"]
    assert isinstance(reader, Checkpoint)
    return [f.id for f in reader.findings if f.severity is Severity.WARNING]


def parameters(specs: Specs) -> int:
    return sum(prod(shape) for _, shape in specs.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_block_drafts(tmp_path: Path, name: str) -> None:
    """11 tensors a layer and 3, 4 for the heads, 2 for copies of the target's tables."""
    draft = PUBLISHED[name]
    assert draft.tensors == 11 * 5 + 3 + 4 * draft.heads + 2 * draft.tables
    keys = config(
        draft.sizes,
        VOCAB[draft.family],
        architectures=["Qwen3DSparkModel" if draft.heads else "DFlashDraftModel"],
        block_size=draft.block,
        layer_types=["full_attention"] * 5,
        mask_token_id=MASK[draft.family],
        num_hidden_layers=5,
        num_target_layers=draft.layers,
        target_layer_ids=list(draft.taps),
    )
    specs = block_draft(draft)
    assert (len(specs), parameters(specs)) == (draft.tensors, draft.parameters)
    module = lift(None, write_headers(tmp_path / "d", keys, specs))
    assert not verify(module)
    assert warnings_of(module) == []
    assert not [d for d in module.decisions if "not used" in d]
    (proposals,) = module.graphs["draft"].outputs_by_role(Role.PROPOSALS)
    assert str(proposals.value.type.shape[1]) == str(draft.block - (not draft.heads))
    borrowed = {n for n, w in module.weights.items() if isinstance(w.source, Unbound)}
    missing = set() if draft.tables else {"draft.embed_tokens.weight", "draft.lm_head.weight"}
    assert borrowed == missing


def test_the_released_eagle3_draft(tmp_path: Path) -> None:
    """AngelSlim's for Qwen3-1.7B, which says tied and ships a reduced head.

    Headers have no values, so that its map is one of zeros, and its marks are left out.
    """
    sizes, head = (2048, 6144, 16, 8), 32000
    specs = bf16("fc.weight", 2048, 3 * 2048) | bf16("norm.weight", 2048)
    specs |= layer("midlayer", sizes, width=2 * 2048) | bf16("midlayer.hidden_norm.weight", 2048)
    specs |= bf16("lm_head.weight", head, 2048)
    assert (len(specs), parameters(specs)) == (13, 136_847_360)
    keys = config(sizes, 151936, draft_vocab_size=head, num_hidden_layers=1) | {
        "architectures": ["LlamaForCausalLMEEagle3"],
        "model_type": "llama",
        "tie_word_embeddings": True,
    }
    path = write_headers(tmp_path / "d", keys, specs | {"d2t": ("I64", (head,))})
    module = lift(None, path)
    assert not verify(module)
    assert warnings_of(module) == ["draft/zero-map"]
    assert not [d for d in module.decisions if "not used" in d]
    borrowed = [n for n, w in module.weights.items() if isinstance(w.source, Unbound)]
    assert borrowed == ["draft.embed_tokens.weight"]
