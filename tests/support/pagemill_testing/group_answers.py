"""Asks both endpoints for several sequences per prompt, and puts together what comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pagemill_testing.gateway_server import Stage
from pagemill_testing.prepared_models import byte_level_bpe

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZER = byte_level_bpe()
END = 2
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


def ask(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return prompt | fields


def replay(api: Stage, outputs: Sequence[Sequence[int]], **options: Any) -> None:
    """Answers each request with these outputs, one per sequence."""
    api.stub.replay([], sequences=outputs, **options)


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def whole(api: Stage, path: str, **fields: Any) -> dict[str, Any]:
    response = api.post(path, **ask(path, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(api: Stage, path: str, **fields: Any) -> tuple[dict[int, str], dict[int, dict[str, Any]], list[int]]:
    """By index the joined text and the last event's choice; and the order of indices."""
    events = api.events(path, **ask(path, **fields))
    texts: dict[int, str] = {}
    endings: dict[int, dict[str, Any]] = {}
    order = []
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in endings, "a piece after the finish reason"
            order.append(index)
            piece = choice["text"] if path == TEXT else choice["delta"].get("content", "")
            texts[index] = texts.get(index, "") + piece
            if choice["finish_reason"] is not None:
                endings[index] = choice
    assert texts.keys() == endings.keys()
    return texts, endings, order


def refusal(api: Stage, path: str, **fields: Any) -> dict[str, Any]:
    response = api.post(path, **ask(path, **fields))
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
