"""The OpenAPI document: complete, made of the models that validate, and true of what is answered."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pagemill_testing.gateway_server import Stage, sse_events, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.scripts import Script
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

# Loads what schemathesis would load at first use, beside servers in threads: pytest parses the modules that it imports,
# and two threads that parse at once are a SystemError in CPython 3.11 and 3.12 (gh-106905).
from schemathesis.specs.openapi.schemas import OpenApiSchema

from pagemill_gateway import answers, response_answers
from pagemill_gateway.answers import Error
from pagemill_gateway.bodies import RequestBody
from pagemill_gateway.operations import Operation
from pagemill_gateway.pages import pages
from pagemill_gateway.server import Gateway, operation_of
from pagemill_shared.messages import SubmitRequest
from pagemill_shared.settings import GatewaySettings

TOKENIZER = byte_level_bpe()
LEFT_OUT = {"/openapi.json", *(page.path for page in pages())}
"""Routes that are no part of the API."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
    ignored_auth,
]
BEYOND_SCHEMAS = (
    "has a meaning only with", "vocabulary", "context length", "only allowed when", "needs", "is greater than",
    "cannot both", "contradicts", "must be false", "differ", "at most 4096", "cannot be combined with", "guided_",
    "structured_outputs", "response_format", "unless the message has tool_calls", "must name the call",
    "only an assistant's message", "tools:", "tool_choice:",
)  # fmt: skip
"""Why a body may be refused that the schema allows: lengths, the vocabulary, fields that contradict each other."""
EVENTS = {"/v1/chat/completions": answers.ChatEvent, "/v1/completions": answers.CompletionEvent}


def answer(submit: SubmitRequest) -> Script:
    """Two tokens for each sequence, with log-probabilities where they are asked for."""
    tops = submit.sampling.logprobs or 0

    def logprobs(token: int) -> tuple[list[int], list[float]]:
        return [token, *range(10, 10 + tops)], [-0.5, *(-1.0 - i for i in range(tops))]

    scores = [-1.5] * submit.sampling.n if submit.sampling.beam_width else ()
    return Script(TOKENIZER.encode("fine").ids, logprobs=logprobs, scores=scores)


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    with stage() as running:
        running.stub.answer = answer
        yield running


@pytest.fixture(scope="module")
def document(api: Stage) -> dict[str, Any]:
    response = api.client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


