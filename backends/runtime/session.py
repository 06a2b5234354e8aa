"""One sequence's state over the executables of a bundle: lengths, commit and rollback.

What needs an engine is a coroutine (`Steps`): it yields its calls, and `Session.run` makes them for
a sequence that runs alone.

Caches are never copied or cleared: their *lengths* are the truth. Rows beyond a length are garbage
that the next call overwrites, so a rollback is a smaller number. So it is for targets with states,
which have no rows to count: rows that may be rejected change no state, they go to a log, and the
next call replays those of them that were accepted.

A draft that is a language model of its own is rolled back in the same way: the rows of its caches
that hold proposals count as valid once these are accepted.

Invariants, at every point where no verification is open (`start` counts rows of the target caches):

* the states of the target sum up its first `start - replay` rows, and the log begins with the
  `replay` rows after them; `replay` is 0 unless the last call was a verification with proposals,
  or a round with the draft;
* `start == len(tokens) - 1`: all committed tokens but the newest, the anchor, are in the caches
  (between `prefill` and `push` there is no anchor yet, and `start == len(tokens)`);
* while the draft takes part, `draft_length + pending == start`: it has each committed position
  once, in order, or they wait for its next call. Between `propose` and `commit` a draft that
  reads tokens alone has more rows, `ahead`: those of the anchor and of its proposals but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from time import perf_counter
from typing import TypeVar

import numpy as np

from edgecc.backends.base import Array, Executable, FloatArray, GreedyRounds, IntArray, Role
from edgecc.backends.runtime.calls import Call, Entry, Reply, Steps, drive
from edgecc.backends.runtime.image_prompt import ImagePrompt, PromptImages
from edgecc.backends.runtime.proposals import Proposals
from edgecc.backends.runtime.proposer import PROPOSERS, Proposer
from edgecc.errors import InternalError

T = TypeVar("T")


class Session:
    """The state of one sequence.

    A step is `verify`, then `commit`; `propose` may come before it. Where the engine runs rounds on
    its device, `round` is both in one. Arrays that engines return are never kept over a further
    target call, because engines reuse them.

    Args:
        target: The target's entry.
        draft: The draft's entry, when there is one.
        prefill_chunk: Most rows of one target call.
        rounds: Greedy rounds on the device, if the engine has them.
        proposer: How the draft is called.
        vision: The vision tower's entry, where the target reads images.
        feature_size: Values of the feature of an image's token.
    """

    def __init__(
        self,
        target: Executable,
        draft: Executable | None = None,
        *,
        prefill_chunk: int,
        rounds: GreedyRounds | None = None,
        proposer: Proposer = PROPOSERS["dspark"],
        vision: Executable | None = None,
        feature_size: int = 0,
    ) -> None:
        self._rounds = rounds
        self._target = target
        self._draft = draft
        self._proposer = proposer
        self._entries = {Entry.TARGET: target}
        if draft is not None:
            self._entries[Entry.DRAFT] = draft
        if vision is not None:
            self._entries[Entry.VISION] = vision
        self._no_images: FloatArray = np.zeros((0, feature_size), dtype=np.float32)
        self._shares_calls = draft is not None and draft.batch_size > 1
        self._chunk = prefill_chunk
        self._most_open = min(prefill_chunk, target.log_rows or prefill_chunk)
        self._row_numbers: IntArray = np.arange(prefill_chunk, dtype=np.int64)
        self.target_seconds = 0.0
        """Time spent in target calls, in rounds on the device, and in the vision tower, since this
        object was made."""
        self.draft_seconds = 0.0
        """Time spent in draft calls since this object was made, in seconds."""
        self.reset()

    def reset(self) -> None:
        """Forget the sequence. The caches stay as they are: with length 0 all of it is garbage."""
        self._tokens: list[int] = []
        self._start = 0
        self._replay = 0
        self._logged = False
        self._draft_length = 0
        self._pending = 0
        self._ahead: list[int] = []
        self._open: tuple[int, ...] | None = None
        self._collects = False
        self._tap: Callable[[int], Array] = _no_features
        self._earlier: Array | None = None
        self._prompt: ImagePrompt | None = None
        self._images = self._no_images

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
        """Committed positions that are in the draft caches."""
        return self._draft_length

    @property
    def draft_rows(self) -> int:
        """Rows of the draft caches that may be needed: those of proposals as well."""
        return self._draft_length + len(self._ahead)

    @property
    def pending(self) -> int:
        """Committed positions that wait for the next draft call."""
        return self._pending

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

    @property
    def runs_rounds(self) -> bool:
        """Whether `round` is there, to be used instead of `propose` and `verify`."""
        return self._rounds is not None

    def run(self, steps: Steps[T]) -> T:
        """Make the calls of a coroutine of this sequence as they come, and give its result."""
        return drive(steps, self._entries)

    def prefill(
        self,
        token_ids: Sequence[int] | IntArray,
        *,
        features: bool,
        images: PromptImages | None = None,
    ) -> Steps[FloatArray]:
        """Run a whole prompt through the target, in chunks.

        Args:
            token_ids: The prompt, at least one token.
            features: Also give the draft what it needs to know about the prompt. Each chunk's
                features go into the draft caches before the next chunk runs; those of the last
                chunk stay pending for the first `propose`.
            images: What is in the prompt besides text, for a target that reads images.

        Returns:
            Logits of the last row, f32 `[V]`, valid until the next call.
        """
        if self._tokens or not len(token_ids):
            raise _misuse("prefill needs a fresh session and a prompt")
        ids = np.asarray(token_ids, dtype=np.int64)
        self._tokens = ids.tolist()
        yield from self._look(ids, images)
        last = (len(ids) - 1) // self._chunk * self._chunk
        for first in range(0, last, self._chunk):
            chunk = ids[first : first + self._chunk]
            yield from self._run_target(chunk, None, features, final=True, alone=True)
            self._keep(self._chunk)
        rows = self._row_numbers[len(ids) - last - 1 : len(ids) - last]
        logits = yield from self._run_target(ids[last:], rows, features, final=True, alone=True)
        self._keep(len(ids) - last)
        last_row: FloatArray = logits[0]
        return last_row

    def _look(self, ids: IntArray, images: PromptImages | None) -> Steps[None]:
        """Let the tower see the images; from now on each target call is told its positions."""
        if Entry.VISION not in self._entries:
            if images is not None:
                raise _misuse("there is no vision tower")
            return
        self._prompt = images.prompt if images is not None else ImagePrompt.of_text(ids)
        found = [self._no_images]
        for picture in images.pictures if images is not None else ():
            reply = yield Call(Entry.VISION, picture.inputs, (Role.IMAGE_FEATURES,), alone=True)
            self.target_seconds += reply.seconds
            found.append(reply.results[Role.IMAGE_FEATURES][0].copy())
        self._images = np.concatenate(found)

    def push(self, token: int) -> None:
        """Commit the token chosen after `prefill`: it becomes the anchor."""
        if self._start != len(self._tokens) or not self._tokens:
            raise _misuse("push follows prefill")
        self._tokens.append(token)

    def propose(self, most: int = 1, *, confidence: bool = False) -> Steps[Proposals]:
        """Let the draft take what is pending and propose what follows the anchor.

        Args:
            most: Proposals that are wanted, at least 1.
            confidence: Also ask how sure it is of them; it has a head for that.

        Returns:
            Proposals, in order: all of the block where one call makes them, else `most`.
        """
        if self._start != len(self._tokens) - 1 or self._ahead:
            raise _misuse("propose follows push or commit, once")
        if self._draft_length + self._pending != self._start:
            raise _misuse("the draft lacks the features of some committed positions")
        if not self._proposer.reads_states:
            return (yield from self._propose_by_token(most))
        if not self._pending:
            raise _misuse("propose follows push or commit, once, with features collected")
        wanted = (Role.PROPOSALS, Role.CONFIDENCE) if confidence else (Role.PROPOSALS,)
        results = yield from self._run_draft(wanted)
        return Proposals(*(results[role][0].tolist() for role in wanted))

    def _propose_by_token(self, most: int) -> Steps[Proposals]:
        """One draft call a proposal; the first one reads the anchor and what is pending."""
        yield from self._catch_up()
        made: list[int] = []
        tokens, length = self._tokens[self._draft_length :], self._draft_length
        while len(made) < most:
            reply = yield Call(Entry.DRAFT, self._token_inputs(tokens, length), (Role.PROPOSALS,))
            self.draft_seconds += reply.seconds
            length += len(tokens)
            self._draft_length, self._pending = self._start, 0
            self._ahead.append(tokens[-1])
            tokens = reply.results[Role.PROPOSALS][0, -1:].tolist()
            made += tokens
        return Proposals(made)

    def _catch_up(self) -> Steps[None]:
        """Let a draft that reads tokens take a prompt's last chunk: that needs no logits.

        One token may stay, to be read with the anchor, where a call takes two.
        """
        if self._pending >= min(2, self._chunk):
            yield from self._run_draft(())

    def _token_inputs(self, tokens: Sequence[int], length: int) -> dict[Role, Array]:
        """Inputs of a draft that reads tokens, with logits for all of them."""
        return {
            self._proposer.role: self._proposer.tokens(tokens),
            Role.CACHE_LENGTH: np.array([length], dtype=np.int64),
            Role.LOGIT_ROWS: self._row_numbers[: len(tokens)],
        }

    def verify(self, proposals: Sequence[int], *, features: bool) -> Steps[FloatArray]:
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
        logits = yield from self._run_target(ids, rows, features, final=not proposals)
        self._open = tuple(proposals)
        return logits

    def round(self, most: int, *, features: bool) -> tuple[Proposals, list[int]]:
        """Draft, verify and choose on the device, with one read-back.

        Args:
            most: Most proposals to look at, at most `room`.
            features: Let the draft take part, and collect features for it; see `verify`.

        Returns:
            The proposals, and the target's token after the anchor and after each of them.
        """
        if self._open is not None or self._start != len(self._tokens) - 1 or self._rounds is None:
            raise _misuse("round follows push or commit")
        if features and self._draft_length + self._pending != self._start:
            raise _misuse("the draft lacks the features of some committed positions")
        if features and not self._proposer.reads_states:
            self.run(self._catch_up())
        begin = perf_counter()
        rows = self._rows_for_draft if features else 0
        following = np.array(self._tokens[-max(rows, 1) :], dtype=np.int64)
        length = self._draft_length
        made = self._rounds.run(following, self._start, rows, length, self._replay)
        self.target_seconds += perf_counter() - begin
        self._replay, self._logged = 0, features
        proposals = Proposals(made.proposals[:most].tolist(), made.confidence[:most].tolist())
        if features:
            self._draft_length = self._start
            if not self._proposer.reads_states:
                self._ahead = [self._tokens[-1], *made.proposals[:-1].tolist()]
            self._tap = self._rounds.features
        self._pending, self._collects = 0, features
        self._open = tuple(proposals.tokens)
        return proposals, made.chosen[: len(self._open) + 1].tolist()

    @property
    def _rows_for_draft(self) -> int:
        """New rows of the next draft call: one that reads tokens is given the anchor as well."""
        if self._proposer.reads_states and not self._pending:
            raise _misuse("the draft lacks the features of some committed positions")
        return self._pending + (0 if self._proposer.reads_states else 1)

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
        self._replay = accepted + 1 if self._logged and self._target.log_rows else 0
        self._open = None
        self._keep(accepted + 1)

    def _keep(self, rows: int) -> None:
        """Count the first rows of the target call just made as valid, with their features.

        Those that the draft has read as its own proposals do not wait for its next call.
        """
        kept = self._tokens[self._start : self._start + rows]
        self._start += rows
        if self._collects:
            pairs = zip(kept, self._ahead, strict=False)
            known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._draft_length += known
            self._pending, self._collects = rows - known, False
        self._ahead = []

    def _run_target(
        self,
        ids: IntArray,
        rows: IntArray | None,
        features: bool,
        *,
        final: bool,
        alone: bool = False,
    ) -> Steps[FloatArray]:
        """One target call after row `start`; its features are left in `_tap`.

        Args:
            ids: Tokens of the new rows.
            rows: Which of them need logits.
            features: Whether the draft wants their features.
            final: Whether all of them stay, whatever comes out.
            alone: See `Call`.

        Returns:
            Logits of `rows`, f32 `[r, V]`; nothing of use when `rows` is None.
        """
        if self._start + len(ids) > self._target.capacity or len(ids) > self._chunk:
            raise _misuse(f"{len(ids)} rows after {self._start} do not fit")
        if not final and len(ids) > self._most_open:
            raise _misuse(f"{len(ids)} rows that may be rejected, at most {self._most_open} can")
        if features and self._pending:
            # The engine is about to reuse the array, so the draft takes these rows now.
            yield from self._run_draft(())
        self._pending, self._collects = 0, features
        inputs: dict[Role, Array] = {
            Role.TOKEN_IDS: ids[None],
            Role.CACHE_LENGTH: np.array([self._start], dtype=np.int64),
            Role.LOGIT_ROWS: self._row_numbers[:1] if rows is None else rows,
        }
        if self._target.log_rows:
            inputs[Role.REPLAY_LENGTH] = np.array([self._replay], dtype=np.int64)
            inputs[Role.COMMIT_LENGTH] = np.array([len(ids) if final else 0], dtype=np.int64)
        if self._prompt is not None:
            inputs |= self._prompt.inputs_from(self._start, len(ids), self._images)
        tapped = features and self._proposer.reads_states
        outputs = _TARGET_OUTPUTS[rows is not None, tapped]
        reply = yield Call(Entry.TARGET, inputs, outputs, alone)
        self.target_seconds += reply.seconds
        self._replay, self._logged = 0, not final
        if tapped:
            taps = reply.results[Role.HIDDEN_TAP]
            self._tap = lambda rows: taps[:, :rows]
        return _NO_LOGITS if rows is None else reply.results[Role.LOGITS][0]

    def _run_draft(self, outputs: tuple[Role, ...]) -> Steps[Mapping[Role, Array]]:
        """Append what is pending to the draft caches; with outputs, also run the block."""
        if self._draft is None or not self._pending:
            raise _misuse("there is no draft")
        length = self._draft_length
        end = length + self._pending
        if end != self._start:
            raise _misuse("the draft lacks the features of some committed positions")
        if self._proposer.reads_states:
            return (yield from self._run_with_states(length, end, outputs))
        inputs = self._token_inputs(self._tokens[length:end], length)
        reply = yield Call(Entry.DRAFT, inputs, outputs, alone=True)
        return self._has_read(end, reply)

    def _run_with_states(
        self, length: int, end: int, outputs: tuple[Role, ...]
    ) -> Steps[Mapping[Role, Array]]:
        """The same for a draft that reads states of the target."""
        features = self._tap(self._pending)
        inputs: dict[Role, Array] = {
            Role.FEATURES: features,
            self._proposer.role: self._proposer.tokens(self._tokens[length + 1 : end + 1]),
            Role.CACHE_LENGTH: np.array([length], dtype=np.int64),
        }
        earlier = self._earlier_rows() if self._shares_calls else {}
        reply = yield Call(Entry.DRAFT, inputs, outputs, not outputs, earlier)
        if self._shares_calls:
            self._remember(features)
        return self._has_read(end, reply)

    def _has_read(self, end: int, reply: Reply) -> Mapping[Role, Array]:
        """Take notice of a draft call that read everything before a position."""
        self.draft_seconds += reply.seconds
        self._draft_length = end
        self._pending = 0
        return reply.results

    def _earlier_rows(self) -> dict[Role, Array]:
        """What the draft was given for the last positions before the pending ones."""
        if self._earlier is None or self._pending < self._proposer.fewest_rows:
            return {}
        rows, length = self._earlier.shape[1], self._draft_length
        tokens = self._proposer.earlier(self._tokens[length - rows + 1 : length + 1])
        return {Role.FEATURES: self._earlier, **tokens}

    def _remember(self, features: Array) -> None:
        """Keep features that the draft was given: the last ones of the sequence."""
        newest = features[:, -EARLIER_ROWS:]
        known = newest[:, :0] if self._earlier is None else self._earlier
        self._earlier = np.concatenate([known, newest], axis=1)[:, -EARLIER_ROWS:]


EARLIER_ROWS = 16
"""Features that are kept to pad a draft's calls in a batch: rounds differ by fewer rows, unless
more than 16 tokens are proposed."""

_TARGET_OUTPUTS: dict[tuple[bool, bool], tuple[Role, ...]] = {
    (False, False): (),
    (False, True): (Role.HIDDEN_TAP,),
    (True, False): (Role.LOGITS,),
    (True, True): (Role.LOGITS, Role.HIDDEN_TAP),
}
"""What to ask the target for, by (logits wanted, features wanted)."""

_NO_LOGITS: FloatArray = np.empty((0, 0), dtype=np.float32)


def _no_features(rows: int) -> Array:
    raise _misuse(f"{rows} rows of features were never collected")


def _misuse(message: str) -> InternalError:
    return InternalError("runtime/session-misuse", message)
