"""The ASGI application: routes, keys, limits, and the one place where errors become responses."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from importlib.metadata import version

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from pagemill_gateway import chat, completions, embeddings, operations, responses, status, tokens
from pagemill_gateway.cors import Cors
from pagemill_gateway.engine import Engine
from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import ClientGoneError, Exchange, json_text
from pagemill_gateway.keys import Keys
from pagemill_gateway.limits import Limits
from pagemill_gateway.openapi import document
from pagemill_gateway.operations import Operation
from pagemill_gateway.pages import pages
from pagemill_shared.settings import GatewaySettings

Handler = Callable[[Engine, Exchange, bytes], Awaitable[None]]
Call = Callable[[Exchange], Awaitable[None]]


class Gateway:
    """The application, with or without a model: until one is loaded every endpoint that needs it answers 503.

    Attributes:
        engine: the loaded model, None while it is waited for.
        stopping: set when the process was told to end; new requests are refused from then on.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.engine: Engine | None = None
        self.stopping = False
        self.exchanges: set[Exchange] = set()
        """Those whose response is not complete."""
        self._max_body_bytes = settings.max_body_bytes
        self._keys = Keys.load(settings.api_key, settings.api_key_file)
        self._cors = Cors(settings.cors_origins)
        self._limits = limits_of(settings)
        self._log = structlog.get_logger("pagemill.gateway")
        self.routes: list[Route] = self._routes()
        self._router = Router(self.routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # No middleware: each layer of it would cost every streamed token a coroutine.
        exchange = Exchange(scope, receive, send)
        self.exchanges.add(exchange)
        began = time.monotonic()
        scope["app"] = self  # the router raises for what it does not find, instead of answering in plain text
        scope["exchange"] = exchange
        origin = exchange.header(b"origin")
        exchange.extra_headers = self._cors.headers(origin)
        try:
            if origin is not None and scope["method"] == "OPTIONS" and await self._preflight(exchange, origin):
                return
            await self._answer(exchange, self._router(scope, receive, send))
        finally:
            self.exchanges.discard(exchange)
            self._log.debug(
                "request",
                method=scope["method"],
                path=scope["path"],
                request_id=exchange.request_id,
                seconds=round(time.monotonic() - began, 4),
            )

    async def _preflight(self, exchange: Exchange, origin: bytes) -> bool:
        """Answers a browser that asks whether a page may send a request; False where nothing is allowed."""
        allowed = self._cors.preflight(origin, exchange.header(b"access-control-request-headers"))
        if allowed is None:
            return False
        exchange.extra_headers = allowed
        await exchange.send_bytes(b"", 200, None, [])
        return True

    async def _answer(self, exchange: Exchange, work: Awaitable[None]) -> None:
        try:
            await work
        except ClientGoneError:
            return
        except ApiError as error:
            await self._fail(exchange, error)
        except HTTPException as error:
            await self._fail(exchange, _routing_error(exchange.scope, error))
        except Exception:
            self._log.exception("a request failed unexpectedly", request_id=exchange.request_id)
            await self._fail(exchange, ApiError(500, "internal error", code="internal_error"))

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        if exchange.started:
            await exchange.end_stream(b"data: " + error.encoded() + b"\n\n")
        else:
            await exchange.send_error(error)

    # ------------------------------------------------------------ routes

    def _routes(self) -> list[Route]:
        return [
            self._route(operations.CHAT, chat.chat_completions),
            self._route(operations.COMPLETION, completions.completions),
            self._route(operations.RESPONSE, responses.responses),
            self._route(operations.EMBEDDINGS, embeddings.embeddings),
            self._route(operations.TOKENIZE, tokens.tokenize),
            self._route(operations.DETOKENIZE, tokens.detokenize),
            self._route(operations.MODELS, status.models),
            self._route(operations.MODEL, status.model),
            self._route(operations.STATE, status.state),
            self._route(operations.METRICS, status.metrics),
            self._plain_route(operations.VERSION, status.server_version),
            self._plain_route(operations.HEALTH, self._health),
            self._plain_route(operations.READY, self._ready),
            Route("/openapi.json", Endpoint(self._keyed(self._openapi), None), methods=["GET"]),
            # A browser cannot send a key with what it navigates to: the pages hold no data, and ask for the key.
            *(Route(page.path, Endpoint(page, None), methods=["GET"]) for page in pages()),
        ]

    def _route(self, operation: Operation, handler: Handler) -> Route:
        """For what needs the key and the model."""
        call = self._guarded(handler, with_body=operation.method == "POST")
        return Route(operation.path, Endpoint(call, operation), methods=[operation.method])

    def _plain_route(self, operation: Operation, call: Call) -> Route:
        """For what needs no model; the operation says whether it needs the key."""
        guarded = call if operation.keyless else self._keyed(call)
        return Route(operation.path, Endpoint(guarded, operation), methods=[operation.method])

    @property
    def operations(self) -> list[Operation]:
        """All that the OpenAPI document describes."""
        return [operation for route in self.routes if (operation := operation_of(route)) is not None]

    @cached_property
    def _document(self) -> bytes:
        return json_text(document(self.operations, version("pagemill"), with_key=bool(self._keys)))

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.send_json_text(self._document)

    def _guarded(self, handler: Handler, with_body: bool) -> Call:
        async def call(exchange: Exchange) -> None:
            self._check_key(exchange)
            if with_body and self.stopping:
                raise ApiError(503, "the server is stopping", code="server_stopping")
            engine = self._loaded_engine()
            exchange.timeout = self._limits.timeout_of(exchange.header(b"x-request-timeout")) if with_body else None
            await handler(engine, exchange, await exchange.read_body(self._max_body_bytes) if with_body else b"")

        return call

    def _keyed(self, call: Call) -> Call:
        async def keyed(exchange: Exchange) -> None:
            self._check_key(exchange)
            await call(exchange)

        return keyed

    def _check_key(self, exchange: Exchange) -> None:
        if not self._keys:
            return
        scheme, _, given = (exchange.header(b"authorization") or b"").partition(b" ")
        exchange.key = self._keys.find(given.strip()) if scheme.lower() == b"bearer" else None
        if exchange.key is None:
            raise ApiError(
                401,
                "a valid API key must be sent as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if exchange.key.rate is not None and exchange.scope["method"] == "POST":
            wait = exchange.key.rate.take(time.monotonic())
            if wait:
                raise ApiError(
                    429,
                    f"this key may send {exchange.key.rate.per_minute:g} requests a minute",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(math.ceil(wait))},
                )

    def _loaded_engine(self) -> Engine:
        if self.engine is None:
            raise ApiError(503, "the model is not loaded yet", code="model_loading")
        return self.engine

    async def _health(self, exchange: Exchange) -> None:
        """200 while requests make progress, also while the process finishes its last ones."""
        await self._tell(exchange, "healthy")

    async def _ready(self, exchange: Exchange) -> None:
        """200 while new requests are welcome."""
        if self.stopping:
            raise ApiError(503, "the server is stopping", code="server_stopping")
        await self._tell(exchange, "ready")

    async def _tell(self, exchange: Exchange, word: str) -> None:
        engine = self._loaded_engine()
        obstacle = engine.connection.obstacle()
        if obstacle is not None:
            raise obstacle.as_error()
        fleet = engine.connection.client.fleet
        await exchange.send_json({"status": word, "model": engine.name, "ready_workers": fleet.ready_workers})


def limits_of(settings: GatewaySettings) -> Limits:
    return Limits(settings.max_concurrent_requests, settings.max_waiting_requests, settings.request_timeout)


class Endpoint:
    """An ASGI application around one call; the router takes a plain function for a request handler of its own kind.

    Attributes:
        operation: what the OpenAPI document tells of it; None for what is no part of the API.
    """

    def __init__(self, call: Call, operation: Operation | None) -> None:
        self.operation = operation
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope["exchange"])


def operation_of(route: Route) -> Operation | None:
    """What the OpenAPI document tells of a route; None for what is no part of the API."""
    assert isinstance(route.app, Endpoint)
    return route.app.operation


def _routing_error(scope: Scope, error: HTTPException) -> ApiError:
    path, method = scope["path"][:200], scope["method"]
    if error.status_code == 405:
        return ApiError(405, f"{path} does not take {method}", code="method_not_allowed", headers=error.headers)
    if error.status_code == 404:
        return ApiError(404, f"there is no {path}", code="not_found")
    return ApiError(error.status_code, str(error.detail), headers=error.headers)
