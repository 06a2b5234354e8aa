"""Greedy rounds on the GPU: draft, verification and choice with one read-back at the end.

What differs from round to round (lengths, for states two counts of rows, and the tokens that a
draft wants to know) lies in device memory, so one captured CUDA graph serves all rounds in which
the draft has as many new rows. Its inputs are these integers, its results the proposals, how sure
the draft is of them if it says so, and the target's choices. Where the target has states, there are
two graphs: one for each place that the states are read from.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from edgecc.backends.base import FloatArray, GreedyRound, IntArray, Role
from edgecc.backends.tensorrt.cuda import CapturedGraph
from edgecc.backends.tensorrt.device import DeviceState
from edgecc.backends.tensorrt.executable import MakeContext, TrtExecutable
from edgecc.backends.tensorrt.library import uncollected
from edgecc.backends.tensorrt.plan import Context
from edgecc.backends.tensorrt.round_drafts import INTEGER, Calls, RoundDraft, round_draft
from edgecc.errors import BackendError, ResourceError

SCORE = 4
"""Bytes of a confidence, f32."""

_COUNTS = (Role.REPLAY_LENGTH, Role.COMMIT_LENGTH)
"""What a target with states is told beside the lengths, in this order."""


@dataclass(slots=True)
class _Work:
    """A round that is kept: contexts that nothing else uses, and the graph captured from them."""

    draft: Calls
    target: tuple[Context, ...]
    graph: CapturedGraph | None = None


class TrtRounds:
    """Runs greedy rounds of one sequence; see `GreedyRounds`.

    Args:
        state: What the engines share.
        target: The target, which chooses tokens.
        draft: The draft, if there is one. Its features lie where the target leaves its taps.
    """

    def __init__(
        self, state: DeviceState, target: TrtExecutable, draft: TrtExecutable | None
    ) -> None:
        self._state = state
        self._target = target
        self._rows = target.min_rows
        self._counts = tuple(r for r in _COUNTS if r in target.interface.inputs)
        self._row_numbers = state.memory(self._rows * INTEGER)
        state.stream.upload(self._row_numbers, np.arange(self._rows, dtype=np.int64))
        self._draft: RoundDraft | None = None
        if draft is not None:
            self._draft = round_draft(draft, max(1, self._rows - 1), self._row_numbers)
        self._lengths = len(self._draft.lengths(1, 0)) if self._draft is not None else 0
        most = self._draft.most_told if self._draft is not None else 1
        size = (1 + self._lengths + len(self._counts) + most) * INTEGER
        self._given = state.host(size)
        self._numbers: IntArray = self._given.bytes.view(np.int64)
        self._integers = state.memory(size)
        self._proposed = state.host(max(1, self._rows - 1) * INTEGER)
        self._chosen = state.host(self._rows * INTEGER)
        self._tells = self._draft is not None and self._draft.tells
        self._confidence = state.host(max(1, self._rows - 1) * SCORE)
        self._works: dict[tuple[int, int], _Work] = {}
        self._captures = True

    def run(
        self, following: IntArray, start: int, features: int, draft_length: int, replay: int = 0
    ) -> GreedyRound:
        """See `GreedyRounds.run`.

        Raises:
            BackendError: TensorRT or CUDA failed, or the engine is closed.
        """
        self._state.check_open()
        lengths = self._draft.lengths(features, draft_length) if self._draft is not None else ()
        counts = (replay, int(not features))[: len(self._counts)]
        numbers = (start, *lengths, *counts, *following[-self._told(features) :])
        self._numbers[: len(numbers)] = numbers
        if not start:
            self._target.clear_states()
        key = features, self._target.turn
        work = self._works.get(key)
        if work is not None and work.graph is not None:
            self._state.stream.launch(work.graph)
        elif features <= self._rows:
            work = work or self._keep(key)
            self._enqueue(features, work.draft, work.target)
        else:  # the rows of a prompt's last chunk: once a sequence
            make = self._state.context
            draft = self._draft_calls(features, make)
            self._enqueue(features, draft, self._target_calls(features, make))
        self._target.take_turn()
        self._state.stream.synchronize()
        chosen = self._chosen.bytes.view(np.int64).copy()
        proposals = self._proposed.bytes.view(np.int64).copy()
        confidence = self._confidence.bytes.view(np.float32).copy()
        if work is not None and work.graph is None:
            self._capture(features, work)
        drafted = len(proposals) if features else 0
        scores = confidence[: drafted if self._tells else 0]
        return GreedyRound(proposals[:drafted], chosen, scores)

    def features(self, rows: int) -> FloatArray:
        """See `GreedyRounds.features`.

        Raises:
            BackendError: CUDA failed, or the engine is closed.
        """
        self._state.check_open()
        value = self._target.values[self._target.interface.outputs[Role.HIDDEN_TAP].value]
        result = np.empty((1, rows, *value.shape[2:]), dtype=value.dtype)
        self._state.stream.download(result, value.address)
        self._state.stream.synchronize()
        return result

    def close(self) -> None:
        """Destroy the captured graphs."""
        for work in self._works.values():
            if work.graph is not None:
                with suppress(BackendError):  # of a GPU that failed: there is more to be freed
                    work.graph.close()
        self._works.clear()

    def _told(self, features: int) -> int:
        """How many tokens a round is told: the last one is the anchor."""
        return self._draft.told(features) if self._draft is not None else 1

    def _keep(self, key: tuple[int, int]) -> _Work:
        features, _ = key
        make = self._state.new_context
        draft = [tuple(call) for call in self._draft_calls(features, make)]
        work = _Work(draft, tuple(self._target_calls(features, make)))
        self._works[key] = work
        return work

    def _draft_calls(self, features: int, make: MakeContext) -> Calls:
        return self._draft.calls(features, make) if features and self._draft is not None else ()

    def _target_calls(self, features: int, make: MakeContext) -> Iterable[Context]:
        ports = self._target.interface.inputs
        shapes = {
            ports[Role.TOKEN_IDS].name: (1, self._rows),
            ports[Role.CACHE_LENGTH].name: (1,),
            ports[Role.LOGIT_ROWS].name: (self._rows,),
            **{ports[role].name: (1,) for role in self._counts},
        }
        taps = [Role.HIDDEN_TAP] if features and Role.HIDDEN_TAP in self._target_outputs else []
        return self._target.calls(shapes, [Role.CHOSEN_TOKENS, *taps], make)

    @property
    def _target_outputs(self) -> Container[Role]:
        return self._target.interface.outputs

    def _capture(self, features: int, work: _Work) -> None:
        """Record a round that has run once: TensorRT wants that before a capture.

        Where that cannot be, rounds go on engine by engine, as the first one ran.
        """
        calls, handle = (*chain(*work.draft), *work.target), self._state.stream.handle
        if not self._captures or not all(context.capturable(handle) for context in calls):
            self._captures = False
            return
        try:
            # Collected garbage may hold GPU memory of others, and freeing that ends a capture.
            with uncollected(), self._state.stream.capture() as graph:
                self._enqueue(features, work.draft, work.target)
        except (BackendError, ResourceError) as error:
            self._captures = False
            warnings.warn(f"rounds run without a CUDA graph: {error}", RuntimeWarning, stacklevel=2)
            return
        work.graph = graph

    def _enqueue(self, features: int, draft_calls: Calls, target_calls: Iterable[Context]) -> None:
        """Everything of a round, in order, without waiting for any of it."""
        stream, draft, target = self._state.stream, self._draft, self._target
        told = self._told(features)
        count = 1 + self._lengths + len(self._counts)
        stream.upload(self._integers, self._given.bytes[: (count + told) * INTEGER])
        start, lengths = self._integers, self._integers + INTEGER
        counts = (lengths + (self._lengths + i) * INTEGER for i in range(len(self._counts)))
        following = self._integers + count * INTEGER
        anchor = following + (told - 1) * INTEGER
        tokens = target.address(Role.TOKEN_IDS)
        if draft is not None and draft_calls:
            proposed = tokens + INTEGER
            draft.enqueue(stream, draft_calls, features, lengths, following, proposed)
            stream.download(self._proposed.bytes, proposed)
            if self._tells:
                scores = draft.draft.address(Role.CONFIDENCE)
                stream.download(self._confidence.bytes, scores)
        stream.copy(tokens, anchor, INTEGER)
        stream.copy(target.address(Role.CACHE_LENGTH), start, INTEGER)
        for role, told_count in zip(self._counts, counts, strict=True):
            stream.copy(target.address(role), told_count, INTEGER)
        rows = target.address(Role.LOGIT_ROWS)
        stream.copy(rows, self._row_numbers, self._rows * INTEGER)
        _run(target_calls, stream.handle)
        stream.download(self._chosen.bytes, target.address(Role.CHOSEN_TOKENS))


def _run(calls: Iterable[Context], stream: int) -> None:
    for context in calls:
        context.enqueue(stream)
