"""What the scheduler knows of one gateway: its link, its live requests, and what it has not acknowledged yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagemill_scheduler.deliveries import DeliveryBuilder
from pagemill_scheduler.events import Peer
from pagemill_shared.messages import Delivery
from pagemill_shared.numbering import Incoming, Outgoing

if TYPE_CHECKING:
    from pagemill_scheduler.request import Request


@dataclass(slots=True, eq=False)
class GatewayState:
    """One gateway.

    Attributes:
        index: its number in the arrays of the workers.
        peer: None while its connection is broken.
        requests: live ones by handle.
        delivery: what the current event has for it.
    """

    identity: str
    fingerprint: str
    index: int
    peer: Peer | None
    last_heard: float
    outgoing: Outgoing = field(default_factory=Outgoing)
    incoming: Incoming = field(default_factory=Incoming)
    requests: dict[int, Request] = field(default_factory=dict)
    delivery: DeliveryBuilder = field(default_factory=DeliveryBuilder)
    heartbeat_at: float = 0.0
    _ended: deque[tuple[int, Request]] = field(default_factory=deque)
    _ended_handles: set[int] = field(default_factory=set)

    def knows(self, handle: int) -> bool:
        return handle in self.requests or handle in self._ended_handles

    def take_deliveries(self) -> list[Delivery]:
        """What the current event has for it, numbered; the requests that end wait until the last is acknowledged."""
        ended = self.delivery.ended
        deliveries = [page.build(self.outgoing.epoch, self.outgoing.next()) for page in self.delivery.take()]
        self.keep(self.outgoing.sent, ended)
        return deliveries

    def acknowledge(self, number: int) -> None:
        while self._ended and self._ended[0][0] <= number:
            _, request = self._ended.popleft()
            self._ended_handles.discard(request.handle)

    def keep(self, number: int, requests: list[Request]) -> None:
        """Remember ``requests``, which delivery ``number`` ends, until it is acknowledged."""
        for request in requests:
            self._ended.append((number, request))
            self._ended_handles.add(request.handle)

    def take_unacknowledged(self) -> list[Request]:
        """The ended requests whose end must be delivered again; the caller keeps them anew."""
        requests = [request for _, request in self._ended]
        self._ended.clear()
        self._ended_handles.clear()
        return requests
