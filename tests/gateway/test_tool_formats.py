"""Formats of function calls: which one a template speaks, and that each reads whatever its own grammar lets through."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from pagemill_testing.prepared_models import byte_level_bpe
from tokenizers import AddedToken, Tokenizer

from pagemill_gateway.tool_calls import Arguments, CallBegins, Content
from pagemill_gateway.tool_fields import Tool
from pagemill_gateway.tool_formats import FORMATS, FormatName, format_of_template

END = 2
MARKERS = ["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<|python_tag|>"]
NOTHING = {"type": "object", "maxProperties": 0}
TOOLS = [
    Tool.model_validate(
        {
            "type": "function",
            "function": {
                "name": "find.it-2_x",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "maxLength": 6},
                        "many": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                        "one": {"enum": [None, "a\"}]{[<\\", 7]},
                    },
                    "required": ["text", "many", "one"],
                    "additionalProperties": False,
                },
            },
        }
    ),
    Tool.model_validate({"type": "function", "function": {"name": "now", "parameters": NOTHING}}),
]  # fmt: skip
NAMES = frozenset(tool.function.name for tool in TOOLS)


def tokenizer(markers: bool) -> Tokenizer:
    made = byte_level_bpe()
    if markers:
        made.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return made


def random_text(grammar: str, made: Tokenizer, seed: int) -> str:
    """A text that the grammar lets through, drawn token by token."""
    matcher = LLMatcher(LLTokenizer(made.to_str(), eos_token=[END]), grammar, log_level=0)
    assert not matcher.get_error()
    draw, ids = random.Random(seed), []
    while True:
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return str(made.decode(ids, skip_special_tokens=False))
        token = draw.choice([i for i in allowed.tolist() if i != END])
        assert matcher.consume_token(token)
        ids.append(token)
        assert len(ids) < 2000


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("markers", [False, True], ids=["as text", "as control tokens"])
@pytest.mark.parametrize("most", [1, 3])
def test_what_is_enforced_is_read(name: FormatName, markers: bool, most: int) -> None:
    form, made = FORMATS[name], tokenizer(markers)
    grammar = form.grammar(TOOLS, most, lambda marker: made.token_to_id(marker) if markers else None)
    seen = set()
    for seed in range(12):
        text = random_text(grammar, made, seed)
        parser = form.parser(NAMES, most)
        calls: list[list[str]] = []
        for event in [e for character in text for e in parser.push(character)] + parser.finish():
            match event:
                case CallBegins(name=called):
                    calls.append([called, ""])
                case Arguments(text=piece):
                    calls[-1][1] += piece
                case Content():
                    raise AssertionError(f"{event} in {text!r}")
        assert 1 <= len(calls) <= most
        for called, arguments in calls:
            keys = set(json.loads(arguments))
            assert keys == ({"text", "many", "one"} if called == "find.it-2_x" else set())
        seen |= {called for called, _ in calls}
    assert seen == NAMES


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_instead_of_calls(name: FormatName) -> None:
    form, made = FORMATS[name], tokenizer(False)
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    grammar = form.grammar(TOOLS, 2, lambda _marker: None, schema)
    kinds = set()
    for seed in range(12):
        parser = form.parser(NAMES, 2)
        text = random_text(grammar, made, seed)
        events = [*parser.push(text), *parser.finish()]
        kinds.add(type(events[0]))
        if isinstance(events[0], Content):
            assert events == [Content(text)]
            assert set(json.loads(text)) == {"ok"}
    assert kinds == {Content, CallBegins}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_for_a_prompt_is_read(name: FormatName) -> None:
    form = FORMATS[name]
    parser = form.parser(NAMES, 2)
    events = [*parser.push(form.written([("now", {}), ("find.it-2_x", {"text": "é"})])), *parser.finish()]
    assert events == [
        CallBegins(0, "now"),
        Arguments("{}"),
        CallBegins(1, "find.it-2_x"),
        Arguments('{"text": "é"}'),
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("most", [1, 2])
def test_a_call_is_cut_wherever_its_arguments_are_not_whole(name: FormatName, most: int) -> None:
    form = FORMATS[name]
    text = form.written([("now", {}), ("find.it-2_x", {"text": 'a"}{', "many": [{"b": [1, 2]}], "one": None})])
    if name == "mistral":
        text += '[TOOL_CALLS]now[ARGS]{"a": {}}'
    cut = set()
    for length in range(len(text) + 1):
        parser = form.parser(NAMES, most)
        told: list[str] = []
        for event in [*parser.push(text[:length]), *parser.finish()]:
            if isinstance(event, CallBegins):
                told.append("")
            elif isinstance(event, Arguments):
                told[-1] += event.text
        assert parser.cut == (bool(told) and not is_json(told[-1])), text[:length]
        cut.add((len(told), parser.cut))
    assert cut == {(0, False), *((count, is_cut) for count in range(1, most + 1) for is_cut in (False, True))}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tools>{{ tools }}</tools> use <tool_call> tags{% endif %}", "hermes"),
        ("<|start_header_id|>{{ m.role }}<|end_header_id|> {% if tools %}answer with name and parameters", "llama3"),
        ("<|start_header_id|>{{ m.role }}<|end_header_id|>", "hermes"),
        ("{% if ipython %}<|python_tag|>{% endif %}", "llama3"),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][INST]x[/INST][TOOL_CALLS]{{ c }}", "mistral"),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "hermes"),
    ],
)
def test_the_format_of_a_template(template: str, name: str) -> None:
    assert format_of_template(template) == name
