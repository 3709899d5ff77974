"""The nucleus of top_p: the least weight that is kept, found in two ways."""

from __future__ import annotations

import torch
from torch import Tensor


def nucleus_by_sorting(weights: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """[R] the weight at which the mass of all that are as large first reaches ``top_p`` of the row's, and whether the
    largest alone reaches it. Sorts few weights, but waits for the device to know how many."""
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
    return ordered.gather(1, before.unsqueeze(1)).squeeze(1), before == 0


def nucleus_by_halving(weights: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """As `nucleus_by_sorting`, of weights up to 1. Waits for nothing and sorts nothing: it finds the bits of the weight
    one after another, since numbers that are not negative are in the order of their bits."""
    wanted = weights.sum(-1, dtype=torch.float64) * top_p
    bits = weights.view(torch.int32)
    largest = weights.max(-1).values
    edge = torch.zeros_like(bits[:, 0])
    for bit in range(29, -1, -1):  # 1 and what is less have no higher ones
        higher = edge | (1 << bit)
        mass = torch.where(bits >= higher.unsqueeze(1), weights, 0).sum(-1, dtype=torch.float64)
        edge = torch.where(mass >= wanted, higher, edge)
    return torch.minimum(edge.view(torch.float32), largest), largest >= wanted
