"""One function call as models write it, ``{"name": "f", "arguments": {…}}``, read character by character.

What comes out does not depend on how the text was cut into pieces, because nothing here looks at more than one
character and what it remembers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_BLANKS = frozenset(" \t\r\n")


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call whose name is known; ``index`` counts the calls of an answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of the call that began last, as JSON text."""

    text: str


ToolEvent = Content | CallBegins | Arguments


class Progress(Enum):
    """How far a value or a call has come."""

    GOES_ON = auto()
    DONE = auto()
    BROKEN = auto()
    """What stands there is no such thing."""


class ValueScanner:
    """Finds the end of a JSON value. It need not be valid: brackets and quotes are counted."""

    __slots__ = ("_depth", "_escaped", "_primitive", "_quoted", "begun")

    def __init__(self) -> None:
        self.begun = False
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._primitive = False

    def push(self, character: str) -> Progress:
        """Takes the next character. DONE with the last one of the value; of a number or word, which nothing but what
        follows ends, BROKEN with that first character behind it."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
                return self._unless_nested()
            return Progress.GOES_ON
        if self._primitive:
            return Progress.BROKEN if character in ",]}" or character in _BLANKS else Progress.GOES_ON
        if character == '"':
            self.begun = self._quoted = True
        elif character in "[{":
            self.begun = True
            self._depth += 1
        elif character == "<":  # nowhere in JSON, but it begins the tag that models forget to close brackets before
            return Progress.BROKEN
        elif character in "]}":
            if not self._depth:
                return Progress.BROKEN
            self._depth -= 1
            return self._unless_nested()
        elif not self._depth:
            if character in _BLANKS:
                return Progress.GOES_ON
            if character in ",:":
                return Progress.BROKEN
            self.begun = self._primitive = True
        return Progress.GOES_ON

    def _unless_nested(self) -> Progress:
        return Progress.GOES_ON if self._depth else Progress.DONE


class _Place(Enum):
    BEFORE = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    DONE = auto()


class CallScanner:
    """Reads one call. Keys may come in any order; other keys than name and arguments are passed over.

    Args:
        index: of the call, for the event that begins it.
        names: of the functions that may be called; an object with another name is no call.
    """

    def __init__(self, index: int, names: frozenset[str]) -> None:
        self.begun = False
        """Whether the name is known and the call was told of."""
        self.raw = ""
        """All that was read so far, until the call has begun."""
        self._index, self._names = index, names
        self._place = _Place.BEFORE
        self._key = ""
        self._text = ""  # of the key or value being read
        self._value = ValueScanner()
        self._held = ""  # arguments that came before the name
        self._any_arguments = False

    @property
    def cut(self) -> bool:
        """Whether the call has begun and its arguments are not all there."""
        inside = self._place is _Place.VALUE and self._key in ARGUMENT_KEYS
        return self.begun and (inside or not self._any_arguments)

    def push(self, character: str, events: list[ToolEvent]) -> Progress:
        """Takes the next character and adds what it makes known. BROKEN at the first that cannot belong to a call;
        a call that has begun stays begun."""
        if not self.begun:
            self.raw += character
        place = self._place
        if place is _Place.VALUE:
            return self._push_value(character, events)
        if place is _Place.KEY:
            self._text += character
            if self._value.push(character) is Progress.DONE:
                return self._end_key()
            return Progress.GOES_ON
        if character in _BLANKS:
            return Progress.GOES_ON
        if place is _Place.BEFORE and character == "{":
            self._place = _Place.KEY_OR_END
        elif place is _Place.KEY_OR_END and character == '"':
            self._place, self._text, self._value = _Place.KEY, character, ValueScanner()
            self._value.push(character)
        elif place is _Place.KEY_OR_END and character == "}":
            return self._end(events)
        elif place is _Place.COLON and character == ":":
            self._place, self._text, self._value = _Place.VALUE, "", ValueScanner()
        elif not (place is _Place.KEY_OR_END and character == ","):
            return Progress.BROKEN
        return Progress.GOES_ON

    def _end_key(self) -> Progress:
        key = _decoded(self._text)
        if key is None:
            return Progress.BROKEN
        self._key, self._place = key, _Place.COLON
        return Progress.GOES_ON

    def _push_value(self, character: str, events: list[ToolEvent]) -> Progress:
        progress = self._value.push(character)
        if not self._value.begun:
            return progress
        outside = progress is Progress.BROKEN  # behind a number or word
        is_arguments = self._key in ARGUMENT_KEYS
        if not outside:
            if is_arguments and (self._text[:1] or character) in "[{":
                self._text = self._text or character
                self._add_arguments(character, events)
            else:
                self._text += character
        if progress is Progress.GOES_ON:
            return progress
        self._place = _Place.KEY_OR_END
        if self._key == "name":
            if (broken := self._name_is(_decoded(self._text), events)) is not None:
                return broken
        elif is_arguments and self._text[:1] not in ("[", "{"):
            # A text that holds the arguments, or nothing at all.
            text = _decoded(self._text)
            self._add_arguments("{}" if text is None else text, events)
        if outside:
            if not self.begun:
                self.raw = self.raw[:-1]
            return self.push(character, events)
        return Progress.GOES_ON

    def _name_is(self, name: str | None, events: list[ToolEvent]) -> Progress | None:
        if self.begun or name not in self._names:
            return Progress.BROKEN
        self.begun, self.raw = True, ""
        events.append(CallBegins(self._index, name))
        if self._held:
            events.append(Arguments(self._held))
            self._held = ""
        return None

    def _add_arguments(self, text: str, events: list[ToolEvent]) -> None:
        self._any_arguments = True
        if self.begun:
            events.append(Arguments(text))
        else:
            self._held += text

    def _end(self, events: list[ToolEvent]) -> Progress:
        if not self.begun:
            return Progress.BROKEN
        if not self._any_arguments:
            self._add_arguments("{}", events)
        self._place = _Place.DONE
        return Progress.DONE


def _decoded(text: str) -> str | None:
    """The string that JSON ``text`` stands for, None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
