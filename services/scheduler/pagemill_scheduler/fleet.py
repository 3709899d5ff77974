"""Workers come and go: joining, leaving, loss, epochs, deadlines, and what gateways are told of it."""

from __future__ import annotations

from pagemill_scheduler import lifecycle
from pagemill_scheduler.events import Peer
from pagemill_scheduler.pool import BlockPool, HostPool
from pagemill_scheduler.request import Parked, Request
from pagemill_scheduler.state import State
from pagemill_scheduler.table import SlotTable
from pagemill_scheduler.worker import Notes, WorkerState, max_length
from pagemill_shared.messages import FleetStatus, WorkerDismissed, WorkerHello, WorkerWelcome


def join(state: State, peer: Peer, hello: WorkerHello, now: float) -> None:
    """A worker said hello: a new one, or one that we know on a new connection or after a fault."""
    others = [w for w in state.workers.values() if w.identity != hello.identity]
    refusal = _refusal(state, hello, others)
    known = state.workers.get(hello.identity)
    if known is not None:
        drop(state, known, "it said hello again", died=False)
    if refusal:
        state.send(peer, WorkerDismissed(refusal))
        state.log("error", "worker refused", worker=hello.identity, reason=refusal)
        refresh_status(state, now)
        return
    budget = state.config.prefill_budget(hello.prefill_tokens_per_s)
    worker = WorkerState(peer, hello, now, *_fresh(state, hello), budget, heartbeat_at=now, progress_at=now)
    state.workers[hello.identity] = worker
    state.peers[peer] = worker
    _welcome(state, worker)
    state.log(
        "info",
        "worker joined",
        worker=worker.identity,
        model=hello.model,
        device=hello.device,
        dtype=hello.dtype,
        kernels=hello.kernels,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        prefill_budget=worker.prefill_budget,
        epoch=worker.outgoing.epoch,
    )
    if worker.max_length < hello.max_model_len:
        state.log(
            "warning",
            "the worker's blocks hold fewer tokens than the model's context: longer requests are refused",
            worker=worker.identity,
            pool_tokens=worker.max_length,
            max_model_len=hello.max_model_len,
        )
    refresh_status(state, now)


def _refusal(state: State, hello: WorkerHello, others: list[WorkerState]) -> str:
    if others and others[0].hello.fingerprint != hello.fingerprint:
        return f"model fingerprint {hello.fingerprint} differs from the other workers' {others[0].hello.fingerprint}"
    for gateway in state.gateways.values():
        if not others and gateway.fingerprint != hello.fingerprint:
            return (
                f"model fingerprint {hello.fingerprint} differs from gateway {gateway.identity}'s {gateway.fingerprint}"
            )
    return ""


def _fresh(state: State, hello: WorkerHello) -> tuple[SlotTable, BlockPool, HostPool]:
    table = SlotTable(state.config.seats, max_length(hello), hello.block_size)
    return table, BlockPool(hello.num_blocks, hello.block_size), HostPool(hello.num_swap_blocks)


def _welcome(state: State, worker: WorkerState) -> None:
    epoch = state.next_epoch()
    worker.outgoing.begin(epoch)
    worker.incoming.begin(epoch)
    config = state.config
    state.send(worker.peer, WorkerWelcome(epoch, config.seats, config.max_num_batched_tokens))


def begin_epoch(state: State, worker: WorkerState, reason: str, now: float) -> None:
    """A message was lost: what the worker holds is uncertain, so it starts anew and its sequences are recomputed."""
    state.counters.resyncs += 1
    state.log("warning", "worker epoch ended", worker=worker.identity, reason=reason, epoch=worker.outgoing.epoch)
    _requeue(state, worker, f"worker {worker.identity} was resynchronised", died=False)
    worker.table, worker.pool, worker.host = _fresh(state, worker.hello)
    worker.notes = Notes()
    worker.progress_at = now
    _welcome(state, worker)


