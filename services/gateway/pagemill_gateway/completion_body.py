"""The body of a text completion, and what may stand for a prompt."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from pagemill_gateway.bodies import field_error, only
from pagemill_gateway.generation_body import GenerationBody
from pagemill_gateway.group_fields import MAX_CHOICES
from pagemill_shared.sampling import MAX_LOGPROBS, MAX_TOKENS

MAX_PROMPTS = 256

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Prompts = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
)
"""What a client may send; for the schema, since pydantic's own errors about it would name no place."""


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    unserved = GenerationBody.unserved | {"suffix": only("")}

    prompt: str | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True
    echo: bool = False

    @field_validator("prompt", mode="wrap", json_schema_input_type=Prompts)
    @classmethod
    def _check_prompt(cls, value: Any, _handler: Any) -> Any:
        return check_prompt(value)

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        total = len(self.prompts) * self.num_sequences
        if total > MAX_CHOICES:
            raise field_error(
                self.width_field,
                f"{len(self.prompts)} prompts with {self.num_sequences} sequences each are {total} sequences; "
                f"at most {MAX_CHOICES} are allowed in one request",
            )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def told_of_prompt(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in wanted if each is not None), default=None)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def check_prompt(value: Any) -> str | list[str] | list[list[int]]:
    """A text, a list of texts, or lists of token ids; one list of ids becomes a list with one.

    Raises:
        ValueError: says what is wrong, and where.
    """
    if isinstance(value, str):
        _check_text(value)
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if all(isinstance(item, str) for item in value):
        _check_count(value)
        for item in value:
            _check_text(item)
        return value
    if all(isinstance(item, list) for item in value):
        _check_count(value)
        for item in value:
            check_token_ids(item)
        return value
    check_token_ids(value)
    return [value]


def check_token_ids(value: list[Any]) -> None:
    """Raises ValueError unless these are token ids (whether the vocabulary has them is checked later)."""
    if not value:
        raise ValueError("a prompt must not be empty")
    types = set(map(type, value))
    if types != {int}:
        wrong = next(item for item in value if type(item) is not int)
        raise ValueError(f"token ids must be integers, not {wrong!r:.40}")
    try:
        ids = np.array(value, dtype=np.int64)
    except OverflowError:
        raise ValueError("a token id is out of range") from None
    if ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(f"token id {ids.min() if ids.min() < 0 else ids.max()} is out of range")


def _check_text(text: str) -> None:
    if not text:
        raise ValueError("a prompt must not be empty")


def _check_count(prompts: list[Any]) -> None:
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed in one request")
