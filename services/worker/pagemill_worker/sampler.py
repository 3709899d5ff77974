"""Draws tokens from logits: one vectorised pass over rows with different parameters.

Order: logit_bias over the raw logits, penalties, bans (as transformers and vLLM do), grammars; then, for rows that
draw by chance, temperature, min_p and top_k, and top_p over the mass that is left. Log-probabilities are those of the
raw logits. A batch of greedy rows pays for one argmax.

A beam is not sampled: its best continuations are reported. Their log-probabilities are those of the raw logits, to
which bias, penalties and bans are then applied, without normalising again: that is what transformers' generate() sums.

A random row takes the inverse of the cumulative distribution in the order of token ids at a uniform number that is a
function of (seed, sequence, position) alone, so that neither the batch nor the order of near-equal logits matters.
Tokens that tie with the last one that top_k or top_p keeps are kept, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import threshold

from pagemill_shared.messages import TokenLogprobs
from pagemill_shared.sampling import uniforms
from pagemill_shared.schema import Int32Array
from pagemill_worker.log_partition import log_partition
from pagemill_worker.nucleus import nucleus_by_halving, nucleus_by_sorting
from pagemill_worker.sampling_rows import Indices, SampleBatch, SamplingRows
from pagemill_worker.transfer import download, upload

HOST = "cpu"
"""The device whose numbers can be looked at without waiting; there, what depends on few numbers looks for them."""
SLAB_ELEMENTS = 1 << 22
"""Most probabilities that are held at once on the host, which has caches."""
DEVICE_SLAB_ELEMENTS = 1 << 24
"""The same on a device, where every operation is a launch."""
_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)
"""[256, 8] for each bit of a byte, lowest first, what it adds to its token's logit."""
_LEAST_EXPONENT, _LEAST_WEIGHT = -87.0, 2e-38
"""float32's exponential is a normal number down to the former, and there less than the latter."""
PEAK = 512
"""Logits of which the largest is found before the search looks at single ones."""
BLOCK = 128
"""Probabilities that are summed before the search for a token looks at single ones."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: [N], -1 where the row's logits were not finite. ``candidates``: of the beams among them."""

    token_ids: Int32Array
    logprobs: TokenLogprobs
    candidates: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Reported:
    """Tokens with log-probabilities beside the drawn ones: K rows, up to C in each.

    Attributes:
        drawn: [K] which of the N drawn tokens each belongs to.
        counts: [K] how many of the C count.
        ranks, token_ids, values: [K], [K, C] and [K, C], on the device of the logits.
    """

    drawn: Indices
    counts: Indices
    ranks: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a pass has drawn, before anybody waits for it.

    Attributes:
        tokens: [N] int64 on the device of the logits, -1 where a row was not finite.
    """

    tokens: Tensor
    logprobs: Reported | None = None
    candidates: Reported | None = None

    def read(self) -> Sampled:
        """All of it on the host, in one transfer."""
        reported = [each for each in (self.logprobs, self.candidates) if each is not None]
        tensors = [tensor for each in reported for tensor in (each.ranks, each.token_ids, each.values)]
        tokens, *arrays = download([self.tokens, *tensors])
        read = [_read(each, tokens, *arrays[3 * i : 3 * i + 3]) for i, each in enumerate(reported)]
        return Sampled(
            tokens.astype(np.int32),
            read.pop(0) if self.logprobs is not None else TokenLogprobs(),
            read.pop(0) if self.candidates is not None else TokenLogprobs(),
        )


def sample(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> Sampled:
    """Draws the tokens of ``batch`` and waits for them; see `draw`."""
    return draw(logits, batch, rows).read()


def draw(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> Drawn:
    """Draws the tokens of ``batch``. Nothing here waits for the device.

    Args:
        logits: [R, vocab_size] float32; may be overwritten.
    """
    best, chosen = largest(logits)
    finite = torch.isfinite(best)
    is_one_each = batch.row_of.size == batch.slots.size
    if batch.plain:
        tokens = torch.where(finite, chosen, -1)
        return Drawn(tokens if is_one_each else tokens[_up(batch.row_of, logits)])

    if batch.constrained.size and logits.device.type == HOST:
        batch = _without_idle_masks(batch, chosen, rows)
    reported = bool((batch.logprobs >= 0).any())
    edited = logits
    edits = (batch.beams, batch.penalised, batch.edits.bias_ids, batch.edits.ban_ids, batch.constrained)
    if any(rows_or_ids.size for rows_or_ids in edits):
        edited = _edit(logits.clone() if reported else logits, batch, rows)
        best, chosen = largest(edited)
        finite &= torch.isfinite(best)
    if not is_one_each:
        row_of = _up(batch.row_of, logits)
        chosen, finite = chosen[row_of], finite[row_of]
    if batch.random.size:
        _draw(edited, best, chosen, batch, rows)
    tokens = torch.where(finite, chosen, -1)
    return Drawn(
        tokens,
        _logprobs(logits, tokens, batch) if reported else None,
        _candidates(edited, batch) if batch.beams.size else None,
    )


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[R] the largest number of each row of [R, vocab_size], and the first column that has it. NaN is larger than all
    numbers, and its column is any."""
    count, vocab_size = logits.shape
    whole = vocab_size // PEAK * PEAK
    if logits.device.type != HOST or not whole:
        best, chosen = logits.max(-1)
        return best, chosen
    # On a CPU the column costs ten times as much as the number: it is looked for where the number was found.
    parts = logits[:, :whole].view(count, -1, PEAK)
    best, part = parts.amax(-1).max(-1)
    chosen = part * PEAK + parts[torch.arange(count), part].max(-1).indices
    if whole < vocab_size:
        last, column = logits[:, whole:].max(-1)
        chosen = torch.where(last > best, whole + column, chosen)
        best = torch.maximum(best, last)
    return best, chosen


