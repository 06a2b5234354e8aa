"""Several requests at a time on one bundle."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from edgecc.backends.runtime.answer import Answer, Chunk
from edgecc.backends.runtime.request import Request
from edgecc.backends.runtime.scheduler import Outcome, Rounds, Scheduler
from edgecc.backends.runtime.session import Session
from edgecc.backends.runtime.stats import SpeculationWarning
from edgecc.errors import EdgeccError, RequestError

Decode = Callable[[Session, Request], Rounds]
"""The rounds of a request."""

Begin = Callable[[Request], Answer]
"""An answer without chunks yet."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step of a batch did for a request.

    Attributes:
        ticket: Of the request, from `Batch.submit`.
        chunk: What was added to its answer. The last one has a finish reason.
        error: In place of a chunk: why there is no more of it.
    """

    ticket: int
    chunk: Chunk | None = None
    error: EdgeccError | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of the request."""
        return self.chunk is None or self.chunk.finish_reason is not None


class Batch:
    """Requests that are answered together, as many as the bundle was compiled for.

    More than that wait for their turn, first come, first served. Made by `Generator.batch`; driven
    by whoever calls `step`, from one thread at a time:

    ```
    with generator.batch() as batch:
        ticket = batch.submit(generator.request("Once upon a time", max_new_tokens=32))
        while batch:
            for progress in batch.step():
                ...
    ```

    Each answer is the one that the request gets alone, whatever else runs.

    Args:
        scheduler: Decodes.
        decode: Makes the rounds of a request.
        begin: Makes an answer for it.
        guard: Runs a step of the scheduler where nothing can close the engine meanwhile.
        close: Called once, at the end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        decode: Decode,
        begin: Begin,
        guard: Callable[[Callable[[], list[Outcome]]], list[Outcome]],
        close: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._decode = decode
        self._begin = begin
        self._guard = guard
        self._close = close
        self._next = 0
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: dict[int, tuple[int, Answer]] = {}
        self._open = True

    @property
    def slots(self) -> int:
        """Most requests at a time."""
        return self._scheduler.slots

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def __len__(self) -> int:
        """Requests that are not answered yet."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: Request) -> int:
        """Take a request, see `Generator.request`; its first chunk comes from a later step.

        Returns:
            Its ticket, which is never used again.

        Raises:
            RequestError: It is no request, or the batch is closed.
        """
        if not isinstance(request, Request):
            raise RequestError(
                "request/bad-request",
                f"a batch takes requests, not a {type(request).__name__}",
                help="make one with Generator.request, which takes the arguments of generate",
            )
        if not self._open:
            raise RequestError("request/closed", "the batch is closed", help="make another one")
        ticket, self._next = self._next, self._next + 1
        self._waiting[ticket] = request
        return ticket

    def cancel(self, ticket: int) -> bool:
        """Forget a request between two steps; whether there was still something to come."""
        if self._waiting.pop(ticket, None) is not None:
            return True
        for seat, (running, _) in self._running.items():
            if running == ticket:
                self._scheduler.leave(seat)
                del self._running[seat]
                return True
        return False

    def step(self) -> list[Progress]:
        """Go on with each request that has a slot.

        Returns:
            What came of it, at most one entry a request. A request that fails does not end the
            others, except those whose numbers were computed in the same call of the engine.

        Raises:
            RequestError: The generator is closed.
        """
        while self._waiting and self._scheduler.free:
            ticket, request = self._waiting.popitem(last=False)
            seat = self._scheduler.join(lambda session, r=request: self._decode(session, r))  # type: ignore[misc]
            self._running[seat] = ticket, self._begin(request)
        return [self._progress(outcome) for outcome in self._guard(self._scheduler.step)]

    def _progress(self, outcome: Outcome) -> Progress:
        ticket, answer = self._running[outcome.ticket]
        if outcome.error is not None:
            progress = Progress(ticket, error=outcome.error)
        elif outcome.round is None:
            progress = Progress(ticket, answer.end())
        else:
            progress = Progress(ticket, answer.add(outcome.round))
            if answer.finding is not None:
                warnings.warn(answer.finding, SpeculationWarning, stacklevel=3)
        if progress.ended:
            self._scheduler.leave(outcome.ticket)
            del self._running[outcome.ticket]
        return progress

    def close(self) -> None:
        """Drop what is not answered; the generator can be used otherwise again."""
        if self._open:
            self._open = False
            for seat in self._running:
                self._scheduler.leave(seat)
            self._running.clear()
            self._waiting.clear()
            self._close()

    def __del__(self) -> None:
        # One that was dropped must not keep its generator busy for good.
        self.close()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
