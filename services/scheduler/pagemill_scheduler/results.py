"""Takes in the result of an iteration: records tokens, ends sequences, gathers deliveries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagemill_scheduler import beam_step, grammars, lifecycle, naming
from pagemill_scheduler.deliveries import finish_codes
from pagemill_scheduler.request import LogprobEntry, Request, Sequence, Status, finish_reason
from pagemill_scheduler.state import State
from pagemill_scheduler.table import Slots
from pagemill_scheduler.worker import AwaitedReport, Flight, WorkerState
from pagemill_shared.errors import ProtocolError
from pagemill_shared.grammar_limits import GRAMMAR_FAILED, GRAMMAR_TIMEOUT
from pagemill_shared.messages import FinishReason, IterationResult, PromptReport, RowFault, TokenLogprobs
from pagemill_shared.schema import Int32Array


def apply_result(state: State, worker: WorkerState, result: IterationResult) -> None:
    """Record the tokens of the worker's oldest plan in flight.

    Raises:
        ProtocolError: the result does not answer that plan; nothing was changed.
    """
    flight = worker.flights[0]
    slots, tokens = flight.slots, result.token_ids
    if len(tokens) != len(slots):
        raise ProtocolError(f"iteration {flight.iteration} has {len(slots)} tokens to sample, got {len(tokens)}")
    vocab_size = worker.hello.vocab_size
    # Without its sign, the -1 of a faulty row is a large number.
    unsigned = tokens.view(np.uint32)
    complete = not len(tokens) or unsigned.item(unsigned.argmax()) < vocab_size
    if not complete and tokens.max() >= vocab_size:
        raise ProtocolError(f"token {tokens.max()} is outside the vocabulary of {vocab_size}")
    entries, candidates = _entries(result.logprobs), _entries(result.candidates)
    _check_entries(worker, flight, tokens, entries, candidates)
    if flight.reports or len(result.reports):
        _check_reports(flight, result)

    if flight.reports:
        _take_reports(state, worker, flight, result)
    if flight.orphans or not complete:
        _take_exceptions(state, worker, flight, result, entries)
    worker.flights.popleft()
    if complete and not flight.any_left and not worker.table.num_beams:
        if len(slots):
            _record(state, worker, None, slots, tokens, entries)
        return
    good = ~flight.left
    if not complete:
        good &= tokens >= 0
    if worker.table.num_beams:
        beam = good & worker.table.beam[slots]
        beam_step.advance_all(state, worker, flight, np.flatnonzero(beam), candidates)
        good &= ~beam
    indices = good.nonzero()[0]
    if len(indices):
        _record(state, worker, indices, slots[indices], tokens[indices], entries)


def _take_exceptions(
    state: State,
    worker: WorkerState,
    flight: Flight,
    result: IterationResult,
    entries: dict[int, LogprobEntry],
) -> None:
    """Tokens for sequences that were preempted meanwhile, and rows without a token."""
    faults = {fault.slot: fault for fault in result.faults}
    for index, sequence in flight.orphans.items():
        token, fault = int(result.token_ids[index]), faults.get(int(flight.slots[index]))
        _take_orphan(state, worker, sequence, token, entries.get(index), fault)
    for faulty in np.flatnonzero(~flight.left & (result.token_ids < 0)):
        if not flight.left[faulty]:  # failing a row takes the others of its request out of the flight, too
            slot = int(flight.slots[faulty])
            _fail_row(state, worker, worker.table.sequence(slot).request, faults.get(slot))


def _take_reports(state: State, worker: WorkerState, flight: Flight, result: IterationResult) -> None:
    """What chunks had to tell of prompts; a request that wants nothing else ends with its last one."""
    faults = {fault.slot: fault for fault in result.faults}
    for awaited, report in zip(flight.reports, result.reports, strict=True):
        sequence, request = awaited.sequence, awaited.sequence.request
        sequence.in_flight -= awaited.orphan
        if not awaited.wanted or request.status is Status.ENDED or awaited.start < request.reported:
            continue
        if awaited.slot in faults:
            _fail_row(state, worker, request, faults[awaited.slot])
            continue
        told = replace(report, owner=request.handle)
        request.reports.append(told)
        request.gateway.delivery.add_reports([told])
        if not request.sampling.max_tokens and not request.reports_more:
            sequence.finish = FinishReason.LENGTH
            request.gateway.delivery.add_sequence(sequence, 0, request.prompt[:0])
            lifecycle.finish_one(state, sequence)


def _record(
    state: State,
    worker: WorkerState,
    indices: Slots | None,
    slots: Slots,
    tokens: Int32Array,
    entries: dict[int, LogprobEntry],
) -> None:
    """One vectorised pass over the rows with a token; Python runs only for those that end or want log-probabilities.

    Args:
        indices: [K] where in the result ``tokens`` stood, None if they are all there were; ``entries`` are listed by
            this.
        slots, tokens: [K].
    """
    table = worker.table
    length = table.append(slots, tokens)
    hits = table.stopped(slots, tokens, length)
    finishes = finish_codes(hits, length >= table.limit[slots])
    ended = finishes.nonzero()[0]
    state.counters.generation_tokens += len(slots)
    if state.config.prefix_caching:
        naming.name_rows(worker, slots, length)

    offsets = length - table.first_output[slots]
    if not table.num_logprobs:
        _deliver_rows(state, worker, slots, finishes, offsets, tokens)
    else:
        wants = table.logprobs[slots]
        for i in wants.nonzero()[0].tolist():
            sequence = table.sequence(slots.item(i))
            sequence.finish = FinishReason(finishes.item(i))
            sequence.logprobs.append(entries[i if indices is None else indices.item(i)])
            sequence.request.gateway.delivery.add_sequence(sequence, offsets.item(i), tokens[i : i + 1])
        others = (~wants).nonzero()[0]
        if len(others):
            _deliver_rows(state, worker, slots[others], finishes[others], offsets[others], tokens[others])

    if len(ended):
        sequences = [table.sequence(slot) for slot in slots[ended].tolist()]
        lifecycle.finish(state, worker, sequences, finishes[ended].tolist())


def _deliver_rows(
    state: State, worker: WorkerState, slots: Slots, finishes: Int32Array, offsets: Int32Array, tokens: Int32Array
) -> None:
    table = worker.table
    columns = (table.handle[slots], table.sequence_index[slots], offsets, finishes, table.cached[slots], tokens)
    if len(state.gateways) == 1:
        [gateway] = state.gateways.values()
        gateway.delivery.add_rows(*columns)
        return
    owners = table.gateway[slots]
    for gateway in state.gateways.values():
        mine = (owners == gateway.index).nonzero()[0]
        if len(mine):
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
        lifecycle.finish_one(state, sequence)


def _fail_row(state: State, worker: WorkerState, request: Request, fault: RowFault | None) -> None:
    # What the row wrote may be as wrong as what it computed: nobody may find it in the prefix cache, whoever holds it.
    for sequence in request.sequences:
        names = worker.pool.names
        blocks, _, _ = names.find(names.root(request.cache_salt), state.tokens_of(sequence))
        worker.pool.withdraw(np.array(blocks, np.int32))
    if fault is None:
        lifecycle.fail(state, request, "internal_error", "the worker could not compute this request and gave no reason")
    else:
        field = grammars.GRAMMAR_FIELD if fault.code in (GRAMMAR_FAILED, GRAMMAR_TIMEOUT) else ""
        lifecycle.fail(state, request, fault.code, fault.message, field)


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
    if not (table.num_logprobs or table.num_beams or flight.orphans):
        return
    beam = table.beam[flight.slots]
    wanted = {int(i) for i in np.flatnonzero(~flight.left & table.logprobs[flight.slots] & ~beam)}
    wanted |= {i for i, sequence in flight.orphans.items() if sequence.request.sampling.logprobs is not None}
    missing = [i for i in wanted - entries.keys() if tokens[i] >= 0]
    if missing:
        raise ProtocolError(f"log-probabilities of tokens {sorted(missing)} are missing")
    for index in np.flatnonzero(~flight.left & beam & (tokens >= 0)) if worker.table.num_beams else ():
        least = table.sequence(int(flight.slots[index])).request.sampling.num_candidates
        found = len(candidates[int(index)].token_ids) if int(index) in candidates else 0
        if found < min(least, worker.hello.vocab_size):
            raise ProtocolError(f"token {index} belongs to a beam and needs {least} candidates, got {found}")


def _check_reports(flight: Flight, result: IterationResult) -> None:
    if [report.owner for report in result.reports] != [awaited.slot for awaited in flight.reports]:
        raise ProtocolError(f"iteration {flight.iteration} does not report the prompts that it was asked to")
    faulty = {fault.slot for fault in result.faults}
    for awaited, report in zip(flight.reports, result.reports, strict=True):
        if awaited.slot not in faulty:
            _check_report(awaited, report)


def _check_report(awaited: AwaitedReport, report: PromptReport) -> None:
    if (report.start, report.end) != (awaited.start, awaited.end):
        raise ProtocolError(
            f"positions {report.start}..{report.end} of a prompt are reported, not {awaited.start}..{awaited.end}"
        )
    request = awaited.sequence.request
    wanted = 0
    if request.sampling.prompt_logprobs is not None:
        wanted = min(report.end, len(request.prompt) - 1) - report.start
    if sorted(_entries(report.logprobs)) != list(range(wanted)):
        raise ProtocolError(f"{wanted} log-probabilities of prompt tokens are due, got {len(report.logprobs.rows)}")
