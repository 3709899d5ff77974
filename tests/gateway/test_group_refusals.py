"""What cannot be asked of several sequences per prompt: refused by field, with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.group_answers import (
    BOTH,
    CHAT,
    TEXT,
    refusal,
    whole,
)
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.prepared_models import word_pieces

from pagemill_shared.sampling import MAX_SEQUENCES


@BOTH
@pytest.mark.parametrize(
    ("fields", "param", "numbers"),
    [
        ({"n": 0}, "n", ["0"]),
        ({"n": MAX_SEQUENCES + 1}, "n", [str(MAX_SEQUENCES), str(MAX_SEQUENCES + 1)]),
        ({"n": "2"}, "n", ["2"]),
        ({"n": True}, "n", []),
        ({"n": 1.5}, "n", ["1.5"]),
        ({"best_of": 0}, "best_of", ["0"]),
        ({"best_of": MAX_SEQUENCES + 1}, "best_of", [str(MAX_SEQUENCES)]),
        ({"n": 3, "best_of": 2}, "best_of", ["3", "2"]),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", ["2", "3"]),
        ({"beam_width": 4}, "beam_width", ["4"]),
        ({"length_penalty": 0.5}, "length_penalty", ["0.5"]),
        ({"length_penalty": 0}, "length_penalty", ["0"]),
        ({"early_stopping": True}, "early_stopping", []),
        ({"early_stopping": "never"}, "early_stopping", []),
        ({"use_beam_search": "yes"}, "use_beam_search", []),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping", ["true, false or \"never\""]),
        ({"use_beam_search": True, "early_stopping": 1}, "early_stopping", ["true, false or \"never\""]),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width", ["0"]),
        ({"use_beam_search": True, "beam_width": MAX_SEQUENCES + 1}, "beam_width", [str(MAX_SEQUENCES)]),
        ({"use_beam_search": True, "beam_width": 3, "best_of": 4}, "beam_width", ["3", "4"]),
        ({"use_beam_search": True, "beam_width": 2, "n": 3}, "n", ["2", "3"]),
        ({"use_beam_search": True, "best_of": 2, "n": 3}, "best_of", ["2", "3"]),
        ({"use_beam_search": True, "length_penalty": 100}, "length_penalty", ["100"]),
        ({"use_beam_search": True, "length_penalty": "x"}, "length_penalty", []),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", ["0.5"]),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p", ["0.9"]),
        ({"use_beam_search": True, "top_k": 5}, "top_k", ["5"]),
        ({"use_beam_search": True, "min_p": 0.5}, "min_p", ["0.5"]),
        ({"priority": 2**31}, "priority", [str(2**31 - 1)]),
        ({"priority": 0.5}, "priority", ["0.5"]),
        ({"cache_salt": ""}, "cache_salt", []),
        ({"cache_salt": 5}, "cache_salt", ["5"]),
        ({"cache_salt": "x" * 257}, "cache_salt", ["256"]),
    ],
)  # fmt: skip
def test_groups_that_are_refused(api: Stage, path: str, fields: dict[str, Any], param: str, numbers: list[str]) -> None:
    error = refusal(api, path, **fields)
    assert error["param"] == param
    assert error["code"] == "invalid_value"
    assert param in error["message"]
    assert all(number in error["message"] for number in numbers), error["message"]


@BOTH
def test_what_asks_for_one_sample_is_accepted(api: Stage, path: str) -> None:
    api.stub.replay(ids("one"))
    neutral = {"best_of": 1, "beam_width": 1, "length_penalty": 1.0, "early_stopping": False, "use_beam_search": False}
    assert len(whole(api, path, n=1, **neutral)["choices"]) == 1


def test_more_choices_than_one_request_may_have(api: Stage) -> None:
    error = refusal(api, TEXT, prompt=["x"] * 64, n=65)
    assert error["param"] == "n"
    assert all(number in error["message"] for number in ("64", "65", "4160", "4096"))
    error = refusal(api, TEXT, prompt=["x"] * 64, best_of=65)
    assert error["param"] == "best_of"


def test_more_beams_than_the_vocabulary_has_tokens() -> None:
    with stage({"tokenizer": word_pieces(), "bos_token": None, "eos_token_ids": []}) as api:
        error = refusal(api, TEXT, prompt=[1, 2], use_beam_search=True, beam_width=11)
        assert error["param"] == "beam_width"
        assert "11" in error["message"]
        assert "10" in error["message"]


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reported", "param"),
    [
        ({"n": 4}, "n", "n"),
        ({"n": 4, "best_of": 4}, "n", "best_of"),
        ({"use_beam_search": True, "best_of": 4}, "beam_width", "best_of"),
        ({"use_beam_search": True, "beam_width": 4}, "beam_width", "beam_width"),
        ({"use_beam_search": True, "n": 4}, "beam_width", "n"),
    ],
)
@pytest.mark.usefixtures("late_head")
def test_a_group_that_the_workers_can_never_run(
    api: Stage, path: str, stream: bool, fields: dict[str, Any], reported: str, param: str
) -> None:
    message = "4 sequences at once were asked for, but a worker runs at most 2"
    api.stub.replay([], failure=("too_many_sequences", message, reported))
    error = refusal(api, path, stream=stream, **fields)
    assert (error["code"], error["param"], error["message"]) == ("too_many_sequences", param, f"{param}: {message}")


@pytest.mark.parametrize(
    ("fields", "reported", "param"),
    [
        ({}, "prompt", "messages"),
        ({}, "max_tokens", "messages"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens"),
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
    ],
)
def test_a_refusal_in_the_names_of_a_chat(api: Stage, fields: dict[str, Any], reported: str, param: str) -> None:
    api.stub.replay([], failure=("context_length_exceeded", "too long: 5 of 4", reported))
    assert refusal(api, CHAT, **fields)["param"] == param
