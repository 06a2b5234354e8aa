"""Markov heads that the op `markov_chain` does not describe, slot by slot.

Source: DeepSpec's reference model and speculators. With e = W1[previous target id]: a plain head
adds W2 e to the logits of a slot; a gated one W2 (g * e), g = sigmoid(Wg [z; e] + bg), z what the
head reads. In a reduced vocabulary logits and W2 have a row for each draft id, and the id chosen is
mapped to the target's before it is the next slot's previous one.
"""

from __future__ import annotations

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.decoder_layer import DecoderBuilder
from edgecc.frontends.drafts.dspark_config import DSparkConfig
from edgecc.frontends.drafts.vocabulary_map import DraftVocabulary
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.ir.core import Value
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes, SliceAttributes

GATE = "markov_head.gate_proj"


def is_gated(weights: ModuleWeights, config: DSparkConfig) -> bool:
    """Whether the head has a gate: the tensors know, the config has to agree.

    Raises:
        InputError: It does not.
        UnsupportedError: The head carries a state from slot to slot.
    """
    role = weights.checkpoint.role
    joint = "markov_head.joint_proj.weight"
    if weights.has(joint):
        raise UnsupportedError(
            "draft/markov-type",
            f"{joint} is stored: Markov heads with a state are not supported",
            where=role,
            help="supported: vanilla, gated",
        )
    stored = weights.has(f"{GATE}.weight")
    declared = config.markov_type
    if declared is not None and stored is not (declared == "gated"):
        raise InputError(
            "draft/markov-type",
            f"markov_head_type is {declared}, but {GATE}.weight is "
            f"{'stored' if stored else 'missing'}",
            where=f"{role}/config.json: markov_head_type",
            help="config and weights are of different revisions: fetch both again",
        )
    return stored


def slot_by_slot(
    builder: DecoderBuilder,
    z: Value,
    base: Value,
    anchor: Value,
    matrices: tuple[str, str],
    vocabulary: DraftVocabulary,
    *,
    gated: bool,
) -> tuple[Value, Value, Value]:
    """Choose a token in each slot, from left to right.

    Args:
        builder: Of the graph.
        z: What the head reads, f32 `[b, N, H]`.
        base: Logits before the bias, f32 `[b, N, Vd]`.
        anchor: The newest committed token, i64 `[b]`.
        matrices: Symbols of W1 `[V, r]` and W2 `[Vd, r]`.
        vocabulary: What the ids of the draft mean.
        gated: Whether the head has a gate.

    Returns:
        Proposals as target ids i64 `[b, N]`, logits f32 `[b, N, Vd]`, rows of W1 f32 `[b, N, r]`.
    """
    b, (w1, w2) = builder.b, matrices
    role = builder.weights.checkpoint.role
    columns: tuple[list[Value], list[Value], list[Value]] = ([], [], [])
    previous = b.op("unsqueeze", anchor, attrs=AxisAttributes(1), name="previous")
    for slot in range(int(str(base.type.shape[1]))):
        here = SliceAttributes(1, slot, slot + 1)
        b.at(f"{role}: markov_head")
        embedding = b.op("embedding", previous, weights=(w1,), name=f"e{slot}")
        read = embedding
        if gated:
            rank = int(str(embedding.type.shape[2]))
            both = b.op("concat", b.op("slice", z, attrs=here), embedding, attrs=AxisAttributes(2))
            gate = b.op("sigmoid", builder.linear(both, GATE, rank), name=f"gate{slot}")
            read = b.op("mul", gate, embedding, name=f"gated{slot}")
        bias = b.op("linear", read, weights=(w2,), name=f"bias{slot}")
        own = b.op("slice", base, attrs=here, name=f"slot{slot}")
        logits = b.op("add", own, bias, name=f"logits{slot}")
        previous = choose(builder, logits, vocabulary, f"token{slot}")
        for column, value in zip(columns, (previous, logits, embedding), strict=True):
            column.append(value)
    names = ("proposals", "draft_logits", "embeddings")
    proposals, joined, embeddings = (
        b.op("concat", *column, attrs=AxisAttributes(1), name=name)
        for column, name in zip(columns, names, strict=True)
    )
    return proposals, joined, embeddings


def choose(builder: DecoderBuilder, logits: Value, vocabulary: DraftVocabulary, name: str) -> Value:
    """The best token of each row, as a target id, i64 `[b, rows]`."""
    limit = ArgmaxAttributes(vocabulary.limit)
    token = builder.b.op("argmax", logits, attrs=limit, name=name)
    if vocabulary.table is not None:
        builder.b.at(f"{builder.weights.checkpoint.role}: d2t")
        token = builder.b.op("lookup", token, weights=(vocabulary.table,), name=name)
    return token
