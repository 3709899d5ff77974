"""``pagemill chat``: a conversation in the terminal, or one answer where a message is given or piped in."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pagemill.server_api import Server, ServerError, UnreachableError
from pagemill_shared.settings import ChatSettings

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_HELP = "/new forgets what was said, /bye ends (Ctrl-D, too), Ctrl-C stops an answer; a line that ends in \\ goes on"
_SHOWN_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters as pictures: what a model writes must not steer the terminal."""


@dataclass
class Conversation:
    """What was said, as the API takes it.

    Attributes:
        fields: of every request, beside its messages.
    """

    fields: dict[str, Any]
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> dict[str, Any]:
        """The request for the next answer."""
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.fields, "messages": [*system, *self.messages]}

    def answered(self, text: str) -> None:
        """An answer, or what there is of it. Where nothing came, the question was not asked."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()


class Figures:
    """Tokens of one answer and when they came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent = clock()
        self._first = self._last = 0.0
        self._first_tokens = 0
        self.tokens = 0

    def add(self, tokens: int) -> None:
        if not tokens:
            return
        self._last = self._clock()
        if not self.tokens:
            self._first, self._first_tokens = self._last, tokens
        self.tokens += tokens

    def __str__(self) -> str:
        seconds, later = self._last - self._first, self.tokens - self._first_tokens
        rate = f"{later / seconds:.1f} tokens/s, " if later and seconds else ""
        return f"{self.tokens} tokens, {rate}first after {self._first - self._sent:.2f} s"


def chat(settings: ChatSettings, message: str | None, model: str | None, system: str, fields: dict[str, Any]) -> int:
    """Talks until the input ends, or answers ``message`` alone; the exit status.

    Args:
        fields: of the request, beside model and messages.

    Raises:
        ConfigurationError: no server answers.
    """
    for stream in (sys.stdin, sys.stdout):
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    with Server(settings) as server:
        try:
            conversation = Conversation({"model": model or server.first_model(), **fields}, system)
            if message is None and sys.stdin.isatty():
                return _talk(server, conversation)
            # The line end that `echo` and editors write is no part of the message, as with `$(…)` in a shell.
            text = message if message is not None else sys.stdin.read().rstrip("\r\n")
            return _answer_once(server, conversation, text)
        except ServerError as error:
            print(f"pagemill chat: {error}", file=sys.stderr, flush=True)
            return EXIT_FAILURE
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
            return EXIT_BROKEN_PIPE


def _answer_once(server: Server, conversation: Conversation, text: str) -> int:
    if not text.strip():
        print("pagemill chat: there is no message", file=sys.stderr)
        return EXIT_FAILURE
    said = False
    try:
        for piece, _ in server.stream_chat(conversation.ask(text)):
            said = said or piece != ""  # before it is written: Ctrl-C may come right behind it
            _write(piece)
        said = True  # an answer without text is an empty line
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        if said:
            _write("\n")
    return 0


def _talk(server: Server, conversation: Conversation) -> int:
    with suppress(ImportError):
        importlib.import_module("readline")  # line editing and history for input()
    _note(f"{conversation.fields['model']}. {_HELP}")
    while (text := _read()) is not None:
        match text.strip():
            case "":
                continue
            case "/bye":
                break
            case "/new":
                conversation.messages.clear()
                _note("What was said is forgotten.")
            case "/help":
                _note(_HELP)
            case _:
                _answer(server, conversation, text)
    return 0


def _answer(server: Server, conversation: Conversation, text: str) -> None:
    """Shows one answer as it comes. Whatever ends it, the conversation goes on."""
    figures = Figures(time.monotonic)
    said: list[str] = []
    note = ""
    try:
        for piece in _pieces(server.stream_chat(conversation.ask(text)), figures):
            said.append(piece)
            _write(piece)
    except KeyboardInterrupt:
        note = "stopped"
    except (ServerError, UnreachableError) as error:
        note = str(error)
    conversation.answered("".join(said))
    if said:
        _write("\n")
    _note(", ".join(filter(None, [str(figures) if figures.tokens else "", note])))


def _pieces(stream: Iterable[tuple[str, int]], figures: Figures) -> Iterator[str]:
    for piece, tokens in stream:
        figures.add(tokens)
        if piece:
            yield piece


def _read() -> str | None:
    """What the user typed; None at the end of the input."""
    lines: list[str] = []
    while True:
        prompt = ". " if lines else "> "
        try:
            if sys.stdout.isatty():
                line = input(prompt)
            else:
                print(prompt, end="", file=sys.stderr, flush=True)
                line = input()
        except EOFError:
            _note("")
            return None
        except KeyboardInterrupt:
            _note("\nCtrl-D or /bye ends.")
            lines = []
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _write(text: str) -> None:
    sys.stdout.write(text.translate(_SHOWN_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _note(text: str) -> None:
    """A word to the user, dimmed; never part of what is piped on."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
