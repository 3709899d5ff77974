"""`pagemill chat` against a gateway with a scripted scheduler: piped, with a message, and in a real terminal."""

from __future__ import annotations

import itertools
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.program import INTERRUPTIBLE
from pagemill_testing.scripts import Script
from pagemill_testing.sockets import wait_until

from pagemill.chat import Conversation, Figures
from pagemill_shared.messages import FinishReason

TOKENIZER = byte_level_bpe()


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    with stage() as running:
        yield running


def prompts(running: Stage) -> list[str]:
    return [TOKENIZER.decode(s.prompt_token_ids.tolist(), skip_special_tokens=False) for s in running.stub.submitted]


def command(running: Stage, *words: str) -> list[str]:
    return [*INTERRUPTIBLE, sys.executable, "-P", "-m", "pagemill", "chat", "--url", running.gateway.url, *words]


def run(running: Stage, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(running, *words), input=given, capture_output=True, text=True, timeout=60, check=False
    )


class Terminal:
    """`pagemill chat` in a terminal of its own."""

    def __init__(self, running: Stage, *words: str) -> None:
        ours, theirs = pty.openpty()
        self._ours = ours
        self.process = subprocess.Popen(
            command(running, *words),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"},
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Waits for what the screen shows since the last call; that text."""
        text = wait_until(lambda: self._shown(pattern), what=f"{pattern} on the screen")
        self.seen = ""
        return text

    def interrupt_until(self, pattern: str) -> None:
        """Ctrl-C at the prompt, more than once if need be: one that comes when the prompt is there, but readline does
        not wait for a key yet, is only heard of with the next."""
        pauses = itertools.count()

        def shown() -> str:
            if next(pauses) % 200 == 0:  # once a second, as long as nothing comes of it
                self.process.send_signal(signal.SIGINT)
            return self._shown(pattern)

        wait_until(shown, what=f"{pattern} on the screen")
        self.seen = ""

    def _shown(self, pattern: str) -> str:
        try:
            self.seen += os.read(self._ours, 65536).decode(errors="replace")
        except BlockingIOError:
            pass
        except OSError:  # the other end is closed
            assert re.search(pattern, self.seen), self.seen
        return self.seen if re.search(pattern, self.seen) else ""


# ---------------------------------------------------------------- one answer


def test_a_message_is_answered(api: Stage) -> None:
    api.stub.replay(ids("The capital of France is Paris."))
    done = run(api, "Where?", "--system", "Be brief.", "--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "20",
               "--seed", "3")  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n", "")
    (submit,) = api.stub.submitted
    sampling = submit.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, 20, 3)
    assert sampling.top_p == pytest.approx(0.9)
    assert "system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?" in prompts(api)[0]


@pytest.mark.parametrize("tail", ["/v1", "/v1/", "/"])
def test_the_url_may_be_the_one_that_other_clients_take(api: Stage, tail: str) -> None:
    api.stub.replay(ids("fine"))
    done = run(api, "x", "--url", f"{api.gateway.url}{tail}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_what_is_piped_in_is_one_message(api: Stage) -> None:
    api.stub.replay(ids("fine"))
    done = run(api, given="One\nTwo\n")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert "user\nOne\nTwo<|im_end|>" in prompts(api)[0]


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["x", "--model", "other"], 1, "pagemill chat: the model `other` does not exist\n"),
        (["x", "--temperature", "1000"], 1, "pagemill chat: temperature: Input should be less than or equal to 100"),
        (["x", "--temperature", "nan"], 2, "pagemill chat: temperature: JSON has no infinite number"),
        (["x", "--top-p", "inf"], 2, "pagemill chat: top_p: JSON has no infinite number"),
        (["x", "--system", "\udcff"], 2, "pagemill chat: half a surrogate pair is no text\n"),
        ([], 1, "pagemill chat: there is no message\n"),
        (["x", "--url", "http://127.0.0.1:9"], 2, "pagemill chat: no server answers at http://127.0.0.1:9 ("),
        (["x", "--url", "http://"], 2, "pagemill chat: --url: 'http://' is not allowed"),
    ],
)
def test_what_does_not_work_is_one_line(api: Stage, words: list[str], status: int, reason: str) -> None:
    api.stub.replay(ids("fine"))
    done = run(api, *words)
    assert done.returncode == status
    assert done.stdout == ""
    assert done.stderr.startswith(reason)
    assert done.stderr.count("\n") == 1


def test_an_answer_that_breaks_off_is_told_of(api: Stage) -> None:
    api.stub.replay(ids("The capital"), FinishReason.NOT_FINISHED)
    running = subprocess.Popen(
        command(api, "Where?"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0
    )
    assert running.stdout is not None
    assert running.stdout.read(11) == "The capital"
    api.stub.fail("worker_lost", "the worker died")
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (1, "\n", "pagemill chat: the worker died\n")


def test_ctrl_c_before_the_first_piece_leaves_standard_output_empty(api: Stage) -> None:
    api.stub.replay([], FinishReason.NOT_FINISHED)
    running = subprocess.Popen(command(api, "Where?"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    api.stub.wait_for(lambda: api.stub.running)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "")
    api.stub.wait_for(lambda: api.stub.aborted)


def test_an_answer_without_text_is_an_empty_line(api: Stage) -> None:
    api.stub.replay([2], FinishReason.EOS)
    done = run(api, "Where?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_a_reader_that_goes_away_ends_the_request(api: Stage) -> None:
    api.stub.replay(ids("word"), FinishReason.NOT_FINISHED)
    running = subprocess.Popen(command(api, "Go"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.read(4) == "word"
    running.stdout.close()
    api.stub.go_on(ids(" after word"), FinishReason.NOT_FINISHED)
    api.stub.wait_for(lambda: api.stub.aborted)
    assert running.stderr is not None
    assert running.stderr.read() == ""
    assert running.wait(60) == 141
    running.stderr.close()


def test_ctrl_c_ends_a_single_answer(api: Stage) -> None:
    api.stub.replay(ids("The capital"), FinishReason.NOT_FINISHED)
    running = subprocess.Popen(command(api, "Where?"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    api.stub.wait_for(lambda: api.stub.running)
    assert running.stdout is not None
    assert running.stdout.read(11) == "The capital"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "\n", "")
    api.stub.wait_for(lambda: api.stub.aborted)


def test_the_key(tmp_path: Any) -> None:
    with stage(api_key="s3cret-ä") as running:
        running.stub.replay(ids("fine"))
        done = run(running, "x")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "a valid API key must be sent" in done.stderr
        assert run(running, "x", "--api-key", "s3cret-ä").stdout == "fine\n"


# ---------------------------------------------------------------- a conversation


def test_a_conversation_in_a_terminal(api: Stage) -> None:
    api.stub.replay(ids("It is"), FinishReason.NOT_FINISHED)
    with Terminal(api) as terminal:
        assert "tiny" in terminal.until("> $")
        terminal.type("Alpha\n")
        terminal.until("It is$")  # what comes later gives the rate that is shown
        api.stub.go_on(ids(" fine."))
        assert re.search(r" fine\.\r\n.*\d+ tokens, [\d.]+ tokens/s, first after", terminal.until("> $"))
        api.stub.script = Script(ids("It is fine."))
        terminal.type("/help\n")
        terminal.until("/bye ends")
        terminal.type("Beta\\\nGamma\n")
        terminal.until(r"first after [^>]*> $")
        terminal.type("/new\n")
        terminal.until("forgotten")
        terminal.type("Delta\n")
        terminal.until(r"first after [^>]*> $")
        terminal.type("/bye\n")
        assert terminal.process.wait(60) == 0
    first, second, third = prompts(api)
    assert "Alpha" in first
    assert (
        "user\nAlpha<|im_end|>\n<|im_start|>assistant\nIt is fine.<|im_end|>\n<|im_start|>user\nBeta\nGamma" in second
    )
    assert "Alpha" not in third


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(api: Stage) -> None:
    api.stub.replay(ids("The capital"), FinishReason.NOT_FINISHED)
    with Terminal(api) as terminal:
        terminal.until("> $")
        terminal.type("Where?\n")
        terminal.until("The capital")
        terminal.process.send_signal(signal.SIGINT)
        assert "stopped" in terminal.until("> $")
        api.stub.wait_for(lambda: api.stub.aborted)
        terminal.interrupt_until("Ctrl-D or /bye ends")
        api.stub.replay(ids("fine"))
        terminal.type("Go on\n")
        terminal.until("fine\r\n")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    assert (
        "user\nWhere?<|im_end|>\n<|im_start|>assistant\nThe capital<|im_end|>\n<|im_start|>user\nGo on"
        in prompts(api)[0]
    )


def test_a_refused_question_was_not_asked(api: Stage) -> None:
    with Terminal(api) as terminal:
        terminal.until("> $")
        api.stub.replay([], failure=("context_length_exceeded", "it is too long", "messages"))
        terminal.type("Alpha\n")
        assert "it is too long" in terminal.until("> $")
        api.stub.replay(ids("fine"))
        terminal.type("Beta\n")
        terminal.until("fine\r\n")
    assert "Alpha" not in prompts(api)[0]


def test_a_model_cannot_steer_the_terminal(api: Stage) -> None:
    api.stub.replay(ids("a\x1b]0;title\x07b\tc\x9b2Jd"))
    with Terminal(api) as terminal:
        terminal.until("> $")
        terminal.type("Go\n")
        shown = terminal.until("> $").partition("Go\r\n")[2]
        assert "a␛]0;title␇b" in shown
        assert "\x9b" not in shown
        assert "\x07" not in shown


def test_a_conversation_keeps_what_was_said() -> None:
    conversation = Conversation({"model": "m"}, "Be kind.")
    assert conversation.ask("One")["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One"},
    ]
    conversation.answered("")
    assert conversation.messages == []
    conversation.ask("Two")
    conversation.answered("2")
    assert [message["content"] for message in conversation.ask("Three")["messages"]] == [
        "Be kind.",
        "Two",
        "2",
        "Three",
    ]


def test_figures_count_from_the_first_token() -> None:
    times = iter([0.0, 0.5, 1.5])
    figures = Figures(lambda: next(times))
    figures.add(0)
    figures.add(2)
    figures.add(10)
    assert str(figures) == "12 tokens, 10.0 tokens/s, first after 0.50 s"
