"""Drafts that run one step after another, each on the state and the token of the step before.

A round is one call, its steps in straight-line code. The first step covers the committed rows the
draft has not seen, each later one a single row. Keys and values of later rows are stand-ins: the
next call overwrites them, so that nothing is rolled back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from edgecc.frontends.decoder_layer import DecoderBuilder
from edgecc.frontends.drafts.vocabulary_map import DraftVocabulary
from edgecc.ir.core import Value
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.ir.types import Dim, DType, sym
from edgecc.roles import Role


class ChainBuilder(DecoderBuilder):
    """State of building one graph: what every step reads, and the caches as they fill.

    Attributes:
        vocabulary: What the draft chooses from.
        embedding: Symbol of the table of token embeddings.
        head: Symbol of the output head.
        start: Rows that are valid in the caches before the step.
        caches: Keys and values of each layer, with all rows so far.
    """

    vocabulary: DraftVocabulary
    embedding: str
    head: str
    start: Value
    caches: list[tuple[Value, Value]]

    @abstractmethod
    def first(self, features: Value) -> Value:
        """The state of each committed row, from the target's."""

    @abstractmethod
    def step(self, index: int, state: Value, tokens: Value) -> tuple[Value, Value]:
        """One step.

        Args:
            index: Which one.
            state: Of each row, `[b, rows, H]`.
            tokens: The token after each row, i64 `[b, rows]`.

        Returns:
            What the head reads and the state of the next row, both `[b, 1, H]`. `start` and
            `caches` are those of the next step.
        """

    def build(self, width: int, steps: int, cache: Sequence[Dim], layers: int) -> None:
        """Add inputs, steps and outputs.

        Args:
            width: Of a row of features.
            steps: How many.
            cache: Shape of a cache after the batch axis.
            layers: How many layers have caches.
        """
        b, rows = self.b, (sym("b"), sym("c"))
        features = b.input("features", DType.F32, (*rows, width), Role.FEATURES)
        tokens = b.input("next_token_ids", DType.I64, rows, Role.NEXT_TOKEN_IDS)
        self.start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
        names = [(f"k_cache.{i}", f"v_cache.{i}") for i in range(layers)]
        shape = (sym("b"), *cache)
        self.caches = [
            (
                b.input(k, DType.F32, shape, Role.KV_CACHE),
                b.input(v, DType.F32, shape, Role.KV_CACHE),
            )
            for k, v in names
        ]
        self._one = b.op("unsqueeze", self.start, attrs=AxisAttributes(1), name="one")
        state = self.first(features)
        made = []
        for index in range(steps):
            z, state = self.step(index, state, tokens)
            tokens, logits = self._choose(z)
            made.append((tokens, logits))
        for index, (name, role) in enumerate(
            (("proposals", Role.PROPOSALS), ("draft_logits", Role.DRAFT_LOGITS))
        ):
            column = [step[index] for step in made]
            b.output(b.op("concat", *column, attrs=AxisAttributes(1), name=name), name, role)
        for pair, filled in zip(names, self.caches, strict=True):
            for name, value in zip(pair, filled, strict=True):
                b.output(value, name, Role.KV_CACHE, alias=name)

    def last(self, rows: Value) -> Value:
        """The last row of axis 1, kept as an axis."""
        if rows.type.shape[1] == 1:
            return rows
        return self.b.op("tail", rows, self._one, attrs=AxisAttributes(1), name="last")

    def _choose(self, z: Value) -> tuple[Value, Value]:
        """The next token (a target id) `[b, 1]`, and the logits over the draft's vocabulary."""
        b, role = self.b, self.weights.checkpoint.role
        b.at(f"{role}: lm_head")
        logits = b.op("linear", z, weights=(self.head,), name="logits")
        limit = ArgmaxAttributes(self.vocabulary.limit)
        token = b.op("argmax", logits, attrs=limit, name="draft_id")
        if self.vocabulary.table is not None:
            b.at(f"{role}: d2t")
            token = b.op("lookup", token, weights=(self.vocabulary.table,), name="token")
        return token, logits
