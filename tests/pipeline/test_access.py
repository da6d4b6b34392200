"""API keys on two gateways of one deployment: who gets what, and how soon a change holds."""

import asyncio
import contextlib
import io
import json
import os
import signal
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import nats
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.nats_server.tenants import credentials_path
from penstock.operate import key_store
from penstock.schemas.keys import ApiKey, digest_of, new_key
from tests.gateway.access.test_routes import POLICIES
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import MODEL_NAME, Deployment, bus_of, ok, registrations, until

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
MESSAGE = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
SOON_S = 1.0
MADE: list[str] = []  # every key of this module


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    flags = ("--mock-speedup", "0", "--gateways", "2", "--served-model-name", f"{MODEL_NAME},other")
    return new_deployment(*flags, "--max-tenant-file-bytes", "100000", PENSTOCK_ACCESS_LOG="true")


def keys(deployment: Deployment, *args: str) -> int:
    return main(["keys", *args, "--data-dir", str(deployment.data_dir)])


@pytest.fixture(scope="module")
def tenants(deployment: Deployment) -> None:
    for tenant in ("acme", "zenith"):
        assert main(["tenants", "add", tenant, "--data-dir", str(deployment.data_dir)]) == 0


bus = bus_of("deployment")


@pytest.fixture
async def https(deployment: Deployment) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One client per gateway."""
    made = [httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) for url in deployment.urls]
    yield made
    for each in made:
        await each.aclose()


@pytest.fixture
async def http(https: list[httpx.AsyncClient]) -> httpx.AsyncClient:
    return https[0]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def make(bus: Bus, https: list[httpx.AsyncClient], **fields: Any) -> str:
    """A new key, known to every gateway unless it is not valid."""
    name, text = new_key()
    MADE.append(text)
    key = ApiKey(name, digest_of(text.encode()), created_ns=time.time_ns(), **fields)
    await key_store.add(bus, key)
    if not key.revoked_ns and not key.expires_ns:
        for each in https:
            await until_status(each, text, 200)
    return text


async def until_status(http: httpx.AsyncClient, key: str, status: int, within_s: float = 5.0) -> float:
    """Seconds until a key gets this status."""
    began = time.monotonic()
    while (await http.get("/v1/models", headers=bearer(key))).status_code != status:
        assert time.monotonic() - began < within_s
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def test_without_keys_everyone_is_served_and_with_the_first_one_nobody_else(
    deployment: Deployment, https: list[httpx.AsyncClient], capsys: pytest.CaptureFixture[str]
) -> None:
    for http in https:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert await asyncio.to_thread(keys, deployment, "create", "--rpm", "100", "--about", "the first") == 0
    printed = capsys.readouterr()
    text = printed.out.strip()
    MADE.append(text)
    assert "from now on, every request" in printed.err
    for http in https:
        await until_status(http, text, 200)
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
        refused = await http.post("/v1/messages", json=MESSAGE)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=bearer(text))).status_code == 200
        assert (await http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": text})).status_code == 200
        assert (await http.get("/v1/models", params={"api_key": text})).status_code == 401
        assert (await http.get(f"/v1/requests/{text}", headers=bearer(text))).status_code == 404
    prefix = text.rpartition("-")[0]
    assert await asyncio.to_thread(keys, deployment, "list") == 0
    assert await asyncio.to_thread(keys, deployment, "show", prefix) == 0
    shown = capsys.readouterr().out
    assert shown.count(prefix) == 2
    assert text not in shown
    assert "None" not in shown


async def test_a_revoked_key_is_refused_by_every_gateway_within_a_second(
    deployment: Deployment, https: list[httpx.AsyncClient], bus: Bus
) -> None:
    text = await make(bus, https)
    before = time.monotonic()
    assert await asyncio.to_thread(keys, deployment, "revoke", text.rpartition("-")[0]) == 0
    ended = time.monotonic()
    for http in https:
        await until_status(http, text, 401, within_s=SOON_S)
    assert time.monotonic() - ended < SOON_S, ended - before
    assert "was revoked" in (await https[0].get("/v1/models", headers=bearer(text))).json()["error"]["message"]
    assert f"key={text.rpartition('-')[0]}" in deployment.logs("gateway-")


async def batch_of(http: httpx.AsyncClient, key: dict[str, str], content: bytes = b"") -> tuple[str, str]:
    """Ids of a file and of a batch made of it, of one chat unless a content is given."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    upload = {"file": ("in.jsonl", content or json.dumps(line).encode())}
    file = await ok(http.post("/v1/files", files=upload, data={"purpose": "batch"}, headers=key))
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = await ok(http.post("/v1/batches", json=body, headers=key))
    return file.json()["id"], batch.json()["id"]


async def ended_batch(http: httpx.AsyncClient, key: dict[str, str], batch: str) -> dict[str, Any]:
    async def over() -> Any:
        found = (await http.get(f"/v1/batches/{batch}", headers=key)).json()
        return found if found["status"] in ("completed", "failed", "cancelled") else None

    found: dict[str, Any] = await until(over, "the batch has ended")
    return found


@pytest.mark.usefixtures("tenants")
async def test_files_and_batches_are_their_tenants_own_and_run_with_the_key_that_made_them(
    https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus
) -> None:
    texts = [await make(bus, https, tenant=tenant) for tenant in ("acme", "zenith")]
    owner, another = map(bearer, texts)
    file, batch = await batch_of(http, owner)
    ended = await ended_batch(http, owner, batch)
    assert ended["status"] == "completed"
    for path in (f"/v1/files/{file}", f"/v1/files/{ended['output_file_id']}/content", f"/v1/batches/{batch}"):
        assert (await http.get(path, headers=owner)).status_code == 200
        assert (await http.get(path, headers=another)).status_code == 404
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert (await http.post("/v1/batches", json=body, headers=another)).status_code == 404, "its file is not found"
    for path in ("/v1/files", "/v1/batches"):
        names = {each["id"] for each in (await http.get(path, headers=another)).json()["data"]}
        assert not names & {file, batch, ended["output_file_id"]}
    output = (await http.get(f"/v1/files/{ended['output_file_id']}/content", headers=owner)).json()
    request = output["response"]["request_id"]
    assert (await http.get(f"/v1/requests/{request}", headers=another)).status_code == 404
    listed = (await http.get("/v1/requests", headers=owner)).json()["data"]
    assert request in {each["id"] for each in listed}, "it is the tenant's"


