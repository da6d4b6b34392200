"""HTTPS on real sockets: what is served, and what happens when the certificate is replaced."""

import asyncio
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from penstock.gateway.http.server import ConnectionLimits, HttpServer
from penstock.gateway.http.tls import BadCertificate, Certificate
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.sockets import listening
from tests.gateway.http.test_connections import GET, Application
from tests.tls_support import DAYS, issue

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")

DAY_S = 86_400


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: issue(folder, name) for name in ("first", "second")}


@pytest.fixture
def pair(made: dict[str, tuple[Path, Path]], tmp_path: Path) -> tuple[Path, Path]:
    """Files that a test may replace, with the first certificate."""
    return put(made["first"], (tmp_path / "tls.crt", tmp_path / "tls.key"))


def put(source: tuple[Path, Path], target: tuple[Path, Path]) -> tuple[Path, Path]:
    for one, other in zip(source, target, strict=True):
        copy = other.with_suffix(".new")
        shutil.copy(one, copy)
        copy.replace(other)
    return target


@pytest.fixture
async def served(pair: tuple[Path, Path]) -> AsyncIterator[tuple[int, Certificate]]:
    listener, tasks, certificate = listening("127.0.0.1", 0), Tasks("test"), Certificate(*map(str, pair))
    server = HttpServer(Application(), [listener], ConnectionLimits(), tasks, tls=certificate)
    await server.start()
    yield listener.getsockname()[1], certificate
    await server.close()
    await tasks.aclose()


async def connected(port: int, trusted: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context(cafile=str(trusted))
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(GET)
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(1)
    return head.split(b"\r\n")[0]


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def test_a_replaced_certificate_is_shown_to_new_connections_and_open_ones_continue(
    served: tuple[int, Certificate], pair: tuple[Path, Path], made: dict[str, tuple[Path, Path]]
) -> None:
    port, certificate = served
    old = await connected(port, made["first"][0])
    assert await answer(*old) == b"HTTP/1.1 200 OK"
    assert not certificate.reload()
    put(made["second"], pair)
    assert certificate.reload()
    with pytest.raises(ssl.SSLError):
        await connected(port, made["first"][0])
    new = await connected(port, made["second"][0])
    for connection in (new, old):
        assert await answer(*connection) == b"HTTP/1.1 200 OK"
        await closed(connection[1])


async def test_a_client_whose_handshake_began_before_a_drain_is_answered(pair: tuple[Path, Path]) -> None:
    listener, tasks = listening("127.0.0.1", 0), Tasks("test")
    server = HttpServer(Application(), [listener], ConnectionLimits(), tasks, tls=Certificate(*map(str, pair)))
    await server.start()
    try:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            while not server._handshakes:  # noqa: ASYNC110 - the server accepts it in one of the next turns
                await asyncio.sleep(0)
            draining = asyncio.create_task(server.drain(5.0))
            done, _ = await asyncio.wait({draining}, timeout=0.3)
            assert not done, "the client has a connection, and will ask"
            await writer.start_tls(ssl.create_default_context(cafile=str(pair[0])), server_hostname="127.0.0.1")
            assert await answer(reader, writer) == b"HTTP/1.1 200 OK"
            await closed(writer)
            assert await draining
    finally:
        await server.close()
        await tasks.aclose()


async def test_half_a_replacement_changes_nothing(
    served: tuple[int, Certificate], pair: tuple[Path, Path], made: dict[str, tuple[Path, Path]]
) -> None:
    port, certificate = served
    put((made["second"][0], made["first"][1]), pair)
    assert not certificate.reload()
    connection = await connected(port, made["first"][0])
    assert await answer(*connection) == b"HTTP/1.1 200 OK"
    await closed(connection[1])
    os.unlink(pair[1])
    assert not certificate.reload()
    put(made["second"], pair)
    assert certificate.reload()


def test_a_connection_may_be_looked_at_when_its_tls_has_ended(pair: tuple[Path, Path]) -> None:
    async def look() -> None:
        listener, tasks = listening("127.0.0.1", 0), Tasks("test")
        server = HttpServer(Application(), [listener], ConnectionLimits(), tasks, tls=Certificate(*map(str, pair)))
        await server.start()
        client = await connected(listener.getsockname()[1], pair[0])
        assert await answer(*client) == b"HTTP/1.1 200 OK"
        (connection,) = server.connections
        lost = asyncio.Event()
        connection.on_lost = lost.set
        await closed(client[1])
        await lost.wait()
        try:
            connection.check(asyncio.get_running_loop().time())
        finally:
            await server.close()
            await tasks.aclose()

    uvloop.run(look())  # as in a gateway


async def test_plain_http_is_not_answered(served: tuple[int, Certificate]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served[0])
    writer.write(GET)
    with suppress(ConnectionError):
        assert b"HTTP/1.1 200" not in await asyncio.wait_for(reader.read(), 10)
    await closed(writer)


def test_files_that_cannot_be_used_are_refused_at_start(tmp_path: Path, made: dict[str, tuple[Path, Path]]) -> None:
    first, second = made["first"], made["second"]
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(
        ["openssl", "ec", "-in", first[1], "-aes128", "-passout", "pass:secret", "-out", encrypted],
        check=True, capture_output=True,
    )  # fmt: skip
    wrong: list[tuple[Any, Any, str]] = [
        (first[0], second[1], "do not belong together"),
        (first[0], encrypted, "without a password"),
        (tmp_path / "absent", first[1], ": No such file"),
        (nothing, first[1], "PEM"),
    ]
    for cert, key, why in wrong:
        with pytest.raises(BadCertificate, match=why):
            Certificate(str(cert), str(key))


def test_the_log_warns_of_dates_at_start_when_the_files_change_and_once_a_day(
    made: dict[str, tuple[Path, Path]], pair: tuple[Path, Path]
) -> None:
    now = [time.time()]

    def warnings(act: Callable[[], object]) -> list[tuple[str, str]]:
        with capture_logs() as lines:
            act()
        return [(line["event"], line["problem"]) for line in lines if line["log_level"] == "warning"]

    certificate = Certificate(*map(str, pair), lambda: now[0])
    assert warnings(lambda: Certificate(*map(str, pair), lambda: now[0])) == warnings(certificate.look) == []
    now[0] += DAYS * DAY_S - 3600
    ((event, problem),) = warnings(certificate.look)
    assert (event, problem[:15]) == ("certificate_expires_soon", "it expires on 2")
    assert not warnings(certificate.look)
    put(made["second"], pair)
    assert [event for event, _ in warnings(certificate.look)] == ["certificate_expires_soon"]
    now[0] += DAY_S + 1
    ((event, problem),) = warnings(certificate.look)
    assert (event, problem[:15]) == ("certificate_not_valid", "it expired on 2")
    ((event, problem),) = warnings(lambda: Certificate(*map(str, pair), lambda: 0.0))
    assert (event, problem[:20]) == ("certificate_not_valid", "it is not valid befo")


def test_files_that_are_made_readable_after_they_were_written_are_tried_again(
    made: dict[str, tuple[Path, Path]], pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(*map(str, pair))
    put(made["second"], pair)
    with monkeypatch.context() as unreadable:  # root, who may run the tests, could read it
        unreadable.setattr(certificate, "_loaded", denied)
        assert not certificate.reload()
    assert not certificate.reload()
    pair[1].chmod(0o640)
    assert certificate.reload()


def denied() -> ssl.SSLContext:
    raise BadCertificate("permission denied")
