"""Answers that must match a grammar, over HTTP: what the worker is told, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe, sentencepiece_bpe, word_pieces
from pagemill_testing.scripts import Script

from pagemill_gateway import grammar_checker
from pagemill_gateway.grammar_checker import MAX_SOURCE
from pagemill_shared.messages import FinishReason

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOKENIZER = byte_level_bpe()


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    with stage() as running:
        running.stub.replay(TOKENIZER.encode("ok").ids, finish=FinishReason.LENGTH)
        yield running


def ask(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return prompt | fields


def grammar_of(api: Stage, path: str = TEXT, **fields: Any) -> str:
    """What the scheduler is given with a request that is accepted."""
    response = api.post(path, **ask(path, **fields))
    assert response.status_code == 200, response.text
    return api.stub.submitted[-1].sampling.grammar


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(TOKENIZER.to_str(), eos_token=[2]), grammar, log_level=0)
    assert not matcher.get_error()
    return matcher.consume_tokens(TOKENIZER.encode(text).ids) and matcher.is_accepting()


def refused(api: Stage, path: str = TEXT, **fields: Any) -> dict[str, Any]:
    before = len(api.stub.submitted)
    response = api.post(path, **ask(path, **fields))
    assert response.status_code == 400, response.text
    assert len(api.stub.submitted) == before
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@BOTH
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1, {"c": null}]}', "[1]"),
        ({"response_format": schema_format(SCHEMA)}, '{"a": 12}', '{"b": 12}'),
        ({"response_format": schema_format(SCHEMA, strict=True, description="x")}, '{"a":12}', '{"a": 1.5}'),
        ({"structured_outputs": {"json": SCHEMA}}, '{\n  "a": 12\n}', "12"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 12}', "12"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":12}', '{"a": 12}'),
        (
            {"structured_outputs": {"json": {"anyOf": [{"type": "string", "pattern": "[a--a]"}, {"const": 1}]}}},
            "1",
            '"a"',
        ),
        ({"structured_outputs": {"json": True}}, '[1, {"a": "b"}]', "x"),
        ({"structured_outputs": {"json": "true"}}, "12", "x"),
        ({"guided_json": True}, '"a"', "a"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "[a-c]{2}/\\d"}}, "ab/7", "abc/7"),
        ({"structured_outputs": {"regex": "^(yes|no)$"}}, "yes", "yesno"),
        ({"structured_outputs": {"choice": ["left", 'r"ight\n\\']}}, 'r"ight\n\\', "lef"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, "aab", "aa"),
        ({"structured_outputs": {"grammar": 'start: "a"+ WORD\nWORD: /[x-z]/'}}, "aay", "ya"),
        ({"guided_json": SCHEMA}, '{"a": 3}', "3"),
        ({"guided_regex": "a+"}, "aaa", "ab"),
        ({"guided_choice": ["one", "two"]}, "two", "three"),
        ({"guided_grammar": 'start: "x"'}, "x", "y"),
    ],
)
def test_the_worker_gets_a_grammar(api: Stage, path: str, fields: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(api, path, **fields)
    assert matches(grammar, good)
    assert not matches(grammar, bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, '"abc"', '"abcd"'),
        ({"type": "string", "maxLength": 10**18}, '"abcd"', "1"),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": {"type": "null"}, "uniqueItems": False},
         "[null, null]", "[null, null, null]"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9" + 18 * "0", "-93" + 17 * "0"),
        ({"type": "number", "minimum": 0, "maximum": 1e300}, "9.5", "-1"),
    ],
)  # fmt: skip
def test_numbers_in_a_schema_may_be_written_as_json_schema_allows(
    api: Stage, schema: dict[str, Any], good: str, bad: str
) -> None:
    grammar = grammar_of(api, response_format=schema_format(schema))
    assert matches(grammar, good)
    assert not matches(grammar, bad)


def test_blanks_between_the_parts_of_json_are_bounded(api: Stage) -> None:
    grammar = grammar_of(api, response_format={"type": "json_object"})
    assert not matches(grammar, '{"a":' + " " * 40 + "1}")
    assert not matches(grammar, '{"a":\n\n1}')


NEEDS_A = {"type": "object", "required": ["a"]}
NAMED = {"$defs": {"name": {"type": "string", "format": "nope"}}, "properties": {"a": {"$ref": "#/$defs/name"}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "cannot be enforced with not"),
        (
            {"properties": {"a": {"type": "string"}, "b": {"items": {"not": {"type": "null"}}}}},
            "properties.b.items: cannot be enforced with not",
        ),
        ({"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, "anyOf[1]: cannot be enforced with uniqueItems"),
        ({**NAMED, "type": "object"}, "$defs.name: the format 'nope' is not known"),
        ({"properties": {"properties": {"$ref": "#/x"}}}, "properties.properties: $ref points to '/x', where nothing"),
        (
            {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
            "no text matches it: required property 'a' is unsatisfiable",
        ),
        (
            {"properties": {"a": {"type": "object", "properties": {"b": {"enum": []}}, "required": ["b"]}}, **NEEDS_A},
            "no text matches it: required property 'a' is unsatisfiable",
        ),
    ],
)
def test_a_refusal_tells_where_in_the_schema_the_fault_lies(api: Stage, schema: dict[str, Any], words: str) -> None:
    response = api.post("/v1/completions", prompt="x", structured_outputs={"json": schema})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"structured_outputs.json: {words}")


def test_a_fault_in_a_large_schema_is_told_in_time(api: Stage) -> None:
    names = {f"p{i}": {"type": "string", "pattern": f"^{'ab?' * 20}{i}$"} for i in range(600)}
    schema = {"properties": {**names, "last": {"not": {}}}}
    response = api.post("/v1/completions", prompt="x", structured_outputs={"json": schema})
    assert response.status_code == 400
    assert "cannot be enforced with not" in response.json()["error"]["message"]


@BOTH
@pytest.mark.parametrize(
    "nothing",
    [{"response_format": {"type": "text"}}, {"structured_outputs": None}, {"guided_choice": None}, {}],
)
def test_what_asks_for_nothing(api: Stage, path: str, nothing: dict[str, Any]) -> None:
    assert grammar_of(api, path, **nothing) == ""


@BOTH
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "no meaning"),
        ({"response_format": schema_format({"type": "strin"})}, "response_format.json_schema.schema", "strin"),
        ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema", "not"),
        ({"response_format": schema_format({"enum": []})}, "response_format.json_schema.schema", "no text matches"),
        (
            {"response_format": schema_format({"type": "integer", "minimum": 1e30, "maximum": 1e31})},
            "response_format.json_schema.schema",
            "minimum: can be enforced from -9,223",
        ),
        (
            {"structured_outputs": {"json": {"type": "string", "minLength": 2**32}}},
            "structured_outputs.json",
            "4,294,967,295",
        ),
        ({"response_format": schema_format([1])}, "response_format.json_schema.schema", "object"),
        ({"response_format": {"type": "json_object", "extra": 1}}, "response_format.extra", "Extra"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "[a--a]"}}, "structured_outputs.regex", "no text matches"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex", "150,000 steps"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", "at most 1024"),
        ({"structured_outputs": {"grammar": "start: nope"}}, "structured_outputs.grammar", "nope"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is no JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "object"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "allows no answer"),
        ({"structured_outputs": {"json": '{"x-guidance": {}}'}}, "structured_outputs.json", "x-guidance"),
        ({"structured_outputs": {"json": '{"minimum": 1e400}'}}, "structured_outputs.json", "must be finite"),
        (
            {"response_format": schema_format({"oneOf": [{"type": "number"}, {"type": "integer"}]})},
            "response_format.json_schema.schema",
            "with anyOf it can",
        ),
        (
            {"response_format": schema_format({"items": {"x-guidance": {"lenient": True}, "not": {}}})},
            "response_format.json_schema.schema",
            "items: x-guidance is not supported",
        ),
        (
            {"response_format": schema_format({"enum": [[i] for i in range(2500)]})},
            "response_format.json_schema.schema",
            "more than 2,000 items",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "Extra"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "cannot be combined with guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "cannot be combined with response_format",
        ),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "use_beam_search", "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"structured_outputs": {"regex": "x" * (MAX_SOURCE + 1)}}, "structured_outputs.regex", str(MAX_SOURCE + 1)),
        (
            {"response_format": schema_format({"enum": ["y" * MAX_SOURCE]})},
            "response_format.json_schema.schema",
            str(MAX_SOURCE),
        ),
    ],
)
def test_refused(api: Stage, path: str, fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(api, path, **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert param.split(".")[0] in error["message"]


def test_a_grammar_that_is_too_complex_at_its_first_token(api: Stage) -> None:
    words = " ".join(f"r{i}" for i in range(1000))
    rules = "\n".join(f'r{i}: "a"? "b"? r{(i * 7 + 1) % 1000}?' for i in range(1000))
    error = refused(api, structured_outputs={"grammar": f"start: {words}\n{rules}"})
    assert "20,000 items" in error["message"]


def test_deeply_nested_schemas_are_refused_and_harm_nobody(api: Stage) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(150):
        schema = {"type": "array", "items": schema}
    assert refused(api, response_format=schema_format(schema))["param"] == "response_format.json_schema.schema"
    assert grammar_of(api) == ""


def test_an_accepted_grammar_is_compiled_once(api: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = grammar_of(api, guided_regex="only[once]")

    def never(*_: object) -> str:
        raise AssertionError("compiled again")

    monkeypatch.setattr(grammar_checker, "as_grammar", never)
    assert grammar_of(api, guided_regex="only[once]") == first


def test_a_text_of_the_greatest_length_is_not_too_complex(api: Stage) -> None:
    text = "ab" * (MAX_SOURCE // 2 - 10)
    assert grammar_of(api, guided_regex=text)
    assert grammar_of(api, structured_outputs={"json": {"const": text}})


def test_one_that_takes_too_long_is_refused_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = grammar_checker.threading.Event(), grammar_checker.threading.Event()
    real = grammar_checker.as_grammar

    def stuck(constraint: Any, text: str) -> str:
        if text.startswith("slow"):
            begun.set()
            assert gate.wait(60)
        return real(constraint, text)

    monkeypatch.setattr(grammar_checker, "as_grammar", stuck)
    monkeypatch.setattr(grammar_checker, "THREADS", 2)
    with stage() as api, ThreadPoolExecutor() as threads:
        api.stub.replay(TOKENIZER.encode("ok").ids, finish=FinishReason.LENGTH)
        slow = threads.submit(api.post, TEXT, **ask(TEXT, guided_regex="slow1"))
        assert begun.wait(60)
        assert grammar_of(api) == "", "one without a grammar"
        assert grammar_of(api, guided_regex="quick") != "", "and one with"
        monkeypatch.setattr(grammar_checker, "MAX_CHECK_S", 2.0)
        error = refused(api, guided_regex="slow2")
        assert error["param"] == "guided_regex"
        assert "was not compiled within 2 s" in error["message"]
        busy = api.post(TEXT, **ask(TEXT, guided_regex="quick, but both threads are taken"))
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "grammar_checker_busy")
        gate.set()
        assert slow.result().status_code == 200


def test_many_that_explode_at_once_are_refused_each_by_name_and_one_check_serves_all_that_are_equal(
    api: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, compiled = grammar_checker.as_grammar, []

    def counting(constraint: Any, text: str) -> str:
        compiled.append(text)
        return real(constraint, text)

    monkeypatch.setattr(grammar_checker, "as_grammar", counting)
    regexes = ["(b{1000}){1000}", "c{1000000}"] * 4
    with ThreadPoolExecutor(9) as threads:
        asked = [threads.submit(api.post, TEXT, **ask(TEXT, guided_regex=regex)) for regex in regexes]
        assert grammar_of(api) == "", "one without a grammar"
        answers = [future.result() for future in asked]
    assert {answer.status_code for answer in answers} == {400}
    errors = [answer.json()["error"] for answer in answers]
    assert {error["param"] for error in errors} == {"guided_regex"}
    assert all("150,000 steps" in error["message"] for error in errors)
    assert sorted(compiled) == sorted(set(regexes))
    assert refused(api, guided_regex=regexes[0])["message"] == errors[0]["message"]
    assert len(compiled) == 2, "what was refused is remembered"


@pytest.mark.parametrize(
    ("model", "status"),
    [
        ({"tokenizer": sentencepiece_bpe(), "bos_token": "<s>"}, 200),
        ({"tokenizer": word_pieces(), "bos_token": None, "template": None}, 400),
        ({"eos_token_ids": []}, 400),
    ],
    ids=["sentencepiece", "word pieces", "no end token"],
)
def test_other_tokenizers(model: dict[str, Any], status: int) -> None:
    with stage(model) as api:
        api.stub.replay([5], finish=FinishReason.LENGTH)
        answer = api.post(TEXT, **ask(TEXT, prompt="the fox", guided_choice=["the", "fox"]))
        assert answer.status_code == status, answer.text
        if status == 400:
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("guided_choice", "unsupported_parameter")


@pytest.mark.parametrize(
    ("code", "status"), [("grammar_failed", 400), ("grammar_timeout", 503)], ids=["failed", "timeout"]
)
def test_what_the_worker_cannot_do_names_the_field(code: str, status: int) -> None:
    with stage() as api:
        api.stub.answer = lambda submit: Script([], failure=(code, "it is too complex", "grammar"))
        answer = api.post(CHAT, **ask(CHAT, response_format=schema_format(SCHEMA)))
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
