"""Answers in the event loop: what the engine's thread hands over, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from edgecc.backends.runtime import Chunk, Request
from edgecc.backends.server.engine_thread import EngineThread, Item
from edgecc.errors import EdgeccError


class AnswerStream:
    """Chunks of the answers to requests that belong together, as they come.

    A reader that is slow holds back no one: chunks are kept until it takes them, at most those of
    one answer each.

    Args:
        engine: Answers.
        requests: What is asked; all of them are taken, or none.

    Raises:
        EdgeccError: The engine does not take them.
    """

    def __init__(self, engine: EngineThread, requests: Sequence[Request]) -> None:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()

        def deliver(index: int, item: Item) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it whoever would read
                loop.call_soon_threadsafe(items.put_nowait, (index, item))

        self._items = items
        self._engine = engine
        self._jobs = engine.submit(requests, deliver)
        self._open = len(self._jobs)

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        """The next chunk, and the place of its request.

        Raises:
            EdgeccError: A request failed; the others are dropped.
        """
        if not self._open:
            raise StopAsyncIteration
        index, item = await self._items.get()
        if isinstance(item, EdgeccError):
            self.close()
            raise item
        if item.finish_reason is not None:
            self._open -= 1
        return index, item

    def close(self) -> None:
        """Drop what is still to come."""
        if self._open:
            self._open = 0
            for job in self._jobs:
                self._engine.cancel(job)
