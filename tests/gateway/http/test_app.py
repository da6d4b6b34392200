"""What clients of other servers are told, and the models as each API lists them."""

from typing import Any

import msgspec
import pytest

from penstock.gateway.apis.messages.objects import PAGE_LIMITS, MessagesModel
from penstock.gateway.base.request_bodies import page_of
from penstock.gateway.http.app import ELSEWHERE, no_endpoint, send_message_error
from penstock.gateway.http.openapi import OPERATIONS
from penstock.schemas.errors import Code, ServingError
from tests.gateway.access.test_routes import exchange

ANTHROPIC = (b"anthropic-version", b"2023-06-01")


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/audio/transcriptions", "sound"),
        ("/v1/moderations", "POST /v1/chat/completions"),
        ("/v1/realtime", "stream"),
        ("/v1/fine_tuning/jobs/ft-1/events", "--model FOLDER"),
        ("/v1/threads/t/runs", "previous_response_id"),
        ("/v1/vector_stores", "POST /v1/embeddings"),
        ("/openai/deployments/gpt/chat/completions", "the client without Azure"),
        ("/v1/images/edits", "POST /v1/images/generations"),
        ("/v2/models/demo/infer", "GET /v1/models"),
        ("/classify", "POST /v1/score"),
        ("/v1/chat/completions/chatcmpl-1", "GET /v1/requests/ID"),
    ],
)
async def test_endpoints_of_other_servers_are_refused_with_what_to_use_instead(path: str, instead: str) -> None:
    status, headers, data = await exchange(path)
    error = msgspec.json.decode(data)["error"]
    assert (status, error["code"], error["type"]) == (404, "endpoint_not_found", "invalid_request_error")
    assert f"GET {path} is not supported" in error["message"]
    assert instead in error["message"]
    assert len(headers[b"x-request-id"]) == 36


@pytest.mark.parametrize("headers", [(), (ANTHROPIC,)])
async def test_below_messages_and_for_clients_of_anthropics_errors_have_their_form(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    for path in ("/v1/messages/drafts", "/messages/nosuch") if not headers else ("/v1/skills", "/v1/models/nosuch"):
        status, answered, data = await exchange(path, *headers)
        body = msgspec.json.decode(data)
        assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error"), path
        assert body["request_id"].encode() == answered[b"request-id"] == answered[b"x-request-id"]
    status, answered, data = await exchange("/v1/messages", *headers)
    assert (status, answered[b"allow"]) == (405, b"POST")
    assert msgspec.json.decode(data)["error"]["type"] == "invalid_request_error"


async def test_an_error_in_anthropics_form_names_its_request_also_where_none_is_stored() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_message_error(send, ServingError(Code.model_not_found, "no"))
    names = dict(sent[0]["headers"])
    assert msgspec.json.decode(sent[1]["body"])["request_id"].encode() == names[b"request-id"] == names[b"x-request-id"]


def test_nothing_that_is_served_is_called_unsupported_and_each_refusal_says_what_to_do() -> None:
    served = {operation.path.removeprefix("/v1").strip("/") for operation in OPERATIONS}
    assert served & ELSEWHERE.keys() == {"chat/completions"}, "of these, only what stands below it is refused"
    for path, instead in ELSEWHERE.items():
        assert instead.endswith("."), path
        assert instead in no_endpoint("POST", f"/v1/{path}/more").message
        assert instead in no_endpoint("POST", f"/{path}").message
    assert "not supported" not in no_endpoint("GET", "/v1/audios").message


async def test_clients_of_anthropics_get_models_in_their_form() -> None:
    status, _, data = await exchange("/v1/models", ANTHROPIC)
    page = msgspec.json.decode(data)
    assert (status, page["has_more"], page["first_id"], page["last_id"]) == (200, False, "demo", "claude-alias")
    first = page["data"][0]
    assert (first["type"], first["id"], first["max_input_tokens"]) == ("model", "demo", 8192)
    assert first["created_at"] == "1970-01-01T00:00:00Z"
    status, _, data = await exchange("/v1/models/claude-alias", ANTHROPIC)
    assert (status, msgspec.json.decode(data)["id"]) == (200, "claude-alias")
    assert msgspec.json.decode((await exchange("/v1/models"))[2])["object"] == "list"


MODELS = [MessagesModel(f"m{number}", "", "") for number in range(7)]


def names(**query: str) -> tuple[list[str], bool]:
    page = page_of(MODELS, query, **PAGE_LIMITS)
    assert (page.first_id, page.last_id) == ((page.data[0].id, page.data[-1].id) if page.data else (None, None))
    return [model.id for model in page.data], page.has_more


def test_lists_of_openais_clients_are_the_newest_first_or_the_oldest() -> None:
    def ids(**query: str) -> tuple[list[str], bool]:
        page = page_of(MODELS, query, default=4, most=5)
        return [each.id for each in page.data], page.has_more

    assert ids() == ids(order="desc") == (["m0", "m1", "m2", "m3"], True)
    assert ids(after="m3") == (["m4", "m5", "m6"], False)
    assert ids(order="asc", limit="2", after="m5") == (["m4", "m3"], True)
    for query in ({"limit": "6"}, {"order": "up"}, {"after": "no"}):
        with pytest.raises(ServingError) as caught:
            ids(**query)
        assert caught.value.param == next(iter(query))


def test_pages_of_models_have_each_once_in_both_directions() -> None:
    assert names() == ([f"m{number}" for number in range(7)], False)
    assert names(limit="3") == (["m0", "m1", "m2"], True)
    assert names(limit="3", after_id="m2") == (["m3", "m4", "m5"], True)
    assert names(limit="3", after_id="m5") == (["m6"], False)
    assert names(limit="3", after_id="m6") == ([], False)
    assert names(limit="3", before_id="m4") == (["m1", "m2", "m3"], True)
    assert names(limit="3", before_id="m1") == (["m0"], False)
    for query in ({"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after_id": "no"}, {"before_id": "no"}):
        with pytest.raises(ServingError) as caught:
            page_of(MODELS, query, **PAGE_LIMITS)
        assert (caught.value.code, caught.value.param) == (Code.invalid_request, next(iter(query)))
    with pytest.raises(ServingError, match="exclude"):
        page_of(MODELS, {"after_id": "m1", "before_id": "m2"}, **PAGE_LIMITS)
