"""One deployment in two cells, each with a broker of its own: one address, one set of keys, claims and records, and
the operator's commands, none of which needs to know about namespaces."""

import asyncio
import contextlib
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import nats
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import connect
from penstock.infra.bus.direct_get import get_last
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.schemas.requests import cell_in, in_cell
from penstock.schemas.subjects import cell_namespace
from penstock.schemas.tenants import decode as decode_limits
from tests.chaos.log import surplus
from tests.penstock.log_tools.traces.collector import Collector
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import ROOT, Deployment, Oracle, free_port, joined, ok, parse_sse, until, words

ASKED = 4  # requests that the commands find, every other one in each cell
COUNT = 6


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    flags = ("--cells", "2", "--gateways", "2", "--workers", "4", "--mock-speedup", "0", "--list-requests")
    return new_deployment(*flags)


# -- commands: first, since they count what is there ----------------------------------------------------------------


class Site(NamedTuple):
    """``ids``: of requests that have ended, the newest first."""

    deployment: Deployment
    ids: list[str]

    def of_cell(self, cell: int) -> list[str]:
        return [each for each in self.ids if cell_in(each) == cell]


async def command(deployment: Deployment, *words: str, status: int = 0) -> str:
    """What a command printed on standard output, or, if it is to fail, what is wrong."""
    out, problems = io.BytesIO(), io.StringIO()
    argv = [*words, *([] if "--data-dir" in words else ["--data-dir", str(deployment.data_dir)])]
    with contextlib.redirect_stdout(io.TextIOWrapper(out)) as lines, contextlib.redirect_stderr(problems):
        async with asyncio.timeout(60):
            ended = await asyncio.to_thread(main, argv)
        lines.flush()
        said = out.getvalue().decode()
    assert ended == status, said + problems.getvalue()
    return problems.getvalue() if status else said


