"""How many requests are served at once, for how long, and which pages may ask."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.sockets import PATIENCE

from pagemill_gateway.cors import Cors
from pagemill_gateway.errors import ApiError
from pagemill_gateway.limits import Limits
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import FinishReason

PATH = "/v1/completions"
IDS = byte_level_bpe().encode("fine").ids
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 5}


@contextlib.contextmanager
def open_requests(api: Stage, count: int, running: int | None = None) -> Iterator[None]:
    """So many requests that do not end before the context is left.

    Args:
        running: with those that were there before.
    """
    client = httpx.Client(base_url=api.gateway.url, timeout=PATIENCE)
    threads = [threading.Thread(target=lambda: client.post(PATH, json=BODY), name=f"open {i}") for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        api.stub.wait_for(lambda: api.stub.running == (running or count))
        yield
    finally:
        api.stub.held = False
        api.stub.fail("worker_lost", "over")
        for thread in threads:
            thread.join(PATIENCE)
        client.close()


def test_more_open_requests_than_allowed_are_sent_away() -> None:
    with stage(max_concurrent_requests=2) as api:
        api.stub.replay(IDS, FinishReason.NOT_FINISHED)
        with open_requests(api, 2):
            response = api.post(PATH, **BODY)
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "too_many_requests"
            assert response.headers["retry-after"]
            assert api.post(PATH, stream=True, **BODY).status_code == 429
            assert api.post("/tokenize", prompt="x").status_code == 200
        api.stub.replay(IDS, FinishReason.LENGTH)
        assert api.post(PATH, **BODY).status_code == 200


def test_more_waiting_requests_than_allowed_are_sent_away() -> None:
    with stage(max_waiting_requests=1) as api:
        api.stub.replay(IDS, FinishReason.NOT_FINISHED)
        with api.client.stream("POST", PATH, json=BODY | {"stream": True}) as first:
            lines = first.iter_lines()  # the stream ends with its iterator
            assert next(lines).startswith("data: ")  # it has its first tokens: nobody waits
            api.stub.held = True
            with open_requests(api, 1, running=2):
                response = api.post(PATH, **BODY)
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "queue_full"
                assert response.headers["retry-after"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_header", [False, True])
def test_a_request_ends_at_its_deadline(streamed: bool, by_header: bool) -> None:
    begun = []
    for seconds in (0.2, 2.0, 20.0):
        with stage(**({} if by_header else {"request_timeout": seconds})) as api:
            api.stub.replay(IDS, FinishReason.NOT_FINISHED)
            headers = {"X-Request-Timeout": str(seconds)} if by_header else {}
            response = api.client.post(PATH, json=BODY | {"stream": streamed}, headers=headers)
            begun.append(response.status_code == 200)
            if begun[-1]:
                assert "request_timeout" in response.text
                assert "[DONE]" not in response.text
            else:
                assert response.status_code == 504
                assert response.json()["error"]["code"] == "request_timeout"
            api.stub.wait_for(lambda: api.stub.aborted)
            api.stub.wait_for(lambda: not api.stub.running)
        if begun[-1] or not streamed:
            break  # a stream of which nothing has come before a short deadline ends as any other request
    assert begun[-1] == streamed


@pytest.mark.parametrize(("header", "seconds"), [(None, 5.0), (b"3", 3.0), (b"10", 5.0), (b"0.5", 0.5)])
def test_a_header_may_only_shorten(header: bytes | None, seconds: float) -> None:
    assert Limits(request_timeout=5.0).timeout_of(header) == seconds


@pytest.mark.parametrize("header", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"1e999"])
def test_a_header_that_is_no_time_is_refused(header: bytes) -> None:
    with pytest.raises(ApiError, match="X-Request-Timeout"):
        Limits().timeout_of(header)


ORIGIN = "https://app.example.org"


def test_pages_of_allowed_origins_may_ask() -> None:
    with stage(cors_origins=f"{ORIGIN}, http://localhost:3000", api_key="k") as api:
        asked = {
            "Origin": ORIGIN,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-a, authorization",
        }
        preflight = api.client.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert preflight.headers["access-control-allow-headers"] == "x-a, authorization"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        for response in (
            api.client.get("/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer k"}),
            api.client.get("/v1/models", headers={"Origin": ORIGIN}),  # errors are told to pages, too
        ):
            assert response.headers["access-control-allow-origin"] == ORIGIN
            assert response.headers["vary"] == "Origin"
        other = api.client.options("/v1/models", headers=asked | {"Origin": "https://evil.example"})
        assert other.status_code == 405
        assert "access-control-allow-origin" not in other.headers


def test_all_origins_or_none() -> None:
    assert (b"access-control-allow-origin", b"*") in Cors("*").headers(b"https://x.example")
    assert Cors(None).headers(b"https://x.example") == []
    assert Cors("*").headers(None) == []
    assert Cors(None).preflight(b"https://x.example", None) is None


@pytest.mark.parametrize("origins", ["example.org", "https://", "https://x.example/path", "ftp://x"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ConfigurationError, match="--cors-origins"):
        Cors(origins)
