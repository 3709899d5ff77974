"""Gateways and what they ask for: hello, sync, submit, abort, finished, acknowledgements."""

from __future__ import annotations

from pagemill_scheduler import lifecycle
from pagemill_scheduler.beams import BeamSearch
from pagemill_scheduler.events import Peer
from pagemill_scheduler.gateway import GatewayState
from pagemill_scheduler.placement import can_ever_hold
from pagemill_scheduler.request import Request, Sequence
from pagemill_scheduler.state import State
from pagemill_shared.messages import (
    FinishReason,
    GatewayHello,
    GatewaySync,
    GatewayWelcome,
    RequestFailure,
    SequenceFinished,
    SubmitRequest,
)

MAX_KEY = 2.0**62
"""Request keys stand in arrays of int64."""


def join(state: State, peer: Peer, hello: GatewayHello, now: float) -> None:
    """A gateway said hello: a new one, or one that we know on a new connection. Its requests stay until it syncs."""
    gateway = state.gateways.get(hello.identity)
    if gateway is None:
        gateway = GatewayState(hello.identity, hello.fingerprint, state.next_gateway_index(), peer, now)
        state.gateways[hello.identity] = gateway
        state.log("info", "gateway joined", gateway=hello.identity)
    elif gateway.peer is not None:
        state.peers.pop(gateway.peer, None)
    gateway.fingerprint = hello.fingerprint
    gateway.peer = peer
    gateway.heartbeat_at = now
    state.peers[peer] = gateway
    begin_epoch(state, gateway)


def begin_epoch(state: State, gateway: GatewayState) -> None:
    """Welcome, then everything that its requests have produced: it skips what it has."""
    if gateway.peer is None:
        return
    epoch = state.next_epoch()
    gateway.outgoing.begin(epoch)
    gateway.incoming.begin(epoch)
    state.send(gateway.peer, GatewayWelcome(epoch, state.incarnation))
    state.send(gateway.peer, state.fleet)
    # What the current event has gathered so far is contained in the redelivery.
    builder = gateway.delivery
    ended = gateway.take_unacknowledged() + builder.ended
    builder.reset()
    builder.ended.extend(ended)
    for request in [*gateway.requests.values(), *ended]:
        if request.failure is not None:
            builder.add_failure(request.failure)
            continue
        builder.add_reports(request.reports)
        if request.beams is not None and not request.beams.done:
            continue
        for sequence in request.sequences:
            output = state.tokens_of(sequence)[len(request.prompt) :]
            if len(output) or sequence.finished:
                builder.add_sequence(sequence, 0, output.copy())


def lose(state: State, gateway: GatewayState, reason: str) -> None:
    """Nobody is left who could want its answers: abort its requests."""
    state.log("warning", "gateway lost", gateway=gateway.identity, reason=reason, requests=len(gateway.requests))
    for request in list(gateway.requests.values()):
        state.counters.requests_aborted += 1
        lifecycle.end(state, request, acknowledge=False)
    del state.gateways[gateway.identity]
    if gateway.peer is not None:
        state.peers.pop(gateway.peer, None)


def sync(state: State, gateway: GatewayState, message: GatewaySync) -> None:
    alive = set(message.handles.tolist())
    for handle in gateway.requests.keys() - alive:
        abort(state, gateway, handle)


def submit(state: State, gateway: GatewayState, message: SubmitRequest, now: float) -> None:
    if gateway.knows(message.handle):
        return  # submitted again after a resync
    request = Request(
        gateway,
        message.handle,
        message.request_id,
        message.prompt_token_ids,
        message.sampling,
        state.end_tokens.of(message.sampling),
        message.priority,
        state.next_arrival(),
        now,
        key=_key(state, message.priority, now),
        cache_salt=message.cache_salt,
    )
    refusal = _refusal(state, request)
    if refusal is not None:
        gateway.delivery.add_failure(refusal)
        request.failure = refusal
        gateway.delivery.ended.append(request)
        state.counters.requests_failed += 1
        state.log("info", "request refused", request_id=request.request_id, code=refusal.code, reason=refusal.message)
        return
    if message.sampling.beam_width:
        request.beams = BeamSearch(message.sampling)
        request.sequences.append(Sequence(request, 0, message.prompt_token_ids))
    else:
        for index in range(message.sampling.n):
            request.sequences.append(Sequence(request, index, message.prompt_token_ids))
        request.forked = message.sampling.n == 1
    gateway.requests[message.handle] = request
    state.queue.add(request)


