"""``penstock backup`` and ``restore`` on real brokers."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.jetstream_api import request
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.operate.backup import Manifest, backed_up
from penstock.schemas import done
from penstock.schemas.subjects import HEADER_NO_STORE, Subjects
from tests.cluster_support import three_nodes
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, assign, end

HOME = Subjects("ps")
KEPT = ("REQUESTS", "WORK", "TOKENS", "DONE")


async def ran(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    found = await asyncio.to_thread(main, list(argv))
    said = capsys.readouterr()
    assert found == status, said
    return " ".join((said.out + said.err).split())


async def messages(bus: Bus, *names: str) -> list[tuple[str, int, int, bytes]]:
    return [
        (entry.subject, entry.seq, entry.time_ns, entry.data)
        for name in names or KEPT
        async for entry in read(bus, bus.subjects.stream(name), ">")
    ]


@pytest.fixture
async def source(make_broker: Callable[..., EmbeddedNats]) -> AsyncIterator[tuple[EmbeddedNats, Bus]]:
    server = make_broker("source")
    await server.start()
    async with opened(server, HOME) as bus:
        yield server, bus


@pytest.fixture
async def other(make_broker: Callable[..., EmbeddedNats]) -> EmbeddedNats:
    server = make_broker("other")
    await server.start()
    return server


async def test_messages_keep_their_sequences_and_times_and_what_is_open_ends_with_the_reason(
    source: tuple[EmbeddedNats, Bus], other: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, bus = source
    ended, waiting, running, secret = [await accept(bus, no_store=number == 3) for number in range(4)]
    for each in (ended, running):
        await assign(bus, each)
    await end(bus, ended, 1, 2)
    before = await messages(bus)
    folder = str(tmp_path / "backup")
    assert "streams in 1 cell" in await ran(capsys, "backup", folder, "--nats-url", server.url())
    said = await ran(capsys, "restore", folder, "--nats-url", other.url())
    assert "ended 3 requests that were open then" in said
    async with opened(other, HOME) as restored:
        after = await messages(restored)
        assert after[: len(before)] == before
        events = {}
        async for entry in read(restored, HOME.stream("DONE"), ">", after=before[-1][1]):
            event = done.decode(entry.data)
            assert isinstance(event, done.Done)
            events[event.request] = event
            assert (HEADER_NO_STORE in entry.headers) == (event.request == secret.id)
        codes = {waiting.id: "worker_lost", running.id: "worker_lost", secret.id: "content_lost"}
        assert {request_id: event.code for request_id, event in events.items()} == codes
        assert "restored from a backup of" in events[waiting.id].message
        assert (events[running.id].worker, events[running.id].attempt) == ("w-1", 1)
        assert "prompt" in events[secret.id].left_out
        for info in await restored.js.consumers_info(HOME.stream("REQUESTS")):
            assert not info.num_pending, "routers would be given requests of the backup"
        later = await accept(restored)
        pending = [info.num_pending for info in await restored.js.consumers_info(HOME.stream("REQUESTS"))]
        assert sum(filter(None, pending)) == 1, later
    entries = [each async for each in _audit(other)]
    assert [each for each in entries if "restore" in each], entries


async def _audit(server: EmbeddedNats) -> AsyncIterator[str]:
    async with opened(server, HOME) as bus:
        async for entry in read(bus, HOME.stream("AUDIT"), ">"):
            yield entry.data.decode(errors="replace")


async def test_it_is_not_restored_over_streams_that_are_there(
    source: tuple[EmbeddedNats, Bus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, bus = source
    await accept(bus)
    folder = str(tmp_path / "backup")
    await ran(capsys, "backup", folder, "--nats-url", server.url())
    before = await messages(bus)
    said = await ran(capsys, "restore", folder, "--nats-url", server.url(), status=1)
    assert "the broker has a stream ps_" in said
    assert await messages(bus) == before
    assert "is not empty" in await ran(capsys, "backup", folder, "--nats-url", server.url(), status=1)


async def test_a_damaged_or_unfinished_backup_is_refused_before_anything_is_made(
    source: tuple[EmbeddedNats, Bus], other: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, bus = source
    await accept(bus)
    folder = tmp_path / "backup"
    await ran(capsys, "backup", str(folder), "--nats-url", server.url())
    file = folder / "0" / f"{HOME.stream('REQUESTS')}.snapshot"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    to_other = ("restore", str(folder), "--nats-url", other.url())
    assert f"{file} is damaged" in await ran(capsys, *to_other, status=1)
    file.write_bytes(whole)
    (folder / "backup.json").rename(folder / "aside.json")
    assert "is not a complete backup" in await ran(capsys, *to_other, status=1)
    (folder / "aside.json").rename(folder / "backup.json")
    await ran(capsys, *to_other)


async def test_a_restore_that_fails_halfway_leaves_no_streams(
    source: tuple[EmbeddedNats, Bus], other: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The broker refuses the second stream; the first was taken."""
    server, bus = source
    await accept(bus)
    folder = tmp_path / "backup"
    await ran(capsys, "backup", str(folder), "--nats-url", server.url())
    path = folder / "backup.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    first, second, *rest = manifest.cells[0].streams
    file = folder / second.file
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    broken = msgspec.structs.replace(second, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    cell = msgspec.structs.replace(manifest.cells[0], streams=(first, broken, *rest))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, cells=(cell,))))
    to_other = ("restore", str(folder), "--nats-url", other.url())
    said = await ran(capsys, *to_other, status=1)
    assert "the broker does not take the snapshot of ps_WORK" in said
    file.write_bytes(whole)
    path.write_bytes(msgspec.json.encode(manifest))
    await ran(capsys, *to_other)


