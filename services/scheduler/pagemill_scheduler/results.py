"""Takes in the result of an iteration: records tokens, ends sequences, gathers deliveries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagemill_scheduler import beam_step, lifecycle, naming
from pagemill_scheduler.deliveries import finish_codes
from pagemill_scheduler.request import LogprobEntry, Request, Sequence, Status, finish_reason
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import Flight, WorkerState
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import FinishReason, IterationResult, RowFault, TokenLogprobs
from pagemill_shared.schema import Int32Array


def apply_result(state: State, worker: WorkerState, result: IterationResult) -> None:
    """Record the tokens of the worker's oldest plan in flight.

    Raises:
        ProtocolError: the result does not answer that plan; nothing was changed.
    """
    flight = worker.flights[0]
    tokens = result.token_ids
    if len(tokens) != len(flight.slots):
        raise ProtocolError(f"iteration {flight.iteration} has {len(flight.slots)} tokens to sample, got {len(tokens)}")
    if tokens.size and tokens.max() >= worker.hello.vocab_size:
        raise ProtocolError(f"token {tokens.max()} is outside the vocabulary of {worker.hello.vocab_size}")
    entries, candidates = _entries(result.logprobs), _entries(result.candidates)
    _check_entries(worker, flight, tokens, entries, candidates)
    faults = {fault.slot: fault for fault in result.faults}

    for index, sequence in flight.orphans.items():
        fault = faults.get(int(flight.slots[index]))
        _take_orphan(state, worker, sequence, int(tokens[index]), entries.get(index), fault)
    for faulty in np.flatnonzero(flight.live & (tokens < 0)):
        if flight.live[faulty]:  # failing a row takes the others of its request out of the flight, too
            slot = int(flight.slots[faulty])
            _fail_row(state, worker, worker.table.sequence(slot).request, faults.get(slot))
    good = flight.live & (tokens >= 0)
    worker.flights.popleft()
    if worker.table.num_beams:
        beam = good & worker.table.beam[flight.slots]
        beam_step.advance_all(state, worker, flight, np.flatnonzero(beam), candidates)
        good &= ~beam
    _record(state, worker, flight, good, tokens, entries)


def _record(
    state: State,
    worker: WorkerState,
    flight: Flight,
    good: npt.NDArray[np.bool_],
    tokens: Int32Array,
    entries: dict[int, LogprobEntry],
) -> None:
    """One vectorised pass over the rows with a token; Python runs only for those that end or want log-probabilities."""
    table = worker.table
    indices: Int32Array = np.flatnonzero(good).astype(np.int32)
    if not len(indices):
        return
    slots, tokens = flight.slots[indices], tokens[indices]
    table.append(slots, tokens)
    hit = table.stopped(slots, tokens)
    finishes = finish_codes(hit, table.length[slots] >= table.limit[slots])
    state.counters.generation_tokens += len(slots)
    for i in np.flatnonzero(hit):
        finishes[i] = _which_end(table.sequence(int(slots[i])).request, int(tokens[i]))
    if state.config.prefix_caching:
        naming.name_rows(worker, slots)

    wants = table.logprobs[slots]
    slow = np.flatnonzero(wants)
    for i in slow:
        sequence = table.sequence(int(slots[i]))
        sequence.finish = FinishReason(int(finishes[i]))
        sequence.logprobs.append(entries[int(indices[i])])
        offset = int(table.length[slots[i]] - table.prompt_length[slots[i]]) - 1
        sequence.request.gateway.delivery.add_sequence(sequence, offset, tokens[i : i + 1])
    if len(slow) < len(slots):
        _deliver_rows(state, worker, slots[~wants], finishes[~wants], tokens[~wants])

    ended = np.flatnonzero(finishes)
    sequences = [table.sequence(int(slot)) for slot in slots[ended]]
    for sequence, code in zip(sequences, finishes[ended].tolist(), strict=True):
        sequence.finish = FinishReason(code)
        _finish(state, sequence)


def _deliver_rows(
    state: State, worker: WorkerState, slots: Int32Array, finishes: Int32Array, tokens: Int32Array
) -> None:
    table = worker.table
    offsets = table.length[slots] - table.prompt_length[slots] - 1
    columns = (table.handle[slots], table.sequence_index[slots], offsets, finishes, table.cached[slots], tokens)
    if len(state.gateways) == 1:
        [gateway] = state.gateways.values()
        gateway.delivery.add_rows(*columns)
        return
    owners = table.gateway[slots]
    for gateway in state.gateways.values():
        mine = owners == gateway.index
        if mine.any():
            gateway.delivery.add_rows(*(column[mine] for column in columns))


def _take_orphan(
    state: State,
    worker: WorkerState,
    sequence: Sequence,
    token: int,
    entry: LogprobEntry | None,
    fault: RowFault | None,
) -> None:
    """A token for a sequence that was preempted while it was on its way: it is valid and kept."""
    request = sequence.request
    sequence.in_flight -= 1
    if request.status is Status.ENDED or sequence.finished:
        return
    if token < 0:
        _fail_row(state, worker, request, fault)
        return
    sequence.append(token)
    output_length = len(sequence.tokens) - len(request.prompt)
    sequence.finish = finish_reason(request.sampling, token, output_length)
    state.counters.generation_tokens += 1
    if entry is not None:
        sequence.logprobs.append(entry)
    request.gateway.delivery.add_sequence(sequence, output_length - 1, sequence.tokens[-1:])
    if sequence.finished:
        _finish(state, sequence)


def _finish(state: State, sequence: Sequence) -> None:
    request = sequence.request
    if request.status is Status.ENDED:
        return  # with a sibling that ended in the same step
    if request.unfinished:
        lifecycle.finish_sequence(state, sequence)
    else:
        state.counters.requests_finished += 1
        lifecycle.end(state, request, acknowledge=True)


def _fail_row(state: State, worker: WorkerState, request: Request, fault: RowFault | None) -> None:
    # What the row wrote may be as wrong as what it computed: nobody may find it in the prefix cache, whoever holds it.
    for sequence in request.sequences:
        tokens = state.tokens_of(sequence).tobytes()
        blocks, _ = worker.pool.find(request.cache_salt, tokens, 4 * worker.block_size)
        worker.pool.withdraw(np.array(blocks, np.int32))
    if fault is None:
        lifecycle.fail(state, request, "internal_error", "the worker could not compute this request and gave no reason")
    else:
        lifecycle.fail(state, request, fault.code, fault.message)


def _which_end(request: Request, token: int) -> FinishReason:
    sampling = request.sampling
    is_eos = not sampling.ignore_eos and token in sampling.eos_token_ids
    return FinishReason.EOS if is_eos else FinishReason.STOP_TOKEN


def _entries(logprobs: TokenLogprobs) -> dict[int, LogprobEntry]:
    """The entries by index into the result's tokens.

    Raises:
        ProtocolError: the arrays contradict each other.
    """
    if not len(logprobs.rows):
        return {}
    ends = np.cumsum(logprobs.counts)
    if (
        len(logprobs.counts) != len(logprobs.rows)
        or len(logprobs.ranks) != len(logprobs.rows)
        or ends[-1] != len(logprobs.token_ids)
        or len(logprobs.values) != len(logprobs.token_ids)
    ):
        raise ProtocolError("log-probabilities of inconsistent lengths")
    starts = ends - logprobs.counts
    return {
        int(row): LogprobEntry(int(rank), logprobs.token_ids[start:end], logprobs.values[start:end])
        for row, rank, start, end in zip(logprobs.rows, logprobs.ranks, starts, ends, strict=True)
    }


def _check_entries(
    worker: WorkerState,
    flight: Flight,
    tokens: Int32Array,
    entries: dict[int, LogprobEntry],
    candidates: dict[int, LogprobEntry],
) -> None:
    table = worker.table
    beam = table.beam[flight.slots]
    wanted = {int(i) for i in np.flatnonzero(flight.live & table.logprobs[flight.slots] & ~beam)}
    wanted |= {i for i, sequence in flight.orphans.items() if sequence.request.sampling.logprobs is not None}
    missing = [i for i in wanted - entries.keys() if tokens[i] >= 0]
    if missing:
        raise ProtocolError(f"log-probabilities of tokens {sorted(missing)} are missing")
    for index in np.flatnonzero(flight.live & beam & (tokens >= 0)) if worker.table.num_beams else ():
        least = table.sequence(int(flight.slots[index])).request.sampling.num_candidates
        found = len(candidates[int(index)].token_ids) if int(index) in candidates else 0
        if found < min(least, worker.hello.vocab_size):
            raise ProtocolError(f"token {index} belongs to a beam and needs {least} candidates, got {found}")
