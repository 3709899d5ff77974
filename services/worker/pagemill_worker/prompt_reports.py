"""What chunks of prompts tell beside their samples: log-probabilities of the prompt's tokens, pooled hidden states."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagemill_shared.messages import PromptReport, TokenLogprobs
from pagemill_shared.sampling import Pooling
from pagemill_shared.schema import Float32Array
from pagemill_worker.batch import Batch
from pagemill_worker.log_partition import log_partition
from pagemill_worker.models.registry import Model
from pagemill_worker.rows import Rows

SLAB_ELEMENTS = 1 << 22
"""Most logits that are held at once, however long the chunk is; only what is asked for leaves the slab."""


def prompt_reports(model: Model, hidden: Tensor, batch: Batch, rows: Rows) -> tuple[list[PromptReport], list[int]]:
    """The reports that the batch owes, and the slots whose numbers are not finite (their reports are empty).

    Args:
        hidden: [T, hidden_size] that ``model.forward`` returned for the batch.
    """
    reports, faulty = [], []
    for slot, first, start, count in batch.reporting:
        prompt_length = int(rows.prompt_lengths[slot])
        end = min(start + count, prompt_length)
        states = hidden[first : first + end - start]
        logprobs, pooled = TokenLogprobs(), np.zeros(0, np.float32)
        most = int(rows.sampling.prompt_logprobs[slot])
        targets = rows.tokens[slot, start + 1 : min(end + 1, prompt_length)].astype(np.int64)
        finite = True
        if most >= 0 and targets.size:
            logprobs, finite = _logprobs(model, states[: targets.size], torch.from_numpy(targets), most)
        pooling = rows.sampling.pooling[slot]
        if pooling == Pooling.MEAN or (pooling == Pooling.LAST and end == prompt_length):
            pooled = _pooled(model, states if pooling == Pooling.MEAN else states[-1:])
            finite = finite and bool(np.isfinite(pooled).all())
        if not finite or rows.faulty[slot]:
            faulty.append(slot)
            logprobs, pooled = TokenLogprobs(), np.zeros(0, np.float32)
        reports.append(PromptReport(slot, start, end, logprobs, pooled))
    return reports, faulty


def _logprobs(model: Model, states: Tensor, targets: Tensor, most: int) -> tuple[TokenLogprobs, bool]:
    """Of [K] target tokens, each after the position with the state in its row; and whether all are finite numbers."""
    most = min(most, model.vocab_size)
    targets = targets.to(states.device).unsqueeze(1)
    slab = max(1, SLAB_ELEMENTS // model.vocab_size)
    ids, values, ranks = [], [], []
    finite = True
    for begin in range(0, states.shape[0], slab):
        logits = model.logits(states[begin : begin + slab])
        target = targets[begin : begin + slab]
        own = logits.gather(1, target)
        total = log_partition(logits)
        top = logits.topk(most)
        ids.append(torch.cat((target, top.indices), 1).cpu().numpy().astype(np.int32))
        values.append((torch.cat((own, top.values), 1) - total).cpu().numpy())
        ranks.append(((logits > own).sum(-1) + 1).cpu().numpy().astype(np.int32))
        finite = finite and bool(torch.isfinite(total).all())
    count = states.shape[0]
    return TokenLogprobs(
        rows=np.arange(count, dtype=np.int32),
        counts=np.full(count, 1 + most, np.int32),
        ranks=np.concatenate(ranks),
        token_ids=np.concatenate(ids).ravel(),
        values=np.concatenate(values).ravel().astype(np.float32),
    ), finite


def _pooled(model: Model, states: Tensor) -> Float32Array:
    """[hidden_size] the sum of the final hidden states."""
    total: Float32Array = model.final(states).double().sum(0).float().cpu().numpy()
    return total
