"""Every wire message, defined once and grouped by who receives it. docs/protocol.md explains the exchange.

To change a message, change docs/protocol.md in the same commit; raise PROTOCOL_VERSION once a release has carried it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import numpy as np

from pagemill_shared.message import Record
from pagemill_shared.records import Packed, PackedSequence
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import (
    MAX_MESSAGE_BYTES,
    Binary,
    Float,
    Float32Array,
    Float32s,
    Int,
    Int32Array,
    Int32s,
    Message,
    Nested,
    Registry,
    Text,
    Tuple,
)

PROTOCOL_VERSION = 1
WIRE = Registry(PROTOCOL_VERSION)

MAX_ROWS = 65_536
"""Most sequences that one worker runs at once, and most rows of one plan."""
MAX_TOKENS_PER_SEQUENCE = 4_194_304
MAX_PLAN_ITEMS = 8_388_608
INT32_MAX = 2**31 - 1

# Epochs are given out by the scheduler and never repeat: its incarnation stands in the upper bits.
Epoch = Annotated[int, Int(0, 2**63 - 1)]
Number = Annotated[int, Int(0, 2**63 - 1)]
Handle = Annotated[int, Int(1, INT32_MAX)]
Identity = Annotated[str, Text(128)]
Count = Annotated[int, Int(0, 2**53)]
Micros = Annotated[int, Int(0, 2**53)]
Rate = Annotated[float, Float(0.0)]


_NO_INT32 = np.zeros(0, np.int32)
_NO_FLOAT32 = np.zeros(0, np.float32)
_NO_PAIRS = np.zeros((0, 2), np.int32)
_NO_TRIPLES = np.zeros((0, 3), np.int32)
_NO_QUADS = np.zeros((0, 4), np.int32)


def _no_int32() -> Int32Array:
    return _NO_INT32


def _no_float32() -> Float32Array:
    return _NO_FLOAT32


def _no_pairs() -> Int32Array:
    return _NO_PAIRS


def _no_triples() -> Int32Array:
    return _NO_TRIPLES


def _no_quads() -> Int32Array:
    return _NO_QUADS


class FinishReason(IntEnum):
    """Why a sequence ended; NOT_FINISHED while it runs."""

    NOT_FINISHED = 0
    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3


# ---------------------------------------------------------------- both directions


@WIRE.add(1)
@dataclass(frozen=True, slots=True, eq=False)
class Heartbeat(Message):
    """Sent by each side every interval from a thread that no forward pass blocks.

    Attributes:
        sent: number of the last numbered message sent in this epoch, so that a lost *last* message is noticed.
        received: number of the last numbered message received in this epoch; acknowledges all up to it.
    """

    epoch: Epoch
    sent: Number
    received: Number


@WIRE.add(2)
@dataclass(frozen=True, slots=True, eq=False)
class Resync(Message):
    """A numbered message was lost, repeated or out of order in ``epoch``: the scheduler must begin a new one."""

    epoch: Epoch
    reason: Annotated[str, Text(512)]


@WIRE.add(3)
@dataclass(frozen=True, slots=True, eq=False)
class HelloRequest(Message):
    """The scheduler does not know the sender (it restarted, or gave the peer up): say hello again."""


# ---------------------------------------------------------------- to the scheduler, from a gateway


@WIRE.add(16)
@dataclass(frozen=True, slots=True, eq=False)
class GatewayHello(Message):
    """First message of a gateway. ``identity`` is stable over reconnects, ``fingerprint`` names model and tokenizer."""

    identity: Identity
    fingerprint: Annotated[str, Text(128)]


@WIRE.add(17)
@dataclass(frozen=True, slots=True, eq=False)
class GatewaySync(Message):
    """First numbered message of an epoch: the requests that are still alive in the gateway.

    The scheduler aborts those of this gateway that are not listed. A submit follows for each listed one; the
    scheduler ignores it for a request that it knows.
    """

    epoch: Epoch
    number: Number
    handles: Annotated[Int32Array, Int32s(1_048_576, low=1)]


@WIRE.add(18)
@dataclass(frozen=True, slots=True, eq=False)
class SubmitRequest(Message):
    """One request.

    Attributes:
        handle: the gateway's own number for it, never reused within a gateway's life.
        request_id: what logs and people call it; not a key.
        priority: lower runs first.
        cache_salt: requests share cached prefixes only with those of the same salt.
    """

    epoch: Epoch
    number: Number
    handle: Handle
    request_id: Annotated[str, Text(256)]
    prompt_token_ids: Annotated[Int32Array, Int32s(MAX_TOKENS_PER_SEQUENCE, low=0)]
    sampling: Annotated[SamplingParams, Packed(SamplingParams)]
    priority: Annotated[int, Int(-(2**31), INT32_MAX)] = 0
    cache_salt: Annotated[str, Text(256)] = ""


@WIRE.add(19)
@dataclass(frozen=True, slots=True, eq=False)
class AbortRequest(Message):
    epoch: Epoch
    number: Number
    handle: Handle


@WIRE.add(20)
@dataclass(frozen=True, slots=True, eq=False)
class SequenceFinished(Message):
    """The gateway found a stop string: the sequence ends with its first ``tokens_kept`` output tokens."""

    epoch: Epoch
    number: Number
    handle: Handle
    sequence: Annotated[int, Int(0, INT32_MAX)]
    tokens_kept: Annotated[int, Int(0, INT32_MAX)]


@WIRE.add(21)
@dataclass(frozen=True, slots=True, eq=False)
class StateQuery(Message):
    """Asks for a StateReport; not numbered, a lost one is asked again."""

    query: Number


# ---------------------------------------------------------------- to a gateway


@WIRE.add(32)
@dataclass(frozen=True, slots=True, eq=False)
class GatewayWelcome(Message):
    """Begins an epoch. Another ``incarnation`` than before means that the scheduler lost all it knew."""

    epoch: Epoch
    incarnation: Number


@WIRE.add(33)
@dataclass(frozen=True, slots=True, eq=False)
class FleetStatus(Message):
    """Pushed when the set of workers changes, and after a welcome; not numbered.

    Attributes:
        ready_workers: workers that take work now.
        max_model_len: longest sequence that some ready worker takes, 0 without one.
        vocab_size: 0 without a ready worker.
        fingerprint: model and tokenizer of the workers, empty without one.
        pool_tokens: tokens that the whole pool of that worker holds; no more than ``max_model_len`` where it is the
            pool that allows no longer sequence. 0 without a ready worker.
    """

    ready_workers: Annotated[int, Int(0, MAX_ROWS)]
    max_model_len: Annotated[int, Int(0, MAX_TOKENS_PER_SEQUENCE)]
    vocab_size: Annotated[int, Int(0, INT32_MAX)]
    fingerprint: Annotated[str, Text(128)]
    pool_tokens: Annotated[int, Int(0, 2**53)] = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs(Message):
    """Log-probabilities of some tokens of a packed token array.

    Attributes:
        rows: [N] indices into the token array that this belongs to, ascending.
        counts: [N] entries per row, at least 1; the first is the sampled token, the others are the most likely ones.
        token_ids, values: [sum(counts)].
        ranks: [N] rank of the sampled token, 1 is the most likely.
    """

    rows: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    counts: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=1)] = field(default_factory=_no_int32)
    ranks: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=1)] = field(default_factory=_no_int32)
    token_ids: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    values: Annotated[Float32Array, Float32s(MAX_PLAN_ITEMS)] = field(default_factory=_no_float32)


NO_LOGPROBS = TokenLogprobs()


def _no_logprobs() -> TokenLogprobs:
    return NO_LOGPROBS


MAX_HIDDEN_SIZE = 1_048_576


@dataclass(frozen=True, slots=True, eq=False)
class PromptReport(Message):
    """What a chunk of a prompt has to tell, as its sampling parameters ask.

    Attributes:
        owner: the slot in an IterationResult, the request's handle in a Delivery.
        start, end: positions start … end - 1 of the prompt were computed.
        logprobs: of the tokens at start + 1 … end, as far as they belong to the prompt; ``rows`` count from 0.
        pooled: [hidden_size] the final hidden state of the prompt's last token, or the sum of those of the chunk.
    """

    owner: Annotated[int, Int(0, INT32_MAX)]
    start: Annotated[int, Int(0, MAX_TOKENS_PER_SEQUENCE)]
    end: Annotated[int, Int(1, MAX_TOKENS_PER_SEQUENCE)]
    logprobs: Annotated[TokenLogprobs, Nested(TokenLogprobs, NO_LOGPROBS)] = field(default_factory=_no_logprobs)
    pooled: Annotated[Float32Array, Float32s(MAX_HIDDEN_SIZE)] = field(default_factory=_no_float32)


@dataclass(frozen=True, slots=True, eq=False)
class RequestFailure(Message):
    """The request ended with an error; nothing more comes for it."""

    handle: Handle
    code: Annotated[str, Text(64)]
    message: Annotated[str, Text(2048)]
    param: Annotated[str, Text(64)]


@WIRE.add(34)
@dataclass(frozen=True, slots=True, eq=False)
class Delivery(Message):
    """All that one iteration has for one gateway. Arrays of K entries, one per sequence.

    Attributes:
        handles, sequences: [K] which request, which of its sequences.
        offsets: [K] index of the first token among the sequence's output tokens. After a resync a delivery may begin
            earlier than what the gateway already has.
        counts: [K] tokens per entry, may be 0 for a bare finish.
        finishes: [K] FinishReason.
        cached_tokens: [K] prompt tokens of the request that were found in the prefix cache.
        scores: [K] of a finished beam hypothesis: log-probabilities over length to the power of the penalty; else 0.
        token_ids: [sum(counts)].
        logprobs: ``rows`` index ``token_ids``.
        reports: of prompts, each request's in the order of their positions and before its first token.
    """

    epoch: Epoch
    number: Number
    handles: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=1)] = field(default_factory=_no_int32)
    sequences: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    offsets: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    counts: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    finishes: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    cached_tokens: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    scores: Annotated[Float32Array, Float32s(MAX_PLAN_ITEMS)] = field(default_factory=_no_float32)
    token_ids: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=0)] = field(default_factory=_no_int32)
    logprobs: Annotated[TokenLogprobs, Nested(TokenLogprobs, NO_LOGPROBS)] = field(default_factory=_no_logprobs)
    failures: Annotated[tuple[RequestFailure, ...], Tuple(Nested(RequestFailure), MAX_ROWS)] = ()
    reports: Annotated[tuple[PromptReport, ...], Tuple(Nested(PromptReport), MAX_ROWS)] = ()


@WIRE.add(35)
@dataclass(frozen=True, slots=True, eq=False)
class StateReport(Message):
    """Answer to a StateQuery: the scheduler's state as a JSON object in UTF-8 (docs/api.md describes it)."""

    query: Number
    state: Annotated[bytes, Binary(MAX_MESSAGE_BYTES)]


