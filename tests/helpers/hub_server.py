"""A model hub on this machine: the few requests that `huggingface_hub` makes for one model.

What is served is a folder for each commit. Weights lie on another host, as they do on the real one:
requests for them are answered with a redirect.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_FILE = re.compile(r"/(cdn/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """What there is, and what was asked.

    Attributes:
        models: Revision to commit to folder, by repository.
        gated: Repositories that need their terms accepted.
        answers: Status, body and headers in place of the right ones, by a pattern of the path.
        ranges: Whether parts of files can be had.
        log: Method, path and bytes sent of every request.
        trusted: Paths of requests that came with a token.
        url: Where it listens.
    """

    models: dict[str, dict[str, str]] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    answers: dict[str, tuple[int, bytes, dict[str, str]]] = field(default_factory=dict)
    ranges: bool = True
    failing: int = 0
    log: list[tuple[str, str, int]] = field(default_factory=list)
    trusted: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, repository: str, folder: Path, *revisions: str) -> str:
        """Serve a folder as a new commit, to which these revisions point; returns the commit."""
        commit = hashlib.sha1(f"{repository} {folder} {len(self.folders)}".encode()).hexdigest()
        self.folders[commit] = folder
        known = self.models.setdefault(repository, {})
        known |= dict.fromkeys((commit, *(revisions or ("main",))), commit)
        return commit

    def sent(self, ending: str) -> int:
        """Bytes that were sent of files whose names end so."""
        return sum(count for _, path, count in self.log if path.endswith(ending))


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that runs as long as the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if "Authorization" in self.headers:
            self.hub.trusted.append(path)
        if self.hub.failing:
            return self._fail(self.hub.failing, "", "the hub is down")
        for pattern, answer in self.hub.answers.items():
            if re.search(pattern, path):
                return self._send(*answer)
        if found := _FILE.fullmatch(path):
            return self._file(*found.groups())
        if found := _TREE.fullmatch(path):
            return self._json(self._commit(found[1], found[2]), self._tree)
        if found := _INFO.fullmatch(path):
            return self._json(
                self._commit(found[1], found[2] or "main"),
                lambda commit: {
                    "id": found[1],
                    "sha": commit,
                    "tags": [],
                    "siblings": [
                        {"rfilename": f["path"], "size": f["size"]} for f in self._tree(commit)
                    ],
                },
            )
        return self._fail(404, "RepoNotFound", "no such page")

    def _commit(self, repository: str, revision: str) -> str | None:
        """The commit of a revision; None, and an error is sent, if there is none."""
        if repository not in self.hub.models:
            self._fail(401, "RepoNotFound", "Repository not found")
        elif repository in self.hub.gated:
            self._fail(403, "GatedRepo", "Access to this model is restricted")
        elif revision not in self.hub.models[repository]:
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return self.hub.models[repository][revision]
        return None

    def _tree(self, commit: str) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": file.name,
                "size": file.stat().st_size,
                "oid": _etag(file),
                **({"lfs": _lfs(file)} if file.suffix == ".safetensors" else {}),
            }
            for file in sorted(self.hub.folders[commit].iterdir())
        ]

    def _file(self, cdn: str | None, repository: str, revision: str, name: str) -> None:
        commit = self._commit(repository, revision)
        if commit is None:
            return
        file = self.hub.folders[commit] / name
        if not file.is_file():
            self._fail(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        if file.suffix == ".safetensors" and not cdn:
            port = urlsplit(self.hub.url).port
            headers |= {
                "X-Linked-Size": str(file.stat().st_size),
                "X-Linked-Etag": f'"{_etag(file)}"',
                "Location": f"http://localhost:{port}/cdn{self.path}",
            }
            self._send(302, b"", headers)
            return
        data = file.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.hub.ranges:
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            self._send(206, data[first : last + 1], headers)
        else:
            self._send(200, data, headers)

    def _json(self, commit: str | None, make: Any) -> None:
        if commit is not None:
            headers = {"Content-Type": "application/json"}
            self._send(200, json.dumps(make(commit)).encode(), headers)

    def _fail(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, b"{}", headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        body = self.command == "GET"
        self.hub.log.append((self.command, urlsplit(self.path).path, len(data) if body else 0))
        if body:
            self.wfile.write(data)


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _lfs(file: Path) -> dict[str, Any]:
    return {"oid": _etag(file), "size": file.stat().st_size, "pointerSize": 134}