@pytest.mark.usefixtures("tenants")
async def test_a_line_that_its_key_may_not_ask_is_an_error(
    https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus
) -> None:
    narrow = bearer(await make(bus, https, tenant="acme", models=("other",)))
    _, batch = await batch_of(http, narrow)
    ended = await ended_batch(http, narrow, batch)
    assert ended["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    error = (await http.get(f"/v1/files/{ended['error_file_id']}/content", headers=narrow)).json()
    assert error["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.usefixtures("tenants")
async def test_a_tenants_files_take_no_more_than_their_share(
    https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus
) -> None:
    owner, another = [bearer(await make(bus, https, tenant=tenant)) for tenant in ("acme", "zenith")]

    async def upload(key: dict[str, str]) -> httpx.Response:
        form = {"file": ("in.jsonl", b"x" * 60_000)}
        return await http.post("/v1/files", files=form, data={"purpose": "batch"}, headers=key)

    first = await upload(owner)
    assert first.status_code == 200

    async def full() -> bool:
        names = {each["id"] for each in (await http.get("/v1/files", headers=owner)).json()["data"]}
        return first.json()["id"] in names

    await until(full, "the gateway knows of it")
    refused = await upload(owner)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "--max-tenant-file-bytes" in refused.json()["error"]["message"]
    assert (await upload(another)).status_code == 200
    assert (await http.delete(f"/v1/files/{first.json()['id']}", headers=owner)).status_code == 200

    async def free() -> bool:
        return (await upload(owner)).status_code == 200

    await until(free, "what was deleted makes room")


@pytest.mark.usefixtures("tenants")
async def test_every_route_answers_each_role_as_its_policy_says(
    https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus
) -> None:
    owner = await make(bus, https, tenant="acme")
    roles = {
        "none": {},
        "wrong": bearer(owner[:-1] + ("a" if owner[-1] != "a" else "b")),
        "revoked": bearer(await make(bus, https, revoked_ns=1)),
        "expired": bearer(await make(bus, https, expires_ns=1)),
        "owner": bearer(owner),
        "another": bearer(await make(bus, https, tenant="zenith")),
        "operator": bearer(await make(bus, https, operator=True)),
    }
    made = await http.post(
        "/v1/responses", json={"model": MODEL_NAME, "input": "Hello", "max_output_tokens": 4}, headers=roles["owner"]
    )
    response = made.json()["id"]
    file, batch = await batch_of(http, roles["owner"])
    asked = {"requests": [{"custom_id": "a", "params": MESSAGE}]}
    of_messages = (await http.post("/v1/messages/batches", json=asked, headers=roles["owner"])).json()["id"]

    async def over() -> bool:
        found = await http.get(f"/v1/messages/batches/{of_messages}", headers=roles["owner"])
        return bool(found.json()["processing_status"] == "ended")

    await until(over, "it has results")
    ids = {"/v1/files/": file, "/v1/batches/": batch, "/v1/messages/batches/": of_messages}
    wrong: list[str] = []
    for route, policy in POLICIES.items():
        method, path = route.split(" ")
        if method == "DELETE" or path.endswith("/cancel"):
            continue  # tried at last: they change what the others find
        own = next((each for start, each in ids.items() if path.startswith(start)), response)
        found = path.replace("{id}", own).replace("{name:path}", MODEL_NAME)
        for role, headers in roles.items():
            status = (await http.request(method, found.replace("{name}", "none.png"), headers=headers)).status_code
            known = role in ("owner", "operator", "another")
            if policy == "open":
                expected = {200}
            elif not known:
                expected = {401}
            elif policy == "operator":
                whole = path.startswith("/v1/admin/") and not path.endswith("/update_weights")  # without a body, too
                expected = {403 if role != "operator" else 200 if whole else 400}
            elif "{name}" in path or (policy == "owner" and role == "another"):
                expected = {404}
            else:
                expected = {400} if method == "POST" else {200}
            if status not in expected:
                wrong.append(f"{route} for {role}: {status}, not {expected}")
    for path in (
        *(f"/v1/responses/{response}/cancel", f"/v1/requests/{response}", f"/v1/responses/{response}"),
        *(f"/v1/batches/{batch}/cancel", f"/v1/files/{file}"),
        *(f"/v1/messages/batches/{of_messages}/cancel", f"/v1/messages/batches/{of_messages}"),
    ):
        method = "POST" if path.endswith("/cancel") else "DELETE"
        for role, expected_status in (("none", 401), ("expired", 401), ("another", 404)):
            status = (await http.request(method, path, headers=roles[role])).status_code
            if status != expected_status:
                wrong.append(f"{method} {path} for {role}: {status}, not {expected_status}")
    assert not wrong, "\n".join(wrong)
    deleted = await http.delete(f"/v1/responses/{response}", headers=roles["owner"])
    assert deleted.json()["deleted"] is True


@pytest.mark.usefixtures("tenants")
async def test_who_reads_anothers_answer_with_an_operators_key_and_who_deletes_is_in_the_audit_log(
    deployment: Deployment, https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    owner, operator = [await make(bus, https, **fields) for fields in ({"tenant": "acme"}, {"operator": True})]
    ask = {"model": MODEL_NAME, "input": "Hello", "max_output_tokens": 4}
    made = (await http.post("/v1/responses", json=ask, headers=bearer(owner))).json()["id"]
    assert (await http.get(f"/v1/responses/{made}", headers=bearer(owner))).status_code == 200
    assert (await http.get(f"/v1/responses/{made}", headers=bearer(operator))).status_code == 200
    assert (await http.get("/v1/requests", headers=bearer(operator))).status_code == 200
    assert (await http.delete(f"/v1/responses/{made}", headers=bearer(owner))).status_code == 200
    wanted = [
        (operator, "read", f"/v1/responses/{made}"),
        (operator, "read", "/v1/requests"),
        (owner, "delete", f"/v1/responses/{made}"),
    ]
    prefixes = {each.rpartition("-")[0] for each in (owner, operator)}
    async with asyncio.timeout(20):
        while True:
            capsys.readouterr()
            assert await asyncio.to_thread(main, ["audit", "--json", "--data-dir", str(deployment.data_dir)]) == 0
            lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
            found = [each for each in lines if each["key"] in prefixes]
            if len(found) >= len(wanted):
                break
            await asyncio.sleep(0.05)
    assert {(each["key"], each["action"], each["what"]) for each in found} == {
        (text.rpartition("-")[0], action, what) for text, action, what in wanted
    }
    assert {each["user"] for each in found} == {"gateway"}
    # The keys of this module are made by the operator on the bus, so that a command notes it.
    assert any(each["user"] == "operator" and each["action"] == "keys create" for each in lines)
    assert owner not in str(lines)


@pytest.mark.usefixtures("tenants")
async def test_nobody_continues_or_lists_what_is_anothers(
    https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus
) -> None:
    owner, another, operator = [
        bearer(await make(bus, https, **fields))
        for fields in ({"tenant": "acme"}, {"tenant": "zenith"}, {"operator": True})
    ]
    ask = {"model": MODEL_NAME, "input": "Hello", "max_output_tokens": 4}
    first = (await http.post("/v1/responses", json=ask, headers=owner)).json()["id"]
    more = {**ask, "previous_response_id": first}
    named = {**ask, "input": [{"type": "item_reference", "id": f"msg_{first.removeprefix('resp_')}_0"}]}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        refused = await http.post(path, json=more, headers=another)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert (await http.post(path, json=more, headers=owner)).status_code == 200
        refused = await http.post(path, json=named, headers=another)
        assert refused.status_code == 404
        assert (refused.json()["error"]["param"], "is not known" in refused.text) == ("input[0].id", True)
        assert (await http.post(path, json=named, headers=owner)).status_code == 200
    listed = {
        role: await http.get("/v1/requests", headers=key)
        for role, key in (("a", owner), ("z", another), ("o", operator))
    }
    owners = {role: {each["tenant"] for each in answer.json()["data"]} for role, answer in listed.items()}
    assert owners["a"] == {"acme"}
    assert owners["z"] <= {"zenith"}
    assert "acme" in owners["o"]
    refused = await http.get("/v1/requests", params={"tenant": "acme"}, headers=another)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    same = {**owner, "idempotency-key": "one"}
    ids = [
        (await http.post("/v1/chat/completions", json=CHAT, headers={**key, "idempotency-key": "one"})).json()["id"]
        for key in (same, same, another)
    ]
    assert ids[0] == ids[1] != ids[2]


async def usage_of_a_key(http: httpx.AsyncClient, deployment: Deployment, own: str, key: dict[str, str]) -> None:
    """Its requests alone are found by the part that names it, over HTTP and by the command, and say so."""
    whole = key["authorization"].removeprefix("Bearer ")
    prefix = whole.rpartition("-")[0]

    async def recorded() -> bool:
        listed = (await http.get("/v1/requests", params={"key": prefix, "state": "done"}, headers=key)).json()["data"]
        return any(each["id"] == own for each in listed)

    await until(recorded, "it is listed")
    listed = (await http.get("/v1/requests", params={"key": prefix}, headers=key)).json()["data"]
    assert {each["api_key"] for each in listed} == {prefix}
    refused = await http.get("/v1/requests", params={"key": whole}, headers=key)
    assert refused.status_code == 400
    assert whole not in refused.text
    command = ["requests", "--key", prefix, "--json", "--data-dir", str(deployment.data_dir)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert await asyncio.to_thread(main, command) == 0
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert own in [each["id"] for each in found]
    assert {each["api_key"] for each in found} == {prefix}
    assert sum(each["completion_tokens"] for each in found) >= CHAT["max_tokens"]  # type: ignore[operator]


async def test_a_key_names_only_its_models(
    https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus, deployment: Deployment
) -> None:
    key = bearer(await make(bus, https, models=("other",)))
    assert [card["id"] for card in (await http.get("/v1/models", headers=key)).json()["data"]] == ["other"]
    assert (await http.get(f"/v1/models/{MODEL_NAME}", headers=key)).status_code == 404
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", MESSAGE),
        ("/tokenize", {"model": MODEL_NAME, "prompt": "a"}),
    ):
        refused = await http.post(path, json=body, headers=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await http.post(path, json={**body, "model": "other"}, headers=key)).status_code == 200
    own = (await http.post("/v1/chat/completions", json={**CHAT, "model": "other"}, headers=key)).json()["id"]
    await usage_of_a_key(http, deployment, own.removeprefix("chatcmpl-"), key)
    assert (await http.get(f"/v1/requests/{own}", headers=key)).status_code == 200, "by an alias of the model"


async def test_a_key_whose_tenant_was_removed_is_refused(
    deployment: Deployment, https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus
) -> None:
    data = ("--data-dir", str(deployment.data_dir))
    assert await asyncio.to_thread(main, ["tenants", "add", "gone", *data]) == 0
    text = await make(bus, https, tenant="gone")
    assert await asyncio.to_thread(main, ["tenants", "remove", "gone", *data]) == 0
    await until_status(http, text, 401)
    assert await asyncio.to_thread(keys, deployment, "create", "--tenant", "gone") == 1


async def test_an_entry_that_is_not_a_key_admits_nobody(https: list[httpx.AsyncClient], bus: Bus) -> None:
    text = await make(bus, https)
    name = text.split("-")[1]
    stored, _ = await key_store.find(bus, name)
    for harmful in (msgspec.structs.replace(stored, tenant="acme.>"), msgspec.structs.replace(stored, id="another")):
        await bus.js.publish(f"$KV.ps_keys.{name}", msgspec.msgpack.encode(harmful))
        for http in https:
            await until_status(http, text, 401)


async def asked(https: list[httpx.AsyncClient], key: str, count: int, **options: Any) -> list[httpx.Response]:
    """Chats, all at once, over the gateways in turn."""
    body = {**CHAT, **options}
    return await asyncio.gather(
        *(https[n % 2].post("/v1/chat/completions", json=body, headers=bearer(key)) for n in range(count))
    )


async def test_requests_per_minute_hold_over_both_gateways(https: list[httpx.AsyncClient], bus: Bus) -> None:
    key = await make(bus, https, requests_per_minute=7)
    answers = await asked(https, key, 20)
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [429] * 13
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 63
    again = (await asked(https, key, 1))[0]
    assert {name: value for name, value in again.headers.items() if name.startswith("x-ratelimit-l")} == {
        "x-ratelimit-limit-requests": "7"
    }
    assert again.headers["x-ratelimit-remaining-requests"] == "0"
    assert again.headers["x-ratelimit-reset-requests"].endswith("s")
    message = await https[0].post("/v1/messages", json=MESSAGE, headers={"x-api-key": key})
    assert (message.status_code, message.json()["error"]["type"]) == (429, "rate_limit_error")


async def used(http: httpx.AsyncClient, key: str, requests: int, **query: str) -> dict[str, Any]:
    """What a gateway says that a key has used, once it counts so many requests."""
    page: dict[str, Any] = {}

    async def counted() -> bool:
        nonlocal page
        answer = await ok(http.get("/v1/usage", params=query, headers=bearer(key)))
        page = answer.json()
        return requests <= sum(each["num_model_requests"] for bucket in page["data"] for each in bucket["results"])

    await until(counted, f"{requests} requests are counted")
    return page


@pytest.mark.usefixtures("tenants")
async def test_what_a_key_used_is_what_its_clients_were_told(
    deployment: Deployment, https: list[httpx.AsyncClient], bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """In all forms of answers, over two gateways; with ``no_store``, and after it was deleted."""
    key, other = [await make(bus, https, tenant="acme") for _ in range(2)]
    headers, name = bearer(key), f"pst-{key.split('-')[1]}"
    told = [0, 0, 0, 0]

    def tell(prompt: int, cached: int, completion: int) -> None:
        told[:] = [told[0] + 1, told[1] + prompt, told[2] + cached, told[3] + completion]

    variants: tuple[dict[str, Any], ...] = ({}, {"n": 2}, {"no_store": True}, {"model": "other"}, {"store": False})
    for n, more in enumerate(variants):
        answer = await https[n % 2].post("/v1/chat/completions", json=CHAT | more, headers=headers)
        usage = answer.json()["usage"]
        tell(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"])
    streamed = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    events = (await https[0].post("/v1/chat/completions", json=streamed, headers=headers)).text.split("\n\n")
    usage = json.loads(events[-3].partition("data: ")[2])["usage"]
    tell(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"])
    usage = (await https[1].post("/v1/messages", json=MESSAGE, headers=headers)).json()["usage"]
    cached = usage["cache_read_input_tokens"]
    tell(usage["input_tokens"] + cached, cached, usage["output_tokens"])
    deleted = await https[1].post("/v1/responses", json={"model": MODEL_NAME, "input": "Hi"}, headers=headers)
    usage = deleted.json()["usage"]
    tell(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])
    assert (await https[0].delete(f"/v1/responses/{deleted.json()['id']}", headers=headers)).status_code == 200
    refused = await https[0].post("/v1/chat/completions", json=CHAT | {"max_tokens": -1}, headers=headers)
    assert refused.status_code == 400
    await https[0].post("/v1/chat/completions", json=CHAT, headers=bearer(other))

    page = await used(https[1], key, told[0], bucket_width="1mo")
    counted = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
    results = [each for bucket in page["data"] for each in bucket["results"]]
    assert [sum(each[field] for each in results) for field in counted] == told
    assert (page["budget"], page["missed"], results[0]["model"]) == (None, [], None)
    page = await used(https[1], key, told[0], group_by="api_key_id,project_id")
    groups = {(each["api_key_id"], each["project_id"]) for bucket in page["data"] for each in bucket["results"]}
    assert groups == {(name, "acme")}
    for wrong in ({"bucket_width": "1w"}, {"group_by": "user"}, {"start_time": "soon"}):
        assert (await https[0].get("/v1/usage", params=wrong, headers=headers)).status_code == 400

    capsys.readouterr()
    folder = ("--data-dir", str(deployment.data_dir))
    assert await asyncio.to_thread(main, ["usage", "--by", "tenant,key", "--json", *folder]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if row["key"] == name]
    assert [row[field] for field in ("requests", "prompt", "cached", "completion")] == told
    assert await asyncio.to_thread(main, ["usage", "--by", "", "--every", "day", "--csv", *folder]) == 0
    assert capsys.readouterr().out.startswith(
        "time,requests,prompt,cached,completion,reasoning,images,reasoning_unknown\n"
    )
    assert await asyncio.to_thread(main, ["usage", "--by", "model", *folder]) == 0
    assert MODEL_NAME in capsys.readouterr().out


@pytest.mark.usefixtures("tenants")
async def test_what_a_tenant_asks_over_nats_is_counted_without_a_key(
    deployment: Deployment, https: list[httpx.AsyncClient], bus: Bus
) -> None:
    operator = await make(bus, https, operator=True)
    assert await asyncio.to_thread(main, ["tenants", "add", "courier", "--data-dir", str(deployment.data_dir)]) == 0
    login = json.loads(credentials_path(deployment.data_dir, "courier").read_text())
    client = await nats.connect(login["nats_url"])
    try:

        async def answer() -> Any:
            reply = await client.request(f"ps.ask.{MODEL_NAME}", json.dumps(CHAT).encode(), timeout=10)
            return json.loads(reply.data).get("usage")

        told = await until(answer, "the tenant is known")
    finally:
        await client.close()

    async def counted() -> Any:
        query = {"group_by": "project_id,api_key_id"}
        page = (await https[0].get("/v1/usage", params=query, headers=bearer(operator))).json()
        results = [each for bucket in page["data"] for each in bucket["results"]]
        return [each for each in results if each["project_id"] == "courier"]

    (found,) = await until(counted, "it is counted")
    assert (found["num_model_requests"], found["api_key_id"]) == (1, None)
    assert (found["input_tokens"], found["output_tokens"]) == (told["prompt_tokens"], told["completion_tokens"])


async def until_refused(http: httpx.AsyncClient, key: str) -> httpx.Response:
    found: list[httpx.Response] = []

    async def refused() -> bool:
        found.append(await http.post("/v1/chat/completions", json=CHAT, headers=bearer(key)))
        return found[-1].status_code == 429

    await until(refused, "the budget is used up")
    return found[-1]


@pytest.mark.usefixtures("tenants")
async def test_a_budget_of_a_key_and_of_a_tenant_refuses_what_comes_after_it(
    deployment: Deployment, https: list[httpx.AsyncClient], bus: Bus
) -> None:
    first, second = [await make(bus, https, tenant="zenith", tokens_per_month=limit) for limit in (5, 0)]
    name = f"pst-{first.split('-')[1]}"
    assert (await https[0].post("/v1/chat/completions", json=CHAT, headers=bearer(first))).status_code == 200
    for http in https:
        refused = await until_refused(http, first)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert f"the API key {name} has used" in error["message"]
    assert "of its budget of 5 this month, which ends" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert 0 < int(refused.headers["retry-after"]) <= 31 * 86_400
    message = await https[0].post("/v1/messages", json=MESSAGE, headers={"x-api-key": first})
    assert (message.status_code, message.json()["error"]["type"]) == (429, "rate_limit_error")
    assert (await https[1].get("/v1/models", headers=bearer(first))).status_code == 200
    _, batch = await batch_of(https[0], bearer(first))
    over = await ended_batch(https[0], bearer(first), batch)
    assert over["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    errors = (await https[0].get(f"/v1/files/{over['error_file_id']}/content", headers=bearer(first))).json()
    assert errors["response"]["body"]["error"]["code"] == "insufficient_quota"
    budget = (await used(https[0], first, 1))["budget"]
    assert budget["tokens_per_month"] == 5 <= budget["used"]

    assert (await https[1].post("/v1/chat/completions", json=CHAT, headers=bearer(second))).status_code == 200
    folder = ("--data-dir", str(deployment.data_dir))
    limit = ["tenants", "add", "zenith", *folder, "--monthly-tokens"]
    assert await asyncio.to_thread(main, [*limit, "6"]) == 0
    for http in https:
        refused = await until_refused(http, second)
    assert "the tenant 'zenith' has used" in refused.json()["error"]["message"]
    login = json.loads(credentials_path(deployment.data_dir, "zenith").read_text())
    client = await nats.connect(login["nats_url"])
    try:
        reply = await client.request(f"ps.ask.{MODEL_NAME}", json.dumps(CHAT).encode(), timeout=10)
        assert json.loads(reply.data)["error"]["code"] == "insufficient_quota"
    finally:
        await client.close()
    assert await asyncio.to_thread(main, [*limit, "none"]) == 0
    assert await asyncio.to_thread(keys, deployment, "set", name, "--monthly-tokens", "100000") == 0
    for key in (first, second):

        async def accepted(key: str = key) -> bool:
            answer = await https[0].post("/v1/chat/completions", json=CHAT, headers=bearer(key))
            return answer.status_code == 200

        await until(accepted, "a larger budget holds")


async def test_limits_of_a_key_are_changed_while_it_is_used(
    deployment: Deployment, https: list[httpx.AsyncClient], bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    text = await make(bus, https, requests_per_minute=2, models=("other",))
    prefix = text.rpartition("-")[0]

    async def change(*flags: str) -> None:
        assert await asyncio.to_thread(keys, deployment, "set", prefix, *flags) == 0, capsys.readouterr()

    async def until(status: int, times: int, **options: Any) -> None:
        """Both gateways answer so, so often."""
        began = time.monotonic()
        while [answer.status_code for answer in await asked(https, text, times, **options)] != [status] * times:
            assert time.monotonic() - began < 5

    await until(404, 2, model=MODEL_NAME)
    await change("--models", "")
    await until(429, 2, model=MODEL_NAME)  # the limit of two was reached on the way
    await change("--rpm", "100000")
    await until(200, 8)
    await change("--rpm", "1", "--max-concurrent", "1")
    await until(429, 4)
    await change("--rpm", "none", "--max-concurrent", "none", "--tpm", "1000000")
    await until(200, 8)
    [answer] = await asked(https, text, 1)
    assert "x-ratelimit-limit-requests" not in answer.headers
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000000"
    # Requests that run when the limit of those at a time is set do not count, and do not disturb it when they end.
    body = {**CHAT, "stream": True, "max_tokens": 100_000}
    async with contextlib.AsyncExitStack() as stack:
        for number in range(2):
            running = https[number].stream("POST", "/v1/chat/completions", json=body, headers=bearer(text))
            assert (await stack.enter_async_context(running)).status_code == 200
        await change("--max-concurrent", "1")
        await until(200, 1)
    await change("--max-concurrent", "none")
    await until(200, 8)


async def test_tokens_per_minute_count_prompts_and_what_was_generated(https: list[httpx.AsyncClient], bus: Bus) -> None:
    key = await make(bus, https, tokens_per_minute=1_000)
    [first] = await asked(https, key, 1, max_tokens=900, stop=["e"])
    assert first.status_code == 200, first.text
    used = first.json()["usage"]["total_tokens"]
    assert used < 500
    [second] = await asked(https, key, 1, max_tokens=500)  # of the 900, most were given back
    assert second.status_code == 200, second.text
    [third] = await asked(https, key, 1, max_tokens=900)
    assert third.status_code == 429
    assert 0 <= int(third.headers["x-ratelimit-remaining-tokens"]) <= 1_000 - used - 500
    [large] = await asked(https, key, 1, max_tokens=1_001)
    assert (large.status_code, large.json()["error"]["param"]) == (429, "max_tokens")


async def test_requests_at_a_time_hold_over_both_gateways_and_are_free_once_they_ended(
    https: list[httpx.AsyncClient], bus: Bus
) -> None:
    key = await make(bus, https, max_concurrent=3)
    body = {**CHAT, "stream": True, "max_tokens": 100_000}
    for _ in range(2):
        began, running = time.monotonic(), 0
        while running < 3:  # the second time, once it is seen that the clients of the first have left
            assert time.monotonic() - began < 5
            async with contextlib.AsyncExitStack() as stack:
                streams = [
                    await stack.enter_async_context(
                        https[number % 2].stream("POST", "/v1/chat/completions", json=body, headers=bearer(key))
                    )
                    for number in range(3)
                ]
                running = sum(stream.status_code == 200 for stream in streams)
                if running == 3:
                    assert [answer.status_code for answer in await asked(https, key, 4)] == [429] * 4
            await asyncio.sleep(0.02)
    alone = await make(bus, https, max_concurrent=1)
    for number in range(6):  # one after the other, at both gateways in turn
        answer = await https[number % 2].post("/v1/chat/completions", json=CHAT, headers=bearer(alone))
        assert answer.status_code == 200, answer.text


async def cached_tokens(http: httpx.AsyncClient, key: str, content: str, **options: Any) -> int:
    body = {**CHAT, "messages": [{"role": "user", "content": content}], **options}
    answer = await http.post("/v1/chat/completions", json=body, headers=bearer(key))
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.usefixtures("tenants")
async def test_tenants_share_no_cached_prompt_unless_it_is_wanted(
    deployment: Deployment, https: list[httpx.AsyncClient], http: httpx.AsyncClient, bus: Bus
) -> None:
    text = " ".join(f"word{number}" for number in range(200))
    acme, zenith, default = [
        await make(bus, https, **fields) for fields in ({"tenant": "acme"}, {"tenant": "zenith"}, {})
    ]
    assert await cached_tokens(http, acme, text) == 0
    assert await cached_tokens(http, zenith, text) == 0
    assert await cached_tokens(http, default, text) == 0
    # Whoever chooses a salt cannot choose a tenant's.
    for salt in ("tenant/acme/", "tenant/acme", "acme"):
        assert await cached_tokens(http, zenith, text, cache_salt=salt) == 0
        assert await cached_tokens(http, default, text, cache_salt=salt) == 0
    for key in (acme, zenith, default):
        assert await cached_tokens(http, key, text) > 0
    arguments = ["tenants", "add", "zenith", "--data-dir", str(deployment.data_dir)]
    assert await asyncio.to_thread(main, [*arguments, "--shared-cache"]) == 0
    other = text.replace("word", "other")
    assert await cached_tokens(http, default, other) == 0
    began = time.monotonic()
    while await cached_tokens(http, zenith, other) == 0:  # the gateway has yet to hear of it
        assert time.monotonic() - began < 5
        other += " more"
        await cached_tokens(http, default, other)
    assert await cached_tokens(http, acme, other) == 0
    assert await asyncio.to_thread(main, [*arguments, "--no-shared-cache"]) == 0


def contents(folder: Path) -> dict[Path, bytes]:
    """All files, without those that the broker removes meanwhile."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found[path] = path.read_bytes()
    return found


def test_no_secret_is_in_logs_the_store_exports_or_bundles(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data-dir", str(deployment.data_dir))
    assert keys(deployment, "create", "--quiet") == 0
    MADE.append(capsys.readouterr().out.strip())
    with httpx.Client(base_url=deployment.urls[0], trust_env=False, timeout=30) as http:
        while http.post("/v1/chat/completions", json=CHAT, headers=bearer(MADE[-1])).status_code != 200:
            pass  # the gateway has yet to hear of it
        assert http.get(f"/v1/requests/{MADE[-1]}", headers=bearer(MADE[-1])).status_code == 404
    bundle = tmp_path / "bundle.tar.gz"
    assert main(["export", "--all", "--output", str(tmp_path / "export.jsonl"), *data]) == 0
    main(["doctor", "--bundle", str(bundle), *data])
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path / "bundle", filter="data")
    found = contents(deployment.home) | contents(tmp_path)
    for text in MADE:
        prefix, _, secret = text.rpartition("-")
        assert any(prefix.removeprefix("pst-").encode() in content for content in found.values())
        assert [path for path, content in found.items() if secret.encode() in content] == []
    assert "/v1/requests/pst-…" in deployment.logs("gateway-")


@pytest.mark.usefixtures("tenants")
async def test_a_bound_of_what_waits_of_a_tenant_holds_over_both_apis_and_is_changed_live(
    deployment: Deployment, https: list[httpx.AsyncClient], bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """No worker answers, so everything waits: what is placed already, and what routers hold once it was given up."""

    async def change(*flags: str) -> None:
        argv = ["tenants", "set", "acme", *flags, "--data-dir", str(deployment.data_dir)]
        assert await asyncio.to_thread(main, argv) == 0, capsys.readouterr()

    async def asked(at: httpx.AsyncClient, text: str) -> httpx.Response:
        return await at.post("/v1/chat/completions", json=CHAT, headers=bearer(text))

    busy, calm = await make(bus, https, tenant="acme"), await make(bus, https, tenant="zenith")
    await change("--max-waiting", "2", "--weight", "3")
    waiting: set[asyncio.Task[httpx.Response]] = set()
    pids = [registration.pid for registration in (await registrations(bus)).values()]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        refused: list[httpx.Response] = []
        deadline, at = time.monotonic() + 20, 0
        while len(refused) < 2:  # the other gateway knows of them once a router holds them
            assert time.monotonic() < deadline
            task = asyncio.create_task(asked(https[at], busy))
            done, _ = await asyncio.wait({task}, timeout=0.3)
            if done and (await task).status_code == 429:
                refused.append(await task)
                at = 1
            else:
                waiting.add(task)
        assert len(waiting) <= 4
        for answer in refused:
            error = answer.json()["error"]
            assert error["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert "requests of tenant 'acme' wait for a worker and its limit is 2" in error["message"]
        nc = await nats.connect(json.loads((deployment.data_dir / "tenants/acme.json").read_text())["nats_url"])
        try:
            said = await nc.request("ps.ask.tiny", json.dumps(CHAT).encode(), timeout=10)
        finally:
            await nc.close()
        assert said.headers is not None
        assert said.headers["Penstock-Error"] == "queue_full"
        assert 1 <= int(said.headers["Penstock-Retry-After"]) <= 30
        waiting.add(asyncio.create_task(asked(https[0], calm)))
        await change("--max-waiting", "none")
        later = asyncio.create_task(asked(https[0], busy))
        waiting.add(later)
        assert not (await asyncio.wait({later}, timeout=0.3))[0]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert {(await task).status_code for task in waiting} == {200}
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["tenants", "set", "nobody", "--data-dir", str(deployment.data_dir)]) == 1
    assert "no tenant 'nobody'" in capsys.readouterr().err


def login_of(deployment: Deployment, tenant: str) -> str:
    return str(json.loads(credentials_path(deployment.data_dir, tenant).read_text())["nats_url"])


@pytest.fixture
async def over_nats(deployment: Deployment, tenants: None) -> AsyncIterator[dict[str, nats.NATS]]:
    """A client of each tenant at the NATS API."""
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for tenant in ("acme", "zenith"):
            found[tenant] = await nats.connect(login_of(deployment, tenant))
            stack.push_async_callback(found[tenant].close)
        yield found


class Refusal(NamedTuple):
    """``after_s``: until a repeat may be taken; 0: not said."""

    code: str
    message: str
    after_s: int


async def ask_over_nats(client: nats.NATS, key: str = "", **more: Any) -> Refusal | None:
    """Ask; None: it was answered."""
    headers = {"Penstock-Key": key} if key else None
    said = await client.request(
        f"ps.ask.{MODEL_NAME}", json.dumps({**CHAT, **more}).encode(), timeout=10, headers=headers
    )
    found = said.headers or {}
    if "Penstock-Error" not in found:
        return None
    message = json.loads(said.data)["error"]["message"]
    return Refusal(found["Penstock-Error"], message, int(found.get("Penstock-Retry-After", 0)))


async def submit_over_nats(client: nats.NATS) -> Refusal | None:
    """As ``ask_over_nats``, through the durable stream."""
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.request(
        f"ps.submit.{MODEL_NAME}", json.dumps(CHAT).encode(), timeout=10, headers={"Penstock-Reply-To": inbox}
    )
    said = await answers.next_msg(timeout=20)
    await answers.unsubscribe()
    found = said.headers or {}
    if "Penstock-Error" not in found:
        return None
    return Refusal(
        found["Penstock-Error"], json.loads(said.data)["error"]["message"], int(found["Penstock-Retry-After"])
    )


async def test_limits_per_minute_of_a_tenant_hold_over_both_apis_together_and_are_changed_live(
    deployment: Deployment, https: list[httpx.AsyncClient], bus: Bus, over_nats: dict[str, nats.NATS],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    async def change(*flags: str) -> None:
        argv = ["tenants", "set", "zenith", *flags, "--data-dir", str(deployment.data_dir)]
        assert await asyncio.to_thread(main, argv) == 0, capsys.readouterr()

    async def until_over_nats(code: str) -> Refusal | None:
        found: list[Refusal | None] = []

        async def is_so() -> bool:
            found.append(await ask_over_nats(over_nats["zenith"]))
            return (found[-1].code if found[-1] else "") == code

        await until(is_so, f"it is {code or 'answered'}")
        return found[-1]

    key = await make(bus, https, tenant="zenith")
    await until_over_nats("")
    await change("--rpm", "6")
    try:
        refused = await until_over_nats("rate_limit_exceeded")
        assert refused is not None
        assert "the tenant 'zenith' has reached its limit of 6 requests per minute; try again in" in refused.message
        assert 1 <= refused.after_s <= 63
        submitted = await submit_over_nats(over_nats["zenith"])
        assert submitted is not None
        assert (submitted.code, 1 <= submitted.after_s <= 63) == ("rate_limit_exceeded", True)
        for answer in await asked(https, key, 2):  # both gateways, by way of HTTP
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(answer.headers["retry-after"]) <= 63
            assert answer.headers["x-ratelimit-limit-requests"] == "6"
        assert await ask_over_nats(over_nats["acme"]) is None  # another's limits are its own
        await change("--rpm", "none", "--tpm", "100")
        await until_over_nats("")
        many = await ask_over_nats(over_nats["zenith"], max_tokens=200)
        assert many is not None
        assert (many.code, "the tenant 'zenith' has 100 per minute" in many.message) == ("rate_limit_exceeded", True)
        refused = await until_over_nats("rate_limit_exceeded")
        assert refused is not None
        assert "100 tokens per minute" in refused.message
    finally:
        await change("--rpm", "none", "--tpm", "none")
    await until_over_nats("")


async def test_a_request_over_nats_that_names_a_key_has_its_limits_and_counts_for_it(
    https: list[httpx.AsyncClient], bus: Bus, over_nats: dict[str, nats.NATS]
) -> None:
    key = await make(bus, https, tenant="acme", requests_per_minute=2)
    prefix = key.rpartition("-")[0]
    assert [await ask_over_nats(over_nats["acme"], prefix) for _ in range(2)] == [None, None]
    refused = await ask_over_nats(over_nats["acme"], prefix)
    assert refused is not None
    assert (refused.code, prefix in refused.message, 1 <= refused.after_s <= 63) == ("rate_limit_exceeded", True, True)
    [over_http] = await asked(https, key, 1)
    assert over_http.status_code == 429
    assert await ask_over_nats(over_nats["acme"]) is None  # what names no key has the tenant's limits only
    whole = await ask_over_nats(over_nats["acme"], key)
    assert whole is not None
    assert (whole.code, prefix in whole.message, key in whole.message) == ("invalid_request", True, False)
    await used(https[0], key, 2)


@pytest.fixture(scope="module")
def narrow(new_deployment: NewDeployment) -> Deployment:
    """A worker with the step times of a GPU, which runs two requests at a time; with two tenants."""
    made = new_deployment("--mock-speedup", "1", "--max-running", "2", "--require-keys")
    for tenant in ("acme", "zenith"):
        assert main(["tenants", "add", tenant, "--data-dir", str(made.data_dir)]) == 0
    return made


async def overtaken(narrow: Deployment, api: str) -> int:
    """How many of 24 requests, which acme has open by then, end before one of zenith's does."""
    ended: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        bus = await connect(narrow.state.nats_url, role="operator", name="test")
        stack.push_async_callback(bus.close)
        http = httpx.AsyncClient(base_url=narrow.urls[0], trust_env=False, timeout=30)
        await stack.enter_async_context(http)
        keys, clients = {}, {}
        for tenant in ("acme", "zenith"):
            keys[tenant] = await make(bus, [http], tenant=tenant)
            clients[tenant] = await nats.connect(login_of(narrow, tenant))
            stack.push_async_callback(clients[tenant].close)

        async def ask(tenant: str, number: int) -> None:
            words = f"{tenant} {number} " + "again and " * 40
            body = {**CHAT, "messages": [{"role": "user", "content": words}], "max_tokens": 4}
            if api == "http":
                await ok(http.post("/v1/chat/completions", json=body, headers=bearer(keys[tenant])))
            else:
                subject = f"ps.ask.{MODEL_NAME}"
                said = await clients[tenant].request(subject, json.dumps(body).encode(), timeout=30)
                assert "Penstock-Error" not in (said.headers or {})
            ended.append(tenant)

        async def accepted() -> int:
            return int((await bus.js.stream_info(bus.subjects.stream("REQUESTS"))).state.messages)

        await ask("zenith", 0)
        goal = await accepted() + 24
        many = [asyncio.create_task(ask("acme", number)) for number in range(24)]

        async def all_accepted() -> bool:
            return await accepted() >= goal

        await until(all_accepted, "all are accepted")
        before = len(ended)
        await ask("zenith", 1)
        found = len(ended) - before - 1
        await asyncio.gather(*many)
        assert len(ended) - before > 12, "too few were open"
    return found


@pytest.mark.slow  # a deployment more; router/held has the shares of tenants
@pytest.mark.parametrize("api", ["http", "nats"])
async def test_a_tenant_cannot_slow_another_down_beyond_its_share(narrow: Deployment, api: str) -> None:
    assert await overtaken(narrow, api) <= 8


SEPARATED = [(what, api) for what in ("read", "cancel", "bill to") for api in ("http", "nats")]


@pytest.mark.parametrize(("what", "api"), SEPARATED, ids=[f"{what} over {api}" for what, api in SEPARATED])
async def test_a_tenant_cannot(
    what: str, api: str, https: list[httpx.AsyncClient], bus: Bus, over_nats: dict[str, nats.NATS]
) -> None:
    """A row of the table of docs/access.md, over one of the APIs: what zenith tries with acme's."""
    acme, zenith = [await make(bus, https, tenant=tenant) for tenant in ("acme", "zenith")]
    if what == "bill to":
        named = acme.rpartition("-")[0]
        if api == "http":
            headers = {**bearer(zenith), "penstock-key": named}
            answer = await https[0].post("/v1/chat/completions", json={**CHAT, "user": named}, headers=headers)
            assert answer.status_code == 200
            await used(https[0], zenith, 1)
        else:
            refused = await ask_over_nats(over_nats["zenith"], named)
            assert refused is not None
            assert (refused.code, "tenant 'zenith' has no API key" in refused.message) == ("invalid_api_key", True)
        page = await used(https[0], acme, 0, group_by="api_key_id")
        billed = {each["api_key_id"] for bucket in page["data"] for each in bucket["results"]}
        assert named not in billed
        return
    body = {**CHAT, "stream": True, "max_tokens": 100_000}
    async with https[0].stream("POST", "/v1/chat/completions", json=body, headers=bearer(acme)) as running:
        name = running.headers["x-request-id"]
        if api == "http":
            method, end = ("GET", "/stream") if what == "read" else ("DELETE", "")
            answer = await https[0].request(method, f"/v1/requests/{name}{end}", headers=bearer(zenith))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
        else:
            said = await over_nats["zenith"].request(f"ps.{what}", json.dumps({"id": name}).encode(), timeout=10)
            assert (said.headers or {})["Penstock-Error"] == "request_not_found"
        status = (await https[0].get(f"/v1/requests/{name}", headers=bearer(acme))).json()
        assert status["state"] in ("queued", "running")
