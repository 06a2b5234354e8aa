"""What a server can be told besides its bundle."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgecc.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a bundle is served.

    Attributes:
        model_name: The name that requests give as `model`.
        api_keys: Keys of which each request must have one; none are needed if there are none.
        max_queued_requests: Answers that may wait for a slot; more are refused with 429.
        queue_timeout_s: How long one waits before it is refused with 503.
        max_request_bytes: Longest body of a request; longer ones are refused with 413.
        num_speculative_tokens: Proposals per round where a request does not say; None means as
            many as were compiled.
        speculation: Use the draft, unless a request says no.
        confidence_threshold: Verify no proposal that the draft is less sure of, where a request
            does not say; None verifies all.
        strict: Refuse fields that are unknown, instead of naming them in a header.
        metrics: Whether there is `/metrics`.
        chat_page: Whether there is a page to chat with at `/`.
        chat_template: Text of a template to use instead of the bundle's.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_queued_requests: int = 16
    queue_timeout_s: float = 600.0
    max_request_bytes: int = 32 * 2**20
    num_speculative_tokens: int | None = None
    speculation: bool = True
    confidence_threshold: float | None = None
    strict: bool = False
    metrics: bool = True
    chat_page: bool = True
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not self.model_name.strip():
            raise UsageError("usage/model-name", "the name of the model is empty")
        if self.max_queued_requests < 0:
            raise UsageError(
                "usage/queue", f"max_queued_requests is {self.max_queued_requests}, expected 0 on"
            )
        if not (math.isfinite(self.queue_timeout_s) and self.queue_timeout_s > 0):
            raise UsageError(
                "usage/queue", f"the queue timeout is {self.queue_timeout_s}, expected seconds"
            )
        if self.max_request_bytes < 1:
            raise UsageError(
                "usage/request-size",
                f"max_request_bytes is {self.max_request_bytes}, expected 1 on",
            )
        if any(not key.isascii() or not key for key in self.api_keys):
            raise UsageError("usage/api-key", "an API key is empty or not ASCII")
