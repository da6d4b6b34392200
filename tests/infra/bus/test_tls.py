"""TLS to the broker, on a real nats-server."""

import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.client import Client, PenstockError
from penstock.infra.bus.client import BusClient
from penstock.infra.bus.connection import connect
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import connect_operator
from penstock.schemas.errors import ServingError
from tests.infra.bus.support import eventually
from tests.tls_support import TlsNats, issue

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


@pytest.fixture
async def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TlsNats]:
    pair = issue(tmp_path, "broker")
    monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    server = TlsNats(tmp_path / "nats", pair=pair, jetstream=False)
    await server.start()
    yield server
    server.kill()
    await server.stop()


async def opened(url: str) -> BusClient:
    nc = BusClient()
    await nc.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)
    return nc


@pytest.mark.filterwarnings("error")
async def test_a_reader_that_pauses_gets_every_message_over_tls(secured: TlsNats) -> None:
    nc, other = await opened(secured.url()), await opened(secured.url())
    nc.read_pause_s = 0.02  # as of a router that stands by
    found: list[int] = []
    await nc.subscribe_direct("bus-test.paused", lambda message: found.append(len(message.data)))
    await nc.flush()
    sizes = [1, 50_000, 7, 200_000, 3]
    for size in sizes:
        await other.publish("bus-test.paused", bytes(size))
        await other.flush()
    await eventually(lambda: found == sizes)
    await nc.close()
    await other.close()


async def test_a_server_that_hangs_is_left_within_two_seconds_although_it_ends_no_tls(secured: TlsNats) -> None:
    nc = await opened(secured.url())
    pid = secured.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    try:
        transport, began = nc.link, time.monotonic()
        transport.close()
        await transport.wait_closed()
        assert time.monotonic() - began < 2
    finally:
        os.kill(pid, signal.SIGCONT)
    await eventually(lambda: nc.stats["reconnects"] == 1 and nc.is_connected)
    await nc.close()


async def test_no_password_goes_to_a_server_without_tls_if_the_url_asks_for_tls(broker: EmbeddedNats) -> None:
    url = broker.url().replace("nats://", "tls://")
    with pytest.raises(ServingError, match="server does not offer it"):
        await connect(url, role="operator", name="test", timeout=0.3)
    with pytest.raises(BrokerProblem, match="server does not offer it"):
        await connect_operator(url)


async def test_a_certificate_that_no_authority_has_signed_is_refused(
    secured: TlsNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ServingError, match=r"certificate verify failed.*set PENSTOCK_NATS_CA to a file with the auth"):
        await connect(secured.url(), role="operator", name="test", timeout=0.5)
    with pytest.raises(BrokerProblem, match=r"certificate verify failed.*set PENSTOCK_NATS_CA to a file with the auth"):
        await connect_operator(secured.url())
    monkeypatch.setattr("penstock.client.connection.CONNECT_S", 0.5)
    with pytest.raises(PenstockError, match=r"certificate verify failed.*set SSL_CERT_FILE"):
        await Client(secured.url()).__aenter__()


async def test_an_error_of_a_certificate_says_what_is_wrong_with_it_or_with_the_setting(
    secured: TlsNats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = issue(tmp_path, "other")[0]
    monkeypatch.setenv("PENSTOCK_NATS_CA", str(other))
    with pytest.raises(ServingError, match=f"none of the authorities in {other}, which PENSTOCK_NATS_CA names"):
        await connect(secured.url(), role="operator", name="test", timeout=0.5)
    empty = tmp_path / "empty.crt"
    empty.touch()
    monkeypatch.setenv("PENSTOCK_NATS_CA", str(empty))
    with pytest.raises(ServingError, match=f"PENSTOCK_NATS_CA: no certificates can be read from {empty}"):
        await connect(secured.url(), role="operator", name="test", timeout=0.5)
    monkeypatch.delenv("PENSTOCK_NATS_CA")
    with pytest.raises(ServingError, match=r"certificate verify failed: .*a name that is in the server's certificate"):
        await connect(secured.url().replace("127.0.0.1", "localhost"), role="operator", name="test", timeout=0.5)
