"""Every operation of the API: what it takes and what it answers. Routes and OpenAPI document follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from pagemill_gateway import answers, response_answers
from pagemill_gateway.bodies import RequestBody
from pagemill_gateway.chat_body import ChatBody
from pagemill_gateway.completion_body import CompletionBody
from pagemill_gateway.embedding_body import EmbeddingBody
from pagemill_gateway.response_body import ResponseBody
from pagemill_gateway.token_bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        path: as the router takes it.
        name: of this operation in generated clients.
        answer: the JSON that comes with status 200; None for plain text.
        bodies: what the request's body may be, one of them.
        event: the data of a stream's events, where it can stream.
        says_done: whether ``[DONE]`` ends a stream.
        keyless: whether it is served without an API key.
        errors: statuses of errors besides 401.
    """

    method: Literal["GET", "POST"]
    path: str
    name: str
    tag: str
    summary: str
    answer: type[BaseModel] | None
    bodies: tuple[type[RequestBody], ...] = ()
    event: type[BaseModel] | None = None
    says_done: bool = True
    keyless: bool = False
    errors: tuple[int, ...] = (503,)


_GENERATION_ERRORS = (400, 404, 413, 415, 429, 500, 503, 504)

CHAT = Operation(
    "POST",
    "/v1/chat/completions",
    "createChatCompletion",
    "Text",
    "An answer to a conversation, whole or streamed",
    answers.ChatCompletion,
    bodies=(ChatBody,),
    event=answers.ChatEvent,
    errors=_GENERATION_ERRORS,
)
COMPLETION = Operation(
    "POST",
    "/v1/completions",
    "createCompletion",
    "Text",
    "The continuation of one or several prompts, whole or streamed",
    answers.Completion,
    bodies=(CompletionBody,),
    event=answers.CompletionEvent,
    errors=_GENERATION_ERRORS,
)
RESPONSE = Operation(
    "POST",
    "/v1/responses",
    "createResponse",
    "Text",
    "An answer to a conversation in the shape of OpenAI's Responses API, whole or streamed; nothing is stored",
    response_answers.Response,
    bodies=(ResponseBody,),
    event=response_answers.ResponseEvent,
    says_done=False,
    errors=_GENERATION_ERRORS,
)
EMBEDDINGS = Operation(
    "POST",
    "/v1/embeddings",
    "createEmbedding",
    "Text",
    "Pooled hidden states of one or several texts",
    answers.EmbeddingList,
    bodies=(EmbeddingBody,),
    errors=_GENERATION_ERRORS,
)
TOKENIZE = Operation(
    "POST",
    "/tokenize",
    "tokenize",
    "Tokens",
    "The token ids of a text or a conversation",
    answers.TokenizeAnswer,
    bodies=(TokenizeTextBody, TokenizeChatBody),
    errors=(400, 404, 413, 415, 429, 503),
)
DETOKENIZE = Operation(
    "POST",
    "/detokenize",
    "detokenize",
    "Tokens",
    "The text of token ids",
    answers.DetokenizeAnswer,
    bodies=(DetokenizeBody,),
    errors=(400, 404, 413, 415, 429, 503),
)
MODELS = Operation("GET", "/v1/models", "listModels", "Models", "The models that are served", answers.ModelList)
MODEL = Operation(
    "GET", "/v1/models/{model:path}", "getModel", "Models", "One of the models", answers.Model, errors=(404, 503)
)
STATE = Operation(
    "GET",
    "/v1/pagemill/state",
    "getState",
    "Server",
    "Workers, block pools, requests, and why the others wait",
    answers.SchedulerState,
)
METRICS = Operation("GET", "/metrics", "getMetrics", "Server", "Prometheus' text format", None)
VERSION = Operation("GET", "/version", "getVersion", "Server", "The server's version", answers.Version, errors=())
HEALTH = Operation(
    "GET", "/health", "getHealth", "Server", "200 while requests make progress", answers.Health, keyless=True
)
READY = Operation(
    "GET", "/ready", "getReadiness", "Server", "200 while new requests are welcome", answers.Health, keyless=True
)
