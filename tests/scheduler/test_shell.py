"""The scheduler's loop around a stub core, over real sockets."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from pagemill_testing.sockets import PATIENCE, ipc_folder, python, wait_until
from structlog.testing import capture_logs

from pagemill_scheduler.events import Action, Event, Log, Peer, Received, Send, SendFailed, Stop, StopRequested, Tick
from pagemill_scheduler.shell import DRAIN_LIMIT, EventError, Shell, Side, describe
from pagemill_shared.channel import Context, DealerChannel, RouterChannel
from pagemill_shared.link import ABSENCE_S
from pagemill_shared.messages import Heartbeat, StateReport, SubmitRequest
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import MAX_MESSAGE_BYTES
from pagemill_shared.wakeup import Wakeup


class StubCore:
    """Remembers events and answers them by a rule."""

    def __init__(self, rule: Callable[[Event], list[Action]] | None = None) -> None:
        self.events: list[Event] = []
        self._rule = rule or (lambda _event: [])

    def handle(self, event: Event) -> list[Action]:
        self.events.append(event)
        return self._rule(event)

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def received(self) -> list[Received]:
        return [event for event in list(self.events) if isinstance(event, Received)]


def echo(event: Event) -> list[Action]:
    return [Send(event.peer, event.message)] if isinstance(event, Received) else []


class Running:
    """A shell in a thread of its own."""

    def __init__(self, stack: ExitStack, folder: Path, core: StubCore, tick: float, grace: float) -> None:
        self.core = core
        self.context: Context = stack.enter_context(zmq.Context())
        self._stack = stack
        self.channels: dict[Side, RouterChannel] = {}
        for side in ("backend", "frontend"):
            channel = RouterChannel(self.context, side, f"ipc://{folder}/{side}", keys=None, allow_insecure_bind=False)
            stack.callback(channel.close)
            self.channels[side] = channel
        wakeup = Wakeup()
        stack.callback(wakeup.close)
        self.shell = Shell(core, self.channels, wakeup, tick_interval=tick, shutdown_grace=grace)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        stack.callback(self._end)

    def _run(self) -> None:
        try:
            self.shell.run()
        except BaseException as error:
            self.error = error

    def _end(self) -> None:
        self.core._rule = lambda event: [Stop()]
        self.shell.request_stop()
        self.join()

    def join(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def dealer(self, side: Side) -> DealerChannel:
        dealer = DealerChannel(self.context, side, self.channels[side].endpoint, keys=None)
        dealer.socket.linger = 0
        self._stack.callback(dealer.close)
        return dealer

    def raw(self, side: Side) -> zmq.Socket[bytes]:
        raw = self._stack.enter_context(self.context.socket(zmq.DEALER))
        raw.linger = 0
        raw.connect(self.channels[side].endpoint)
        return raw


@contextmanager
def running(
    rule: Callable[[Event], list[Action]] | None = None, *, tick: float = 0.02, grace: float = 60.0
) -> Iterator[Running]:
    with ipc_folder() as folder, ExitStack() as stack:
        yield Running(stack, folder, StubCore(rule), tick, grace)


def say(dealer: DealerChannel, number: int) -> None:
    wait_until(lambda: dealer.send(Heartbeat(number, 0, 0)), what="connection")


# ---------------------------------------------------------------- carrying


@pytest.mark.parametrize("side", ["frontend", "backend"])
def test_what_a_peer_says_reaches_the_core_and_the_answer_the_peer(side: Side) -> None:
    with running(echo) as run:
        first, second = run.dealer(side), run.dealer(side)
        for number, dealer in ((1, first), (2, second)):
            say(dealer, number)
            got = wait_until(lambda dealer=dealer: dealer.receive(10), dealer.socket)  # type: ignore[misc]
            assert got == [Heartbeat(number, 0, 0)]
        peers = [event.peer for event in run.core.received()]
        assert [peer.side for peer in peers] == [side, side]
        assert peers[0] != peers[1]


def test_the_core_ticks_without_any_message() -> None:
    with running() as run:
        wait_until(lambda: len(run.core.of(Tick)) >= 5)
        times = [event.now for event in run.core.events]
        assert times == sorted(times)


def test_time_stands_still_for_the_core_while_the_process_does_not_get_to_run() -> None:
    """Stopped at any place: in the core here, and so between what has arrived and the tick behind it, too."""
    ahead = 0.0

    def rule(event: Event) -> list[Action]:
        nonlocal ahead
        if isinstance(event, Tick):
            ahead += 10.0
        return [Stop()] if len(core.events) == 5 else []

    core, wakeup = StubCore(rule), Wakeup()
    shell = Shell(core, {}, wakeup, tick_interval=0.02, shutdown_grace=1.0, clock=lambda: time.monotonic() + ahead)
    shell.run()
    wakeup.close()
    times = [event.now for event in core.events]
    assert times == sorted(times)
    assert times[-1] - times[0] < 5 * (0.02 + ABSENCE_S)


def test_a_tick_follows_all_that_has_arrived() -> None:
    with running(tick=0.25) as run:
        dealer = run.dealer("frontend")
        say(dealer, 0)
        wait_until(run.core.received)
        for number in range(1, 50):
            assert dealer.send(Heartbeat(number, 0, 0))
        wait_until(lambda: len(run.core.received()) == 50)
        wait_until(lambda: isinstance(run.core.events[-1], Tick))
        assert [event.message for event in run.core.received()] == [Heartbeat(n, 0, 0) for n in range(50)]


def test_a_flood_does_not_keep_the_core_from_planning() -> None:
    with running() as run:
        dealer = run.dealer("frontend")
        say(dealer, 0)
        sent = 0
        while sent < 4 * DRAIN_LIMIT:
            if dealer.send(Heartbeat(sent, 0, 0)):
                sent += 1
        wait_until(lambda: len(run.core.received()) == 4 * DRAIN_LIMIT + 1)
        between = 0
        for event in list(run.core.events):
            between = between + 1 if isinstance(event, Received) else 0
            assert between <= DRAIN_LIMIT


def test_log_actions_are_logged() -> None:
    def rule(event: Event) -> list[Action]:
        return [Log("warning", "worker lost", {"worker": "w", "requests": 3})] if isinstance(event, Received) else []

    with capture_logs() as logs, running(rule) as run:
        say(run.dealer("backend"), 1)
        wait_until(lambda: [line for line in logs if line["event"] == "worker lost"])
    [line] = [line for line in logs if line["event"] == "worker lost"]
    assert (line["log_level"], line["worker"], line["requests"]) == ("warning", "w", 3)


# ---------------------------------------------------------------- hostile and dying peers


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_hostile_bytes_at_both_sockets_never_reach_the_core(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    hostile = [[pickle.dumps(Marker(marker))], [b""], [os.urandom(512)], [b"\x91" * 500_000], [b"x"] * 1000]
    with running(echo) as run:
        for side in run.channels:
            raw = run.raw(side)
            for parts in hostile:
                raw.send_multipart(parts)
            wait_until(lambda side=side: run.channels[side].malformed == len(hostile))  # type: ignore[misc]
        assert not run.core.received()
        for side in run.channels:
            dealer = run.dealer(side)
            say(dealer, 5)
            assert wait_until(lambda dealer=dealer: dealer.receive(1), dealer.socket)  # type: ignore[misc]
        assert run.thread.is_alive()
    assert not marker.exists()


CHILD = """
import sys
import zmq
from pagemill_shared.channel import DealerChannel
from pagemill_shared.messages import Heartbeat
channel = DealerChannel(zmq.Context(), "backend", sys.argv[1], keys=None)
while not channel.send(Heartbeat(7, 0, 0)):
    channel._monitor.socket.poll()
