"""How tokens are chosen, on the whole server with the real model (cases 69, 71, 73, 80)."""

from __future__ import annotations

from typing import Any

import pytest
from pagemill_testing.live_server import COMPLETIONS, ServeCommand

pytestmark = pytest.mark.timeout(300)

AGAIN = "red green red green red green red green red green red"
FRANCE = "The capital of France is"


def choice(server: ServeCommand, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.ask(COMPLETIONS, **({"prompt": FRANCE, "max_tokens": 6} | body)).chunks[0][
        "choices"
    ][0]
    return found


def tokens(server: ServeCommand, **body: Any) -> list[int]:
    found: list[int] = choice(server, **body)["token_ids"]
    return found


def test_presence_and_frequency_count_outputs_alone_and_repetition_the_prompt_too(server: ServeCommand) -> None:
    """Case 69. Reported log-probabilities are those before penalties: what was chosen shows the difference."""
    plain = choice(server, prompt=AGAIN, max_tokens=1, logprobs=5)
    [first] = plain["token_ids"]
    assert first in plain["prompt_token_ids"]
    counted = choice(server, prompt=AGAIN, max_tokens=1, logprobs=5, presence_penalty=2, frequency_penalty=2)
    assert (counted["token_ids"], counted["logprobs"]) == ([first], plain["logprobs"])
    assert choice(server, prompt=AGAIN, max_tokens=1, repetition_penalty=3)["token_ids"] != [first]


def test_a_bias_bans_and_forces(server: ServeCommand) -> None:
    """Case 71."""
    first, *_ = tokens(server)
    assert first not in tokens(server, logit_bias={str(first): -100})
    assert tokens(server, logit_bias={"123": 100}) == [123] * 6


@pytest.mark.parametrize(
    "tiny", [{"temperature": 1e-6}, {"temperature": 1, "top_p": 1e-4}, {"temperature": 1e-30, "top_p": 1e-4}]
)
def test_tiny_temperature_or_mass_is_greedy(server: ServeCommand, tiny: dict[str, float]) -> None:
    """Case 73."""
    assert tokens(server, **tiny) == tokens(server)


def test_beams_with_a_stop_string_that_never_comes_end(server: ServeCommand) -> None:
    """Case 80."""
    found = server.ask(
        COMPLETIONS,
        prompt=FRANCE,
        use_beam_search=True,
        beam_width=2,
        n=2,
        max_tokens=10,
        stop=["###"],
        early_stopping=True,
    )
    assert all(len(each["token_ids"]) <= 10 for each in found.chunks[0]["choices"])


def test_only_allowed_tokens_and_no_bad_words(server: ServeCommand) -> None:
    plain = tokens(server)
    allowed = sorted({*plain[:3], 123, 456})
    assert set(tokens(server, allowed_token_ids=allowed, temperature=2.0, seed=4, max_tokens=30)) <= set(allowed)
    assert " Paris" in choice(server)["text"]
    found = server.ask(COMPLETIONS, prompt=FRANCE, bad_words=["Paris"], max_tokens=20, n=4, temperature=1.0, seed=9)
    assert all("Paris" not in each["text"] for each in found.chunks[0]["choices"])


def test_null_is_the_same_as_nothing_for_every_field(server: ServeCommand) -> None:
    """Case 21."""
    fields = {"prompt": FRANCE, "max_tokens": 6, "seed": 1, "return_token_ids": True}
    sampled = server.post(COMPLETIONS, **fields).json()["choices"][0]
    plain = choice(server, seed=1)
    assert sampled["token_ids"] != plain["token_ids"]
    for field in ("temperature", "top_p", "n", "stop", "logprobs", "logit_bias", "stream", "user", "echo",
                  "prompt_logprobs", "allowed_token_ids", "bad_words", "truncate_prompt_tokens"):  # fmt: skip
        assert choice(server, **({"seed": 1} | {field: None})) == (sampled if field == "temperature" else plain), field
    assert choice(server, temperature=0, seed=None) == plain
