"""ZeroMQ sockets that carry wire messages: the scheduler binds ROUTERs, gateways and workers connect with DEALERs.

A message is one frame. Whatever does not decode is counted, logged with its sender's name and dropped here; it never
reaches a state machine. Sending and receiving never block. A channel belongs to one thread.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import structlog
import zmq

from pagemill_shared.codec import decode, encode
from pagemill_shared.connections import REFUSALS, Connections, Monitor, is_power_of_two
from pagemill_shared.curve import ZAP_DOMAIN, ClientKeys, ServerKeys
from pagemill_shared.endpoints import check_bind, ipc_path
from pagemill_shared.errors import ConfigurationError, ProtocolError
from pagemill_shared.schema import MAX_MESSAGE_BYTES, Message

Context = zmq.Context[zmq.Socket[bytes]]

HIGH_WATER_MARK = 1000
"""Messages that wait for one peer, in each direction, before a send fails."""
LINGER_MS = 1000
"""How long closing waits for messages that are still to be sent."""
PROBE_MS = 5_000
PROBE_TIMEOUT_MS = 15_000
"""ZeroMQ's own heartbeats, which tell nothing of the peer's health but end a connection whose other host has vanished
without a word; TCP alone would hold on to it for a quarter of an hour, and nobody would connect anew. Where peers are
given more time, so are connections: a host that vanished and a process that is stopped are silent alike."""
_NAMED_SENDERS = 1024


class RouterChannel:
    """The scheduler's side: one bound ROUTER, many peers, each known by its routing id.

    Args:
        name: what logs call it, ``frontend`` or ``backend``.
        endpoint: where to bind; port ``*`` takes a free one.
        keys: switches CURVE on. Clients are checked while :func:`pagemill_shared.curve.client_check` lasts.
        allow_insecure_bind: bind beyond this machine even without keys.
        peer_timeout: seconds of silence after which a peer is lost.

    Raises:
        ConfigurationError: the endpoint must not or cannot be bound.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        endpoint: str,
        *,
        keys: ServerKeys | None,
        allow_insecure_bind: bool,
        peer_timeout: float = 0.0,
    ) -> None:
        check_bind(endpoint, authenticated=keys is not None, allow_insecure=allow_insecure_bind)
        self.name = name
        self.malformed = 0
        self._log = structlog.get_logger("pagemill.channel").bind(channel=name)
        self._offences: Counter[str] = Counter()
        self.socket = context.socket(zmq.ROUTER)
        _configure(self.socket, peer_timeout)
        self.socket.router_mandatory = True
        if keys is not None:
            self.socket.curve_server = True
            self.socket.curve_secretkey = keys.secret
            self.socket.zap_domain = ZAP_DOMAIN.encode()
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in while nobody checks
        self._connections = Connections(context, self.socket, name)
        self._file: Path | None = None
        try:
            self.socket.bind(endpoint)
            self.endpoint = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).decode()
            self._file = ipc_path(self.endpoint)
            if self._file is not None:
                self._file.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigurationError(f"{endpoint} cannot be bound: {error.strerror}") from None

    def register(self, poller: zmq.Poller) -> None:
        """Lets ``poller`` wake when a message has come or a connection has broken."""
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._connections.monitor.socket, zmq.POLLIN)

    @property
    def refused(self) -> int:
        """Connections that did not get through the handshake."""
        return self._connections.refused

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        """What has arrived, as (routing id, message), from at most ``limit`` messages, bad ones included."""
        received = []
        for _ in range(limit):
            try:
                route = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._read(route)
            if message is not None:
                received.append((route, message))
        return received

    def broken(self) -> list[bytes]:
        """Routing ids of peers whose connection has broken since the last call. Call it after ``receive``."""
        return self._connections.broken()

    def send(self, route: bytes, message: Message) -> bool:
        """Hands the message over; False when the peer's connection has gone or its queue is full."""
        data = encode(message)
        if self._connections.has_ended(route):
            return False  # for a moment after a connection broke, ZeroMQ would still take messages for it
        try:
            self.socket.send(route, zmq.SNDMORE | zmq.NOBLOCK)
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._connections.forget(route)
                return False
            if error.errno == zmq.EAGAIN:
                return False
            raise
        return True

    def close(self) -> None:
        """Sends what is still to be sent, for a moment, and removes the file of an ipc endpoint."""
        if self.socket.closed:
            return
        self._connections.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)  # ZeroMQ leaves it
        self.socket.close()

    def _read(self, route: bytes) -> Message | None:
        """The rest of the message whose routing id was just read; None if it must be dropped."""
        # A message cannot be left half read: whatever is wrong with it is told at its end.
        address: object = None
        if self._connections.knows(route):
            data = self.socket.recv()
        else:
            frame = self.socket.recv(copy=False)
            data = frame.bytes
            address = _property(frame, "Peer-Address")
            self._connections.admit(route, int(_property(frame, "__fd") or -1))
        extra = _skip_rest(self.socket)
        if self._connections.has_ended(route):
            return None
        try:
            if extra:
                raise ProtocolError(f"message of {extra + 1} frames, expected 1")
            return decode(data)
        except ProtocolError as error:
            self.malformed += 1
            peer = f"{self.name}:{route.hex()}"
            _log_offence(self._log, self._offences, peer, error.reason, address)
            return None


