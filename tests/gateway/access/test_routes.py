"""Who may use which route. The table is compared with the server's own: a route without a policy here fails."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest
from starlette.routing import Route

from penstock.gateway.access.authentication import ANYONE, OPEN_PATHS, OPERATOR, Guard
from penstock.gateway.http.app import application, routes_of
from penstock.gateway.http.server import SCOPE
from penstock.gateway.service.text_model import Card
from penstock.schemas.errors import Code, ServingError

# open: everyone; key: every key; operator: an operator's, 403 for others; owner: keys of the tenant that made it, and
# an operator's, 404 for others.
POLICIES = {
    "POST /v1/chat/completions": "key",
    "POST /v1/completions": "key",
    "POST /v1/responses": "key",
    "POST /v1/responses/compact": "key",
    "POST /v1/responses/input_tokens": "key",
    "POST /v1/messages": "key",
    "POST /v1/messages/count_tokens": "key",
    "POST /v1/embeddings": "key",
    "POST /v1/rerank": "key",
    "POST /v2/rerank": "key",
    "POST /v1/score": "key",
    "POST /v1/images/generations": "key",
    "POST /v1/videos/generations": "key",
    "POST /tokenize": "key",
    "POST /detokenize": "key",
    "GET /tokenizer_info": "key",
    "POST /api/chat": "key",
    "POST /api/generate": "key",
    "POST /api/embed": "key",
    "POST /api/embeddings": "key",
    "POST /api/show": "key",
    "GET /api/tags": "key",
    "GET /api/ps": "key",
    "GET /api/version": "key",
    "GET /v1/responses/{id}": "owner",
    "DELETE /v1/responses/{id}": "owner",
    "POST /v1/responses/{id}/cancel": "owner",
    "GET /v1/responses/{id}/input_items": "owner",
    "GET /v1/models": "key",
    "GET /v1/models/{name:path}": "key",
    "GET /v1/requests": "key",
    "GET /v1/requests/{id}": "owner",
    "DELETE /v1/requests/{id}": "owner",
    "GET /v1/requests/{id}/stream": "owner",
    "GET /v1/media/{name}": "owner",
    "POST /v1/files": "key",
    "GET /v1/files": "key",
    "GET /v1/files/{id}": "owner",
    "DELETE /v1/files/{id}": "owner",
    "GET /v1/files/{id}/content": "owner",
    "POST /v1/batches": "key",
    "GET /v1/batches": "key",
    "GET /v1/batches/{id}": "owner",
    "POST /v1/batches/{id}/cancel": "owner",
    "POST /v1/messages/batches": "key",
    "GET /v1/messages/batches": "key",
    "GET /v1/messages/batches/{id}": "owner",
    "DELETE /v1/messages/batches/{id}": "owner",
    "POST /v1/messages/batches/{id}/cancel": "owner",
    "GET /v1/messages/batches/{id}/results": "owner",
    "POST /v1/load_lora_adapter": "operator",
    "POST /v1/unload_lora_adapter": "operator",
    "GET /v1/admin/weights": "operator",
    "POST /v1/admin/pause": "operator",
    "POST /v1/admin/update_weights": "operator",
    "POST /v1/admin/resume": "operator",
    "POST /v1/admin/sleep": "operator",
    "POST /v1/admin/wake": "operator",
    "GET /v1/usage": "key",
    "GET /health": "open",
    "GET /ping": "open",
    "GET /version": "open",
    "GET /health/live": "open",
    "GET /health/ready": "open",
    "GET /metrics": "open",
    "GET /openapi.json": "open",
    "GET /docs": "open",
    "GET /": "open",
}


def served() -> Iterable[tuple[str, str]]:
    for route in routes_of(cast(Any, MagicMock()), MagicMock()):
        assert isinstance(route, Route)
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            yield method, route.path


def test_every_route_has_a_policy() -> None:
    assert {f"{method} {path}" for method, path in served()} == set(POLICIES)


def test_only_open_routes_are_reached_without_a_key() -> None:
    assert {path for method, path in served() if POLICIES[f"{method} {path}"] == "open"} == OPEN_PATHS


@pytest.mark.parametrize("path", [*sorted({path for _, path in served()} - OPEN_PATHS), "/unknown", "/health/", "/v1/"])
def test_whatever_is_not_open_needs_a_key_also_what_does_not_exist(path: str) -> None:
    guard = Guard(MagicMock(), {}, always=True)
    with pytest.raises(ServingError) as caught:
        guard.admit(path, [])
    assert caught.value.code is Code.invalid_api_key


def test_a_key_of_ones_own_choice_opens_the_gateway_to_whoever_has_it() -> None:
    guard = Guard(MagicMock(), {}, own=("s3cret-ü", "another"))
    assert guard.closed
    for header in ((b"authorization", "Bearer s3cret-ü".encode()), (b"x-api-key", b"another")):
        assert guard.admit("/v1/requests", [header]) is OPERATOR
    for wrong in (b"s3cret", b"another ", b"pst-x"):
        with pytest.raises(ServingError) as caught:
            guard.admit("/v1/models", [(b"authorization", b"Bearer x" + wrong)])
        assert caught.value.code is Code.invalid_api_key
    assert guard.admit("/health", []) is not OPERATOR


async def exchange(path: str, *headers: tuple[bytes, bytes]) -> tuple[int, dict[bytes, bytes], bytes]:
    gateway = MagicMock()
    gateway.guard.admit.side_effect = lambda path, headers: ANYONE
    gateway.started_ns = 0
    model = SimpleNamespace(name="demo", card=Card(8192))
    gateway.fleet.listed.return_value = [("demo", model), ("claude-alias", model)]
    gateway.fleet.diffusion_models.ready.return_value = gateway.fleet.embedding_models.ready.return_value = {}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": list(headers)}
    scope |= {"query_string": b"", "server": ("h", 1), "client": ("c", 1), "scheme": "http", "root_path": ""}
    scope[SCOPE] = MagicMock()
    await application(gateway, MagicMock())(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(each.get("body", b"") for each in sent[1:])


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/models", "/v1/models/claude-alias", "/models/claude-alias"),
        *(
            "//v1/models",
            "/v1//models",
            "/v1/models/",
            "//models//",
            "/v1/v1/models",
            "/v1/v1//v1/models/claude-alias/",
        ),
    ],
)
async def test_paths_without_a_version_are_those_with_it_and_names_say_what_is_behind_them(path: str) -> None:
    status, _, data = await exchange(path)
    assert status == 200
    body = msgspec.json.decode(data)
    cards = body.get("data", [body])
    assert {(card["root"], card["parent"]) for card in cards} == {("demo", None)}


@pytest.mark.parametrize("path", ["/v1/models", "/nosuch", "/health/live", "/chat/nosuch"])
async def test_every_answer_has_an_id_and_the_clients_own(path: str) -> None:
    _, headers, _ = await exchange(path)
    assert len(headers[b"x-request-id"]) == 36
    assert b"x-client-request-id" not in headers
    _, headers, _ = await exchange(path, (b"x-request-id", b"mine-1"))
    assert headers[b"x-client-request-id"] == b"mine-1"
    assert headers[b"x-request-id"] != b"mine-1"
    _, headers, _ = await exchange(path, (b"x-request-id", b"x" * 200))
    assert b"x-client-request-id" not in headers