def lose(state: State, worker: WorkerState, reason: str, now: float) -> None:
    """The worker is gone or stuck: its requests move. What it still sends belongs to an epoch that has ended."""
    state.counters.workers_lost += 1
    state.log("error", "worker lost", worker=worker.identity, reason=reason, requests=len(_requests(worker)))
    drop(state, worker, f"worker {worker.identity} was lost: {reason}", died=True)
    refresh_status(state, now)


def leave(state: State, worker: WorkerState, now: float) -> None:
    """The worker was told to stop. Its requests move at once if anyone can take them; else it finishes them."""
    if worker.leaving:
        return
    worker.leaving = True
    state.log("info", "worker leaving", worker=worker.identity, requests=len(_requests(worker)))
    refresh_status(state, now)


def dismiss_leaving(state: State) -> None:
    """Let leaving workers go that run nothing any more, or whose requests another worker can take over."""
    for worker in [w for w in state.workers.values() if w.leaving]:
        if len(worker.table) and not state.ready_workers():
            continue
        drop(state, worker, f"worker {worker.identity} is leaving", died=False)
        state.send(worker.peer, WorkerDismissed("its work has moved"))
        state.log("info", "worker dismissed", worker=worker.identity)


def drop(state: State, worker: WorkerState, reason: str, *, died: bool) -> None:
    """Forget a worker; its requests are queued again, or failed if their workers died too often."""
    _requeue(state, worker, reason, died=died)
    state.workers.pop(worker.identity)
    state.peers.pop(worker.peer, None)


def _requests(worker: WorkerState) -> list[Request]:
    return list({id(s.request): s.request for s in worker.table.sequences()}.values())


def _requeue(state: State, worker: WorkerState, reason: str, *, died: bool) -> None:
    for request in _requests(worker):
        request.deaths += died
        lifecycle.preempt(state, request, reason, keep_blocks=False)
        if request.deaths >= state.config.max_deaths:
            message = f"{request.deaths} workers died while they ran this request; it is not tried again"
            lifecycle.fail(state, request, "worker_lost", message)
    for request in state.queue:
        if request.swapped_to == worker.identity:
            request.swapped_to = ""  # what its host memory held is recomputed
            for sequence in request.sequences:
                if sequence.parked is not None:
                    sequence.parked = Parked([], sequence.parked.computed)
    # Tokens on their way for sequences that were preempted before will not come: they are sampled again.
    for flight in worker.flights:
        for report in flight.reports:
            report.sequence.in_flight -= report.orphan
        for sequence in flight.orphans.values():
            sequence.in_flight -= 1
            if not sequence.request.in_flight:
                lifecycle.sample_anew(sequence.request)
    worker.flights.clear()


def check_deadlines(state: State, now: float) -> None:
    """Health means progress: silence, or a plan that takes far longer than its tokens explain, is a loss."""
    for worker in list(state.workers.values()):
        if now - worker.last_heard > state.config.peer_timeout:
            lose(state, worker, f"silent for {now - worker.last_heard:.1f} s", now)
        elif worker.flights:
            flight = worker.flights[0]
            allowed = state.config.plan_deadline + 10.0 * flight.num_tokens / max(
                worker.hello.prefill_tokens_per_s, 1.0
            )
            if now - worker.progress_at > allowed:
                lose(state, worker, f"no result of iteration {flight.iteration} within {allowed:.1f} s", now)


def refresh_status(state: State, now: float) -> None:
    """The set of workers has changed: tell the gateways if that changes what is ready."""
    state.fleet_changed = True
    ready = state.ready_workers()
    if not ready:
        if state.no_worker_since is None:
            state.no_worker_since = now
        status = FleetStatus(0, 0, 0, "")
    else:
        state.no_worker_since = None
        first = ready[0].hello
        longest = max(ready, key=lambda worker: worker.max_length)
        pool_tokens = longest.hello.num_blocks * longest.block_size
        status = FleetStatus(len(ready), longest.max_length, first.vocab_size, first.fingerprint, pool_tokens)
    if status != state.fleet:
        state.fleet = status
        for gateway in state.gateways.values():
            if gateway.peer is not None:
                state.send(gateway.peer, status)
