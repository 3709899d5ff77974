"""A running server, as commands that talk to it see it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from pagemill_shared.errors import ConfigurationError, PagemillError
from pagemill_shared.settings import ChatSettings, RunBatchSettings

_CONNECT_S = 10.0
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


class ServerError(PagemillError):
    """The server refused a request, or broke off its answer; the message is the server's own where it sent one."""


class UnsendableError(ConfigurationError):
    """A request holds what JSON cannot hold."""


class UnreachableError(ConfigurationError):
    """Nobody answers at the URL."""

    def __init__(self, url: str, reason: object) -> None:
        super().__init__(
            f"no server answers at {url} ({reason}); start one with `pagemill serve`, or name another with --url"
        )


def client_arguments(settings: ChatSettings | RunBatchSettings) -> dict[str, Any]:
    """Arguments of an httpx client. An answer takes as long as it takes; no proxy stands before this machine."""
    key = {"Authorization": f"Bearer {settings.api_key}".encode()} if settings.api_key is not None else {}
    return {
        "base_url": settings.url.rstrip("/").removesuffix("/v1"),  # as other clients are told it
        "headers": key,
        "timeout": httpx.Timeout(None, connect=_CONNECT_S),
        "trust_env": httpx.URL(settings.url).host not in _THIS_MACHINE,
    }


class Server:
    """Talks to one server. Use it as a context."""

    def __init__(self, settings: ChatSettings) -> None:
        self._url = settings.url
        self._client = httpx.Client(**client_arguments(settings))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        """The name of the model that is served.

        Raises:
            UnreachableError: nobody answers.
            ServerError: the key is wrong, or no model is loaded yet.
        """
        with self._reaching():
            response = self._client.get("/v1/models")
        if response.status_code != 200:
            raise ServerError(error_message(response.status_code, response.content))
        return str(response.json()["data"][0]["id"])

    def stream_chat(self, body: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """Pieces of an answer: text, and how many tokens it stands for. Closing the iterator ends the request.

        Raises:
            UnreachableError: nobody answers.
            ServerError: the request was refused, or the answer broke off.
            UnsendableError: it cannot be written as JSON.
        """
        asked = {**body, "stream": True, "return_token_ids": True}
        check_sendable(asked)
        with self._reaching(), self._client.stream("POST", "/v1/chat/completions", json=asked) as response:
            if response.status_code != 200:
                raise ServerError(error_message(response.status_code, response.read()))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if not data:
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or "", len(choice.get("token_ids", ()))
        raise ServerError("the answer broke off: the server closed the connection")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnreachableError(self._url, error) from None
        except httpx.HTTPError as error:
            raise ServerError(f"the connection broke: {error or type(error).__name__}") from None
        except httpx.InvalidURL as error:
            raise UnreachableError(self._url, error) from None


def check_sendable(body: dict[str, Any]) -> None:
    """
    Raises:
        UnsendableError: ``body`` cannot be written as JSON.
    """
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise UnsendableError("half a surrogate pair is no text") from None
    except RecursionError:
        raise UnsendableError("is nested too deeply") from None
    except ValueError:
        fields = [f"{name}: " for name, value in body.items() if isinstance(value, float) and not math.isfinite(value)]
        raise UnsendableError(f"{''.join(fields[:1])}JSON has no infinite number, and no NaN") from None


def error_message(status: int, body: bytes) -> str:
    """What an error response says; its status where it is not the server's own JSON."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
