"""From the flags of `edgecc serve` and the environment to the options of the server."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgecc.errors import Diagnostic, Severity, UsageError
from edgecc.paths import local_path

if TYPE_CHECKING:
    from edgecc.backends.server import ServerOptions

KEY_VARIABLE = "EDGECC_API_KEY"


def server_options(model_name: str, flags: Mapping[str, Any]) -> ServerOptions:
    """Options of the server.

    Args:
        model_name: Of the model, where no flag says another.
        flags: Of the command `serve`.

    Raises:
        UsageError: A value cannot be used.
    """
    from edgecc.backends.server import ServerOptions

    if flags["api_key"] is not None:
        raise UsageError(
            "usage/api-key",
            "an API key on the command line can be read by other users of the machine",
            help=f"set the variable {KEY_VARIABLE}",
        )
    name = flags["served_model_name"]
    return ServerOptions(
        model_name=model_name if name is None else name,
        api_keys=_api_keys(),
        max_queued_requests=flags["max_queued_requests"],
        queue_timeout_s=flags["queue_timeout"],
        max_request_bytes=flags["max_request_bytes"],
        num_speculative_tokens=flags["num_speculative_tokens"],
        speculation=not flags["no_speculation"],
        confidence_threshold=flags["confidence_threshold"],
        strict=flags["strict"],
        metrics=flags["metrics"],
        chat_page=flags["chat_page"],
        chat_template=_template(flags["chat_template"]),
    )


def open_to_all(host: str, options: ServerOptions) -> Diagnostic | None:
    """A warning about a server that strangers can use; None if there are keys or no strangers."""
    if options.api_keys or _is_local(host):
        return None
    return Diagnostic(
        "serve/no-key",
        f"whoever reaches {host} can use the model",
        help=f"set {KEY_VARIABLE}, or leave out --host",
        severity=Severity.WARNING,
    )


def _api_keys() -> tuple[str, ...]:
    """The keys of the environment.

    Raises:
        UsageError: The variable is set and has none: then nobody would be kept out.
    """
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return ()
    keys = tuple(key for key in re.split(r"[,\s]+", text) if key)
    if not keys:
        raise UsageError(
            "usage/api-key", f"{KEY_VARIABLE} is set, but has no key", help="set or unset it"
        )
    return keys


def _template(name: str | None) -> str | None:
    if name is None:
        return None
    path = local_path(name, "chat template")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            "usage/chat-template", f"cannot be read: {error}", where=str(path)
        ) from error


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
