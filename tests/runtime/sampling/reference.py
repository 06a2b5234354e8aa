"""Sampling from the words of the documentation: lists, dictionaries and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgecc.backends.runtime.sampling import Purpose, RandomStream, SamplingParams


def changed(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """Logits after bias and penalties, as vLLM documents them."""
    logits = [float(x) + params.logit_bias.get(i, 0.0) for i, x in enumerate(row)]
    for token in {*prompt, *answer} & set(range(len(logits))):
        factor = params.repetition_penalty
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    for token in set(answer):
        logits[token] -= params.frequency_penalty * list(answer).count(token)
        logits[token] -= params.presence_penalty
    return logits


def probabilities(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """What is left after temperature, top-k, top-p and min-p, f64 `[V]`."""
    best = max(logits)
    weights = [math.exp((x - best) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        need, mass, count = params.top_p * sum(weights[i] for i in order), 0.0, 0
        while count == 0 or mass < need:
            mass += weights[order[count]]
            count += 1
        order = order[:count]
    kept = {i for i in order if weights[i] >= params.min_p}
    total = sum(weights[i] for i in kept)
    return np.array([weights[i] / total if i in kept else 0.0 for i in range(len(logits))])


def next_token(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> int:
    """The token at a position of a sequence."""
    logits = changed(row, params, prompt, answer)
    if params.temperature < 1e-5:
        return logits.index(max(logits))
    position = len(prompt) + len(answer)
    left = RandomStream(params.seed or 0).uniform(position, Purpose.TOKEN)
    found = probabilities(logits, params)
    for token in np.flatnonzero(found):
        left -= found[token]
        if left < 0:
            break
    return int(token)
