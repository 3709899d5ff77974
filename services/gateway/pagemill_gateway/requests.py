"""One prompt on its way through the scheduler: one handle there, one choice here for each of its sequences.

An HTTP request has one :class:`Output`, and one :class:`GatewayRequest` for each prompt in it. The scheduler client
puts tokens in, the HTTP side takes text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pagemill_gateway.choice import Choice, TokenLogprob
from pagemill_gateway.errors import ApiError
from pagemill_gateway.output import Output
from pagemill_gateway.prompt import Prompt
from pagemill_shared.messages import RequestFailure
from pagemill_shared.sampling import SamplingParams


class Ending(Enum):
    """What a delivery did to a sequence."""

    NONE = "none"
    BY_SCHEDULER = "by scheduler"
    BY_STOP_STRING = "by stop string"
    """Found here, before the scheduler had ended the sequence."""
    UNREAD = "unread"
    """The client does not read: abort the request."""
    REFUSED = "refused"
    """What came makes no sense: abort the request."""


class Timing(Protocol):
    """Where sequences report their latencies, in seconds."""

    def first_token(self, seconds: float) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def finished(self, seconds: float, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class GatewayRequest:
    """One prompt on its way through the scheduler.

    Attributes:
        request_id: what people call it; not a key.
        choices: [sampling.n] one per sequence.
        shown: how many of them the client gets to see.
        arrived: when the HTTP request came, on the client's clock.
        field_names: what the client calls a field that the scheduler finds at fault, where that is another name.
        handle: the scheduler's name for it, given when it is submitted.
        cached_tokens: prompt tokens that the prefix cache held.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    priority: int
    cache_salt: str
    choices: Sequence[Choice]
    shown: int
    output: Output
    timing: Timing
    arrived: float
    field_names: Mapping[str, str]
    handle: int = 0
    cached_tokens: int = 0
    open_choices: int = field(init=False)

    def __post_init__(self) -> None:
        self.open_choices = len(self.choices)

    @property
    def done(self) -> bool:
        return not self.open_choices

    def answers(self) -> list[Choice]:
        """What the client gets to see. Where that is not all, the most likely texts, best first; only at the end."""
        if self.shown == len(self.choices):
            return list(self.choices)
        first = self.choices[0].index
        best = sorted(self.choices, key=lambda choice: -choice.cumulative_logprob)[: self.shown]
        for index, choice in enumerate(best, first):
            choice.index = index
            choice.score = choice.cumulative_logprob
        return best

    def error_of(self, failure: RequestFailure) -> ApiError:
        """The scheduler's refusal, in the names of the client's own fields."""
        field_name = self.field_names.get(failure.param, failure.param)
        message = failure.message
        if failure.code == "too_many_sequences":  # its message has the numbers, but cannot know the name
            message = f"{field_name}: {message}"
        return ApiError.of_code(failure.code, message, field_name)

    def deliver(
        self,
        now: float,
        sequence: int,
        offset: int,
        tokens: list[int],
        finish: int,
        logprobs: list[TokenLogprob] | None,
    ) -> Ending:
        """Takes output tokens of one sequence from number ``offset`` on; what it already has is skipped.

        Raises:
            ValueError: there is no such sequence; tokens are missing between what it has and ``offset``, or
                log-probabilities that were asked for.
        """
        if sequence >= len(self.choices):
            raise ValueError(f"sequence {sequence} is none of {len(self.choices)}")
        choice = self.choices[sequence]
        if choice.finish_reason is not None:
            return Ending.NONE  # surplus of the pipeline, or a delivery after a resync
        if logprobs is not None and len(logprobs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens came with {len(logprobs)} log-probabilities")
        known = choice.num_tokens - offset
        if known < 0:
            raise ValueError(f"delivery begins at token {offset}, but only {choice.num_tokens} have come")
        if known:
            tokens = tokens[known:]
            logprobs = logprobs[known:] if logprobs is not None else None
        if tokens:
            self._observe(now, choice)
        elif not finish:
            return Ending.NONE
        choice.push(tokens, finish, logprobs)
        self.output.add(choice, len(tokens))
        if choice.finish_reason is not None:
            self.open_choices -= 1
            self.timing.finished(now - self.arrived, choice.finish_reason)
            return Ending.BY_SCHEDULER if finish else Ending.BY_STOP_STRING
        return Ending.UNREAD if self.output.unread else Ending.NONE

    def _observe(self, now: float, choice: Choice) -> None:
        if choice.last_token is None:
            self.timing.first_token(now - self.arrived)
        else:
            self.timing.next_token(now - choice.last_token)
        choice.last_token = now
