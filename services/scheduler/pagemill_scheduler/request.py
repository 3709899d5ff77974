"""Requests (sequence groups) and their sequences: what the scheduler knows of them outside the arrays of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from pagemill_scheduler.gateway import GatewayState
from pagemill_shared.messages import FinishReason, PromptReport, RequestFailure
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Float32Array, Int32Array

if TYPE_CHECKING:
    from pagemill_scheduler.beams import BeamSearch


class Status(StrEnum):
    """Where a request stands: it moves between waiting and running, and from both to ended."""

    WAITING = "waiting"
    """In the queue; never started, or preempted."""
    RUNNING = "running"
    """Its sequences have slots on a worker."""
    ENDED = "ended"
    """Finished, failed or aborted: owns nothing."""


# Not looked up in the class each time, which takes ten times as long.
_WAITING, _ENDED, _NOT_FINISHED = Status.WAITING, Status.ENDED, FinishReason.NOT_FINISHED


class IllegalTransitionError(Exception):
    """The core tried to move a request where it cannot go: a bug in the scheduler, never a peer's fault."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """Log-probabilities of one output token: the sampled one first, then the most likely ones."""

    rank: int
    token_ids: Int32Array
    values: Float32Array


@dataclass(frozen=True, slots=True)
class Parked:
    """What a preempted sequence had.

    Attributes:
        blocks: host blocks that hold its keys and values if the request was swapped out; empty if they are recomputed.
        computed: leading tokens whose keys and values were computed.
    """

    blocks: list[int]
    computed: int


class Sequence:
    """One output of a request.

    While the sequence has a slot, its tokens live in the worker's arrays and ``tokens`` is what they were when it
    joined; otherwise ``tokens`` is the truth.

    Attributes:
        tokens: prompt and output so far.
        slot: its row on the request's worker, -1 without one.
        in_flight: tokens of plans that were in flight when it was preempted; their results still count.
        logprobs: one entry per output token where the request asks for them.
        parked: where its keys and values were when the request was preempted.
        score: of a finished beam hypothesis.
    """

    # Written out, here and for requests: what a dataclass makes of its fields is not compiled, and takes five times as
    # long.
    def __init__(
        self,
        request: Request,
        index: int,
        tokens: Int32Array,
        finish: FinishReason = _NOT_FINISHED,
        logprobs: list[LogprobEntry] | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.slot = -1
        self.in_flight = 0
        self.finish = finish
        self.logprobs: list[LogprobEntry] = [] if logprobs is None else logprobs
        self.parked: Parked | None = None
        self.score = 0.0

    @property
    def finished(self) -> bool:
        return self.finish is not _NOT_FINISHED

    def append(self, token: int) -> None:
        """Add an output token; only for a sequence without a slot."""
        self.tokens = np.append(self.tokens, np.int32(token)).astype(np.int32, copy=False)


class Request:
    """A request: the unit of admission, preemption and failure (the paper's sequence group).

    Attributes:
        arrival: running number of arrival, unique; orders requests of equal priority.
        worker: identity of the worker that runs it, empty otherwise.
        swapped_to: identity of the worker whose host memory holds it, empty otherwise.
        seats: slots that it holds or has reserved on its worker.
        forked: its sequences have gone their own ways.
        beams: the state of its beam search.
        key: orders requests: lower first; ``arrival`` breaks ties.
        cached_tokens: prompt tokens found in the prefix cache when it first started.
        reports: what chunks of its prompt had to tell, in the order of their positions.
        deaths: workers that died while they ran it.
        waits_for: why it is not running, for people; empty while it runs, and before a plan has considered it.
        failure: the error that it ended with.
        limit: most tokens that a sequence of it may have, prompt included.
        width: as in its sampling parameters; ends: the FinishReason of each token that ends a sequence of it, as
            EndTokens gives it.
        plain: it samples, freely, and asks nothing about its prompt.
        highest_token: largest token id of the prompt, -1 without one.
    """

    def __init__(
        self,
        gateway: GatewayState,
        handle: int,
        request_id: str,
        prompt: Int32Array,
        sampling: SamplingParams,
        ends: dict[int, int],
        priority: int,
        arrival: int,
        arrived_at: float,
        key: int,
        cache_salt: str,
    ) -> None:
        self.gateway = gateway
        self.handle = handle
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.priority = priority
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.key = key
        self.cache_salt = cache_salt
        self.sequences: list[Sequence] = []
        self.status = _WAITING
        self.worker = ""
        self.swapped_to = ""
        self.seats = 0
        self.forked = False
        self.beams: BeamSearch | None = None
        self.cached_tokens = 0
        self.reports: list[PromptReport] = []
        self.deaths = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.swapped_bytes = 0
        self.started_at: float | None = None
        self.waits_for = ""
        self.failure: RequestFailure | None = None
        self.limit = len(prompt) + sampling.max_tokens
        self.width = sampling.width
        self.ends = ends
        self.plain = not (sampling.beam_width or sampling.grammar or sampling.reports_prompt)
        # Faster than ``max``.
        self.highest_token: int = prompt.item(prompt.argmax()) if len(prompt) else -1

    @property
    def reported(self) -> int:
        """Positions of the prompt, from the first one on, that need not be reported any more."""
        return self.reports[-1].end if self.reports else 0

    @property
    def reports_more(self) -> bool:
        """Whether chunks of its prompt still have something to tell."""
        return self.sampling.reports_prompt and self.reported < len(self.prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts requests: first come first served within equal keys. Never changes."""
        return self.key, self.arrival

    @property
    def is_fresh(self) -> bool:
        """Whether it is new and nothing about it is out of the ordinary: then it can start together with others."""
        if self.started_at is not None or not self.plain:
            return False
        return self.width == 1 or len(self.unfinished) == self.width

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def seats_needed(self) -> int:
        """Slots that it takes when it starts."""
        return len(self.unfinished) if self.beams is None else self.width

    @property
    def in_flight(self) -> int:
        return sum(sequence.in_flight for sequence in self.sequences)

    def move(self, status: Status) -> None:
        """
        Raises:
            IllegalTransitionError: leaves the request as it was.
        """
        if status is self.status or self.status is _ENDED:
            raise IllegalTransitionError(f"request {self.request_id}: {self.status.value} -> {status.value}")
        self.status = status


def finish_reason(sampling: SamplingParams, token: int, output_length: int) -> FinishReason:
    """Whether an output that has just grown to ``output_length`` tokens, the last being ``token``, has ended.

    The specification of the vectorised check in ``results``.
    """
    if output_length >= sampling.min_tokens:
        if not sampling.ignore_eos and token in sampling.eos_token_ids:
            return FinishReason.EOS
        if token in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
    return FinishReason.LENGTH if output_length >= sampling.max_tokens else FinishReason.NOT_FINISHED
