"""`pagemill serve` as people use it: the commands of the README, and parts that die under load and come back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from pagemill_testing.agreement import Agreement, GreedyRun
from pagemill_testing.live_server import ServeCommand

from pagemill_gateway.answers import SchedulerState

pytestmark = pytest.mark.timeout(300)

README = Path(__file__).parents[2] / "README.md"
HERE = "http://127.0.0.1:8000"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def shell(command: str) -> str:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=180).stdout


def readme_command(server: ServeCommand, start: str) -> str:
    """The README's command that begins like this, for our server."""
    (line,) = (line.strip() for line in README.read_text().splitlines() if line.strip().startswith(start))
    return line.replace(HERE, server.url)


@needs_curl
def test_the_example_of_the_ready_line_answers_as_the_readme_says(server: ServeCommand) -> None:
    command = server.serve.out.read_text().splitlines()[1].strip()
    assert readme_command(server, f"curl {HERE}/v1/chat") == command
    answer = json.loads(shell(command))
    (shown,) = (json.loads(line) for line in README.read_text().splitlines() if line.startswith('{"id": "chatcmpl'))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    for changing in ("id", "created"):
        answer.pop(changing)
        shown.pop(changing)
    answer["usage"].pop("prompt_tokens_details")
    shown["usage"].pop("prompt_tokens_details", None)
    assert answer == shown


@needs_curl
def test_the_same_streamed_ends_with_done(server: ServeCommand) -> None:
    command = server.serve.out.read_text().splitlines()[1].strip()
    output = shell(command.replace('"temperature": 0', '"temperature": 0, "stream": true'))
    *events, last, end = output.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "The capital of France is Paris."


@needs_curl
def test_the_example_of_structured_output_answers_as_the_readme_says(server: ServeCommand) -> None:
    answer = json.loads(shell(readme_command(server, f"curl {HERE}/v1/completions")))
    shown = README.read_text().partition("has the text\n\n```json\n")[2].partition("\n```")[0]
    assert answer["choices"][0]["text"] == shown
    assert json.loads(shown) == {"name": "Ada Lovelace", "city": "London"}


@needs_curl
def test_looking_inside(server: ServeCommand) -> None:
    state = json.loads(shell(readme_command(server, f"curl {HERE}/v1/pagemill/state").partition("#")[0]))
    assert state["ready_workers"] == 1
    SchedulerState.model_validate(state)
    metrics = shell(readme_command(server, f"curl {HERE}/metrics").partition("#")[0])
    assert re.search(r"^pagemill:num_requests_running\{.*\} 0\.0$", metrics, re.MULTILINE)


def test_a_killed_worker_is_started_again_and_its_requests_finish(server: ServeCommand) -> None:
    prompts = ["The capital of France is", "Once upon a time", "def main():"]
    bodies = [{"prompt": prompt, "max_tokens": 40, "ignore_eos": True} for prompt in prompts]
    alone = [GreedyRun.of(server.ask(logprobs=2, **body)) for body in bodies]
    calls = [server.stream(**body) for body in bodies]
    for call in calls:
        call.until_tokens(3)
    killed = server.parts()["worker"]
    server.serve.send(signal.SIGSTOP)  # nobody starts another one before it has been looked at
    try:
        os.kill(killed, signal.SIGKILL)
        server.until(lambda: server.status("/ready") == 503, "/ready tells of it")
    finally:
        server.serve.send(signal.SIGCONT)
    server.finish(calls)
    agreement = Agreement("after a restart of the worker")
    for prompt, run, call in zip(prompts, alone, calls, strict=True):
        agreement.check(run, call.token_ids, prompt)
    agreement.conclude()
    assert server.parts()["worker"] != killed
    assert server.status("/ready") == 200
    server.until_idle()


def test_no_part_uses_shared_memory(server: ServeCommand) -> None:
    """So nothing can be left there, and a container's /dev/shm cannot be too small."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in server.parts().values()]
    assert len(maps) == 3
    assert not any("/dev/shm" in text for text in maps)
