"""Answers to text and function calls, in the formats of Hermes and Qwen, Llama 3, and Mistral.

A parser takes the text of one answer, in pieces, as it is made, and says what is content, which calls begin and how
their arguments go on. However the text is cut into pieces, the joined result is the same. Text that only looks like a
call (another name, no JSON) stays content, as does a call of which not even the name is complete at the end. Blanks
before a call and behind the last one are dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pagemill_gateway.tool_calls import Arguments, CallBegins, CallScanner, Content, Progress, ToolEvent, ValueScanner

_BLANKS = " \t\r\n"


class ToolCallParser(ABC):
    """Reads one answer.

    Args:
        names: of the functions that may be called.
        most: calls after so many are passed over.
    """

    def __init__(self, names: frozenset[str], most: int) -> None:
        self.calls = 0
        """How many have begun."""
        self.cut = False
        """Whether the last call that was told of has not all its arguments, as far as the answer goes."""
        self._names, self._most = names, most
        self._events: list[ToolEvent] = []
        self._blanks = ""  # content that is dropped if a call is next to it

    def push(self, text: str) -> list[ToolEvent]:
        """What the next piece makes known; neighbours of a kind are joined."""
        for character in text:
            self._take(character)
        return self._told()

    def finish(self) -> list[ToolEvent]:
        """What is still held back at the end of the answer."""
        self._end()
        if not self.calls:
            self._events.append(Content(self._blanks))
        self._blanks = ""
        return self._told()

    @abstractmethod
    def _take(self, character: str) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def _content(self, text: str) -> None:
        for character in text:
            if character in _BLANKS:
                self._blanks += character
                continue
            self._events.append(Content(self._blanks + character))
            self._blanks = ""

    def _new_call(self) -> CallScanner:
        return CallScanner(self.calls, self._names)

    def _tell(self, events: Sequence[ToolEvent], cut: bool) -> None:
        """Passes on what a scanner has told of a call; ``cut`` as above."""
        for event in events:
            if isinstance(event, CallBegins):
                self.calls += 1
                self._blanks = ""
            if self.calls <= self._most:
                self._events.append(event)
        if self.calls <= self._most:
            self.cut = cut

    def _told(self) -> list[ToolEvent]:
        joined: list[ToolEvent] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if isinstance(event, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + event.text)
            elif isinstance(event, Arguments) and isinstance(last, Arguments):
                joined[-1] = Arguments(last.text + event.text)
            elif not (isinstance(event, Content) and not event.text):
                joined.append(event)
        self._events = []
        return joined


class _Tag:
    """Looks for a fixed text; what cannot be its beginning any more comes back."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.held = ""

    def push(self, character: str) -> tuple[str, bool]:
        """Text that is not the tag's, and whether the tag is complete."""
        self.held += character
        free = ""
        while not self.text.startswith(self.held):
            free, self.held = free + self.held[0], self.held[1:]
        if self.held == self.text:
            self.held = ""
            return free, True
        return free, False

    def finish(self) -> str:
        held, self.held = self.held, ""
        return held