@contextlib.asynccontextmanager
async def process(deployment: Deployment, *words: str) -> AsyncIterator[asyncio.StreamReader]:
    """The standard output of a command in a process of its own, which is ended."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", *words, "--data-dir", str(deployment.data_dir)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert running.stdout is not None
        async with asyncio.timeout(60):
            yield running.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.terminate()
        await running.wait()


async def listed(deployment: Deployment, *words: str) -> list[Any]:
    return [json.loads(line) for line in (await command(deployment, *words, "--json")).splitlines()]


@pytest.fixture(scope="module")
def site(deployment: Deployment) -> Site:
    ids = []
    with httpx.Client(trust_env=False, timeout=30) as http:
        for number in range(ASKED):
            url = deployment.urls[number % 2]  # each gateway is nearest to a cell
            body = {"model": "tiny", "prompt": words(40, 900 + number), "max_tokens": 4, "temperature": 0}
            answer = http.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            ids.append(answer.headers["x-request-id"])
    return Site(deployment, ids[::-1])


def test_the_state_lists_the_cells_and_whose_each_process_is(site: Site) -> None:
    state = site.deployment.state
    assert [(each.number, each.namespace) for each in state.cells] == [(0, "ps"), (1, "ps-1")]
    assert state.cells[0].nats_url == state.nats_url != state.cells[1].nats_url
    folders = [site.deployment.data_dir, site.deployment.data_dir / "cells" / "1"]
    assert [each.data_dir for each in state.cells] == list(map(str, folders))
    cells = {each.name: each.cell for each in state.processes}
    assert [cells[name] for name in ("nats", "nats-1", "router-0", "router-1")] == [0, 1, 0, 1]
    assert [cells[f"worker-{index}"] for index in range(4)] == [0, 1, 0, 1]


async def test_requests_of_both_cells_are_listed_the_newest_first(site: Site) -> None:
    assert [cell_in(each) for each in site.ids] == [1, 0, 1, 0]
    found = await listed(site.deployment, "requests")
    assert [each["id"] for each in found] == site.ids
    assert [each["cell"] for each in found] == [1, 0, 1, 0]
    assert [each["id"] for each in await listed(site.deployment, "requests", "-n", "3")] == site.ids[:3]
    one = await listed(site.deployment, "requests", "--namespace", "ps-1")
    assert [each["id"] for each in one] == site.of_cell(1)


@pytest.mark.parametrize("cell", [0, 1])
async def test_a_request_is_inspected_in_its_cell(site: Site, cell: int) -> None:
    [seen] = await listed(site.deployment, "inspect", site.of_cell(cell)[0])
    assert seen["request"]["id"] == site.of_cell(cell)[0]
    assert seen["request"]["state"] == "done"


async def test_messages_of_both_cells_are_printed_in_their_order(site: Site) -> None:
    found = await listed(site.deployment, "tail", "done")
    assert [each["subject"].rpartition(".")[2] for each in found] == site.ids[::-1]
    assert [each["cell"] for each in found] == [0, 1, 0, 1]


async def test_top_shows_all_cells(site: Site) -> None:
    [seen] = await listed(site.deployment, "top", "--once", "--interval", "200ms")
    assert {each["name"]: each["cell"] for each in seen["workers"]} == {f"worker-{at}": at % 2 for at in range(4)}
    assert [(each["workers"], each["routers"]) for each in seen["cells"]] == [(2, 1), (2, 1)]
    uses = {each["name"]: each["messages"] for each in seen["streams"]}
    assert uses["ps_DONE"] == ASKED
    assert "cell" in await command(site.deployment, "top", "--once", "--interval", "200ms")


async def test_doctor_finds_nothing_wrong_with_any_cell(site: Site) -> None:
    findings = await listed(site.deployment, "doctor", "--all")
    assert {each["status"] for each in findings if "cell" in each["what"]} == {"ok"}
    for cell in (0, 1):
        found = {each["check"] for each in findings if each["what"].startswith(f"cell {cell}: ")}
        assert found >= {"broker", "streams", "router", "workers", "KV events"}


async def test_every_cells_index_is_what_its_router_has(site: Site) -> None:
    found = await listed(site.deployment, "index", "--check")
    assert [each["cell"] for each in found] == [0, 1]
    assert [[check["router"] for check in each["routers"]] for each in found] == [["router-0"], ["router-1"]]


async def test_a_worker_of_any_cell_is_drained_and_restarted(site: Site) -> None:
    assert "worker-1: drained" in await command(site.deployment, "drain", "worker-1")
    refused = await command(site.deployment, "drain", "worker-3", status=1)
    assert "the last ready aggregated worker of model 'tiny' in cell 1" in refused
    said = await command(site.deployment, "restart", "worker-1", "worker-2", "router-1")
    assert [line.partition(":")[0] for line in said.splitlines()] == ["worker-1", "worker-2", "router-1"]


async def test_streams_of_all_cells_are_shown_and_set(site: Site) -> None:
    uses = {each["name"]: each for each in await listed(site.deployment, "streams", "list")}
    assert uses["ps_DONE"]["messages"] + uses["ps-1_DONE"]["messages"] == ASKED
    assert uses["ps_DONE"]["max_bytes"] == uses["ps-1_DONE"]["max_bytes"] <= 2 << 30
    await command(site.deployment, "streams", "set", "HANDOFF", "--max-age", "2h", "--max-bytes", "512MiB", "--yes")
    uses = {each["name"]: each for each in await listed(site.deployment, "streams", "list")}
    for name in ("ps_HANDOFF", "ps-1_HANDOFF"):
        assert (uses[name]["max_age_s"], uses[name]["max_bytes"]) == (7200, 256 << 20)
    said = await command(site.deployment, "streams", "apply")
    assert said.splitlines() == [
        f"nothing to do: all streams of namespace '{namespace}' are there" for namespace in ("ps", "ps-1")
    ]


async def test_routers_of_every_cell_know_a_tenants_weight(site: Site) -> None:
    async def weight(cell: int) -> float | None:
        place = site.deployment.state.cells[cell]
        async with await connect(place.nats_url, role="operator", name="test", namespace=place.namespace) as bus:
            bucket = bus.subjects.bucket("tenants")
            entry = await get_last(bus, f"KV_{bucket}", f"$KV.{bucket}.acme")
            return decode_limits(entry.data).weight if entry is not None and entry.data else None

    await command(site.deployment, "tenants", "add", "acme", "--weight", "3")
    assert [await weight(cell) for cell in (0, 1)] == [3, 3]
    await command(site.deployment, "tenants", "add", "acme", "--weight", "2")
    assert [await weight(cell) for cell in (0, 1)] == [2, 2]
    await command(site.deployment, "tenants", "remove", "acme")
    assert [await weight(cell) for cell in (0, 1)] == [None, None]


async def test_audit_has_what_was_done_in_every_cell(site: Site) -> None:
    found = await listed(site.deployment, "audit")
    applied = [each["cell"] for each in found if each["action"] == "streams apply"]
    assert applied == [0, 1]
    assert [each["at_ns"] for each in found] == sorted(each["at_ns"] for each in found)


async def test_leases_and_dead_requests_of_all_cells_are_listed(site: Site) -> None:
    assert "0 open leases" in await command(site.deployment, "leases")
    assert await listed(site.deployment, "dead", "list") == []


async def test_the_dashboard_has_the_requests_of_both_cells(site: Site) -> None:
    async with process(site.deployment, "dashboard", "--port", "0") as out:
        url = httpx.URL((await out.readline()).decode().split()[1])
        async with httpx.AsyncClient(base_url=url.copy_with(query=None), trust_env=False, timeout=30) as http:
            http.headers["Authorization"] = f"Bearer {url.params['token']}"
            page = (await http.get("/requests")).text
            places = [page.index(each) for each in site.ids]
            assert places == sorted(places)
            for cell in (0, 1):
                assert (await http.get(f"/requests/{site.of_cell(cell)[0]}")).status_code == 200
            assert (await http.get("/leases")).status_code == 200
            async with http.stream("GET", "/live") as live:
                async for line in live.aiter_lines():
                    if "worker-3" in line:
                        assert "worker-0" in line
                        break
                else:
                    pytest.fail("the workers of both cells are not shown")


async def test_requests_run_again_in_the_cell_where_they_ran(site: Site) -> None:
    def cells(reports: Any) -> list[tuple[str, int, int]]:
        return [(each["settings"]["cell"], each["requests"], each["outcomes"]["same"]) for each in reports]

    ids = [site.of_cell(1)[0], site.of_cell(0)[0]]
    said = await command(site.deployment, "replay", *ids, "--speed", "max", "--json", "-")
    assert cells(json.loads(said)) == [("0", 1, 1), ("1", 1, 1)]
    found = await listed(site.deployment, "requests", "-n", "2")
    assert {each["cell"] for each in found} == {cell_in(each["id"]) for each in found} == {0, 1}
    one = json.loads(await command(site.deployment, "replay", ids[0], "--speed", "max", "--json", "-"))
    assert (one["requests"], one["outcomes"]["same"]) == (1, 1)


async def test_each_cell_is_exported_to_a_file_of_its_own(site: Site, tmp_path: Path) -> None:
    refused = await command(site.deployment, "export", "--all", status=1)
    assert "give --output" in refused
    await command(site.deployment, "export", *site.ids, "--output", str(tmp_path / "log.jsonl.gz"))
    for cell in (0, 1):
        file = tmp_path / f"log.cell-{cell}.jsonl.gz"
        found = await command(site.deployment, "requests", "--file", str(file), "--json")
        assert [json.loads(line)["id"] for line in found.splitlines()] == site.of_cell(cell)
    begins = site.of_cell(1)[0][:-1]  # of the id
    await command(site.deployment, "export", begins, "--output", str(tmp_path / "one.jsonl"))
    assert site.of_cell(1)[0] in await command(
        site.deployment, "tail", "done", "--request", begins, "-n", "1", "--json"
    )
    assert site.of_cell(1)[0] in await command(site.deployment, "inspect", begins, "--no-batches")
    assert (tmp_path / "one.jsonl").exists()


async def test_every_cells_decisions_are_decided_again(site: Site) -> None:
    found = await listed(site.deployment, "whatif")
    assert [each["cell"] for each in found] == [0, 1]
    assert all(each["decisions"] for each in found)


async def test_the_planner_counts_the_workers_of_all_cells(site: Site) -> None:
    flags = ("--connector", "dry-run", "--interval-s", "1", "--decisions", "1", "--json")
    async with (
        process(site.deployment, "plan", *flags) as out,
        httpx.AsyncClient(base_url=site.deployment.urls[1], trust_env=False, timeout=30) as http,
    ):
        line = asyncio.create_task(out.readline())
        while not line.done():
            body = {"model": "tiny", "prompt": "once more", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            await asyncio.wait([line], timeout=0.2)
        planned = json.loads(line.result())
    assert planned["decision"]["observed"]["pools"]["aggregated"]["ready"] == 4
    assert planned["decision"]["observed"]["ended"] > 0


async def test_the_requests_of_all_cells_are_traced(site: Site) -> None:
    collector = Collector()
    collector.start()
    try:
        flags = ("--once", "--since", "1h", "--otlp-endpoint", collector.url)
        async with process(site.deployment, "trace", *flags) as out:
            await out.read()  # until it ends
        assert {span.trace_id for span in collector.spans} >= {each.replace("-", "") for each in site.ids}
    finally:
        collector.stop()


async def test_the_passwords_of_every_broker_are_listed(site: Site) -> None:
    said = await command(site.deployment, "passwords", "list")
    heads = [line for line in said.splitlines() if line.startswith("cell ")]
    assert heads == ["cell 0:", "cell 1:"]
    workers = [line.split() for line in said.splitlines() if line.startswith("worker ")]
    assert workers == [["worker", "worker", "2", "0"]] * 2


@pytest.mark.parametrize("apart", [False, True], ids=["one-broker", "two-brokers"])
async def test_streams_of_cells_on_brokers_of_ones_own_are_named_by_flags(site: Site, *, apart: bool) -> None:
    home, other = (each.nats_url for each in site.deployment.state.cells)
    name = f"own{int(apart)}"
    there: tuple[str, ...] = ("--nats-url", home, "--namespace", name, "--cells", "2")
    there += ("--cell-nats-urls", other) if apart else ()
    said = await command(site.deployment, "streams", "apply", *there)
    assert f"created {name}_REQUESTS" in said
    assert f"created {name}-1_REQUESTS" in said
    uses = {each["name"]: each for each in await listed(site.deployment, "streams", "list", *there)}
    own = {each["name"]: each for each in await listed(site.deployment, "streams", "list")}
    for stream in (f"{name}_DONE", f"{name}-1_DONE"):
        assert uses[stream]["max_bytes"] == own["ps_DONE"]["max_bytes"]
    assert f"{name}-1_DONE" not in await command(site.deployment, "streams", "list", *there[:4])


async def test_requests_of_both_cells_are_forgotten(site: Site) -> None:
    ids = [site.of_cell(cell)[-1] for cell in (0, 1)]
    before = {each["id"] for each in await listed(site.deployment, "requests", "-n", "0")}
    said = await command(site.deployment, "forget", "--yes", *ids)
    assert "of 2 requests" in said
    left = {each["id"] for each in await listed(site.deployment, "requests", "-n", "0")}
    assert before - left == set(ids)


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def gateways(deployment: Deployment) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of the two gateways; the first is nearest to the first cell, the second to the second."""
    made = [httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) for url in deployment.urls]
    seeds = itertools.count(1000)

    async def settled() -> bool:  # each has heard of the workers and the router of its nearest cell
        return [cell_in(request_id(await said(http, chat(next(seeds))))) for http in made] == [0, 1]

    await until(settled, "each gateway uses its nearest cell")
    yield made
    for each in made:
        await each.aclose()


