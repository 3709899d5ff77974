"""`pagemill run-batch` against a gateway with a scripted scheduler, and its retries against a scripted transport."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.program import INTERRUPTIBLE
from pagemill_testing.scripts import Script

from pagemill.batch import Asking, retry_after
from pagemill.batch_lines import BatchRequest, Reply
from pagemill.main import main
from pagemill_shared.messages import FinishReason, SubmitRequest

TOKENIZER = byte_level_bpe()


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    with stage() as running:
        yield running


def echo(submit: SubmitRequest) -> Script:
    """The prompt again."""
    return Script(submit.prompt_token_ids.tolist(), FinishReason.LENGTH)


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def completion(custom_id: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def rows(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


def test_every_request_gets_its_own_answer(api: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.stub.answer = echo
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    file = write(
        tmp_path / "work.jsonl",
        *(completion(f"id-{i}", f"number {i}") for i in range(40)),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    )
    assert main(["run-batch", str(file), "--url", api.gateway.url, "--concurrency", "5"]) == 0
    found = rows(tmp_path / "work.results.jsonl")
    assert len(found) == 41
    for i in range(40):
        row = found[f"id-{i}"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"]
        assert row["response"]["body"]["choices"][0]["text"] == f"number {i}"
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert capsys.readouterr().err.endswith(
        f"41 answered, 0 refused, 0 failed; results in {tmp_path / 'work.results.jsonl'}\n"
    )


def test_a_second_run_asks_only_for_what_is_missing(
    api: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.stub.answer = echo
    file = write(tmp_path / "work.jsonl", *(completion(f"id-{i}", f"number {i}") for i in range(10)))
    output = tmp_path / "out.jsonl"
    command = ["run-batch", str(file), "--output", str(output), "--url", api.gateway.url]
    assert main(command) == 0
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:6]) + whole[6][:20])  # as a run leaves it that was killed
    api.stub.submitted.clear()
    assert main(command) == 0
    assert len(api.stub.submitted) == 4
    assert len(rows(output)) == 10
    assert "4 answered, 0 refused, 0 failed, 6 done before" in capsys.readouterr().err
    api.stub.submitted.clear()
    assert main(command) == 0
    assert not api.stub.submitted


def test_bad_lines_and_refusals_do_not_stop_the_rest(
    api: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.stub.answer = echo
    file = write(
        tmp_path / "work.jsonl",
        completion("good", "fine"),
        "nonsense",
        completion("refused", "x", temperature=1000),
        completion("good", "again"),
        completion("nan", "x", temperature=float("nan")),
        completion("half", "\ud800"),
        completion("last", "fine"),
    )
    assert main(["run-batch", str(file), "--url", f"{api.gateway.url}/v1"]) == 1
    found = rows(tmp_path / "work.results.jsonl")
    assert found["good"]["response"]["status_code"] == 200
    assert found["refused"]["response"]["status_code"] == 400
    assert found["refused"]["response"]["body"]["error"]["param"] == "temperature"
    err = capsys.readouterr().err
    assert f"{file}, line 2: not valid JSON" in err
    assert f"{file}, line 4: custom_id 'good' stands in line 1 already" in err
    assert f"{file}, line 5: not valid JSON: NaN" in err
    assert f"{file}, line 6: body: half a surrogate pair" in err
    assert found["last"]["response"]["status_code"] == 200
    assert "2 answered, 1 refused, 0 failed, 4 bad lines" in err


def test_what_cannot_work_is_said_at_once(api: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "work.jsonl", completion("a", "x"))
    assert main(["run-batch", str(file), "--url", "http://127.0.0.1:9"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["run-batch", str(file), "--output", str(file), "--url", api.gateway.url]) == 2
    assert "cannot go where the requests are" in capsys.readouterr().err
    assert main(["run-batch", str(write(tmp_path / "empty.jsonl")), "--url", api.gateway.url]) == 2
    assert "there is no request in it" in capsys.readouterr().err


def test_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "work.jsonl", completion("a", "x"))
    with stage(api_key="s3cret-ä") as running:
        running.stub.answer = echo
        command = ["run-batch", str(file), "--url", running.gateway.url]
        assert main(command) == 2
        assert "a valid API key must be sent" in capsys.readouterr().err
        assert main([*command, "--api-key", "s3cret-ä"]) == 0


def test_no_more_requests_are_open_than_allowed(api: Stage, tmp_path: Path) -> None:
    most = 0

    def count(submit: SubmitRequest) -> Script:
        nonlocal most
        most = max(most, api.stub.running)
        return echo(submit)

    api.stub.answer = count
    file = write(tmp_path / "work.jsonl", *(completion(f"id-{i}", "one two three") for i in range(30)))
    assert main(["run-batch", str(file), "--url", api.gateway.url, "--concurrency", "3"]) == 0
    assert 1 <= most <= 3


def test_an_interrupted_run_can_be_taken_up(api: Stage, tmp_path: Path) -> None:
    api.stub.answer = lambda submit: (
        echo(submit) if len(submit.prompt_token_ids) < 20 else Script([], FinishReason.NOT_FINISHED)
    )
    file = write(tmp_path / "work.jsonl", completion("short", "x"), completion("long", "x" * 200))
    output = tmp_path / "out.jsonl"
    command = ["run-batch", str(file), "--output", str(output), "--url", api.gateway.url]
    program = [*INTERRUPTIBLE, sys.executable, "-P", "-m", "pagemill"]
    run = subprocess.Popen([*program, *command], stderr=subprocess.PIPE, text=True)
    api.stub.wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") == 1 and api.stub.running == 1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "interrupted: 1 of 2 requests have a result" in err
    assert "Traceback" not in err
    api.stub.wait_for(lambda: not api.stub.running)
    api.stub.answer = echo
    assert main(command) == 0
    assert rows(output).keys() == {"short", "long"}


# ---------------------------------------------------------------- retries


def ask(answers: list[httpx.Response | Exception], attempts: int = 5) -> tuple[Reply, list[float]]:
    """The reply after a server has answered like this, and the pauses that were made."""
    pauses: list[float] = []

    def answer(_: httpx.Request) -> httpx.Response:
        item = answers.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def scenario() -> Reply:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            asking = Asking(client, attempts, sleep=sleep, now=lambda: 1_000_000.0, jitter=lambda: 0.0)
            return await asking.ask(BatchRequest(1, "a", "/v1/completions", {}))

    return asyncio.run(scenario()), pauses


GOOD = httpx.Response(200, json={"x": 1}, headers={"x-request-id": "r"})


def test_later_is_asked_again_when_the_server_says() -> None:
    date = format_datetime(datetime.fromtimestamp(1_000_042, UTC), usegmt=True)
    busy = [httpx.Response(429, headers={"retry-after": "7"}), httpx.Response(503, headers={"retry-after": date})]
    reply, pauses = ask([*busy, httpx.Response(503, headers={"retry-after": "soon"}), GOOD])
    assert reply == Reply(200, "r", {"x": 1})
    assert pauses == [7.0, 42.0, 2.0]


def test_a_server_that_is_away_is_waited_for_longer_each_time() -> None:
    gone = [httpx.ConnectError("gone")] * 9
    reply, pauses = ask([*gone, GOOD], attempts=10)
    assert reply.status == 200
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_the_last_attempt_is_what_counts() -> None:
    reply, pauses = ask([httpx.ReadError("broke")] * 2 + [httpx.Response(503, text="<p>busy</p>")], attempts=3)
    assert reply.status == 503
    assert reply.body["error"]["message"] == "<p>busy</p>"
    assert len(pauses) == 2
    reply, _ = ask([httpx.ConnectError("gone")], attempts=1)
    assert reply == Reply(0, failure="ConnectError: gone")


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500])
def test_what_another_attempt_would_not_better_is_asked_once(status: int) -> None:
    reply, pauses = ask([httpx.Response(status, json={})])
    assert (reply.status, pauses) == (status, [])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("3", 3), (" 3 ", 3), ("0", 0), ("-1", None), ("x", None), ("", None), ("99999", 600),
     ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("Fri, 99 Jan 2100 00:00:00 GMT", None)],
)  # fmt: skip
def test_what_retry_after_may_say(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, 1_000_000.0) == seconds


def test_the_environment_names_the_server(api: Stage, tmp_path: Path) -> None:
    api.stub.answer = echo
    file = write(tmp_path / "work.jsonl", completion("a", "x"))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pagemill", "run-batch", str(file)],
        env={**os.environ, "PAGEMILL_URL": api.gateway.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 answered" in done.stderr
