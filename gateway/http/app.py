"""The gateway's HTTP application: the endpoints of all APIs, health, metrics, documentation and the page at ``/``.

Endpoints that answer a body are called directly; the others are routed by Starlette. The page shows models, endpoints
and a box to try them. It loads nothing from elsewhere and stores nothing.
"""

import asyncio
import base64
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.access.authentication import ANYONE, CALLER, Caller, audited, caller_of
from penstock.gateway.apis.chat.tokenization import detokenize, tokenize, tokenizer_info
from penstock.gateway.apis.embeddings import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH
from penstock.gateway.apis.images import IMAGE_PATHS
from penstock.gateway.apis.messages.objects import PAGE_LIMITS, MessagesModel, ModelPage, message_error, messages_status
from penstock.gateway.apis.messages.prepare_message import count_message
from penstock.gateway.apis.ollama.render import OllamaError
from penstock.gateway.base.chat_objects import CancelResponse, error_body, stopping
from penstock.gateway.base.request_bodies import (
    CHAT,
    COMPACTION,
    COMPLETION,
    MESSAGE,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSE,
    page_of,
)
from penstock.gateway.batches.driver import Batches
from penstock.gateway.http import asgi, request_list
from penstock.gateway.http.answers import (
    INTERNAL,
    JSON,
    GenerationEndpoint,
    Reattach,
    answer_text,
    send_error,
    send_refusal,
)
from penstock.gateway.http.batches import FilesAndBatches
from penstock.gateway.http.images import GeneratedFiles, ImageReattach, answer_images, base_url
from penstock.gateway.http.ollama import OllamaModels, answer_load, asks_ollama, send_ollama_error
from penstock.gateway.http.openapi import document
from penstock.gateway.http.prompt_list import answer_prompts
from penstock.gateway.http.request_list import final_state, status_of
from penstock.gateway.http.server import SCOPE, HttpConnection
from penstock.gateway.http.stored_responses import StoredResponses, answer_response
from penstock.gateway.http.usage import UsageEndpoint
from penstock.gateway.service.gateway import Gateway
from penstock.gateway.service.text_model import TextModel
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Embedder, LoraAdapter
from penstock.schemas.requests import (
    EMBEDDING,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    RERANK,
    SCORE,
    new_request_id,
    request_of_answer,
)

log = structlog.get_logger("gateway")

_json = msgspec.json.encode
MOST_ADAPTER_BYTES = 1 << 16  # of a body that names one, or a folder of weights
MOST_WORKERS = 1000  # in one answer


# Clients with a base URL that lacks /v1 ask for these.
_WITHOUT_VERSION = tuple(
    f"/{path}"
    for path in (
        *("chat/", "completions", "responses", "messages", "embeddings", "models"),
        *("images/", "videos/", "files", "batches", "rerank", "score"),
    )
)
_VERSION = "v1"
_TWICE = f"/{_VERSION}/{_VERSION}/"


def _tidied(path: str) -> str:
    """The path without a doubled slash or version: base URLs may end with what clients add again."""
    path = re.sub("/{2,}", "/", path)
    while path.startswith(_TWICE):
        path = path.removeprefix(f"/{_VERSION}")
    return path.rstrip("/") or "/"


