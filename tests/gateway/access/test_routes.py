"""Who may use which route. The table is compared with the server's own: a route without a policy here fails."""

from collections.abc import Iterable
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from starlette.routing import Route

from gateway.access.guard import OPEN_PATHS, Guard
from gateway.http.app import routes_of
from schemas.errors import Code, ServingError

# open: everyone; key: every key; owner: keys of the tenant that made it, and an operator's, 404 for others.
POLICIES = {
    "POST /v1/chat/completions": "key",
    "POST /v1/completions": "key",
    "POST /v1/responses": "key",
    "POST /v1/responses/input_tokens": "key",
    "POST /v1/messages": "key",
    "POST /v1/messages/count_tokens": "key",
    "POST /v1/embeddings": "key",
    "POST /v1/images/generations": "key",
    "POST /v1/videos/generations": "key",
    "POST /tokenize": "key",
    "POST /detokenize": "key",
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
    "GET /v1/files/{name}": "owner",
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
    for route in routes_of(cast(Any, MagicMock())):
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
