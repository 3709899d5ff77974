"""Structured logs of every process: one set-up for our own loggers and for those of libraries (uvicorn, pyzmq).

Fields bound with ``structlog.contextvars.bound_contextvars(request_id=…)`` or with ``logger.bind(iteration=…)`` show
on each line of their scope.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["console", "json"]


def configure_logging(process: str, level: Level, log_format: Format, *, stream: TextIO | None = None) -> None:
    """Sets up the logs of this process; a second call replaces the first.

    Args:
        process: ``gateway``, ``scheduler``, ``worker``; a field of every line.
        level: the least severe level that is logged.
        log_format: lines for people, or one JSON object a line.
        stream: standard error by default, so that standard output stays free for answers to commands.
    """
    target = sys.stderr if stream is None else stream

    def add_process(
        _logger: object, _method: str, event_dict: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event_dict["process"] = process
        return event_dict

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
        structlog.processors.StackInfoRenderer(),
    ]
    # Plain tracebacks: the richer kind prints local variables, among which are keys and what users wrote.
    render: list[Processor]
    if log_format == "json":
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        colors = target.isatty()
        console = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
        render = [_without_controls, console]
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # uvicorn adds its text once more with colours.
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _without("color_message")],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # uvicorn's own set-up would print them twice
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a channel made before the set-up must follow it
    )


_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def _without_controls(
    _logger: object, _method: str, event_dict: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """What a client wrote, such as a path, must not steer the terminal that shows the log. Line ends in values are
    escaped by the renderer; tracebacks keep theirs."""
    for name, value in event_dict.items():
        if isinstance(value, str) and not value.isprintable():
            event_dict[name] = value.translate(_ESCAPED)
    return event_dict


def _without(field: str) -> Processor:
    def drop(_logger: object, _method: str, event_dict: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event_dict.pop(field, None)
        return event_dict

    return drop
