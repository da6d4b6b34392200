"""What a run does beside signals: links that stall, clocks that differ, a disk that is full, what is left on it."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from penstock.client import Client, Disconnected
from penstock.infra.nats_server.server import EmbeddedNats
from tests.chaos.builds import ROOT, source_of
from tests.chaos.disk import BEFORE_BYTES, CHUNK_BYTES, Disk, found_in, requests_with
from tests.chaos.launch import CLOCK, CLOCKS, Starts, linked
from tests.chaos.links import Links
from tests.chaos.nats_clients import connected
from tests.chaos.plan import BROKER, Way
from tests.chaos.topology import ROLES, TOPOLOGIES

MIB = 1 << 20


@pytest.fixture
async def far() -> AsyncIterator[tuple[int, list[asyncio.StreamWriter]]]:
    """A server that sends back what it gets: its port, and its ends of the connections."""
    writers = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], writers
    server.close()


@pytest.fixture
def links(far: tuple[int, list[asyncio.StreamWriter]]) -> Iterator[Links]:
    started = Links.started({"worker-0": far[0], "worker-1": far[0]})
    yield started
    started.stop()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> float:
    """Seconds until it came back."""
    began = time.monotonic()
    writer.write(word)
    assert await asyncio.wait_for(reader.readexactly(len(word)), 20) == word
    return time.monotonic() - began


@pytest.mark.parametrize("way", list(Way))
async def test_a_stalled_link_carries_nothing_one_way_and_loses_nothing(
    links: Links, way: Way, far: tuple[int, list[asyncio.StreamWriter]]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", links.ports["worker-0"])
    other = await asyncio.open_connection("127.0.0.1", links.ports["worker-1"])
    await said(reader, writer, b"before")
    await said(*other, b"before")
    links.stall("worker-0", way, 2.0)
    if way is Way.out:  # what the far end says by itself still comes
        far[1][0].write(b"hello")
        assert await asyncio.wait_for(reader.readexactly(5), 20) == b"hello"
    assert await said(reader, writer, b"during") > 0.5
    await said(*other, b"another's link")
    assert links.ports["worker-0"] != links.ports["worker-1"]
    for each in (writer, other[1]):
        each.close()
        await each.wait_closed()


async def test_an_end_of_one_side_is_the_end_of_the_other(
    links: Links, far: tuple[int, list[asyncio.StreamWriter]]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", links.ports["worker-0"])
    await said(reader, writer, b"x")
    far[1][0].close()
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_broker_that_is_away_is_away_behind_a_link_too(unused_tcp_port: int) -> None:
    links = Links.started({"worker-0": unused_tcp_port})
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", links.ports["worker-0"])
        writer.write(b"x")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.close()
    finally:
        links.stop()


def test_a_process_reaches_the_broker_over_its_link_with_the_same_password() -> None:
    url = "nats://worker:secret@127.0.0.1:{}"
    environ = {"PENSTOCK_NATS_URL": url.format(4222), "HOME": "/root"}
    assert linked(environ, {"4222": 999}) == {"PENSTOCK_NATS_URL": url.format(999), "HOME": "/root"}
    cells = {"PENSTOCK_CELL_NATS_URLS": f"{url.format(4223)};{url.format(4224)},{url.format(4225)}"}
    wanted = f"{url.format(1)};{url.format(2)},{url.format(4225)}"
    assert linked(cells, {"4223": 1, "4224": 2}) == {"PENSTOCK_CELL_NATS_URLS": wanted}


def test_every_process_of_a_topology_has_a_name_for_its_link() -> None:
    pd = TOPOLOGIES["pd"]
    assert pd.names("worker") == ["worker-0"]
    assert pd.names("prefill") == ["prefill-0", "prefill-1"]
    assert pd.names("gateway") == ["gateway-0", "gateway-1"]
    assert pd.names("embed") == []
    assert set(pd.links_of) == {name for role in ROLES for name in pd.names(role)}


def test_gateways_have_a_link_to_the_broker_of_each_cell_and_others_to_that_of_their_own() -> None:
    links = TOPOLOGIES["cells"].links_of
    assert links["gateway-1"] == ("gateway-1", BROKER)
    assert links["gateway-1>nats-1"] == ("gateway-1", "nats-1")
    assert [links[name][1] for name in ("router-0", "router-1", "router-2")] == [BROKER, "nats-1", BROKER]
    assert TOPOLOGIES["cells"].groups["cell-1"] == ["worker-1", "prefill-1", "decode-1"]


def test_clocks_are_up_to_so_far_apart_and_each_start_has_its_own() -> None:
    starts = Starts("/log", seed=3, clock_s=30.0)
    shifts = [starts.shift_s(f"worker-{n}", earlier) for n in range(10) for earlier in range(10)]
    assert (min(shifts), max(shifts)) == (-15.0, 15.0)
    assert len(set(shifts)) > 20
    assert shifts == [starts.shift_s(f"worker-{n}", earlier) for n in range(10) for earlier in range(10)]
    assert {Starts("/log", seed=3).shift_s("worker-0", n) for n in range(9)} == {0.0}


def test_a_process_on_a_shifted_clock_sees_it_in_every_function_and_others_do_not() -> None:
    code = (
        "import time, json, logging; m = time.monotonic(); "
        "print(json.dumps([time.time(), time.time_ns() / 1e9, time.mktime(time.localtime()), "
        "__import__('calendar').timegm(time.gmtime()), time.mktime(time.localtime(5)), m]))"
    )
    environ = source_of(ROOT)
    environ |= {"PYTHONPATH": f"{CLOCKS}{os.pathsep}{environ['PYTHONPATH']}", CLOCK: "-3600"}
    shown = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    *shifted, fixed, monotonic = map(float, shown.stdout.strip("[]\n").split(","))
    assert all(abs(each - (time.time() - 3600)) < 60 for each in shifted)
    assert fixed == 5.0
    assert 0 <= time.monotonic() - monotonic < 60


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk.mounted(tmp_path / "disk", 16)
    if made is None:
        pytest.skip("needs to mount a file system of its own")
    yield made
    made.unmount()


def test_a_disk_is_full_until_it_is_freed_and_what_is_on_it_stays(disk: Disk, tmp_path: Path) -> None:
    file = tmp_path / "disk" / "file"
    file.write_bytes(b"x" * MIB)
    assert disk.fill() > 10 * MIB
    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "disk" / "other").write_bytes(b"x" * MIB)
    disk.free()
    (tmp_path / "disk" / "other").write_bytes(b"x" * MIB)


def test_a_disk_that_is_unmounted_leaves_its_files(tmp_path: Path) -> None:
    made = Disk.mounted(tmp_path / "disk", 16)
    if made is None:
        pytest.skip("needs to mount a file system of its own")
    (tmp_path / "disk" / "log").write_text("said")
    made.fill()
    made.unmount()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["log"]
    assert not os.path.ismount(tmp_path / "disk")


def test_what_a_file_holds_is_found_wherever_in_it_and_what_none_holds_is_not(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    edge = CHUNK_BYTES - 3
    (tmp_path / "folder" / "1.blk").write_bytes(b"\0" * edge + b"secret words" + b"\0" * 99)
    (tmp_path / "2.blk").write_bytes(b"other")
    wanted = {"edge": b"secret words", "whole": b"other", "none": b"secret sword"}
    assert found_in(tmp_path, wanted) == {"edge": "folder/1.blk", "whole": "2.blk"}


def test_bytes_in_a_file_belong_to_the_request_that_is_named_before_them(tmp_path: Path) -> None:
    first, second = (f"01a2242e-f470-7eb4-b206-04d700ac47c{digit}" for digit in "56")
    unnamed = b"secret" + bytes(BEFORE_BYTES)
    (tmp_path / "1.blk").write_bytes(unnamed + f"{first} secret {second} other {first} {second} secret".encode())
    assert requests_with(tmp_path / "1.blk", b"secret") == {"", first, second}
    assert requests_with(tmp_path / "1.blk", b"other") == {second}
    assert requests_with(tmp_path / "1.blk", b"none") == set()


def test_a_folder_that_a_broker_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("1", "2", "left"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.blk").write_bytes(b"secret")
    scan = os.scandir

    def removed(at: Any = ".") -> Any:
        if str(at) == str(tmp_path / "1"):
            raise FileNotFoundError(at)
        return scan(at)

    monkeypatch.setattr(os, "scandir", removed)
    assert found_in(tmp_path, {"words": b"secret"}, "left") == {"words": "2/1.blk"}
    assert found_in(tmp_path / "left", {"words": b"secret"}, "2") == {"words": "1.blk"}


async def test_a_client_of_nats_connects_once_the_broker_is_there_again(
    make_broker: Callable[..., EmbeddedNats], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()

    class Told(Client):
        async def __aenter__(self) -> Self:
            try:
                return await super().__aenter__()
            except Disconnected:
                refused.set()
                raise

    monkeypatch.setattr("tests.chaos.nats_clients.Client", Told)
    monkeypatch.setattr("tests.chaos.nats_clients.AGAIN_S", 0.01)
    monkeypatch.setattr("penstock.client.connection.CONNECT_S", 0.1)
    server = make_broker()
    await server.start()
    url = server.url("operator")
    await server.stop()
    connecting = asyncio.create_task(connected(url, "ps"))
    async with asyncio.timeout(30):
        await refused.wait()
        monkeypatch.setattr("penstock.client.connection.CONNECT_S", 10.0)
        await server.start()
        await (await connecting).close()
