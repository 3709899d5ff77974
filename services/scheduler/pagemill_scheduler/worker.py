"""What the scheduler knows of one worker: its link, its block pool, its running sequences, its plans in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagemill_scheduler.events import Peer
from pagemill_scheduler.pool import BlockPool, HostPool
from pagemill_scheduler.request import Request, Sequence
from pagemill_scheduler.table import Slots, SlotTable
from pagemill_shared.messages import WorkerHello
from pagemill_shared.numbering import Incoming, Outgoing


@dataclass(slots=True, eq=False)
class AwaitedReport:
    """What a chunk in flight will tell of positions start … end - 1 of its sequence's prompt.

    Attributes:
        wanted: False once nobody wants it any more.
        orphan: the sequence was preempted since, and waits for it.
    """

    sequence: Sequence
    slot: int
    start: int
    end: int
    wanted: bool = True
    orphan: bool = False


class Flight:
    """A plan that was sent and has no result yet.

    Attributes:
        slots: [K] the slot behind each token that the result will hold, in the result's order.
        left: [K] True where the sequence has left the slot since; any_left: whether there are such.
        orphans: sequences preempted since, by index into ``slots``: their tokens still count.
        num_tokens: tokens that the plan computes.
        reports: those that the result will hold, in its order.
    """

    def __init__(
        self, iteration: int, slots: Slots, num_tokens: int, dispatched_at: float, reports: list[AwaitedReport]
    ) -> None:
        self.iteration = iteration
        self.slots = slots
        self.num_tokens = num_tokens
        self.dispatched_at = dispatched_at
        self.reports = reports
        self.left: npt.NDArray[np.bool_] = np.zeros(len(slots), np.bool_)
        self.any_left = False
        self.orphans: dict[int, Sequence] = {}

    def forget(self, gone: npt.NDArray[np.bool_], orphans: dict[int, Sequence]) -> None:
        """The sequences in the slots that are True in ``gone`` leave them. As one of ``orphans``, which are listed by
        slot, a sequence still takes the tokens that are on its way."""
        going = gone[self.slots]
        if self.any_left:
            going &= ~self.left
        indices = going.nonzero()[0]
        if len(indices):
            self.any_left = True
            self.left[indices] = True
        if orphans:
            for index in indices.tolist():
                orphan = orphans[int(self.slots[index])]
                self.orphans[index] = orphan
                orphan.in_flight += 1
        for report in self.reports:
            if gone[report.slot] and report.wanted and not report.orphan:
                report.wanted = report.orphan = bool(orphans)
                report.sequence.in_flight += report.orphan


class Notes:
    """What has changed since the last plan and the next one must tell the worker.

    Attributes:
        forks: (parent slot, child slot, sequence index).
        chosen: next token by slot.
        swap_out: (device block, host block).
    """

    def __init__(self) -> None:
        self.released: list[int] = []
        self.forks: list[tuple[int, int, int]] = []
        self.chosen: dict[int, int] = {}
        self.swap_out: list[tuple[int, int]] = []

    def left(self, slot: int) -> None:
        """The slot has become empty. What the worker never heard of need not be taken back."""
        self.chosen.pop(slot, None)
        if self.forks and any(child == slot for _, child, _ in self.forks):
            self.forks = [fork for fork in self.forks if fork[1] != slot]
        else:
            self.released.append(slot)


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker.

    Attributes:
        prefill_budget: most prompt tokens of one of its iterations.
        seats_taken: slots in use or reserved.
        progress_at: when it last began or advanced: a plan's deadline counts from there.
        leaving: it was told to stop; takes no new work.
        max_length: longest sequence that it can ever hold, in tokens.
    """

    peer: Peer
    hello: WorkerHello
    last_heard: float
    table: SlotTable
    pool: BlockPool
    host: HostPool
    prefill_budget: int
    notes: Notes = field(default_factory=Notes)
    seats_taken: int = 0
    outgoing: Outgoing = field(default_factory=Outgoing)
    incoming: Incoming = field(default_factory=Incoming)
    flights: deque[Flight] = field(default_factory=deque)
    heartbeat_at: float = 0.0
    progress_at: float = 0.0
    leaving: bool = False
    num_plans: int = 0
    num_preemptions: int = 0

    identity: str = field(init=False)
    block_size: int = field(init=False)
    max_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.identity, self.block_size = self.hello.identity, self.hello.block_size
        self.max_length = max_length(self.hello)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def vacate(self, sequences: list[Sequence], *, keep_in_flight: bool) -> None:
        """Take ``sequences`` off this worker and give up their blocks.

        Tokens that are on their way to them still count with ``keep_in_flight``, else they are dropped.
        """
        if not sequences:
            return
        table = self.table
        by_slot = {sequence.slot: sequence for sequence in sequences}
        slots = np.array(list(by_slot), np.intp)
        self.pool.release([table.blocks_of(slot) for slot in by_slot])
        for slot in table.leave(slots):
            self.notes.left(slot)
        if self.flights:
            gone = np.zeros(table.capacity, np.bool_)
            gone[slots] = True
            for flight in self.flights:
                flight.forget(gone, by_slot if keep_in_flight else {})

    def told(self) -> None:
        """A plan has carried the notes."""
        self.notes = Notes()
        self.host.plan_made()

    def take_seats(self, request: Request, count: int) -> None:
        """``request`` holds or reserves ``count`` slots from here on."""
        self.seats_taken += count - request.seats
        request.seats = count

    def reserve(self, watermark: float, seated: int) -> int:
        """Blocks that admission leaves free beside ``seated`` running sequences. An idle worker takes whatever fits, or
        a request of the pool's size would wait for ever."""
        return int(watermark * self.pool.num_blocks) if seated else 0

    def most_blocks(self, request: Request) -> int:
        """Blocks that ``request`` needs at its longest: full blocks of its prompt are shared, the rest is not."""
        each = self.blocks_for(request.limit)
        width = request.width
        shared = len(request.prompt) // self.block_size if width > 1 else 0
        return shared + width * (each - shared)


def max_length(hello: WorkerHello) -> int:
    """Longest sequence that a worker can ever hold: the model's limit, or its whole pool."""
    return min(hello.max_model_len, hello.num_blocks * hello.block_size)
