"""From a plan and the rows to the flattened arrays of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagemill_kernels.interface import AttentionBatch
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan
from pagemill_shared.schema import Int32Array
from pagemill_worker.rows import Rows

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration: T tokens of several rows behind each other, decode rows first; R of the rows sample N tokens.

    Attributes:
        token_ids, positions: [T].
        slot_of: [T] slot of each token.
        row_slots: slot of each row, whether it samples or not.
        attention: what the kernels need.
        sampled_tokens: [R] which of the T tokens the sampling rows end with.
        sampled_slots: [R] slots that sample.
        row_of: [N] index into the R rows for each sampled token, in the order of the result.
        token_slots: [N] slot that each sampled token is appended to: the row's own, then its forks'.
        reporting: (slot, first of the T tokens, position of that token, number of tokens) of each chunk that reports.
    """

    token_ids: Indices
    positions: Indices
    slot_of: Indices
    row_slots: Indices
    attention: AttentionBatch
    sampled_tokens: Indices
    sampled_slots: Indices
    row_of: Indices
    token_slots: Indices
    reporting: list[tuple[int, int, int, int]]


def build_batch(plan: IterationPlan, rows: Rows, block_size: int, max_model_len: int) -> Batch | None:
    """The forward pass that ``plan`` asks for, or None when it computes nothing.

    Raises:
        ProtocolError: the plan computes tokens that are not known here, or have no block.
    """
    decodes = plan.decode_rows.astype(np.int64)
    chunks = plan.prefill_chunks.astype(np.int64)
    if not decodes.size and not chunks.size:
        return None
    slots = np.concatenate((decodes, chunks[:, 0]))
    if slots.max() >= rows.lengths.size:
        raise ProtocolError(f"slot {slots.max()} runs, but there are {rows.lengths.size} slots")
    lengths = rows.lengths[slots]
    starts = np.concatenate((lengths[: decodes.size] - 1, chunks[:, 1]))
    counts = np.concatenate((np.ones(decodes.size, np.int64), chunks[:, 2]))
    contexts = starts + counts
    samples = np.concatenate((np.ones(decodes.size, np.int64), chunks[:, 3]))
    _check(rows, slots, starts, counts, samples, block_size, max_model_len)

    query_starts = np.zeros(slots.size + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    owner = np.repeat(np.arange(slots.size), counts)  # [T] row of each token
    positions = np.arange(query_starts[-1]) - query_starts[owner] + starts[owner]
    token_slots = slots[owner]
    token_ids = rows.tokens[token_slots, positions].astype(np.int64)
    width = -(-int(contexts.max()) // block_size)
    tables = rows.tables[slots, :width]
    slot_mapping = tables[owner, positions // block_size] * block_size + positions % block_size
    if slot_mapping.min() < block_size:
        raise ProtocolError("a block table has a gap where a token is to be written")
    attention = AttentionBatch(
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy(contexts),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(slot_mapping),
        num_decodes=decodes.size,
        generated_from=torch.from_numpy(rows.prompt_lengths[slots]),
    )
    sampling = np.flatnonzero(samples)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_of=token_slots,
        row_slots=slots,
        attention=attention,
        sampled_tokens=query_starts[sampling + 1] - 1,
        sampled_slots=slots[sampling],
        row_of=np.repeat(np.arange(sampling.size), samples[sampling]),
        token_slots=_owners(slots[sampling], samples[sampling], plan.forks),
        reporting=_reporting(plan, query_starts[decodes.size :], rows),
    )


def _reporting(plan: IterationPlan, query_starts: Indices, rows: Rows) -> list[tuple[int, int, int, int]]:
    """As in Batch. ``query_starts``: the first token of each chunk."""
    if not plan.reporting.size:
        return []
    chunks = {
        slot: (slot, first, start, count)
        for (slot, start, count, _), first in zip(plan.prefill_chunks.tolist(), query_starts.tolist(), strict=False)
    }
    for slot in plan.reporting.tolist():
        if slot not in chunks:
            raise ProtocolError(f"slot {slot} is to report, but computes no chunk")
        if chunks[slot][2] >= rows.prompt_lengths[slot]:
            raise ProtocolError(f"slot {slot} is to report, but computes nothing of its prompt")
    return [chunks[slot] for slot in plan.reporting.tolist()]


def _check(
    rows: Rows, slots: Indices, starts: Indices, counts: Indices, samples: Indices, block_size: int, max_model_len: int
) -> None:
    lengths, contexts = rows.lengths[slots], starts + counts
    for wrong, what in (
        (lengths == 0, "is free"),
        (np.bincount(slots)[slots] > 1, "runs twice"),
        ((counts < 1) | (starts < 0) | (contexts > lengths), "does not know the tokens that it is to compute"),
        ((samples > 0) & (contexts < lengths), "is to sample before its newest token"),
        (contexts > max_model_len, f"is to compute beyond {max_model_len} tokens"),
        (-(-contexts // block_size) > rows.table_lengths[slots], "has no block for the tokens that it is to compute"),
        ((samples > 1) & (rows.sampling.candidates[slots] > 0), "is a beam and cannot sample several tokens"),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ProtocolError(
                f"slot {slots[row]} {what} (tokens {starts[row]}..{contexts[row] - 1} of {lengths[row]}, "
                f"{rows.table_lengths[slots[row]]} blocks)"
            )


def _owners(slots: Indices, samples: Indices, forks: Int32Array) -> Indices:
    """The slot of each sampled token: the row's own first, then those forked from it in this plan, in order."""
    if (samples == 1).all():
        return slots
    owners: list[int] = []
    for slot, count in zip(slots.tolist(), samples.tolist(), strict=True):
        owners.append(slot)
        if count > 1:
            children = forks[forks[:, 0] == slot, 1].tolist()
            if len(children) != count - 1:
                raise ProtocolError(f"slot {slot} samples {count} tokens but has {len(children)} forks in this plan")
            owners.extend(children)
    return np.array(owners, np.int64)
