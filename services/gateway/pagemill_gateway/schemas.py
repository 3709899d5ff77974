"""Request bodies. Names and meanings are OpenAI's, and vLLM's for what OpenAI does not have.

A field that is known to either but not served here is listed in ``unserved`` with the values that ask for nothing
(``n: 1``); any other value is refused by name. ``ignored`` fields change nothing about the answer. Everything else that
is not declared is an error. docs/api.md holds the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pagemill_gateway.chat_template import RESERVED_KWARGS
from pagemill_shared.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, MAX_TOKENS

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_PROMPTS = 256
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Accepts = Callable[[Any], bool]


def _only(*values: object) -> Accepts:
    """Exactly these values; ``1`` is not ``True``."""
    return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values)


def _field_error(param: str, message: str) -> PydanticCustomError:
    """An error about several fields that names one of them."""
    return PydanticCustomError("field", "{reason}", {"param": param, "reason": message})


_NOTHING = _only()
_OFF = _only(False)


class RequestBody(BaseModel):
    """Base of all bodies: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    unserved: ClassVar[dict[str, Accepts]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: bool | None = None


class GenerationBody(RequestBody):
    """What chat and text completions share."""

    unserved = {
        "n": _only(1),
        "best_of": _only(1),
        "use_beam_search": _OFF,
        "beam_width": _only(1),
        "length_penalty": _only(1, 1.0),
        "early_stopping": _OFF,
        "prompt_logprobs": _NOTHING,
        "truncate_prompt_tokens": _NOTHING,
        "truncation_side": _NOTHING,
        "structured_outputs": _NOTHING,
        "guided_json": _NOTHING,
        "guided_regex": _NOTHING,
        "guided_choice": _only([]),
        "guided_grammar": _NOTHING,
        "guided_decoding_backend": _NOTHING,
        "guided_whitespace_pattern": _NOTHING,
        "structural_tag": _NOTHING,
        "response_format": _only({"type": "text"}),
        "allowed_token_ids": _NOTHING,
        "bad_words": _only([]),
        "logits_processors": _only([]),
        "return_tokens_as_token_ids": _OFF,
        "vllm_xargs": _only({}),
        "kv_transfer_params": _NOTHING,
        "repetition_detection": _NOTHING,
        "thinking_token_budget": _NOTHING,
        "logprob_token_ids": _NOTHING,
        "prompt_embeds": _NOTHING,
        "lora_request": _NOTHING,
    }
    ignored = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "spaces_between_special_tokens",
        }
    )

    stream: bool = False
    stream_options: StreamOptions | None = None

    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=1e-4, le=1e4)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)

    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    request_id: str | None = Field(None, min_length=1, max_length=256)

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError("must be a string or a list of strings")
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise ValueError(f"a stop string may have at most {MAX_STOP_LENGTH} characters")
        return stops

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise _field_error("stream_options", "stream_options is only allowed when stream is true")
        limit = self.output_limit
        if limit is not None and self.min_tokens > limit:
            raise _field_error("min_tokens", f"min_tokens {self.min_tokens} is greater than max_tokens {limit}")
        return self

    @property
    def output_limit(self) -> int | None:
        """Most tokens that the request wants, None for as many as fit."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["text"]
    text: str


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(BaseModel):
    """One message. Text parts are joined with nothing between them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Role
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    tool_calls: list[Any] | None = Field(None, max_length=0)

    @field_validator("content", mode="before")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ValueError(f"part {index} is of type {kind!r}, but only text parts are supported")
            if not isinstance(part.get("text"), str):
                raise ValueError(f"part {index} has no text")
        return value

    def as_template_message(self) -> dict[str, str]:
        """What the chat template sees: developer counts as system, parts are one text, absent fields are absent."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


class ConversationFields(BaseModel):
    """How messages become a prompt; shared by chat completions and tokenize."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(RESERVED_KWARGS & value.keys())
        if taken:
            raise ValueError(f"{taken[0]} cannot be set here")
        return value

    @model_validator(mode="after")
    def _check_continuation(self) -> ConversationFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise _field_error(
                "continue_final_message", "continue_final_message and add_generation_prompt cannot both be true"
            )
        return self

    @property
    def generation_prompt(self) -> bool:
        """Whether the template opens the assistant's turn: yes by default, not when its last message is continued."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatBody(ConversationFields, GenerationBody):
    """POST /v1/chat/completions"""

    unserved = GenerationBody.unserved | {
        "tools": _only([]),
        "tool_choice": _only("none", "auto"),
        "functions": _only([]),
        "function_call": _only("none", "auto"),
        "modalities": _only(["text"]),
        "audio": _NOTHING,
        "prediction": _NOTHING,
        "web_search_options": _NOTHING,
        "echo": _OFF,
        "documents": _only([]),
        "chat_template": _NOTHING,
        "mm_processor_kwargs": _only({}),
        "media_io_kwargs": _only({}),
    }
    ignored = GenerationBody.ignored | {
        "parallel_tool_calls",
        "reasoning_effort",
        "include_reasoning",
        "verbosity",
        "moderation",
    }

    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise _field_error("top_logprobs", "top_logprobs needs logprobs to be true")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    unserved = GenerationBody.unserved | {"echo": _OFF, "suffix": _only("")}

    prompt: str | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _check_prompt(cls, value: Any, _handler: Any) -> Any:
        return check_prompt(value)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

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


class TokenizeTextBody(RequestBody):
    """POST /tokenize with a prompt"""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ConversationFields, RequestBody):
    """POST /tokenize with messages"""

    unserved = {"tools": _only([]), "chat_template": _NOTHING, "mm_processor_kwargs": _only({})}

    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    """POST /detokenize"""

    tokens: list[int]

    @field_validator("tokens", mode="wrap")
    @classmethod
    def _check_tokens(cls, value: Any, _handler: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("must be a list of token ids")
        if value:
            check_token_ids(value)
        return value