class Explorer:
    """Sends what schemathesis makes of the document, and holds each answer against it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False
        if key is not None:
            self.session.headers["Authorization"] = f"Bearer {key}"
        self.schema: OpenApiSchema = schemathesis.openapi.from_dict(self.session.get(f"{url}/openapi.json").json())
        self.sent = 0
        self.answered: dict[tuple[str, int], int] = {}
        self.refused: list[str] = []
        """Why a body was refused that the schema allows."""

    def explore(self, examples: Callable[[Any], int], derandomize: bool) -> None:
        """Sends ``examples`` requests for each operation, half of them broken on purpose where that can be."""
        # Hypothesis parses lambdas to describe strategies; where a collection that runs Python code falls into that,
        # CPython 3.11 and 3.12 raise a SystemError (gh-106905).
        gc.disable()
        try:
            self._explore_all(examples, derandomize)
        finally:
            gc.enable()

    def _explore_all(self, examples: Callable[[Any], int], derandomize: bool) -> None:
        for found in self.schema.get_all_operations():
            operation = found.ok()
            modes = list(GenerationMode) if operation.method == "post" else [GenerationMode.POSITIVE]
            for mode in modes:
                self._explore(operation, mode, examples(operation) // len(modes), derandomize)

    def _explore(self, operation: Any, mode: GenerationMode, examples: int, derandomize: bool) -> None:
        @settings(
            max_examples=examples,
            derandomize=derandomize,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            response = case.call(base_url=self.url, session=self.session, timeout=60)
            self.sent += 1
            place = (operation.path, response.status_code)
            self.answered[place] = self.answered.get(place, 0) + 1
            if mode is GenerationMode.POSITIVE and response.status_code == 400:
                self.refused.append(response.json()["error"]["message"])
            case.validate_response(response, checks=CHECKS, headers=dict(self.session.headers))
            if response.headers["content-type"][0].startswith("text/event-stream"):
                check_events(operation.path, response.text)

        send()


def check_events(path: str, text: str) -> None:
    """Each event of a stream has the shape that the document tells."""
    if path == "/v1/responses":  # each event says its type in a line of its own, and none says [DONE]
        for event in sse_events(re.sub(r"^event: .*\n", "", text, flags=re.MULTILINE)):
            response_answers.ResponseEvent.model_validate_json(event)
        return
    *events, last = sse_events(text)
    for event in events:
        EVENTS[path].model_validate_json(event)
    if last != "[DONE]":
        Error.model_validate_json(last)


def test_200_requests_meet_the_document(api: Stage) -> None:
    explorer = Explorer(api.gateway.url)
    explorer.explore(lambda operation: 36 if operation.method == "post" else 3, derandomize=True)
    assert explorer.sent >= 200
    for path in EVENTS:
        assert explorer.answered[path, 200], explorer.answered
        assert explorer.answered[path, 400], explorer.answered
    assert [reason for reason in explorer.refused if not any(known in reason for known in BEYOND_SCHEMAS)] == []


def test_every_route_is_in_the_document_or_left_out_by_name(document: dict[str, Any]) -> None:
    left_out = set()
    for route in Gateway(GatewaySettings()).routes:
        operation = operation_of(route)
        if operation is None:
            left_out.add(route.path)
            continue
        assert (route.path, route.methods and route.methods - {"HEAD"}) == (operation.path, {operation.method})
        described = document["paths"][route.path.replace(":path}", "}")]
        assert described[operation.method.lower()]["operationId"] == operation.name
    assert left_out == LEFT_OUT


def subclasses(cls: type[RequestBody]) -> set[type[RequestBody]]:
    return {cls} | {found for sub in cls.__subclasses__() for found in subclasses(sub)}


def test_bodies_are_described_by_the_models_that_validate_them(document: dict[str, Any]) -> None:
    operations: list[Operation] = Gateway(GatewaySettings()).operations
    described = {body for operation in operations for body in operation.bodies}
    leaves = {cls for cls in subclasses(RequestBody) if not cls.__subclasses__()}
    assert described == leaves
    for cls in described:
        schema = document["components"]["schemas"][cls.__name__]
        assert set(schema["properties"]) == set(cls.model_fields) | set(cls.unserved) | cls.ignored | cls.elsewhere
        assert schema["additionalProperties"] is False


def test_names_of_operations_are_unique() -> None:
    names = [operation.name for operation in Gateway(GatewaySettings()).operations]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("with_key", [False, True])
def test_keys_are_told_of_where_they_are_wanted(with_key: bool) -> None:
    with stage(**({"api_key": "s3cret"} if with_key else {})) as running:
        assert running.client.get("/openapi.json").status_code == (401 if with_key else 200)
        response = running.client.get("/openapi.json", headers={"Authorization": "Bearer s3cret"})
        found = response.json()
        assert "s3cret" not in response.text
        assert ("securitySchemes" in found["components"]) == with_key
        for path, item in found["paths"].items():
            for method, operation in item.items():
                answered = running.client.request(method, path.replace("{model}", "x"), json={})
                guarded = answered.status_code == 401
                assert operation.get("security", []) == ([{"key": []}] if guarded else []), path
                assert ("401" in operation["responses"]) == guarded


def test_a_server_with_a_key_meets_the_document() -> None:
    with stage(api_key="s3cret") as running:
        running.stub.answer = answer
        explorer = Explorer(running.gateway.url, "s3cret")
        explorer.explore(lambda operation: 4, derandomize=True)
        assert explorer.answered["/v1/models", 200]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_2000_random_requests_meet_the_document(api: Stage) -> None:
    explorer = Explorer(api.gateway.url)
    explorer.explore(lambda operation: 360 if operation.method == "post" else 20, derandomize=False)
    assert explorer.sent >= 2000, explorer.answered