def chat(seed: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": words(20, seed)}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": COUNT, **more}


async def said(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = await ok(http.post("/v1/chat/completions", json=body, headers=headers))
    found: dict[str, Any] = answer.json()
    return found


def request_id(answer: dict[str, Any]) -> str:
    return str(answer["id"]).removeprefix("chatcmpl-")


async def test_each_gateway_answers_from_its_nearest_cell_and_finds_the_requests_of_both(
    gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    bodies = [chat(1), chat(2)]
    answers = [await said(http, body) for http, body in zip(gateways, bodies, strict=True)]
    assert [cell_in(request_id(each)) for each in answers] == [0, 1]
    for answer, body in zip(answers, bodies, strict=True):
        text = answer["choices"][0]["message"]["content"]
        assert text.strip() == oracle.answer(body, COUNT).strip()
        for http in gateways:
            found = await ok(http.get(f"/v1/requests/{request_id(answer)}"))
            assert found.json()["id"] == request_id(answer)
            stream = await http.get(f"/v1/requests/{request_id(answer)}/stream")
            assert joined(parse_sse(stream.content)).strip() == text.strip()


async def test_the_list_has_the_requests_of_both_cells_the_newest_first(gateways: list[httpx.AsyncClient]) -> None:
    sent = [request_id(await said(gateways[number % 2], chat(10 + number, user="lister"))) for number in range(6)]
    for http in gateways:
        found, after = list[str](), ""
        while True:
            page = (await http.get("/v1/requests", params={"user": "lister", "limit": 2, "after": after})).json()
            assert len(page["data"]) <= 2
            found += [each["id"] for each in page["data"]]
            after = page["next_after"]
            if not after:
                break
        assert found == sent[::-1]


async def test_a_key_stands_for_one_request_at_every_gateway(gateways: list[httpx.AsyncClient]) -> None:
    key = {"Idempotency-Key": "once"}
    first, second, *late = await asyncio.gather(*(said(http, chat(30), **key) for http in (*gateways, *gateways)))
    assert {request_id(each) for each in (first, second, *late)} == {request_id(first)}
    assert request_id(await said(gateways[1 - cell_in(request_id(first))], chat(30), **key)) == request_id(first)


async def test_a_response_is_continued_at_the_other_gateway(gateways: list[httpx.AsyncClient]) -> None:
    here, there = gateways[1], gateways[0]
    first = (await here.post("/v1/responses", json={"model": "tiny", "input": "hello", "max_output_tokens": 4})).json()
    body = {"model": "tiny", "input": "and?", "previous_response_id": first["id"], "max_output_tokens": 4}
    second = await ok(there.post("/v1/responses", json=body))
    assert [cell_in(each["id"].removeprefix("resp_")) for each in (first, second.json())] == [1, 0]
    assert (await here.delete(f"/v1/responses/{second.json()['id']}")).status_code == 200
    assert (await there.get(f"/v1/responses/{second.json()['id']}")).status_code == 404


async def used(http: httpx.AsyncClient, at_least: int = 0) -> dict[str, int]:
    """What both cells count, once that is so many requests."""
    found: dict[str, int] = {}

    async def counted() -> bool:
        page = (await http.get("/v1/usage", params={"bucket_width": "1mo"})).json()
        results = [each for bucket in page["data"] for each in bucket["results"]]
        names = ("num_model_requests", "input_tokens", "output_tokens")
        found.update({name: sum(each[name] for each in results) for name in names})
        return found["num_model_requests"] >= at_least

    await until(counted, f"{at_least} requests are counted")
    return dict(found)


async def more_counted(deployment: Deployment) -> dict[str, int]:
    """How much more both cells have counted than they have records of: what was deleted, once all is counted."""
    async with contextlib.AsyncExitStack() as stack:
        buses = []
        for cell, each in enumerate(deployment.state.all_cells):
            namespace = cell_namespace(deployment.state.namespace, cell)
            bus = await connect(each.nats_url, role="operator", name="test", namespace=namespace)
            buses.append(await stack.enter_async_context(bus))
        return await surplus(buses)


async def test_usage_is_the_sum_of_both_cells_with_the_lines_of_a_batch(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    deleted = await more_counted(deployment)
    before = await used(gateways[0])
    chats = [await said(gateways[number % 2], chat(40 + number)) for number in range(4)]
    assert {cell_in(request_id(each)) for each in chats} == {0, 1}
    told = [each["usage"] for each in chats]
    bodies = [chat(100 + number) for number in range(60)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    form = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    source = (await gateways[1].post("/v1/files", files=form, data={"purpose": "batch"})).json()
    asked = {"input_file_id": source["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await gateways[0].post("/v1/batches", json=asked)).json()

    async def over() -> Any:
        now = (await gateways[1].get(f"/v1/batches/{batch['id']}")).json()
        return now if now["status"] == "completed" else None

    ended = await until(over, "the batch has ended")
    assert ended["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    content = (await gateways[0].get(f"/v1/files/{ended['output_file_id']}/content")).text
    output = [json.loads(line) for line in content.splitlines()]
    answers = [each["response"]["body"] for each in output]
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["choices"][0]["message"]["content"] == oracle.answer(body, COUNT)
    told += [answer["usage"] for answer in answers]
    after = await used(gateways[1], before["num_model_requests"] + 64)
    assert after["num_model_requests"] == before["num_model_requests"] + 64
    assert after["input_tokens"] - before["input_tokens"] == sum(each["prompt_tokens"] for each in told)
    assert after["output_tokens"] - before["output_tokens"] == sum(each["completion_tokens"] for each in told)
    assert await more_counted(deployment) == deleted


async def test_the_nats_door_at_home_accepts_into_every_cell(deployment: Deployment) -> None:
    nc = await nats.connect(deployment.state.client_nats_url)
    try:
        body = b'{"model": "tiny", "prompt": "hello", "max_tokens": 3}'
        replies = [await nc.request("ps.ask.tiny", body, timeout=20) for _ in range(8)]
        ids = [dict(reply.headers or {})["Penstock-Request-Id"] for reply in replies]
        assert {cell_in(each) for each in ids} <= {0, 1}
    finally:
        await nc.close()


async def test_without_workers_in_its_nearest_cell_a_gateway_uses_the_other(
    deployment: Deployment, gateways: list[httpx.AsyncClient]
) -> None:
    seeds = itertools.count(50)

    async def cell() -> int:
        return cell_in(request_id(await said(gateways[1], chat(next(seeds)))))

    own = {"worker-1", "worker-3"}

    async def is_lost() -> bool:
        workers = (await gateways[1].get("/health")).json()["components"]
        return not {each["name"] for each in workers} & own

    assert await cell() == 1
    pids = [each.pid for each in deployment.state.processes if each.name in own and each.pid]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        await until(is_lost, "the workers' leases end")
        assert [await cell() for _ in range(3)] == [0, 0, 0]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    async def is_back() -> bool:
        return await cell() == 1

    await until(is_back, "the workers take requests again")


async def test_a_gateway_starts_without_the_broker_of_a_cell_and_uses_it_once_it_is_there(
    deployment: Deployment, make_broker: Callable[..., EmbeddedNats]
) -> None:
    server = make_broker("late", namespace="ps-1", port=free_port())
    await asyncio.to_thread(lambda: asyncio.run(server.start()))  # for its passwords
    url = server.url("operator")
    await apply_at(url, server.subjects, cells=2)
    await asyncio.to_thread(lambda: asyncio.run(server.stop()))
    flags = ("--cells", "2", "--nearest-cell", "1", "--cell-nats-urls", url, "--http-port", str(free_port()))
    process = deployment.also("gateway", *flags, "--name", "early")
    await asyncio.to_thread(process.wait_for, "gateway_listening")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{flags[-1]}", trust_env=False, timeout=30) as http:
        found = request_id(await said(http, chat(70)))
        assert cell_in(found) == 0
        there = in_cell(found, 1)
        refused = await http.get(f"/v1/requests/{there}")
        assert (refused.status_code, "cell 1" in refused.text) == (503, True), refused.text
        await asyncio.to_thread(lambda: asyncio.run(server.start()))

        async def opened() -> bool:
            return (await http.get(f"/v1/requests/{there}")).status_code == 404

        await until(opened, "the cell is used")
        assert cell_in(request_id(await said(http, chat(71)))) == 0, "it has no workers"
    assert await asyncio.to_thread(process.stop) == 0


async def test_a_gateway_with_fewer_active_cells_uses_these_only_and_finds_the_requests_of_all(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    before = request_id(await said(gateways[1], chat(80)))
    assert cell_in(before) == 1
    port, url = str(free_port()), deployment.state.cells[1].nats_url
    cells = ("--cells", "2", "--active-cells", "1", "--nearest-cell", "1", "--cell-nats-urls", url)
    process = deployment.also("gateway", *cells, "--http-port", port, "--name", "fewer")
    await asyncio.to_thread(process.wait_for, "gateway_listening")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as http:
        assert [cell_in(request_id(await said(http, chat(81 + number)))) for number in range(4)] == [0] * 4
        stream = await http.get(f"/v1/requests/{before}/stream")
        assert joined(parse_sse(stream.content)).strip() == oracle.answer(chat(80), COUNT).strip()
    assert await asyncio.to_thread(process.stop) == 0


# -- keys: last, since gateways demand them from then on --------------------------------------------------------------


async def test_a_key_is_made_at_home_and_demanded_by_gateways_of_every_cell(site: Site) -> None:
    key = (await command(site.deployment, "keys", "create", "--quiet")).strip()
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        for url in site.deployment.urls:

            async def is_demanded(url: str = url) -> bool:
                return (await http.get(f"{url}/v1/models")).status_code == 401

            await until(is_demanded, "the gateway knows of the key")
            await ok(http.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}))
