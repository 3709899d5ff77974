"""Routes, keys, limits, and errors that are always JSON in OpenAI's shape."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.sockets import PATIENCE
from structlog.testing import capture_logs

from pagemill_gateway.http_protocol import MAX_SURPLUS_BYTES
from pagemill_gateway.pages import pages
from pagemill_gateway.server import Gateway
from pagemill_shared.settings import GatewaySettings

TOKENIZER = byte_level_bpe()
BOTH = ["/v1/chat/completions", "/v1/completions"]


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    with stage(max_body_bytes=4096, served_model_name="org/tiny") as running:
        running.stub.replay(TOKENIZER.encode("fine").ids)
        yield running


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def body_of(path: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model(api: Stage, path: str, stream: bool) -> None:
    error = error_of(api.post(path, model="no-such-model", stream=stream, **body_of(path)), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"


def test_models(api: Stage) -> None:
    listed = api.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["org/tiny"]
    assert api.client.get("/v1/models/org/tiny").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 2048
    assert error_of(api.client.get("/v1/models/no-such-model"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", BOTH)
def test_the_served_name_is_the_models_name(api: Stage, path: str) -> None:
    assert api.post(path, model="org/tiny", **body_of(path)).json()["model"] == "org/tiny"
    assert error_of(api.post(path, model="tiny", **body_of(path)), 404)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b"[1]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud83d"}',
        b"[" * 4000, b'{"prompt": "x", "temperature": Infinity}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
def test_bodies_that_are_not_a_request(api: Stage, path: str, body: bytes) -> None:
    error_of(api.client.post(path, content=body), 400)


def test_a_body_that_is_too_large(api: Stage) -> None:
    error = error_of(api.post("/v1/completions", prompt="x" * 5000), 413)
    assert error["code"] == "request_too_large"
    assert "4096" in error["message"]

    def parts() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 1000

    error_of(httpx.post(api.gateway.url + "/v1/completions", content=parts(), timeout=PATIENCE), 413)
    assert api.post("/v1/completions", prompt="x").status_code == 200


def test_a_client_that_sends_all_before_it_reads_sees_the_refusal(api: Stage) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.gateway.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        for body in (b"x" * 20_000_000, (b"x" * 100_000 for _ in range(200))):
            connection.request("POST", "/v1/completions", body)
            response = connection.getresponse()
            assert response.status == 413
            assert json.loads(response.read())["error"]["code"] == "request_too_large"
        connection.request("POST", "/v1/completions", b'{"prompt": "x"}')  # on the same connection
        assert connection.getresponse().status == 200


def test_a_body_without_end_is_cut(api: Stage) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", api.gateway.port), timeout=PATIENCE) as client:
        client.sendall(head)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while sent < 4 * MAX_SURPLUS_BYTES:
                sent += client.send(b"x" * 1_000_000)
    assert MAX_SURPLUS_BYTES <= sent < 2 * MAX_SURPLUS_BYTES
    assert api.client.get("/health").status_code == 200


def test_a_client_that_waits_for_a_word_before_its_body_is_told_at_once(api: Stage) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.gateway.port), timeout=PATIENCE) as client:
        client.sendall(head)
        data = b""
        while part := client.recv(65536):  # until the connection is closed
            data += part
    assert data.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in data
    body = b'{"prompt": "x"}'
    with socket.create_connection(("127.0.0.1", api.gateway.port), timeout=PATIENCE) as client:
        client.sendall(head.replace(b"100000", str(len(body)).encode()))
        with client.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert answer.readline() == b"\r\n"
            client.sendall(body)
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
def test_a_compressed_body(api: Stage, path: str) -> None:
    body = gzip.compress(json.dumps(body_of(path)).encode())
    response = api.client.post(path, content=body, headers={"Content-Encoding": "gzip"})
    error = error_of(response, 415)
    assert error["code"] == "unsupported_encoding"
    assert "'gzip'" in error["message"]
    assert response.headers["accept-encoding"] == "identity"
    plain = httpx.Headers({"Content-Encoding": "identity"})
    assert api.client.post("/v1/completions", json={"prompt": "x"}, headers=plain).status_code == 200


@pytest.mark.parametrize("path", ["/x", "/v1", "/v1/nothing", "/v1/completions/", "/%2e%2e/etc", "/v1/pagemill"])
def test_an_unknown_path(api: Stage, path: str) -> None:
    assert error_of(api.client.get(path), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("POST", "/health", "GET"), ("DELETE", "/v1/models/org/tiny", "GET")],
)
def test_a_wrong_method(api: Stage, method: str, path: str, allowed: str) -> None:
    response = api.client.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert allowed in response.headers["allow"]


def test_what_is_not_http(api: Stage) -> None:
    with socket.create_connection(("127.0.0.1", api.gateway.port), timeout=PATIENCE) as client:
        client.sendall(b"this is not HTTP\r\n\r\n")
        data = b""
        while part := client.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 400")
    assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("x" * 300, False), ("a b", False), ("", False)])
def test_request_ids_come_back(api: Stage, given: str, kept: bool) -> None:
    response = api.client.get("/version", headers={"X-Request-Id": given})
    assert (response.headers["x-request-id"] == given) == kept


def test_an_id_in_the_body_is_what_the_scheduler_sees(api: Stage) -> None:
    api.stub.replay(TOKENIZER.encode("fine").ids)
    api.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "head"})
    api.post("/v1/completions", prompt="x", request_id="body")
    assert [submit.request_id for submit in api.stub.submitted] == ["head", "body"]


def test_health_readiness_version_and_state(api: Stage) -> None:
    for path in ("/health", "/ready"):
        assert api.client.get(path).json()["ready_workers"] == 1
    assert api.client.get("/version").json()["version"]
    assert api.gateway.until("/v1/pagemill/state", 200).json() == api.stub.state
    assert api.client.head("/health").status_code == 200


@pytest.fixture(scope="module")
def locked() -> Iterator[Stage]:
    with stage(api_key="s3cret-ä") as running:
        running.stub.replay(TOKENIZER.encode("fine").ids)
        yield running


ROUTES = [
    (next(iter((route.methods or set()) - {"HEAD"})), route.path.replace("{model:path}", "tiny"))
    for route in Gateway(GatewaySettings()).routes
]
WITHOUT_KEY = {"/health", "/ready", *(page.path for page in pages())}


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[1] not in WITHOUT_KEY])
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "s3cret-ä", "Basic s3cret-ä", "Bearer s3cret-äx"])
def test_a_key_is_needed(locked: Stage, method: str, path: str, header: str | None) -> None:
    headers = {"Authorization": header.encode()} if header is not None else {}
    with capture_logs() as logs:
        response = locked.client.request(method, path, headers=headers, content=b"{}")
        error = error_of(response, 401)
    assert error["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "s3cret" not in json.dumps([str(entry) for entry in logs])


@pytest.mark.parametrize("path", sorted(WITHOUT_KEY))
def test_health_and_the_pages_need_none_and_hold_no_data(locked: Stage, path: str) -> None:
    response = locked.client.get(path)
    assert response.status_code == 200
    if path not in ("/health", "/ready"):
        assert "tiny" not in response.text  # the model's name, or whatever else is the server's own
        assert response.content == next(page.content for page in pages() if page.path == path)


def test_the_key_opens(locked: Stage) -> None:
    headers = {"Authorization": "Bearer s3cret-ä".encode()}
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    assert locked.client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
    assert locked.client.get("/version", headers=headers).status_code == 200
    assert locked.client.get("/openapi.json", headers=headers).json()["openapi"] == "3.1.0"
    assert locked.client.head("/version").status_code == 401


def test_the_key_shows_nowhere() -> None:
    settings = GatewaySettings(api_key="s3cret")
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in repr(Gateway(settings))
