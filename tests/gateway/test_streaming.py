"""Streams that do not go as planned: clients that leave or do not read, schedulers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.raw_client import RawClient
from pagemill_testing.scripts import Script
from pagemill_testing.sockets import PATIENCE, wait_until
from structlog.testing import capture_logs

from pagemill_gateway import http_protocol
from pagemill_gateway.choice import Choice
from pagemill_gateway.exchange import Exchange
from pagemill_gateway.output import MAX_UNREAD_TOKENS, Output
from pagemill_gateway.streaming import send_stream
from pagemill_gateway.tokenizer import TextTokenizer
from pagemill_shared.messages import FinishReason

PATH = "/v1/completions"


def many_logprobs(token: int) -> tuple[list[int], list[float]]:
    """Makes about a kilobyte of an event."""
    return [token, *range(100, 120)], [-0.5] * 21


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_in_the_scheduler(api: Stage, stream: bool) -> None:
    api.stub.replay(ids("one two three"), FinishReason.NOT_FINISHED)
    with RawClient(api.gateway.port, prompt="x", stream=stream) as client:
        handle = api.stub.wait_for(lambda: api.stub.submitted)[0].handle
        if stream:
            client.read_until("three")
    api.stub.wait_for(lambda: api.stub.aborted)
    assert api.stub.aborted == [handle]
    assert not api.stub.running


def test_a_client_that_leaves_before_any_output_aborts_too(api: Stage) -> None:
    api.stub.replay([], FinishReason.NOT_FINISHED)
    for stream in (True, False):
        with RawClient(api.gateway.port, prompt=["x", "y"], stream=stream):
            api.stub.wait_for(lambda: api.stub.running == 2)
        api.stub.wait_for(lambda: not api.stub.running)
    assert len(api.stub.aborted) == 4


def test_many_clients_that_leave_leave_nothing_behind(api: Stage) -> None:
    for _ in range(5):
        api.stub.replay(ids("one two"), FinishReason.NOT_FINISHED)
        clients = [RawClient(api.gateway.port, prompt="x", stream=True) for _ in range(16)]
        api.stub.wait_for(lambda: api.stub.running == 16)
        for client in clients:
            client.socket.close()
        api.stub.wait_for(lambda: not api.stub.running)
    api.stub.replay(ids("fine"))
    assert api.post(PATH, prompt="x").json()["choices"][0]["text"] == "fine"


def test_a_stream_without_output_still_gets_its_head(api: Stage) -> None:
    api.stub.replay([], FinishReason.NOT_FINISHED)
    with api.client.stream("POST", "/v1/chat/completions", json=chat_body()) as response:
        assert response.status_code == 200
        first = json.loads(next(response.iter_lines()).removeprefix("data: "))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def chat_body() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_after_some_text_is_told(api: Stage, stream: bool) -> None:
    api.stub.replay(ids("one two three"), FinishReason.NOT_FINISHED)
    with RawClient(api.gateway.port, prompt="x", stream=stream) as client:
        running = api.stub.wait_for(lambda: [r for g in api.stub.gateways.values() for r in g.running.values()])
        api.stub.wait_for(lambda: running[0].all_sent)
        api.stub.fail("no_worker", "the last worker is gone")
        data = client.read_all().decode()
    if stream:
        assert "".join(re.findall(r'"text":"([^"]*)"', data)) == "one two three"
        assert '"finish_reason":"' not in data
        assert "[DONE]" not in data
        event = data[data.rindex("data: ") :].partition("\n\n")[0]
        error = json.loads(event.removeprefix("data: "))["error"]
    else:
        assert data.startswith("HTTP/1.1 503")
        assert "retry-after: " in data
        error = json.loads(data.partition("\r\n\r\n")[2])["error"]
    assert error["message"] == "the last worker is gone"
    assert error["code"] == "no_worker"
    assert error["type"] == "service_unavailable_error"


def streamed(output: Output, while_sending: Callable[[str], None] = lambda kind: None) -> bytes:
    """What a client gets of ``output``: the name of each choice that had news, then an end.

    Args:
        while_sending: what happens before a message of this ASGI type has been sent.
    """

    class Writer:
        def opening(self, _: Choice) -> str:
            return ""

        def news(self, choice: Any) -> str:
            return f"{choice.name}, "

        def closing(self, _: Any) -> str:
            return "end"

    class Ended(contextlib.nullcontext[None]):
        pass

    sent: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        while_sending(message["type"])
        sent.append(message.get("body", b""))

    async def scenario() -> None:
        exchange = Exchange({"type": "http", "headers": []}, receive, send)
        generation: Any = Ended()
        generation.output = output
        writer: Any = Writer()
        await send_stream(exchange, generation, writer)

    asyncio.run(scenario())
    return b"".join(sent)


def named_choice(name: str) -> Any:
    choice = Mock(finish_reason="stop")
    choice.name = name
    return choice


def test_an_answer_that_comes_when_the_wait_for_it_ends_is_not_lost() -> None:
    """The status line waits for the first output no longer than a second; here all of it comes just then."""
    choice = named_choice("all of it")

    class Late(Output):
        waits = 0

        async def news(self) -> list[Choice]:
            self.waits += 1
            if self.waits == 1:
                self.add(choice, 1)
                raise TimeoutError
            return await super().news()

    assert streamed(Late([choice], streaming=True)) == b"all of it, end"


@pytest.mark.parametrize("when", ["http.response.start", "http.response.body"])
def test_a_choice_that_ends_while_another_ones_news_are_sent_is_not_lost(when: str) -> None:
    """As it happens with short answers to several prompts: the last of them ends before the status line is out."""
    first, second, third = (named_choice(name) for name in ("first", "second", "third"))
    output = Output([first, second, third], streaming=True)
    first.finish_reason = None if when == "http.response.start" else "stop"
    output.add(first, 1)
    first.finish_reason = "stop"
    late = [second, third, first] if when == "http.response.start" else [second, third]

    def end_another(kind: str) -> None:
        if kind == when and late:
            for choice in late:
                output.add(choice, 1)  # for `first` it is its end, which must not be told twice
            late.clear()

    assert streamed(output, end_another) == b"first, second, third, end"


def test_a_choice_that_ends_while_its_own_first_piece_is_sent_ends_once() -> None:
    first, second = named_choice("first"), named_choice("second")
    first.finish_reason = None
    output = Output([first, second], streaming=True)
    output.add(first, 1)

    def end_both(kind: str) -> None:
        if kind == "http.response.start":
            for choice in (second, first):
                choice.finish_reason = "stop"
                output.add(choice, 1)

    assert streamed(output, end_both) == b"first, second, end"


@pytest.mark.parametrize("byte", ["ð", "Ģ"])  # 0xF0, 0x80 in the tokenizer's alphabet
@pytest.mark.parametrize("stop", [None, "zz"])
def test_a_lone_byte_for_ever_holds_nothing_back(api: Stage, byte: str, stop: str | None) -> None:
    """Case 3: each byte that can become no character is told at once, and the text after it arrives."""
    lone = byte_level_bpe().token_to_id(byte)
    assert lone is not None
    plain = ids("the plain text, " * 5)
    api.stub.replay([lone] * 4000, FinishReason.NOT_FINISHED, per_delivery=50)
    with RawClient(api.gateway.port, prompt="x", stream=True, max_tokens=2000, stop=stop) as client:
        api.stub.wait_for(lambda: api.stub.running)
        text, head = "", b""
        while text.count("\ufffd") < 3996:  # before the end, which would give out whatever is held back
            head += client.socket.recv(65536)
            text = "".join(
                json.loads(f'"{part}"') for part in re.findall(r'"text":"([^"]*)"', head.decode("utf-8", "ignore"))
            )
        assert set(text) == {"\ufffd"}
    api.stub.replay([*[lone] * 4000, *plain], per_delivery=50)
    events = api.events(PATH, prompt="x", stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events).endswith("the plain text, " * 5)


def test_a_client_that_does_not_read_is_cut_and_others_are_unhurt(api: Stage) -> None:
    long = ids("flows on and on ") * 4000
    api.stub.replay(long, FinishReason.NOT_FINISHED, logprobs=many_logprobs)
    with RawClient(api.gateway.port, receive_buffer=4096, prompt="x", stream=True, logprobs=20) as slow:
        handle = api.stub.wait_for(lambda: api.stub.submitted)[0].handle
        api.stub.script = Script(ids("a normal stream"))
        assert [e["choices"][0]["text"] for e in api.events(PATH, prompt="x")][-1] == ""
        api.stub.wait_for(lambda: api.stub.aborted)
        assert api.stub.aborted == [handle]
        data = slow.read_all()
    assert b'"code": "client_too_slow"' in data
    # What was kept for it is bounded by the limit and the socket buffers, however much there was to say.
    assert data.count(b'"finish_reason":null') < len(long) - MAX_UNREAD_TOKENS


def test_a_client_that_never_reads_again_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALLED_CLIENT_S", 0.2)
    with stage() as api, capture_logs() as logs:
        api.stub.replay(ids("flows on and on ") * 1000, logprobs=many_logprobs)
        with RawClient(api.gateway.port, receive_buffer=4096, prompt="x", stream=True, logprobs=20) as client:
            wait_until(lambda: any("does not read" in entry["event"] for entry in logs), what="dropping the client")
            assert b"[DONE]" not in client.read_all()


def test_a_lost_delivery_is_delivered_again(api: Stage) -> None:
    text = "The quick brown fox jumps over the lazy dog 🙂 日本語"
    api.stub.replay(ids(text))
    api.stub.held = True
    with RawClient(api.gateway.port, prompt="x", stream=True) as client:
        api.stub.wait_for(lambda: api.stub.running)
        api.stub.lose_next_delivery()
        api.stub.held = False
        data = client.read_all().decode()
    events = [line.removeprefix("data: ") for line in data.split("\n") if line.startswith("data: {")]
    assert "".join(json.loads(event.strip())["choices"][0]["text"] for event in events) == text
    assert api.stub.synced
    assert not api.stub.aborted


def test_two_requests_with_one_id_are_two_requests(api: Stage) -> None:
    api.stub.replay(ids("one two"), FinishReason.NOT_FINISHED)
    headers = {"X-Request-Id": "same"}
    with (
        api.client.stream(
            "POST", PATH, json={"prompt": "x", "stream": True, "request_id": "same"}, headers=headers
        ) as a,
        api.client.stream(
            "POST", PATH, json={"prompt": "x", "stream": True, "request_id": "same"}, headers=headers
        ) as b,
    ):
        assert a.headers["x-request-id"] == b.headers["x-request-id"] == "same"
        api.stub.wait_for(lambda: len(api.stub.submitted) == 2)  # a stream's head does not wait for it
        first, second = (submit.handle for submit in api.stub.submitted)
        assert first != second
        assert [submit.request_id for submit in api.stub.submitted] == ["same", "same"]
        a.close()
        api.stub.wait_for(lambda: api.stub.aborted)
        assert api.stub.aborted == [first]
        assert api.stub.running == 1


def test_a_long_prompt_does_not_stall_other_streams(api: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the event loop waits while it is encoded, nor do the other threads."""
    pieces = 0  # that the client of the other stream has read
    on_their_way, during = threading.Semaphore(0), []
    encode = TextTokenizer.encode

    def watched(self: TextTokenizer, text: str, **options: Any) -> list[int]:
        if len(text) < 1000:
            return encode(self, text, **options)
        for _ in range(20):
            assert on_their_way.acquire(timeout=PATIENCE), "the stream stands still beside an encoding that waits"
        before = pieces
        found = encode(self, text, **options)
        during.append(pieces - before)
        return found

    monkeypatch.setattr(TextTokenizer, "encode", watched)
    api.stub.replay(ids("on and on ") * 20_000, FinishReason.NOT_FINISHED)
    api.stub.interval = 0.01
    try:
        with RawClient(api.gateway.port, prompt="x", stream=True) as client:
            client.read_until("on")
            result: list[Any] = []
            prompt = "The quick brown fox, word by word. " * 12_000
            thread = threading.Thread(target=lambda: result.append(api.post(PATH, prompt=prompt)))
            thread.start()
            while thread.is_alive():
                assert client.socket.recv(65536)
                pieces += 1
                on_their_way.release()
            thread.join()
        assert result[0].status_code == 400
        assert result[0].json()["error"]["code"] == "context_length_exceeded"
        assert during[0] > 0
    finally:
        api.stub.interval = 0.0
