"""``penstock doctor``: one test for each cause that it names."""

import asyncio
import json
import os
import shutil
import socket
import ssl
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from penstock.configs.settings import GatewaySettings
from penstock.infra.bus import audit
from penstock.infra.bus.client import BusClient
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.jetstream import STREAM_NOT_FOUND
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.jetstream_api import existing_config
from penstock.infra.nats_server.jetstream_api import request as ask_broker
from penstock.infra.nats_server.retention import StreamUse
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.launch.readiness import get
from penstock.launch.state import DeploymentState, Running, write_state
from penstock.log_tools.sources.data_folder import STREAMS_DIR
from penstock.log_tools.sources.open_log import LogSource
from penstock.operate.doctor import finding as certificates
from penstock.operate.doctor import fleet as fleet_checks
from penstock.operate.doctor import machine
from penstock.operate.doctor.broker import (
    check_address,
    check_broker,
    check_history,
    check_stored_messages,
    check_usage,
)
from penstock.operate.doctor.doctor_command import check_logs, examine, redacted, run, write_bundle
from penstock.operate.doctor.finding import CheckResult, CheckStatus
from penstock.operate.doctor.fleet import (
    check_fleet,
    check_gateways,
    check_leases,
    check_paces,
    check_processes,
    check_resources,
    check_workers,
    find_keys,
    from_outside,
)
from penstock.operate.observe import workers
from penstock.schemas import wire
from penstock.schemas.audit import KEYS_LOST, AuditEntry
from penstock.schemas.fleet import ConnectorUse, GpuUse, Load, Registration, WeightsState, WorkerState
from penstock.schemas.routers import LostLeases
from penstock.schemas.streams import GIB, topology
from penstock.schemas.subjects import Subjects
from penstock.schemas.transfer import Endpoint, Memory
from penstock.schemas.usage import HOUR_NS, UsagePart, UsageRow
from penstock.schemas.wire import encode
from tests.cluster_support import three_nodes
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, end
from tests.penstock.log_tools.sources.test_cells import streams_of
from tests.tls_support import DAYS, TlsNats, issue
from tests.workers.support import dial


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def worker(name: str = "w-1", **more: object) -> Registration:
    fields = {"model": "m", "role": "aggregated", "engine": "mock", "epoch": 1, "block_size": 32, "total_blocks": 100,
              "slots": 8, "max_model_len": 64, "name": name}  # fmt: skip
    return Registration(name, **(fields | more))  # type: ignore[arg-type]


def statuses(findings: list[CheckResult]) -> dict[str, CheckStatus]:
    return {finding.check: finding.status for finding in findings}


