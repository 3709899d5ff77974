"""The body of a response (OpenAI's Responses API), and the chat that it comes down to."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pagemill_gateway.bodies import NOTHING, OFF, Accepts, RequestBody, at_most, field_error, only
from pagemill_gateway.chat_body import ChatBody
from pagemill_shared.sampling import MAX_LOGPROBS, MAX_TOKENS

LOGPROBS = "message.output_text.logprobs"


class InputText(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(BaseModel):
    """A message of the conversation; an answer's own output item is one, too."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise field_error("text.format.schema", "text.format.schema: json_schema needs a schema")
        return self


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseBody(RequestBody):
    """POST /v1/responses"""

    unserved: ClassVar[dict[str, Accepts]] = {
        "previous_response_id": NOTHING,
        "conversation": NOTHING,
        "background": OFF,
        "prompt": NOTHING,
        "tools": only([]),
        "tool_choice": only("none", "auto"),
        "truncation": only("disabled"),
        "context_management": only([]),
    }
    ignored = frozenset(
        {
            "store",
            "user",
            "reasoning",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "parallel_tool_calls",
            "max_tool_calls",
            "stream_options",
        }
    )

    input: str | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list, max_length=16)
    text: TextOptions = Field(default_factory=TextOptions)
    metadata: Annotated[dict[str, str], Field(max_length=16), at_most(16)] = Field(default_factory=dict)
    stream: bool = False

    @model_validator(mode="after")
    def _check_logprobs(self) -> ResponseBody:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise field_error("top_logprobs", f"top_logprobs needs {LOGPROBS} in include")
        return self

    def as_chat(self) -> ChatBody:
        """The chat completion with the same answer."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [{"role": m.role, "content": _text_of(m)} for m in self.input]
        fields = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": LOGPROBS in self.include,
            "top_logprobs": self.top_logprobs,
            "stream": self.stream,
            "response_format": self.response_format,
        }
        return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})

    @property
    def response_format(self) -> dict[str, Any] | None:
        """``text.format`` as chats have it."""
        wanted = self.text.format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        schema = {"name": wanted.name, "schema": wanted.schema_}
        return {
            "type": "json_schema",
            "json_schema": {name: value for name, value in schema.items() if value is not None},
        }


def _text_of(message: InputMessage) -> str:
    """Parts are joined with nothing between them, as in chats."""
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)


FIELDS_OF_CHAT = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""What a field of the chat is called here."""
