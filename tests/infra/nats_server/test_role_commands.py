"""Each command works with the role that it is for, on a real broker, and says which one it needs with another."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest

from penstock.cli import commands
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import stream_end
from penstock.infra.nats_server import permissions
from penstock.infra.nats_server.jetstream_api import request as ask_broker
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.sources.open_log import LogSource, open_log, running
from penstock.log_tools.traces.follow import PositionStore, TracePosition, begin
from penstock.operate.doctor.doctor_command import examine
from penstock.operate.doctor.finding import CheckStatus
from penstock.planner.loop import PlannerLoop
from penstock.planner.worker_counts import Planner
from penstock.schemas import control, wire
from penstock.schemas.errors import ServingError
from penstock.schemas.plans import Planned
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, end
from tests.penstock.operate.dashboard.test_dashboard import serving
from tests.penstock.planner.test_loop import RULES, TIMINGS, Workers, keep_serving, register

MakeBroker = Callable[..., EmbeddedNats]
S = Subjects()


@pytest.fixture
async def bus(make_broker: MakeBroker) -> Bus:
    """The operator's, on a server of its own: only there roles are those of the namespace."""
    server = make_broker()
    await server.start()
    async with opened(server, S) as bus:
        bus.own_server = server  # type: ignore[attr-defined]
        yield bus  # type: ignore[misc]


def url(bus: Bus, role: str) -> str:
    server: EmbeddedNats = bus.own_server  # type: ignore[attr-defined]
    return server.url(role)


async def run(*argv: str) -> int:
    return await asyncio.to_thread(commands.main, argv)


COMMANDS: tuple[tuple[str, Sequence[str]], ...] = (
    ("viewer", ("top", "--once", "--json", "--interval", "200ms")),
    ("viewer", ("streams", "list", "--json")),
    ("viewer", ("plan", "--history")),
    ("keys", ("keys", "list")),
    ("keys", ("keys", "create", "--quiet")),
    ("reader", ("requests", "--json")),
    ("reader", ("tail", "done", "--json")),
    ("reader", ("dead", "list")),
    ("reader", ("leases",)),
    ("reader", ("export", "--all", "--output", "FOLDER/log.gz")),
)


@pytest.mark.parametrize(("role", "argv"), COMMANDS, ids=lambda value: " ".join(value[:2]) if value else "")
async def test_a_command_works_with_the_least_role_and_names_it_to_others(
    bus: Bus, tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, argv: Sequence[str]
) -> None:
    asked = await accept(bus)
    await end(bus, asked, 1, 2)
    flags = [each.replace("FOLDER", str(tmp_path)) for each in argv]
    assert await run(*flags, "--nats-url", url(bus, role)) == 0, capsys.readouterr()
    capsys.readouterr()
    other = "planner" if role != "keys" else "viewer"
    if argv == ("plan", "--history"):
        other = "keys"
    began = time.monotonic()
    assert await run(*flags, "--nats-url", url(bus, other)) == 1
    said = capsys.readouterr().err
    assert f"the role {role} or operator" in said, said
    assert f"refuses {other} what" in said
    if argv[0] != "plan":  # whose own log this is
        assert "bus_error" not in said, "the sentence says it"
    assert time.monotonic() - began < 30, "it does not wait for answers that never come"


async def test_a_connection_with_a_name_of_its_own_is_refused_as_its_command(bus: Bus, tmp_path: Path) -> None:
    """The text named `penstock trace:trace`."""
    with pytest.raises(ServingError, match="what `penstock trace` needs"):
        async with open_log(LogSource(tmp_path, url(bus, "keys")), name="trace:mine", role="reader") as log:
            await stream_end(log.bus, bus.subjects.stream("DONE"))


