"""Multi-token-prediction blocks: the draft in float64 NumPy, and targets that one can predict.

The reference is written from the definition (vLLM's qwen3_5_mtp, converter of speculators) and
shares no code with edgecc; it computes a whole sequence at once, without caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import Tensors, edit_tensors
from helpers.hybrid_reference import HybridTarget
from helpers.reference import Floats

STRIDE = 7
"""What `make_predictable` adds to a token to get the next one; 7 and 263 have no common factor."""


@dataclass(frozen=True)
class MtpOutput:
    """What the block computes in one round.

    Attributes:
        logits: `[N, V]`.
        tokens: The proposals `[N]`.
    """

    logits: Floats
    tokens: list[int]


class MtpDraft(HybridTarget):
    """The block of a target, text only, in its published tensor names."""

    def states(self, ids: Sequence[int]) -> Floats:
        """What the target's head reads, for a whole sequence `[T, H]`."""
        return self.offset_norm(self.run(ids).states[-1], "model.norm")

    def propose(
        self, states: Floats, tokens: Sequence[int], steps: int, num_tokens: int
    ) -> MtpOutput:
        """One round, everything from the beginning of the sequence computed anew in each step.

        Args:
            states: Of all committed tokens but the newest, `[T, H]`.
            tokens: The committed tokens after the first: one for each state.
            steps: How many tokens to propose.
            num_tokens: Tokens from here on are never proposed.
        """
        own = self.matrix("mtp.embed_tokens") if self.has("mtp.embed_tokens.weight") else None
        table = self.embedding if own is None else own
        head = self.matrix("mtp.lm_head") if self.has("mtp.lm_head.weight") else self.head
        layers = sum(self.has(f"mtp.layers.{i}.input_layernorm.weight") for i in range(9))
        state, following, logits = list(states), list(tokens), []
        for step in range(steps):
            e = self.offset_norm(table[np.asarray(following)], "mtp.pre_fc_norm_embedding")
            s = self.offset_norm(np.stack(state), "mtp.pre_fc_norm_hidden")
            x = self.linear(np.concatenate([e, s], axis=1), "mtp.fc")
            layer = f"mtp.layers.{step % layers}"
            y = self.offset_norm(x, f"{layer}.input_layernorm")
            places = np.tile(np.arange(len(x)), (3, 1))
            x = x + self.gated_attention(y, f"{layer}.self_attn", places)
            y = self.offset_norm(x, f"{layer}.post_attention_layernorm")
            z = self.offset_norm((x + self.mlp(y, f"{layer}.mlp"))[-1], "mtp.norm")
            logits.append(head @ z)
            following.append(int(np.argmax(logits[-1][:num_tokens])))
            state.append(z)
        return MtpOutput(np.stack(logits), following[len(tokens) :])


def make_predictable(target: Path, noise: float) -> Path:
    """Edit an unquantized target with a block so that its tokens are easy to predict.

    The head answers token t with t + `STRIDE`; what the layers add to that is scaled by `noise`, so
    that with none the block predicts everything, and with some of it a part.
    """

    def change(tensors: Tensors) -> None:
        prefix = next(n for n in tensors if n.endswith("embed_tokens.weight"))[:-19]
        table = tensors[f"{prefix}embed_tokens.weight"].astype(np.float32)
        table /= np.sqrt(np.mean(table * table, axis=1, keepdims=True))
        head = np.zeros_like(table)
        tokens = np.arange(NUM_TOKENS)
        head[(tokens + STRIDE) % NUM_TOKENS] = table[tokens]
        hidden = table.shape[1]
        fc = np.concatenate([np.eye(hidden), noise * np.eye(hidden)], axis=1)
        for name, values in (
            (f"{prefix}embed_tokens.weight", table),
            ("lm_head.weight", head),
            ("mtp.fc.weight", fc),
        ):
            tensors[name] = values.astype(ml_dtypes.bfloat16)
        for name in tensors:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                scaled = tensors[name].astype(np.float32) * noise
                tensors[name] = scaled.astype(ml_dtypes.bfloat16)

    return edit_tensors(target, change)
