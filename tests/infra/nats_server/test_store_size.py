"""A broker of one's own, with little room and an unusual password: checked before anything is created."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nats
import pytest
from nats.aio.client import Client

from penstock.client import connection as client_connection
from penstock.infra.bus.connection import connect
from penstock.infra.nats_server import apply_streams as apply_module
from penstock.infra.nats_server import jetstream_api
from penstock.infra.nats_server.apply_streams import apply_submissions
from penstock.infra.nats_server.binary import find_server
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.retention import set_limits
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at, connect_operator, divide_at
from penstock.schemas.streams import GIB, topology
from penstock.schemas.subjects import Subjects
from tests.pipeline.support import ROOT, free_port, until

PASSWORD = "p@ss:w/rd%41 #?"
S = Subjects()


class OwnBroker:
    """``url``: with the password as URLs have it."""

    def __init__(self, folder: Path, file_store: str, memory_store: str) -> None:
        self.port = free_port()
        self.url = f"nats://own:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}"
        config = folder / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: 8388608\n'
            f'jetstream {{ store_dir: "{folder}", max_file_store: {file_store}, max_memory_store: {memory_store} }}\n'
            f'authorization {{ user: own, password: "{PASSWORD}" }}\n'
        )
        self.process = subprocess.Popen([find_server(), "-c", config, "-l", folder / "nats.log"])

    async def ready(self) -> None:
        async def answers() -> bool:
            try:
                nc = await nats.connect(
                    f"nats://127.0.0.1:{self.port}", user="own", password=PASSWORD, allow_reconnect=False
                )
            except (OSError, nats.errors.Error):
                return False
            await nc.close()
            return True

        await until(answers, "the broker answers")

    async def streams(self) -> dict[str, int]:
        """Their limits."""
        nc = await connect_operator(self.url)
        try:
            found = await nc.jetstream().streams_info()
            return {each.config.name or "": each.config.max_bytes or 0 for each in found}
        finally:
            await nc.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[type[OwnBroker]]:
    made: list[OwnBroker] = []

    def start(file_store: str = "40GB", memory_store: str = "2GB") -> OwnBroker:
        made.append(OwnBroker(tmp_path, file_store, memory_store))
        return made[-1]

    yield start  # type: ignore[misc]
    for each in made:
        each.process.terminate()
        each.process.wait(20)


@pytest.mark.parametrize(
    ("limits", "storage", "setting"),
    [(("3GB", "2GB"), "file", "max_file_store"), (("40GB", "100MB"), "memory", "max_memory_store")],
)
async def test_a_broker_without_room_is_named_before_anything_is_created(
    make: type[OwnBroker], limits: tuple[str, str], storage: str, setting: str
) -> None:
    broker = make(*limits)  # type: ignore[arg-type]
    await broker.ready()
    with pytest.raises(BrokerProblem) as refused:
        await apply_at(broker.url, S)
    text = str(refused.value)
    needed, free = map(int, re.findall(r"(\d+) (?:bytes of|free)", text))
    sizes = topology(S)
    assert needed == (sizes.reserved_bytes if storage == "file" else sizes.reserved_memory)
    given = 3 << 30 if storage == "file" else 100 << 20
    assert 0.9 * given < free <= given
    assert setting in text
    assert await broker.streams() == {}


async def test_a_size_that_was_refused_for_another_reason_is_not_called_free(
    make: type[OwnBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make("3GB")  # type: ignore[arg-type]
    await broker.ready()
    real = apply_module.request

    async def unanswered(nc: Client, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        if 3 * GIB < body.get("max_bytes", 0) < 8 * GIB and "PROBE" in verb:
            raise BrokerProblem("no answer")
        return await real(nc, verb, body)

    monkeypatch.setattr(apply_module, "request", unanswered)
    with pytest.raises(BrokerProblem, match=r"the broker has \d+ free \(3\.0 GiB\)"):
        await apply_at(broker.url, S)


async def test_smaller_streams_fit_and_stay_small(make: type[OwnBroker]) -> None:
    broker = make("3GB")  # type: ignore[arg-type]
    await broker.ready()
    await apply_at(broker.url, S, store_size=2)
    sizes = await broker.streams()
    on_disk = {name: size for name, size in sizes.items() if "MEMORY" not in name}
    assert 1.9 * GIB < sum(on_disk.values()) <= 2 * GIB
    assert sizes["ps_TOKENS"] == sizes["ps_REQUESTS"] > sizes["ps_KV"]
    assert await apply_at(broker.url, S) == []  # a start without the setting
    nc = await connect_operator(broker.url)
    try:
        await apply_submissions(nc, S, "acme", 10)
    finally:
        await nc.close()
    sizes = await broker.streams()
    assert sizes["ps_SUBMIT_acme"] == sizes["ps_SUBMIT"]


@pytest.mark.parametrize("store_size", [0.0, 8.0])
async def test_another_number_of_cells_gives_streams_other_parts_and_deletes_nothing(
    make: type[OwnBroker], store_size: float
) -> None:
    broker = make()
    await broker.ready()
    await apply_at(broker.url, S, store_size=store_size)
    whole = await broker.streams()
    nc = await connect_operator(broker.url)
    try:
        chosen, record = 200 << 20, b"x" * (1 << 20)
        await set_limits(nc, "ps_KV", None, chosen)
        await divide_at(broker.url, S, 1, store_size=store_size, cells=8)
        parts = await broker.streams()
        assert parts["ps_KV"] == chosen, "the operator's"
        assert parts["ps_DONE"] < whole["ps_DONE"] / 7
        # A stream that would be more than half full stays as large as it is.
        await divide_at(broker.url, S, 8, store_size=store_size, cells=1)
        assert await broker.streams() == whole | {"ps_KV": chosen}
        for _ in range(1 + parts["ps_DONE"] // (2 << 20)):
            await nc.jetstream().publish("ps.done.t.m.r", record)
        await divide_at(broker.url, S, 1, store_size=store_size, cells=8)
        assert await broker.streams() == parts | {"ps_DONE": whole["ps_DONE"]}
    finally:
        await nc.close()


async def test_too_little_is_refused_with_the_least(make: type[OwnBroker]) -> None:
    broker = make()
    await broker.ready()
    with pytest.raises(BrokerProblem, match=r"--store-size: the streams take at least 0\.\d GiB together"):
        await apply_at(broker.url, S, store_size=0.1)


async def test_a_password_with_escaped_characters_is_taken_everywhere(make: type[OwnBroker]) -> None:
    broker = make()
    await broker.ready()
    applied = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-m", "penstock", "streams", "apply", "--nats-url", broker.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert applied.returncode == 0, applied.stderr
    assert "created ps_TOKENS" in applied.stdout
    client = await client_connection.connect(broker.url, "ps")
    assert client.connected
    await client.close()
    bus = await connect(broker.url, role="client", name="test")
    await bus.close()


def test_the_page_has_the_sum() -> None:
    page, sizes = (ROOT / "docs" / "durability.md").read_text(), topology(S)
    assert (
        f"{sizes.reserved_bytes / GIB:.1f} GiB on the disk and {sizes.reserved_memory / GIB:.1f} GiB in memory" in page
    )


async def test_a_stream_whose_folder_was_removed_meanwhile_is_created_again(
    monkeypatch: pytest.MonkeyPatch, make_broker: Callable[..., EmbeddedNats]
) -> None:
    """The server removes the folder of streams a moment after the last one, which tried for room, is deleted."""
    server, refused = make_broker("removed"), list[str]()
    await server.start()
    nc = await nats.connect(server.url("operator"))

    async def request(nc: Client, verb: str, body: dict[str, Any]) -> Any:
        if verb.startswith("STREAM.CREATE.ps_") and "PROBE" not in verb and len(refused) < 3:
            refused.append(verb)
            raise BrokerProblem(f"$JS.API.{verb}: error creating store for stream (10049)")
        return await jetstream_api.request(nc, verb, body)

    monkeypatch.setattr(apply_module, "request", request)
    try:
        await apply_module.apply(nc, topology(S))
        assert len(refused) == 3
        assert "ps_SUBMIT" in {stream.config.name for stream in await nc.jetstream().streams_info()}
    finally:
        await nc.close()