async def test_what_runs_now_and_what_is_in_memory_is_in_no_backup(
    source: tuple[EmbeddedNats, Bus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, bus = source
    folder = tmp_path / "backup"
    await ran(capsys, "backup", str(folder), "--nats-url", server.url())
    manifest = msgspec.json.decode((folder / "backup.json").read_bytes(), type=Manifest)
    names = [each.name for each in manifest.cells[0].streams]
    assert names == backed_up(HOME)
    all_names = set((await request(bus.nc, "STREAM.NAMES", {}))["streams"])
    assert all_names - set(names) == {
        *("ps_SUBMIT", "ps_MEMORY_CONTENTS", "ps_MEMORY_TOKENS", "OBJ_ps_snapshots"),
        *(f"KV_ps_{name}" for name in ("workers", "routers", "planners", "exporters")),
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))


async def test_cells_that_share_a_broker_are_restored_on_one_each(
    make_broker: Callable[..., EmbeddedNats], other: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, second = make_broker("cells", cells=2), make_broker("second", namespace="ps-1")
    for each in (server, second):
        await each.start()
    cells = (HOME, Subjects("ps-1"))
    for subjects in cells:
        async with opened(server, subjects) as bus:
            await end(bus, await accept(bus), 1)
    folder = str(tmp_path / "backup")
    assert "in 2 cells" in await ran(capsys, "backup", folder, "--nats-url", server.url(), "--cells", "2")
    to_others = ("--nats-url", other.url(), "--cells", "2", "--cell-nats-urls", second.url())
    assert "not 3" in await ran(capsys, "restore", folder, "--nats-url", other.url(), "--cells", "3", status=1)
    assert "ended 0 requests" in await ran(capsys, "restore", folder, *to_others)
    for subjects, target in zip(cells, (other, second), strict=True):
        async with opened(server, subjects) as before, opened(target, subjects) as after:
            assert await messages(after) == await messages(before) != []


@pytest.mark.slow  # two clusters, one after the other, of which servers are killed: half a minute
@pytest.mark.timeout(180)
async def test_replicated_streams_are_restored_with_their_replicas_on_a_cluster_and_with_one_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, done_stream = tmp_path / "backup", HOME.stream("DONE")
    async with three_nodes(tmp_path / "first") as first:
        await apply_at(first.url(), HOME, replicas=3)
        async with await connect(first.url(), role="operator", name="test") as bus:
            ended, waiting = await accept(bus), await accept(bus)
            await assign(bus, ended)
            await end(bus, ended, 1, 2)
            first.kill((await first.leader(done_stream) + 1) % 3)  # a copy is away while it is made
            await ran(capsys, "backup", str(folder), "--nats-url", first.url())
            before = await messages(bus)
    async with three_nodes(tmp_path / "second") as second:
        assert "ended 1 request" in await ran(capsys, "restore", str(folder), "--nats-url", second.url())
        leader, followers = await second.placement(done_stream)
        assert len(followers) == 2
        second.kill(leader)
        await second.placement(done_stream)
        async with await connect(second.url(), role="operator", name="test") as restored:
            after = await messages(restored)
            assert after[: len(before)] == before
            assert [done.decode(data).request for *_, data in after[len(before) :]] == [waiting.id]
    alone = tmp_path / "alone"
    assert "ended 1 request" in await ran(capsys, "restore", str(folder), "--data-dir", str(alone))
    found = await ran(capsys, "requests", "--data-dir", str(alone), "--json")
    assert sorted(re.findall(r'"id":"([^"]+)"', found)) == sorted((ended.id, waiting.id))
