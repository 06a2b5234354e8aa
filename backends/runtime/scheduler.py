"""Decodes several sequences at a time: who runs when, and in which slot.

A step makes a round of each sequence that has read its prompt, and reads one chunk (or image) of
one prompt.
Rounds go in step: all drafts propose, then all proposals are verified, and calls that wait at the
same time are made as one. So no sequence waits for another longer than for a chunk and a round,
and what a sequence computes does not depend on the others: it is the same coroutine as alone, with
the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeAlias

from edgecc.backends.base import Array, Executable, Role
from edgecc.backends.runtime.calls import Call, Entry, Reply, Steps
from edgecc.backends.runtime.merge import Idle, joined, part, rows_of, start_of
from edgecc.backends.runtime.round import Round
from edgecc.backends.runtime.session import Session
from edgecc.errors import EdgeccError, InternalError

Rounds: TypeAlias = Iterator[Steps[Round]]
"""A sequence: a coroutine for each of its rounds, see `Decoder.steps`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did for a sequence.

    Attributes:
        ticket: Of the sequence, from `Scheduler.join`.
        round: What it committed; None if it ended without a round.
        error: Why it ended, if it failed.
    """

    ticket: int
    round: Round | None = None
    error: EdgeccError | None = None

    @property
    def ended(self) -> bool:
        """Whether the sequence is over and its slot free."""
        return self.round is None or self.round.finish_reason is not None


@dataclass(slots=True)
class _Seat:
    """A sequence in its slot.

    Attributes:
        ticket: Its number.
        slot: Where its caches are.
        session: Its state.
        rounds: What is left of it.
        steps: The round that it is in.
        call: What that waits for.
        reads: Whether that is the round of the prompt.
    """

    ticket: int
    slot: int
    session: Session
    rounds: Rounds
    steps: Steps[Round] | None = None
    call: Call | None = None
    reads: bool = True


def slots_of(entries: Mapping[Entry, Executable]) -> int:
    """Most sequences at a time: a vision tower keeps nothing of them."""
    return min(e.slots for name, e in entries.items() if name is not Entry.VISION)


class Scheduler:
    """Sequences that come and go, up to the number of slots of the executables.

    Not for several threads at a time.

    Args:
        entries: What sequences call.
        make_session: A session for a slot.
    """

    def __init__(
        self, entries: Mapping[Entry, Executable], make_session: Callable[[], Session]
    ) -> None:
        self._entries = entries
        self._sessions = [make_session() for _ in range(slots_of(entries))]
        self._seats: dict[int, _Seat] = {}
        self._next = 0
        self._outcomes: list[Outcome] = []

    @property
    def slots(self) -> int:
        """Most sequences at a time."""
        return len(self._sessions)

    @property
    def free(self) -> int:
        """Sequences that may join now."""
        return self.slots - len(self._seats)

    def join(self, start: Callable[[Session], Rounds]) -> int:
        """Take a sequence in; the first step that follows begins it.

        Args:
            start: Makes its rounds, with the session of its slot.

        Returns:
            Its ticket.
        """
        taken = {seat.slot for seat in self._seats.values()}
        # The first free slot: caches of the others may never have been touched.
        slot = next((s for s in range(self.slots) if s not in taken), None)
        if slot is None:
            raise InternalError("runtime/scheduler", "no slot is free")
        ticket, self._next = self._next, self._next + 1
        session = self._sessions[slot]
        self._seats[ticket] = _Seat(ticket, slot, session, start(session))
        return ticket

    def leave(self, ticket: int) -> None:
        """Drop a sequence between two steps, if it is still there."""
        seat = self._seats.pop(ticket, None)
        if seat is not None and seat.steps is not None:
            seat.steps.close()

    def step(self) -> list[Outcome]:
        """One round of each sequence that has read its prompt, and one chunk or image of a prompt.

        Returns:
            Rounds that are complete, and ends. A sequence whose numbers are bad fails alone, one
            whose engine call fails with all that took part in it.
        """
        self._outcomes = []
        for seat in list(self._seats.values()):
            if seat.call is None:
                self._begin(seat)
        running = [s for s in self._seats.values() if not s.reads]
        reading = next((s for s in self._seats.values() if s.reads), None)
        if reading is not None:
            self._read(reading)
        while waiting := [s for s in running if s.call is not None]:
            # Drafts first: then all sequences meet at the target.
            entries = {s.call.entry for s in waiting if s.call is not None}
            entry = Entry.DRAFT if Entry.DRAFT in entries else Entry.TARGET
            self._make(entry, [s for s in waiting if s.call and s.call.entry is entry])
        return self._outcomes

    def _begin(self, seat: _Seat) -> None:
        """Start the next round, up to its first call."""
        steps = next(seat.rounds, None)
        if steps is None:
            self._end(seat, Outcome(seat.ticket))
            return
        seat.steps = steps
        self._resume(seat, partial(next, steps))

    def _resume(self, seat: _Seat, go: Callable[[], Call]) -> None:
        """Run a coroutine to its next call, or to the end of its round."""
        seat.call = None
        try:
            seat.call = go()
        except StopIteration as end:
            outcome = Outcome(seat.ticket, end.value)
            seat.steps, seat.reads = None, False
            if outcome.ended:
                self._end(seat, outcome)
            else:
                self._outcomes.append(outcome)
        except EdgeccError as error:
            self._end(seat, Outcome(seat.ticket, error=error))

    def _end(self, seat: _Seat, outcome: Outcome) -> None:
        seat.call = None
        self.leave(seat.ticket)
        self._outcomes.append(outcome)

    def _read(self, seat: _Seat) -> None:
        """One image or chunk of a prompt, after what the draft has to know of the chunk before."""
        while seat.call is not None:
            entry = seat.call.entry
            if entry is Entry.VISION:
                self._look(seat, seat.call)
            else:
                self._make(entry, [seat])
            if entry is not Entry.DRAFT:
                return

    def _look(self, seat: _Seat, call: Call) -> None:
        """Let the tower see an image: it keeps nothing, so there is no slot to it."""
        begin = perf_counter()
        try:
            results = self._entries[Entry.VISION].run(call.inputs, call.outputs)
        except EdgeccError as error:
            self._end(seat, Outcome(seat.ticket, error=error))
            return
        if seat.steps is not None:
            reply = Reply(results, perf_counter() - begin)
            self._resume(seat, partial(seat.steps.send, reply))

    def _make(self, entry: Entry, seats: Sequence[_Seat]) -> None:
        """Make the calls that sequences wait for, as few as possible."""
        executable, left = self._entries[entry], list(seats)
        while left:
            # A sequence goes on when its call is made: in the next one it has other valid rows.
            group = _group(executable, left, self._idle(entry))
            left = [seat for seat in left if group.get(seat.slot) is not seat]
            self._call(entry, group)

    def _call(self, entry: Entry, group: _Group) -> None:
        """Make one call."""
        first = min(group)
        calls = [group[slot] for slot in range(first, max(group) + 1)]
        inputs, outputs = joined(_calls(calls))
        begin = perf_counter()
        try:
            results = self._entries[entry].run(inputs, outputs, slot=first)
        except EdgeccError as error:
            for seat in calls:
                if isinstance(seat, _Seat):
                    self._end(seat, Outcome(seat.ticket, error=error))
            return
        self._hand_out(calls, results, perf_counter() - begin)

    def _hand_out(
        self, calls: Sequence[_Seat | Idle], results: Mapping[Role, Array], seconds: float
    ) -> None:
        """Resume the sequences of a call that was made."""
        for index, seat in enumerate(calls):
            if isinstance(seat, Idle) or seat.call is None or seat.steps is None:
                continue
            reply = Reply(part(results, index, seat.call), seconds)
            self._resume(seat, partial(seat.steps.send, reply))

    def _idle(self, entry: Entry) -> dict[int, Idle]:
        """Slots that may take part in a call without one of their own.

        Those without a sequence; of an entry without states also the others, whatever they do: what
        has to be replayed would be lost, rows behind the valid ones are nobody's.
        """
        found = {slot: Idle(0) for slot in range(self.slots)}
        for seat in self._seats.values():
            session = seat.session
            if self._entries[entry].log_rows:
                del found[seat.slot]
            else:
                length = session.start if entry is Entry.TARGET else session.draft_rows
                found[seat.slot] = Idle(length)
        return found


def _calls(places: Sequence[_Seat | Idle]) -> list[Call | Idle]:
    """What each slot of a call asks for."""
    found = (place.call if isinstance(place, _Seat) else place for place in places)
    return [call for call in found if call is not None]


_Group: TypeAlias = dict[int, "_Seat | Idle"]
"""What a call does in each of some neighbouring slots."""


def _group(executable: Executable, seats: Sequence[_Seat], idle: Mapping[int, Idle]) -> _Group:
    """Sequences whose calls are made together, that of the first slot among them.

    Args:
        executable: What is called.
        seats: Those that wait for it.
        idle: What slots between them can do.
    """
    first, *others = sorted(seats, key=lambda seat: seat.slot)
    group: _Group = {first.slot: first}
    for seat in others:
        between = range(max(group) + 1, seat.slot)
        if all(slot in idle for slot in between):
            wider = group | {slot: idle[slot] for slot in between} | {seat.slot: seat}
            if _fits(executable, wider):
                group = wider
    return group


def _fits(executable: Executable, group: _Group) -> bool:
    """Whether calls can be one call."""
    calls = [s.call for s in group.values() if isinstance(s, _Seat) and s.call is not None]
    rows = max(map(rows_of, calls))
    starts = [start_of(call, rows) for call in calls]
    last = max((start for start in starts if start is not None), default=0)
    return (
        len(group) <= executable.batch_size
        and not any(call.alone for call in calls)
        and None not in starts
        and last + rows <= executable.capacity
        # What fits for one that runs fits for one that does not.
        and max((s.length for s in group.values() if isinstance(s, Idle)), default=0) <= last
    )
