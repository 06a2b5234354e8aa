"""Calls with different numbers of rows as one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgecc.backends.base import Role
from edgecc.backends.runtime.calls import Call, Entry
from edgecc.backends.runtime.merge import joined, part, start_of

HIDDEN = 3


def by_token(entry: Entry, tokens: Sequence[int], length: int) -> Call:
    """A call that reads tokens and wants what follows each of them."""
    inputs = {
        Role.TOKEN_IDS: np.array([tokens]),
        Role.CACHE_LENGTH: np.array([length]),
        Role.LOGIT_ROWS: np.arange(len(tokens)),
    }
    wanted = Role.LOGITS if entry is Entry.TARGET else Role.PROPOSALS
    return Call(entry, inputs, (wanted,))


def by_state(rows: int, length: int, earlier: int) -> Call:
    """A call that reads states of the target, with some that it was given before."""
    inputs = {
        Role.FEATURES: np.full((1, rows, HIDDEN), 7, np.float32),
        Role.CACHE_LENGTH: np.array([length]),
        Role.ANCHOR: np.array([5]),
    }
    before = {Role.FEATURES: np.full((1, earlier, HIDDEN), 6, np.float32)}
    return Call(Entry.DRAFT, inputs, (Role.PROPOSALS,), earlier=before if earlier else {})


@pytest.mark.parametrize("entry", [Entry.TARGET, Entry.DRAFT])
def test_what_reads_tokens_is_padded_at_the_end(entry: Entry) -> None:
    """A target, and a draft that is a language model as well."""
    short, long = by_token(entry, [11], 4), by_token(entry, [21, 22], 9)
    assert start_of(short, 2) == 4
    inputs, (wanted,) = joined([short, long])
    assert inputs[Role.TOKEN_IDS].tolist() == [[11, 0], [21, 22]]
    assert inputs[Role.CACHE_LENGTH].tolist() == [4, 9]
    assert inputs[Role.LOGIT_ROWS].tolist() == [0, 1]
    results = {wanted: np.array([[[1.0], [2.0]], [[3.0], [4.0]]])}
    assert part(results, 0, short)[wanted].ravel().tolist() == [1]
    assert part(results, 1, long)[wanted].ravel().tolist() == [3, 4]


def test_what_reads_states_is_padded_in_front() -> None:
    short, long = by_state(1, 4, earlier=2), by_state(2, 9, earlier=0)
    assert start_of(short, 2) == 3
    assert start_of(by_state(1, 4, earlier=0), 2) is None
    inputs, _ = joined([short, long])
    assert inputs[Role.FEATURES][:, :, 0].tolist() == [[6, 7], [7, 7]]
    assert inputs[Role.CACHE_LENGTH].tolist() == [3, 9]
