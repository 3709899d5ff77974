"""Tools in the words of the conversation, for chat templates that know nothing of them.

The functions are told of in the system message; calls of earlier turns stand in the assistant's text as the model would
write them, and what a function has returned is a user's message between tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pagemill_gateway.chat_template import ChatTemplate
from pagemill_gateway.tool_formats import ToolFormat

_EXAMPLE = ("NAME", {"ARGUMENT": "VALUE"})


def needs_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], template: ChatTemplate) -> bool:
    """Whether the conversation has something that ``template`` would leave out."""
    if tools and not template.knows_tools:
        return True
    return not template.knows_calls and any("tool_calls" in message for message in messages)


def with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """``messages`` of roles and contents alone, which tell the same."""
    plain = [_plain(message, form) for message in messages]
    if not tools:
        return plain
    told = _told(tools, form)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _told(tools: Sequence[dict[str, Any]], form: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. These are the functions, one JSON object each:\n"
        f"<tools>\n{functions}\n</tools>\n"
        f"To call a function, answer with:\n{form.written([_EXAMPLE])}"
    )


def _plain(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = form.written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message["content"], written)))}
