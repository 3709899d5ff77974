"""Stop strings, against a search through the whole text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_gateway.stops import StopStrings

_LETTERS = st.text("ab", min_size=1, max_size=4)


def whole_text_search(text: str, stops: list[str], first_end: int = 0) -> tuple[int, str] | None:
    """Where the first stop string to be completed after ``first_end`` characters begins, and which it is."""
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > first_end
    ]
    return min(found)[1:] if found else None


def cut(text: str, edges: list[int]) -> list[str]:
    bounds = sorted({min(edge, len(text)) for edge in edges} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(deadline=None)
@given(
    st.text("ab", max_size=24), st.lists(_LETTERS, min_size=1, max_size=4), st.lists(st.integers(0, 24)), st.booleans()
)
def test_any_cut_of_the_text_gives_what_a_whole_text_search_gives(
    text: str, stops: list[str], edges: list[int], include: bool
) -> None:
    finder = StopStrings(stops, include).finder()
    pieces = [finder.push(piece) for piece in cut(text, edges)]
    given_out = "".join(pieces)
    match = whole_text_search(text, stops)
    if match is None:
        assert finder.found is None
        assert given_out + finder.finish() == text
    else:
        start, stop = match
        assert finder.found == stop
        assert given_out == text[: start + len(stop) if include else start]
        assert finder.finish() == ""


@settings(deadline=None)
@given(st.text("ab", max_size=24), st.lists(_LETTERS, min_size=1, max_size=4))
def test_no_head_of_a_stop_string_is_given_out_early_and_nothing_else_is_held(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops, include=False).finder()
    out = ""
    for position, character in enumerate(text, 1):
        out += finder.push(character)
        if finder.found:
            return
        seen = text[:position]
        longest = max(length for stop in stops for length in range(len(stop)) if seen.endswith(stop[:length]))
        assert out == seen[: position - longest]


@settings(deadline=None)
@given(st.text("ab", max_size=24), st.lists(_LETTERS, min_size=1, max_size=4), st.integers(0, 24))
def test_a_string_that_is_completed_before_min_tokens_is_text(text: str, stops: list[str], first: int) -> None:
    finder = StopStrings(stops, include=False).finder()
    out = "".join(finder.push(character, may_stop=i >= first) for i, character in enumerate(text))
    match = whole_text_search(text, stops, first)
    if match is None:
        assert out + finder.finish() == text
    else:
        assert (out, finder.found) == (text[: match[0]], match[1])


def test_a_stop_string_longer_than_any_piece() -> None:
    finder = StopStrings(["fox jumps over"], include=False).finder()
    assert [finder.push(piece) for piece in ("quick ", "fo", "x ju", "mps", " ov")] == ["quick ", "", "", "", ""]
    assert finder.push("er the") == ""
    assert finder.found == "fox jumps over"
    assert finder.push("more") == ""


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="not be empty"):
        StopStrings(stops, include=False)