# ---------------------------------------------------------------- to the scheduler, from a worker


@WIRE.add(48)
@dataclass(frozen=True, slots=True, eq=False)
class WorkerHello(Message):
    """First message of a worker, sent after warm-up: from here on it takes plans.

    Attributes:
        num_blocks: usable device blocks, numbered 1..num_blocks (physical block 0 is padding).
        num_swap_blocks: host blocks, numbered 0..num_swap_blocks-1.
        block_bytes: bytes of one block over all layers.
        prefill_tokens_per_s, swap_bytes_per_s: measured at warm-up, the costs behind ``--preemption-mode auto``.
    """

    identity: Identity
    fingerprint: Annotated[str, Text(128)]
    model: Annotated[str, Text(256)]
    device: Annotated[str, Text(64)]
    dtype: Annotated[str, Text(32)]
    kernels: Annotated[str, Text(64)]
    vocab_size: Annotated[int, Int(1, INT32_MAX)]
    max_model_len: Annotated[int, Int(1, MAX_TOKENS_PER_SEQUENCE)]
    block_size: Annotated[int, Int(1, 4096)]
    num_blocks: Annotated[int, Int(1, INT32_MAX)]
    num_swap_blocks: Annotated[int, Int(0, INT32_MAX)]
    block_bytes: Count
    prefill_tokens_per_s: Rate
    swap_bytes_per_s: Rate


