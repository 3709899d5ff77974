"""Consecutive message numbers within an epoch. ZeroMQ drops silently; this notices (design §3)."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    APPLY = "apply"
    STALE = "stale"
    """Belongs to an epoch that has ended, or to one that is already known to be broken: ignore it."""
    BROKEN = "broken"
    """A message was lost, repeated or out of order: do not apply it, ask for a new epoch. Said once per epoch."""


class Outgoing:
    """Numbers for the messages of one sender, 1, 2, 3, … in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sent = 0

    def begin(self, epoch: int) -> None:
        self.epoch, self.sent = epoch, 0

    def next(self) -> int:
        self.sent += 1
        return self.sent


class Incoming:
    """Checks the numbers of one sender's messages."""

    def __init__(self) -> None:
        self.epoch = 0
        self.received = 0
        self._broken = True  # nothing is applied before the first epoch begins

    def begin(self, epoch: int) -> None:
        self.epoch, self.received, self._broken = epoch, 0, False

    def accept(self, epoch: int, number: int) -> Verdict:
        """What to do with numbered message ``number`` of ``epoch``."""
        if epoch != self.epoch or self._broken:
            return Verdict.STALE
        if number != self.received + 1:
            self._broken = True
            return Verdict.BROKEN
        self.received = number
        return Verdict.APPLY

    def check_heartbeat(self, epoch: int, sent: int) -> Verdict:
        """Whether the peer has sent a message that never came. Heartbeats travel in order with the messages."""
        if epoch != self.epoch or self._broken:
            return Verdict.STALE
        if sent != self.received:
            self._broken = True
            return Verdict.BROKEN
        return Verdict.APPLY
