"""Requests of several sequences, between the scheduler client and the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.client_bench import Bench, Record, kinds, request, text_of

from pagemill_gateway.output import MAX_UNREAD_TOKENS
from pagemill_shared.messages import (
    AbortRequest,
    FinishReason,
    GatewayHello,
    GatewaySync,
    RequestFailure,
    SequenceFinished,
    SubmitRequest,
)
from pagemill_shared.schema import Message


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    assert [type(m) for m in bench.client.tick(0.0)] == [GatewayHello]
    bench.welcome(1)
    return bench


def test_the_sequences_of_a_request_end_one_by_one(bench: Bench) -> None:
    one = request(stop="cd", n=3)
    (submit,) = bench.client.submit(one)
    assert isinstance(submit, SubmitRequest)
    assert submit.sampling.n == 3
    assert not bench.deliver_rows([(1, 0, 0, [0], 0), (1, 1, 0, [2], 0), (1, 2, 0, [4], FinishReason.EOS)])
    (finished,) = bench.deliver_rows([(1, 1, 1, [3], 0), (1, 0, 1, [1], 0)])
    assert isinstance(finished, SequenceFinished)
    assert (finished.handle, finished.sequence, finished.tokens_kept) == (1, 1, 2)
    assert len(bench.client) == 1
    assert not one.output.done
    assert not bench.deliver(1, 2, [5], sequence=1)  # surplus of the pipeline
    assert not bench.deliver(1, 2, [5], FinishReason.LENGTH)
    assert [text_of(one, i) for i in range(3)] == ["abf", "", ""]  # "e" was an end token
    assert [choice.finish_reason for choice in one.choices] == ["length", "stop", "stop"]
    assert (one.output.done, len(bench.client)) == (True, 0)


def test_a_stop_string_that_ends_the_last_sequence_is_told_too(bench: Bench) -> None:
    one = request(stop="a", n=2)
    bench.client.submit(one)
    messages = bench.deliver_rows([(1, 0, 0, [0], 0), (1, 1, 0, [0], 0)])
    assert [(m.sequence, m.tokens_kept) for m in messages if isinstance(m, SequenceFinished)] == [(0, 1), (1, 1)]
    assert len(bench.client) == 0


def test_sequences_that_ended_here_are_told_again_after_a_resync(bench: Bench) -> None:
    one, two = request(stop="b", n=3), request(n=2)
    bench.client.submit(one)
    bench.client.submit(two)
    assert len(bench.deliver_rows([(1, 0, 0, [0], 0), (1, 1, 0, [0, 1], 0), (1, 2, 0, [0], FinishReason.LENGTH)])) == 1
    sync, first, again, second = bench.welcome(2)
    assert isinstance(sync, GatewaySync)
    assert isinstance(first, SubmitRequest)
    assert isinstance(second, SubmitRequest)
    assert (first.handle, second.handle) == (1, 2)
    assert isinstance(again, SequenceFinished)
    assert (again.epoch, again.handle, again.sequence, again.tokens_kept) == (2, 1, 1, 2)
    assert [sync.number, first.number, again.number, second.number] == [1, 2, 3, 4]


def test_a_request_whose_sequences_have_all_ended_here_is_not_listed_again(bench: Bench) -> None:
    one = request(stop="b", n=2)
    bench.client.submit(one)
    bench.deliver_rows([(1, 0, 0, [1], 0), (1, 1, 0, [1], 0)])
    (sync,) = bench.welcome(2)
    assert isinstance(sync, GatewaySync)
    assert not sync.handles.size


def test_min_tokens_hold_the_stop_strings_of_each_sequence_back(bench: Bench) -> None:
    one = request(stop="a", n=2, min_tokens=2)
    bench.client.submit(one)
    (finished,) = bench.deliver_rows([(1, 0, 0, [0, 1], 0), (1, 1, 0, [1, 0], 0)])
    assert isinstance(finished, SequenceFinished)
    assert (finished.sequence, finished.tokens_kept) == (1, 2)


def test_a_sequence_that_was_not_asked_for_is_an_error(bench: Bench) -> None:
    one = request(n=2)
    bench.client.submit(one)
    assert kinds(bench.deliver(1, 0, [0], sequence=2)) == [AbortRequest]
    assert one.output.error is not None
    assert one.output.error.status == 500


def test_a_refusal_names_the_field_as_the_client_called_it(bench: Bench) -> None:
    one = request(n=3)
    bench.client.submit(one)
    bench.deliver(0, 0, [], failures=(RequestFailure(1, "too_many_sequences", "3 of at most 2", "n"),))
    error = one.output.error
    assert error is not None
    assert (error.status, error.param, error.message) == (400, "best_of", "best_of: 3 of at most 2")


def test_a_group_waits_for_a_slow_client_as_long_as_one_sequence(bench: Bench) -> None:
    one = request(n=2)
    bench.client.submit(one)
    tokens = [0] * (MAX_UNREAD_TOKENS // 2)
    assert not bench.deliver_rows([(1, 0, 0, tokens, 0), (1, 1, 0, tokens, 0)])
    assert kinds(bench.deliver(1, len(tokens), [0], sequence=1)) == [AbortRequest]
    assert one.output.error is not None
    assert one.output.error.code == "client_too_slow"


def test_the_whole_of_a_finished_text_may_come_at_once(bench: Bench) -> None:
    one = request(n=2)
    bench.client.submit(one)
    rows = [(1, sequence, 0, [0] * (2 * MAX_UNREAD_TOKENS), FinishReason.LENGTH) for sequence in range(2)]
    assert not bench.deliver_rows(rows)
    assert one.output.error is None


def test_each_sequence_reports_its_own_latencies(bench: Bench) -> None:
    timing = Record()
    bench.client.submit(request(n=2, timing=timing))
    bench.now = 1.0
    bench.deliver_rows([(1, 0, 0, [0], 0), (1, 1, 0, [0], 0)])
    bench.now = 1.5
    bench.deliver_rows([(1, 0, 1, [0], 0)])
    bench.now = 3.0
    bench.deliver_rows([(1, 0, 2, [0], FinishReason.LENGTH), (1, 1, 1, [0], FinishReason.EOS)])
    assert timing.reported == [
        ("first", 1.0), ("first", 1.0), ("next", 0.5), ("next", 1.5), ("length", 3.0), ("next", 2.0), ("stop", 3.0),
    ]  # fmt: skip


def test_without_a_connection_new_requests_are_sent_away_and_open_ones_wait(bench: Bench) -> None:
    one = request()
    bench.client.submit(one)
    assert bench.client.obstacle(0.0) is None
    broken = bench.client.obstacle(0.0, connected=False)
    assert broken is not None
    assert (broken.code, broken.lasting) == ("scheduler_lost", True)
    assert not one.output.done


STOP = "ab"


def solo(tokens: list[int], min_tokens: int) -> tuple[str, int, bool]:
    """Text, tokens kept, and whether a stop string ended it, found the obvious way."""
    for count in range(1, len(tokens) + 1):
        text = "".join(chr(ord("a") + token) for token in tokens[:count])
        if count >= min_tokens and text.endswith(STOP):
            return text.removesuffix(STOP), count, True
    return "".join(chr(ord("a") + token) for token in tokens), len(tokens), False


class Course:
    """A scheduler that delivers a group's outputs in any order and in any pieces, and begins epochs at any time."""

    def __init__(self, outputs: list[list[int]], min_tokens: int) -> None:
        self.bench = Bench()
        self.bench.client.tick(0.0)
        self.bench.welcome(1)
        self.request = request(stop=STOP, n=len(outputs), min_tokens=min_tokens)
        self.bench.client.submit(self.request)
        self.outputs = outputs
        self.sent = [0] * len(outputs)
        self.ended: set[int] = set()  # sequences that are over, for this scheduler
        self.told: dict[int, int] = {}
        self.texts = [""] * len(outputs)

    def deliver(self, sequence: int, count: int) -> None:
        if sequence in self.ended:
            return
        start = self.sent[sequence]
        tokens = self.outputs[sequence][start : start + count]
        self.sent[sequence] += len(tokens)
        last = self.sent[sequence] == len(self.outputs[sequence])
        if last:
            self.ended.add(sequence)
        finish = FinishReason.LENGTH if last else FinishReason.NOT_FINISHED
        self.take(self.bench.deliver(1, start, tokens, finish, sequence=sequence))

    def resync(self, lose: bool) -> None:
        """All that was produced is delivered again; with ``lose`` what the gateway says to the welcome is lost."""
        if len(self.bench.client) == 0:
            return
        messages = self.bench.welcome(self.bench.link.epoch + 1)
        if lose:
            messages = self.bench.welcome(self.bench.link.epoch + 1)
        self.take(messages)
        for sequence, sent in enumerate(self.sent):
            if sent and sequence not in self.told:
                last = sent == len(self.outputs[sequence])
                finish = FinishReason.LENGTH if last else FinishReason.NOT_FINISHED
                self.take(self.bench.deliver(1, 0, self.outputs[sequence][:sent], finish, sequence=sequence))

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            assert isinstance(message, SequenceFinished | GatewaySync | SubmitRequest), message
            if isinstance(message, SequenceFinished):
                assert self.told.setdefault(message.sequence, message.tokens_kept) == message.tokens_kept
                self.ended.add(message.sequence)
        for sequence in range(len(self.texts)):
            self.texts[sequence] += text_of(self.request, sequence)


letters = st.lists(st.integers(0, 2), min_size=1, max_size=12)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 3), st.integers(1, 4)),
        st.tuples(st.just("resync"), st.booleans(), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(st.lists(letters, min_size=1, max_size=4), st.integers(0, 5), steps)
def test_any_course_of_deliveries_gives_each_sequence_its_own_text(
    outputs: list[list[int]], min_tokens: int, course: list[tuple[str, Any, int]]
) -> None:
    run = Course(outputs, min_tokens)
    for kind, argument, count in course:
        if kind == "deliver":
            run.deliver(argument % len(outputs), count)
        else:
            run.resync(argument)
    for sequence in range(len(outputs)):
        while sequence not in run.ended:
            run.deliver(sequence, 1)
    assert run.request.output.done
    assert len(run.bench.client) == 0
    for sequence, output in enumerate(outputs):
        text, kept, stopped = solo(output, min_tokens)
        choice = run.request.choices[sequence]
        assert (run.texts[sequence], choice.num_tokens) == (text, kept)
        assert choice.finish_reason == ("stop" if stopped else "length")
        if sequence in run.told:
            assert run.told[sequence] == kept
            assert stopped
