"""Qwen3.5 in float64 NumPy, written from its definition; shares no code with edgecc.

A whole sequence at once; the DeltaNet row by row and head by head. Rotary embedding is the full
interleaved kind with three positions a token, so that what remains of it for text is a result here
and not an assumption. Source: transformers' modeling_qwen3_5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from helpers.reference import Floats, Target, TargetOutput


class HybridTarget(Target):
    """A Qwen3.5 decoder, text only."""

    def run(self, ids: Sequence[int]) -> TargetOutput:
        """Compute a whole sequence; all three positions of token i are i."""
        return self.run_at(ids, np.tile(np.arange(len(ids)), (3, 1)))

    def run_at(
        self, ids: Sequence[int], positions: NDArray[np.int64], images: Mapping[int, Floats] = {}
    ) -> TargetOutput:
        """Compute a whole sequence at given time, height and width positions `[3, T]`.

        Args:
            ids: The tokens.
            positions: Of each token.
            images: Rows that take the places of embeddings, by number of the token.
        """
        x = self.embedding[np.asarray(ids)]
        for place, row in images.items():
            x[place] = row
        states = [x]
        for index, kind in enumerate(self.config["layer_types"]):
            layer = f"model.layers.{index}"
            y = self.offset_norm(x, f"{layer}.input_layernorm")
            if kind == "linear_attention":
                x = x + self.delta_net(y, f"{layer}.linear_attn")
            else:
                x = x + self.gated_attention(y, f"{layer}.self_attn", positions)
            y = self.offset_norm(x, f"{layer}.post_attention_layernorm")
            x = x + self.mlp(y, f"{layer}.mlp")
            states.append(x)
        hidden = self.offset_norm(x, "model.norm")
        return TargetOutput(hidden @ self.head.T, np.stack(states))

    def offset_norm(self, x: Floats, module: str) -> Floats:
        """RMSNorm scaled by `1 + w`."""
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x / scale * (1 + self.tensor(f"{module}.weight"))

    def gated_attention(self, x: Floats, module: str, positions: NDArray[np.int64]) -> Floats:
        """Causal attention whose output is multiplied by a sigmoid gate."""
        config = self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        both = self.heads(self.linear(x, f"{module}.q_proj"), heads)
        dim = both.shape[2] // 2
        gate = both[:, :, dim:].reshape(len(x), -1)
        q = self.offset_norm(both[:, :, :dim], f"{module}.q_norm")
        k = self.heads(self.linear(x, f"{module}.k_proj"), kv_heads)
        k = self.offset_norm(k, f"{module}.k_norm")
        v = self.heads(self.linear(x, f"{module}.v_proj"), kv_heads)
        rows = np.arange(len(x))
        causal = rows[None, :] <= rows[:, None]
        y = self.attend(self.rotate_at(q, positions), self.rotate_at(k, positions), v, causal)
        return self.linear(y / (1 + np.exp(-gate)), f"{module}.o_proj")

    def rotate_at(self, x: Floats, positions: NDArray[np.int64]) -> Floats:
        """Interleaved multimodal rotary embedding of the first dims of `[T, heads, D]`."""
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[2] * rope.get("partial_rotary_factor", 0.25))
        half, sections = rotated // 2, rope["mrope_section"]
        out = x.copy()
        for j in range(half):
            axis = 0
            if j % 3 == 1 and j < 3 * sections[1]:
                axis = 1
            elif j % 3 == 2 and j < 3 * sections[2]:
                axis = 2
            inverse = np.float32(rope["rope_theta"] ** (-2 * j / rotated))
            angle = (positions[axis].astype(np.float32) * inverse).astype(np.float64)[:, None]
            first, second = x[:, :, j], x[:, :, half + j]
            out[:, :, j] = first * np.cos(angle) - second * np.sin(angle)
            out[:, :, half + j] = second * np.cos(angle) + first * np.sin(angle)
        return out

    def delta_net(self, x: Floats, module: str) -> Floats:
        """Convolution, SiLU, gated delta rule, gated norm, projection."""
        config = self.config
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        mixed = self.convolve(self.linear(x, f"{module}.in_proj_qkv"), f"{module}.conv1d")
        mixed = mixed / (1 + np.exp(-mixed))
        q = self.heads(mixed[:, : key_heads * key_dim], key_heads)
        k = self.heads(mixed[:, key_heads * key_dim : 2 * key_heads * key_dim], key_heads)
        v = self.heads(mixed[:, 2 * key_heads * key_dim :], value_heads)
        beta = 1 / (1 + np.exp(-self.linear(x, f"{module}.in_proj_b")))
        shifted = self.linear(x, f"{module}.in_proj_a") + self.tensor(f"{module}.dt_bias")
        decay = np.exp(-np.exp(self.tensor(f"{module}.A_log")) * np.logaddexp(0, shifted))
        y = np.empty((len(x), value_heads, value_dim))
        for head in range(value_heads):
            source = head // (value_heads // key_heads)
            state = np.zeros((key_dim, value_dim))
            for t in range(len(x)):
                query = q[t, source] / math.sqrt(np.sum(q[t, source] ** 2) + 1e-6)
                key = k[t, source] / math.sqrt(np.sum(k[t, source] ** 2) + 1e-6)
                state = state * decay[t, head]
                wrong = v[t, head] - key @ state
                state = state + np.outer(key, beta[t, head] * wrong)
                y[t, head] = query @ state / math.sqrt(key_dim)
        scale = np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + self.eps)
        normed = (y / scale * self.tensor(f"{module}.norm.weight")).reshape(len(x), -1)
        z = self.linear(x, f"{module}.in_proj_z")
        return self.linear(normed * z / (1 + np.exp(-z)), f"{module}.out_proj")

    def convolve(self, x: Floats, module: str) -> Floats:
        """Causal depthwise convolution; the last tap meets the row itself."""
        taps = self.tensor(f"{module}.weight")[:, 0]
        out = np.zeros_like(x)
        for t in range(len(x)):
            for j in range(taps.shape[1]):
                row = t - (taps.shape[1] - 1) + j
                if row >= 0:
                    out[t] += taps[:, j] * x[row]
        return out
