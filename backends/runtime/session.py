"""One sequence's state over the executables of a bundle: lengths, commit and rollback.

Caches are never copied or cleared: their *lengths* are the truth. Rows beyond a length are garbage
that the next call overwrites, so a rollback is a smaller number. So it is for targets with states,
which have no rows to count: rows that may be rejected change no state, they go to a log, and the
next call replays those of them that were accepted.

Invariants, at every point where no verification is open (`start` counts rows of the target caches):

* the states of the target sum up its first `start - replay` rows, and the log begins with the
  `replay` rows after them; `replay` is 0 unless the last call was a verification with proposals;
* `start == len(tokens) - 1`: all committed tokens but the newest, the anchor, are in the caches
  (between `prefill` and `push` there is no anchor yet, and `start == len(tokens)`);
* while features are collected, `draft_length + pending == start`: the draft has the features of
  each committed position once, in order, or they wait for its next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from edgecc.backends.base import Array, Executable, FloatArray, IntArray, Role
from edgecc.errors import InternalError


class Session:
    """The state of one sequence.

    A step is `verify`, then `commit`; `propose` may come before it. Arrays that engines return are
    never kept over a further target call, because engines reuse them.

    Args:
        target: The target's entry.
        draft: The draft's entry, when there is one.
        prefill_chunk: Most rows of one target call.
    """

    def __init__(
        self, target: Executable, draft: Executable | None = None, *, prefill_chunk: int
    ) -> None:
        self._target = target
        self._draft = draft
        self._chunk = prefill_chunk
        self._most_open = min(prefill_chunk, target.log_rows or prefill_chunk)
        self._row_numbers: IntArray = np.arange(prefill_chunk, dtype=np.int64)
        self.target_seconds = 0.0
        """Time spent in target calls since this object was made, in seconds."""
        self.draft_seconds = 0.0
        """Time spent in draft calls since this object was made, in seconds."""
        self.reset()

    def reset(self) -> None:
        """Forget the sequence. The caches stay as they are: with length 0 all of it is garbage."""
        self._tokens: list[int] = []
        self._start = 0
        self._replay = 0
        self._draft_length = 0
        self._pending: Array | None = None
        self._open: tuple[int, ...] | None = None
        self._tap: Array | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """All committed tokens; the last one is the anchor. Not to be changed."""
        return self._tokens

    @property
    def start(self) -> int:
        """Rows that are valid in the target caches, which is the anchor's position."""
        return self._start

    @property
    def draft_length(self) -> int:
        """Committed positions whose features are in the draft caches."""
        return self._draft_length

    @property
    def pending(self) -> int:
        """Committed positions whose features wait for the next draft call."""
        return 0 if self._pending is None else int(self._pending.shape[1])

    @property
    def capacity(self) -> int:
        """Rows the target caches hold."""
        return self._target.capacity

    @property
    def draft_capacity(self) -> int:
        """Rows the draft caches hold, context and block together; 0 without a draft."""
        return 0 if self._draft is None else self._draft.capacity

    @property
    def room(self) -> int:
        """Most proposals a verification can take now: each needs a row after the anchor's."""
        return min(self._target.capacity - self._start, self._most_open) - 1

    @property
    def replay(self) -> int:
        """Accepted rows that the next target call takes from the log of the states."""
        return self._replay

    def prefill(self, token_ids: Sequence[int] | IntArray, *, features: bool) -> FloatArray:
        """Run a whole prompt through the target, in chunks.

        Args:
            token_ids: The prompt, at least one token.
            features: Also give the draft what it needs to know about the prompt. Each chunk's
                features go into the draft caches before the next chunk runs; those of the last
                chunk stay pending for the first `propose`.

        Returns:
            Logits of the last row, f32 `[V]`, valid until the next call.
        """
        if self._tokens or not len(token_ids):
            raise _misuse("prefill needs a fresh session and a prompt")
        ids = np.asarray(token_ids, dtype=np.int64)
        self._tokens = ids.tolist()
        last = (len(ids) - 1) // self._chunk * self._chunk
        for first in range(0, last, self._chunk):
            self._run_target(ids[first : first + self._chunk], None, features, final=True)
            self._keep(self._chunk)
        rows = self._row_numbers[len(ids) - last - 1 : len(ids) - last]
        logits = self._run_target(ids[last:], rows, features, final=True)
        self._keep(len(ids) - last)
        last_row: FloatArray = logits[0]
        return last_row

    def push(self, token: int) -> None:
        """Commit the token chosen after `prefill`: it becomes the anchor."""
        if self._start != len(self._tokens) or not self._tokens:
            raise _misuse("push follows prefill")
        self._tokens.append(token)

    def propose(self) -> list[int]:
        """Let the draft take the pending features and propose what follows the anchor.

        Returns:
            All proposals of the block, in order: one draft call, read back once.
        """
        if self._start != len(self._tokens) - 1 or self._pending is None:
            raise _misuse("propose follows push or commit, once, with features collected")
        proposals: list[int] = self._run_draft((Role.PROPOSALS,))[Role.PROPOSALS][0].tolist()
        return proposals

    def verify(self, proposals: Sequence[int], *, features: bool) -> FloatArray:
        """Run the target over the anchor and the proposals (none: a plain step).

        Args:
            proposals: At most `room` token ids.
            features: Collect the features of these rows for the draft. Once this is False, the
                draft cannot be used again for this sequence.

        Returns:
            Logits f32 `[len(proposals) + 1, V]`, valid until the next call. Row i decides the token
            at position `start + i + 1`.
        """
        if self._open is not None or self._start != len(self._tokens) - 1:
            raise _misuse("verify follows push or commit")
        ids = np.array([self._tokens[-1], *proposals], dtype=np.int64)
        rows = self._row_numbers[: len(ids)]
        logits = self._run_target(ids, rows, features, final=not proposals)
        self._open = tuple(proposals)
        return logits

    def commit(self, accepted: int, token: int) -> None:
        """Close a verification: keep the anchor, `accepted` proposals and the round's own token.

        Cache rows, logged rows and features of the rejected proposals are dropped by not counting
        them.

        Args:
            accepted: How many leading proposals are kept.
            token: The token that follows them; the new anchor.
        """
        if self._open is None or not 0 <= accepted <= len(self._open):
            raise _misuse("commit closes a verification")
        self._tokens += self._open[:accepted]
        self._tokens.append(token)
        self._replay = accepted + 1 if self._open and self._target.log_rows else 0
        self._open = None
        self._keep(accepted + 1)

    def _keep(self, rows: int) -> None:
        """Count the first rows of the target call just made as valid, with their features."""
        self._start += rows
        if self._tap is not None:
            self._pending = self._tap[:, :rows]
            self._tap = None

    def _run_target(
        self, ids: IntArray, rows: IntArray | None, features: bool, *, final: bool
    ) -> FloatArray:
        """One target call after row `start`; its features are left in `_tap`.

        Args:
            ids: Tokens of the new rows.
            rows: Which of them need logits.
            features: Whether the draft wants their features.
            final: Whether all of them stay, whatever comes out.

        Returns:
            Logits of `rows`, f32 `[r, V]`; nothing of use when `rows` is None.
        """
        if self._start + len(ids) > self._target.capacity or len(ids) > self._chunk:
            raise _misuse(f"{len(ids)} rows after {self._start} do not fit")
        if not final and len(ids) > self._most_open:
            raise _misuse(f"{len(ids)} rows that may be rejected, at most {self._most_open} can")
        if features and self._pending is not None:
            # The engine is about to reuse the array, so the draft takes these rows now.
            self._run_draft(())
        self._pending = None
        inputs: dict[Role, Array] = {
            Role.TOKEN_IDS: ids[None],
            Role.CACHE_LENGTH: np.array([self._start], dtype=np.int64),
            Role.LOGIT_ROWS: self._row_numbers[:1] if rows is None else rows,
        }
        if self._target.log_rows:
            inputs[Role.REPLAY_LENGTH] = np.array([self._replay], dtype=np.int64)
            inputs[Role.COMMIT_LENGTH] = np.array([len(ids) if final else 0], dtype=np.int64)
        begin = perf_counter()
        results = self._target.run(inputs, _TARGET_OUTPUTS[rows is not None, features])
        self.target_seconds += perf_counter() - begin
        self._replay = 0
        if features:
            self._tap = results[Role.HIDDEN_TAP]
        return _NO_LOGITS if rows is None else results[Role.LOGITS][0]

    def _run_draft(self, outputs: tuple[Role, ...]) -> dict[Role, Array]:
        """Append the pending features to the draft caches; with outputs, also run the block."""
        features = self._pending
        if self._draft is None or features is None:
            raise _misuse("there is no draft")
        length = self._draft_length
        end = length + int(features.shape[1])
        if end != self._start:
            raise _misuse("the draft lacks the features of some committed positions")
        begin = perf_counter()
        results = self._draft.run(
            {
                Role.FEATURES: features,
                Role.ANCHOR: np.array([self._tokens[end]], dtype=np.int64),
                Role.CACHE_LENGTH: np.array([length], dtype=np.int64),
            },
            outputs,
        )
        self.draft_seconds += perf_counter() - begin
        self._draft_length = end
        self._pending = None
        return results


_TARGET_OUTPUTS: dict[tuple[bool, bool], tuple[Role, ...]] = {
    (False, False): (),
    (False, True): (Role.HIDDEN_TAP,),
    (True, False): (Role.LOGITS,),
    (True, True): (Role.LOGITS, Role.HIDDEN_TAP),
}
"""What to ask the target for, by (logits wanted, features wanted)."""

_NO_LOGITS: FloatArray = np.empty((0, 0), dtype=np.float32)


def _misuse(message: str) -> InternalError:
    return InternalError("runtime/session-misuse", message)