sys.stdin.read()
"""


def test_a_killed_peer_is_told_to_the_core_without_a_send_and_only_it() -> None:
    with running() as run:
        good = run.dealer("backend")
        say(good, 1)
        wait_until(run.core.received)
        with python(CHILD, run.channels["backend"].endpoint) as child:
            wait_until(lambda: len(run.core.received()) == 2)
            peer = run.core.received()[1].peer
            child.send_signal(signal.SIGKILL)
            wait_until(lambda: run.core.of(SendFailed))
        [event] = run.core.of(SendFailed)
        assert isinstance(event, SendFailed)
        assert event.peer == peer


def test_a_failed_send_is_told_to_the_core_in_the_same_round() -> None:
    nobody = Peer("backend", b"nobody")

    def rule(event: Event) -> list[Action]:
        return [Send(nobody, Heartbeat(1, 0, 0))] if isinstance(event, Received) else []

    with running(rule) as run:
        say(run.dealer("frontend"), 1)
        wait_until(lambda: run.core.of(SendFailed))
        at = next(i for i, event in enumerate(run.core.events) if isinstance(event, SendFailed))
        assert run.core.events[at] == SendFailed(run.core.events[at].now, nobody)
        assert isinstance(run.core.events[at - 1], Received)


def test_a_core_that_keeps_sending_to_a_dead_peer_cannot_stop_the_loop() -> None:
    nobody = Peer("backend", b"nobody")

    def rule(event: Event) -> list[Action]:
        if isinstance(event, Received | SendFailed):
            return [Send(nobody, Heartbeat(1, 0, 0))]
        return []

    with running(rule) as run:
        say(run.dealer("frontend"), 1)
        wait_until(lambda: len(run.core.of(SendFailed)) >= 3)
        ticks = len(run.core.of(Tick))
        wait_until(lambda: len(run.core.of(Tick)) > ticks + 2)
        kinds = [type(event) for event in run.core.events]
        assert (SendFailed, SendFailed) not in itertools.pairwise(kinds)


# ---------------------------------------------------------------- the end


def test_stop_ends_the_loop() -> None:
    def rule(event: Event) -> list[Action]:
        return [Stop()] if isinstance(event, StopRequested) else []

    with running(rule) as run:
        run.shell.request_stop()
        run.join()
        assert run.error is None
        assert len(run.core.of(StopRequested)) == 1


def test_the_grace_period_ends_a_loop_whose_core_does_not_stop() -> None:
    with capture_logs() as logs, running(grace=0.05) as run:
        run.shell.request_stop()
        run.join()
        assert run.error is None
        assert len(run.core.of(StopRequested)) == 1
    assert "requests still run at the end of the grace period" in [line["event"] for line in logs]


def test_a_failing_core_ends_the_loop_and_is_logged_with_its_event() -> None:
    def rule(event: Event) -> list[Action]:
        if isinstance(event, Received):
            raise KeyError("lost block")
        return []

    with capture_logs() as logs, running(rule) as run:
        say(run.dealer("backend"), 77)
        run.join()
        assert isinstance(run.error, EventError)
        assert isinstance(run.error.__cause__, KeyError)
        handled = len(run.core.events)
    [line] = [line for line in logs if line["log_level"] == "error"]
    assert "Heartbeat(epoch=77, sent=0, received=0)" in line["core_event"]
    assert line["exc_info"]
    assert len(run.core.events) == handled, "a core that failed is not used again"


def test_a_message_that_cannot_be_sent_counts_as_a_failing_core() -> None:
    def rule(event: Event) -> list[Action]:
        too_large = StateReport(1, bytes(MAX_MESSAGE_BYTES))
        return [Send(event.peer, too_large)] if isinstance(event, Received) else []

    with capture_logs() as logs, running(rule) as run:
        say(run.dealer("frontend"), 1)
        run.join()
        assert isinstance(run.error, EventError)
    assert "the scheduler core failed; ending" in [line["event"] for line in logs]


def test_a_described_event_holds_nothing_that_users_wrote() -> None:
    prompt = np.arange(4242, 4245, dtype=np.int32)
    submit = SubmitRequest(1, 2, 3, "req-9", prompt, SamplingParams(logit_bias_ids=np.array([4242], np.int32)))
    text = describe(Received(1.5, Peer("frontend", b"\x01\x02"), submit))
    assert text.startswith("1.500000 frontend:0102 SubmitRequest(epoch=1, number=2, handle=3, request_id='req-9'")
    assert "prompt_token_ids=int32[3]" in text
    assert "4242" not in text
    assert describe(SendFailed(2.0, Peer("backend", b"\xff"))) == "2.000000 SendFailed backend:ff"
    assert describe(Tick(3.0)) == "3.000000 Tick"
