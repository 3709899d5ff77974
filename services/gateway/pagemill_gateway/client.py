"""The gateway's side of the protocol: which requests are alive, what the fleet can do. Pure: no socket, no clock.

The shell (``connection``) hands in messages and time and sends what comes out, in order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from pagemill_gateway.choice import TokenLogprob
from pagemill_gateway.errors import ApiError
from pagemill_gateway.prompt import unpack_logprobs
from pagemill_gateway.requests import Ending, GatewayRequest
from pagemill_shared.link import LinkState, PeerLink
from pagemill_shared.messages import (
    AbortRequest,
    Delivery,
    FleetStatus,
    GatewaySync,
    GatewayWelcome,
    PromptReport,
    RequestFailure,
    SequenceFinished,
    StateReport,
    SubmitRequest,
)
from pagemill_shared.schema import Message

_NO_FLEET = FleetStatus(0, 0, 0, "")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why no request can be served now.

    Attributes:
        lasting: False while a short wait may help: the last worker has only just gone.
    """

    reason: str
    code: str
    lasting: bool

    def as_error(self) -> ApiError:
        return ApiError(503, self.reason, code=self.code)


class SchedulerClient:
    """All requests of this gateway that are alive.

    Args:
        fingerprint: of the gateway's model and tokenizer; workers with another one cannot serve it.
        no_worker_timeout: seconds that requests wait for a worker when there is none.
    """

    def __init__(self, link: PeerLink, fingerprint: str, no_worker_timeout: float, now: float) -> None:
        self.link = link
        self.fleet = _NO_FLEET
        self.reports: list[StateReport] = []
        """Answers to state queries that have come; the shell takes them out."""
        self._fingerprint = fingerprint
        self._no_worker_timeout = no_worker_timeout
        self._fleet_known = False  # a scheduler's first word about its workers has come since it was welcomed
        self._no_worker_since = now - no_worker_timeout  # nobody waits for what has not started yet
        self._handles = itertools.count(1)
        self._live: dict[int, GatewayRequest] = {}
        self._incarnation: int | None = None

    def __len__(self) -> int:
        """Requests that are alive."""
        return len(self._live)

    # ------------------------------------------------------------ whether it can serve

    def obstacle(self, now: float, connected: bool = True) -> Obstacle | None:
        """Why a request that came now could not be served, or None.

        Args:
            connected: whether there is a connection to the scheduler. Without one new requests are sent away at once;
                open ones wait for it as long as for a scheduler that is only silent.
        """
        if self.link.state is LinkState.LOST:
            return Obstacle("the scheduler does not answer", "scheduler_lost", True)
        if self._incarnation is None:
            return Obstacle("the scheduler cannot be reached yet", "scheduler_lost", True)
        if not connected:
            return Obstacle("there is no connection to the scheduler", "scheduler_lost", True)
        if not self.fleet.ready_workers:
            waited = now - self._no_worker_since
            return Obstacle("no worker is ready", "no_worker", self._fleet_known and waited >= self._no_worker_timeout)
        if self.fleet.fingerprint and self.fleet.fingerprint != self._fingerprint:
            return Obstacle("the workers serve another model than this gateway", "model_mismatch", True)
        return None

    # ------------------------------------------------------------ from the HTTP side

    def submit(self, request: GatewayRequest) -> list[Message]:
        """Takes a request on. Between two epochs it is sent with the next one."""
        request.handle = next(self._handles)
        self._live[request.handle] = request
        return [self._submission(request)] if self.link.in_epoch else []

    def abort(self, request: GatewayRequest) -> list[Message]:
        """Nobody wants it any more. One that has ended or was never submitted: nothing to do."""
        if self._live.pop(request.handle, None) is None or not self.link.in_epoch:
            return []  # between two epochs the sync will not list it
        return [AbortRequest(*self.link.next_number(), request.handle)]

    def fail_all(self, error: ApiError) -> list[Message]:
        """Ends every open request with ``error`` and tells the scheduler, should it listen."""
        messages: list[Message] = []
        for request in list(self._live.values()):
            request.output.fail(error)
            messages += self.abort(request)
        return messages

    # ------------------------------------------------------------ from the scheduler

    def received(self, now: float, message: Message) -> list[Message]:
        """Handles one message; what to send.

        Raises:
            ProtocolError: the message is not for a gateway.
        """
        outcome = self.link.received(now, message)
        messages = list(outcome.send)
        for item in outcome.apply:
            messages += self._apply(now, item)
        return messages

    def tick(self, now: float) -> list[Message]:
        """What is due, by ``link.deadline`` at the latest; notices a scheduler that has gone silent."""
        messages = self.link.tick(now)
        if self.link.state is LinkState.LOST:
            # What it said of its workers stays: one that was only slow goes on with the epoch and does not repeat it.
            messages += self.fail_all(ApiError(503, "the scheduler does not answer", code="scheduler_lost"))
        return messages

    def _apply(self, now: float, message: Message) -> list[Message]:
        match message:
            case Delivery():
                return self._delivery(now, message)
            case FleetStatus():
                self._fleet_known = True
                self._set_fleet(now, message)
            case StateReport():
                self.reports.append(message)
            case GatewayWelcome():
                return self._welcome(now, message)
        return []

    def _welcome(self, now: float, welcome: GatewayWelcome) -> list[Message]:
        if self._incarnation is not None and self._incarnation != welcome.incarnation:
            for request in self._live.values():
                request.output.fail(ApiError(503, "the scheduler was restarted", code="scheduler_lost"))
            self._live.clear()
            self._set_fleet(now, _NO_FLEET)
            self._fleet_known = False
        self._incarnation = welcome.incarnation
        handles = np.fromiter(self._live, np.int32, len(self._live))
        sync = GatewaySync(*self.link.next_number(), handles)
        messages: list[Message] = [sync]
        for request in self._live.values():
            messages.append(self._submission(request))
            for sequence, choice in enumerate(request.choices):
                if choice.ended_by_stop_string:  # what was said of it may have been lost with the old epoch
                    messages.append(self._finished(request, sequence))
        return messages

    def _set_fleet(self, now: float, fleet: FleetStatus) -> None:
        if self.fleet.ready_workers and not fleet.ready_workers:
            self._no_worker_since = now
        self.fleet = fleet

    def _submission(self, request: GatewayRequest) -> SubmitRequest:
        return SubmitRequest(
            *self.link.next_number(),
            request.handle,
            request.request_id,
            request.prompt.array,
            request.sampling,
            request.priority,
            request.cache_salt,
        )

    def _finished(self, request: GatewayRequest, sequence: int) -> SequenceFinished:
        kept = request.choices[sequence].num_tokens
        return SequenceFinished(*self.link.next_number(), request.handle, sequence, kept)

    # ------------------------------------------------------------ deliveries

    def _delivery(self, now: float, delivery: Delivery) -> list[Message]:
        messages: list[Message] = []
        tokens = delivery.token_ids.tolist()
        logprobs = unpack_logprobs(delivery.logprobs)
        for report in delivery.reports:
            messages += self._report(report)
        start = 0
        for handle, sequence, offset, count, finish, cached, score in zip(
            delivery.handles.tolist(),
            delivery.sequences.tolist(),
            delivery.offsets.tolist(),
            delivery.counts.tolist(),
            delivery.finishes.tolist(),
            delivery.cached_tokens.tolist(),
            delivery.scores.tolist(),
            strict=True,
        ):
            end = start + count
            request = self._live.get(handle)
            if request is not None:
                request.cached_tokens = cached
                entries = None
                if request.sampling.logprobs is not None:
                    entries = [logprobs[row] for row in range(start, end) if row in logprobs]
                ending = self._deliver(now, request, sequence, offset, tokens[start:end], finish, entries)
                if ending is not Ending.NONE:
                    messages += self._end(request, sequence, ending, score)
            start = end
        for failure in delivery.failures:
            self._fail(failure)
        return messages

    def _report(self, report: PromptReport) -> list[Message]:
        request = self._live.get(report.owner)
        if request is None:
            return []
        try:
            request.prompt.take(report)
        except ValueError as error:
            request.output.fail(ApiError(500, f"internal error: {error}", code="internal_error"))
            return self.abort(request)
        return []

    def _deliver(
        self,
        now: float,
        request: GatewayRequest,
        sequence: int,
        offset: int,
        tokens: list[int],
        finish: int,
        logprobs: list[TokenLogprob] | None,
    ) -> Ending:
        try:
            return request.deliver(now, sequence, offset, tokens, finish, logprobs)
        except ValueError as error:
            request.output.fail(ApiError(500, f"internal error: {error}", code="internal_error"))
            return Ending.REFUSED

    def _end(self, request: GatewayRequest, sequence: int, ending: Ending, score: float) -> list[Message]:
        if ending is Ending.UNREAD:
            request.output.fail(
                ApiError(503, "the client does not read its stream: it was cut", code="client_too_slow")
            )
        if ending in (Ending.UNREAD, Ending.REFUSED):
            return self.abort(request)
        request.choices[sequence].score = score
        if request.done:
            del self._live[request.handle]
        return [self._finished(request, sequence)] if ending is Ending.BY_STOP_STRING else []

    def _fail(self, failure: RequestFailure) -> None:
        request = self._live.pop(failure.handle, None)
        if request is not None:
            request.output.fail(request.error_of(failure))
