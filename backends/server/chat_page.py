"""A page to chat with, for browsers: three files that load nothing from elsewhere."""

from __future__ import annotations

from functools import partial
from importlib import resources

from fastapi import FastAPI, Response

_TYPES = {
    "chat.html": "text/html; charset=utf-8",
    "chat.css": "text/css; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
}
_FILES = {"/": "chat.html", "/static/chat.css": "chat.css", "/static/chat.js": "chat.js"}

PAGE_PATHS = frozenset(_FILES)
"""The paths of the page. They need no key: the page asks for it."""

# The page runs its own script only, talks to its own server only, and stands in no other page.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_chat_page(app: FastAPI) -> None:
    """Serve the page at `/`."""
    folder = resources.files("edgecc.backends.server") / "static"
    for path, name in _FILES.items():
        content = (folder / name).read_bytes()
        app.add_api_route(path, partial(_page, content, _TYPES[name]), include_in_schema=False)


async def _page(content: bytes, media_type: str) -> Response:
    return Response(content, headers=_HEADERS, media_type=media_type)
