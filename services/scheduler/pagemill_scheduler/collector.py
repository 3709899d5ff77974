"""When the garbage collector runs: between iterations, never in the middle of one."""

from __future__ import annotations

import gc

YOUNG_EVERY = 1_000
FULL_EVERY = 100_000


class Collector:
    """Takes the decision away from Python, whose full collections cost tens of milliseconds with thousands of live
    sequences and strike while a worker waits for its plan.

    The core makes no reference cycles on its hot path, so hardly anything waits for a collection; what does (exceptions
    with tracebacks, mostly) is found here, right after plans have left, when the workers are busy.
    """

    def __init__(self) -> None:
        self._rounds = 0

    def __enter__(self) -> Collector:
        gc.collect()
        gc.freeze()  # modules and settings live as long as the process: never look at them again
        gc.disable()
        return self

    def __exit__(self, *_exc: object) -> None:
        gc.enable()
        gc.unfreeze()

    def after_round(self, *, idle: bool) -> None:
        """Call it once per loop, after all was sent; ``idle`` when nothing had arrived."""
        if not idle:
            self._rounds += 1
            if self._rounds % FULL_EVERY == 0:
                gc.collect()
            elif self._rounds % YOUNG_EVERY == 0:
                gc.collect(1)
        elif self._rounds % FULL_EVERY > YOUNG_EVERY:
            self._rounds = 0
            gc.collect()