def application(gateway: Gateway, batches: Batches) -> asgi.App:
    """The ASGI application of one gateway."""
    answering = _answering(gateway)
    others = Starlette(
        routes=routes_of(gateway, batches),
        exception_handlers={HTTPException: _http_error, ServingError: _serving_error, Exception: _crash},
    )

    async def refuse(scope: asgi.Scope, send: asgi.Send, error: ServingError) -> None:
        gateway.metrics.of("").requests.labels("http", error.code.value).inc()
        if error.code is Code.invalid_api_key:
            send = asgi.with_header(send, b"www-authenticate", b"Bearer")
        if asks_ollama(scope["path"]):
            await send_ollama_error(send, error)
        else:
            await (send_message_error if asks_anthropic(scope) else send_error)(send, error)

    async def app(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        path = scope["path"]
        if path.endswith("/") or "//" in path or path.startswith(_TWICE):
            path = scope["path"] = _tidied(path)
            scope["raw_path"] = _tidied(scope["raw_path"].decode("ascii", "replace")).encode()
        if path.startswith(_WITHOUT_VERSION):
            path = scope["path"] = f"/{_VERSION}" + path
            scope["raw_path"] = f"/{_VERSION}".encode() + scope["raw_path"]
        direct = answering.get(path) if scope["method"] == "POST" else None
        client_id = asgi.client_id_of(scope["headers"])
        if direct is None:
            send = asgi.with_request_id(send, client_id)
        elif client_id:
            connection: HttpConnection = scope[SCOPE]
            connection.add_headers([(asgi.CLIENT_ID, client_id)])
        try:
            scope[CALLER] = gateway.guard.admit(path, scope["headers"])
        except ServingError as error:
            await refuse(scope, send, error)
            return
        if direct is None and (entry := audited(scope["method"], path, scope[CALLER])) is not None:
            gateway.audit.note(entry)
        # Bypasses Starlette's layers, which handle every message sent: 5 % of a gateway's time.
        if direct is not None:
            await direct(scope, receive, send)
            return
        try:
            await others(scope, receive, send)
        except asyncio.CancelledError:  # the gateway stops
            with contextlib.suppress(RuntimeError):  # it had begun
                await send_error(send, stopping(""))

    return app


def _answering(gateway: Gateway) -> dict[str, asgi.App]:
    """Endpoints that answer a body, by path."""
    return {
        "/v1/chat/completions": GenerationEndpoint(gateway, CHAT, answer_text),
        "/v1/completions": GenerationEndpoint(gateway, COMPLETION, answer_text, answer_body=answer_prompts),
        "/v1/responses": GenerationEndpoint(gateway, RESPONSE, answer_response),
        "/v1/responses/compact": GenerationEndpoint(gateway, COMPACTION, answer_text),
        "/v1/responses/input_tokens": JsonEndpoint(gateway, gateway.input_tokens),
        "/v1/messages": GenerationEndpoint(gateway, MESSAGE, answer_text, send_message_error),
        "/v1/messages/count_tokens": JsonEndpoint(gateway, partial(gateway.compute, count_message), send_message_error),
        **{
            path: GenerationEndpoint(gateway, kind, answer_text, send_ollama_error, partial(answer_load, kind))
            for kind, path in ((OLLAMA_CHAT, "/api/chat"), (OLLAMA_GENERATE, "/api/generate"))
        },
        **{
            path: GenerationEndpoint(gateway, kind, answer_text, send_ollama_error)
            for kind, path in ((OLLAMA_EMBED, "/api/embed"), (OLLAMA_EMBEDDINGS, "/api/embeddings"))
        },
        "/api/show": JsonEndpoint(gateway, OllamaModels(gateway).show, send_ollama_error),
        EMBEDDINGS_PATH: GenerationEndpoint(gateway, EMBEDDING, answer_text),
        **{path: GenerationEndpoint(gateway, RERANK, answer_text) for path in (RERANK_PATH, "/v2/rerank")},
        SCORE_PATH: GenerationEndpoint(gateway, SCORE, answer_text),
        "/tokenize": JsonEndpoint(gateway, partial(gateway.compute, tokenize)),
        "/detokenize": JsonEndpoint(gateway, partial(gateway.compute, detokenize)),
        **{path: GenerationEndpoint(gateway, kind, answer_images) for kind, path in IMAGE_PATHS.items()},
    }


def routes_of(gateway: Gateway, batches: Batches) -> list[Route]:
    """Every endpoint. Those that answer a body are here for requests with a wrong method."""
    api, stored, files = _Api(gateway), StoredResponses(gateway), FilesAndBatches(gateway, batches)
    ollama = OllamaModels(gateway)
    page, headers = home_page()
    docs_page = (Path(__file__).parent / "docs.html").read_bytes()
    openapi = _json(document(version("penstock")))

    async def home(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def docs(request: Request) -> Response:
        return Response(docs_page, media_type="text/html")

    async def openapi_json(request: Request) -> Response:
        return Response(openapi, media_type="application/json")

    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in _answering(gateway).items()),
        Route("/v1/responses/{id}", stored, methods=["GET"]),
        Route("/v1/responses/{id}", stored.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", stored.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", stored.input_items),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/tokenizer_info", api.tokenizer_info),
        Route("/api/tags", ollama.tags),
        Route("/api/ps", ollama.running),
        Route("/api/version", ollama.version),
        Route("/v1/requests", api.requests),
        Route("/v1/requests/{id}", api.request, methods=["GET"]),
        Route("/v1/requests/{id}", api.cancel, methods=["DELETE"]),
        Route("/v1/requests/{id}/stream", Reattach(gateway, ImageReattach(gateway))),
        Route("/v1/media/{name}", GeneratedFiles(gateway).get),
        Route("/v1/load_lora_adapter", api.changes(gateway.adapters.load), methods=["POST"]),
        Route("/v1/unload_lora_adapter", api.changes(gateway.adapters.unload), methods=["POST"]),
        Route("/v1/admin/weights", api.weights, methods=["GET"]),
        Route("/v1/admin/pause", api.changes(gateway.weights.pause), methods=["POST"]),
        Route("/v1/admin/update_weights", api.changes(gateway.weights.update), methods=["POST"]),
        Route("/v1/admin/resume", api.changes(gateway.weights.resume), methods=["POST"]),
        Route("/v1/admin/sleep", api.changes(gateway.weights.sleep), methods=["POST"]),
        Route("/v1/admin/wake", api.changes(gateway.weights.wake), methods=["POST"]),
        Route("/v1/files", files.upload, methods=["POST"]),
        Route("/v1/files", files.files, methods=["GET"]),
        Route("/v1/files/{id}", files.file, methods=["GET"]),
        Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content, methods=["GET"]),
        Route("/v1/batches", files.create, methods=["POST"]),
        Route("/v1/batches", files.batches, methods=["GET"]),
        Route("/v1/batches/{id}", files.batch, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", files.cancel, methods=["POST"]),
        Route("/v1/messages/batches", files.create_messages, methods=["POST"]),
        Route("/v1/messages/batches", files.message_batches, methods=["GET"]),
        Route("/v1/messages/batches/{id}", files.message_batch, methods=["GET"]),
        Route("/v1/messages/batches/{id}", files.delete_messages, methods=["DELETE"]),
        Route("/v1/messages/batches/{id}/cancel", files.cancel_messages, methods=["POST"]),
        Route("/v1/messages/batches/{id}/results", files.message_results, methods=["GET"]),
        Route("/v1/usage", UsageEndpoint(gateway).get, methods=["GET"]),
        Route("/health", api.health),
        Route("/ping", api.live),
        Route("/version", api.version),
        Route("/health/live", api.live),
        Route("/health/ready", api.ready),
        Route("/metrics", api.metrics),
        Route("/openapi.json", openapi_json),
        Route("/docs", docs),
        Route("/", home),
    ]


