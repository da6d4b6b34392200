"""What a connection does with errors that the client reports, on a real broker."""

import asyncio

import pytest
import structlog.testing
from nats.errors import Error as NatsError

from penstock.infra.bus import connection
from penstock.infra.bus.client import BusClient
from penstock.infra.bus.connection import connect, why_unreachable
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually, opened


async def test_errors_of_one_kind_are_one_line_in_the_log(broker: EmbeddedNats, subjects: Subjects) -> None:
    """A client whose reply subject a gateway may not publish to would fill the log: one line for each message."""
    async with opened(broker, subjects) as bus:
        with structlog.testing.capture_logs() as logs:
            for number in range(50):
                await bus._on_error(NatsError(f'permissions violation for publish to "_inbox.{number}"'))
                await bus._on_error(NatsError(f'permissions violation for subscription to "_inbox.{number}"'))
        assert [entry["event"] for entry in logs] == ["bus_error"] * 2
        assert "_inbox.0" in logs[0]["error"]


async def test_the_wait_for_a_broker_ends_although_its_connect_loses_the_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``asyncio.wait_for`` does before Python 3.12: a process with wrong credentials tried for ever."""
    ended = asyncio.Event()
    original = BusClient._connect_to_server

    async def loses_it(client: BusClient, server: object) -> None:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            raise NatsError("refused") from None

    async def watched(client: BusClient, server: object) -> None:
        try:
            await (original if client._ended else loses_it)(client, server)
        except asyncio.CancelledError:
            ended.set()
            raise

    monkeypatch.setattr(BusClient, "_connect_to_server", watched)
    async with asyncio.timeout(4):
        with pytest.raises(ServingError, match=r"within 0\.2 s"):
            await connect("nats://127.0.0.1:1", role="worker", name="test", timeout=0.2)
        await ended.wait()  # and no attempt goes on


async def test_a_login_that_comes_too_late_over_a_stalled_link_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py closed the connection for good, and the process ended: a gateway, for the stalled link to one cell."""
    monkeypatch.setattr(connection, "LOGIN_S", 0.0)  # of logins that are refused
    late = b"-ERR 'Authentication Timeout'\r\n"
    answers = iter((b"PONG\r\n", late, b"PING\r\n" + late, b"PONG\r\n"))
    links: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.append(writer)
        writer.write(b'INFO {"server_id": "s", "version": "2.15.1", "max_payload": 1048576, "headers": true}\r\n')
        while b"PING" not in await reader.readline():
            pass
        answer = next(answers)
        writer.write(answer)  # it may ping before it has seen the login
        if b"ERR" in answer:
            writer.close()

    ended: list[int] = []
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        bus = await connect(url, role="operator", name="test", end_process=ended.append)  # type: ignore[arg-type]
        links[0].close()
        await eventually(lambda: ended or (len(links) == 4 and bus.connected))
        assert not ended
        await bus.close()
        links[-1].close()


def test_a_jwt_is_blamed_for_a_long_line_only_where_there_is_one() -> None:
    error = NatsError("nats: 'maximum control line exceeded'")
    with_jwt, without = (why_unreachable(error, each) for each in ({"user_credentials": "/x"}, {"user": "worker"}))
    assert ("JWT" in with_jwt, "JWT" in without) == (True, False)
    assert all("max_control_line: 65536" in each for each in (with_jwt, without))


async def test_a_url_of_websocket_is_answered_with_those_that_work() -> None:
    """nats-py would ask to install a library, with which our checks of TLS would not be made."""
    with pytest.raises(ServingError, match=r"^ws://127.0.0.1:1: name the server's nats:// or tls:// address"):
        await connect("ws://me:secret@127.0.0.1:1", role="operator", name="test")