@pytest.mark.parametrize(
    "argv",
    [("tenants", "list"), ("tenants", "add", "acme"), ("tenants", "remove", "acme"), ("streams", "apply")],
    ids=" ".join,
)
async def test_a_command_of_the_operator_is_refused_at_once_to_who_manages_keys(
    bus: Bus, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: Sequence[str]
) -> None:
    """They waited for answers that never come, and said that the broker had timed out."""
    place = () if argv[0] == "streams" else ("--data-dir", str(tmp_path))
    began = time.monotonic()
    assert await run(*argv, "--nats-url", url(bus, "keys"), *place) == 1
    said = capsys.readouterr().err
    assert f"refuses keys what `penstock {argv[0]} {argv[1]}` needs" in said, said
    assert "credentials of the role operator;" in said
    assert time.monotonic() - began < 4, "an answer would be waited for for 5 s"


async def test_a_key_for_a_model_that_nobody_serves_is_made_with_a_warning(
    bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--nats-url", url(bus, "keys"))

    async def said(*argv: str) -> tuple[str, str]:
        assert await run("keys", *argv, *place) == 0
        read = capsys.readouterr()
        return read.out, read.err

    out, err = await said("create", "--quiet", "--models", "early")
    assert err == "warning: no worker serves 'early' now (no worker is there): requests for it get 404 until one does\n"
    await register(bus, "w-1")
    out, err = await said("create", "--quiet", "--models", "tiny,nosuch")
    assert out.startswith("pst-")
    assert "serves 'nosuch' now (served are tiny)" in err
    prefix = out.split("-")[0] + "-" + out.removeprefix("pst-")[:12]
    assert (await said("create", "--quiet", "--models", "tiny"))[1] == ""
    assert (await said("create", "--quiet"))[1] == ""
    assert "serves 'other' now" in (await said("set", prefix, "--models", "other"))[1]
    assert (await said("set", prefix, "--rpm", "5"))[1] == ""
    assert (await said("set", prefix, "--models", "all"))[1] == ""


async def test_a_key_is_made_on_a_broker_that_does_not_let_its_maker_see_workers(
    make_broker: MakeBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that an earlier release has configured."""
    known = permissions._keys
    monkeypatch.setattr(permissions, "_keys", lambda s: known(s)[:-1])
    server = make_broker()
    await server.start()
    async with opened(server, S):
        assert await run("keys", "create", "--quiet", "--models", "nosuch", "--nats-url", server.url("keys")) == 0
    read = capsys.readouterr()
    assert read.out.startswith("pst-")
    assert "warning: no worker" not in read.err


async def test_a_dashboard_of_a_viewer_shows_the_overview_and_says_what_the_other_pages_need(bus: Bus) -> None:
    asked = await accept(bus)
    await end(bus, asked, 1, 2)
    async with await connect(url(bus, "viewer"), role="viewer", name="dashboard") as own, serving(own) as here:
        assert (await here.client.get("/")).status_code == 200
        async with asyncio.timeout(20), here.client.stream("GET", "/live") as changes:
            assert "event: live" in [line async for line in first_lines(changes, 5)]
        for path in ("/requests", f"/requests/{asked.id}", "/leases"):
            answer = await here.client.get(path)
            assert answer.status_code == 403, answer.text
            assert "credentials of the role reader or operator" in answer.text
        several = await asyncio.gather(*(here.client.get("/requests") for _ in range(8)))
        assert {answer.status_code for answer in several} == {403}
    async with await connect(url(bus, "reader"), role="reader", name="dashboard") as own, serving(own) as here:
        assert asked.id in (await here.client.get("/requests")).text


async def first_lines(answer: httpx.Response, count: int) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        yield line
        count -= 1
        if not count:
            return


async def test_a_command_on_a_data_folder_connects_with_the_least_role(
    bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    server: EmbeddedNats = bus.own_server  # type: ignore[attr-defined]
    assert running(LogSource(server.data_dir), server.data_dir, "viewer") == (server.url("viewer"), "ps")
    assert await run("top", "--once", "--json", "--interval", "200ms", "--data-dir", str(server.data_dir)) == 0
    assert json.loads(capsys.readouterr().out)["namespace"] == "ps"


async def test_a_viewer_sees_how_requests_end_and_not_what_is_in_them(
    bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    top = asyncio.create_task(run("top", "--once", "--json", "--interval", "1s", "--nats-url", url(bus, "viewer")))
    ends = 0
    while not top.done():
        asked = await accept(bus, user="somebody")
        await end(bus, asked, 1, 2, 3)
        ends += 1
        await asyncio.sleep(0.01)
    assert await top == 0
    seen = json.loads(capsys.readouterr().out)
    assert 0 < len(seen["recent"]) <= ends
    last = seen["recent"][0]
    assert (last["state"], last["completion_tokens"], last["model"]) == ("done", 3, asked.model)
    assert not last.get("user")
    assert seen["rates"]["ttft_p50_ms"] > 0


async def test_doctor_needs_no_more_than_a_viewer(bus: Bus, tmp_path: Path) -> None:
    examined = await examine(LogSource(tmp_path, url(bus, "viewer")))
    found = {finding.check: finding.status for finding in examined.findings}
    assert (found["broker"], found["broker settings"], found["streams"]) == (
        CheckStatus.ok,
        CheckStatus.ok,
        CheckStatus.ok,
    )
    assert found["router"] is CheckStatus.problem, "none runs, which can be seen"
    await accept(bus)
    stream = bus.subjects.stream("REQUESTS")
    config = (await ask_broker(bus.nc, f"CONSUMER.INFO.{stream}.router-standard", {}))["config"]
    await bus.js.delete_consumer(stream, "router-standard")
    again = {"stream_name": stream, "config": config | {"deliver_policy": "by_start_sequence", "opt_start_seq": 2}}
    await ask_broker(bus.nc, f"CONSUMER.CREATE.{stream}.router-standard", again)  # as a router makes it again
    await accept(bus)
    examined = await examine(LogSource(tmp_path, url(bus, "viewer")))
    (seen,) = (each for each in examined.findings if each.check == "router")
    assert seen.what == "no router takes requests; 1 wait", "messages themselves may not be read"
    refused = await examine(LogSource(tmp_path, url(bus, "keys")))
    assert any("the role viewer or operator" in finding.what for finding in refused.findings)


async def test_a_planner_plans_and_drains_with_its_own_role(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    await register(bus, "w-1")
    orders: list[control.Drain] = []

    async def obey(message: object) -> None:
        orders.append(control.decode_worker(message.data))  # type: ignore[attr-defined, arg-type]
        await bus.nc.publish(message.reply, wire.encode(control.Ok()))  # type: ignore[attr-defined]

    await bus.nc.subscribe(S.drain("w-1"), cb=obey)
    refusals: list[str] = []
    said: list[Planned] = []
    load = asyncio.create_task(keep_serving(bus))
    async with await connect(url(bus, "planner"), role="planner", name="plan") as own:
        own.on_refused.append(refusals.append)
        planner = Planner(RULES, TIMINGS)  # type: ignore[arg-type]
        loop = PlannerLoop(own, planner, Workers(), planner_id="plan-1", model="tiny", say=said.append)
        async with asyncio.timeout(30):
            await loop.run(decisions=2)
    load.cancel()
    assert len(said) == 2
    assert said[-1].decision.observed.ttft is not None
    assert not refusals
    assert await run("drain", "w-1", "--force", "--timeout", "1s", "--nats-url", url(bus, "planner")) == 1
    assert "w-1 still runs" in capsys.readouterr().err, "by its id, for it has no name"
    assert orders == [control.Drain(stay_down=True)], "it goes on running, but it was told"


async def test_an_exporter_of_traces_keeps_its_position_with_the_role_of_readers(bus: Bus) -> None:
    refusals: list[str] = []
    async with await connect(url(bus, "reader"), role="reader", name="trace") as own:
        own.on_refused.append(refusals.append)
        store = PositionStore(own, "night")
        assert await store.load() is None
        await store.save(TracePosition(7, 8))
        assert await store.load() == TracePosition(7, 8)
        assert (await begin(own, None)).done_seq == 0
    assert not refusals
