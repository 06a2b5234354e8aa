"""From committed tokens to text: stop strings and the pieces a reader may see."""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.backends.runtime.tokenizer import Tokenizer


class StopStrings:
    """Cuts a text at the first stop string, however the text is split into pieces.

    The stop that is complete first wins; of two that are complete at the same character, the longer
    one. Text that may be the beginning of a stop is held back, so no part of one is handed out.

    Args:
        stops: The stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        """Whether the text has ended at a stop."""

    def push(self, text: str) -> str:
        """Take more text; returns what can be handed out now."""
        if self.found or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        cut = self._first_stop(text)
        if cut is not None:
            self.found = True
            self._held = ""
            return text[:cut]
        keep = self._open_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, now that nothing follows it."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Where the stop that is complete first begins."""
        places = ((text.find(stop), stop) for stop in self._stops)
        ends = [(place + len(stop), place) for place, stop in places if place >= 0]
        return min(ends)[1] if ends else None

    def _open_length(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextBuilder:
    """The text of one answer, token by token.

    Tokens after the one that completes a stop string are dropped, so the answer is the same however
    many tokens arrive together.

    Args:
        tokenizer: Decodes tokens; without one there is no text.
        stops: Stop strings.
        stop_ids: Tokens that end the text and are not part of it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str], stop_ids: frozenset[int]
    ) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._stops = StopStrings(stops)
        self._searching = bool(stops)
        self._stop_ids = stop_ids

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> tuple[Sequence[int], str]:
        """Take the tokens of a round.

        Returns:
            The tokens that belong to the answer, and the text that can be handed out now.
        """
        if self._stream is None:
            return tokens, ""
        shown = tokens[:-1] if tokens[-1] in self._stop_ids else tokens
        if not self._searching:
            return tokens, self._stream.push(shown)
        pieces = []
        for count, token in enumerate(shown, start=1):
            pieces.append(self._stops.push(self._stream.push((token,))))
            if self._stops.found:
                return tokens[:count], "".join(pieces)
        return tokens, "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self._stream is None or self._stops.found:
            return ""
        rest = self._stops.push(self._stream.finish())
        return rest + self._stops.finish()
