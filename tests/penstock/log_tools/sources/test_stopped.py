"""Reading the log of a deployment that does not run: from a copy of its data, however old that is."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.infra.bus.connection import connect
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server import datadir
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.binary import TESTED, dotted
from penstock.infra.nats_server.datadir import DataDirUnusable, Lock
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.requests import inspect, leases
from penstock.log_tools.sources import data_folder
from penstock.log_tools.sources.data_folder import STREAMS_DIR, CopyFailed, namespaces
from penstock.log_tools.sources.highway_hash import highway_hash_64
from penstock.log_tools.sources.open_log import LogSource, open_log
from penstock.log_tools.timeline.read import read_timeline
from penstock.log_tools.traces.follow import Following, TracePosition
from penstock.operate import streams
from penstock.schemas.done import Done, Timings
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_MSG_ID
from penstock.schemas.transfer import Handoff, Handoffs
from penstock.schemas.wire import encode
from tests.conftest import outside
from tests.penstock.log_tools.requests.ageing import age
from tests.penstock.log_tools.traces import samples
from tests.penstock.log_tools.traces.test_follow import Sent, accept, place

WEEK_NS = 7 * 86400 * 10**9
DAY_NS = 86400 * 10**9


async def stored(server: EmbeddedNats, aged_ns: int = 0) -> GenerateRequest:
    """Run one request's messages into a broker's log and stop it; the request is as old as its messages will be."""
    await server.start()
    bus = await connect(server.url(), role="operator", name="test", namespace=server.subjects.namespace)
    await apply(bus.nc, topology(bus.subjects))
    now = time.time_ns() - aged_ns
    asked = samples.request(id=new_request_id(now), created_ns=now)
    await accept(bus, asked)
    await place(bus, asked)
    ticket = f"{asked.id}:1:decode"
    offer = Handoff(ticket, "offered", "p-1", "d-1", now, 4, 4096, lease_ns=now + 30 * 10**9, pool="kv")
    await bus.js.publish(bus.subjects.handoff("p-1"), encode(Handoffs("p-1", (offer,))))
    end = Done(asked.id, asked.model, 1, "w-1", timings=Timings(now, ended_ns=now + 10**9), submitted=encode(asked))
    await bus.js.publish(
        bus.subjects.done(asked.tenant, asked.model, asked.id), encode(end), headers={HEADER_MSG_ID: asked.id}
    )
    await bus.close()
    await server.stop()
    return asked


def streams_of(data_dir: Path) -> dict[str, str]:
    files = [path for path in (data_dir / STREAMS_DIR).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def test_a_stopped_deployments_log_is_read_and_left_as_it_was(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    asked = await stored(server)
    before = streams_of(server.data_dir)
    async with open_log(LogSource(server.data_dir), name="test") as log:
        assert log.stopped
        timeline = await read_timeline(log.bus, asked.id)
    assert [stage.worker for stage in timeline.stages] == ["w-1"]
    assert timeline.done is not None
    assert streams_of(server.data_dir) == before
    assert not list(server.data_dir.glob("penstock-log-*"))


async def test_messages_beyond_their_streams_age_are_read_from_the_copy_and_expire_without_it(
    make_broker: Callable[..., EmbeddedNats], tmp_path: Path
) -> None:
    server = make_broker()
    asked = await stored(server, aged_ns=8 * DAY_NS)
    for name in ("REQUESTS", "WORK", "DONE", "HANDOFF"):
        assert age(server.data_dir / STREAMS_DIR / f"ps_{name}", 8 * DAY_NS) == 1
    shutil.copytree(server.data_dir, tmp_path / "plain", ignore=shutil.ignore_patterns("nats.port", "nats.pid"))
    async with open_log(LogSource(server.data_dir), name="test") as log:
        timeline = await read_timeline(log.bus, asked.id)
        (line,) = [line async for line in read(log.bus, "ps_HANDOFF", log.bus.subjects.all("handoff"))]
        assert time.time_ns() - line.time_ns > WEEK_NS
    assert [stage.worker for stage in timeline.stages] == ["w-1"]
    assert timeline.done is not None

    plain = make_broker("plain")
    await plain.start()
    bus = await connect(plain.url(), role="operator", name="test")
    try:
        with pytest.raises(ValueError, match="no request"):
            await read_timeline(bus, asked.id)
    finally:
        await bus.close()
        await plain.stop()


async def test_traces_of_a_stopped_deployment_can_be_exported(make_broker: Callable[..., EmbeddedNats]) -> None:
    server, sent = make_broker(), Sent()
    asked = await stored(server)
    async with open_log(LogSource(server.data_dir), name="test", role="operator") as log:
        await Following(log.bus, sent, TracePosition(0, 1)).once()
    assert sent.requests == [asked.id]


def test_the_commands_read_a_stopped_deployment(
    make_broker: Callable[..., EmbeddedNats], capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_broker()
    asked = outside(stored(server, aged_ns=8 * DAY_NS))
    age(server.data_dir / STREAMS_DIR / "ps_HANDOFF", 8 * DAY_NS)
    assert inspect.run([asked.id, "--data-dir", str(server.data_dir)]) == 0
    assert "ended ok on attempt 1 at w-1" in capsys.readouterr().out
    assert leases.run(["--data-dir", str(server.data_dir)]) == 0
    out = capsys.readouterr().out
    assert "the deployment is stopped; leases as of" in out
    assert "1 open leases" in out
    assert streams.run_list(["--data-dir", str(server.data_dir), "--json"]) == 0
    uses = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {use["name"]: use["max_age_s"] for use in uses}["ps_DONE"] == 7 * 86400


def test_a_folder_that_cannot_be_written_to_is_read(
    make_broker: Callable[..., EmbeddedNats], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_broker()
    asked = outside(stored(server))
    (server.data_dir / "nats.lock").unlink()

    def refuse(path: Path) -> None:
        raise DataDirUnusable(f"{path} is not writable")

    monkeypatch.setattr(datadir, "prepare", refuse)
    assert inspect.run([asked.id, "--data-dir", str(server.data_dir)]) == 0
    assert "ended ok on attempt 1 at w-1" in capsys.readouterr().out


async def test_a_running_broker_is_asked_itself(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    asked = await stored(server)
    await server.start()
    async with open_log(LogSource(server.data_dir), name="test") as log:
        assert not log.stopped
        assert (await read_timeline(log.bus, asked.id)).done is not None


async def test_the_folder_can_be_started_while_its_copy_is_read(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    await stored(server)
    async with open_log(LogSource(server.data_dir), name="test"):
        await server.start()


async def test_a_folder_without_a_deployment_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no deployment in .* --data-dir"):
        async with open_log(LogSource(tmp_path), name="test"):
            pass
    assert os.listdir(tmp_path) == []


async def test_one_of_several_namespaces_has_to_be_chosen(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    asked = await stored(server)
    other = make_broker(namespace="other")
    await stored(other)
    assert namespaces(server.data_dir) == ["other", "ps"]
    with pytest.raises(ValueError, match="2 namespaces"):
        async with open_log(LogSource(server.data_dir), name="test"):
            pass
    with pytest.raises(ValueError, match="no streams of namespace third"):
        async with open_log(LogSource(server.data_dir, namespace="third"), name="test"):
            pass
    async with open_log(LogSource(server.data_dir, namespace="ps"), name="test") as log:
        assert (await read_timeline(log.bus, asked.id)).done is not None


async def test_a_disk_without_room_for_the_copy_is_named(
    make_broker: Callable[..., EmbeddedNats], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_broker()
    await stored(server)
    monkeypatch.setattr(data_folder, "_clone", lambda source, into: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(CopyFailed, match="1 MiB free"):
        async with open_log(LogSource(server.data_dir), name="test"):
            pass
    assert not list(server.data_dir.glob("penstock-log-*"))
    lock = Lock(server.data_dir / "nats.lock")
    lock.acquire("test")
    lock.release()


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0x907A56DE22C26E53), (1, 0x7EAB43AAC7CDDD78), (2, 0xB8D0569AB0B53D62), (3, 0x5C6BEFAB8A463D80)],
)
def test_highway_hash_gives_its_authors_results(length: int, expected: int) -> None:
    """Test vectors of google/highwayhash, ``highwayhash_test.cc``."""
    assert int.from_bytes(highway_hash_64(bytes(range(32)), bytes(range(length))), "little") == expected


async def test_the_files_of_a_later_nats_server_are_left_to_a_broker(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    asked = await stored(server)
    for version, by_files in ((dotted(TESTED), True), ("2.99.0", False)):
        with (server.data_dir / "nats.log").open("a") as log_file:
            log_file.write(f"[1] 2026/11/28 19:43:08.610075 [INF]   Version:  {version}\n")
        async with open_log(LogSource(server.data_dir), name="test", files=True) as log:
            assert (log.files is not None) == by_files
            timeline = await read_timeline(log.reader, asked.id)
        assert timeline.done is not None
