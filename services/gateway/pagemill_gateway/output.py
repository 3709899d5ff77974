"""What an HTTP request waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pagemill_gateway.choice import Choice
from pagemill_gateway.errors import ApiError

MAX_UNREAD_TOKENS = 4096
"""Tokens that wait for a client that does not read, before its request is cut."""
_UNREAD_PER_CHOICE = 64
"""The same for each of its choices, where they are so many that this is more."""


class Output:
    """News of any of the choices of an HTTP request, or an error that ends them all.

    Args:
        streaming: wake for every piece, not only at the end; and bound what waits for a client that does not read.
    """

    __slots__ = (
        "_most_unread",
        "_news",
        "_unread",
        "_waiter",
        "begun",
        "choices",
        "client_gone",
        "error",
        "open_choices",
        "streaming",
    )

    def __init__(self, choices: Sequence[Choice], streaming: bool) -> None:
        self.choices = choices
        self.streaming = streaming
        self.open_choices = len(choices)
        self.error: ApiError | None = None
        self.client_gone = False
        self.begun = False
        """Whether the first token has come."""
        self._unread = 0
        self._most_unread = max(MAX_UNREAD_TOKENS, _UNREAD_PER_CHOICE * len(choices))
        self._news: dict[Choice, None] = {}  # a set that keeps the order
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or self.client_gone or not self.open_choices

    @property
    def unread(self) -> bool:
        """Whether more waits for the client than may wait."""
        return self.streaming and self._unread > self._most_unread

    def add(self, choice: Choice, tokens: int) -> None:
        """``choice`` has so many new tokens, or has ended."""
        self._unread += tokens
        self.begun = True
        if choice.finish_reason is not None:
            self.open_choices -= 1
        self._news[choice] = None
        if self.streaming or not self.open_choices:
            self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends everything with ``error``; the first one counts."""
        if not self.done:
            self.error = error
            self._wake()

    def abandon(self) -> None:
        """The client has gone: nobody wants what is still to come."""
        if not self.done:
            self.client_gone = True
            self._wake()

    async def news(self) -> list[Choice]:
        """The choices with something new, once there is any, or none when an error or the end has come. Text that came
        before an error is given out first."""
        while not self.done and not (self._news and self.streaming):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def take(self) -> list[Choice]:
        """The choices with something new now, perhaps none."""
        news = list(self._news)
        self._news.clear()
        self._unread = 0
        return news

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
