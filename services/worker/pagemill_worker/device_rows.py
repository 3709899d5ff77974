"""What the device keeps of the sequences placed here: block tables, lengths and newest tokens, changed by deltas alone.

`Rows` on the host is the same and more, and says what changes. A sampled token is appended here without passing through
the host, so that the next iteration goes on from the device's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan
from pagemill_worker.sampling_rows import Indices
from pagemill_worker.transfer import Array


@dataclass(frozen=True, slots=True)
class RowsDelta:
    """What a plan changes, in the order in which it is carried out.

    Attributes:
        joined_places, joined_blocks: [J] int64 places in the flattened tables, and int32 blocks.
        joined: [3, M] int64: slots, lengths and newest tokens of sequences that join.
        forks: [2, F] int64: slots that are copied, and slots that become their copies; no slot is both.
        new_places, new_blocks: [K], as of those that join; no place stands there twice.
        chosen: [2, C] int64: slots, and tokens that are appended to them.
    """

    joined_places: Indices
    joined_blocks: Array
    joined: Indices
    forks: Indices
    new_places: Indices
    new_blocks: Array
    chosen: Indices

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All of them, for one transfer."""
        return (
            self.joined_places, self.joined_blocks, self.joined, self.forks, self.new_places, self.new_blocks,
            self.chosen,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """The T tokens of an iteration on the device.

    Attributes:
        token_ids, positions: [T] int64.
        slots: [T] int32, where keys and values go.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor


class DeviceRows:
    """Tensors over slots, and one line more for padded rows: a sequence of one token in the padding block.

    Attributes:
        padding: the line of padded rows.
        tables: [S + 1, W] int32; what lies beyond a sequence's blocks means nothing.
        lengths: [S + 1] int64.
        newest: [S + 1] int64, the last known token.

    Args:
        width: W, most blocks of a sequence.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device) -> None:
        lines = max_num_seqs + 1
        if lines * width >= 2**31:
            raise ValueError(f"block tables of {lines} lines of {width} blocks have more than 2^31 entries")
        self.padding = max_num_seqs
        self.tables = torch.zeros(lines, width, dtype=torch.int32, device=device)
        self.lengths = torch.ones(lines, dtype=torch.int64, device=device)
        self.newest = torch.zeros(lines, dtype=torch.int64, device=device)

    def delta(self, plan: IterationPlan) -> RowsDelta:
        """What ``plan`` changes here.

        Raises:
            ProtocolError: a block table longer than any sequence may become.
        """
        width = self.tables.shape[1]
        joins = plan.joined
        tables = [join.block_table for join in joins]
        longest = max((table.size for table in tables), default=0)
        slots, positions, blocks = plan.new_blocks.astype(np.int64).T
        if positions.size:
            longest = max(longest, int(positions.max()) + 1)
        if longest > width:
            raise ProtocolError(f"a block table of {longest} blocks, where a sequence has at most {width}")
        origin: dict[int, int] = {}  # a child's twin has the same origin
        for parent, child, _ in plan.forks.tolist():
            origin[child] = origin.get(parent, parent)
        places = slots * width + positions
        # Of a place that is written twice the last write counts, as on the host.
        new_places, last = np.unique(places[::-1], return_index=True)
        return RowsDelta(
            joined_places=_joined(
                [join.slot * width + np.arange(table.size) for join, table in zip(joins, tables, strict=True)]
            ),
            joined_blocks=_joined(tables).astype(np.int32),
            joined=np.array(
                [(join.slot, join.token_ids.size, join.token_ids[-1]) for join in joins], np.int64
            ).reshape(-1, 3).T.copy(),
            forks=np.array([(parent, child) for child, parent in origin.items()], np.int64).reshape(-1, 2).T.copy(),
            new_places=new_places,
            new_blocks=blocks[::-1][last].astype(np.int32),
            chosen=plan.chosen.astype(np.int64).T.copy(),
        )  # fmt: skip

    def apply(self, delta: list[Tensor]) -> None:
        """Carries out a delta, whose arrays have come up in order."""
        joined_places, joined_blocks, joined, forks, new_places, new_blocks, chosen = delta
        flat = self.tables.view(-1)
        if joined.shape[1]:
            flat.index_copy_(0, joined_places, joined_blocks)
            self.lengths.index_copy_(0, joined[0], joined[1])
            self.newest.index_copy_(0, joined[0], joined[2])
        if forks.shape[1]:
            for tensor in (self.tables, self.lengths, self.newest):
                tensor.index_copy_(0, forks[1], tensor.index_select(0, forks[0]))
        if new_places.shape[0]:
            flat.index_copy_(0, new_places, new_blocks)
        if chosen.shape[1]:
            self.append(chosen[0], chosen[1])

    def append(self, slots: Tensor, tokens: Tensor) -> None:
        """Appends one of [K] ``tokens`` to each of ``slots``; in the place of -1, which is none, a stand-in."""
        self.newest.index_copy_(0, slots, tokens.clamp(min=0))
        self.lengths.index_add_(0, slots, torch.ones_like(slots))

    def inputs(self, decodes: Tensor, chunks: Tensor, block_size: int) -> Inputs:
        """What an iteration computes: the newest tokens of rows, then tokens of chunks.

        Args:
            decodes: [D] int64 lines.
            chunks: [3, C] int64: line, position and id of each token.
        """
        positions, token_ids, lines = self.lengths[decodes] - 1, self.newest[decodes], decodes
        if chunks.shape[1]:
            positions = torch.cat((positions, chunks[1]))
            token_ids, lines = torch.cat((token_ids, chunks[2])), torch.cat((lines, chunks[0]))
        blocks = self.tables[lines, positions // block_size]
        return Inputs(token_ids, positions, (blocks * block_size + positions % block_size).to(torch.int32))


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