@dataclass(frozen=True, slots=True, eq=False)
class RowFault(Message):
    """A row could not be computed or sampled (NaN logits, say); its token in the result is -1."""

    slot: Annotated[int, Int(0, MAX_ROWS)]
    code: Annotated[str, Text(64)]
    message: Annotated[str, Text(2048)]


@WIRE.add(49)
@dataclass(frozen=True, slots=True, eq=False)
class IterationResult(Message):
    """Answer to the plan of the same epoch and iteration, which it acknowledges.

    Attributes:
        token_ids: first one token per decode row, in the plan's order; then, for each prefill chunk that samples, as
            many tokens as it asked for. -1 for a faulty row. A beam row's token is its best candidate.
        candidates: for each beam row its ``num_candidates`` (or ``logprobs``, if that is more) best continuations,
            best first, with their log-probabilities after log-softmax and processors; ``rows`` index ``token_ids``.
        logprobs: ``rows`` index ``token_ids``; only for rows whose sampling parameters ask for them.
        reports: one for each of the plan's ``reporting`` slots, in that order; an empty one for a faulty row.
    """

    epoch: Epoch
    iteration: Number
    token_ids: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, low=-1)]
    logprobs: Annotated[TokenLogprobs, Nested(TokenLogprobs, NO_LOGPROBS)] = field(default_factory=_no_logprobs)
    candidates: Annotated[TokenLogprobs, Nested(TokenLogprobs, NO_LOGPROBS)] = field(default_factory=_no_logprobs)
    faults: Annotated[tuple[RowFault, ...], Tuple(Nested(RowFault), MAX_ROWS)] = ()
    wait_us: Micros = 0
    copy_us: Micros = 0
    forward_us: Micros = 0
    sample_us: Micros = 0
    reports: Annotated[tuple[PromptReport, ...], Tuple(Nested(PromptReport), MAX_ROWS)] = ()


