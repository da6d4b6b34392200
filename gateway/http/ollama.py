"""Ollama's endpoints besides chats: the models, one model, the version, and loading a model.

Many desktop programs speak this API alone. Names have no tags here; the tag that clients add is taken off.
"""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.access.authentication import Caller, caller_of
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.ollama.bodies import parse_ollama_chat, parse_ollama_generate, untagged
from penstock.gateway.apis.ollama.render import OllamaAnswer, OllamaAnswerMessage, OllamaError, rfc3339
from penstock.gateway.base.request_bodies import OLLAMA_CHAT, PrepareContext, decode_body, invalid
from penstock.gateway.http.answers import JSON, send_refusal
from penstock.gateway.http.asgi import REQUEST_ID, ClientIds, Scope, Send
from penstock.gateway.service.gateway import Gateway
from penstock.infra.model.modeldir import read_json
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import Embedder
from penstock.schemas.requests import new_request_id

VERSION = "0.12.6"  # of Ollama, whose API this is; clients refuse older ones
NEVER = "2318-01-01T00:00:00Z"  # as Ollama writes it: a model stays as long as its workers
LOAD_BYTES = 1024  # a body that asks for no answer is small

_json = msgspec.json.encode


class ShowRequest(msgspec.Struct, frozen=True):
    """POST /api/show. ``name``: older name of ``model``."""

    model: str | None = None
    name: str | None = None


class ShownModel(msgspec.Struct, frozen=True):
    """``capabilities``: "completion", "vision", "tools", "thinking", "embedding"."""

    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""


_decode_show = msgspec.json.Decoder(ShowRequest).decode


def asks_ollama(path: str) -> bool:
    """Whether the client expects Ollama's shapes."""
    return path.startswith("/api/")


async def send_ollama_error(send: Send, error: ServingError, request_id: str = "") -> None:
    name = (request_id or new_request_id()).encode()
    await send_refusal(send, error, error.code.status, _json(OllamaError(error.message)), [(REQUEST_ID, name)])


async def answer_load(
    endpoint: str,
    gateway: Gateway,
    body: bytes,
    names: ClientIds,
    prepare: Callable[[bytes], Awaitable[PreparedRequest]],
    scope: Scope,
    send: Send,
    began: float,
) -> str:
    """Answer a body without messages or prompt, with which clients load a model or unload it. Implements
    ``penstock.gateway.http.answers.BodyAnswer``.

    Raises:
        ServingError: the body is malformed, or its model is not there.
    """
    if len(body) > LOAD_BYTES:
        return ""
    if endpoint == OLLAMA_CHAT:
        chat = parse_ollama_chat(body)
        if chat.messages:
            return ""
        asked, keeps = chat.model, chat.keep_alive
    else:
        text = parse_ollama_generate(body)
        if text.prompt or text.images:
            return ""
        asked, keeps = text.model, text.keep_alive
    fleet = gateway.fleet
    context = await fleet.context_for(untagged(asked or "", fleet.names), caller_of(scope))
    chatting = endpoint == OLLAMA_CHAT
    answer = OllamaAnswer(
        model=asked or context.names[0],
        created_at=rfc3339(gateway.bus.clock.now_ns()),
        message=OllamaAnswerMessage("") if chatting else msgspec.UNSET,
        response=msgspec.UNSET if chatting else "",
        done=True,
        done_reason="unload" if keeps in (0, "0", "0s") else "load",
    )
    content = _json(answer)
    headers = [JSON, (b"content-length", b"%d" % len(content)), (REQUEST_ID, new_request_id().encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
    return "ok"


class OllamaModels:
    """The endpoints that describe models."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def _card(self, name: str, revision: str, family: str = "") -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": rfc3339(self._gateway.started_ns),
            "size": 0,
            "digest": sha256((revision or name).encode()).hexdigest(),
            "details": _details(family),
        }

    def _cards(self, caller: Caller) -> list[dict[str, Any]]:
        fleet = self._gateway.fleet
        text = {
            name: self._card(name, next((each.revision for each in model.used), ""))
            for name, model in fleet.listed()
            if caller.may_name(name)
        }
        vectors = [name for name in self._embedders() if caller.may_name(name) and name not in text]
        return [*text.values(), *(self._card(name, "") for name in vectors)]

    def _embedders(self) -> dict[str, Embedder]:
        models = self._gateway.fleet.embedding_models.ready()
        return {name: model for name, model in models.items() if not model.scores}

    async def tags(self, request: Request) -> Response:
        return _reply({"models": self._cards(caller_of(request.scope))})

    async def running(self, request: Request) -> Response:
        cards = self._cards(caller_of(request.scope))
        return _reply({"models": [card | {"expires_at": NEVER, "size_vram": 0} for card in cards]})

    async def version(self, request: Request) -> Response:
        return _reply({"version": VERSION})

    async def show(self, body: bytes, caller: Caller) -> ShownModel:
        """
        Raises:
            ServingError: invalid_request; model_not_found.
        """
        asked: ShowRequest = decode_body(_decode_show, body)
        given = asked.model or asked.name
        if not given:
            raise invalid("model", "model is missing")
        fleet = self._gateway.fleet
        embedders = self._embedders()
        name = untagged(given, {*fleet.names, *embedders})
        if name in embedders and name not in fleet.names and caller.may_name(name):
            lengths = {"general.basename": name, "embedding.context_length": embedders[name].max_tokens}
            return ShownModel("", _details(""), lengths, ["embedding"])
        context = await fleet.context_for(name, caller)
        return await asyncio.to_thread(_describe, name, context)


def _describe(name: str, context: PrepareContext) -> ShownModel:
    """Reads a file of the model's folder."""
    model, parsers = context.model, context.parsers
    config = read_json(model.path / "config.json")
    family = str(config.get("model_type") or "llama")
    text = config.get("text_config")
    sizes = text if isinstance(text, dict) else config
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": name,
        f"{family}.context_length": context.max_model_len,
        f"{family}.vocab_size": model.vocab_size,
    }
    for theirs, ours in (("embedding_length", "hidden_size"), ("block_count", "num_hidden_layers")):
        if isinstance(size := sizes.get(ours), int):
            info[f"{family}.{theirs}"] = size
    abilities = {
        "completion": True,
        "vision": model.vision is not None,
        "tools": parsers is not None and bool(parsers.tools),
        "thinking": parsers is not None and bool(parsers.reasoning),
    }
    template = model.template.suited(tools=False).source if model.template is not None else ""
    return ShownModel(template, _details(family), info, [ability for ability, has in abilities.items() if has])


def _details(family: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _reply(value: Any) -> Response:
    return Response(_json(value), media_type="application/json")