def _up(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    return upload([array], like.device)[0]


def _edit(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> Tensor:
    """Makes log-probabilities of the logits of beams, then applies bias, penalties, bans and grammars; in place."""
    edits, device = batch.edits, logits.device
    if batch.beams.size:
        index = _up(batch.beams, logits)
        logits.index_copy_(0, index, _rows_of(logits, index).log_softmax(-1))
    if edits.bias_ids.size:
        lines, ids, values = upload([edits.bias_rows, edits.bias_ids, edits.bias_values], device)
        logits.index_put_((lines, ids), values, accumulate=True)
    if batch.penalised.size:
        _penalise(logits, batch, rows)
    if edits.ban_ids.size:
        lines, ids = upload([edits.ban_rows, edits.ban_ids], device)
        logits.index_put_((lines, ids), logits.new_full((), -torch.inf))
    if batch.constrained.size:
        _mask(logits, batch)
    return logits


def _without_idle_masks(batch: SampleBatch, chosen: Tensor, rows: SamplingRows) -> SampleBatch:
    """The batch without the masks that change nothing: those of rows that want their most likely token, ``chosen`` [R],
    and may have it. A model that was asked for JSON mostly writes JSON."""
    likeliest = chosen.numpy()[batch.constrained]
    allowed = batch.masks[np.arange(likeliest.size), likeliest // 8] >> (likeliest % 8).astype(np.uint8) & 1 > 0
    needed = ~(allowed & rows.greedy[batch.slots[batch.constrained]])
    return batch if needed.all() else replace(batch, constrained=batch.constrained[needed], masks=batch.masks[needed])


def _mask(logits: Tensor, batch: SampleBatch) -> None:
    """Takes what grammars forbid out of their rows.

    What is added is looked up, a byte of a mask at a time: choosing by masks, which look like noise, takes ten times as
    long on a CPU.
    """
    index, added, masks = upload([batch.constrained, _ADDED, batch.masks], logits.device)
    # On a CPU row by row: it computes no faster with more, and new memory costs more than the work that is done in it.
    several = 1 if logits.device.type == HOST else max(1, DEVICE_SLAB_ELEMENTS // logits.shape[1])
    for begin in range(0, masks.shape[0], several):
        part = masks[begin : begin + several]
        each = added.index_select(0, part.reshape(-1).int()).view(part.shape[0], -1)
        logits.index_add_(0, index[begin : begin + several], each[:, : logits.shape[1]])


def _penalise(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> None:
    """Repetition, then frequency and presence penalties."""
    slots = batch.slots[batch.penalised]
    lines = rows.counts.lines(slots.tolist())
    penalties = (rows.repetition_penalty[slots], rows.presence_penalty[slots], rows.frequency_penalty[slots])
    index, *factors = upload([batch.penalised, *penalties], logits.device)
    seen = rows.counts.seen[lines]
    if logits.device.type == HOST:
        # Few of the vocabulary's tokens have been seen, and no others change. Counting them would wait for a device.
        which, ids = seen.nonzero().unbind(1)
        where = (index[which], ids)
        counts = rows.counts.output_counts[lines[which], ids]
        logits[where] = _penalised(logits[where], counts, *(factor[which] for factor in factors))
    else:
        values = _rows_of(logits, index)
        counts = rows.counts.output_counts[lines]
        changed = _penalised(values, counts, *(factor.unsqueeze(1) for factor in factors))
        logits.index_copy_(0, index, torch.where(seen, changed, values))


def _penalised(values: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """The logits of tokens that were seen, ``counts`` times among the outputs."""
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)


def _rows_of(logits: Tensor, index: Tensor) -> Tensor:
    """Rows ``index``, which ascends; without a copy where that is all of them."""
    return logits if index.shape[0] == logits.shape[0] else logits[index]


def _draw(logits: Tensor, best: Tensor, tokens: Tensor, batch: SampleBatch, rows: SamplingRows) -> None:
    """Overwrites the [N] ``tokens`` of random rows."""
    numbers = uniforms(rows.seed[batch.slots[batch.row_of]], batch.sequences, batch.positions)
    elements = SLAB_ELEMENTS if logits.device.type == HOST else DEVICE_SLAB_ELEMENTS
    slab = max(1, elements // logits.shape[1])
    for begin in range(0, batch.random.size, slab):
        part = batch.random[begin : begin + slab]
        slots = batch.slots[part]
        which = np.flatnonzero(np.isin(batch.row_of, part))
        lines = np.searchsorted(part, batch.row_of[which])
        temperatures = rows.temperature[slots].astype(np.float32)
        index, temperature, line, number, place = upload(
            [part, temperatures, lines, numbers[which], which], logits.device
        )
        # Relative to the largest, so that nothing overflows however small the temperature is.
        weights = (_rows_of(logits, index) - best[index].unsqueeze(1)).div_(temperature.unsqueeze(1))
        if batch.constrained.size and weights.device.type == HOST:
            # Most tokens of such rows are at minus infinity, whose exponential takes many times as long.
            weights = threshold(weights.clamp_(min=_LEAST_EXPONENT).exp_(), _LEAST_WEIGHT, 0.0, inplace=True)
        else:
            weights.exp_()
        single = None
        top_k, top_p, min_p = rows.top_k[slots], rows.top_p[slots], rows.min_p[slots]
        if (top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any():
            floor, single = _floor(weights, top_k, top_p, min_p)
            weights.masked_fill_(weights < floor.unsqueeze(1), 0)
        found = _inverse(weights, line, number)
        tokens.index_copy_(0, place, found if single is None else torch.where(single[line], tokens[place], found))


def _inverse(weights: Tensor, line: Tensor, numbers: Tensor) -> Tensor:
    """[M] the first token of row ``line`` at which the cumulative weight exceeds ``number`` times the row's total.

    First the block of tokens is searched, then the token in it, so that few numbers are summed one after another.
    Where a row is not finite some token is found.

    Args:
        weights: [R, vocab_size].
        line, numbers: [M] rows, and uniform numbers in [0, 1).
    """
    vocab_size = weights.shape[1]
    whole = vocab_size // BLOCK
    sums = weights[:, : whole * BLOCK].view(weights.shape[0], whole, BLOCK).sum(-1)
    if whole * BLOCK < vocab_size:
        sums = torch.cat((sums, weights[:, whole * BLOCK :].sum(-1, keepdim=True)), 1)
    block, into = _search(sums[line], numbers)
    inside = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=weights.device)
    beyond = inside >= vocab_size
    members = weights[line.unsqueeze(1), inside.clamp_(max=vocab_size - 1)].masked_fill_(beyond, 0)
    token, _ = _search(members, into)
    return (block * BLOCK + token).clamp_(max=vocab_size - 1)


def _search(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[M] column of [M, C] weights that each number falls into, never one without weight; and how far into it, as a
    number in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).clamp_(max=weights.shape[1] - 1)
    width = weights.gather(1, column).double()
    into = (target.unsqueeze(1) - (cumulative.gather(1, column) - width)) / width
    return column.squeeze(1), into.clamp_(0, 1).squeeze(1)


def _floor(
    weights: Tensor, top_k: Indices, top_p: npt.NDArray[np.float64], min_p: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """The [R] least weight that each row keeps, rows being scaled so that their largest is 1; and whether the row keeps
    a single token, which then is the greedy one even if others tie with it."""
    vocab_size = weights.shape[1]
    limited, nucleus = np.flatnonzero((top_k > 0) & (top_k < vocab_size)), np.flatnonzero(top_p < 1)
    floor, single, limited_rows, last, nucleus_rows, mass = upload(
        [min_p.astype(np.float32), top_k == 1, limited, top_k[limited] - 1, nucleus, top_p[nucleus]], weights.device
    )
    if limited.size:
        values = weights[limited_rows].topk(int(top_k[limited].max())).values
        least = values.gather(1, last.unsqueeze(1)).squeeze(1)
        floor.index_copy_(0, limited_rows, torch.maximum(floor[limited_rows], least))
    if nucleus.size:
        low = floor[nucleus_rows].unsqueeze(1)
        part = weights[nucleus_rows]
        part.masked_fill_(part < low, 0)
        find = nucleus_by_sorting if weights.device.type == HOST else nucleus_by_halving
        edge, is_first = find(part, mass)
        floor.index_copy_(0, nucleus_rows, torch.maximum(floor[nucleus_rows], edge))
        single.index_copy_(0, nucleus_rows, single[nucleus_rows] | is_first)
    return floor, single


def _logprobs(logits: Tensor, tokens: Tensor, batch: SampleBatch) -> Reported:
    """Of the raw logits: the drawn token, then the most likely ones."""
    asked = np.flatnonzero(batch.logprobs[batch.row_of] >= 0)
    alternatives = batch.logprobs[batch.row_of[asked]]
    index, which = upload([batch.row_of[asked], asked], logits.device)
    part = logits[index]
    drawn_ids = tokens[which].clamp_(min=0).unsqueeze(1)
    drawn = part.gather(1, drawn_ids)
    ranks = (part > drawn).sum(-1) + 1
    most = min(int(alternatives.max()), part.shape[1])
    top = part.topk(most)
    total = log_partition(part)
    return Reported(
        drawn=asked,
        counts=1 + np.minimum(alternatives, most),
        ranks=ranks,
        token_ids=torch.cat((drawn_ids, top.indices), 1),
        values=torch.cat((drawn, top.values), 1) - total,
    )


def _candidates(logprobs: Tensor, batch: SampleBatch) -> Reported:
    """The best continuations of each beam, best first.

    Args:
        logprobs: [R, vocab_size] edited log-probabilities in the rows of beams.
    """
    counts = np.minimum(batch.candidates, logprobs.shape[1])
    top = _rows_of(logprobs, _up(batch.beams, logprobs)).topk(int(counts.max()))
    drawn = np.searchsorted(batch.row_of, batch.beams)
    return Reported(drawn, counts, torch.ones_like(top.indices[:, 0]), top.indices, top.values)


def _read(
    reported: Reported,
    tokens: npt.NDArray[Any],
    ranks: npt.NDArray[Any],
    token_ids: npt.NDArray[Any],
    values: npt.NDArray[Any],
) -> TokenLogprobs:
    """As it is told to others: rows that were not finite have none."""
    good = tokens[reported.drawn] >= 0
    counts = reported.counts[good]
    if not counts.size:
        return TokenLogprobs()
    taken = np.arange(token_ids.shape[1]) < counts[:, None]
    return TokenLogprobs(
        rows=reported.drawn[good].astype(np.int32),
        counts=counts.astype(np.int32),
        ranks=ranks[good].astype(np.int32),
        token_ids=token_ids[good][taken].astype(np.int32),
        values=values[good][taken].astype(np.float32),
    )