@WIRE.add(50)
@dataclass(frozen=True, slots=True, eq=False)
class WorkerLeaving(Message):
    """The worker was told to stop: its sequences move at once, and WorkerDismissed answers."""

    identity: Identity


@WIRE.add(51)
@dataclass(frozen=True, slots=True, eq=False)
class GrammarCompiled(Message):
    """The grammar of a sequence is ready, so that the sequence can sample; or it never will be.

    Not numbered: the scheduler waits for it only so long, then plans the row, which fails if it really is not ready.

    Attributes:
        iteration: of the plan in which the sequence joined; a slot may have got another one since.
        error: why it cannot be compiled, empty if it was.
    """

    epoch: Epoch
    iteration: Number
    slot: Annotated[int, Int(0, MAX_ROWS)]
    error: Annotated[str, Text(2048)] = ""


# ---------------------------------------------------------------- to a worker


@WIRE.add(64)
@dataclass(frozen=True, slots=True, eq=False)
class WorkerWelcome(Message):
    """Begins an epoch: the worker forgets every sequence and block, and awaits iteration 1.

    Attributes:
        max_num_seqs: slots are numbered 0..max_num_seqs-1.
        max_num_batched_tokens: most tokens that one plan computes.
    """

    epoch: Epoch
    max_num_seqs: Annotated[int, Int(1, MAX_ROWS)]
    max_num_batched_tokens: Annotated[int, Int(1, MAX_TOKENS_PER_SEQUENCE)]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceJoin(Record):
    """A sequence described in full, once, when it joins a worker.

    Attributes:
        slot: its row on this worker until it is released.
        sequence: its index in the request, which feeds the random numbers.
        prompt_length: how many of ``token_ids`` are prompt; the rest are outputs of an earlier run, from which
            penalty counts are rebuilt.
        computed: how many leading tokens already have their keys and values in ``block_table``.
    """

    slot: Annotated[int, Int(0, MAX_ROWS)]
    sequence: Annotated[int, Int(0, INT32_MAX)]
    prompt_length: Annotated[int, Int(1, MAX_TOKENS_PER_SEQUENCE)]
    computed: Annotated[int, Int(0, MAX_TOKENS_PER_SEQUENCE)]
    token_ids: Annotated[Int32Array, Int32s(MAX_TOKENS_PER_SEQUENCE, low=0)]
    block_table: Annotated[Int32Array, Int32s(MAX_TOKENS_PER_SEQUENCE, low=1)]
    sampling: Annotated[SamplingParams, Packed(SamplingParams)]


