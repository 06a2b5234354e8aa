"""Qwen3, DSpark and DFlash in float64 NumPy, from their definitions; shares no code with edgecc.

A whole sequence is computed at once, without caches, so that cached and incremental evaluation has
something to be compared with. Only rotary angles are float32, as in the models' own code.

Sources: transformers' modeling_qwen3 and modeling_rope_utils; DeepSpec's DSpark (arXiv 2607.05147);
z-lab's DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.checkpoints import Tensors, read_tensors

Floats = NDArray[np.float64]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


class Model:
    """Config and tensors of one checkpoint folder, all tensors as float64.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))
        self.stored = read_tensors(path)

    @property
    def eps(self) -> float:
        """Epsilon of every norm."""
        return float(self.config["rms_norm_eps"])

    def window(self, layer: int) -> int | None:
        """Rows that a query sees in a layer, None for all."""
        kind = self.config.get("layer_types", {layer: ""})[layer]
        return int(self.config["sliding_window"]) if kind == "sliding_attention" else None

    def has(self, name: str) -> bool:
        """Whether a tensor is stored."""
        return name in self.stored

    def tensor(self, name: str) -> Floats:
        """A dense tensor."""
        return self.stored[name].astype(np.float64)

    def matrix(self, module: str) -> Floats:
        """A weight `[out, in]`, dequantized if it is packed."""
        if self.stored[f"{module}.weight"].dtype == np.uint8:
            return dequantize_nvfp4(self.stored, module)
        values = self.tensor(f"{module}.weight")
        if self.has(f"{module}.weight_scale"):  # FP8
            values = values * float(self.stored[f"{module}.weight_scale"])
        return values

    def linear(self, x: Floats, module: str) -> Floats:
        """`x W^T`, plus a bias if one is stored."""
        y = x @ self.matrix(module).T
        return y + self.tensor(f"{module}.bias") if self.has(f"{module}.bias") else y

    def norm(self, x: Floats, module: str) -> Floats:
        """RMSNorm over the last axis."""
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x / scale * self.tensor(f"{module}.weight")

    def heads(self, x: Floats, count: int) -> Floats:
        """`[T, count * D]` as `[T, count, D]`."""
        return x.reshape(len(x), count, -1)

    def attend(self, q: Floats, k: Floats, v: Floats, visible: NDArray[np.bool_]) -> Floats:
        """Grouped-query attention: q `[T, Hq, D]`, k and v `[S, Hkv, D]`, visible `[T, S]`."""
        group = q.shape[1] // k.shape[1]
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[2])
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, head] = weights @ v[:, head // group]
        return out.reshape(len(q), -1)

    def mlp(self, x: Floats, module: str) -> Floats:
        """`down(silu(gate(x)) * up(x))`."""
        gate = self.linear(x, f"{module}.gate_proj")
        up = self.linear(x, f"{module}.up_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * up, f"{module}.down_proj")

    def qkv(self, x: Floats, context: Floats, layer: str) -> tuple[Floats, Floats, Floats]:
        """Queries of x and keys and values of context, per head, q and k normed, not rotated."""
        attention = f"{layer}.self_attn"
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q = self.heads(self.linear(x, f"{attention}.q_proj"), heads)
        k = self.heads(self.linear(context, f"{attention}.k_proj"), kv_heads)
        v = self.heads(self.linear(context, f"{attention}.v_proj"), kv_heads)
        return self.norm(q, f"{attention}.q_norm"), self.norm(k, f"{attention}.k_norm"), v

    def rotate(self, x: Floats, positions: NDArray[np.int64]) -> Floats:
        """Rotary embedding of `[T, heads, D]`: halves rotated over the whole head."""
        inverse, factor = inverse_frequencies(self.config, x.shape[2])
        angles = (positions[:, None].astype(np.float32) * inverse).astype(np.float64)[:, None]
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        half = x.shape[2] // 2
        first, second = x[..., :half], x[..., half:]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return np.concatenate(rotated, axis=-1)


@dataclass(frozen=True)
class TargetOutput:
    """What the target computes for a sequence.

    Attributes:
        logits: `[T, V]`.
        states: The embedding, then the output of each layer: `[1 + layers, T, H]`.
    """

    logits: Floats
    states: Floats

    def taps(self, layers: Sequence[int]) -> Floats:
        """Outputs of some layers, counted from 0 (-1: the embedding), joined: `[T, n * H]`."""
        return np.concatenate([self.states[layer + 1] for layer in layers], axis=1)


class Target(Model):
    """A Qwen3 decoder."""

    @cached_property
    def embedding(self) -> Floats:
        """The embedding table `[V, H]`."""
        return self.matrix("model.embed_tokens")

    @cached_property
    def head(self) -> Floats:
        """The output head `[V, H]`: the embedding table where none is stored."""
        return self.matrix("lm_head") if self.has("lm_head.weight") else self.embedding

    def run(self, ids: Sequence[int]) -> TargetOutput:
        """Compute a whole sequence."""
        x = self.embedding[np.asarray(ids)]
        positions = np.arange(len(ids))
        behind = positions[:, None] - positions
        states = [x]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            y = self.norm(x, f"{layer}.input_layernorm")
            q, k, v = self.qkv(y, y, layer)
            visible = (behind >= 0) & (behind < (self.window(index) or len(ids)))
            y = self.attend(self.rotate(q, positions), self.rotate(k, positions), v, visible)
            x = x + self.linear(y, f"{layer}.self_attn.o_proj")
            y = self.norm(x, f"{layer}.post_attention_layernorm")
            x = x + self.mlp(y, f"{layer}.mlp")
            states.append(x)
        return TargetOutput(self.norm(x, "model.norm") @ self.head.T, np.stack(states))


@dataclass(frozen=True)
class DraftOutput:
    """What the draft computes in one round.

    Attributes:
        base_logits: Before the Markov bias, of all slots that predict.
        logits: With it, of the first N slots: `[N, V]`.
        tokens: The proposals `[N]`.
        confidence: Before the sigmoid `[N]`; None without that head.
    """

    base_logits: Floats
    logits: Floats
    tokens: list[int]
    confidence: Floats | None


class Draft(Model):
    """A DSpark draft in canonical tensor names, or a DFlash draft: the same without its heads.

    Args:
        path: The folder.
        target: Where the embedding and the head come from if the draft has none.
        block_size: Slots of the block.
        mask_token_id: Token in the slots after the anchor.
        num_tokens: Ids from here on are never proposed.
        first: The first slot that predicts.
    """

    def __init__(
        self,
        path: Path,
        target: Target,
        block_size: int,
        mask_token_id: int,
        num_tokens: int,
        first: int = 0,
    ) -> None:
        super().__init__(path)
        own = self.has("embed_tokens.weight")
        self.embedding = self.matrix("embed_tokens") if own else target.embedding
        self.head = self.matrix("lm_head") if self.has("lm_head.weight") else target.head
        self.block_size, self.mask, self.num_tokens = block_size, mask_token_id, num_tokens
        self.first = first

    def run(self, features: Floats, anchor: int, steps: int) -> DraftOutput:
        """One round.

        Args:
            features: Tapped states of all committed tokens but the anchor, `[start, n * H]`.
            anchor: The newest committed token, at position `start`.
            steps: How many tokens to propose.
        """
        start = len(features)
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        x = self.embedding[[anchor] + [self.mask] * (self.block_size - 1)]
        slots = np.arange(start, start + self.block_size)
        everything = np.arange(start + self.block_size)
        for index in range(self.config["num_hidden_layers"]):
            layer, window = f"layers.{index}", self.window(index)
            behind = slots[:, None] - everything
            visible = (behind >= 0) & (behind < window) if window else np.ones_like(behind, bool)
            y = self.norm(x, f"{layer}.input_layernorm")
            q, k, v = self.qkv(y, np.concatenate([context, y]), layer)
            y = self.attend(self.rotate(q, slots), self.rotate(k, everything), v, visible)
            x = x + self.linear(y, f"{layer}.self_attn.o_proj")
            y = self.norm(x, f"{layer}.post_attention_layernorm")
            x = x + self.mlp(y, f"{layer}.mlp")
        hidden = self.norm(x, "norm")[self.first :]
        return self._chain(hidden, hidden @ self.head.T, anchor, steps)

    def tokens_of(self, size: int) -> NDArray[np.int64]:
        """The target id that each row of the head means: its own number plus `d2t`."""
        ids = np.arange(size)
        return ids + self.stored["d2t"] if self.has("d2t") else ids

    def _chain(self, hidden: Floats, base: Floats, previous: int, steps: int) -> DraftOutput:
        if not self.has("markov_head.markov_w1.weight"):
            ids = self.tokens_of(base.shape[1])
            allowed = np.where(ids < self.num_tokens, base[:steps], -np.inf)
            scores = None
            if self.has("confidence_head.proj.weight"):
                scores = self.linear(hidden[:steps], "confidence_head.proj")[:, 0]
            return DraftOutput(base, base[:steps], ids[allowed.argmax(axis=1)].tolist(), scores)
        w1, w2 = self.matrix("markov_head.markov_w1"), self.matrix("markov_head.markov_w2")
        logits, tokens, confidence = [], [], []
        state = np.zeros(w1.shape[1])
        for slot in range(steps):
            embedding = w1[previous]
            gated = embedding
            if self.has("markov_head.gate_proj.weight"):
                both = np.concatenate([hidden[slot], embedding])
                gate = self.linear(both[None], "markov_head.gate_proj")[0]
                gated = embedding / (1 + np.exp(-gate))
            if self.has("markov_head.joint_proj.weight"):
                joined = np.concatenate([state, embedding, hidden[slot]])
                forget, candidate, output = np.split(
                    self.linear(joined[None], "markov_head.joint_proj")[0], 3
                )
                share = 1 / (1 + np.exp(-forget))
                state = share * state + (1 - share) * np.tanh(candidate)
                gated = np.tanh(output)
            logits.append(base[slot] + w2 @ gated)
            if self.has("confidence_head.proj.weight"):
                reads = [hidden[slot], embedding]
                width = self.matrix("confidence_head.proj").shape[1]
                read = np.concatenate(reads)[:width]
                confidence.append(self.linear(read[None], "confidence_head.proj")[0, 0])
            ids = self.tokens_of(logits[-1].size)
            allowed = np.where(ids < self.num_tokens, logits[-1], -np.inf)
            previous = int(ids[np.argmax(allowed)])
            tokens.append(previous)
        scores = np.array(confidence) if confidence else None
        return DraftOutput(base, np.stack(logits), tokens, scores)


def dequantize_nvfp4(stored: Tensors, module: str) -> Floats:
    """Values of a ModelOpt NVFP4 weight: e2m1 code (even column low) x block scale x scale."""
    packed = stored[f"{module}.weight"]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = _E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    scale = stored[f"{module}.weight_scale"].astype(np.float64).repeat(16, axis=1)
    return values * scale * float(stored[f"{module}.weight_scale_2"])


def inverse_frequencies(config: Mapping[str, Any], dim: int) -> tuple[NDArray[np.float32], float]:
    """Inverse frequencies `[dim / 2]` and the factor on cosines and sines."""
    rope: Mapping[str, Any] = config["rope_parameters"]
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    factor = float(rope.get("factor", 1.0))
    if kind == "default":
        found, attention = plain, 1.0
    elif kind == "linear":
        found, attention = plain / factor, 1.0
    elif kind == "llama3":
        found, attention = _llama3(plain, factor, rope), 1.0
    elif kind == "yarn":
        found, attention = _yarn(plain, factor, theta, dim, rope)
    else:
        raise NotImplementedError(kind)
    return found.astype(np.float32), attention


def _llama3(plain: Floats, factor: float, rope: Mapping[str, Any]) -> Floats:
    length = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    result = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        smooth = (length / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(result)


def _yarn(
    plain: Floats, factor: float, theta: float, dim: int, rope: Mapping[str, Any]
) -> tuple[Floats, float]:
    length = rope["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(rope.get("beta_slow", 1))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    attention = rope.get("attention_factor", 0.1 * math.log(factor) + 1)
    return plain * (1 - ramp) + plain / factor * ramp, attention
