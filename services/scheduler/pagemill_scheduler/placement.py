"""Which worker a waiting request starts on."""

from __future__ import annotations

from pagemill_scheduler.admission import Demand, demand
from pagemill_scheduler.request import Request
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState


class Place:
    """Where a request starts, and what it takes there."""

    def __init__(self, worker: WorkerState, taken: Demand) -> None:
        self.worker, self.taken = worker, taken


class Claims:
    """Placement within one pass over the queue.

    A request that goes to another worker than the one being planned starts there with that worker's own next plan;
    until then this pass counts its seat and blocks as taken, so that the requests behind it spread over the workers.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._workers = state.ready_workers()
        self._seats: dict[str, int] = {}
        self._blocks: dict[str, int] = {}
        self._held: set[str] = set()

    def hold(self, worker: str) -> None:
        """A request waits for room on ``worker`` and on no other: nobody behind it goes there."""
        self._held.add(worker)

    def promise(self, worker: WorkerState, blocks: int) -> None:
        """So many blocks of ``worker``, the one being planned, are as good as taken. What goes there claims nothing."""
        self._blocks[worker.identity] = blocks

    def claim(self, worker: WorkerState, request: Request, taken: Demand) -> None:
        name = worker.identity
        self._seats[name] = self._seats.get(name, 0) + request.seats_needed
        self._blocks[name] = self._blocks.get(name, 0) + taken.blocks

    def place(self, request: Request) -> Place | str:
        """The worker for ``request`` among those with a seat and blocks for it now, or the reason why there is none.

        The one that caches most of its prompt, unless another is so much less loaded that computing the prompt anew
        costs less than waiting; then the least loaded. A swapped request can only go to the worker that holds it.
        """
        best: Place | None = None
        best_cost = 0.0
        why = "no worker is ready"
        workers = self._workers
        for worker in workers:
            if request.swapped_to and worker.identity != request.swapped_to:
                continue
            if not can_ever_hold(self._state, worker, request):
                continue
            if worker.identity in self._held:
                why = f"a request before it that is swapped out to worker {worker.identity}"
                continue
            taken = demand(self._state, worker, request)
            refusal = self._refusal(worker, request, taken)
            if refusal:
                why = refusal
                continue
            if len(workers) == 1:
                return Place(worker, taken)
            cached = len(taken.cached) * worker.block_size / len(request.unfinished[0].tokens)
            cost = self._load(worker) - cached
            if best is None or cost < best_cost:
                best, best_cost = Place(worker, taken), cost
        return best or why

    def _refusal(self, worker: WorkerState, request: Request, taken: Demand) -> str:
        """Why ``worker`` cannot start ``request`` now; empty if it can."""
        seated = worker.seats_taken + self._seats.get(worker.identity, 0)
        # A fresh request needs all of its seats.
        seats, needed = worker.table.capacity, request.width if request.is_fresh else request.seats_needed
        if seated + needed > seats:
            return f"seats: it needs {needed}, {seated} of {seats} are taken"
        free = worker.pool.num_free - self._blocks.get(worker.identity, 0)
        reserve = worker.reserve(self._state.config.watermark, seated)
        if taken.blocks + reserve > free:
            return f"blocks: it needs {taken.blocks} and {reserve} stay in reserve, {free} are free"
        return ""

    def _load(self, worker: WorkerState) -> float:
        seats = (worker.seats_taken + self._seats.get(worker.identity, 0)) / self._state.config.seats
        blocks = (worker.pool.num_used + self._blocks.get(worker.identity, 0)) / worker.pool.num_blocks
        return max(seats, blocks)


def can_ever_hold(state: State, worker: WorkerState, request: Request) -> bool:
    """Whether the worker, were it empty, could run ``request`` to its end."""
    if request.limit > worker.max_length:
        return False
    # A single sequence of that length fits the pool.
    return request.width == 1 or (
        request.width <= state.config.seats and worker.most_blocks(request) <= worker.pool.num_blocks
    )
