"""The scheduler process: builds core, sockets and shell, and runs them until it is told to stop."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import structlog
import zmq

from pagemill_scheduler import compiled
from pagemill_scheduler.config import CoreConfig
from pagemill_scheduler.core import SchedulerCore
from pagemill_scheduler.shell import EventError, Shell, Side
from pagemill_shared.channel import RouterChannel
from pagemill_shared.curve import client_check, load_server_keys
from pagemill_shared.logs import configure_logging
from pagemill_shared.settings import SchedulerSettings
from pagemill_shared.wakeup import Wakeup


def run(settings: SchedulerSettings) -> int:
    """Serves until SIGTERM or SIGINT; the process's exit status. Main thread only.

    Raises:
        ConfigurationError: an endpoint or key that cannot be used.
    """
    configure_logging("scheduler", settings.log_level, settings.log_format)
    log = structlog.get_logger("pagemill.scheduler")
    keys = load_server_keys(settings.curve_dir) if settings.curve_dir is not None else None
    config = core_config(settings)
    core = SchedulerCore(config, new_incarnation())
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        stack.enter_context(client_check(context, keys))
        channels: dict[Side, RouterChannel] = {}
        endpoints: dict[Side, str] = {"backend": settings.backend, "frontend": settings.frontend}
        for side, endpoint in endpoints.items():
            channels[side] = RouterChannel(
                context,
                side,
                endpoint,
                keys=keys,
                allow_insecure_bind=settings.allow_insecure_bind,
                peer_timeout=settings.peer_timeout,
            )
            stack.callback(channels[side].close)
        wakeup = Wakeup()
        stack.callback(wakeup.close)
        shell = Shell(
            core,
            channels,
            wakeup,
            tick_interval=min(settings.heartbeat_interval / 2, 0.25),
            shutdown_grace=settings.shutdown_grace,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: shell.request_stop())
        log.info(
            "scheduler ready",
            frontend=channels["frontend"].endpoint,
            backend=channels["backend"].endpoint,
            encrypted=keys is not None,
            compiled=compiled.in_use(),
        )
        if config.seats < settings.max_num_seqs:
            log.warning(
                "max_num_batched_tokens lets fewer sequences run at once than max_num_seqs",
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
            )
        try:
            shell.run()
        except EventError:
            return 1
    log.info("scheduler stopped")
    return 0


def core_config(settings: SchedulerSettings) -> CoreConfig:
    return CoreConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_seconds=settings.max_prefill_seconds,
        pipeline_depth=settings.pipeline_depth,
        preemption_mode=settings.preemption_mode,
        prefix_caching=settings.enable_prefix_caching,
        priority_aging=settings.priority_aging,
        heartbeat_interval=settings.heartbeat_interval,
        peer_timeout=settings.peer_timeout,
        no_worker_timeout=settings.no_worker_timeout,
        worker_return_timeout=settings.worker_return_timeout,
        check_invariants=settings.check_invariants,
    )


def new_incarnation() -> int:
    """Grows with every start on this machine, unless two are less than 10 ms apart, and stays below 2**39 till 2144."""
    return time.time_ns() // 10_000_000