@WIRE.add(65)
@dataclass(frozen=True, slots=True, eq=False)
class IterationPlan(Message):
    """One iteration, as a delta against what the worker already knows.

    Carried out in this order: released, joined, forks, new blocks, chosen; then swap-out, swap-in, block copies,
    forward. Plans are carried out strictly in order of ``iteration``, which counts from 1 in each epoch. Within one
    list no block is a destination twice, nor both source and destination.

    Attributes:
        released: [K] slots that are free from here on.
        joined: sequences described in full; a released slot may be taken again here.
        forks: [K, 3] (parent slot, child slot, sequence index): the child starts as the parent's twin,
            tokens and block table.
        new_blocks: [K, 3] (slot, position in its block table, block): appended, or replaced after a copy.
        swap_out: [K, 2] (device block, host block).
        swap_in: [K, 2] (host block, device block).
        block_copies: [K, 2] (source, destination).
        chosen: [K, 2] (slot, token): the next token of a beam, chosen by the scheduler, appended to what the slot has.
        decode_rows: [K] slots that compute their newest token and sample one. The newest token may be one that the
            worker sampled in the plan before.
        prefill_chunks: [K, 4] (slot, start, count, samples): compute known tokens start..start+count-1, then sample
            ``samples`` tokens from the last position (0 for all but a prompt's last chunk).
        reporting: [K] slots among those of ``prefill_chunks`` whose chunk reports what their sampling parameters ask of
            the prompt.
    """

    epoch: Epoch
    iteration: Number
    released: Annotated[Int32Array, Int32s(MAX_ROWS, low=0)] = field(default_factory=_no_int32)
    joined: Annotated[Sequence[SequenceJoin], PackedSequence(SequenceJoin, MAX_ROWS)] = ()
    forks: Annotated[Int32Array, Int32s(MAX_ROWS, columns=3, low=0)] = field(default_factory=_no_triples)
    new_blocks: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, columns=3, low=0)] = field(default_factory=_no_triples)
    swap_out: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, columns=2, low=0)] = field(default_factory=_no_pairs)
    swap_in: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, columns=2, low=0)] = field(default_factory=_no_pairs)
    block_copies: Annotated[Int32Array, Int32s(MAX_PLAN_ITEMS, columns=2, low=0)] = field(default_factory=_no_pairs)
    chosen: Annotated[Int32Array, Int32s(MAX_ROWS, columns=2, low=0)] = field(default_factory=_no_pairs)
    decode_rows: Annotated[Int32Array, Int32s(MAX_ROWS, low=0)] = field(default_factory=_no_int32)
    prefill_chunks: Annotated[Int32Array, Int32s(MAX_ROWS, columns=4, low=0)] = field(default_factory=_no_quads)
    reporting: Annotated[Int32Array, Int32s(MAX_ROWS, low=0)] = field(default_factory=_no_int32)


@WIRE.add(66)
@dataclass(frozen=True, slots=True, eq=False)
class WorkerDismissed(Message):
    """The scheduler has moved the worker's sequences, or refuses it for ``reason``; it may end now."""

    reason: Annotated[str, Text(512)] = ""
