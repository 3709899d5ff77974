"""What the scheduler knows of one gateway: its link, its live requests, and what it has not acknowledged yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pagemill_scheduler.deliveries import DeliveryBuilder
from pagemill_scheduler.events import Peer
from pagemill_scheduler.request import Request
from pagemill_shared.messages import Delivery
from pagemill_shared.numbering import Incoming, Outgoing


@dataclass(slots=True, eq=False)
class GatewayState:
    """One gateway.

    Attributes:
        index: its number in the arrays of the workers.
        peer: None while its connection is broken.
        requests: live ones by handle.
        ended: (delivery number, request) of those whose end it has not acknowledged: a resync delivers them again.
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
    ended: deque[tuple[int, Request]] = field(default_factory=deque)
    delivery: DeliveryBuilder = field(default_factory=DeliveryBuilder)
    heartbeat_at: float = 0.0

    def knows(self, handle: int) -> bool:
        return handle in self.requests or any(request.handle == handle for _, request in self.ended)

    def take_delivery(self) -> Delivery:
        """The current event's delivery, numbered; the requests that it ends wait for its acknowledgement."""
        number = self.outgoing.next()
        ended = self.delivery.ended
        delivery = self.delivery.build(self.outgoing.epoch, number)
        self.ended.extend((number, request) for request in ended)
        return delivery

    def acknowledge(self, number: int) -> None:
        while self.ended and self.ended[0][0] <= number:
            self.ended.popleft()
