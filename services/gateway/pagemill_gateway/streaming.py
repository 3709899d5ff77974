"""Answers on their way out: as server-sent events, the path that every streamed token takes, or in one piece."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json.encoder import encode_basestring
from typing import Any

from pagemill_gateway.choice import Choice, TokenLogprob
from pagemill_gateway.engine import Engine, Generation
from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import Exchange, json_text
from pagemill_gateway.generation_body import GenerationBody
from pagemill_gateway.limits import timed_out
from pagemill_gateway.logprobs import finite
from pagemill_gateway.output import Output

HEADER_WAIT_S = 1.0
"""How long the status line waits for the first output, so that a refusal can still be an HTTP error."""

_DONE = "data: [DONE]\n\n"
quote = encode_basestring
"""JSON text of a string, the C implementation; the reason why pieces are put together by hand."""


class EventWriter(ABC):
    """Writes the events of one response."""

    def opening(self, choice: Choice) -> str:
        """Events before a choice's first piece."""
        return ""

    @abstractmethod
    def news(self, choice: Choice) -> str:
        """All that is new of ``choice``."""

    @abstractmethod
    def closing(self, generation: Generation) -> str:
        """The last events, when all has ended well."""

    @abstractmethod
    def failure(self, error: ApiError) -> str:
        """The last event, when it has not."""


class ChoiceEvents(EventWriter):
    """Events that each hold a piece of one choice: chat and text completions.

    Args:
        envelope: id, object, created and model, the same in all events.
        body: says whether a last event tells the usage (the others then say ``"usage": null``), and whether token ids
            and scores come along.
    """

    def __init__(self, envelope: dict[str, Any], body: GenerationBody) -> None:
        self.head = "data: " + json.dumps(envelope, ensure_ascii=False)[:-1] + ',"choices":['
        self.tail = ',"usage":null}\n\n' if body.include_usage else "}\n\n"
        self.include_usage = body.include_usage
        self.return_token_ids = body.return_token_ids
        self._ranked = body.ranked

    @abstractmethod
    def piece(self, choice: Choice, text: str, entries: Sequence[TokenLogprob], more: str) -> str:
        """The event that carries ``text``; ``more`` is JSON that goes at the end of its choice, often nothing."""

    @abstractmethod
    def ending(self, choice: Choice) -> str:
        """The event that tells the finish reason."""

    def finish(self, choice: Choice, reason: str | None) -> str:
        """JSON from the finish reason on, which is the choice's own or what the answer makes of it."""
        assert reason is not None
        score = f',"score":{finite(choice.score)}' if self._ranked else ""
        return f'{quote(reason)},"stop_reason":{json.dumps(choice.stop_reason, ensure_ascii=False)}{score}'

    def closing(self, generation: Generation) -> str:
        usage = f'{self.head}],"usage":{json.dumps(generation.usage)}}}\n\n' if self.include_usage else ""
        return usage + _DONE

    def failure(self, error: ApiError) -> str:
        return f"data: {error.encoded().decode()}\n\n"

    def news(self, choice: Choice) -> str:
        text, entries = choice.take()
        token_ids = choice.take_token_ids() if self.return_token_ids else []
        more = f',"token_ids":{token_ids}' if self.return_token_ids else ""
        events = self.piece(choice, text, entries, more) if text or entries or token_ids else ""
        return events + self.ending(choice) if choice.finish_reason is not None else events


async def send_stream(exchange: Exchange, generation: Generation, writer: EventWriter) -> None:
    """Streams until the generation has ended or the client has gone.

    Raises:
        ApiError: it ended with an error before anything was sent.
    """
    output = generation.output
    with _serving(exchange, generation):
        try:
            news = await asyncio.wait_for(output.news(), HEADER_WAIT_S)
        except TimeoutError:
            # All of it may have come at this very moment; what is done has no more news to wait for.
            news = await output.news() if output.done else []
        if output.client_gone:
            return
        if output.error is not None and not news:
            raise output.error
        await exchange.start_stream()
        news = [*dict.fromkeys([*news, *output.take()])]  # one that has ended meanwhile is written once, all of it
        events = "".join(map(writer.opening, output.choices))
        while True:
            for choice in news:
                events += writer.news(choice)
            if output.done:
                break
            if events:
                await exchange.write(events.encode())
            events = ""
            news = await output.news()
        await exchange.end_stream(_last_events(events, generation, writer))


async def send_whole(
    engine: Engine,
    exchange: Exchange,
    generation: Generation,
    size: Callable[[], int],
    answer: Callable[[], dict[str, Any]],
) -> None:
    """Sends the answer in one piece when all choices have ended, unless the client has gone.

    Args:
        size: about how many characters it has, known at the end; a large one is written off the event loop.

    Raises:
        ApiError: the generation ended with an error.
    """
    output = generation.output
    with _serving(exchange, generation):
        await output.news()
    if output.error is not None:
        raise output.error
    if not output.client_gone:
        await exchange.send_json_text(await engine.sized(size(), lambda: json_text(answer())))


@contextmanager
def _serving(exchange: Exchange, generation: Generation) -> Iterator[None]:
    """Submits the generation under the rights of the exchange's key, and ends it at the exchange's deadline.

    Raises:
        ApiError: 429 or 503, too many are open already.
    """
    if exchange.key is not None and exchange.key.priority is not None:
        generation.bound_priority(exchange.key.priority)
    output = generation.output
    with generation, _watching(exchange, output):
        if exchange.timeout is None:
            yield
            return
        left = max(0.0, exchange.began + exchange.timeout - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left, output.fail, timed_out(exchange.timeout))
        try:
            yield
        finally:
            timer.cancel()


@contextmanager
def _watching(exchange: Exchange, output: Output) -> Iterator[None]:
    """Abandons the output as soon as the client closes its connection."""

    def gone(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            output.abandon()

    watch = asyncio.ensure_future(exchange.disconnected())
    watch.add_done_callback(gone)
    try:
        yield
    finally:
        watch.cancel()


def _last_events(events: str, generation: Generation, writer: EventWriter) -> bytes:
    error = generation.output.error
    return (events + (writer.closing(generation) if error is None else writer.failure(error))).encode()
