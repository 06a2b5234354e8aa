"""Stop strings, whatever pieces a text comes in."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from edgecc.backends.runtime.text import StopStrings

TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule: character by character, until the text ends with a stop; then the longest one."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def split(text: str, sizes: list[int]) -> list[str]:
    pieces, place = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[place : place + size])
        place += size
    return pieces


@given(text=TEXT, stops=STOPS, sizes=st.lists(st.integers(0, 7)))
@example(text="xcompute", stops=["compute", "mpu"], sizes=[])
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    filter_ = StopStrings(stops)
    shown = "".join(filter_.push(piece) for piece in split(text, sizes))
    assert (shown + filter_.finish(), filter_.found) == cut(text, stops)


@given(text=TEXT, stops=STOPS, sizes=st.lists(st.integers(0, 7)))
def test_no_part_of_a_stop_is_shown_and_no_more_is_held_back_than_needed(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    filter_ = StopStrings(stops)
    whole, _ = cut(text, stops)
    shown = taken = ""
    for piece in split(text, sizes):
        taken += piece
        shown += filter_.push(piece)
        assert whole.startswith(shown)
        if not filter_.found:
            held = taken[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)


def test_nothing_is_shown_after_a_stop() -> None:
    filter_ = StopStrings(["b"])
    assert [filter_.push(piece) for piece in ("a", "ab", "a", "b")] == ["a", "a", "", ""]
    assert filter_.finish() == ""
