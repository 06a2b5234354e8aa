"""What the hub's library raises and logs, as errors and findings of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgecc.errors import Diagnostic, EdgeccError, HubError, ResourceError, Severity, UsageError
from edgecc.hub.ids import HubId

Tell = Callable[[Diagnostic], None]

_SHORT, _LONGEST = 24, 300
"""A line this short says too little; one this long says more than anybody reads."""
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
_ONLINE = "go online once, `{0}`, or pass the folder of a copy"
_OTHER_SERVER = (
    "look whether HF_ENDPOINT or a proxy answers in the hub's place; otherwise fetch it anew: "
    "hf download --force-download"
)


@contextmanager
def hub_errors(wanted: HubId, role: str) -> Iterator[None]:
    """Raise what goes wrong with the hub as a `HubError`, or as a `ResourceError` of its cache.

    The block calls nothing but the library: whatever else it raises is an answer, or a file of its
    cache, that it cannot read.
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


_UNREADABLE = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the library raises when an answer, or a file of its cache, is not as it should be."""


def _translated(error: BaseException, wanted: HubId, role: str) -> EdgeccError | None:
    """An error of ours for one of the library's; None if it is none that the library raises."""
    from huggingface_hub import errors as hub

    not_cached = isinstance(error, hub.LocalEntryNotFoundError | hub.RevisionResolutionError)
    if not_cached and error.__cause__ is not None:  # why the hub did not help
        return _translated(error.__cause__, wanted, role) or offline_error(wanted, role)
    told = _refused(error, wanted) or _failed(error, wanted)
    if told is not None:
        id, message, help = told
        notes = (f"there is no folder {wanted} either",)
        return HubError(id, message, where=role, notes=notes, help=help)
    if not_cached or isinstance(error, hub.OfflineModeIsEnabled):
        return offline_error(wanted, role)
    return _of_the_cache(error, role) if isinstance(error, OSError) else None


def _refused(error: BaseException, wanted: HubId) -> tuple[str, str, str] | None:
    """Id, message and help for what the hub says no to."""
    from huggingface_hub import errors as hub

    name = wanted.repository
    match error:
        case hub.GatedRepoError():
            message = f"access to {name} is restricted"
            return "hub/gated", message, f"accept its terms, and {_LOGIN}"
        case hub.RepositoryNotFoundError():
            message = f"the hub has no model {name}, or it is private"
            return "hub/not-found", message, f"check the name; for a private model, {_LOGIN}"
        case hub.RevisionNotFoundError() if wanted.revision is not None:
            message = f"{name} has no branch, tag or commit {wanted.revision!r}"
            return "hub/no-revision", message, "leave out @revision for the default branch"
        case hub.RevisionNotFoundError():
            message = f"{name} has no default branch, or lacks the commit that it is at"
            return "hub/no-revision", message, f"name a commit: {name}@COMMIT"
        case hub.HfHubHTTPError() if error.response.status_code < 500:
            message = f"the hub refused {name}: {_reason(error)}"
            return "hub/refused", message, f"try again later; if it stays so, {_LOGIN}"
    return None


def _failed(error: BaseException, wanted: HubId) -> tuple[str, str, str] | None:
    """Id, message and help for answers that do not come, or cannot be understood."""
    import httpx2
    from huggingface_hub import errors as hub

    name = wanted.repository
    match error:
        case httpx2.InvalidURL() | httpx2.UnsupportedProtocol():
            message = f"the hub cannot be asked for {name}: {_reason(error)}"
            return "hub/unreachable", message, "set HF_ENDPOINT to a URL, or unset it"
        case httpx2.HTTPError():
            message = f"the hub cannot be reached for {name}: {_reason(error)}"
            return "hub/unreachable", message, _ONLINE.format(wanted.download)
        case hub.XetDownloadError():
            message = f"the download of {name} failed: {_reason(error)}"
            return "hub/unreachable", message, "try again: what has come is kept"
        case hub.FileMetadataError():
            message = f"the hub does not say which version of a file of {name} it has"
            return "hub/bad-answer", message, _OTHER_SERVER
        case _ if isinstance(error, _UNREADABLE):
            reason = f"{type(error).__name__}: {_reason(error)}"
            message = f"what the hub or its cache has of {name} cannot be read: {reason}"
            return "hub/bad-answer", message, _OTHER_SERVER
    return None


def check_token(token: str | None, role: str) -> None:
    """Refuse a token that cannot be sent: errors about it would show it.

    Raises:
        UsageError: It has characters that no token has.
    """
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UsageError(
            "hub/bad-setting",
            "the token of the hub has characters that cannot be sent",
            where=role,
            help="set HF_TOKEN to the token alone, or log in again with `hf auth login`",
        )


def bad_answer(what: str, role: str) -> HubError:
    """The error for a hub that does not give what it is asked for.

    Args:
        what: What was asked for, and what came.
        role: How messages call the checkpoint.
    """
    message = f"the hub was asked for {what}"
    return HubError("hub/bad-answer", message, where=role, help=_OTHER_SERVER)


def _of_the_cache(error: OSError, role: str) -> EdgeccError:
    """The error for files of the cache that cannot be read, written, or come damaged."""
    if error.errno is None:  # the library found other bytes than it was told of
        return HubError(
            "hub/bad-answer",
            f"what came is not the file that the hub lists: {_reason(error)}",
            where=role,
            help="try again; if it stays so, fetch the file anew: hf download --force-download",
        )
    where = f": {error.filename}" if error.filename else ""
    return ResourceError(
        "hub/cache",
        f"the hub's cache cannot be used: {error.strerror}{where}",
        where=role,
        help="set HF_HOME or HF_HUB_CACHE to a folder that can be written and has room",
    )


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
    """The first line that says something, with the next if it does not end there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and (lines[0].endswith(":") or len(lines[0]) < _SHORT):
        lines[:2] = [" ".join(lines[:2])]
    return lines[0][:_LONGEST] if lines else type(error).__name__


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
