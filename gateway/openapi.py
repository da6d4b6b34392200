"""The OpenAPI 3.1 document of the gateway, made from the structs that parse and write its messages."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gateway.openai import ChatBody, TextBody
from gateway.responses import ChatChunk, ChatCompletion, ErrorBody, ModelList, TextCompletion
from schemas.errors import Code

_REF = "#/components/schemas/{name}"


class Operation(Struct, frozen=True):
    """One line of the table of endpoints.

    Attributes:
        response: what a success returns; a media type as text when it is not JSON.
        errors: codes a client should be ready for.
        streams: with "stream": true the answer is server-sent events of this type.
    """

    method: str
    path: str
    summary: str
    body: type[Struct] | None = None
    response: type[Struct] | str = "application/json"
    errors: tuple[Code, ...] = ()
    streams: type[Struct] | None = None
    parameters: tuple[tuple[str, str, str], ...] = ()  # (name, "path" | "query" | "header", description)


_GENERATE = (
    Code.invalid_request,
    Code.context_length_exceeded,
    Code.unsupported,
    Code.model_not_found,
    Code.body_too_large,
    Code.queue_full,
    Code.engine_error,
    Code.worker_lost,
    Code.broker_unavailable,
    Code.deadline_exceeded,
)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        body=ChatBody,
        response=ChatCompletion,
        errors=_GENERATE,
        streams=ChatChunk,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a text",
        body=TextBody,
        response=TextCompletion,
        errors=_GENERATE,
        streams=TextCompletion,
    ),
    Operation("get", "/v1/models", "Models served here", response=ModelList),
)


def document(version: str, operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """The document, ready for ``msgspec.json.encode``."""
    kinds: dict[type[Struct], None] = {ErrorBody: None}
    for operation in operations:
        for kind in (operation.body, operation.response, operation.streams):
            if isinstance(kind, type):
                kinds[kind] = None
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": version,
            "description": "OpenAI-compatible serving on NATS JetStream. Errors have a code and say what to do.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(operation: Operation, schema: dict[Any, Any]) -> dict[str, Any]:
    response = operation.response
    media = response if isinstance(response, str) else "application/json"
    content: dict[str, Any] = {media: {} if isinstance(response, str) else {"schema": schema[response]}}
    if operation.streams is not None:
        content["text/event-stream"] = {"schema": schema[operation.streams]}
    out: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.translate(str.maketrans("/{}.", "____")),
        "responses": {"200": {"description": "success", "content": content}, **_errors(operation.errors, schema)},
    }
    if operation.body is not None:
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema[operation.body]}}}
    if operation.parameters:
        out["parameters"] = [
            {"name": name, "in": where, "required": where == "path", "description": text, "schema": {"type": "string"}}
            for name, where, text in operation.parameters
        ]
    return out


def _errors(codes: Sequence[Code], schema: dict[Any, Any]) -> dict[str, Any]:
    by_status: dict[str, list[str]] = {}
    for code in codes:
        by_status.setdefault(str(code.status), []).append(code.value)
    return {
        status: {"description": ", ".join(names), "content": {"application/json": {"schema": schema[ErrorBody]}}}
        for status, names in sorted(by_status.items())
    }
