"""POST /v1/responses: OpenAI's Responses API over the same generation as chats. Nothing is stored."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from pagemill_gateway.chat import chat_generation
from pagemill_gateway.choice import Choice
from pagemill_gateway.engine import Engine, Generation
from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import Exchange
from pagemill_gateway.logprobs import chat_entries
from pagemill_gateway.response_body import FIELDS_OF_CHAT, ResponseBody
from pagemill_gateway.streaming import EventWriter, send_stream, send_whole
from pagemill_gateway.tokenizer import TextTokenizer


async def responses(engine: Engine, exchange: Exchange, raw: bytes) -> None:
    arrived = time.monotonic()
    body = await engine.parse(ResponseBody, raw)
    chat = body.as_chat()
    try:
        generation = await chat_generation(engine, chat, None, exchange.request_id, arrived)
        answer = ResponseObject(engine, body, generation)
        if body.stream:
            await send_stream(exchange, generation, ResponseEvents(engine.tokenizer, answer))
        else:
            await send_whole(
                engine,
                exchange,
                generation,
                lambda: generation.answer_size(chat.num_logprobs),
                lambda: answer.whole(engine.tokenizer, generation),
            )
    except ApiError as error:
        raise _renamed(error) from None


def _renamed(error: ApiError) -> ApiError:
    """The error of the chat, in the names of this body."""
    name = FIELDS_OF_CHAT.get(error.param or "", error.param)
    message = error.message
    if error.param and message.startswith(f"{error.param}:"):
        message = f"{name}{message.removeprefix(error.param)}"
    return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)


class ResponseObject:
    """The response as a JSON object, in the states that it goes through."""

    def __init__(self, engine: Engine, body: ResponseBody, generation: Generation) -> None:
        sampling = generation.requests[0].sampling
        wanted = body.text.format
        form = {"type": "text"} if wanted is None else wanted.model_dump(exclude_none=True, by_alias=True)
        self.message_id = f"msg_{uuid.uuid4().hex}"
        self._fields: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": engine.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": form},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def begun(self) -> dict[str, Any]:
        return self._in_state("in_progress", [])

    def failed(self, error: ApiError) -> dict[str, Any]:
        detail = {"code": "server_error", "message": error.message}
        return self._in_state("failed", []) | {"error": detail}

    def ended(self, generation: Generation, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Complete, or incomplete where the limit of tokens was met."""
        choice = generation.output.choices[0]
        item = self.message(text, logprobs, choice)
        usage = generation.usage
        answer = self._in_state(item["status"], [item])
        if item["status"] == "incomplete":
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        answer["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return answer

    def whole(self, tokenizer: TextTokenizer, generation: Generation) -> dict[str, Any]:
        text, entries = generation.output.choices[0].take()
        return self.ended(generation, text, chat_entries(tokenizer, entries))

    def message(self, text: str, logprobs: list[dict[str, Any]], choice: Choice) -> dict[str, Any]:
        """The output item with the answer's text."""
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return self._item(status, [text_part(text, logprobs)])

    def empty_message(self) -> dict[str, Any]:
        return self._item("in_progress", [])

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _in_state(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        state = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return self._fields | state


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponseEvents(EventWriter):
    """The official sequence of events; each says its type twice and its number."""

    def __init__(self, tokenizer: TextTokenizer, answer: ResponseObject) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._number = 0
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._place = {"item_id": answer.message_id, "output_index": 0, "content_index": 0}

    def opening(self, choice: Choice) -> str:
        begun = self._answer.begun()
        return (
            self._event("response.created", {"response": begun})
            + self._event("response.in_progress", {"response": begun})
            + self._event("response.output_item.added", {"output_index": 0, "item": self._answer.empty_message()})
            + self._event("response.content_part.added", self._place | {"part": text_part("", [])})
        )

    def news(self, choice: Choice) -> str:
        text, entries = choice.take()
        events = ""
        if text or entries:
            logprobs = chat_entries(self._tokenizer, entries)
            self._texts.append(text)
            self._logprobs += logprobs
            events = self._event("response.output_text.delta", self._place | {"delta": text, "logprobs": logprobs})
        return events + self._ending(choice) if choice.finish_reason is not None else events

    def _ending(self, choice: Choice) -> str:
        text = "".join(self._texts)
        item = self._answer.message(text, self._logprobs, choice)
        done = {"text": text, "logprobs": self._logprobs}
        return (
            self._event("response.output_text.done", self._place | done)
            + self._event("response.content_part.done", self._place | {"part": item["content"][0]})
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
        )

    def closing(self, generation: Generation) -> str:
        answer = self._answer.ended(generation, "".join(self._texts), self._logprobs)
        return self._event(f"response.{answer['status']}", {"response": answer})

    def failure(self, error: ApiError) -> str:
        return self._event("response.failed", {"response": self._answer.failed(error)})

    def _event(self, kind: str, data: dict[str, Any]) -> str:
        event = {"type": kind, "sequence_number": self._number} | data
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
