"""The operator's commands on a deployment in two cells: none of them needs to know about namespaces."""

import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import connect
from penstock.infra.bus.direct_get import get_last
from penstock.schemas.requests import cell_in
from penstock.schemas.tenants import decode as decode_limits
from tests.penstock.log_tools.traces.collector import Collector
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import ROOT, Deployment, until, words

COUNT = 4  # requests, every other one in each cell


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
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--cells", "2", "--gateways", "2", "--workers", "4", "--mock-speedup", "0")


@pytest.fixture(scope="module")
def site(deployment: Deployment) -> Site:
    ids = []
    with httpx.Client(trust_env=False, timeout=30) as http:
        for number in range(COUNT):
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
    assert uses["ps_DONE"] == COUNT
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
    assert uses["ps_DONE"]["messages"] + uses["ps-1_DONE"]["messages"] == COUNT
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


async def test_a_key_is_made_at_home_and_demanded_by_gateways_of_every_cell(site: Site) -> None:
    key = (await command(site.deployment, "keys", "create", "--quiet")).strip()
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        for url in site.deployment.urls:

            async def is_demanded(url: str = url) -> bool:
                return (await http.get(f"{url}/v1/models")).status_code == 401

            await until(is_demanded, "the gateway knows of the key")
            answer = await http.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
