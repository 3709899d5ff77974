"""What the scheduler core is told about its policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIN_PREFILL_TOKENS = 64
"""An iteration may compute so many prompt tokens on any worker: fewer would waste the reading of the weights."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """The policy of one scheduler. Times are in seconds.

    Attributes:
        max_num_seqs: most sequences that one worker runs at once.
        max_num_batched_tokens: token budget of one iteration, prefill chunks included.
        max_prefill_seconds: what the prompt tokens of one iteration may take by their worker's measured rate; 0 means
            that only the token budget bounds them.
        pipeline_depth: plans in flight per worker, 1 or 2.
        preemption_mode: what happens to the keys and values of a preempted request: ``swap`` to host memory while there
            is room, ``recompute``, or ``auto``, whatever costs less by the worker's measured rates.
        prefix_caching: keep full blocks for requests that begin with the same tokens.
        priority_aging: seconds of waiting that outweigh one step of priority; 0 means that none does.
        watermark: share of a worker's pool that admission leaves free, so that a newcomer is not thrown out by the
            next block that a running sequence needs.
        heartbeat_interval: how often each peer hears from us.
        peer_timeout: silence after which a peer is lost.
        plan_deadline: time that any plan may take, beside what its tokens need at the worker's measured rate.
        no_worker_timeout: how long requests that come while no worker is ready wait for one, before they fail.
        worker_return_timeout: how long those that were open when the last worker went wait, if that is longer.
        grammar_timeout: how long a sequence waits for its worker to compile its grammar; without it, it fails.
        max_deaths: deaths of its worker after which a request is failed instead of moved (it may be the cause).
        check_invariants: check the whole state after every event.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefill_seconds: float = 0.0
    pipeline_depth: int = 2
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    prefix_caching: bool = True
    priority_aging: float = 0.0
    watermark: float = 0.01
    heartbeat_interval: float = 0.5
    peer_timeout: float = 3.0
    plan_deadline: float = 30.0
    no_worker_timeout: float = 5.0
    worker_return_timeout: float = 60.0
    grammar_timeout: float = 10.0
    max_deaths: int = 2
    check_invariants: bool = False

    @property
    def seats(self) -> int:
        """Most running sequences per worker: every one of them must fit the token budget of an iteration, or those
        that are left over would starve."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def prefill_budget(self, tokens_per_s: float) -> int:
        """Most prompt tokens of one iteration on a worker that computes ``tokens_per_s`` of them: all streams on it
        stand still while they are computed."""
        if not self.max_prefill_seconds:
            return self.max_num_batched_tokens
        bound = max(tokens_per_s * self.max_prefill_seconds, float(MIN_PREFILL_TOKENS))
        return int(min(bound, float(self.max_num_batched_tokens)))
