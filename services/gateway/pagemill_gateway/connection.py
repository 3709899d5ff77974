"""The asyncio shell around :class:`SchedulerClient`: one DEALER socket, read by the event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterable

import structlog
import zmq

from pagemill_gateway.client import Obstacle, SchedulerClient
from pagemill_gateway.errors import ApiError
from pagemill_gateway.requests import GatewayRequest
from pagemill_shared.channel import DealerChannel
from pagemill_shared.curve import load_client_keys
from pagemill_shared.errors import ProtocolError
from pagemill_shared.link import PeerLink
from pagemill_shared.messages import Delivery, GatewayHello, HelloRequest, StateQuery
from pagemill_shared.schema import Message
from pagemill_shared.settings import GatewaySettings

_BATCH = 256
_STRANGERS = frozenset({HelloRequest})
"""What a scheduler says that does not know this gateway."""
_TOKENS = frozenset({Delivery})
"""What changes nothing about whether requests can be served."""


class Connection:
    """Connects to the scheduler for as long as it is open. Lives on one event loop.

    Raises:
        ConfigurationError: the endpoint or the keys are unusable.
    """

    def __init__(self, settings: GatewaySettings, fingerprint: str) -> None:
        keys = load_client_keys(settings.curve_dir) if settings.curve_dir is not None else None
        identity = f"gateway-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"[:128]
        link = PeerLink(
            GatewayHello(identity, fingerprint),
            heartbeat_interval=settings.heartbeat_interval,
            peer_timeout=settings.peer_timeout,
        )
        self.client = SchedulerClient(link, fingerprint, settings.no_worker_timeout, time.monotonic())
        self._log = structlog.get_logger("pagemill.gateway")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = DealerChannel(
            self._context, "scheduler", settings.frontend, keys=keys, peer_timeout=settings.peer_timeout
        )
        self._descriptor = int(self._channel.socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drain_planned = False
        self._heard_on = 0  # the connection, by number, on which the newest messages have come
        self._queries = itertools.count(1)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._changed: set[asyncio.Future[None]] = set()
        self._obstacle: Obstacle | None = None

    def open(self) -> None:
        """Starts to listen and to say hello, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.add_reader(self._channel.monitor_descriptor, self._connection_changed)
        self._obstacle = self.obstacle()
        self._tick()

    def close(self) -> None:
        """Aborts what is left and closes the socket, waiting a moment for what must still be sent."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_reader(self._channel.monitor_descriptor)
            self._send(self.client.fail_all(ApiError(503, "the server is stopping", code="server_stopping")))
        if self._timer is not None:
            self._timer.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ApiError(503, "the server is stopping", code="server_stopping"))
        self._loop = None
        self._channel.close()
        self._context.term()

    # ------------------------------------------------------------ for the HTTP side

    def obstacle(self) -> Obstacle | None:
        """Why a request that came now could not be served."""
        # Whoever is at the other end of a new connection may know nothing of this gateway, until it is heard from.
        connected = self._channel.connected and self._channel.connections == self._heard_on
        return self.client.obstacle(time.monotonic(), connected)

    async def until_able(self) -> None:
        """Returns when requests can be served, after a short wait when the last worker has only just gone.

        Raises:
            ApiError: 503 with the reason.
        """
        while (obstacle := self.obstacle()) is not None:
            if obstacle.lasting:
                raise obstacle.as_error()
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changed.add(change)
            try:
                await asyncio.wait_for(change, timeout=self.client.link.heartbeat_interval)
            except TimeoutError:
                continue
            finally:
                self._changed.discard(change)

    def submit(self, request: GatewayRequest) -> None:
        self._send(self.client.submit(request))

    def abort(self, request: GatewayRequest) -> None:
        self._send(self.client.abort(request))

    async def state(self) -> bytes:
        """The scheduler's state as of now, a JSON object in UTF-8.

        Raises:
            ApiError: 503, the scheduler has not answered within ``peer_timeout``.
        """
        if not self._channel.connected:
            raise ApiError(503, "there is no connection to the scheduler", code="scheduler_lost")
        query = next(self._queries)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[query] = answer
        try:
            self._send([StateQuery(query)])
            return await asyncio.wait_for(answer, self.client.link.peer_timeout)
        except TimeoutError:
            raise ApiError(503, "the scheduler does not answer", code="scheduler_lost") from None
        finally:
            del self._answers[query]

    # ------------------------------------------------------------ the loop's side

    def _drain(self) -> None:
        """Reads all that has arrived. ZeroMQ's descriptor only tells that something changed since it was last asked."""
        self._drain_planned = False
        if self._loop is None:
            return
        messages = self._channel.receive(_BATCH)
        kinds = set(map(type, messages))
        if kinds - _STRANGERS:
            self._heard_on = self._channel.connections
        now = time.monotonic()
        for message in messages:
            try:
                self._send_now(self.client.received(now, message))
            except ProtocolError as error:
                self._channel.reject(error)
        if kinds - _TOKENS:
            self._hand_out()
        self._plan_drain()

    def _connection_changed(self) -> None:
        """A connection has ended or begun: say something soon to whoever is there."""
        if self._channel.connections != self._heard_on or not self._channel.connected:
            self.client.link.unsent(time.monotonic())
            self._plan_tick()
        self._hand_out()

    def _tick(self) -> None:
        assert self._loop is not None
        self._drain()
        self._send(self.client.tick(time.monotonic()))
        self._hand_out()
        self._plan_tick()

    def _plan_tick(self) -> None:
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.01, self.client.link.deadline - time.monotonic())
        self._timer = self._loop.call_later(delay, self._tick)

    def _send(self, messages: Iterable[Message]) -> None:
        self._send_now(messages)
        self._plan_drain()

    def _send_now(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if not self._channel.send(message):
                # The number that is missing at the scheduler begins a new epoch there; say something soon.
                self.client.link.unsent(time.monotonic())
                self._plan_tick()

    def _plan_drain(self) -> None:
        """Sending may have taken the descriptor's signal for what has arrived meanwhile, so look for oneself."""
        if self._drain_planned or self._loop is None:
            return
        if int(self._channel.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._drain_planned = True
            self._loop.call_soon(self._drain)

    def _hand_out(self) -> None:
        for report in self.client.reports:
            answer = self._answers.get(report.query)
            if answer is not None and not answer.done():
                answer.set_result(report.state)
        self.client.reports.clear()
        obstacle = self.obstacle()
        if obstacle != self._obstacle:
            if obstacle is None:
                self._log.info("ready", workers=self.client.fleet.ready_workers)
            elif self._obstacle is None:
                self._log.warning("not ready", reason=obstacle.reason)
            elif obstacle.reason != self._obstacle.reason:
                self._log.info("still not ready", reason=obstacle.reason)
            self._obstacle = obstacle
            for change in self._changed:
                if not change.done():
                    change.set_result(None)
