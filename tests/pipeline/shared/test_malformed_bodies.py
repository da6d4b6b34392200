"""Malformed bodies and ids on the routes of generations and tokens: 4xx in the shape of the API."""

from typing import Any

import httpx
import pytest

from penstock.schemas.errors import Code
from tests.gateway.malformed import ROUTES, malformed, refusal
from tests.pipeline.support import Deployment

COUNT = 60


@pytest.mark.parametrize("path", ROUTES)
async def test_malformed_bodies_are_refused_in_the_shape_of_the_api(fast: Deployment, path: str) -> None:
    """Some of the thousand that ``tests/gateway/test_malformed_bodies.py`` has refused without a server."""
    valid, prepare = ROUTES[path]
    bodies = [
        body
        for body in malformed(valid, 4 * COUNT, seed=len(path))
        if (error := refusal(prepare, body)) is not None and error.code is Code.invalid_request
    ]
    async with httpx.AsyncClient(base_url=fast.urls[0], trust_env=False, timeout=60) as client:
        for body in bodies[:COUNT]:
            answer = await client.post(path, content=body)
            if path.startswith("/api/") and answer.status_code == 200:  # what asks nothing is answered
                assert answer.json()["done_reason"] in ("load", "unload")
                continue
            assert 400 <= answer.status_code < 500, (body, answer.text)
            error: dict[str, Any] = answer.json()
            if path.startswith("/api/"):
                assert isinstance(error["error"], str)
                assert error["error"]
                continue
            assert error["error"]["type"] == "invalid_request_error"
            assert error["error"]["message"]
            assert (error.get("type") == "error") == path.startswith("/v1/messages")
    assert len(bodies) >= COUNT


@pytest.mark.parametrize("name", ["x", "resp_", "resp_01932c07-a4b8-7000-8000-0123456789ab", "a" * 3000, "%00", "é"])
async def test_ids_of_nothing_are_not_found(fast: Deployment, name: str) -> None:
    async with httpx.AsyncClient(base_url=fast.urls[0], trust_env=False, timeout=60) as client:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await client.request(method, f"/v1/responses/{name}{path}")
            assert answer.status_code == 404, (method, path, answer.text)
            assert answer.json()["error"]["code"] == "request_not_found"
