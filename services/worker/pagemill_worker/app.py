"""The worker process: loads the model, then connects and carries out plans until it is told to stop."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

import structlog
import zmq
from structlog.typing import FilteringBoundLogger

from pagemill_shared.channel import DealerChannel
from pagemill_shared.curve import load_client_keys
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.link import PeerLink
from pagemill_shared.logs import configure_logging
from pagemill_shared.settings import WorkerSettings
from pagemill_shared.wakeup import Wakeup
from pagemill_worker.load import load_worker
from pagemill_worker.shell import Shell


def run(settings: WorkerSettings) -> int:
    """Works until SIGTERM or SIGINT; the process's exit status. Main thread only.

    Raises:
        ConfigurationError: the model, a key or the endpoint cannot be used, or the scheduler refuses this worker.
    """
    configure_logging("worker", settings.log_level, settings.log_format)
    log = structlog.get_logger("pagemill.worker")
    keys = load_client_keys(settings.curve_dir) if settings.curve_dir is not None else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # nothing is lost before the first hello
    runner, hello = load_worker(settings, progress_log(log))
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        channel = DealerChannel(context, "backend", settings.backend, keys=keys, peer_timeout=settings.peer_timeout)
        stack.callback(channel.close)
        wakeup = Wakeup()
        stack.callback(wakeup.close)
        link = PeerLink(hello, heartbeat_interval=settings.heartbeat_interval, peer_timeout=settings.peer_timeout)
        shell = Shell(runner, channel, wakeup, link, shutdown_grace=settings.shutdown_grace)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: shell.request_stop())
        gc.collect()
        gc.freeze()  # the model's modules live as long as the process: collections need not look at them again
        log.info("worker ready", worker=hello.identity, device=hello.device, backend=settings.backend)
        try:
            shell.run()
        except ConfigurationError:
            raise
        except Exception:
            # Closing the connection is all that the scheduler is told, at once: it then counts this as a death of the
            # worker, so that a request that kills workers is not handed from one to the next.
            log.exception("the worker failed; ending")
            return 1
    log.info("worker stopped")
    return 0


def progress_log(log: FilteringBoundLogger) -> Callable[[str, float | None], None]:
    """Logs each step that is reported, and long steps again at every tenth of them."""
    last: tuple[str, int | None] | None = None

    def report(step: str, share: float | None) -> None:
        nonlocal last
        tenth = None if share is None else int(share * 10)
        if (step, tenth) == last:
            return
        last = (step, tenth)
        if tenth is None:
            log.info(step)
        else:
            log.info(step, done=f"{tenth * 10} %")

    return report