class DealerChannel:
    """A gateway's or worker's side: one DEALER that connects to the scheduler, now or when it appears.

    Args:
        name: what logs call the other side.
        keys: switches CURVE on.
        peer_timeout: seconds of silence after which the scheduler is lost.

    Raises:
        ConfigurationError: the endpoint is not one.
    """

    def __init__(
        self, context: Context, name: str, endpoint: str, *, keys: ClientKeys | None, peer_timeout: float = 0.0
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.malformed = 0
        self._log = structlog.get_logger("pagemill.channel").bind(channel=name)
        self._offences: Counter[str] = Counter()
        self.refused = 0
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket, peer_timeout)
        self._connected = False
        self.connections = 0
        """How many there have been, as of the last send or look at ``connected``."""
        self._monitor = Monitor(context, self.socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSALS)
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 100, 400  # milliseconds
        if keys is not None:
            self.socket.curve_serverkey = keys.server_public
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(f"{endpoint!r} is not an endpoint to connect to: {error.strerror}") from None

    def receive(self, limit: int) -> list[Message]:
        """What has arrived, from at most ``limit`` messages, bad ones included."""
        received = []
        for _ in range(limit):
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            extra = _skip_rest(self.socket)
            try:
                if extra:
                    raise ProtocolError(f"message of {extra + 1} frames, expected 1")
                received.append(decode(data))
            except ProtocolError as error:
                self.reject(error)
        return received

    def reject(self, error: ProtocolError) -> None:
        """Counts and logs a message that must be dropped, found out here or by who it was for."""
        self.malformed += 1
        _log_offence(self._log, self._offences, "scheduler", error.reason, self.endpoint)

    def send(self, message: Message) -> bool:
        """Hands the message over; False while there is no connection or its queue is full."""
        # Nothing waits for a scheduler that is not there: what it would find in its queue later is out of date.
        # ZeroMQ's own option for that, ZMQ_IMMEDIATE, also throws away what has arrived when a connection ends.
        if not self.connected:
            return False
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Sends what is still to be sent, for a moment."""
        if self.socket.closed:
            return
        self._monitor.close()
        self.socket.close()

    @property
    def monitor_descriptor(self) -> int:
        """Becomes readable when ``connected`` may have changed; edge-triggered, as ZeroMQ's descriptors are."""
        return int(self._monitor.socket.getsockopt(zmq.FD))

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        for event, _ in self._monitor.events():
            if event & REFUSALS:
                self._note_refusal(event)
            else:
                self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self.connections += self._connected
        return self._connected

    def _note_refusal(self, event: zmq.Event) -> None:
        """Says why there is no connection when the reason is that the other side will have none."""
        self.refused += 1
        if is_power_of_two(self.refused):
            self._log.warning(
                "connection refused in the handshake; do the CURVE keys of both sides belong together?",
                endpoint=self.endpoint,
                reason=event.name,
                count=self.refused,
            )


def _configure(socket: zmq.Socket[bytes], peer_timeout: float) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.linger = LINGER_MS
    socket.heartbeat_ivl = PROBE_MS
    socket.heartbeat_timeout = max(PROBE_TIMEOUT_MS, int(peer_timeout * 1000))


def _skip_rest(socket: zmq.Socket[bytes]) -> int:
    """Reads the remaining frames of a message without keeping them; how many there were."""
    skipped = 0
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv()
        skipped += 1
    return skipped


def _property(frame: zmq.Frame, name: str) -> str | None:
    """A property that ZeroMQ attached to a received message; None where the transport has none."""
    try:
        value = frame.get(name)
    except zmq.ZMQError:
        return None
    return str(value)


def _log_offence(
    log: structlog.typing.FilteringBoundLogger, offences: Counter[str], peer: str, reason: str, address: object
) -> None:
    # The 1st, 2nd, 4th, 8th … of a sender.
    if len(offences) >= _NAMED_SENDERS:
        offences.clear()
    offences[peer] += 1
    count = offences[peer]
    if is_power_of_two(count):
        log.warning("malformed message dropped", peer=peer, address=address, reason=reason, count=count)
