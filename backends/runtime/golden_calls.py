"""Calls of a target that golden rows are about: a prompt, the token after it, and a replay."""

from __future__ import annotations

import numpy as np

from edgecc.backends.base import Array, Executable, Role


def prompt_inputs(target: Executable, ids: Array) -> dict[Role, Array]:
    """Inputs of the call that reads all of a prompt, for logits of its last row.

    Args:
        target: The target's entry.
        ids: The prompt, i64 `[T]`.
    """
    return _inputs(target, ids, 0, commit=len(ids))


def next_logits(target: Executable, ids: Array, anchor: Array) -> Array:
    """Logits f32 `[1, V]` of the token after a prompt, which the last call has read.

    Args:
        target: The target's entry.
        ids: The prompt, i64 `[T]`.
        anchor: That token, i64 `[1]`.
    """
    return _logits(target, _inputs(target, anchor, len(ids), commit=1))


def replayed_logits(target: Executable, ids: Array, anchor: Array) -> Array:
    """The same logits by another way, for targets with states.

    The last rows of the prompt are read once more as a verification would, with rows behind them
    that are rejected: they go to the log, and the call with the anchor replays them.

    Args:
        target: The target's entry.
        ids: The prompt, i64 `[T]`.
        anchor: The token after it, i64 `[1]`.
    """
    replay = (min(target.log_rows, len(ids)) + 1) // 2
    start = len(ids) - replay
    if start:
        target.run(_inputs(target, ids[:start], 0, commit=start), [])
    rejected = min(target.log_rows - replay, target.capacity - len(ids))
    rows = np.concatenate([ids[start:], np.resize(ids, rejected)])
    target.run(_inputs(target, rows, start, commit=0), [])
    return _logits(target, _inputs(target, anchor, len(ids), replay=replay, commit=1))


def _logits(target: Executable, inputs: dict[Role, Array]) -> Array:
    logits: Array = target.run(inputs, [Role.LOGITS])[Role.LOGITS][0]
    return logits


def _inputs(
    target: Executable, ids: Array, start: int, *, commit: int, replay: int = 0
) -> dict[Role, Array]:
    """Rows `ids` after `start` others; logits of the last one."""
    inputs: dict[Role, Array] = {
        Role.TOKEN_IDS: ids[None],
        Role.CACHE_LENGTH: np.array([start], dtype=np.int64),
        Role.LOGIT_ROWS: np.array([len(ids) - 1], dtype=np.int64),
    }
    if target.log_rows:
        inputs[Role.REPLAY_LENGTH] = np.array([replay], dtype=np.int64)
        inputs[Role.COMMIT_LENGTH] = np.array([commit], dtype=np.int64)
    return inputs
