"""The one thread that drives the model: requests in, chunks out.

The server's event loop must never wait for the engine, and a batch is driven by one thread. So
requests are left in a queue under a lock; the thread takes them as slots become free, steps the
batch, and hands each chunk to the function that the request came with. What nobody waits for any
more is dropped between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from edgecc.backends.runtime import Batch, Chunk, Generator, Progress, Request
from edgecc.backends.server.errors import QueueFullError, UnavailableError
from edgecc.errors import EdgeccError, InternalError, RequestError

_LOG = logging.getLogger(__name__)

Item: TypeAlias = "Chunk | EdgeccError"
"""What comes of a request: chunks, the last one with a finish reason, or an error instead."""

Deliver = Callable[[int, Item], None]
"""Called in the thread, with the place of the request among those submitted together."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way.

    Attributes:
        request: What is asked.
        index: Its place among those submitted together.
        deliver: Takes what comes of it.
        submitted_s: When it came, on the monotonic clock.
        first_s: When its first token came; None before that.
        rounds_seen: Rounds of its statistics that were counted.
        warnings_seen: Warnings of its statistics that were logged.
        ticket: In the batch; None while it waits.
    """

    request: Request
    index: int
    deliver: Deliver
    submitted_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    rounds_seen: int = 0
    warnings_seen: int = 0
    ticket: int | None = None


class Observer(Protocol):
    """Told by the thread what happens; must not block."""

    def progressed(self, job: Job, chunk: Chunk) -> None:
        """A chunk came."""

    def ended(self, job: Job, reason: str) -> None:
        """A request has ended: `stop`, `length`, `error`, or `abort` if it was dropped."""


class EngineThread:
    """Answers requests with one generator until it is closed.

    Args:
        generator: Nothing else may run on it meanwhile.
        observer: Told what happens.
        max_queued_requests: Requests that may wait for a slot.
        queue_timeout_s: How long one may wait.
    """

    def __init__(
        self,
        generator: Generator,
        observer: Observer,
        *,
        max_queued_requests: int,
        queue_timeout_s: float,
    ) -> None:
        self._batch: Batch = generator.batch()
        self._observer = observer
        self._slots = self._batch.slots
        self._max_queued = max_queued_requests
        self._queue_timeout_s = queue_timeout_s
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._dropped: list[Job] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="edgecc-engine", daemon=True)
        self._thread.start()

    @property
    def slots(self) -> int:
        """Requests that are answered at a time."""
        return self._slots

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._queue)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    def check_room(self, count: int = 1, *, ahead: int = 0) -> None:
        """Check that so many requests could be taken now.

        Args:
            count: How many.
            ahead: How many others are about to be submitted.

        Raises:
            RequestError: There will never be room for them.
            QueueFullError: There is none now.
            UnavailableError: The thread has ended.
        """
        if not self.ready:
            raise _unavailable()
        places = self._slots + self._max_queued
        if count > places:
            raise RequestError(
                "server/too-many-choices",
                f"the request asks for {count} answers, and the server takes {places} at a time",
                help="send several requests",
            )
        if len(self._queue) + len(self._running) + ahead + count > places:
            raise QueueFullError(
                "server/queue-full",
                f"{self._slots} requests are answered at a time and {self._max_queued} may wait; "
                "there is no room for more",
                help="try again later, or serve with a larger --max-queued-requests",
            )

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> list[Job]:
        """Take requests, all of them or none.

        Raises:
            RequestError: There will never be room for them.
            QueueFullError: There is none now.
            UnavailableError: The thread has ended.
        """
        jobs = [Job(request, index, deliver) for index, request in enumerate(requests)]
        with self._changed:
            self.check_room(len(jobs))
            self._queue.extend(jobs)
            self._changed.notify()
        return jobs

    def cancel(self, job: Job) -> None:
        """Drop a request, if there is still something to come of it."""
        with self._changed:
            self._dropped.append(job)
            self._changed.notify()

    def end(self) -> None:
        """Let the thread end after the step it is in; what is not answered fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, timeout_s: float | None = None) -> None:
        """`end`, and wait for it."""
        self.end()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        error: EdgeccError = UnavailableError(
            "server/closing", "the server ends before the answer is complete"
        )
        try:
            while self._prepare():
                self._step()
        except EdgeccError as failure:
            error = failure
            _LOG.error("the engine has failed: %s", failure.id)
        except Exception as failure:  # whatever it is: clients must not wait for ever
            error = InternalError("server/engine-failed", "the engine has failed")
            _LOG.exception("the engine has failed: %s", type(failure).__name__)
        finally:
            self._end(error)

    def _prepare(self) -> bool:
        """Wait until there is work, drop and start requests; False to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._dropped or self._queue or self._running
            )
            if self._closing:
                return False
            self._drop()
            self._expire()
            while self._queue and len(self._running) < self._slots:
                job = self._queue.popleft()
                job.ticket = self._batch.submit(job.request)
                self._running[job.ticket] = job
        return True

    def _drop(self) -> None:
        for job in self._dropped:
            if job.ticket is not None and self._running.pop(job.ticket, None) is not None:
                self._batch.cancel(job.ticket)
            elif job in self._queue:
                self._queue.remove(job)
            else:
                continue
            self._observer.ended(job, "abort")
        self._dropped.clear()

    def _expire(self) -> None:
        """Refuse what has waited too long: the first of the queue is the oldest."""
        latest = time.monotonic() - self._queue_timeout_s
        while self._queue and self._queue[0].submitted_s < latest:
            job = self._queue.popleft()
            error = UnavailableError(
                "server/queue-timeout",
                f"the request waited {self._queue_timeout_s:g} seconds for a slot",
                help="try again later",
            )
            self._fail(job, error)

    def _step(self) -> None:
        if not self._running:
            return
        for progress in self._batch.step():
            self._tell(self._running[progress.ticket], progress)

    def _tell(self, job: Job, progress: Progress) -> None:
        if progress.ended:
            with self._changed:
                del self._running[progress.ticket]
        chunk = progress.chunk
        if chunk is None:
            failure = InternalError("server/no-answer", "a request ended without an answer")
            self._fail(job, progress.error or failure)
            return
        for finding in chunk.stats.warnings[job.warnings_seen :]:
            _LOG.warning("%s", finding)
        job.warnings_seen = len(chunk.stats.warnings)
        self._observer.progressed(job, chunk)
        if chunk.finish_reason is not None:
            self._observer.ended(job, str(chunk.finish_reason))
        job.deliver(job.index, chunk)

    def _fail(self, job: Job, error: EdgeccError) -> None:
        self._observer.ended(job, "error")
        job.deliver(job.index, error)

    def _end(self, error: EdgeccError) -> None:
        with self._changed:
            self._closing = True
            left = [*self._running.values(), *self._queue]
            self._running.clear()
            self._queue.clear()
        for job in left:
            self._fail(job, error)
        self._batch.close()


def _unavailable() -> UnavailableError:
    return UnavailableError("server/closing", "the server takes no more requests")
