"""What the answers hold, as models: for the OpenAPI document, and for tests that hold every answer against them.

The answers themselves are put together by hand where they are made, since a model would cost each streamed token more
than all the rest of its way. So nothing here runs while a request is served.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "service_unavailable_error",
    "server_error",
]


class Answer(BaseModel):
    """Base of all answers: nothing may be in one that its model does not name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ErrorDetail(Answer):
    message: str
    type: ErrorType
    param: str | None = Field(description="The request's field that is at fault.")
    code: str | None = Field(description="What happened, for programs.")


class Error(Answer):
    """Every error has this shape, also the one that ends a stream."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int = Field(ge=0, description="Prompt tokens that the prefix cache held.")


class Usage(Answer):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChoiceEnd(Answer):
    """How a choice ended; shared by all shapes of a choice."""

    stop_reason: str | int | None = Field(description="The stop string or stop token that ended it.")
    score: float | None = Field(None, description="What the choice was ranked by; only where choices are ranked.")


class PromptToken(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each prompt token but the first: by token id, itself and the most likely ones."""


# ---------------------------------------------------------------- completions


class CompletionLogprobs(Answer):
    """Parallel lists, one item per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ChoiceEnd):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With `prompt_logprobs`.")


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionEventChoice(Answer):
    """A piece of a choice; the last one of a choice tells its finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(None, description="Beside the finish reason.")
    score: float | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionEvent(Answer):
    """The data of one event of a stream. The last event's data is `[DONE]`, or an error."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionEventChoice]
    usage: Usage | None = Field(None, description="With `stream_options.include_usage`: in the last event.")


# ---------------------------------------------------------------- chat


class ChatToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    content: list[ChatTokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: str = Field(description="JSON text; cut where the answer is.")


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None = Field(description="null if there is nothing but calls.")
    refusal: None
    tool_calls: list[ToolCall] | None = Field(None, description="Where functions are called.")


class ChatChoice(ChoiceEnd):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With `prompt_logprobs`.")


class CalledFunctionDelta(Answer):
    name: str | None = Field(None, description="In the first piece of a call.")
    arguments: str = Field(description="The next piece.")


class ToolCallDelta(Answer):
    index: int
    id: str | None = Field(None, description="In the first piece of a call.")
    type: Literal["function"] | None = Field(None, description="In the first piece of a call.")
    function: CalledFunctionDelta


class ChatDelta(Answer):
    role: Literal["assistant"] | None = Field(None, description="In the first event of a choice.")
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatEventChoice(Answer):
    """A piece of a choice; the last one of a choice tells its finish reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = Field(None, description="Beside the finish reason.")
    score: float | None = None
    token_ids: list[int] | None = None


class ChatEvent(Answer):
    """The data of one event of a stream. The last event's data is `[DONE]`, or an error."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatEventChoice]
    usage: Usage | None = Field(None, description="With `stream_options.include_usage`: in the last event.")
    prompt_token_ids: list[int] | None = Field(None, description="In the first event of a choice.")


# ---------------------------------------------------------------- embeddings


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or little-endian float32 in base64.")


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


# ---------------------------------------------------------------- the rest


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    prompt: str


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    status: Literal["healthy", "ready"]
    model: str
    ready_workers: int


class Version(Answer):
    version: str


class SchedulerState(BaseModel):
    """What the scheduler tells of itself; docs/api.md lists the fields."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    metrics: dict[str, float]
    workers: list[dict[str, Any]]
    requests: list[dict[str, Any]]