@pytest.mark.parametrize(
    ("oldest_s", "size", "status", "said"),
    [
        (480.0, GIB, CheckStatus.warning, "ps_WORK keeps about 8 min at the present rate, not 24 h"),
        (480.0, GIB // 10, CheckStatus.ok, "ps_WORK keeps about 80 min at the present rate"),
        (480.0, GIB // 1000, CheckStatus.ok, "as long as it may"),
        (30.0, GIB // 10, CheckStatus.ok, "as long as it may"),  # of half a minute, nothing is concluded
    ],
)
def test_a_stream_that_is_full_before_its_messages_are_old_is_named(
    oldest_s: float, size: int, status: CheckStatus, said: str
) -> None:
    use = StreamUse("ps_WORK", "jobs", 9, size, GIB, oldest_s, 86400.0, 1)
    (finding,) = check_history([use, StreamUse("KV_ps_workers", "", 1, GIB, GIB, 480.0, 86400.0, 0)])
    assert (finding.status, said in finding.what) == (status, True), finding


@pytest.mark.parametrize(("combinations", "max_bytes", "said"), [
    (0, GIB, "as long as it may"),
    (400, GIB // 2, "as long as it may"),
    (5000, GIB // 2, "ps_USAGE holds about 33.1 d, not 397 d, with 5,000 combinations of tenant"),
    (5000, 6 * GIB, "as long as it may"),
])  # fmt: skip
def test_a_ledger_that_will_not_hold_its_months_is_named(combinations: int, max_bytes: int, said: str) -> None:
    use = StreamUse("ps_USAGE", "usage", 9, 5000, max_bytes, 480.0, 397 * 86_400.0, 1)
    finding = check_usage(use, combinations)
    warned = "not 397 d" in said
    assert (said in finding.what, finding.status) == (True, CheckStatus.warning if warned else CheckStatus.ok), finding
    assert not warned or "penstock streams set USAGE --max-bytes 6GiB" in finding.fix


async def test_the_ledger_of_usage_is_looked_at(broker: EmbeddedNats, pipeline: Subjects) -> None:
    hour = time.time_ns() // HOUR_NS
    rows = tuple(UsageRow(hour - 1, "acme", f"pst-{number}", "tiny") for number in range(3000))
    async with dial(broker, pipeline) as bus:
        await bus.js.publish(bus.subjects.usage(1), encode(UsagePart(1, rows=rows)))
        (finding,) = [each for each in await check_broker(bus) if each.check == "usage"]
    assert "with 3,000 combinations" in finding.what


# -- this machine -------------------------------------------------------------------------------------------------


def test_a_port_that_another_program_has_is_named(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    finding = machine.check_port("127.0.0.1", port)
    assert finding.status is CheckStatus.problem
    assert str(port) in finding.what
    assert "--http-port" in finding.fix


async def test_the_port_of_a_gateway_is_no_problem_where_its_deployment_runs(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a gateway's own host; to whom starts a deployment there, it is one, and so is any other program's."""
    health = b'{"status":"not ready","reasons":[],"components":[],"endpoints":[]}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 503 x\r\n\r\n" + health)
        writer.close()

    port = listening.getsockname()[1]
    monkeypatch.setattr(
        "penstock.operate.doctor.doctor_command.GatewaySettings", partial(GatewaySettings, http_port=port)
    )
    there = LogSource(tmp_path, nats_url="nats://127.0.0.1:1")

    async def found(source: LogSource, *, machine_only: bool = False) -> CheckResult:
        return next(
            each for each in (await examine(source, machine_only=machine_only)).findings if each.check == "port"
        )

    async with await asyncio.start_server(answer, sock=listening):
        runs = await found(there)
        assert (runs.status, runs.what.startswith("a gateway answers on")) == (CheckStatus.ok, True)
        for starts in (await found(there, machine_only=True), await found(LogSource(tmp_path))):
            assert (starts.status, "a gateway has it" in starts.what) == (CheckStatus.problem, True)
        health = b'{"status":"ok"}'
        assert (await found(there)).status is CheckStatus.problem


async def test_the_streams_on_the_disk_are_added_up(bus: Bus, pipeline: Subjects) -> None:
    findings = {each.check: each.what for each in await check_broker(bus)}
    assert "may grow to 31.8 GiB for each copy" in findings["stream size"]


def test_a_data_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    finding = machine.check_data_folder(tmp_path / "data")
    assert (finding.status, "is a file" in finding.what) == (CheckStatus.problem, True)


def test_a_disk_is_measured_by_what_the_streams_may_grow_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --store-size 0.8 on a disk of 1.2 GiB, at 2 and at 86 %, it spoke of 31.8 GiB and of a small disk."""

    def found(free: float, total: float, growth: machine.Growth | None) -> CheckResult:
        usage = SimpleNamespace(free=round(free * GIB), total=round(total * GIB))
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
        return machine.check_disk(tmp_path / "later", growth)

    own = machine.Growth(GIB // 100, GIB * 8 // 10)
    fits = found(1.17, 1.2, own)
    assert fits.status is CheckStatus.ok
    assert "streams have 10.2 MiB and may grow to 819 MiB" in fits.what
    small = found(0.7, 1.2, own)
    assert (small.status, "too small for the streams" in small.what) == (CheckStatus.warning, True)
    filling = found(0.168, 1.2, own)
    assert (filling.status, "filling, less than 15% is free" in filling.what) == (CheckStatus.warning, True)
    almost = found(2, 100, None)
    assert (almost.status, "almost full, less than 5% is free" in almost.what) == (CheckStatus.warning, True)
    assert len({fits.fix, small.fix, filling.fix, almost.fix}) == 4
    assert found(0.01, 1.2, own).status is CheckStatus.problem
    # It said 14 GiB, and a disk of 20 was thought to be large enough.
    before = found(20, 100, machine.PLANNED)
    assert (before.status, "may grow to 31.8 GiB" in before.what) == (CheckStatus.warning, True)
    assert "--store-size" in before.fix
    assert found(40, 100, machine.PLANNED).status is CheckStatus.ok
    assert found(20, 100, None).status is CheckStatus.ok


async def test_a_deployment_s_disk_is_measured_by_its_own_streams(make_broker: Callable[[], EmbeddedNats]) -> None:
    server = make_broker()
    await server.start()
    await apply_at(server.url(), server.subjects, store_size=0.8)
    [disk] = [each for each in (await examine(LogSource(server.data_dir))).findings if each.check == "disk"]
    assert "may grow to 815 MiB" in disk.what


def fake_smi(folder: Path, script: str) -> None:
    fake_bin(folder, "nvidia-smi", script)


def fake_bin(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("script", "check", "status"),
    [
        ("echo NVIDIA H200, 570.1, 1 MiB, 2 MiB, 3 %", "GPU driver", CheckStatus.ok),
        ("echo no devices were found >&2; exit 6", "GPU driver", CheckStatus.problem),
    ],
)
def test_a_driver_is_asked_and_its_complaint_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, check: str, status: CheckStatus
) -> None:
    fake_smi(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert statuses(machine.check_gpus({}))[check] is status


@pytest.mark.parametrize(
    ("name", "script", "status", "words"),
    [
        ("docker", "echo Server Version: 29.1", CheckStatus.ok, "docker answers"),
        (
            "docker",
            "echo Client:; echo 'ERROR: Cannot connect to its daemon' >&2",
            CheckStatus.warning,
            "Cannot",
        ),
        ("docker", "echo permission denied >&2; exit 1", CheckStatus.warning, "permission denied"),
        ("podman", "echo no subuid ranges found >&2; exit 125", CheckStatus.warning, "no subuid"),
    ],
)
def test_a_container_engine_is_asked_and_its_complaint_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str, status: CheckStatus, words: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.check_containers() == []
    fake_bin(tmp_path, name, script)
    (found,) = machine.check_containers()
    assert found.status is status
    assert words in found.what
    assert found.fix or status is CheckStatus.ok


def test_containers_without_the_toolkit_see_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_bin(tmp_path, "docker", "echo Runtimes: runc")
    fake_bin(tmp_path, "nvidia-smi", "echo NVIDIA H200")
    (found,) = machine.check_containers()
    assert "none would see this machine's GPUs" in found.what
    fake_bin(tmp_path, "docker", "echo Runtimes: nvidia runc")
    assert statuses(machine.check_containers()) == {"containers": CheckStatus.ok}


def test_hidden_gpus_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "echo NVIDIA H200")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    findings = machine.check_gpus({"CUDA_VISIBLE_DEVICES": ""})
    assert statuses(findings)["GPU"] is CheckStatus.problem
    assert statuses(machine.check_gpus({"CUDA_VISIBLE_DEVICES": "0"})).get("GPU") is None


# -- the broker ---------------------------------------------------------------------------------------------------


def test_an_unknown_host_and_a_closed_port_are_different_causes(listening: socket.socket) -> None:
    unknown = check_address("nats://no-such-host.invalid:4222")
    assert "not a known host" in unknown.what
    host, port = listening.getsockname()
    listening.close()
    assert "nothing answers" in check_address(f"nats://{host}:{port}").what


async def test_what_is_no_nats_server_is_named() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        finding = await asyncio.to_thread(check_address, f"nats://127.0.0.1:{port}")
    assert "is not a NATS server" in finding.what


async def test_a_broker_in_order_has_no_finding_but_ok(bus: Bus) -> None:
    assert set(statuses(await check_broker(bus)).values()) == {CheckStatus.ok}


async def test_missing_streams_and_consumers_are_named_with_the_command_that_makes_them(bus: Bus) -> None:
    await bus.js.delete_stream(bus.subjects.stream("HANDOFF"))
    await bus.js.delete_consumer(bus.subjects.stream("REQUESTS"), "router-batch")
    [finding] = [each for each in await check_broker(bus) if each.check == "streams"]
    assert finding.status is CheckStatus.problem
    assert "HANDOFF" in finding.what
    assert "router-batch" in finding.what
    assert "penstock streams apply" in finding.fix


async def test_a_paused_consumer_and_a_limit_that_somebody_has_set_are_named(bus: Bus) -> None:
    """With ``nats consumer pause`` and ``nats stream edit``: requests wait, or their ends are not stored."""

    async def found() -> CheckResult:
        return next(each for each in await check_broker(bus) if each.check == "streams")

    done, stream = (bus.subjects.stream(name) for name in ("DONE", "REQUESTS"))
    config = await existing_config(bus.nc, f"STREAM.INFO.{done}", STREAM_NOT_FOUND)
    assert config is not None
    await ask_broker(bus.nc, f"STREAM.UPDATE.{done}", config | {"max_msg_size": 100, "max_msgs": 5})
    finding = await found()
    assert (finding.status, finding.what) == (
        CheckStatus.warning,
        f"not as this release makes them: {done} (max_msg_size, max_msgs)",
    )
    assert await apply(bus.nc, topology(bus.subjects)) == [f"updated {done}: max_msg_size, max_msgs"]
    until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat().replace("+00:00", "Z")
    await ask_broker(bus.nc, f"CONSUMER.PAUSE.{stream}.router-standard", {"pause_until": until})
    finding = await found()
    assert finding.status is CheckStatus.problem
    assert f"{stream} router-standard" in finding.what


# -- what runs ----------------------------------------------------------------------------------------------------


async def test_a_store_that_was_removed_while_the_broker_runs_is_a_problem(
    make_broker: Callable[..., EmbeddedNats],
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, server.subjects) as bus:
        assert all(each.status is CheckStatus.ok for each in check_stored_messages([server.data_dir], everything=False))
        shutil.rmtree(server.data_dir / "nats")
        await accept(bus)  # the broker confirms it
        (found,) = check_stored_messages([server.data_dir], everything=False)
    assert (found.status, "was removed" in found.what) == (CheckStatus.problem, True)


async def test_a_single_damaged_message_is_named_while_the_broker_runs(
    make_broker: Callable[..., EmbeddedNats], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server passes over it without a word."""
    server = make_broker()
    await server.start()
    async with opened(server, server.subjects) as bus:
        ids = [(await accept(bus)).id for _ in range(4)]
        await bus.js.delete_msg(bus.subjects.stream("REQUESTS"), 2)  # the server overwrites it
        (fine,) = check_stored_messages([server.data_dir], everything=False)
        assert fine.status is CheckStatus.ok
        block = server.data_dir / STREAMS_DIR / bus.subjects.stream("REQUESTS") / "msgs" / "1.blk"
        data = bytearray(block.read_bytes())
        at = data.rindex(ids[2].encode())  # in its body
        data[at] ^= 1
        block.write_bytes(data)
        found, rest = check_stored_messages([server.data_dir], everything=False)
        assert (found.check, found.status) == ("stored messages", CheckStatus.problem)
        assert "ps_REQUESTS has 1 message with a wrong checksum in 1.blk: 3 (ps.request.tiny." in found.what
        assert rest.status is CheckStatus.ok
        await end(bus, await accept(bus))
        os.utime(block, (1, 1))
        monkeypatch.setattr("penstock.operate.doctor.broker.VERIFIED_BYTES", 1)
        (newest,) = check_stored_messages([server.data_dir], everything=False)
        assert newest.what.endswith("the newest first: `penstock doctor --verify` reads all")
        assert len(check_stored_messages([server.data_dir], everything=True)) == 2
    assert check_stored_messages([], everything=False) == []
    assert check_stored_messages([], everything=True)[0].status is CheckStatus.skipped


async def test_a_server_of_a_cluster_whose_copies_are_away_is_named_until_they_are_current(tmp_path: Path) -> None:
    async with three_nodes(tmp_path) as cluster:
        await apply_at(cluster.url(), cluster.subjects, replicas=3)
        away = (await cluster.leader("ps_DONE") + 1) % 3
        stay = [node for node in range(3) if node != away]
        bus = await connect(cluster.url(nodes=stay), role="operator", name="test", end_process=lambda _: None)  # type: ignore[arg-type, return-value]
        seen: list[CheckResult] = []

        async def wait_for(status: CheckStatus) -> None:
            async with asyncio.timeout(60):
                while [each.status for each in seen] != [status]:
                    await asyncio.sleep(0.1)
                    seen[:] = [each for each in await check_broker(bus) if each.check == "replicas"]

        try:
            await wait_for(CheckStatus.ok)
            cluster.kill(away)
            async with asyncio.timeout(60):  # others may be behind at first, since leaders are elected
                while f"the copy of node-{away} is away or behind" not in seen[0].what:
                    await wait_for(CheckStatus.warning)
                    seen[:] = [each for each in await check_broker(bus) if each.check == "replicas"]
            assert "before you stop another one" in seen[0].fix
            await cluster.restart(away)
            await wait_for(CheckStatus.ok)
        finally:
            await bus.close()


def test_processes_that_are_down_or_drained_are_named() -> None:
    processes = (Running("router-0", "router"), Running("w", "worker", drained=True), Running("g", "gateway", 7))
    down, drained = check_processes(DeploymentState("", "", "", "", "ps", "m", processes))
    assert (down.status, "router-0" in down.what) == (CheckStatus.problem, True)
    assert (drained.status, "penstock restart w" in drained.fix) == (CheckStatus.warning, True)


@pytest.mark.parametrize("pid", [7, None])
def test_a_gateway_that_leaves_is_not_missed(pid: int | None) -> None:
    processes = (Running("gateway-0", "gateway", 6), Running("gateway-1", "gateway", pid, leaving=True))
    [found] = check_processes(DeploymentState("", "", "", "", "ps", "m", processes))
    assert found.status is CheckStatus.ok
    assert "gateway-1 answers the last requests" in found.what


async def test_a_gateway_that_does_not_answer_is_a_problem(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    listening.close()
    [finding] = await check_gateways([f"http://127.0.0.1:{port}"])
    assert (finding.check, finding.status) == ("gateway", CheckStatus.problem)
    assert (await get("127.0.0.1", port, "/"))[0] == 0


async def test_a_gateway_that_answers_others_without_a_key_is_named(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"/health/ready": 200, "/v1/models": 200, "/metrics": 200}
    page = ""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        writer.write(f"HTTP/1.0 {answers[path]} -\r\n\r\n{page if path == '/metrics' else ''}".encode())
        writer.close()

    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with await asyncio.start_server(answer, sock=listening):
        assert [finding.status for finding in await check_gateways([url])] == [CheckStatus.ok]
        monkeypatch.setattr(fleet_checks, "is_loopback", lambda host: False)
        found = await check_gateways([url])
        assert "penstock keys create" in found[0].fix
        assert [finding.status for finding in found] == [CheckStatus.warning, CheckStatus.ok]
        answers["/v1/models"] = 401
        assert [finding.status for finding in await check_gateways([url])] == [CheckStatus.ok]
        monkeypatch.undo()
        page = "penstock_gateway_trusted_proxies 1.0\n"
        assert [finding.status for finding in await check_gateways([url])] == [CheckStatus.ok]
        answers["/v1/models"] = 200
        found = await check_gateways([url])
        assert [finding.status for finding in found] == [CheckStatus.warning, CheckStatus.ok]
        assert "answers everyone whom its proxies let through, without an API key" in found[0].what


async def test_a_gateway_on_all_addresses_is_seen_as_other_machines_see_it() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        writer.write(f"HTTP/1.0 {200 if path == '/health/live' else 500} -\r\n\r\n".encode())
        writer.close()

    for host, seen in (("127.0.0.1", False), ("0.0.0.0", True)):
        async with await asyncio.start_server(answer, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            found = await from_outside(f"http://127.0.0.1:{port}")
        if seen and not found:
            pytest.skip("this machine has no network")
        assert found.endswith(f":{port}") is seen
        assert not found.startswith("http://127.")


async def test_gateways_that_demand_a_key_where_there_is_none_are_named(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(url: str, path: str) -> tuple[int, bytes]:
        return (401 if path == "/v1/models" else 200), b""

    monkeypatch.setattr(fleet_checks, "get_url", answers)
    assert (await find_keys(bus)).there == 0  # as after the loss of the broker's disk
    [*_, finding] = await check_gateways(["http://127.0.0.1:1"], await find_keys(bus))
    assert (finding.check, finding.status) == ("keys", CheckStatus.warning)
    assert "`penstock keys import < FILE`" in finding.fix
    await bus.nc.jetstream().publish(f"$KV.{bus.subjects.bucket('keys')}.pst-1", b"{}")
    found = await check_gateways(["http://127.0.0.1:1"], await find_keys(bus))
    assert [each.status for each in found] == [CheckStatus.ok]


async def test_lost_keys_are_named_by_what_gateways_say_and_without_an_address_by_what_they_noted(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = b"penstock_gateway_keys_lost 1.0\n"

    async def answers(url: str, path: str) -> tuple[int, bytes]:
        return (401 if path == "/v1/models" else 200), page

    monkeypatch.setattr(fleet_checks, "get_url", answers)
    url = "http://127.0.0.1:1"
    [finding] = [each for each in await check_gateways([url], await find_keys(bus)) if each.check == "keys"]
    assert finding.status is CheckStatus.problem
    assert f"the broker has none any more: {url} refuses every request with 401" in finding.what
    assert "`penstock keys import < FILE`" in finding.fix
    assert await check_gateways([], await find_keys(bus)) == []
    await audit.write(bus.nc, bus.subjects, "gateway-2", AuditEntry("read", "/v1/requests/a"))
    for name in ("gateway-a", "gateway-b", "gateway-a"):
        await audit.write(bus.nc, bus.subjects, "gateway", AuditEntry(KEYS_LOST, name))
    [finding] = await check_gateways([], await find_keys(bus))
    assert finding.status is CheckStatus.problem
    assert "gateway-a gateway-b refuse every request" in finding.what
    page = b"penstock_gateway_keys_lost 0.0\n"  # started again without its note
    found = await check_gateways([url], await find_keys(bus))
    assert [each.status for each in found if each.check == "keys"] == [CheckStatus.warning]
    await bus.nc.jetstream().publish(f"$KV.{bus.subjects.bucket('keys')}.pst-1", b"{}")
    assert await check_gateways([], await find_keys(bus)) == []


async def test_gateways_that_differ_on_keys_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loss of the broker's disk, old gateways said 401 and new ones answered."""
    old, new = "http://127.0.0.1:1", "http://127.0.0.1:2"

    async def answer(url: str, path: str) -> tuple[int, bytes]:
        return (401 if (url, path) == (old, "/v1/models") else 200), b""

    monkeypatch.setattr(fleet_checks, "get_url", answer)
    found = [each for each in await check_gateways([old, new]) if each.status is CheckStatus.problem]
    assert len(found) == 1
    assert f"{new} answers without an API key, and others demand one" in found[0].what
    assert "--require-keys" in found[0].fix
    assert {each.status for each in await check_gateways([new, new])} == {CheckStatus.ok}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
async def test_certificates_of_a_gateway_and_of_the_broker_that_expire_are_named(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = issue(tmp_path, "both")
    monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    server = TlsNats(tmp_path / "nats", pair=pair, jetstream=False)
    await server.start()
    nc = BusClient()
    await nc.connect(server.url())

    async def found(days: float) -> list[CheckStatus]:
        then = datetime.now(UTC) + timedelta(days=days)
        monkeypatch.setattr(certificates, "now", lambda: then)
        of_gateway = await asyncio.to_thread(certificates.check_gateway_certificate, url)
        findings = [*of_gateway, *certificates.check_broker_certificate(Bus(nc, Subjects()))]
        assert {finding.check for finding in findings} == {"certificate"}
        return [finding.status for finding in findings]

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    url = f"https://127.0.0.1:{listening.getsockname()[1]}"
    async with await asyncio.start_server(hang_up, sock=listening, ssl=context):
        for days, status in ((0, CheckStatus.ok), (DAYS - 0.1, CheckStatus.warning), (DAYS + 0.1, CheckStatus.problem)):
            assert await found(days) == [status, status]
    assert certificates.check_gateway_certificate(url) == []  # it does not answer
    assert certificates.check_gateway_certificate(url.replace("https", "http")) == []
    await nc.close()
    server.kill()
    await server.stop()


async def test_a_deployment_without_routers_and_workers_names_what_to_start(bus: Bus) -> None:
    findings = {finding.check: finding for finding in await check_fleet(bus, None)}
    assert "penstock router" in findings["router"].fix
    assert "penstock worker" in findings["workers"].fix


@pytest.mark.parametrize(
    ("workers", "check", "status"),
    [
        ([worker(role="encode")], "roles", CheckStatus.problem),
        ([worker(state=WorkerState.draining)], "roles", CheckStatus.problem),
        ([worker(role="decode", transfer=Endpoint("h", "x"))], "roles", CheckStatus.warning),
        ([worker(role="prefill"), worker("w-2", role="decode")], "KV transport", CheckStatus.problem),
        ([worker(revision="a"), worker("w-2", revision="b")], "same model", CheckStatus.warning),
        ([worker(block_size=16), worker("w-2")], "same model", CheckStatus.warning),
        ([worker(kv_events=False)], "KV events", CheckStatus.warning),
        ([worker(load=Load(waiting=3, used_blocks=99))], "KV memory", CheckStatus.warning),
        ([worker(load=Load(waiting=9))], "slots", CheckStatus.warning),
        ([worker(load=Load(waiting=1, running=8)), worker("w-2")], "uneven load", CheckStatus.warning),
        ([worker(load=Load(slowest_step_ms=1500), max_batched_tokens=8192)], "chunked prefill", CheckStatus.warning),
        ([worker()], "workers", CheckStatus.ok),
    ],
)
def test_what_is_wrong_with_a_fleet_is_found(workers: list[Registration], check: str, status: CheckStatus) -> None:
    findings = check_workers(workers)
    assert statuses(findings)[check] is status
    assert all(finding.fix for finding in findings if finding.status is not CheckStatus.ok)


def moving(name: str, role: str, layout: str) -> Registration:
    return worker(name, role=role, transfer=Endpoint(name, "nixl", pools={"kv": Memory(0, 100, 10, layout=layout)}))


def test_workers_whose_kv_fits_no_partner_are_named() -> None:
    """As of a model with sliding windows, where prefill workers have --no-hybrid-kv-cache and decode workers do not."""
    one, two = moving("p-1", "prefill", "float32(3,2,8,2,16)"), moving("d-1", "decode", "float32(1,2,8,2,16)")
    found = [finding for finding in check_workers([one, two]) if finding.check == "pairs"]
    assert [finding.what.partition(" fits")[0] for finding in found] == [
        "m: the KV of p-1 (prefill)", "m: the KV of d-1 (decode)"
    ]  # fmt: skip
    assert "--hybrid-kv-cache" in found[0].fix
    fitting = moving("p-2", "prefill", "float32(1,2,8,2,16)")
    (finding,) = (each for each in check_workers([one, two, fitting]) if each.check == "pairs")
    assert "p-1 (prefill)" in finding.what
    assert statuses(check_workers([two, fitting])) == {"workers": CheckStatus.ok}


def gpu(number: int, used_gib: float = 40, busy: int = 0, error: str = "") -> GpuUse:
    return GpuUse(error=error) if error else GpuUse(f"GPU-{number:08d}", 80 * GIB, int(used_gib * GIB), busy)


@pytest.mark.parametrize(
    ("load", "check", "status", "said"),
    [
        (Load(gpus=(GpuUse(error="lost", host="i"),)), "GPU", CheckStatus.problem, "GPU 0 of w-1 on i cannot be read"),
        (Load(gpus=(gpu(0, error="GPU is lost"),)), "GPU", CheckStatus.problem, "GPU 0 of w-1 on h cannot be read"),
        (Load(gpus=(gpu(0, 79.5),)), "GPU memory", CheckStatus.warning, "512 MiB of 80.0 GiB free"),
        (Load(gpus=(gpu(0), gpu(1, 0.5), gpu(2, 0))), "unused GPUs", CheckStatus.warning, "sees 3 GPUs, and 2 of them"),
        (Load(connector=ConnectorUse("nixl", quarantined_blocks=4)), "KV transport", CheckStatus.warning, "4 blocks"),
        (
            Load(connector=ConnectorUse("nixl", GIB, 0, 0, 3, 40, 20)),
            *(
                "KV transport",
                CheckStatus.warning,
                "60 of 100 blocks for handoffs: 40 for readers, in 3 leases",
            ),
        ),
        (
            Load(connector=ConnectorUse("trtllm NIXL", buffer_tokens=32)),
            *("KV transport", CheckStatus.warning, "take prompts of 32 tokens"),
        ),
    ],
)
def test_what_is_wrong_with_gpus_and_connectors_of_other_machines_is_found(
    load: Load, check: str, status: CheckStatus, said: str
) -> None:
    findings = check_resources([worker("w-1", host="h", load=load)])
    found = next(each for each in findings if each.check == check)
    assert (found.status, said in found.what, bool(found.fix)) == (status, True, True), found


def test_gpus_that_workers_share_or_use_evenly_are_in_order() -> None:
    both = (gpu(0), gpu(1, 0.5))  # each worker uses one of them, and sees the other as well
    assert {each.status for each in check_resources(
        [worker("w-1", host="h", load=Load(gpus=both)), worker("w-2", host="h", load=Load(gpus=both[::-1])),
         worker("w-3", host="i", load=Load(gpus=(gpu(2, 0), gpu(3, 0)))),  # asleep
         worker("w-4", host="i", load=Load(gpus=(GpuUse("GPU-a"), GpuUse("GPU-b"))))]  # says nothing of its memory
    )} == {CheckStatus.ok}  # fmt: skip
    full = [worker(name, host="h", load=Load(gpus=(gpu(0, 80),))) for name in ("w-1", "w-2")]
    assert [each.check for each in check_resources(full)].count("GPU memory") == 1


@pytest.mark.parametrize(
    ("me", "beside", "note"),
    [
        (worker(load=Load(running=8, waiting=2)), worker("w-2"), "hot: no free slot"),
        (worker(load=Load(running=2, waiting=2, used_blocks=97)), worker("w-2"), "hot: no free KV blocks"),
        (worker(load=Load(running=8)), worker("w-2"), ""),
        (worker(), worker("w-2", load=Load(running=1)), "idle"),
        (worker(load=Load(gpus=(gpu(0, busy=90),))), worker("w-2"), "busy without requests"),
        (
            worker(load=Load(gpus=(gpu(0, busy=90),))),
            worker("w-2", load=Load(running=1, gpus=(gpu(0, busy=90),))),
            "idle",
        ),
        (worker(state=WorkerState.draining), worker("w-2"), "draining"),
        (worker(weights=WeightsState(asleep=True)), worker("w-2"), "asleep"),
    ],
)
def test_hot_and_idle_workers_are_told_apart(me: Registration, beside: Registration, note: str) -> None:
    uses = [each.use for each in check_resources([me, beside]) if each.use is not None]
    assert uses[0].note == note


async def test_what_all_workers_have_in_use_is_a_table_and_a_finding_each(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    connector = ConnectorUse("nixl", 60 * GIB, 8192, 2, 3, 40, 8, 4)
    gpus = (gpu(0, 71, 97), GpuUse("GPU-mig", 20 * GIB, GIB, host="a2"))  # of an engine on two machines
    for each in (
        worker("w-1", host="a", role="prefill", transfer=Endpoint("h", "nixl"),
               load=Load(running=8, waiting=2, used_blocks=50, gpus=gpus, connector=connector)),
        worker("w-2", host="b", role="decode", transfer=Endpoint("h", "nixl"), load=Load(gpus=(gpu(1, error="lost"),))),
        worker("w-3", host="c", engine="vllm", load=Load(connector=ConnectorUse("NixlConnector", leases=1))),
    ):  # fmt: skip
        await bus.js.publish(bus.subjects.lease(each.worker), wire.encode(each))
    flags = ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace]
    await asyncio.to_thread(run, flags)
    shown = capsys.readouterr().out
    assert "hot: w-1\nidle: w-2, w-3\n" in shown
    table = shown[shown.index("worker  role") : shown.index("\nhot: ")]
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "worker role host GPU memory busy running waiting KV in use handoff memory in handoffs note",
        "w-1 prefill a 0 71.0 GiB of 80.0 GiB 97% 8 2 50% 60.0 GiB 52 blocks hot: no free slot",
        "a2 1 1.0 GiB of 20.0 GiB ?",
        "w-2 decode b 0 lost ? 0 0 0% - - idle",
        "w-3 aggregated c - - - 0 0 0% ? 0 blocks idle",
    ]
    await asyncio.to_thread(run, [*flags, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    uses = {line["use"]["worker"]: line for line in lines if line["use"] is not None}
    assert uses["w-1"]["what"] == (
        "w-1 on a: 8 of 8 slots, 2 waiting; GPU 0 71.0 GiB of 80.0 GiB, 97% busy; GPU 1 on a2 1.0 GiB of 20.0 GiB, use "
        "unknown; nixl, 60.0 GiB registered, 8.0 KiB in buffers, 2 moving, 40 blocks pinned (3 leases), 8 reserved, "
        "4 in quarantine; hot: no free slot"
    )
    assert uses["w-1"]["use"]["gpus"][0] == {
        "id": "GPU-00000000", "total_bytes": 80 * GIB, "used_bytes": 71 * GIB, "busy_percent": 97
    }  # fmt: skip
    assert uses["w-2"]["use"]["gpus"] == [{"error": "lost"}]
    assert uses["w-3"]["use"]["connector"] == {"name": "NixlConnector", "leases": 1}
    assert "NixlConnector, size unknown, 0 blocks pinned (1 lease)" in uses["w-3"]["what"]


def test_load_is_even_while_no_worker_is_idle_or_none_has_a_queue() -> None:
    busy = worker(load=Load(waiting=1, running=8))
    for other in (worker("w-2", load=Load(running=1)), worker("w-2", role="encode"), worker("w-2", model="other")):
        assert "uneven load" not in statuses(check_workers([busy, other]))
    assert "uneven load" not in statuses(check_workers([worker(load=Load(running=8)), worker("w-2")]))


async def test_engines_whose_kv_events_do_not_arrive_are_found_by_the_counts(bus: Bus) -> None:
    me = worker(load=Load(cached_blocks=50))
    await bus.js.publish(bus.subjects.lease(me.worker), wire.encode(me))
    chain = [finding for finding in await check_fleet(bus, None) if finding.check == "KV events"]
    assert "50 blocks in 1 engine, 0 messages" in chain[0].what


# -- logs and the archive -----------------------------------------------------------------------------------------


def test_a_gpu_out_of_memory_in_a_log_comes_with_the_three_settings_to_lower(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("start\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nend\n")
    (tmp_path / "worker-1.log").write_text("CUDA out of memory\n")
    [finding] = check_logs(tmp_path)
    assert finding.status is CheckStatus.problem
    assert "worker-0.log, worker-1.log" in finding.what
    assert all(word in finding.fix for word in ("max_num_tokens", "max_batch_size", "free_gpu_memory_fraction"))


@pytest.mark.parametrize(
    ("line", "check"),
    [
        (
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a, No space left on device",
            "shared",
        ),
        ("include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device (28)", "shared"),
        ("Fatal Python error: Bus error", "shared"),
        ("[ERR] write /data/jetstream/1.blk: no space left on device", "disk"),
    ],
)
def test_shared_memory_that_is_full_is_not_called_a_full_disk(tmp_path: Path, line: str, check: str) -> None:
    (tmp_path / "worker-0.log").write_text(f"start\n{line}\nend\n")
    [finding] = check_logs(tmp_path)
    assert finding.check.startswith(check)
    assert ("--shm-size" in finding.fix) == (check == "shared")


def test_a_small_dev_shm_is_named_where_there_are_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=64 << 20))  # docker's default
    assert machine.check_shared_memory(gpus=False).status is CheckStatus.ok
    finding = machine.check_shared_memory(gpus=True)
    assert (finding.status, "64.0 MiB" in finding.what) == (CheckStatus.warning, True)
    assert "sharedMemory" in finding.fix


def test_logs_without_trouble_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("all is well\n")
    assert statuses(check_logs(tmp_path)) == {"logs": CheckStatus.ok}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (b"nats://operator:hunter2@h:4222 x", b"hunter2"),
        (b'"dashboard_url": "http://h:1/?token=hunter2"', b"hunter2"),
        (b"Authorization: Bearer hunter2", b"hunter2"),
        (b'{"api_key": "hunter2", "model": "m"}', b"hunter2"),
        (b"key pst-0a1b2c3d4e5f-hunter2hunter2 was logged", b"hunter2"),
    ],
)
def test_no_secret_gets_into_an_archive(text: bytes, secret: bytes) -> None:
    clean = redacted(text)
    assert secret not in clean
    assert b"***" in clean


def test_an_archive_has_findings_versions_and_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("nats://worker:geheim@h:1\n")
    state = DeploymentState("http://h:1", "nats://operator:geheim@h:2", "c", "s", "ps", "m")
    write_state(tmp_path / "state.json", state)
    path = tmp_path / "bundle.tar.gz"
    path.write_bytes(b"an earlier one")
    write_bundle(path, [CheckResult("a", CheckStatus.ok, "b")], tmp_path, {"streams.json": b"[]"})
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        contents = {
            name.partition("/")[2]: file.read()
            for name in archive.getnames()
            if (file := archive.extractfile(name)) is not None
        }
    assert {"findings.json", "versions.txt", "state.json", "streams.json", "logs/worker-0.log"} <= set(contents)
    assert not any(b"geheim" in data for data in contents.values())


async def test_the_command_prints_findings_and_fails_if_there_is_a_problem(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace]
    assert await asyncio.to_thread(run, flags) == 1
    shown = capsys.readouterr().out
    assert "✗ router: no router takes requests" in shown
    assert "start one: `penstock router`" in shown
    assert await asyncio.to_thread(run, [*flags, "--json"]) == 1
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"check": "clock", "status": "ok"}.items() <= next(f for f in findings if f["check"] == "clock").items()


def test_that_nothing_runs_is_a_problem_unless_only_the_machine_is_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data-dir", str(tmp_path / "typo")]
    assert run(flags) == 1
    shown = capsys.readouterr().out
    assert f"✗ deployment: no deployment in {tmp_path / 'typo'}" in shown
    assert "`penstock up` starts one" in shown
    run([*flags, "--machine", "--json"])
    checks = [json.loads(line)["check"] for line in capsys.readouterr().out.splitlines()]
    assert "deployment" not in checks
    assert "nats-server" in checks


async def test_a_broker_that_is_away_is_the_only_problem(
    listening: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    port = listening.getsockname()[1]
    listening.close()
    assert await asyncio.to_thread(run, ["--nats-url", f"nats://127.0.0.1:{port}", "--json"]) == 1
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["check"] for each in findings if each["status"] == "problem"] == ["broker"]


def test_a_worker_that_loses_its_lease_over_and_over_is_named_while_it_is_there_and_while_it_is_not() -> None:
    lost = [LostLeases(name, "aggregated", "m", count, 0) for name, count in (("w-1", 3), ("w-2", 4), ("w-3", 1))]
    there = [worker("w-1", load=Load(slowest_step_ms=6_000)), worker("w-3")]
    often, gone, once = check_leases(lost, there, 5_000_000_000)
    assert [each.status for each in (often, gone, once)] == [
        CheckStatus.problem,
        CheckStatus.problem,
        CheckStatus.warning,
    ]
    assert "w-1 lost its lease 3 times in ten minutes, 5 s ago" in often.what
    assert "slowest step within a minute took 6.00 s" in often.what
    assert "w-2 lost its lease 4 times" in gone.what
    assert "not registered now" in gone.what
    assert "once" in once.what


def test_a_worker_without_a_name_is_there_again_with_another_id() -> None:
    """Its loss had a name that no registration has: doctor and top showed one worker more, which was gone."""
    lost = [LostLeases("worker", "aggregated", "m", 1, 0)]
    there = msgspec.structs.replace(worker("worker-0badcafe"), name="")
    [finding] = check_leases(lost, [there], 0)
    assert "not registered" not in finding.what
    assert [(view.state, view.lost) for view in workers([there], [], 0.0, lost)] == [("ready", 1)]


def test_leases_that_were_lost_through_the_broker_are_blamed_on_no_worker() -> None:
    lost = [LostLeases(name, "aggregated", "m", count, 0, 2) for name, count in (("w-1", 0), ("w-2", 1), ("w-3", 0))]
    broker, own, gone = check_leases(lost, [worker("w-1"), worker("w-2")], 5_000_000_000)
    assert (broker.check, broker.status) == ("all leases", CheckStatus.warning)
    assert "all workers lost their leases at once" in broker.what
    assert "2 times in ten minutes" in broker.what
    assert "w-2 lost its lease once in ten minutes" in own.what
    assert "w-3 lost its lease with all others" in gone.what
    assert "not registered now" in gone.what
    assert statuses(check_leases(lost[:1], [worker("w-1")], 0)) == {
        "all leases": CheckStatus.warning,
        "leases": CheckStatus.ok,
    }


def test_a_worker_that_holds_its_lease_and_does_nothing_is_named() -> None:
    [finding] = check_leases([], [worker("w-1"), worker("w-2", load=Load(running=1, quiet_ms=23_000))], 0)
    assert finding.status is CheckStatus.problem
    assert "w-2 holds its lease, but its engine did nothing for 23 s" in finding.what
    assert statuses(check_leases([], [worker("w-1")], 0)) == {"leases": CheckStatus.ok}


def test_a_worker_that_is_much_slower_than_its_peers_is_named_with_both_times_and_what_to_do() -> None:
    def paced(name: str, factor: int, **more: object) -> Registration:
        load = Load(latency_us=10_000 * factor, engine_us=2_000 * factor, work_ns=100_000 * factor)
        return worker(name, load=load, **more)

    peers = [paced("w-1", 1), paced("w-2", 1)]
    [slow] = check_paces([*peers, paced("w-3", 20), worker("idle")])
    assert (slow.check, slow.status) == ("slow worker", CheckStatus.warning)
    assert (
        "w-3 is 20 times slower than its peers: 200.0 ms from token to token, and they 10.0 ms (2 peers)" in slow.what
    )
    assert "penstock drain w-3" in slow.fix
    of_prompts = [paced(name, factor, role="prefill", device="1x NVIDIA L4") for name, factor in (("p", 1), ("q", 9))]
    [slow] = check_paces(of_prompts)
    assert "90.0 ms for a prompt, and they 10.0 ms (1 peer, 1x NVIDIA L4)" in slow.what
    assert statuses(check_paces(peers)) == {"slow worker": CheckStatus.ok}
    assert check_paces([paced("w-1", 20)]) == []


async def test_of_a_stopped_deployment_with_cells_it_is_said_once(tmp_path: Path) -> None:
    streams_of(tmp_path, "ps")
    streams_of(tmp_path / "cells" / "1", "ps-1")
    found = [each.what for each in (await examine(LogSource(tmp_path))).findings if each.check == "deployment"]
    assert found == [f"nothing runs on {tmp_path}"]
