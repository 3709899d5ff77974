"""`pagemill chat` and `pagemill run-batch` as the README and docs/commands.md show them, with a real model."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pagemill_testing.live_server import ServeCommand

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PAGEMILL = shlex.join([sys.executable, "-P", "-m", "pagemill"])


def line_of(page: str, start: str) -> str:
    """The one line of a page that begins like this."""
    (line,) = (line for line in (ROOT / page).read_text().splitlines() if line.startswith(start))
    return line


def shell(server: ServeCommand, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of a page, run by a shell."""
    command = line.partition("  #")[0].replace(".venv/bin/pagemill", PAGEMILL)
    if command.startswith("pagemill "):
        command = command.replace("pagemill", PAGEMILL, 1)
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PAGEMILL_URL": server.url},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )


@pytest.mark.parametrize(
    ("page", "start"), [("README.md", 'echo "What is'), ("docs/commands.md", 'pagemill chat "What is')]
)
def test_a_single_answer(server: ServeCommand, tmp_path: Path, page: str, start: str) -> None:
    assert shell(server, line_of(page, start), tmp_path).stdout == "The capital of France is Paris.\n"


def test_an_answer_into_a_file(server: ServeCommand, tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text("What is the capital of France?")
    shell(server, line_of("docs/commands.md", "pagemill chat --system"), tmp_path)
    assert (tmp_path / "answer.txt").read_text().strip()


@pytest.mark.parametrize(
    ("page", "start"),
    [("README.md", ".venv/bin/pagemill run-batch"), ("docs/commands.md", "pagemill run-batch requests")],
)
def test_a_batch(server: ServeCommand, tmp_path: Path, page: str, start: str) -> None:
    (tmp_path / "requests.jsonl").write_text(line_of("docs/commands.md", '{"custom_id"') + "\n")
    shown = json.loads(line_of("docs/commands.md", '{"id": "batch_req'))
    for _ in range(2):  # the second time all is done already
        done = shell(server, line_of(page, start), tmp_path)
        (row,) = (json.loads(line) for line in (tmp_path / "requests.results.jsonl").read_text().splitlines())
        assert row.keys() == shown.keys()
        assert row["response"].keys() == shown["response"].keys()
        assert row["custom_id"] == shown["custom_id"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["object"] == shown["response"]["body"]["object"]
        assert "Paris" in row["response"]["body"]["choices"][0]["text"]
    assert "1 done before" in done.stderr


def test_more_requests_than_may_be_open(server: ServeCommand, tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"id-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Say {i}"}], "max_tokens": 3, "temperature": 0},
        }
        for i in range(24)
    ]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = shell(server, "pagemill run-batch many.jsonl --concurrency 4", tmp_path)
    assert "24 answered, 0 refused, 0 failed" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "many.results.jsonl").read_text().splitlines()]
    assert {row["custom_id"] for row in rows} == {line["custom_id"] for line in lines}
    server.until_idle()
