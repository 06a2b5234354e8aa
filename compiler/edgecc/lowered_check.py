"""Evaluates lowered graphs before a builder gets them, in the arithmetic of their device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from edgecc.activation_check import ActivationProbe, activation_checks
from edgecc.backends.base import Array
from edgecc.backends.runtime.golden import (
    NARROW,
    Check,
    Verification,
    compare_proposals,
    compare_values,
    read_golden,
)
from edgecc.errors import InternalError, MismatchError
from edgecc.golden import GoldenSequence, make_golden, section
from edgecc.golden_image import golden_image
from edgecc.ir.clone import with_smaller_caches
from edgecc.ir.core import Module, Node


def check_lowered(module: Module, golden: bytes) -> tuple[tuple[Check, ...], bytes]:
    """Evaluate the graphs that a builder is going to get, and compare with the golden rows.

    The interpreter rounds every value to the type it has in the lowered graph, and computes with
    the values of the lowered weights, so this is the arithmetic of an engine that accumulates in
    float32. The draft is made to choose the tokens of the reference, and what it would have chosen
    by is compared: a rounding may decide between two near tokens, and all tokens after it follow.
    Quantized activations are looked at one by one, and left out of the comparison, because their
    rounding is chaotic as a whole: see `edgecc.activation_check`.

    Args:
        module: After all passes.
        golden: Of the module as lifted.

    Returns:
        The comparisons, all passed, and what the graphs compute as they are: golden rows with the
        same arithmetic.

    Raises:
        MismatchError: Numbers differ by more than the tolerance.
    """
    expected = read_golden(golden)
    ids = expected["token_ids"]
    with suppress(InternalError, ValueError):
        capacity = int(str(section(module, "limits")["max_model_len"]))
        module = with_smaller_caches(module, capacity - len(ids) - 1)
    chooser = _Chooser(module, expected.get("draft_logits"))
    checks = list(_comparisons(chooser, expected))
    rows = make_golden(module, len(ids))
    if chooser.errors:
        checks += activation_checks(module, chooser.errors, read_golden(rows), expected)
    result = Verification(tuple(checks))
    if not result.passed:
        raise MismatchError(
            "verify/lowered",
            "the lowered graphs compute other numbers than the reference",
            notes=[str(c) for c in checks],
            help=_way_out(result.checks),
        )
    return result.checks, rows


def _way_out(checks: Sequence[Check]) -> str:
    failed = [c.name for c in checks if not c.passed]
    if all("activations" in name or name.startswith("quantized") for name in failed):
        return "the stored input scales do not fit what layers read: --activations 16bit"
    return "find the pass with --check 1"


def _comparisons(chooser: _Chooser, expected: dict[str, Array]) -> Iterator[Check]:
    """A prompt, a call after it, and the draft's round between them."""
    ids, anchor = expected["token_ids"], expected["anchor"]
    sequence = GoldenSequence(chooser, golden_image(chooser.module, len(ids)))
    if sequence.image:
        yield _check("image_features", sequence.image["image_features"], expected)
    out = sequence.target(ids)
    yield _check("logits", out["logits"][0], expected)
    if "hidden_tap" in expected:
        yield _check("hidden_tap", out["hidden_tap"][0], expected)
    if "draft_logits" in expected:
        with chooser.choosing():
            draft = sequence.draft(out.get("hidden_tap"), ids, anchor)
        yield _check("draft_logits", chooser.scores(), expected)
        proposals = draft["proposals"][0], expected["proposals"]
        yield compare_proposals("lowered proposals", *proposals, 0.0)
    yield _check("next_logits", sequence.target(anchor)["logits"][0], expected)


def _check(name: str, found: Array, expected: dict[str, Array]) -> Check:
    return compare_values(f"lowered {name}", found, expected[name], NARROW.values)


class _Chooser(ActivationProbe):
    """Chooses the tokens that reference scores name, and keeps the scores it was given.

    Args:
        module: Module to evaluate.
        scores: Of the reference, one row `[Vd]` for each choice in the order they are made.
    """

    def __init__(self, module: Module, scores: Array | None) -> None:
        super().__init__(module)
        self._reference = np.empty((0, 0)) if scores is None else scores
        self._found: list[Array] = []
        self._choosing = False

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Choose so inside; other choices are made as the graph says."""
        self._choosing = True
        try:
            yield
        finally:
            self._choosing = False

    def node(self, node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
        """`argmax` answers with the next choices of the reference, as long as there are any."""
        if node.op.name != "argmax" or not self._choosing:
            return super().node(node, operands)
        (values,) = operands
        rows = values.reshape(-1, values.shape[-1])
        wanted = self._reference[len(self._found) : len(self._found) + len(rows)]
        self._found.extend(rows)
        if wanted.shape != rows.shape:
            return super().node(node, operands)
        return super().node(node, (wanted.reshape(values.shape),))

    def scores(self) -> Array:
        """What choices were made by, `[N, Vd]`."""
        return np.stack(self._found) if self._found else np.empty((0, 0))
