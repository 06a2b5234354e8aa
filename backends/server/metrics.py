"""Metrics for Prometheus, with the names and labels of vLLM's after the prefix."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgecc.backends.runtime import Chunk
from edgecc.backends.server.engine_thread import Job

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 40, 160)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2.5)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)


class Metrics:
    """Counts what the engine does: an `Observer` of its thread.

    Args:
        model_name: The label `model_name` of each metric.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._new_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with proposals.")
        self._proposed = self._counter("spec_decode_num_draft_tokens", "Tokens proposed.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Proposals accepted.")
        self._withheld = self._counter(
            "spec_decode_num_withheld_tokens", "Proposals below the confidence threshold."
        )
        self._by_position = Counter(
            "edgecc_spec_decode_num_accepted_tokens_per_pos",
            "Proposals accepted, by their place in a round.",
            ("model_name", "position"),
            registry=self._registry,
        )
        self._requests = Counter(
            "edgecc_request_success",
            "Requests that ended: stop, length, abort or error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN_S
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Time of each token after the first.", _PER_TOKEN_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _WHOLE_S
        )

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Show how many requests run and wait."""
        for name, text, read in (
            ("num_requests_running", "Requests that have a slot.", running),
            ("num_requests_waiting", "Requests that wait for one.", waiting),
        ):
            gauge = Gauge(f"edgecc_{name}", text, ("model_name",), registry=self._registry)
            gauge.labels(self._name).set_function(read)

    def progressed(self, job: Job, chunk: Chunk) -> None:
        """Count a chunk: its tokens and its rounds."""
        stats = chunk.stats
        if job.first_s is None:
            job.first_s = time.monotonic()
            self._first_token.observe(job.first_s - job.submitted_s)
            self._prompt_tokens.inc(stats.prompt_tokens)
        self._new_tokens.inc(len(chunk.token_ids))
        proposed = stats.proposed_by_round[job.rounds_seen :]
        accepted = stats.accepted_by_round[job.rounds_seen :]
        self._withheld.inc(sum(stats.withheld_by_round[job.rounds_seen :]))
        job.rounds_seen += len(proposed)
        for offered, kept in zip(proposed, accepted, strict=True):
            if offered:
                self._drafts.inc()
                self._proposed.inc(offered)
                self._accepted.inc(kept)
            for position in range(kept):
                self._by_position.labels(self._name, str(position)).inc()
        if chunk.finish_reason is not None:
            self._finished(job, stats.new_tokens, job.first_s)

    def ended(self, job: Job, reason: str) -> None:
        """Count a request."""
        self._requests.labels(self._name, reason).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def _finished(self, job: Job, tokens: int, first_s: float) -> None:
        now = time.monotonic()
        self._whole.observe(now - job.submitted_s)
        if tokens > 1:
            self._per_token.observe((now - first_s) / (tokens - 1))

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"edgecc_{name}", text, ("model_name",), registry=self._registry)
        return counter.labels(self._name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"edgecc_{name}", text, ("model_name",), buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._name)
