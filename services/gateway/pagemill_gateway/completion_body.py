"""The body of a text completion, and what may stand for a prompt."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from pagemill_gateway.bodies import field_error, item_error, only
from pagemill_gateway.generation_body import GenerationBody
from pagemill_gateway.group_fields import MAX_CHOICES
from pagemill_shared.sampling import MAX_LOGPROBS, MAX_TOKENS

MAX_PROMPTS = 256

_TOKEN_IDS = 2**31
"""No vocabulary is larger."""
TokenId = Annotated[int, Field(ge=0, lt=_TOKEN_IDS)]
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
        PydanticCustomError, ValueError: says what is wrong, and where.
    """
    if isinstance(value, str):
        _check_text(value, ())
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if not isinstance(value[0], str | list):
        check_token_ids(value)
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed in one request")
    texts = isinstance(value[0], str)
    for index, item in enumerate(value):
        if texts and isinstance(item, str):
            _check_text(item, (index,))
        elif not texts and isinstance(item, list):
            check_token_ids(item, (index,))
        else:
            kind = "text" if texts else "list of token ids"
            raise item_error((index,), f"must be a {kind} like the first one, not {item!r:.40}")
    return value


def check_token_ids(value: list[Any], item: tuple[int, ...] = ()) -> None:
    """Raises PydanticCustomError unless these are token ids (whether the vocabulary has them is checked later).

    Args:
        item: where they stand in the field.
    """
    if not value:
        raise item_error(item, "a prompt must not be empty")
    if set(map(type, value)) != {int}:
        index = next(index for index, token in enumerate(value) if type(token) is not int)
        raise item_error((*item, index), f"token ids must be integers, not {value[index]!r:.40}")
    # Python's integers have no bounds; array operations take the usual ones in a fraction of a loop's time.
    try:
        ids = np.array(value, dtype=np.int64)
        good = (ids >= 0) & (ids < _TOKEN_IDS)
    except OverflowError:
        good = np.array([0 <= token < _TOKEN_IDS for token in value])
    if not good.all():
        index = int(np.argmin(good))
        raise item_error((*item, index), f"token id {value[index]!s:.40} is out of range")


def _check_text(text: str, item: tuple[int, ...]) -> None:
    if not text:
        raise item_error(item, "a prompt must not be empty")