class TaggedParser(ToolCallParser):
    """Content, then calls between tags, each an object: ``<tool_call>{…}</tool_call>`` (Hermes, Qwen)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: frozenset[str], most: int) -> None:
        super().__init__(names, most)
        self._open, self._close = _Tag(self.OPEN), _Tag(self.CLOSE)
        self._call: CallScanner | None = None
        self._closing = False  # behind a call, before its tag

    def _take(self, character: str) -> None:
        if self._call is not None:
            self._take_call(self._call, character)
        elif self._closing:
            self._take_closing(character)
        else:
            free, found = self._open.push(character)
            self._content(free)
            if found:
                self._call = self._new_call()

    def _take_call(self, call: CallScanner, character: str) -> None:
        events: list[ToolEvent] = []
        progress = call.push(character, events)
        self._tell(events, call.cut)
        if progress is Progress.GOES_ON:
            return
        self._call = None
        if call.begun:
            self._closing = True
            if progress is Progress.BROKEN:
                self._take_closing(character)
        else:
            self._content(self.OPEN + call.raw)

    def _take_closing(self, character: str) -> None:
        """Models forget the last brace, write one too many, or the next tag at once."""
        free, found = self._close.push(character)
        rest = free.strip(_BLANKS + "}")
        if found or rest:
            self._closing = False
            held = self._close.finish()
            for left in "" if found else free.lstrip(_BLANKS + "}") + held:
                self._take(left)

    def _end(self) -> None:
        if self._call is not None and not self._call.begun:
            self._content(self.OPEN + self._call.raw)
        self._content(self._open.finish())


class Llama3Parser(ToolCallParser):
    """An answer that begins with an object (or with ``<|python_tag|>`` and one) is calls, joined by semicolons."""

    TAG = "<|python_tag|>"

    def __init__(self, names: frozenset[str], most: int) -> None:
        super().__init__(names, most)
        self._tag = _Tag(self.TAG)
        self._call: CallScanner | None = None
        self._prefix = ""  # what stood before the object, in case it is none
        self._may_begin = True

    def _take(self, character: str) -> None:
        if self._call is not None:
            self._take_call(self._call, character)
            return
        free, found = self._tag.push(character)
        if found:
            self._content(free)
            self._may_begin, self._prefix = True, self.TAG
            return
        for left in free:
            self._take_free(left)

    def _take_free(self, character: str) -> None:
        if self._may_begin and character == "{":
            self._call = self._new_call()
            self._take_call(self._call, character)
        elif self._may_begin and (character in _BLANKS or (self.calls and character == ";")):
            if self._prefix:
                self._prefix += character
            elif not self.calls:
                self._content(character)
        else:
            self._content(self._prefix + character)
            self._may_begin, self._prefix = False, ""

    def _take_call(self, call: CallScanner, character: str) -> None:
        events: list[ToolEvent] = []
        progress = call.push(character, events)
        self._tell(events, call.cut)
        if progress is Progress.GOES_ON:
            return
        self._call = None
        if not call.begun:
            self._may_begin = False
            self._content(self._prefix + call.raw)
        self._prefix = ""

    def _end(self) -> None:
        if self._call is not None and not self._call.begun:
            self._content(self._prefix + self._call.raw)
        elif self._call is None:
            self._content(self._prefix)
        self._content(self._tag.finish())


class MistralParser(ToolCallParser):
    """Content, then ``[TOOL_CALLS]`` with a list of objects, or with ``name{…}`` or ``name[ARGS]{…}`` for each call."""

    TAG = "[TOOL_CALLS]"
    ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, names: frozenset[str], most: int) -> None:
        super().__init__(names, most)
        self._tag = _Tag(self.TAG)
        self._raw = ""  # since the tag, in case that it is no call
        self._inside = False  # behind the tag
        self._list = False
        self._call: CallScanner | None = None
        self._head: str | None = None  # the name and what follows it up to the arguments
        self._value: ValueScanner | None = None

    def _take(self, character: str) -> None:
        if self._value is not None:
            self._take_arguments(self._value, character)
        elif self._call is not None:
            self._take_call(self._call, character)
        elif self._head is not None:
            self._take_head(self._head, character)
        elif self._list:
            self._take_between(character)
        elif self._inside:
            self._take_first(character)
        else:
            free, found = self._tag.push(character)
            self._content(free)
            if found:
                self._inside, self._raw = True, self.TAG

    def _take_first(self, character: str) -> None:
        self._raw += character
        if character in _BLANKS:
            return
        self._inside = False
        if character == "[":
            self._list = True
        else:
            self._head = ""
            self._raw = self._raw[:-1]
            self._take_head("", character)

    def _take_between(self, character: str) -> None:
        """In a list, before a call, or behind one."""
        if character == "{":
            self._call = self._new_call()
            self._take_call(self._call, character)
            return
        self._raw += character
        if character == "]":
            self._list = False
        elif character not in _BLANKS + ",":
            self._give_up()

    def _take_call(self, call: CallScanner, character: str) -> None:
        self._raw += character
        events: list[ToolEvent] = []
        progress = call.push(character, events)
        self._tell(events, call.cut)
        if call.begun:
            self._raw = ""
        if progress is Progress.GOES_ON:
            return
        self._call = None
        if not call.begun:
            self._give_up()

    def _take_head(self, head: str, character: str) -> None:
        self._raw += character
        if character == "{":
            name = head.partition("[")[0].strip(_BLANKS)
            if name not in self._names:
                self._give_up()
                return
            self._head, self._value, self._raw = None, ValueScanner(), ""
            self._tell([CallBegins(self.calls, name)], cut=True)
            self._take_arguments(self._value, character)
        elif len(head) > 256:
            self._give_up()
        else:
            self._head = head + character

    def _take_arguments(self, value: ValueScanner, character: str) -> None:
        progress = value.push(character)
        self._tell([Arguments(character)], cut=progress is Progress.GOES_ON)
        if progress is not Progress.GOES_ON:
            self._value = None

    def _give_up(self) -> None:
        """What came since the tag is no call after all."""
        raw, self._raw = self._raw, ""
        self._head = self._call = None
        self._list = self._inside = False
        self._content(raw)

    def _end(self) -> None:
        if self._call is not None and self._call.begun:
            return
        if self._value is None and (self._inside or self._head is not None or self._call is not None or self._list):
            if self._list and self._call is None and self.calls:
                return
            self._give_up()
        self._content(self._tag.finish())
