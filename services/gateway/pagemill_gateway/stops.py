"""Stop strings: finds the first one to be completed, and holds back every text that may still become one.

Each string has a Knuth-Morris-Pratt automaton, so that the work per character is bounded whatever the strings are, and
the answer does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The automata of a request's stop strings; its sequences share them.

    Args:
        stops: not empty, none of them "".
        include: whether the stop string itself belongs to the text.
    """

    __slots__ = ("failures", "include", "stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if not stops or "" in stops:
            raise ValueError("stop strings must be given and not be empty")
        self.stops = sorted(set(stops), key=len, reverse=True)  # the longest first: it wins a tie
        self.failures = [_failure_table(stop) for stop in self.stops]
        self.include = include

    def finder(self) -> StopFinder:
        """For a sequence without text so far."""
        return StopFinder(self)


class StopFinder:
    """Watches the text of one sequence.

    The first string to be completed ends the text; of several that end with the same character, the longest.
    """

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops", "found")

    def __init__(self, strings: StopStrings) -> None:
        self._stops, self._failures, self._include = strings.stops, strings.failures, strings.include
        self._states = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, may_stop: bool = True) -> str:
        """The text that is safe to give out now. Nothing more comes after ``found`` is set.

        Args:
            may_stop: False while min_tokens is not reached: a string that is completed here is ordinary text.
        """
        if self.found is not None:
            return ""
        for position, character in enumerate(piece):
            completed = self._step(character)
            if completed is not None and may_stop:
                self.found = completed
                text = self._held + piece[: position + 1]
                self._held = ""
                return text if self._include else text[: len(text) - len(completed)]
        text = self._held + piece
        held = max(self._states)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, now that the text has ended and can complete no stop string any more."""
        text, self._held = self._held, ""
        return text

    def _step(self, character: str) -> str | None:
        """Advances every automaton by one character. A state is the length of the longest head of its string that the
        text ends with; a completed string falls back to its longest border, so that overlapping ones are found."""
        completed = None
        for index, stop in enumerate(self._stops):
            state, failures = self._states[index], self._failures[index]
            while state and stop[state] != character:
                state = failures[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                completed = completed or stop
                state = failures[state - 1]
            self._states[index] = state
        return completed


def _failure_table(stop: str) -> list[int]:
    """[len] for each head of ``stop``: the length of its longest proper border."""
    table = [0] * len(stop)
    border = 0
    for position in range(1, len(stop)):
        while border and stop[position] != stop[border]:
            border = table[border - 1]
        if stop[position] == stop[border]:
            border += 1
        table[position] = border
    return table
