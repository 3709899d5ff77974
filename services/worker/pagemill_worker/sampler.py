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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill_shared.messages import TokenLogprobs
from pagemill_shared.sampling import uniforms
from pagemill_shared.schema import Int32Array
from pagemill_worker.sampling_rows import Indices, SampleBatch, SamplingRows

SLAB_ELEMENTS = 1 << 22
"""Most probabilities that are held at once."""
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int64).ravel()
"""[256] the bits of each byte, lowest first, as eight bytes."""
BLOCK = 128
"""Probabilities that are summed before the search for a token looks at single ones."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: [N], -1 where the row's logits were not finite. ``candidates``: of the beams among them."""

    token_ids: Int32Array
    logprobs: TokenLogprobs
    candidates: TokenLogprobs


def sample(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> Sampled:
    """Draws the tokens of ``batch``.

    Args:
        logits: [R, vocab_size] float32; may be overwritten.
    """
    best, chosen = logits.max(-1)  # NaN wins
    finite = torch.isfinite(best)
    if batch.plain:
        tokens = torch.where(finite, chosen, -1).cpu().numpy().astype(np.int32)
        return Sampled(tokens[batch.row_of], TokenLogprobs(), TokenLogprobs())

    reported = bool((batch.logprobs >= 0).any())
    edited = logits
    edits = (batch.beams, batch.penalised, batch.edits.bias_ids, batch.edits.ban_ids, batch.constrained)
    if any(rows_or_ids.size for rows_or_ids in edits):
        edited = _edit(logits.clone() if reported else logits, batch, rows)
        best, chosen = edited.max(-1)
        finite &= torch.isfinite(best)
    per_token = chosen[torch.from_numpy(batch.row_of).to(chosen.device)]
    if batch.random.size:
        _draw(edited, best, per_token, batch, rows)
    finite_rows = finite.cpu().numpy()
    tokens = np.where(finite_rows[batch.row_of], per_token.cpu().numpy(), -1).astype(np.int32)
    return Sampled(
        tokens,
        _logprobs(logits, tokens, batch) if reported else TokenLogprobs(),
        _candidates(edited, finite_rows, batch) if batch.beams.size else TokenLogprobs(),
    )


def _edit(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> Tensor:
    """Makes log-probabilities of the logits of beams, then applies bias, penalties, bans and grammars; in place."""
    device = logits.device

    def on_device(array: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array).to(device)

    if batch.beams.size:
        index = on_device(batch.beams)
        logits[index] = _rows_of(logits, index).log_softmax(-1)
    edits = batch.edits
    if edits.bias_ids.size:
        where = (on_device(edits.bias_rows), on_device(edits.bias_ids))
        logits.index_put_(where, on_device(edits.bias_values), accumulate=True)
    if batch.penalised.size:
        slots = batch.slots[batch.penalised]
        lines = rows.counts.lines(slots.tolist())
        # Few of the vocabulary's tokens have been seen, and no others change.
        which, ids = rows.counts.seen[lines].nonzero().unbind(1)
        where = (on_device(batch.penalised)[which], ids)
        counts = rows.counts.output_counts[lines[which], ids]
        repetition, presence, frequency = (
            on_device(array[slots])[which]
            for array in (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
        )
        values = logits[where]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[where] = values - frequency * counts - presence * (counts > 0)
    if edits.ban_ids.size:
        logits[on_device(edits.ban_rows), on_device(edits.ban_ids)] = -torch.inf
    if batch.constrained.size:
        index = on_device(batch.constrained)
        allowed = _allowed(batch.masks, logits.shape[1], device)
        logits[index] = torch.where(allowed, _rows_of(logits, index), -torch.inf)
    return logits


def _allowed(masks: npt.NDArray[np.uint8], vocab_size: int, device: torch.device) -> Tensor:
    """[K, vocab_size] bool of [K, ceil(vocab_size / 8)] bits. They are unpacked where the logits are: by looking bytes
    up, each of which gives eight."""
    table = torch.from_numpy(_BITS).to(device)
    return table[torch.from_numpy(masks).to(device).long()].view(torch.bool)[:, :vocab_size]


def _rows_of(logits: Tensor, index: Tensor) -> Tensor:
    """Rows ``index``, which ascends; without a copy where that is all of them."""
    return logits if index.shape[0] == logits.shape[0] else logits[index]


def _draw(logits: Tensor, best: Tensor, tokens: Tensor, batch: SampleBatch, rows: SamplingRows) -> None:
    """Overwrites the [N] ``tokens`` of random rows."""
    device = logits.device
    numbers = uniforms(rows.seed[batch.slots[batch.row_of]], batch.sequences, batch.positions)
    slab = max(1, SLAB_ELEMENTS // logits.shape[1])
    for begin in range(0, batch.random.size, slab):
        part = batch.random[begin : begin + slab]
        index = torch.from_numpy(part).to(device)
        slots = batch.slots[part]
        temperature = torch.from_numpy(rows.temperature[slots]).to(device, torch.float32).unsqueeze(1)
        # Relative to the largest, so that nothing overflows however small the temperature is.
        weights = (_rows_of(logits, index) - best[index].unsqueeze(1)).div_(temperature).exp_()
        floor, single = _floor(weights, rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])
        if bool((floor > 0).any()):
            weights.masked_fill_(weights < floor.unsqueeze(1), 0)
        which = np.flatnonzero(np.isin(batch.row_of, part))
        line = torch.from_numpy(np.searchsorted(part, batch.row_of[which])).to(device)
        found = _inverse(weights, line, torch.from_numpy(numbers[which]).to(device))
        place = torch.from_numpy(which).to(device)
        tokens[place] = torch.where(single[line], tokens[place], found)


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
    device = weights.device
    floor = torch.from_numpy(min_p).to(device, torch.float32)
    single = torch.from_numpy(top_k == 1).to(device)
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if limited.size:
        index = torch.from_numpy(limited).to(device)
        last = torch.from_numpy(top_k[limited] - 1).to(device)
        values = weights[index].topk(int(top_k[limited].max())).values
        floor[index] = torch.maximum(floor[index], values.gather(1, last.unsqueeze(1)).squeeze(1))
    nucleus = np.flatnonzero(top_p < 1)
    if nucleus.size:
        index = torch.from_numpy(nucleus).to(device)
        low = floor[index].unsqueeze(1)
        part = weights[index]
        part.masked_fill_(part < low, 0)
        edge, count = _nucleus(part, torch.from_numpy(top_p[nucleus]).to(device))
        floor[index] = torch.maximum(floor[index], edge)
        single[index] |= count == 0
    return floor, single


def _nucleus(weights: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """[R] the weight at which the mass of all that are as large first reaches ``top_p`` of the row's, and how many
    larger ones come before it."""
    count, vocab_size = weights.shape
    total = weights.sum(-1, dtype=torch.float64)
    wanted = total * top_p
    # All that are less than this together are less than what may be left out, so that only the others need sorting.
    least = ((total - wanted) / vocab_size).to(weights.dtype).unsqueeze(1)
    candidates = (weights >= least) & (weights > 0)
    each = candidates.sum(-1)
    line, column = candidates.nonzero().unbind(1)
    position = torch.arange(line.shape[0], device=line.device) - (each.cumsum(0) - each)[line]
    ordered = weights.new_zeros(count, max(1, int(each.max())))
    ordered[line, position] = weights[line, column]
    ordered = ordered.sort(-1, descending=True).values
    before = torch.searchsorted(ordered.cumsum(-1, dtype=torch.float64), wanted.unsqueeze(1)).squeeze(1)
    before = torch.minimum(before, (each - 1).clamp_(min=0))
    return ordered.gather(1, before.unsqueeze(1)).squeeze(1), before


def _logprobs(logits: Tensor, tokens: Int32Array, batch: SampleBatch) -> TokenLogprobs:
    """Of the raw logits: the drawn token, then the most likely ones."""
    asked = np.flatnonzero((batch.logprobs[batch.row_of] >= 0) & (tokens >= 0))
    if not asked.size:
        return TokenLogprobs()
    alternatives = batch.logprobs[batch.row_of[asked]]
    index = torch.from_numpy(batch.row_of[asked]).to(logits.device)
    part = logits[index]
    drawn_ids = torch.from_numpy(tokens[asked].astype(np.int64)).to(logits.device).unsqueeze(1)
    drawn = part.gather(1, drawn_ids)
    ranks = (part > drawn).sum(-1) + 1
    most = min(int(alternatives.max()), part.shape[1])
    top = part.topk(most)
    total = part.logsumexp(-1, keepdim=True)
    values = (torch.cat((drawn, top.values), 1) - total).cpu().numpy()
    ids = torch.cat((drawn_ids, top.indices), 1).cpu().numpy()
    counts = 1 + np.minimum(alternatives, most)
    taken = np.arange(most + 1) < counts[:, None]
    return TokenLogprobs(
        rows=asked.astype(np.int32),
        counts=counts.astype(np.int32),
        ranks=ranks.cpu().numpy().astype(np.int32),
        token_ids=ids[taken].astype(np.int32),
        values=values[taken].astype(np.float32),
    )


def _candidates(logprobs: Tensor, finite: npt.NDArray[np.bool_], batch: SampleBatch) -> TokenLogprobs:
    """The best continuations of each beam, best first. Faulty rows have none.

    Args:
        logprobs: [R, vocab_size] edited log-probabilities in the rows of beams.
        finite: [R].
    """
    good = finite[batch.beams]
    beams, counts = batch.beams[good], np.minimum(batch.candidates[good], logprobs.shape[1])
    if not beams.size:
        return TokenLogprobs()
    top = _rows_of(logprobs, torch.from_numpy(beams).to(logprobs.device)).topk(int(counts.max()))
    taken = np.arange(counts.max()) < counts[:, None]
    return TokenLogprobs(
        rows=np.searchsorted(batch.row_of, beams).astype(np.int32),
        counts=counts.astype(np.int32),
        ranks=np.ones(beams.size, np.int32),
        token_ids=top.indices.cpu().numpy()[taken].astype(np.int32),
        values=top.values.cpu().numpy()[taken].astype(np.float32),
    )
