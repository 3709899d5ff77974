"""Which worker a waiting request starts on."""

from __future__ import annotations

from pagemill_scheduler.request import Request
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState


class Claims:
    """Placement within one pass over the queue.

    A request that goes to another worker than the one being planned starts there with that worker's own next plan;
    until then this pass counts its seat and blocks as taken, so that the requests behind it spread over the workers.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._seats: dict[str, int] = {}
        self._blocks: dict[str, int] = {}

    def claim(self, worker: WorkerState, request: Request) -> None:
        name = worker.identity
        self._seats[name] = self._seats.get(name, 0) + len(request.sequences)
        self._blocks[name] = self._blocks.get(name, 0) + blocks_to_start(worker, request)

    def place(self, request: Request) -> tuple[WorkerState | None, str]:
        """The least loaded worker that has a seat and blocks for ``request`` now, or None and the reason."""
        best: WorkerState | None = None
        best_load = 0.0
        why = "no worker is ready"
        for worker in self._state.ready_workers():
            if request.limit > worker.max_length:
                continue
            refusal = self._refusal(worker, request)
            if refusal:
                why = refusal
                continue
            load = self._load(worker)
            if best is None or load < best_load:
                best, best_load = worker, load
        return best, why

    def _refusal(self, worker: WorkerState, request: Request) -> str:
        """Why ``worker`` cannot start ``request`` now; empty if it can."""
        running = len(worker.table) + self._seats.get(worker.identity, 0)
        seats = self._state.config.seats
        if running + len(request.sequences) > seats:
            return f"a seat: {running} of {seats} are taken"
        need = blocks_to_start(worker, request)
        free = worker.pool.num_free - self._blocks.get(worker.identity, 0)
        # An idle worker takes whatever fits, or a request of the pool's size would wait for ever.
        reserve = int(self._state.config.watermark * worker.pool.num_blocks) if running else 0
        if need + reserve > free:
            return f"blocks: it needs {need} and {reserve} stay in reserve, {free} are free"
        return ""

    def _load(self, worker: WorkerState) -> float:
        seats = (len(worker.table) + self._seats.get(worker.identity, 0)) / self._state.config.seats
        blocks = (worker.pool.num_used + self._blocks.get(worker.identity, 0)) / worker.pool.num_blocks
        return max(seats, blocks)


def blocks_to_start(worker: WorkerState, request: Request) -> int:
    return sum(worker.blocks_for(len(sequence.tokens)) for sequence in request.sequences)
