"""What /v1/responses answers, as models; see ``answers``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pagemill_gateway.answers import Answer, ChatTokenLogprob, PromptTokensDetails

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ResponseError(Answer):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class TextFormatAnswer(Answer):
    format: dict[str, Any]


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: TextFormatAnswer
    tool_choice: Literal["none"]
    tools: list[None]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(Answer):
    """The data of one event of a stream; which fields it has depends on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: Response | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatTokenLogprob] | None = Field(None, description="With `include`.")
