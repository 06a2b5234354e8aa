"""Calls that golden rows are about: a prompt, a draft's round, the token after it, and a replay.

`golden` are the tensors of a golden file, see `edgecc.golden.make_golden`: `token_ids` i64 `[T]`,
`anchor` i64 `[1]`, with a draft `proposals` i64 `[N]`, and where the target reads images what
stands in the prompt besides text.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgecc.backends.base import Array, Executable, Role
from edgecc.backends.runtime.image_prompt import ImagePrompt
from edgecc.backends.runtime.proposer import Proposer


def prompt_inputs(target: Executable, golden: Mapping[str, Array]) -> dict[Role, Array]:
    """Inputs of the call that reads all of the prompt, for logits of its last row."""
    ids = golden["token_ids"]
    return _inputs(target, golden, ids, 0, commit=len(ids))


def proposals(
    draft: Executable, golden: Mapping[str, Array], taps: Array | None, proposer: Proposer
) -> Array:
    """What a draft proposes after the prompt, i64 `[N]`.

    Args:
        draft: Its entry.
        golden: See above.
        taps: The target's states of the prompt, f32 `[1, T, n*H]`, for a draft that reads them.
        proposer: How it is called.
    """
    tokens = [*golden["token_ids"].tolist(), *golden["anchor"].tolist()]
    length = 0
    if proposer.reads_states:
        assert taps is not None
        inputs = {
            Role.FEATURES: taps,
            proposer.role: proposer.tokens(tokens[1:]),
            Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
        }
        made: Array = draft.run(inputs, [Role.PROPOSALS])[Role.PROPOSALS][0]
        return made
    found: list[int] = []
    while len(found) < len(golden["proposals"]):
        inputs = {
            proposer.role: proposer.tokens(tokens),
            Role.CACHE_LENGTH: np.array([length], dtype=np.int64),
            Role.LOGIT_ROWS: np.array([len(tokens) - 1], dtype=np.int64),
        }
        length += len(tokens)
        tokens = draft.run(inputs, [Role.PROPOSALS])[Role.PROPOSALS][0].tolist()
        found += tokens
    return np.array(found, dtype=np.int64)


def next_logits(target: Executable, golden: Mapping[str, Array]) -> Array:
    """Logits f32 `[1, V]` of the token after the prompt, which the last call has read."""
    length = len(golden["token_ids"])
    return _logits(target, _inputs(target, golden, golden["anchor"], length, commit=1))


def replayed_logits(target: Executable, golden: Mapping[str, Array]) -> Array:
    """The same logits by another way, for targets with states.

    The last rows of the prompt are read once more as a verification would, with rows behind them
    that are rejected: they go to the log, and the call with the anchor replays them.
    """
    ids = golden["token_ids"]
    replay = (min(target.log_rows, len(ids)) + 1) // 2
    start = len(ids) - replay
    if start:
        target.run(_inputs(target, golden, ids[:start], 0, commit=start), [])
    rejected = min(target.log_rows - replay, target.capacity - len(ids))
    rows = np.concatenate([ids[start:], np.resize(ids, rejected)])
    target.run(_inputs(target, golden, rows, start, commit=0), [])
    anchor = golden["anchor"]
    return _logits(target, _inputs(target, golden, anchor, len(ids), replay=replay, commit=1))


def _logits(target: Executable, inputs: dict[Role, Array]) -> Array:
    logits: Array = target.run(inputs, [Role.LOGITS])[Role.LOGITS][0]
    return logits


def _inputs(
    target: Executable,
    golden: Mapping[str, Array],
    ids: Array,
    start: int,
    *,
    commit: int,
    replay: int = 0,
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
    if "image_features" in golden:
        inputs |= _prompt(golden).inputs_from(start, len(ids), golden["image_features"])
    return inputs


def _prompt(golden: Mapping[str, Array]) -> ImagePrompt:
    """The prompt with its images."""
    ids, positions = golden["token_ids"], golden["positions"]
    delta = int(positions.max()) + 1 - len(ids)
    return ImagePrompt(ids, golden["image_rows"], positions, delta)
