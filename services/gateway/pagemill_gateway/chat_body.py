"""The body of a chat completion, and how its messages become a prompt."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from pagemill_gateway.bodies import NOTHING, OFF, field_error, item_error, only
from pagemill_gateway.chat_template import RESERVED_KWARGS
from pagemill_gateway.generation_body import GenerationBody
from pagemill_gateway.tool_fields import EarlierCall, ToolFields
from pagemill_shared.sampling import MAX_LOGPROBS, MAX_TOKENS

MAX_EARLIER_CALLS = 128
"""Most calls in one message of an earlier turn."""


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["text"]
    text: str


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(BaseModel):
    """One message. Text parts are joined with nothing between them."""

    # The document calls content required, as it is but beside tool_calls.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, json_schema_extra={"required": ["role", "content"]}
    )

    role: Role
    tool_calls: list[EarlierCall] | None = Field(None, max_length=MAX_EARLIER_CALLS)
    content: str | list[TextPart] | None = Field(
        None, validate_default=True, description="May be null or left out beside `tool_calls` alone."
    )
    name: str | None = None
    tool_call_id: str | None = Field(None, validate_default=True, description="Required of the role `tool`.")
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    parsed: Any = Field(None, description="Ignored: OpenAI's client adds what it has made of an answer.")

    @field_validator("tool_calls")
    @classmethod
    def _check_calls(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only an assistant's message can have them")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _check_call_id(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") == "tool":
            raise ValueError("a tool's message must name the call that it answers")
        return value

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart])
    @classmethod
    def _check_content(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise ValueError("must be a string or a list of text parts, unless the message has tool_calls")
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        for index, part in enumerate(value):
            if not isinstance(part, dict):
                raise item_error((index,), f"must be a part with a type, not {part!r:.40}")
            kind = part.get("type")
            if kind != "text":
                raise item_error((index, "type"), f"only text parts are supported, not {kind!r:.64}")
            if not isinstance(part.get("text"), str):
                raise item_error((index, "text"), "must be a string")
        return value

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    def as_template_message(self) -> dict[str, Any]:
        """What the chat template sees: developer counts as system, parts are one text, absent fields are absent."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_call() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


MAX_TEMPLATE = 65_536
"""Most characters of a chat template that a request brings."""


class ConversationFields(ToolFields):
    """How messages become a prompt; shared by chat completions and tokenize."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = Field(None, min_length=1, max_length=MAX_TEMPLATE)
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"propertyNames": {"not": {"enum": [*sorted(RESERVED_KWARGS)]}}}
    )

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
            raise field_error(
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
        "functions": only([]),
        "function_call": only("none", "auto"),
        "modalities": only(["text"]),
        "audio": NOTHING,
        "prediction": NOTHING,
        "web_search_options": NOTHING,
        "echo": OFF,
        "documents": only([]),
        "mm_processor_kwargs": only({}),
        "media_io_kwargs": only({}),
    }
    ignored = GenerationBody.ignored | {
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
            raise field_error("top_logprobs", "top_logprobs needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _check_enforced(self) -> ChatBody:
        """Calls that must come leave no room for another answer. (A ``response_format`` is for answers without.)"""
        asked = self.constraint
        if self.enforced_tools and asked is not None and not asked.field.startswith("response_format"):
            name = asked.field.partition(".")[0]
            raise field_error(name, f"{name} cannot be combined with tool_choice, which has calls enforced")
        return self

    @property
    def constraint_field(self) -> str:
        return "tools" if self.enforced_tools else super().constraint_field

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None
