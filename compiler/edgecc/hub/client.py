"""One repository of the hub, at one commit, through `huggingface_hub`.

The library is loaded when a name is no folder, and not before: it takes as long as a whole check.
Its own settings hold: `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgecc.errors import Diagnostic, HubError, UnsupportedError, UsageError
from edgecc.hub.errors import (
    Tell,
    bad_answer,
    check_token,
    hub_errors,
    offline_error,
    warnings_told,
)
from edgecc.hub.ids import HubId
from edgecc.hub.progress import Progress, reporter
from edgecc.hub_layout import COMMIT


class Repository:
    """A repository at the commit that its revision means now.

    Args:
        wanted: What the user asked for.
        role: How messages call the checkpoint.
        offline: Ask nobody, use what is in the cache.
        tell: Told what the library warns about.

    Attributes:
        commit: 40 hex digits.
        offline: Whether the hub may not be asked.

    Raises:
        UnsupportedError: `huggingface_hub` is not installed.
        UsageError: One of its settings, or the token, cannot be used.
        HubError: There is no such model or revision, access is refused, or nobody answers.
    """

    def __init__(self, wanted: HubId, role: str, *, offline: bool, tell: Tell) -> None:
        _check_installed(wanted, role)
        import huggingface_hub

        self.wanted, self.role, self._tell = wanted, role, tell
        self._unreachable: HubError | None = None
        self.offline = offline or huggingface_hub.is_offline_mode()
        self._api = huggingface_hub.HfApi(library_name="edgecc")
        self._told: set[str] = set()
        with self._asking():
            check_token(huggingface_hub.get_token(), role)
            found = self._api.resolve_revision(
                wanted.repository, revision=wanted.revision, local_files_only=self.offline
            )
        self.commit = str(found.resolved)
        if not COMMIT.fullmatch(self.commit):  # it becomes the name of a folder
            what = f"the commit of {wanted}, expected 40 hex digits and not {self.commit[:60]!r}"
            raise bad_answer(what, role)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with hub_errors(self.wanted, self.role), warnings_told(self.role, self._once):
            yield

    def _once(self, note: Diagnostic) -> None:
        """The library says some things once for each file."""
        if note.message not in self._told:
            self._told.add(note.message)
            self._tell(note)

    def listed(self) -> dict[str, int] | None:
        """Size of every file by name, as the cache remembers it; None if it does not."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            with self._asking():
                found = get_cached_repo_tree(self.wanted.repository, revision=self.commit)
        except CachedRepoTreeNotFoundError:
            return None
        return {file.path: file.size for file in found}

    def files(self) -> dict[str, int] | None:
        """Size of every file by name; None if the hub may not be asked, or does not answer.

        Raises:
            HubError: The hub refuses.
        """
        if self.offline:
            return None
        if (known := self.listed()) is not None:
            return known
        try:
            with self._asking():  # unlike a listing, this does not try again for half a minute
                info = self._api.model_info(
                    self.wanted.repository, revision=self.commit, files_metadata=True
                )
        except HubError as error:
            if error.id != "hub/unreachable":
                raise
            self.offline, self._unreachable = True, error
            return None
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def lacking(self, *names: str) -> HubError:
        """The error for files that are not in the cache, when nobody can be asked for them."""
        return self._unreachable or offline_error(self.wanted, self.role, *names)

    def snapshot(self) -> Path:
        """The folder of this commit in the cache, with whatever is there.

        Raises:
            HubError: There is none.
        """
        from huggingface_hub import snapshot_download

        try:
            with self._asking():
                return Path(
                    snapshot_download(
                        self.wanted.repository,
                        revision=self.commit,
                        local_files_only=True,
                        allow_patterns=[],
                    )
                )
        except HubError as error:
            raise self._unreachable or error from error.__cause__

    def fetch(self, names: Sequence[str], progress: Progress | None = None) -> Path:
        """Bring files into the cache that are not there; returns the folder of this commit.

        Args:
            names: Of the files.
            progress: Told the bytes that have come.

        Raises:
            HubError: The hub refuses, nobody answers, or a file is not there in the end.
            ResourceError: The cache cannot be written.
        """
        from huggingface_hub import snapshot_download

        if self.offline:
            raise self.lacking(*names)
        with self._asking():
            folder = Path(
                snapshot_download(
                    self.wanted.repository,
                    revision=self.commit,
                    allow_patterns=[glob.escape(name) for name in names],
                    library_name="edgecc",
                    tqdm_class=reporter(f"download {self.wanted.repository}", progress),
                )
            )
        for name in names:
            if not os.path.lexists(folder / name):  # it named another commit with the file
                raise bad_answer(f"{name} of commit {self.commit}, which it lists", self.role)
        return folder

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes of a file, without the rest of it; several threads may read at a time.

        Raises:
            HubError: The hub refuses, nobody answers, or it gives whole files only, or other bytes.
        """
        from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if self.offline:
            raise self.lacking(name)
        url = hf_hub_url(self.wanted.repository, name, revision=self.commit)
        headers = build_hf_headers(library_name="edgecc") | {
            "Range": f"bytes={begin}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with (
            hub_errors(self.wanted, self.role),
            get_session().stream("GET", url, headers=headers, timeout=timeout) as response,
        ):
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            if begin and response.status_code != 206:
                raise self._no_ranges(name)
            given = response.headers.get("Content-Range", "").partition("-")[0]
            if given and given != f"bytes {begin}":
                raise bad_answer(f"{name} from byte {begin}, but gives {given!r}", self.role)
            data = _first(response.iter_bytes(), end - begin)
        if len(data) < end - begin:
            what = f"bytes {begin} to {end} of {name}, but gives {len(data)} of them"
            raise bad_answer(what, self.role)
        return data

    def _no_ranges(self, name: str) -> HubError:
        return HubError(
            "hub/no-ranges",
            f"the server gives {name} as a whole only, and a part of it was asked for",
            where=self.role,
            help=f"fetch the checkpoint first: {self.wanted.download}",
        )


def _first(chunks: Iterator[bytes], count: int) -> bytes:
    """The first bytes of a stream, and no more of it: some servers send whole files."""
    found = bytearray()
    for chunk in chunks:
        found += chunk
        if len(found) >= count:
            break
    return bytes(found[:count])


def _check_installed(wanted: HubId, role: str) -> None:
    try:
        import httpx2
        from huggingface_hub import HfApi, get_cached_repo_tree, is_offline_mode
    except ValueError as error:  # it reads its variables when it is loaded
        raise UsageError(
            "hub/bad-setting",
            f"huggingface_hub cannot be loaded: {error}",
            where=role,
            help="correct or unset the variable HF_... that has this value, such as HF_ENDPOINT",
        ) from error
    except ImportError as error:  # other packages bring releases that are too old
        raise UnsupportedError(
            "hub/not-installed",
            f"there is no folder {wanted}, and a model of the hub needs huggingface_hub 2.4 or "
            f"newer: {error}",
            where=role,
            help="pip install 'edgecc[hub]', or pass the folder of the checkpoint",
        ) from error
    del httpx2, HfApi, get_cached_repo_tree, is_offline_mode
