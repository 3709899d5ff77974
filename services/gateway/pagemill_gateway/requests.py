"""What the gateway knows of one request: the text of its choices, and how it ends.

An HTTP request has one :class:`Output`; each prompt in it is one :class:`GatewayRequest` (one handle in the scheduler)
with one :class:`Choice`. The scheduler client puts tokens in, the HTTP side takes text out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pagemill_gateway.detokenizer import Detokenizer
from pagemill_gateway.errors import ApiError
from pagemill_gateway.stops import StopFinder
from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Int32Array

MAX_UNREAD_TOKENS = 4096
"""Tokens that wait for a client that does not read, before its request is cut."""

_FINISH_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP_TOKEN: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class TokenLogprob:
    """One output token with its log-probability.

    Attributes:
        rank: 1 is the most likely.
        top: the most likely tokens and their log-probabilities, best first.
        piece: the token's share of the text; the pieces of all tokens joined are the text.
        offset: where ``piece`` begins in the text.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    piece: str = ""
    offset: int = 0


class Choice:
    """The text of one sequence.

    Args:
        index: its number in the HTTP response.
        prompt_token_ids: [P] what it goes on from.
        stops: finds stop strings, or None.
        min_tokens: stop strings count from this many tokens on.
        show_stop_token: whether a stop token's own text belongs to the text.
    """

    __slots__ = (
        "_detokenizer",
        "_emitted",
        "_entries",
        "_min_tokens",
        "_pieces",
        "_pushed",
        "_show_stop_token",
        "_stops",
        "_token_ids",
        "finish_reason",
        "index",
        "num_tokens",
        "prompt_token_ids",
        "stop_reason",
        "unread_tokens",
    )

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        detokenizer: Detokenizer,
        stops: StopFinder | None,
        min_tokens: int,
        show_stop_token: bool,
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.num_tokens = 0
        """Output tokens, up to the one that completed a stop string."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        """The stop string or stop token that ended it."""
        self.unread_tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._show_stop_token = show_stop_token
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._entries: deque[TokenLogprob] = deque()
        self._pushed = 0  # characters that came out of the detokenizer
        self._emitted = 0  # characters that went to the client

    def push(self, tokens: Sequence[int], finish: int, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Adds the next tokens; ``finish`` is the FinishReason after the last of them."""
        last = len(tokens) - 1
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            self.unread_tokens += 1
            self._token_ids.append(token)
            ends = finish and position == last
            piece = "" if ends and self._is_hidden_end(finish) else self._detokenizer.push(token)
            if ends:
                piece += self._detokenizer.finish()
            self._add(piece, logprobs[position] if logprobs is not None else None)
            if self.finish_reason is not None:
                return
        if finish:
            if not tokens:
                self._add(self._detokenizer.finish(), None)
            if self.finish_reason is None:
                self._end(finish, tokens[-1] if tokens else None)

    def take(self) -> tuple[str, list[TokenLogprob]]:
        """Text and log-probabilities since the last call. A token's entry comes when all its text has come."""
        text = "".join(self._pieces)
        self._pieces.clear()
        self.unread_tokens = 0
        if not self._entries:
            return text, []
        done = self.finish_reason is not None
        ready = []
        while self._entries and (done or self._entries[0].offset + len(self._entries[0].piece) <= self._emitted):
            entry = self._entries.popleft()
            entry.piece = entry.piece[: max(0, self._emitted - entry.offset)]  # a stop string has no share in the text
            ready.append(entry)
        return text, ready

    def take_token_ids(self) -> list[int]:
        """Output tokens since the last call, as counted by ``num_tokens``; they do not wait for held-back text."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    def _is_hidden_end(self, finish: int) -> bool:
        return finish == FinishReason.EOS or (finish == FinishReason.STOP_TOKEN and not self._show_stop_token)

    def _add(self, piece: str, entry: TokenLogprob | None) -> None:
        if entry is not None:
            entry.piece, entry.offset = piece, self._pushed
            self._entries.append(entry)
        self._pushed += len(piece)
        if self._stops is not None:
            piece = self._stops.push(piece, self.num_tokens >= self._min_tokens)
            if self._stops.found is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.found
        if piece:
            self._emitted += len(piece)
            self._pieces.append(piece)

    def _end(self, finish: int, token: int | None) -> None:
        if self._stops is not None:
            held = self._stops.finish()
            self._emitted += len(held)
            self._pieces.append(held)
        self.finish_reason = _FINISH_REASONS[FinishReason(finish)]
        if finish == FinishReason.STOP_TOKEN:
            self.stop_reason = token


class Output:
    """What an HTTP request waits for: news of any of its choices, or an error that ends them all.

    Args:
        streaming: wake for every piece, not only at the end; and bound what waits for a client that does not read.
    """

    __slots__ = ("_news", "_waiter", "choices", "client_gone", "error", "open_choices", "streaming")

    def __init__(self, choices: Sequence[Choice], streaming: bool) -> None:
        self.choices = choices
        self.streaming = streaming
        self.open_choices = len(choices)
        self.error: ApiError | None = None
        self.client_gone = False
        self._news: dict[Choice, None] = {}  # a set that keeps the order
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or self.client_gone or not self.open_choices

    def add(self, choice: Choice) -> None:
        """``choice`` has something new."""
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
        news = list(self._news)
        self._news.clear()
        return news

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Ending(Enum):
    """What a delivery did to a request."""

    NONE = "none"
    BY_SCHEDULER = "by scheduler"
    BY_STOP_STRING = "by stop string"
    UNREAD = "unread"
    """The client does not read: abort it."""


class Timing(Protocol):
    """Where a request reports its latencies, in seconds."""

    def first_token(self, seconds: float) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def finished(self, seconds: float, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """One prompt on its way through the scheduler.

    Attributes:
        request_id: what people call it; not a key.
        prompt_token_ids: [P]
        arrived: when the HTTP request came, on the client's clock.
        handle: the scheduler's name for it, given when it is submitted.
        cached_tokens: prompt tokens that the prefix cache held.
    """

    request_id: str
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    priority: int
    cache_salt: str
    choice: Choice
    output: Output
    timing: Timing
    arrived: float
    handle: int = 0
    cached_tokens: int = 0
    last_token: float | None = None

    def deliver(
        self, now: float, offset: int, tokens: list[int], finish: int, logprobs: list[TokenLogprob] | None
    ) -> Ending:
        """Takes the output tokens from number ``offset`` on; what it already has is skipped.

        Raises:
            ValueError: tokens are missing between what it has and ``offset``, or log-probabilities that were asked for.
        """
        if logprobs is not None and len(logprobs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens came with {len(logprobs)} log-probabilities")
        known = self.choice.num_tokens - offset
        if known < 0:
            raise ValueError(f"delivery begins at token {offset}, but only {self.choice.num_tokens} have come")
        if known:
            tokens = tokens[known:]
            logprobs = logprobs[known:] if logprobs is not None else None
        if not tokens and not finish:
            return Ending.NONE
        if tokens:
            self._observe(now)
        self.choice.push(tokens, finish, logprobs)
        self.output.add(self.choice)
        if self.choice.finish_reason is not None:
            self.timing.finished(now - self.arrived, self.choice.finish_reason)
            return Ending.BY_SCHEDULER if finish else Ending.BY_STOP_STRING
        if self.output.streaming and self.choice.unread_tokens > MAX_UNREAD_TOKENS:
            return Ending.UNREAD
        return Ending.NONE

    def _observe(self, now: float) -> None:
        if self.last_token is None:
            self.timing.first_token(now - self.arrived)
        else:
            self.timing.next_token(now - self.last_token)
        self.last_token = now
