"""EAGLE3 drafts: small synthetic checkpoints, and the draft in float64 NumPy.

The reference is written from the definition (arXiv 2503.01840, code of SafeAILab and AngelSlim) and
shares no code with edgecc; it computes a whole sequence at once, without caches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import DROP, VOCAB, Array, Tensors
from helpers.reference import Floats, Model, Target

DRAFT_IDS = tuple(sorted({*range(0, NUM_TOKENS, 3), 1, 2, 250}))
"""Default draft vocabulary: target ids of the draft's ids."""


def write_eagle3(
    path: Path,
    *,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 48,
    vocab: int = VOCAB,
    target_hidden: int | None = None,
    taps: int = 3,
    draft_ids: Sequence[int] | None = DRAFT_IDS,
    marks: bool = True,
    own_head: bool = True,
    own_embedding: bool = False,
    seed: int = 3,
    **config_overrides: object,
) -> Path:
    """Write an EAGLE3 draft in BF16, in SafeAILab's layout, and return its folder.

    Args:
        path: Folder to create.
        hidden: Width of the draft.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head.
        intermediate: MLP width.
        vocab: Rows of the target's vocabulary.
        target_hidden: Width of the target; default `hidden`.
        taps: Tapped target layers.
        draft_ids: Target id of each draft id, stored as distances; None: the target's vocabulary,
            without a map.
        marks: Store `t2d` beside `d2t`.
        own_head: Ship an `lm_head`.
        own_embedding: Ship `embed_tokens`.
        seed: Seed of the weights.
        config_overrides: Keys of config.json to set, or to remove with `DROP`.
    """
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 0.0) -> Array:
        deviation = scale or columns**-0.5
        return (random.standard_normal((rows, columns)) * deviation).astype(ml_dtypes.bfloat16)

    def norm(size: int) -> Array:
        return (1 + 0.1 * random.standard_normal(size)).astype(ml_dtypes.bfloat16)

    q, kv = heads * head_dim, kv_heads * head_dim
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    size = vocab if draft_ids is None else len(draft_ids)
    tensors: Tensors = {
        "fc.weight": matrix(hidden, taps * (target_hidden or hidden)),
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.hidden_norm.weight": norm(hidden),
        "midlayer.post_attention_layernorm.weight": norm(hidden),
        f"{attention}.q_proj.weight": matrix(q, 2 * hidden),
        f"{attention}.k_proj.weight": matrix(kv, 2 * hidden),
        f"{attention}.v_proj.weight": matrix(kv, 2 * hidden),
        f"{attention}.o_proj.weight": matrix(hidden, q),
        f"{mlp}.gate_proj.weight": matrix(intermediate, hidden),
        f"{mlp}.up_proj.weight": matrix(intermediate, hidden),
        f"{mlp}.down_proj.weight": matrix(hidden, intermediate),
        "norm.weight": norm(hidden),
    }
    if own_head:
        tensors["lm_head.weight"] = matrix(size, hidden)
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden, scale=1.0)
    if draft_ids is not None:
        tensors["d2t"] = np.array(draft_ids, dtype=np.int64) - np.arange(size)
        if marks:
            tensors["t2d"] = np.isin(np.arange(vocab), draft_ids)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": NUM_TOKENS - 3,
        "draft_vocab_size": size,
        "eos_token_id": NUM_TOKENS - 1,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        **config_overrides,
    }
    path.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not DROP}
    (path / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", "utf-8")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@dataclass(frozen=True)
class Eagle3Output:
    """What the draft computes in one round.

    Attributes:
        logits: Over the draft's vocabulary, `[N, Vd]`.
        tokens: The proposals as target ids `[N]`.
    """

    logits: Floats
    tokens: list[int]


class Eagle3Draft(Model):
    """An EAGLE3 draft in SafeAILab's tensor names.

    Args:
        path: The folder.
        target: Where the embedding and the head come from if the draft has none.
        ids: Target id of each draft id.
        num_tokens: Target ids from here on are never proposed.
        norm_before_residual: The residual stream starts from the normed state.
        norm_output: Later steps read the normed state.
    """

    def __init__(
        self,
        path: Path,
        target: Target,
        ids: Sequence[int],
        num_tokens: int,
        *,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        super().__init__(path)
        own = self.has("embed_tokens.weight")
        self.embedding = self.matrix("embed_tokens") if own else target.embedding
        self.head = self.matrix("lm_head") if self.has("lm_head.weight") else target.head
        self.ids, self.num_tokens = list(ids), num_tokens
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output

    def run(self, features: Floats, tokens: Sequence[int], steps: int) -> Eagle3Output:
        """One round, everything from the beginning of the sequence computed anew in each step.

        Args:
            features: Tapped states of all committed tokens but the newest, `[T, n * H]`.
            tokens: The committed tokens after the first: one for each row of features.
            steps: How many tokens to propose.
        """
        states = list(self.linear(features, "fc"))
        following, logits, proposals = list(tokens), [], []
        for _ in range(steps):
            h = self._layer(np.stack(states), following)
            z = self.norm(h, "norm")
            logits.append(self.head @ z)
            known = [i for i, token in enumerate(self.ids) if token < self.num_tokens]
            best = max(known, key=lambda i: logits[-1][i])
            proposals.append(self.ids[best])
            states.append(z if self.norm_output else h)
            following.append(proposals[-1])
        return Eagle3Output(np.stack(logits), proposals)

    def _layer(self, states: Floats, tokens: Sequence[int]) -> Floats:
        """The layer's output at the last row."""
        attention = "midlayer.self_attn"
        normed = self.norm(states, "midlayer.hidden_norm")
        embedded = self.norm(self.embedding[np.asarray(tokens)], "midlayer.input_layernorm")
        x = np.concatenate([embedded, normed], axis=1)
        q = self.heads(self.linear(x, f"{attention}.q_proj"), self.config["num_attention_heads"])
        k = self.heads(self.linear(x, f"{attention}.k_proj"), self.config["num_key_value_heads"])
        v = self.heads(self.linear(x, f"{attention}.v_proj"), self.config["num_key_value_heads"])
        if self.has(f"{attention}.q_norm.weight"):
            q, k = self.norm(q, f"{attention}.q_norm"), self.norm(k, f"{attention}.k_norm")
        positions = np.arange(len(states))
        causal = positions[None, :] <= positions[:, None]
        y = self.attend(self.rotate(q, positions), self.rotate(k, positions), v, causal)
        residual = normed if self.norm_before_residual else states
        h = residual + self.linear(y, f"{attention}.o_proj")
        h = h + self.mlp(self.norm(h, "midlayer.post_attention_layernorm"), "midlayer.mlp")
        last: Floats = h[-1]
        return last
