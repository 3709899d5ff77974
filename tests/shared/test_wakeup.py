"""A descriptor that wakes a poller."""

from __future__ import annotations

import threading

import pytest
import zmq

from pagemill_shared.wakeup import Wakeup


@pytest.fixture
def wakeup() -> Wakeup:
    return Wakeup()


def test_a_poller_wakes_and_sleeps_again_after_draining(wakeup: Wakeup) -> None:
    poller = zmq.Poller()
    poller.register(wakeup, zmq.POLLIN)
    assert not poller.poll(0)
    thread = threading.Thread(target=wakeup.wake)
    thread.start()
    assert poller.poll(60_000)
    thread.join()
    wakeup.drain()
    assert not poller.poll(0)
    wakeup.close()


def test_more_wake_ups_than_the_descriptor_holds_are_one(wakeup: Wakeup) -> None:
    for _ in range(100_000):
        wakeup.wake()
    wakeup.drain()
    wakeup.drain()
    wakeup.close()


def test_waking_after_close_is_harmless(wakeup: Wakeup) -> None:
    wakeup.close()
    wakeup.wake()
