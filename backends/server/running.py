"""From a service to a server that listens."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from edgecc.backends.runtime import Generator
from edgecc.backends.server.app import create_app
from edgecc.backends.server.options import ServerOptions
from edgecc.backends.server.service import Service
from edgecc.errors import ResourceError

_LOGGING = copy.deepcopy(LOGGING_CONFIG)
_LOGGING["handlers"]["access"]["stream"] = "ext://sys.stderr"  # no result of a command


SENDING_S = 5
"""Seconds in which clients take what they are sent at the end."""


class Server(uvicorn.Server):
    """Serves a generator until a signal or `should_exit` ends it.

    Answers that are under way when it ends are completed, for so long as there is time; after that
    they fail.

    Args:
        generator: Nothing else may run on it meanwhile; closed by the caller.
        options: What to serve, and how.
        listener: A socket from `bind`.
        on_start: Told the URL as soon as requests are taken.
        shutdown_timeout_s: Time for what is under way.
        verbose: Log each request: method, path and status.
    """

    def __init__(
        self,
        generator: Generator,
        options: ServerOptions,
        listener: socket.socket,
        *,
        on_start: Callable[[str], None] = lambda url: None,
        shutdown_timeout_s: int = 30,
        verbose: bool = False,
    ) -> None:
        self.service = Service(generator, options)
        self._listener = listener
        self._on_start = on_start
        self._shutdown_timeout_s = shutdown_timeout_s
        config = uvicorn.Config(
            create_app(self.service),
            log_config=_LOGGING,
            log_level="info" if verbose else "warning",
            access_log=verbose,
            server_header=False,
            timeout_graceful_shutdown=shutdown_timeout_s + SENDING_S,
            lifespan="on",
            ws="none",
        )
        super().__init__(config)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_until_told(self) -> None:
        """Serve in this thread; in the main thread SIGINT and SIGTERM end it.

        Raises:
            KeyboardInterrupt, SystemExit: A signal came before requests were taken, or a second
                SIGINT cut short what was under way.
        """
        try:
            self.run(sockets=[self._listener])
        except (KeyboardInterrupt, SystemExit):  # uvicorn raises signals again when it has ended
            if self.force_exit or not (self.started and self.should_exit):
                raise
        finally:
            self.service.close()
            self._listener.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: end; the second SIGINT: now, and what that cuts short is no error."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        if self.started:
            self._on_start(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Complete what is under way, and let fail what is not complete in time."""
        loop = asyncio.get_running_loop()
        end = loop.call_later(self._shutdown_timeout_s, self.service.end)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
        if self.force_exit:  # a second SIGINT: the application must end all the same
            await self.lifespan.shutdown()


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet: clients are refused until there is a model.

    Raises:
        ResourceError: The address is in use, or none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ResourceError(
            "server/address",
            f"cannot listen at {host}:{port}: {reason}",
            help="choose another --port or --host",
        ) from error
    return listener