def _key(state: State, priority: int, now: float) -> int:
    """With ageing, a request that came ``priority_aging`` seconds earlier counts as much as one step of priority.

    All waiting requests age alike, so their order never changes and the key can be fixed on arrival.
    """
    aging = state.config.priority_aging
    if not aging:
        return priority
    return int(max(min((priority * aging + now) * 1e6, MAX_KEY), -MAX_KEY))


def _refusal(state: State, request: Request) -> RequestFailure | None:
    """Why the request can never be served by the workers there are. Without a worker it waits for one."""

    if state.stopping:
        return RequestFailure(request.handle, "server_stopping", "the server is stopping", "")
    if not len(request.prompt):
        return RequestFailure(request.handle, "invalid_request", "the prompt is empty", "prompt")
    return never_fits(state, request) if state.fleet.ready_workers else None


def never_fits(state: State, request: Request) -> RequestFailure | None:
    """The failure of a request that no ready worker can ever run, with the numbers. Some worker must be ready."""
    vocab_size = state.fleet.vocab_size
    if request.highest_token >= vocab_size:
        message = f"token id {request.highest_token} is outside the vocabulary of {vocab_size}"
        return RequestFailure(request.handle, "invalid_request", message, "prompt")
    workers = state.ready_workers()
    for worker in workers:
        if can_ever_hold(state, worker, request):
            return None
    sampling = request.sampling
    longest = max(worker.max_length for worker in workers)
    if request.limit > longest:
        message = (
            f"the request needs up to {request.limit} tokens (prompt {len(request.prompt)} + max_tokens "
            f"{sampling.max_tokens}), but no worker holds more than {longest}"
        )
        param = "prompt" if len(request.prompt) >= longest else "max_tokens"
        return RequestFailure(request.handle, "context_length_exceeded", message, param)
    param = "beam_width" if sampling.beam_width else "n"
    if request.width > state.config.seats:
        message = f"{request.width} sequences at once were asked for, but a worker runs at most {state.config.seats}"
        return RequestFailure(request.handle, "too_many_sequences", message, param)
    worker = max(workers, key=lambda w: w.pool.num_blocks)
    message = (
        f"{request.width} sequences of up to {request.limit} tokens need {worker.most_blocks(request)} blocks of "
        f"{worker.block_size} tokens, but the largest pool has {worker.pool.num_blocks}"
    )
    return RequestFailure(request.handle, "too_many_sequences", message, param)


def abort(state: State, gateway: GatewayState, handle: int) -> None:
    """The client is gone. Of a request that is not (or no longer) known: nothing to do."""
    request = gateway.requests.get(handle)
    if request is None:
        state.counters.ignored_messages += 1
        return
    state.counters.requests_aborted += 1
    lifecycle.end(state, request, acknowledge=False)


def sequence_finished(state: State, gateway: GatewayState, message: SequenceFinished) -> None:
    """A stop string was found: the gateway needs nothing more of this sequence, and knows its end already."""
    request = gateway.requests.get(message.handle)
    if request is None or message.sequence >= len(request.sequences):
        state.counters.ignored_messages += 1
        return
    sequence = request.sequences[message.sequence]
    if request.beams is not None or sequence.finished:
        state.counters.ignored_messages += 1  # the outputs of a beam search are delivered when all of it is over
        return
    sequence.finish = FinishReason.STOP_TOKEN
    if request.unfinished:
        lifecycle.finish_one(state, sequence)
    else:
        state.counters.requests_finished += 1
        lifecycle.end(state, request, acknowledge=False)


def expire(state: State, now: float) -> None:
    """Fail what waits in vain: no worker is left for too long, or those that are left are too small."""
    if state.no_worker_since is not None:
        config, since = state.config, state.no_worker_since
        for request in list(state.queue):
            waited, patience = now - max(since, request.arrived_at), config.no_worker_timeout
            if request.arrived_at < since:  # open when the last worker went: its client may have half an answer
                patience = max(patience, config.worker_return_timeout)
            if waited >= patience:
                message = f"no worker has been ready for {waited:.1f} s"
                lifecycle.fail(state, request, "no_worker", message)
    elif state.fleet_changed:
        for request in list(state.queue):
            failure = never_fits(state, request)
            if failure is not None:
                lifecycle.fail(state, request, failure.code, failure.message, failure.param)
        state.fleet_changed = False
