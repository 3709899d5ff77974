"""One set-up for our loggers and those of libraries."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from pagemill_shared.logs import Format, Level, configure_logging


def configured(level: Level = "info", log_format: Format = "json") -> io.StringIO:
    stream = io.StringIO()
    configure_logging("worker", level, log_format, stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_process_level_logger_and_fields() -> None:
    stream = configured()
    structlog.get_logger("pagemill.x").info("joined", num_blocks=7)
    [line] = lines(stream)
    assert line.pop("timestamp")
    assert line == {"event": "joined", "num_blocks": 7, "process": "worker", "level": "info", "logger": "pagemill.x"}


def test_request_id_and_iteration_are_bound() -> None:
    stream = configured()
    log = structlog.get_logger("pagemill.x").bind(iteration=12)
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        log.warning("inside")
    log.warning("outside")
    inside, outside = lines(stream)
    assert (inside["request_id"], inside["iteration"]) == ("r-1", 12)
    assert "request_id" not in outside


def test_libraries_log_through_the_same_handler_and_level() -> None:
    stream = configured("warning")
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.addHandler(logging.StreamHandler(stream))
    stream = configured("warning")
    uvicorn.info("Started server process")
    with structlog.contextvars.bound_contextvars(request_id="r-2"):
        uvicorn.warning("odd %s", "request", extra={"color_message": "\x1b[1modd", "client": "127.0.0.1"})
    [line] = lines(stream)
    assert line["client"] == "127.0.0.1"
    assert "color_message" not in line
    assert (line["event"], line["process"], line["request_id"]) == ("odd request", "worker", "r-2")


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(level: Level, expected: int) -> None:
    stream = configured(level)
    log = structlog.get_logger("pagemill.x")
    for method in (log.debug, log.info, log.warning, log.error):
        method("said")
    assert len(lines(stream)) == expected


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_exceptions_show_where_but_not_local_variables(log_format: Format) -> None:
    stream = configured(log_format=log_format)
    secret = "password-" + str(123)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("pagemill.x").exception("failed")
    text = stream.getvalue()
    assert "ValueError: broken" in text
    assert "test_logs.py" in text
    assert secret not in text


def test_console_lines_are_plain_without_a_terminal() -> None:
    stream = configured(log_format="console")
    structlog.get_logger("pagemill.x").info("joined", num_blocks=7)
    assert "joined" in stream.getvalue()
    assert "num_blocks=7" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_a_client_wrote_neither_steers_a_terminal_nor_begins_a_line(log_format: Format) -> None:
    stream = configured(log_format=log_format)
    hostile = "/a\x1b[2J\x07\x9b2Jb\r\n2026 [info] forged\x00"
    structlog.get_logger("pagemill.x").info("request", path=hostile, alone="/\x1b[2J", plain="zä/日")
    logging.getLogger("uvicorn.error").warning("odd %s", "\x1b[2J")
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert not any(character in text for character in "\x1b\x07\x9b\r\x00")
    assert "\\x1b[2J" in text or "\\u001b[2J" in text
    if log_format == "json":
        assert lines(stream)[0]["path"] == hostile
    else:
        assert "plain=zä/日" in text
