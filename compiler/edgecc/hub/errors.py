"""What the hub's library raises and logs, as errors and findings of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgecc.errors import Diagnostic, EdgeccError, HubError, Severity
from edgecc.hub.ids import HubId

Tell = Callable[[Diagnostic], None]

_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
_ONLINE = "go online once, `{0}`, or pass the folder of a copy"


@contextmanager
def hub_errors(wanted: HubId, role: str) -> Iterator[None]:
    """Raise what goes wrong with the hub as a `HubError`.

    Files that cannot be written stay an `OSError`.
    """
    try:
        yield
    except EdgeccError:
        raise
    except Exception as error:
        found = _translated(error, wanted, role)
        if found is None:
            raise
        raise found from error


def _translated(error: Exception, wanted: HubId, role: str) -> HubError | None:
    import httpx2
    from huggingface_hub import errors as hub

    def made(id: str, message: str, help: str) -> HubError:
        notes = (f"there is no folder {wanted} either",)
        return HubError(id, message, where=role, notes=notes, help=help)

    name = wanted.repository
    match error:
        case hub.GatedRepoError():
            message = f"access to {name} is restricted"
            return made("hub/gated", message, f"accept its terms, and {_LOGIN}")
        case hub.RepositoryNotFoundError():
            message = f"the hub has no model {name}, or it is private"
            return made("hub/not-found", message, f"check the name; for a private model, {_LOGIN}")
        case hub.RevisionNotFoundError():
            message = f"{name} has no branch, tag or commit {wanted.revision!r}"
            return made("hub/no-revision", message, "leave out @revision for the default branch")
        case hub.LocalEntryNotFoundError() | hub.OfflineModeIsEnabled():
            return offline_error(wanted, role)
        case hub.RevisionResolutionError() if error.__cause__ is None:
            return offline_error(wanted, role)
        case hub.HfHubHTTPError() if error.response.status_code < 500:
            message = f"the hub refused {name}: {_reason(error)}"
            return made("hub/refused", message, f"try again later; if it stays so, {_LOGIN}")
        case hub.RevisionResolutionError() | hub.FileMetadataError() | httpx2.HTTPError():
            message = f"the hub cannot be reached for {name}: {_reason(error.__cause__ or error)}"
            return made("hub/unreachable", message, _ONLINE.format(wanted.download))
        case hub.XetDownloadError():
            message = f"the download of {name} failed: {_reason(error)}"
            return made("hub/unreachable", message, "try again: what has come is kept")
    return None


def offline_error(wanted: HubId, role: str, *missing: str) -> HubError:
    """The error for what is not in the cache when the hub may not be asked."""
    what = f"has no {', '.join(missing[:3])} of {wanted}" if missing else f"has no {wanted}"
    return HubError(
        "hub/offline",
        f"the hub may not be asked (offline), and its cache {what}",
        where=role,
        notes=(f"there is no folder {wanted} either", *missing[3:6]),
        help=_ONLINE.format(wanted.download),
    )


def _reason(error: BaseException) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def warnings_told(role: str, tell: Tell) -> Iterator[None]:
    """Tell what the library logs, such as that it goes by its cache, in place of printing it."""
    logger = logging.getLogger("huggingface_hub")
    before, passes_on = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [_Teller(role, tell)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, passes_on


class _Teller(logging.Handler):
    def __init__(self, role: str, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self._role, self._tell = role, tell

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        self._tell(
            Diagnostic(
                "hub/library",
                message,
                where=self._role,
                severity=Severity.NOTE,
                help="nothing to do if that is what you expect",
            )
        )
