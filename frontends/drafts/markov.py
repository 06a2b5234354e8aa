"""Markov heads that the op `markov_chain` does not describe, slot by slot.

Source: DeepSpec's reference model and speculators. With e = W1[previous target id] and z what the
output head reads, a slot's logits get W2 r:

- `vanilla`: r = e;
- `gated`: r = g * e, g = sigmoid(Wg [z; e] + bg);
- `rnn`: r = tanh(o), and the state becomes g * s + (1 - g) * tanh(c), g = sigmoid(f), with
  [f; c; o] = Wj [s; e; z] + bj of the old state s, which is zero before the first slot.

In a reduced vocabulary logits and W2 have a row for each draft id, and the id chosen is mapped to
the target's before it is the next slot's previous one.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgecc.errors import InputError
from edgecc.frontends.decoder_layer import DecoderBuilder
from edgecc.frontends.drafts.dspark_config import MARKOV_TYPES, DSparkConfig
from edgecc.frontends.drafts.vocabulary_map import DraftVocabulary
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.ir.builder import Builder
from edgecc.ir.core import Value
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes

_GATE = "markov_head.gate_proj"
_JOINT = "markov_head.joint_proj"
VANILLA, _GATED, _RNN = MARKOV_TYPES
_MODULES = {_GATED: _GATE, _RNN: _JOINT}
"""What heads of each other type store besides W1 and W2."""


def markov_type(weights: ModuleWeights, config: DSparkConfig) -> str:
    """One of `MARKOV_TYPES`: the tensors know, the config has to agree.

    Raises:
        InputError: It does not, or the tensors are of several types.
    """
    role = weights.checkpoint.role
    stored = [kind for kind, module in _MODULES.items() if weights.has(f"{module}.weight")]
    if len(stored) > 1:
        raise InputError(
            "draft/markov-type",
            f"{_GATE}.weight and {_JOINT}.weight are stored, a Markov head has one of them",
            where=role,
            help="weights are of different revisions: fetch them again",
        )
    found = stored[0] if stored else VANILLA
    declared = config.markov_type
    if declared not in (None, found):
        module = _MODULES[found if stored else str(declared)]
        raise InputError(
            "draft/markov-type",
            f"markov_head_type is {declared}, but {module}.weight is "
            f"{'stored' if stored else 'missing'}",
            where=f"{role}/config.json: markov_head_type",
            help="config and weights are of different revisions: fetch both again",
        )
    return found


class _Vanilla:
    """What a slot adds to its logits, before W2.

    Args:
        builder: Of the graph.
    """

    def __init__(self, builder: DecoderBuilder) -> None:
        self.builder = builder

    def read(self, z: Value, embedding: Value, slot: int) -> Value:
        """The next slot's, f32 `[b, 1, r]`.

        Args:
            z: What the output head reads in all slots, f32 `[b, N, H]`.
            embedding: Row of W1 of the token before it, f32 `[b, 1, r]`.
            slot: Number of the slot; they come in order.
        """
        return embedding


class _Gated(_Vanilla):
    """A gate over the embedding."""

    def read(self, z: Value, embedding: Value, slot: int) -> Value:
        """See `_Vanilla.read`."""
        b, rank = self.builder.b, _width(embedding)
        both = b.op("concat", _slot_of(b, z, slot), embedding, attrs=AxisAttributes(2))
        gate = b.op("sigmoid", self.builder.linear(both, _GATE, rank), name=f"gate{slot}")
        return b.op("mul", gate, embedding, name=f"gated{slot}")


class _Recurrent(_Vanilla):
    """A recurrent cell, whose state lives as long as the block."""

    def __init__(self, builder: DecoderBuilder) -> None:
        super().__init__(builder)
        self.state: Value | None = None

    def read(self, z: Value, embedding: Value, slot: int) -> Value:
        """See `_Vanilla.read`; the state goes on."""
        b, rank = self.builder.b, _width(embedding)
        state = self._zeros(embedding) if self.state is None else self.state
        parts = state, embedding, _slot_of(b, z, slot)
        joined = b.op("concat", *parts, attrs=AxisAttributes(2))
        y = self.builder.linear(joined, _JOINT, 3 * rank)
        names = (f"forget{slot}", f"candidate{slot}", f"read{slot}")
        node = b.node("split", (y,), (), SplitAttributes(2, (rank,) * 3), names)
        forget, candidate, output = node.results
        gate = b.op("sigmoid", forget, name=f"gate{slot}")
        fresh = b.op("tanh", candidate, name=f"fresh{slot}")
        # g * s + (1 - g) * c, with one product.
        kept = b.op("mul", gate, b.op("sub", state, fresh), name=f"kept{slot}")
        self.state = b.op("add", fresh, kept, name=f"state{slot}")
        return b.op("tanh", output, name=f"read{slot}")

    def _zeros(self, like: Value) -> Value:
        """Zeros of the same type: a row of padding."""
        b = self.builder.b
        padded = b.op("pad", like, attrs=PadAttributes(1, 1, 0))
        return b.op("slice", padded, attrs=SliceAttributes(1, 1, 2), name="state")


_HEADS: Mapping[str, type[_Vanilla]] = {VANILLA: _Vanilla, _GATED: _Gated, _RNN: _Recurrent}


def slot_by_slot(
    builder: DecoderBuilder,
    z: Value,
    base: Value,
    anchor: Value,
    matrices: tuple[str, str],
    vocabulary: DraftVocabulary,
    kind: str,
) -> tuple[Value, Value, Value]:
    """Choose a token in each slot, from left to right.

    Args:
        builder: Of the graph.
        z: What the output head reads, f32 `[b, N, H]`.
        base: Logits before the bias, f32 `[b, N, Vd]`.
        anchor: The newest committed token, i64 `[b]`.
        matrices: Symbols of W1 `[V, r]` and W2 `[Vd, r]`.
        vocabulary: What the ids of the draft mean.
        kind: One of `MARKOV_TYPES`.

    Returns:
        Proposals as target ids i64 `[b, N]`, logits f32 `[b, N, Vd]`, rows of W1 f32 `[b, N, r]`.
    """
    b, (w1, w2) = builder.b, matrices
    role, head = builder.weights.checkpoint.role, _HEADS[kind](builder)
    columns: tuple[list[Value], list[Value], list[Value]] = ([], [], [])
    previous = b.op("unsqueeze", anchor, attrs=AxisAttributes(1), name="previous")
    for slot in range(int(str(base.type.shape[1]))):
        b.at(f"{role}: markov_head")
        embedding = b.op("embedding", previous, weights=(w1,), name=f"e{slot}")
        read = head.read(z, embedding, slot)
        b.at(f"{role}: markov_head")
        bias = b.op("linear", read, weights=(w2,), name=f"bias{slot}")
        logits = b.op("add", _slot_of(b, base, slot), bias, name=f"logits{slot}")
        previous = choose(builder, logits, vocabulary, f"token{slot}")
        for column, value in zip(columns, (previous, logits, embedding), strict=True):
            column.append(value)
    names = ("proposals", "draft_logits", "embeddings")
    proposals, joined, embeddings = (
        b.op("concat", *column, attrs=AxisAttributes(1), name=name)
        for column, name in zip(columns, names, strict=True)
    )
    return proposals, joined, embeddings


def _slot_of(b: Builder, x: Value, slot: int) -> Value:
    """One of the rows of `[b, N, ...]`."""
    return b.op("slice", x, attrs=SliceAttributes(1, slot, slot + 1), name=f"slot{slot}")


def _width(embedding: Value) -> int:
    return int(str(embedding.type.shape[2]))


def choose(builder: DecoderBuilder, logits: Value, vocabulary: DraftVocabulary, name: str) -> Value:
    """The best token of each row, as a target id, i64 `[b, rows]`."""
    limit = ArgmaxAttributes(vocabulary.limit)
    token = builder.b.op("argmax", logits, attrs=limit, name=name)
    if vocabulary.table is not None:
        builder.b.at(f"{builder.weights.checkpoint.role}: d2t")
        token = builder.b.op("lookup", token, weights=(vocabulary.table,), name=name)
    return token
