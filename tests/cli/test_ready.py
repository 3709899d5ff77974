from __future__ import annotations

import asyncio
import json
import shlex
import socket

import pytest

from pagemill.ready import ready_lines, until_ready, url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("example.org", "http://example.org:80"),
    ],
)
def test_the_url_is_one_that_works_on_this_machine(host: str, url: str) -> None:
    assert url_of(host, 80) == url


def test_it_waits_through_refusals_nonsense_and_other_answers_until_200() -> None:
    answers = [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(answers[min(len(asked), len(answers)) - 1])  # the last one again, should it have come too late
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await asyncio.wait_for(until_ready("127.0.0.1", port), 30)

    asyncio.run(scenario())
    assert len(asked) >= len(answers)
    assert set(asked) == {b"GET /ready HTTP/1.1\r\n"}


def test_it_waits_while_nobody_listens() -> None:
    async def scenario() -> None:
        with socket.socket() as taken:  # so that nobody else comes to listen there
            taken.bind(("127.0.0.1", 0))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(until_ready("127.0.0.1", taken.getsockname()[1]), 0.3)

    asyncio.run(scenario())


@pytest.mark.parametrize("with_key", [True, False])
def test_the_example_is_a_command_that_a_shell_takes(with_key: bool) -> None:
    headline, command, chat = ready_lines("http://127.0.0.1:8000", "it's a model", with_key=with_key).splitlines()
    assert "http://127.0.0.1:8000/ " in chat
    assert "http://127.0.0.1:8000" in headline
    words = shlex.split(command)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's a model"
    assert ("Authorization: Bearer $PAGEMILL_API_KEY" in words) == with_key
