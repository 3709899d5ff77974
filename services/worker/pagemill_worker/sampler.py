"""Draws tokens from logits: one vectorised pass over rows with different parameters.

Order: penalties over the raw logits (as transformers and vLLM do), logit_bias, bans; then, for rows that draw by
chance, temperature, min_p and top_k, and top_p over the mass that is left. Log-probabilities are those of the raw
logits. A batch of greedy rows pays for one argmax.

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

TOP_P_CANDIDATES = 1024
"""Most likely tokens among which top_p looks for its edge before it sorts the whole row."""
SLAB_ELEMENTS = 1 << 22
"""Most elements of the distributions that are held in float64 at once."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: [N], -1 where the row's logits were not finite."""

    token_ids: Int32Array
    logprobs: TokenLogprobs


def sample(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> Sampled:
    """Draws the tokens of ``batch``.

    Args:
        logits: [R, vocab_size] float32; may be overwritten.
    """
    best, chosen = logits.max(-1)  # NaN wins
    finite = torch.isfinite(best)
    if batch.plain:
        tokens = torch.where(finite, chosen, -1).cpu().numpy().astype(np.int32)
        return Sampled(tokens[batch.row_of], TokenLogprobs())

    reported = bool((batch.logprobs >= 0).any())
    edited = logits
    if batch.penalised.size or batch.edits.bias_ids.size or batch.edits.ban_ids.size:
        edited = _edit(logits.clone() if reported else logits, batch, rows)
        best, chosen = edited.max(-1)
        finite &= torch.isfinite(best)
    per_token = chosen[torch.from_numpy(batch.row_of).to(chosen.device)]
    if batch.random.size:
        _draw(edited, best, per_token, batch, rows)
    finite_rows = finite.cpu().numpy()
    tokens = np.where(finite_rows[batch.row_of], per_token.cpu().numpy(), -1).astype(np.int32)
    return Sampled(tokens, _logprobs(logits, tokens, batch) if reported else TokenLogprobs())


def _edit(logits: Tensor, batch: SampleBatch, rows: SamplingRows) -> Tensor:
    """Applies penalties, bias and bans in place."""
    device = logits.device

    def on_device(array: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array).to(device)

    if batch.penalised.size:
        index = on_device(batch.penalised)
        slots = batch.slots[batch.penalised]
        lines = rows.counts.lines(slots.tolist())
        counts = rows.counts.output_counts[lines]
        produced = counts > 0
        seen = produced | rows.counts.in_prompt[lines]
        repetition, presence, frequency = (
            on_device(array[slots]).unsqueeze(1)
            for array in (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
        )
        part = logits[index]
        penalised = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(seen, penalised, part)
        part -= frequency * counts + presence * produced
        logits[index] = part
    edits = batch.edits
    if edits.bias_ids.size:
        where = (on_device(edits.bias_rows), on_device(edits.bias_ids))
        logits.index_put_(where, on_device(edits.bias_values), accumulate=True)
    if edits.ban_ids.size:
        logits[on_device(edits.ban_rows), on_device(edits.ban_ids)] = -torch.inf
    return logits


def _draw(logits: Tensor, best: Tensor, tokens: Tensor, batch: SampleBatch, rows: SamplingRows) -> None:
    """Overwrites the [N] ``tokens`` of random rows."""
    vocab_size = logits.shape[1]
    numbers = uniforms(rows.seed[batch.slots[batch.row_of]], batch.sequences, batch.positions)
    slab = max(1, SLAB_ELEMENTS // vocab_size)
    for begin in range(0, batch.random.size, slab):
        part = batch.random[begin : begin + slab]
        index = torch.from_numpy(part).to(logits.device)
        slots = batch.slots[part]
        temperature = torch.from_numpy(rows.temperature[slots]).to(logits.device, torch.float32).unsqueeze(1)
        # The largest is 0, so that nothing overflows however small the temperature is.
        scaled = (logits[index] - best[index].unsqueeze(1)) / temperature
        floor, single = _floor(scaled, rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])
        cumulative = torch.where(scaled >= floor.unsqueeze(1), scaled.exp(), 0).cumsum(-1, dtype=torch.float64)
        # Tokens of one row stand together; each looks its number up in its row's distribution.
        first = np.searchsorted(batch.row_of, part)
        many = np.searchsorted(batch.row_of, part, side="right") - first
        for offset in range(int(many.max())):
            held = np.flatnonzero(many > offset)
            which = first[held] + offset
            line = torch.from_numpy(held).to(logits.device)
            total = cumulative[line, -1]
            target = torch.from_numpy(numbers[which]).to(logits.device) * total
            target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
            found = torch.searchsorted(cumulative[line], target.unsqueeze(1), right=True).squeeze(1)
            place = torch.from_numpy(which).to(tokens.device)
            # In a row that is not finite nothing need be found; its token is not used.
            tokens[place] = torch.where(single[line], tokens[place], found.clamp_(max=vocab_size - 1))


def _floor(
    scaled: Tensor, top_k: Indices, top_p: npt.NDArray[np.float64], min_p: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """The [R] least scaled logit that each row keeps, rows being scaled so that their largest is 0; and whether the row
    keeps a single token, which then is the greedy one even if others tie with it."""
    vocab_size = scaled.shape[1]
    device = scaled.device
    with np.errstate(divide="ignore"):
        floor = torch.from_numpy(np.log(min_p)).to(device, torch.float32)
    single = torch.from_numpy(top_k == 1).to(device)
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if limited.size:
        index = torch.from_numpy(limited).to(device)
        last = torch.from_numpy(top_k[limited] - 1).to(device)
        values = scaled[index].topk(int(top_k[limited].max())).values
        floor[index] = torch.maximum(floor[index], values.gather(1, last.unsqueeze(1)).squeeze(1))
    nucleus = np.flatnonzero(top_p < 1)
    if nucleus.size:
        index = torch.from_numpy(nucleus).to(device)
        part, low = scaled[index], floor[index]
        wanted = torch.from_numpy(top_p[nucleus]).to(device)
        mass = torch.where(part >= low.unsqueeze(1), part.exp(), 0).sum(-1, dtype=torch.float64) * wanted
        likely = part.topk(min(TOP_P_CANDIDATES, vocab_size)).values
        count = _tokens_for(mass, likely, low)
        far = (count == likely.shape[1]).nonzero().squeeze(1)
        edge = likely.gather(1, count.clamp(max=likely.shape[1] - 1).unsqueeze(1)).squeeze(1)
        if far.numel():
            ordered = part[far].sort(-1, descending=True).values
            last = _tokens_for(mass[far], ordered, low[far]).clamp_(max=vocab_size - 1)
            edge[far] = ordered.gather(1, last.unsqueeze(1)).squeeze(1)
        floor[index] = torch.maximum(low, edge)
        single[index] |= count == 0
    return floor, single


def _tokens_for(mass: Tensor, ordered: Tensor, low: Tensor) -> Tensor:
    """[R] how many leading ones of the descending [R, C] values, those below ``low`` left out, fall short of ``mass``;
    C when all together do."""
    cumulative = torch.where(ordered >= low.unsqueeze(1), ordered.exp(), 0).cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, mass.unsqueeze(1)).squeeze(1)


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
