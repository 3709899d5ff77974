"""The OpenAPI 3.1 document, made of the operations and of the models that validate their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema

from pagemill_gateway.answers import Error
from pagemill_gateway.operations import Operation

_REF = "#/components/schemas/{model}"
_CONVERTER = re.compile(r"\{(\w+)(?::\w+)?\}")
_STATUS_TEXT = {
    400: "The request is malformed, or asks for what is not served; `param` names the field.",
    401: "No valid API key.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests; `Retry-After` says when to try again.",
    500: "The server's fault.",
    503: "Nothing can be served now; `Retry-After` says when to try again.",
    504: "The request took longer than it may.",
}

References = Mapping[Any, Any]
"""The reference to a model's schema, by model."""


class _Schemas(GenerateJsonSchema):
    """Without a title for each field, which would say its name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document(operations: Sequence[Operation], version: str, with_key: bool) -> dict[str, Any]:
    """The document of these operations.

    Args:
        version: of the server.
        with_key: whether the server wants an API key.
    """
    models: dict[type[BaseModel], JsonSchemaMode] = {
        model: "validation" for operation in operations for model in _models(operation)
    }
    names, definitions = models_json_schema([*models.items()], ref_template=_REF, schema_generator=_Schemas)
    references: References = {model: schema for (model, _), schema in names.items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _CONVERTER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, references, with_key)
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {}), "headers": {"X-Request-Id": _REQUEST_ID}}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pagemill",
            "version": version,
            "description": "OpenAI's API, with vLLM's names for what OpenAI does not have. docs/api.md tells the rest.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in operations)],
        "paths": paths,
        "components": components,
    }


_REQUEST_ID = {
    "description": "The request's own `X-Request-Id`, or a new one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 256},
}


def _models(operation: Operation) -> Iterable[type[BaseModel]]:
    yield Error
    yield from operation.bodies
    yield from (model for model in (operation.answer, operation.event) if model is not None)


def _operation(operation: Operation, references: References, with_key: bool) -> dict[str, Any]:
    guarded = with_key and not operation.keyless
    item: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {"200": _success(operation, references)}
        | {
            str(status): _response(_STATUS_TEXT[status], {"application/json": {"schema": references[Error]}})
            for status in sorted({*operation.errors, *([401] if guarded else [])})
        },
    }
    if with_key:
        item["security"] = [{"key": []}] if guarded else []
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _CONVERTER.findall(operation.path)
    ]
    if parameters:
        item["parameters"] = parameters
    if operation.bodies:
        item["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _one_of([references[body] for body in operation.bodies])}},
        }
    return item


def _success(operation: Operation, references: References) -> dict[str, Any]:
    if operation.answer is None:
        return _response(operation.summary, {"text/plain": {"schema": {"type": "string"}}})
    content = {"application/json": {"schema": references[operation.answer]}}
    if operation.event is not None:
        content["text/event-stream"] = {
            "schema": _event(references[operation.event], references[Error], operation.says_done)
        }
    return _response(operation.summary, content)


def _event(data: Any, error: Any, says_done: bool) -> dict[str, Any]:
    """A server-sent event. OpenAPI 3.1 has no words for a stream of them; 3.2 describes one event so."""
    piece = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [data, error]}}
    last = " The last one of any other is `[DONE]`." if says_done else ""
    return {
        "type": "object",
        "description": f"Each of the stream's events. The last one of a stream that failed is an error.{last}",
        "required": ["data"],
        "properties": {"data": {"anyOf": [piece, {"const": "[DONE]"}]} if says_done else piece},
    }


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    header = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    return {"description": description, "headers": header, "content": content}


def _one_of(schemas: Sequence[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
