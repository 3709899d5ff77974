"""Two tools, calls of them in Hermes' format, and what a gateway makes of answers with such calls."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from pagemill_shared.messages import FinishReason
from pagemill_testing.gateway_server import Stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids

PATH = "/v1/chat/completions"
TOKENIZER = byte_level_bpe()
HI = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
END = 2


def answer_with(api: Stage, text: str, finish: FinishReason = FinishReason.EOS) -> None:
    api.stub.replay([*ids(text), *([END] if finish is FinishReason.EOS else [])], finish=finish)


def choice_of(api: Stage, **fields: Any) -> dict[str, Any]:
    response = api.post(PATH, **{"messages": HI, "tools": [WEATHER, NOW], **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def joined(events: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of a stream, put together as clients do."""
    content, calls, reasons = "", [], []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(calls):
                    assert piece["type"] == "function"
                    calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    [reason] = reasons
    return content, calls, reason


def prompt_of(api: Stage) -> str:
    text: str = TOKENIZER.decode(api.stub.submitted[-1].prompt_token_ids.tolist(), skip_special_tokens=False)
    return text


def accepts(api: Stage, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """Whether ``text`` is an answer that the grammar of the last request allows."""
    matcher = LLMatcher(
        LLTokenizer(tokenizer.to_str(), eos_token=[END]), api.stub.submitted[-1].sampling.grammar, log_level=0
    )
    assert not matcher.get_error()
    return matcher.consume_tokens(tokenizer.encode(text).ids) and matcher.is_accepting()
