"""``pagemill worker``, but each plan waits for a byte of a pipe: ``stepped_worker.py PIPE worker FLAG…``.

So a test has a real worker that stands still where it wants it to: alive, with its heartbeats, but in the midst of its
work. `stepping.SteppedWorker` holds the other end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from pagemill.main import main
from pagemill.openmp import let_threads_sleep

let_threads_sleep(os.environ)  # before torch is loaded, as `pagemill worker` does

from pagemill_shared.messages import IterationPlan, IterationResult, WorkerHello  # noqa: E402
from pagemill_shared.settings import WorkerSettings  # noqa: E402
from pagemill_worker import app  # noqa: E402
from pagemill_worker.load import Report, load_worker  # noqa: E402
from pagemill_worker.runner import Runner  # noqa: E402

Load = Callable[[WorkerSettings, Report], tuple[Runner, WorkerHello]]


def step_by_step(pipe: str) -> Load:
    """``load_worker``, for a runner that reads a byte of ``pipe`` before each plan."""
    steps = os.open(pipe, os.O_RDWR)  # also as a writer, so that it never ends

    def load(settings: WorkerSettings, report: Report) -> tuple[Runner, WorkerHello]:
        runner, hello = load_worker(settings, report)
        execute = runner.execute

        def after_a_byte(plan: IterationPlan) -> IterationResult:
            os.read(steps, 1)
            return execute(plan)

        runner.execute = after_a_byte  # type: ignore[method-assign]
        return runner, hello

    return load


if __name__ == "__main__":
    app.load_worker = step_by_step(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
