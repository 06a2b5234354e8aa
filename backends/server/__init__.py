"""An OpenAI-compatible server for one bundle; needs the extra `serve`.

From the outside in: a `Server` listens and runs an application (`app`, `middleware`) whose
endpoints are those of a `Service`; it reads bodies (`protocol`, `reading`) into requests of the
runtime, which an `EngineThread` answers in one batch, and writes the answers (`replies`).
"""

from __future__ import annotations

from edgecc.backends.server.options import ServerOptions
from edgecc.backends.server.running import Server, bind
from edgecc.backends.server.service import Service

__all__ = ["Server", "ServerOptions", "Service", "bind"]
