"""The images and the Compose file, built and run for real. Needs a Docker engine and builds for some minutes."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagemill_testing.processes import until

from pagemill_kernels.cpu.build import usable_isas

ROOT = Path(__file__).parents[2]
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
DEADLINE = 120.0

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]


class Stack:
    """One Compose project of its own name, on a free port, with a small KV cache."""

    def __init__(self) -> None:
        self.project = f"pagemill-test-{uuid.uuid4().hex[:8]}"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")},
            "PAGEMILL_PORT": "0",
            "PAGEMILL_NUM_KV_BLOCKS": "1024",
            "PAGEMILL_PEER_TIMEOUT": "10",  # a machine that builds and runs all this at once is slow to answer
        }

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            ["docker", "compose", "--project-name", self.project, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self, *arguments: str) -> None:
        try:
            self.compose("up", "--detach", "--wait", *arguments)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.compose('logs', '--no-color')}") from None

    def python(self, service: str, code: str) -> str:
        return self.compose("exec", "-T", service, "python", "-P", "-c", code).strip()

    def left(self) -> list[str]:
        """Containers, networks and volumes of the project."""
        label = f"--filter=label=com.docker.compose.project={self.project}"
        found: list[str] = []
        for command in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
            output = subprocess.run(["docker", *command, "--quiet", label], capture_output=True, text=True, check=True)
            found += output.stdout.split()
        return found

    def images(self) -> set[str]:
        """Ids of the images that the services have by now."""
        names = self.compose("config", "--images").split()
        command = ["docker", "image", "inspect", "--format", "{{.Id}}", *names]
        return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())

    @property
    def url(self) -> str:
        return "http://" + self.compose("port", "gateway", "8000").strip()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A running server; the tests of this file share it, in their order."""
    stack = Stack()
    before = stack.images()
    try:
        stack.up("--build")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")
        # Each image that was built anew leaves its old one without a name, and some 2 GB on the disk. Without force:
        # one that a container still has stays.
        if replaced := before - stack.images():
            subprocess.run(["docker", "image", "rm", *replaced], capture_output=True, check=False)


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=DEADLINE, trust_env=False) as client:
        yield client


def ask(client: httpx.Client) -> str:
    answer = client.post("/v1/chat/completions", json=QUESTION)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def generate(client: httpx.Client, number: int, tokens: int) -> dict[str, Any]:
    """One streamed completion of exactly ``tokens`` tokens: its last usage, finish reason and text."""
    body = {
        "prompt": f"Tale number {number}: once upon a time",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, finish, usage, done = "", None, None, False
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                usage = piece.get("usage") or usage
                for choice in piece["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
    return {"text": text, "finish": finish, "tokens": (usage or {}).get("completion_tokens"), "done": done}


def workers(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/v1/pagemill/state").json()["workers"]
    return found


def test_a_question_is_answered(client: httpx.Client) -> None:
    assert "Paris" in ask(client)


def test_a_stream_ends_in_done(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
    assert "Paris" in text


def test_the_server_is_published_on_loopback_alone(stack: Stack) -> None:
    assert stack.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_a_container_has_no_rights_and_a_read_only_root(stack: Stack, service: str) -> None:
    code = (
        "import os\n"
        "print(os.getuid(), os.getgid())\n"
        "for place in ('/', '/opt/pagemill', '/var/lib/pagemill/keys'):\n"
        "    try: open(place + '/probe', 'w')\n"
        "    except OSError as error: print(error.strerror)\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))])"
    )
    first, *errors, rights = stack.python(service, code).splitlines()
    assert first == "10001 10001"
    assert errors == ["Read-only file system"] * 3
    assert rights == "['0000000000000000', '1']"


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_gateway_and_scheduler_have_no_torch(stack: Stack, service: str) -> None:
    code = "from importlib.util import find_spec as f; print([name for name in ('torch', 'triton', 'gguf') if f(name)])"
    assert stack.python(service, code) == "[]"


def test_the_worker_runs_compiled_kernels_without_a_compiler(stack: Stack, client: httpx.Client) -> None:
    code = "from shutil import which; print([name for name in ('cc', 'c++', 'gcc', 'g++', 'clang') if which(name)])"
    assert stack.python("worker", code) == "[]"
    best, *_ = usable_isas()  # the containers see this machine's CPU
    assert [worker["kernels"] for worker in workers(client)] == [f"cpu-{best.name}+packed(Q4_1,Q8_0)"]


def test_the_processes_talk_encrypted(stack: Stack) -> None:
    assert "encrypted=True" in stack.compose("logs", "--no-color", "scheduler")


def test_workers_come_and_go_while_requests_run(stack: Stack, client: httpx.Client) -> None:
    tokens = 160
    # The load never stops while the number of workers changes: each of these threads asks again and again.
    stop = False

    def keep_asking(number: int) -> list[dict[str, Any]]:
        answers = []
        while not stop:
            answers.append(generate(client, number, tokens))
        return answers

    with ThreadPoolExecutor(8) as pool:
        asking: list[Future[list[dict[str, Any]]]] = [pool.submit(keep_asking, number) for number in range(8)]
        try:
            until(lambda: any(worker["running_sequences"] for worker in workers(client)), "requests run")
            stack.up("--no-recreate", "--scale", "worker=2")
            until(lambda: len(workers(client)) == 2, "the second worker has joined")
            until(lambda: all(worker["running_sequences"] for worker in workers(client)), "both workers have work")
            stack.up("--no-recreate", "--scale", "worker=1")
            until(lambda: len(workers(client)) == 1, "the second worker has left")
        finally:
            stop = True
        wait(asking)
        answers = [answer for future in asking for answer in future.result()]
    assert len(answers) >= 8
    for answer in answers:
        assert (answer["finish"], answer["tokens"], answer["done"]) == ("length", tokens, True)
        assert answer["text"]
    state = client.get("/v1/pagemill/state").json()
    assert [worker["blocks"]["used"] for worker in state["workers"]] == [0]
    assert state["metrics"]["requests_failed_total"] == 0


def test_a_killed_worker_is_started_again(stack: Stack, client: httpx.Client) -> None:
    (before,) = workers(client)
    code = (
        "import os, pathlib, signal\n"
        "for folder in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if folder.name not in ('1', str(os.getpid())) and b'pagemill' in (folder / 'cmdline').read_bytes():\n"
        "        os.kill(int(folder.name), signal.SIGKILL)"
    )
    stack.compose("exec", "-T", "worker", "python", "-P", "-c", code)
    until(lambda: [worker["identity"] for worker in workers(client)] not in ([], [before["identity"]]), "it is back")
    until(lambda: client.get("/ready").status_code == 200, "it is ready")
    assert "Paris" in ask(client)


def test_down_leaves_nothing(stack: Stack) -> None:
    assert stack.left()
    stack.compose("down", "--volumes")
    assert stack.left() == []
