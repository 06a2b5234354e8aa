"""Compares texts where a rounding may decide between two tokens that are nearly equally good."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgecc.backends.runtime.generator import Generator
from edgecc.backends.runtime.golden import Check, compare_tokens
from edgecc.backends.runtime.session import Session


def compare_near_tokens(
    name: str,
    generator: Generator,
    prompt: Sequence[int],
    speculative: Sequence[int],
    plain: Sequence[int],
    tolerance: float,
) -> Check:
    """Speculative output against plain output: they may part at a near tie.

    Args:
        name: Of the comparison.
        generator: What wrote both.
        prompt: What both go on from.
        speculative: Tokens with a draft.
        plain: Tokens without.
        tolerance: Largest difference of the logits of the first two tokens that differ, relative to
            the largest logit. 0: the texts have to be equal.
    """
    check = compare_tokens(name, speculative, plain)
    pairs = enumerate(zip(speculative, plain, strict=False))
    parted = next((place for place, (a, b) in pairs if a != b), None)
    if check.passed or parted is None or not tolerance:
        return check
    model = generator.model
    session = Session(generator.engine.entry("target"), prefill_chunk=model.prefill_chunk)
    text = [*prompt, *plain[:parted]]
    logits = session.run(session.prefill(text, features=False))[: model.num_tokens]
    chosen = logits[[speculative[parted], plain[parted]]].astype(np.float64)
    gap = abs(float(chosen[0] - chosen[1])) / (float(np.abs(logits).max()) or 1.0)
    detail = f"{check.detail}, whose logits are {chosen[0]:.6g} and {chosen[1]:.6g}"
    return Check(name, gap, tolerance, gap <= tolerance, detail)
