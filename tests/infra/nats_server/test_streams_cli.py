"""``penstock streams`` on a real nats-server."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
from msgspec.structs import replace
from nats.aio.client import Client
from nats.errors import NoRespondersError

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.jetstream_api import request
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.streams import run_list, run_set
from penstock.schemas.fleet import Registration
from penstock.schemas.routers import Member
from penstock.schemas.streams import DAY, GIB, HOUR, MIB, topology
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import encode
from tests.infra.bus.support import eventually
from tests.infra.nats_server.support import lose_store
from tests.penstock.log_tools.requests.support import accept
from tests.pipeline.support import Process


def where(bus: Bus, broker: EmbeddedNats) -> list[str]:
    return ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace]


async def listed(bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert await asyncio.to_thread(run_list, ["--json", *where(bus, broker)]) == 0
    uses = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {use["name"].partition("_")[2]: use for use in uses}


async def test_streams_are_listed_with_what_they_hold_and_their_limits(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    await accept(bus)
    use = (await listed(bus, broker, capsys))["REQUESTS"]
    assert (use["messages"], use["last_seq"], use["max_age_s"], use["max_bytes"]) == (1, 1, 7 * DAY, 4 * GIB)
    assert 0 < use["oldest_s"] < 60
    assert await asyncio.to_thread(run_list, where(bus, broker)) == 0
    shown = capsys.readouterr().out
    assert "accepted requests" in shown
    assert "7 d" in shown


async def test_processes_wait_for_streams_that_are_made_after_the_broker_started(
    broker: EmbeddedNats, nc: Client, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start that failed would be tried again by Kubernetes later and later."""
    async with await connect(broker.url(), role="operator", name="x", namespace=subjects.namespace) as bus:
        early, real = iter((NoRespondersError(), b'{"error":{"code":503,"err_code":10008}}')), bus.nc.request

        async def answer_late(*args: Any, **options: Any) -> Any:  # as of a cluster that has not elected its leader yet
            if isinstance(answer := next(early, None), Exception):
                raise answer
            return SimpleNamespace(data=answer) if answer else await real(*args, **options)

        monkeypatch.setattr(bus.nc, "request", answer_late)
        with structlog.testing.capture_logs() as logged:
            waiting = asyncio.create_task(bus.await_streams(60))
            await eventually(lambda: any(each["event"] == "streams_awaited" for each in logged))
        assert not waiting.done()
        done = await apply(nc, topology(subjects))
        assert done[-1] == f"created {subjects.awaited}", "what is waited for is made last"
        await asyncio.wait_for(waiting, 10)
        await asyncio.wait_for(bus.await_streams(60), 10)


async def test_limits_that_were_set_stay_when_the_streams_are_applied_again(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["TOKENS", "--max-age", "2h", "--max-bytes", "64MiB"]
    assert await asyncio.to_thread(run_set, [*flags, *where(bus, broker)]) == 0
    assert "keeps messages for 2 h, at most 64.0 MiB" in " ".join(capsys.readouterr().out.split())
    await apply(bus.nc, topology(bus.subjects, record=True))
    uses = await listed(bus, broker, capsys)
    tokens = uses["TOKENS"]
    assert (tokens["max_age_s"], tokens["max_bytes"]) == (2 * HOUR, 64 * MIB)
    assert tokens["operator_set"] == ["max_age", "max_bytes"]
    assert uses["WORK"]["max_age_s"] == 7 * DAY, "--record applies to what nobody has set"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["TOKENS"], "give --max-age, --max-bytes or --pack-prompts"),
        (["TOKENS", "--max-age", "5m"], "at least 1 h"),
        (["DONE", "--max-bytes", "1kB"], "at least 16 MiB"),
        (["NONE", "--max-age", "2h"], "REQUESTS, WORK"),
        (["DONE", "--max-age", "soon"], "is not a duration"),
        (["DONE", "--max-age", "999999999d"], "at most 36500d"),
        (["DONE", "--max-bytes", "99999999TiB"], "1048576TiB"),
        (["other_DONE", "--max-age", "2h"], "another namespace"),
    ],
)
async def test_impossible_limits_are_refused_in_one_line(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    assert await asyncio.to_thread(run_set, [*flags, *where(bus, broker)]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


async def test_prompts_are_not_packed_while_an_earlier_build_runs(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could not read the requests, and whoever asked had no answer."""
    flags, subjects = ["REQUESTS", "--pack-prompts", *where(bus, broker)], bus.subjects
    assert await asyncio.to_thread(run_set, flags) == 0
    worker = Registration("w-1", "tiny", "aggregated", "mock", 1, 32, 100, 8, 4096, reads_packed=True)
    router = Member("r-1", 1, reads_packed=True)
    for stored in ((worker, router), (replace(worker, reads_packed=False), router), (worker, Member("r-1", 1))):
        for bucket, key, value in zip(("workers", "routers"), ("w-1", "r-1"), stored, strict=True):
            await bus.js.publish(f"$KV.{subjects.bucket(bucket)}.{key}", encode(value))
        status = await asyncio.to_thread(run_set, flags)
        said = capsys.readouterr().err
        assert status == int(stored != (worker, router)), said
    assert "r-1 may be of builds that cannot read packed prompts" in said
    assert await asyncio.to_thread(run_set, [*flags, "--yes"]) == 0


async def test_a_size_that_is_raised_is_warned_of(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, warned in (("64MiB", False), ("64MiB", False), ("96MiB", True), ("32MiB", False)):
        assert await asyncio.to_thread(run_set, ["DONE", "--max-bytes", size, *where(bus, broker)]) == 0
        error = capsys.readouterr().err
        assert ("raises the limit" in error and "from 64.0 MiB to 96.0 MiB" in error) is warned, error


async def test_limits_that_delete_messages_need_a_yes(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = bus.subjects.stream("REQUESTS")
    for _ in range(3):
        await bus.js.publish(bus.subjects.request("tiny", "standard", "abc"), bytes(7 * MIB))
    flags = ["REQUESTS", "--max-bytes", "16MiB", *where(bus, broker)]
    assert await asyncio.to_thread(run_set, flags) == 1
    assert "--yes" in capsys.readouterr().err
    assert (await request(bus.nc, f"STREAM.INFO.{stream}", {}))["state"]["messages"] == 3
    assert await asyncio.to_thread(run_set, [*flags, "--yes"]) == 0
    assert (await request(bus.nc, f"STREAM.INFO.{stream}", {}))["state"]["messages"] == 2


def test_a_broker_that_lost_its_store_has_its_streams_again_and_a_folder_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_NATS_URL", "nats://127.0.0.1:1")  # of another deployment
    data_dir = tmp_path / "data"
    broker = Process(tmp_path / "nats.log", "nats", "--data-dir", str(data_dir), "--namespace", "other")
    try:
        broker.wait_for("passwords of")
        lose_store(data_dir)
        broker.wait_for("streams_made_again")
        assert main(["streams", "apply", "--data-dir", str(data_dir), "--namespace", "other"]) == 0
        assert capsys.readouterr().out == "nothing to do: all streams of namespace 'other' are there\n"
    finally:
        broker.stop()
    assert main(["streams", "apply", "--data-dir", str(tmp_path / "none")]) == 1
    assert "no deployment in" in capsys.readouterr().err