class JsonEndpoint:
    """A POST endpoint that is answered here, without a request to a worker.

    Args:
        compute: from a body and its caller to what is sent as JSON; raises ``ServingError``.
        refuse: sends an error.
    """

    def __init__(
        self,
        gateway: Gateway,
        compute: Callable[[bytes, Caller], Awaitable[msgspec.Struct]],
        refuse: Callable[[asgi.Send, ServingError], Awaitable[None]] = send_error,
    ) -> None:
        self._gateway = gateway
        self._compute = compute
        self._refuse = refuse

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        gateway = self._gateway
        try:
            body = await asgi.read_body(scope, receive, gateway.settings.max_body_bytes)
            content = msgspec.json.encode(await self._compute(body, caller_of(scope)))
            headers = [JSON, (b"content-length", b"%d" % len(content)), (asgi.REQUEST_ID, new_request_id().encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})
        except ServingError as error:
            await self._refuse(send, error)
        except asgi.ClientDisconnected:
            pass
        except Exception:
            log.exception("http_handler_failed", path=scope["path"])
            with contextlib.suppress(RuntimeError):
                await self._refuse(send, INTERNAL)


class _Api:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def _card(self, name: str, root: str, output: str, *, images: bool = False, **more: Any) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._gateway.started_ns // 1_000_000_000,
            "owned_by": "penstock",
            "root": root,
            "parent": None,
            **more,
            "input_modalities": ["text", "image"] if images else ["text"],
            "output_modalities": [output],
        }

    def _model_card(self, name: str, model: TextModel) -> dict[str, Any]:
        card = model.card
        return self._card(name, model.name, "text", images=card.images, max_model_len=card.max_model_len)

    def _adapter_card(self, adapter: LoraAdapter, model: TextModel) -> dict[str, Any]:
        """As vLLM lists one: its folder, and the model that it belongs to."""
        return self._card(adapter.name, adapter.root, "text", max_model_len=model.card.max_model_len) | {
            "parent": model.name
        }

    def _embedding_card(self, name: str, model: Embedder) -> dict[str, Any]:
        if model.scores:
            return self._card(name, name, SCORE, max_model_len=model.max_tokens)
        dimensions, types = model.default_dimensions or model.dimensions, list(model.prompts)
        return self._card(
            name, name, "embedding", max_model_len=model.max_tokens, dimensions=dimensions, input_types=types
        )

    def _cards(self, caller: Caller) -> dict[str, dict[str, Any]]:
        fleet = self._gateway.fleet
        diffusion = {name: self._card(name, name, model.kind) for name, model in fleet.diffusion_models.ready().items()}
        embedding = {name: self._embedding_card(name, model) for name, model in fleet.embedding_models.ready().items()}
        text = {name: self._model_card(name, model) for name, model in fleet.listed()}
        text |= {adapter.name: self._adapter_card(adapter, model) for adapter, model in fleet.adapters()}
        cards = text | {name: card for name, card in (diffusion | embedding).items() if name not in text}
        return {name: card for name, card in cards.items() if caller.may_name(name)}

    def _for_messages(self, caller: Caller) -> dict[str, MessagesModel]:
        """Models that take messages, as Anthropic describes them."""
        gateway = self._gateway
        created = datetime.fromtimestamp(gateway.started_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        served = [(name, model) for name, model in gateway.fleet.listed() if caller.may_name(name)]
        served += [(adapter.name, model) for adapter, model in gateway.fleet.adapters(caller)]
        lengths = {name: model.card.max_model_len or None for name, model in served}
        return {name: MessagesModel(name, name, created, length, length) for name, length in lengths.items()}

    async def models(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        if asks_anthropic(request.scope):
            page = page_of(self._for_messages(caller).values(), request.query_params, **PAGE_LIMITS)
            return _reply(ModelPage(**page._asdict()))
        return _reply({"object": "list", "data": list(self._cards(caller).values())})

    async def model(self, request: Request) -> Response:
        name, caller = request.path_params["name"], caller_of(request.scope)
        anthropic = asks_anthropic(request.scope)
        card = self._for_messages(caller).get(name) if anthropic else self._cards(caller).get(name)
        if card is None:
            raise ServingError(Code.model_not_found, f"model {name[:200]!r} is not served here", param="model")
        return _reply(card)

    def changes(self, change: Callable[[bytes, Caller], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler of an endpoint of operators, which answers with an object or a text."""

        async def handle(request: Request) -> Response:
            body = await asgi.read_body(request.scope, request.receive, MOST_ADAPTER_BYTES)
            answer = await change(body, caller_of(request.scope))
            return Response(answer, media_type="text/plain") if isinstance(answer, str) else _reply(answer)

        return handle

    async def weights(self, request: Request) -> Response:
        asked = {"model": request.query_params.get("model", "")}
        return _reply(await self._gateway.weights.show(msgspec.json.encode(asked), caller_of(request.scope)))

    async def tokenizer_info(self, request: Request) -> Response:
        name, caller = request.query_params.get("model", ""), caller_of(request.scope)
        context = await self._gateway.fleet.context_for(name, caller)
        return _reply(await asyncio.to_thread(tokenizer_info, context))

    async def requests(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        if caller is ANYONE and not self._gateway.settings.list_requests:
            message = "this gateway does not list requests; its operator can start it with --list-requests"
            raise ServingError(Code.unsupported, message)
        query = request_list.parse(request.query_params, self._gateway.fleet.sight(caller))
        return _reply(request_list.body(await self._gateway.list_requests(query.criteria, query.limit, query.after)))

    async def request(self, request: Request) -> Response:
        gateway = self._gateway
        sight = gateway.fleet.sight(caller_of(request.scope))
        stored = await gateway.look_up(request_of_answer(request.path_params["id"]), sight)
        return _reply(await status_of(gateway, stored, base_url(request.scope, gateway)))

    async def cancel(self, request: Request) -> Response:
        sight = self._gateway.fleet.sight(caller_of(request.scope))
        state, record = await self._gateway.look_up(request_of_answer(request.path_params["id"]), sight)
        if record is not None:
            return _reply(CancelResponse(state.id, False, final_state(record)))
        await self._gateway.cancel_surely(state.id, "cancelled by request")
        return _reply(CancelResponse(state.id, True), status=202)

    async def live(self, request: Request) -> Response:
        return _reply({"status": "live"})

    async def health(self, request: Request) -> Response:
        endpoints = sorted({route.path_format for route in request.app.routes if isinstance(route, Route)})
        answer = health_of(self._gateway, endpoints)
        return _reply(answer.health, status=answer.status)

    async def version(self, request: Request) -> Response:
        return _reply({"version": version("penstock")})

    async def ready(self, request: Request) -> Response:
        reasons = self._gateway.not_ready()
        answer: dict[str, Any] = {"status": "not ready" if reasons else "ready", "reasons": reasons}
        if cells := self._gateway.cells_not_ready():
            answer["cells"] = cells
        return _reply(answer, status=503 if reasons else 200)

    async def metrics(self, request: Request) -> Response:
        page = await asyncio.to_thread(generate_latest, self._gateway.metrics.registry)  # 2 to 4 ms
        return Response(page, media_type=CONTENT_TYPE_LATEST)


def _reply(value: Any, status: int = 200) -> Response:
    return Response(_json(value), status_code=status, media_type="application/json")


class Component(Struct, frozen=True, omit_defaults=True):
    """``reason``: why it is not ready; "": it is. ``role``, ``model``: of a worker."""

    name: str
    ready: bool
    reason: str = ""
    role: str = ""
    model: str = ""


class Health(Struct, frozen=True):
    """``status``: "ready" or "not ready", as in ``/health/ready``."""

    status: str
    reasons: list[str]
    components: list[Component]
    endpoints: list[str]


class HealthAnswer(NamedTuple):
    health: Health
    status: int


def health_of(gateway: Gateway, endpoints: list[str]) -> HealthAnswer:
    """The components of a deployment as this gateway sees them, and the HTTP status.

    Args:
        endpoints: paths that this gateway serves.
    """
    reasons = gateway.not_ready()
    connected = gateway.bus.connected
    routed = connected and gateway.has_routers
    unrouted = "its consumers are missing on the broker" if gateway.lacks_consumer else "none takes requests"
    reason_of = {
        "gateway": "it is shutting down" if gateway.draining else "",
        "broker": "" if connected else "it is not connected",
        "routers": "" if routed else unrouted if connected else "the broker is not connected",
    }
    components = [Component(name, not reason, reason) for name, reason in reason_of.items()]
    workers = gateway.fleet.workers()
    named = Counter(registration.name for registration, _ in workers)
    for registration, reason in workers[:MOST_WORKERS]:
        # Unnamed workers of one host have one name, unless their metrics ports were chosen.
        name = registration.name if named[registration.name] == 1 and registration.name else registration.worker
        components.append(Component(name, not reason, reason, registration.role, registration.model))
    status = "not ready" if reasons else "ready"
    return HealthAnswer(Health(status, reasons, components, endpoints), 503 if reasons else 200)


# --- errors ---

_MESSAGES = "/v1/messages"
_ANTHROPIC_VERSION = b"anthropic-version"  # a header that all clients of Anthropic's send


def asks_anthropic(scope: asgi.Scope) -> bool:
    """Whether the client expects Anthropic's shapes."""
    path: str = scope["path"]
    return path.startswith(_MESSAGES) or any(name == _ANTHROPIC_VERSION for name, _ in scope["headers"])


async def send_message_error(send: asgi.Send, error: ServingError, request_id: str = "") -> None:
    request_id = request_id or new_request_id()
    names = [(name, request_id.encode()) for name in (asgi.REQUEST_ID, b"request-id")]
    await send_refusal(send, error, messages_status(error.code), _json(message_error(error, request_id)), names)


def _refusal(request: Request, error: ServingError, status: int, headers: Mapping[str, str] | None = None) -> Response:
    if asks_ollama(request.url.path):
        body = _json(OllamaError(error.message))
    elif asks_anthropic(request.scope):
        name = new_request_id()
        status = messages_status(error.code) if status == error.code.status else status
        body = _json(message_error(error, name))
        headers = {**(headers or {}), "x-request-id": name, "request-id": name}
    else:
        body = _json(error_body(error))
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _refusal(request, error, error.code.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return _refusal(request, no_endpoint(method, path), 404)
    allowed = (error.headers or {}).get("Allow", "")
    why = f"{path} does not support {method}; use {allowed}" if allowed else f"{method} {path}: {error.detail}"
    refused = ServingError(Code.invalid_request, f"{why} (see /docs)")
    return _refusal(request, refused, error.status_code, error.headers)


async def _crash(request: Request, error: Exception) -> Response:
    log.error("http_handler_failed", path=request.url.path, error=repr(error))
    return _refusal(request, INTERNAL, 500)


_NO_ASSISTANTS = "POST /v1/responses continues a conversation with previous_response_id, and calls your tools."
_NO_TUNING = "Train the model elsewhere, and serve its folder: penstock up --model FOLDER."
_NO_ADMINISTRATION = "Keys and tenants are managed with `penstock keys` and `penstock tenants`."
_MODELS_ARE_WORKERS = "A model is served as long as a worker runs it: penstock up --model MODEL."
# What other servers have, by the path without /v1, and what to do here. Of several beginnings, the longest counts.
ELSEWHERE = {
    "api": "Of Ollama's API, chat, generate, embed, embeddings, show, tags, ps and version are served.",
    "api/blobs": _MODELS_ARE_WORKERS,
    "api/copy": "A model has several names with --served-model-name.",
    "api/create": _MODELS_ARE_WORKERS,
    "api/delete": _MODELS_ARE_WORKERS,
    "api/pull": _MODELS_ARE_WORKERS,
    "api/push": _MODELS_ARE_WORKERS,
    "assistants": _NO_ASSISTANTS,
    "audio": "No model takes or makes sound here: transcribe or speak with another server.",
    "chat/completions": "Read a chat with GET /v1/requests/ID; ID is in its header X-Request-Id.",
    "classify": "Pairs of texts are scored with POST /v1/score, documents ranked with POST /v1/rerank.",
    "complete": "Use POST /v1/messages.",
    "completion": "Use POST /v1/completions.",
    "containers": "Run code in a tool of your own.",
    "conversations": _NO_ASSISTANTS,
    "edits": "Use POST /v1/chat/completions.",
    "engines": "GET /v1/models lists the models; requests name theirs in the field model.",
    "evals": "Evaluate with a client such as lm-eval or guidellm.",
    "fine-tunes": _NO_TUNING,
    "fine_tuning": _NO_TUNING,
    "generate": "Use POST /v1/completions.",
    "generate_stream": 'Use POST /v1/completions with "stream": true.',
    "images": "Images are made of texts only: POST /v1/images/generations.",
    "infill": "Use POST /v1/completions with the model's own marks in the prompt.",
    "moderations": "Ask a model for a verdict with POST /v1/chat/completions and a response_format.",
    "openai": "Azure's paths are not served: set the base URL to http://HOST:PORT/v1, use the client without Azure, "
    "and name the deployment's model in the field model.",
    "organization": _NO_ADMINISTRATION,
    "pooling": "Use POST /v1/embeddings.",
    "projects": _NO_ADMINISTRATION,
    "realtime": 'Stream the answer of POST /v1/responses or /v1/chat/completions with "stream": true.',
    "threads": _NO_ASSISTANTS,
    "uploads": "Send the file whole to POST /v1/files.",
    "v1beta": "Gemini's API is not served: use POST /v1/chat/completions.",
    "v2/chat": "Cohere's API is not served: use POST /v1/chat/completions.",
    "v2/embed": "Use POST /v1/embeddings.",
    "v2/health": "Use GET /health/ready.",
    "v2/models": "Use GET /v1/models.",
    "vector_stores": "Make vectors with POST /v1/embeddings, and keep and search them in a store of your own.",
    "videos": "Use POST /v1/videos/generations.",
}


def no_endpoint(method: str, path: str) -> ServingError:
    """Why a path is not found, and what to ask instead."""
    parts = path.removeprefix(f"/{_VERSION}/").strip("/").split("/")
    beginnings = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    instead = next((ELSEWHERE[each] for each in beginnings if each in ELSEWHERE), "")
    asked = f"{method} {path[:200]}"
    why = f"{asked} is not supported. {instead}" if instead else f"there is no {asked}."
    return ServingError(Code.endpoint_not_found, f"{why} GET /docs lists all endpoints")


# --- the page at / ---

_INLINE = re.compile(rb"<(style|script)>(.*?)</\1>", re.DOTALL)


def home_page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. Its policy allows this style and this script alone, and requests to this gateway."""
    page = (Path(__file__).parent / "home.html").read_bytes()
    allowed = {kind.decode(): base64.b64encode(sha256(text).digest()).decode() for kind, text in _INLINE.findall(page)}
    policy = (
        f"default-src 'none'; style-src 'sha256-{allowed['style']}'; script-src 'sha256-{allowed['script']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
