"""The gateway's OpenAPI 3.1 document, generated from the structs of its requests and responses."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, CompletionRequest
from penstock.gateway.apis.chat.tokenization import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from penstock.gateway.apis.embeddings import (
    EmbeddingRequest,
    EmbeddingResponse,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from penstock.gateway.apis.images import (
    ImageGenerationRequest,
    ImageProgressEvent,
    ImagesResponse,
    VideoGenerationRequest,
)
from penstock.gateway.apis.messages.bodies import CountTokensRequest, MessagesRequest
from penstock.gateway.apis.messages.objects import Message, MessageEvent, TokenCount
from penstock.gateway.apis.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest
from penstock.gateway.apis.ollama.render import OllamaAnswer
from penstock.gateway.apis.responses.bodies import CompactionRequest, ResponsesRequest
from penstock.gateway.apis.responses.objects import (
    CompactedResponse,
    DeletedResponse,
    InputItemList,
    InputTokens,
    Response,
    ResponseEvent,
)
from penstock.gateway.base.chat_objects import (
    CancelResponse,
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    ErrorBody,
    ModelCard,
    ModelList,
    Status,
)
from penstock.gateway.batches import batch
from penstock.gateway.http.ollama import ShownModel, ShowRequest
from penstock.gateway.http.request_list import RequestList
from penstock.gateway.http.usage import UsagePage
from penstock.gateway.service.adapters import LoadAdapter, UnloadAdapter
from penstock.gateway.service.weights import ModelWeights, PauseModel, RestModel, ResumeModel, UpdateWeights
from penstock.schemas.errors import Code

_LINES = "application/x-ndjson"
# Headings of the page of the reference, by the beginnings of paths.
_TAGS = {
    "Chat and text": ("/v1/chat", "/v1/completions"),
    "Responses": ("/v1/responses",),
    "Anthropic's Messages": ("/v1/messages",),
    "Ollama": ("/api",),
    "Embeddings, rerank and score": ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    "Images and videos": ("/v1/images", "/v1/videos", "/v1/media"),
    "Files and batches": ("/v1/files", "/v1/batches"),
    "Models and tokens": ("/v1/models", "/tokenize", "/detokenize", "/v1/load_lora", "/v1/unload_lora"),
}
_OTHERS = "Requests, usage and health"
_REF = "#/components/schemas/{name}"


class Operation(Struct, frozen=True):
    """An endpoint.

    Attributes:
        response: of a success; a media type if it is not JSON.
        errors: codes that a client should handle.
        streams: type of the server-sent events with "stream": true, or of what else ``streams_as`` names.
    """

    method: str
    path: str
    summary: str
    body: type[Struct] | None = None
    response: type[Struct] | str = "application/json"
    errors: tuple[Code, ...] = ()
    streams: type[Struct] | None = None
    streams_as: str = "text/event-stream"
    success: tuple[tuple[int, str], ...] = ((200, "success"),)  # (status, description)
    parameters: tuple[tuple[str, str, str], ...] = ()  # (name, "path" | "query" | "header", description)


_GENERATE = (
    Code.invalid_api_key,
    Code.rate_limit_exceeded,
    Code.insufficient_quota,
    Code.invalid_request,
    Code.context_length_exceeded,
    Code.unsupported,
    Code.model_not_found,
    Code.body_too_large,
    Code.unsupported_encoding,
    Code.queue_full,
    Code.overloaded,
    Code.engine_error,
    Code.worker_lost,
    Code.poisoned_request,
    Code.revision_unavailable,
    Code.broker_unavailable,
    Code.deadline_exceeded,
    Code.request_erased,  # a repeat with an Idempotency-Key
)

_DIFFUSE = tuple(code for code in _GENERATE if code is not Code.context_length_exceeded)

_COMPUTE = (
    Code.invalid_request,
    Code.context_length_exceeded,
    Code.unsupported,
    Code.model_not_found,
    Code.body_too_large,
    Code.unsupported_encoding,
)
_COUNT = tuple(code for code in _COMPUTE if code is not Code.context_length_exceeded)
_OPERATORS = (
    Code.invalid_request,
    Code.unsupported,
    Code.permission_denied,
    Code.model_not_found,
    Code.model_unavailable,
    Code.broker_unavailable,
)
_STORED = (Code.request_not_found, Code.broker_unavailable)
_UNKNOWN = (Code.previous_response_not_found, Code.request_not_found)  # a response or an item of one
_BY_ID = (Code.request_not_found, Code.invalid_request)
_BATCH = (*_BY_ID, Code.broker_unavailable)
_RESPONSE_ID = ("id", "path", "the response's id")
_FILE_ID = ("id", "path", "the file's id")
_BATCH_ID = ("id", "path", "the batch's id")
_LISTED = (
    ("limit", "query", "most items to return"),
    ("order", "query", "desc (default) or asc, by creation time"),
    ("after", "query", "id of the last one of the previous page"),
)
_ID = ("id", "path", "from X-Request-Id, or the response's id")

# A table; the formatter would put each argument on a separate line.
# fmt: off
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Create a chat completion",
        body=ChatCompletionRequest, response=ChatCompletionResponse, errors=_GENERATE, streams=ChatCompletionChunk),
    Operation("post", "/v1/completions", "Create a completion",
        body=CompletionRequest, response=CompletionResponse, errors=_GENERATE, streams=CompletionResponse),
    Operation("post", "/v1/responses", "Create a response",
        body=ResponsesRequest, response=Response, streams=ResponseEvent,
        errors=(*_GENERATE, *_UNKNOWN)),
    Operation("get", "/v1/responses/{id}", "Get a stored response, or its events",
        response=Response, errors=_BY_ID, streams=ResponseEvent,
        parameters=(
            _RESPONSE_ID,
            ("stream", "query", "true: send its events"),
            ("starting_after", "query", "only those after this sequence number"),
        )),
    Operation("delete", "/v1/responses/{id}", "Delete a response and all its stored data",
        response=DeletedResponse, errors=_STORED, parameters=(_RESPONSE_ID,)),
    Operation("post", "/v1/responses/{id}/cancel", "Cancel a background response",
        response=Response, errors=_BY_ID, parameters=(_RESPONSE_ID,)),
    Operation("get", "/v1/responses/{id}/input_items", "List the input items of a response",
        response=InputItemList, errors=_BY_ID,
        parameters=(
            _RESPONSE_ID,
            ("limit", "query", "most items to return, 1 to 100; default: 20"),
            ("order", "query", "desc (default) or asc"),
            ("after", "query", "id of the last item of the previous page"),
        )),
    Operation("post", "/v1/responses/compact", "Summarise a conversation, to continue it with fewer tokens",
        body=CompactionRequest, response=CompactedResponse, errors=(*_GENERATE, *_UNKNOWN)),
    Operation("post", "/v1/responses/input_tokens", "Count the tokens of a response's prompt",
        body=ResponsesRequest, response=InputTokens, errors=(*_COUNT, *_UNKNOWN)),
    Operation("post", "/v1/messages", "Create a message; errors have Anthropic's format",
        body=MessagesRequest, response=Message, errors=_GENERATE, streams=MessageEvent),
    Operation("post", "/v1/messages/count_tokens", "Count the tokens of a message's prompt",
        body=CountTokensRequest, response=TokenCount, errors=_COUNT),
    Operation("post", "/api/chat", "Ollama's chat, streamed unless stream is false; errors have Ollama's format",
        body=OllamaChatRequest, response=OllamaAnswer, errors=_GENERATE, streams=OllamaAnswer, streams_as=_LINES),
    Operation("post", "/api/generate", "Ollama's answer to one prompt, streamed unless stream is false",
        body=OllamaGenerateRequest, response=OllamaAnswer, errors=_GENERATE, streams=OllamaAnswer, streams_as=_LINES),
    Operation("post", "/api/embed", "Make vectors of texts for Ollama's clients",
        body=OllamaEmbedRequest, response=OllamaEmbedResponse, errors=_GENERATE),
    Operation("post", "/api/embeddings", "Make a vector of a text for Ollama's older clients",
        body=OllamaEmbeddingsRequest, response=OllamaEmbeddingsResponse, errors=_GENERATE),
    Operation("post", "/api/show", "Describe a model for Ollama's clients",
        body=ShowRequest, response=ShownModel, errors=(Code.model_not_found, Code.invalid_request)),
    Operation("get", "/api/tags", "List models for Ollama's clients"),
    Operation("get", "/api/ps", "List loaded models for Ollama's clients"),
    Operation("get", "/api/version", "Get the version of Ollama's API that is served"),
    Operation("post", "/v1/embeddings", "Make vectors of texts",
        body=EmbeddingRequest, response=EmbeddingResponse, errors=_GENERATE),
    *(
        Operation("post", path, f"Rank documents by a query{as_of}", RerankRequest, RerankResponse, _GENERATE)
        for path, as_of in (("/v1/rerank", ""), ("/v2/rerank", ", as with /v1/rerank"))
    ),
    Operation("post", "/v1/score", "Score pairs of texts", ScoreRequest, ScoreResponse, _GENERATE),
    Operation("post", "/tokenize", "The tokens of a text, or of a chat's prompt",
        body=TokenizeRequest, response=Tokenized, errors=_COMPUTE),
    Operation("post", "/detokenize", "The text of tokens",
        body=DetokenizeRequest, response=Detokenized, errors=_COMPUTE),
    Operation("post", "/v1/images/generations", "Generate images from a text",
        body=ImageGenerationRequest, response=ImagesResponse, errors=_DIFFUSE, streams=ImageProgressEvent),
    Operation("post", "/v1/videos/generations", "Generate a video from a text",
        body=VideoGenerationRequest, response=ImagesResponse, errors=_DIFFUSE, streams=ImageProgressEvent),
    Operation("post", "/v1/files", "Upload a file, as multipart/form-data with the parts file and purpose (batch)",
        response=batch.FileObject,
        errors=(Code.invalid_request, Code.body_too_large, Code.rate_limit_exceeded, Code.broker_unavailable)),
    Operation("get", "/v1/files", "List files, the newest first",
        response=batch.FileList, errors=(Code.invalid_request, Code.broker_unavailable),
        parameters=(("purpose", "query", "only those: batch or batch_output"), *_LISTED)),
    Operation("get", "/v1/files/{id}", "Get the description of a file",
        response=batch.FileObject, errors=_STORED, parameters=(_FILE_ID,)),
    Operation("get", "/v1/files/{id}/content", "Download a file",
        response="application/jsonl", errors=_STORED, parameters=(_FILE_ID,)),
    Operation("delete", "/v1/files/{id}", "Delete a file",
        response=batch.DeletedFile, errors=_STORED, parameters=(_FILE_ID,)),
    Operation("post", "/v1/batches", "Run the requests of a file",
        body=batch.CreateBatch, response=batch.BatchObject,
        errors=(Code.invalid_request, Code.request_not_found, Code.queue_full, Code.broker_unavailable)),
    Operation("get", "/v1/batches", "List batches, the newest first",
        response=batch.BatchList, errors=(Code.invalid_request, Code.broker_unavailable), parameters=_LISTED),
    Operation("get", "/v1/batches/{id}", "Get the state of a batch",
        response=batch.BatchObject, errors=_STORED, parameters=(_BATCH_ID,)),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch",
        response=batch.BatchObject, errors=_BATCH, parameters=(_BATCH_ID,)),
    Operation("post", "/v1/messages/batches", "Run many messages",
        body=batch.CreateMessageBatch, response=batch.MessageBatch,
        errors=(Code.invalid_request, Code.body_too_large, Code.rate_limit_exceeded, Code.queue_full, Code.overloaded,
                Code.broker_unavailable)),
    Operation("get", "/v1/messages/batches", "List batches of messages, the newest first",
        response=batch.MessageBatchPage, errors=(Code.invalid_request, Code.broker_unavailable),
        parameters=(
            ("limit", "query", "most items to return, 1 to 1000; default: 20"),
            ("after_id", "query", "those after this one"),
            ("before_id", "query", "those before this one"),
        )),
    Operation("get", "/v1/messages/batches/{id}", "Get the state of a batch of messages",
        response=batch.MessageBatch, errors=_STORED, parameters=(_BATCH_ID,)),
    Operation("delete", "/v1/messages/batches/{id}", "Delete a batch of messages that has ended, with its results",
        response=batch.DeletedMessageBatch, errors=_BATCH, parameters=(_BATCH_ID,)),
    Operation("post", "/v1/messages/batches/{id}/cancel", "Cancel a batch of messages",
        response=batch.MessageBatch, errors=_BATCH, parameters=(_BATCH_ID,)),
    Operation("get", "/v1/messages/batches/{id}/results",
        "Get the results of a batch of messages that has ended, one a line",
        response="application/x-jsonl", errors=_BATCH, parameters=(_BATCH_ID,)),
    Operation("get", "/v1/usage", "What the key has used; with an operator's key, what all have used",
        response=UsagePage, errors=(Code.invalid_request, Code.overloaded, Code.broker_unavailable),
        parameters=(
            ("start_time", "query", "Unix time; default: the beginning of this month"),
            ("end_time", "query", "Unix time; default: now"),
            ("bucket_width", "query", "1h, 1d or 1mo; default: 1d"),
            ("group_by", "query", "project_id (the tenant), api_key_id, model, adapter; several with commas"),
        )),
    Operation("get", "/v1/media/{name}", "Download a generated image or video, within six hours",
        response="application/octet-stream", errors=_STORED,
        parameters=(("name", "path", "from the response's url"),)),
    Operation("get", "/tokenizer_info", "The tokenizer's configuration and the chat template",
        errors=(Code.model_not_found, Code.invalid_request),
        parameters=(("model", "query", "needed where several are served"),)),
    Operation("post", "/v1/load_lora_adapter",
        "Load a LoRA adapter in all workers of its model; needs an operator's key; answers in plain text",
        body=LoadAdapter, errors=_OPERATORS),
    Operation("post", "/v1/unload_lora_adapter",
        "Unload a LoRA adapter from all workers; needs an operator's key; answers in plain text",
        body=UnloadAdapter, errors=_OPERATORS),
    Operation("get", "/v1/admin/weights", "The weights of a model's workers; needs an operator's key",
        response=ModelWeights, parameters=(("model", "query", "which one, where several are served"),),
        errors=_OPERATORS),
    Operation("post", "/v1/admin/pause",
        "Have a model's workers start no requests until they are resumed; new ones wait; needs an operator's key",
        body=PauseModel, response=ModelWeights, errors=_OPERATORS),
    Operation("post", "/v1/admin/update_weights",
        "Replace the weights of a model in all its workers by a folder's or a trainer's; needs an operator's key",
        body=UpdateWeights, response=ModelWeights, errors=_OPERATORS),
    Operation("post", "/v1/admin/resume", "End a pause; needs an operator's key",
        body=ResumeModel, response=ModelWeights, errors=_OPERATORS),
    Operation("post", "/v1/admin/sleep",
        "Have workers move their weights to host memory and free their KV cache; needs an operator's key",
        body=RestModel, response=ModelWeights, errors=_OPERATORS),
    Operation("post", "/v1/admin/wake",
        "Have workers bring their weights back, as waiting requests do; needs an operator's key",
        body=RestModel, response=ModelWeights, errors=_OPERATORS),
    Operation("get", "/v1/models", "List models; with the header anthropic-version in Anthropic's format",
        response=ModelList,
        parameters=(
            ("limit", "query", "Anthropic's format: most items to return, 1 to 1000; default: 20"),
            ("after_id", "query", "Anthropic's format: those after this one"),
            ("before_id", "query", "Anthropic's format: those before this one"),
        )),
    Operation("get", "/v1/models/{name}", "Get a model",
        response=ModelCard, errors=(Code.model_not_found,), parameters=(("name", "path", "as listed by /v1/models"),)),
    Operation("get", "/v1/requests",
        "List requests of the key's tenant, the newest first (without keys: with --list-requests)",
        response=RequestList, errors=(Code.invalid_request, Code.unsupported),
        parameters=(
            ("limit", "query", "most items to return, 1 to 100; default: 20"),
            ("after", "query", "`next_after` of the page before"),
            ("model", "query", "as the client named it"),
            ("state", "query", "queued, running, done, failed, cancelled, unknown; several with commas"),
            ("since", "query", "accepted since: seconds since 1970, or an ISO 8601 time"),
            ("until", "query", "accepted before"),
            ("tenant", "query", "whose requests"),
            ("user", "query", "the `user` field of the request"),
            ("worker", "query", "id of its last worker, or the beginning of it"),
            ("code", "query", "error code; any: every failure"),
        )),
    Operation("get", "/v1/requests/{id}", "Get the state and result of a request",
        response=Status,
        errors=(Code.request_not_found, Code.request_erased), parameters=(_ID,)),
    Operation("delete", "/v1/requests/{id}", "Cancel a request",
        response=CancelResponse,
        success=((202, "the request is being cancelled"), (200, "it has ended; `state` is how")),
        errors=(Code.request_not_found, Code.request_erased), parameters=(_ID,)),
    Operation("get", "/v1/requests/{id}/stream", "Read an answer again, from its beginning or after an event",
        response="text/event-stream", errors=(Code.request_not_found, Code.request_erased, Code.invalid_request),
        parameters=(_ID, ("Last-Event-ID", "header", "id of the last event received"))),
    Operation("get", "/health", "Each component that a request needs, and why it is not ready; 503: none is served"),
    Operation("get", "/ping", "Whether the process runs"),
    Operation("get", "/version", "The version of Penstock"),
    Operation("get", "/health/live", "Whether the process runs"),
    Operation("get", "/health/ready", "200: a request can be served now; 503: why not"),
    Operation("get", "/metrics", "Counters for Prometheus", response="text/plain"),
)
# fmt: on


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
        # An API key is needed as soon as the deployment has one; see docs/access.md.
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, schema: dict[Any, Any]) -> dict[str, Any]:
    response = operation.response
    media = response if isinstance(response, str) else "application/json"
    content: dict[str, Any] = {media: {} if isinstance(response, str) else {"schema": schema[response]}}
    if operation.streams is not None:
        content[operation.streams_as] = {"schema": schema[operation.streams]}
    tags = [tag for tag, paths in _TAGS.items() if operation.path.startswith(paths)]
    out: dict[str, Any] = {
        "tags": tags or [_OTHERS],
        "summary": operation.summary,
        "operationId": operation.method + operation.path.translate(str.maketrans("/{}.", "____")),
        "responses": {
            **{str(status): {"description": text, "content": content} for status, text in operation.success},
            **_errors(operation.errors, schema),
        },
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
