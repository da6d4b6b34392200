"""The guard on a real broker: what it knows of keys, and what it does when it cannot know."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from penstock.gateway.access import authentication
from penstock.gateway.access.authentication import ANYONE, STALE_S, Guard, noted_in
from penstock.gateway.run_gateway import Exposed, check_loopback
from penstock.infra.bus.audit import person
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.tasks import Tasks
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.process.sockets import listening
from penstock.operate import key_store
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey, digest_of, new_key
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually, opened

PATH = "/v1/models"


class Guarded:
    def __init__(self, bus: Bus, **options: Any) -> None:
        self.now = 1000.0
        self.bus = bus
        self.tasks = Tasks("test")
        self.guard = Guard(bus, {}, clock=lambda: self.now, **options)

    def refusal(self, key: str) -> Code | None:
        try:
            self.guard.admit(PATH, [(b"x-api-key", key.encode())])
        except ServingError as error:
            return error.code
        return None

    async def add(self) -> str:
        name, text = new_key()
        await key_store.add(self.bus, ApiKey(name, digest_of(text.encode())))
        await eventually(lambda: self.guard.closed and self.refusal(text) is None)
        return text


@pytest.fixture
async def bus(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Bus]:
    async with opened(broker, pipeline) as made:
        yield made


@pytest.fixture
async def guarded(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    monkeypatch.setattr(authentication, "CONFIRM_S", 0.01)
    made = Guarded(bus)
    await made.guard.open(made.tasks)
    yield made
    await made.tasks.aclose()
    await made.guard.close()


async def test_the_first_key_closes_the_gateway_for_good(guarded: Guarded) -> None:
    assert guarded.guard.admit(PATH, []) is ANYONE
    text = await guarded.add()
    assert guarded.refusal("pst-") is Code.invalid_api_key
    name = text.split("-")[1]
    bucket = guarded.bus.subjects.bucket("keys")
    await guarded.bus.js.publish(f"$KV.{bucket}.{name}", b"", headers={"KV-Operation": "PURGE"})
    await eventually(lambda: guarded.refusal(text) is Code.invalid_api_key)  # not open, as without any key
    assert guarded.guard.closed


async def test_a_gateway_that_had_keys_stays_closed_when_the_broker_has_lost_them(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh gateway on loopback answered without a key, behind a proxy with TLS to the whole internet."""
    noted = noted_in(str(tmp_path / "state"), "ps", {})
    assert noted is not None
    first = Guarded(bus, noted=noted)
    await first.guard.open(first.tasks)
    assert not noted.exists()
    assert first.guard.admit(PATH, []) is ANYONE
    await first.add()
    assert noted.exists()
    await first.tasks.aclose()
    await first.guard.close()
    await bus.js.purge_stream(f"KV_{bus.subjects.bucket('keys')}")
    for again in (
        Guarded(bus, noted=noted),
        Guarded(bus, noted=noted_in("", "ps", {"STATE_DIRECTORY": str(noted.parent)})),
    ):
        with structlog.testing.capture_logs() as logged:
            await again.guard.open(again.tasks)
        assert again.refusal("") is Code.invalid_api_key
        assert [line["event"] for line in logged if line["log_level"] == "error"] == ["keys_lost"]
        await again.tasks.aclose()
        await again.guard.close()
    other = Guarded(bus, noted=noted_in(str(tmp_path / "other"), "ps", {}))
    await other.guard.open(other.tasks)
    assert not other.guard.closed
    await other.tasks.aclose()
    await other.guard.close()
    assert noted_in("", "ps", {}) is None


async def test_a_note_that_cannot_be_written_is_in_the_log_and_the_gateway_closed(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    guarded = Guarded(bus, noted=tmp_path / "file" / "noted")
    await guarded.guard.open(guarded.tasks)
    with structlog.testing.capture_logs() as logged:
        await guarded.add()
    assert [line["action"] for line in logged if line["event"] == "keys_not_noted"] == ["set --require-keys"]
    assert guarded.guard.closed
    await guarded.tasks.aclose()
    await guarded.guard.close()


async def test_a_first_key_that_cannot_be_read_opens_nothing(bus: Bus) -> None:
    name, text = new_key()
    await bus.js.publish(f"$KV.{bus.subjects.bucket('keys')}.{name}", b"\xff damaged")
    guarded = Guarded(bus)
    await guarded.guard.open(guarded.tasks)
    try:
        assert guarded.refusal(text) is Code.invalid_api_key
        unreadable: list[str] = []
        assert await key_store.all_keys(bus, unreadable.append) == []
        assert unreadable == [name]  # so that an operator learns why nobody is admitted
        with pytest.raises(key_store.KeyProblem, match=f"the entry of pst-{name} cannot be read"):
            await key_store.revoke(bus, name)
    finally:
        await guarded.tasks.aclose()
        await guarded.guard.close()


async def test_keys_are_refused_while_it_is_not_known_which_are_valid(guarded: Guarded) -> None:
    text = await guarded.add()
    await guarded.tasks.aclose()  # the broker does not answer any more
    guarded.now += STALE_S - 0.01
    assert guarded.refusal(text) is None
    guarded.now += 0.02
    assert guarded.refusal(text) is Code.broker_unavailable
    assert guarded.refusal("pst-") is Code.invalid_api_key
    assert guarded.guard.admit("/health", []) is ANYONE


async def test_a_revocation_is_found_also_if_the_watch_is_broken(guarded: Guarded) -> None:
    text = await guarded.add()
    tail = guarded.guard.table.tail
    await tail.subscription.unsubscribe()
    tail.subscription = None
    await key_store.revoke(guarded.bus, text.split("-")[1])
    await eventually(lambda: guarded.refusal(text) is Code.invalid_api_key)


async def test_a_bucket_that_was_lost_and_recreated_ends_every_key(guarded: Guarded) -> None:
    """As after `penstock streams apply` on a broker that lost its disk; the gateway was not restarted."""
    key = await guarded.add()
    stream = f"KV_{guarded.bus.subjects.bucket('keys')}"
    info = json.loads((await guarded.bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", b"")).data)
    with structlog.testing.capture_logs() as logged:
        await guarded.bus.nc.request(f"$JS.API.STREAM.DELETE.{stream}", b"")
        body = json.dumps(info["config"]).encode()
        await guarded.bus.nc.request(f"$JS.API.STREAM.CREATE.{stream}", body)
        await eventually(lambda: guarded.refusal(key) is Code.invalid_api_key)
        await eventually(lambda: "keys_lost" in [line["event"] for line in logged])
    assert guarded.guard.closed
    assert guarded.refusal(await guarded.add()) is None


async def test_each_loss_of_all_keys_is_reported_once_whoever_notices_it(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a broker's restart, the tail that repaired itself noticed it first, and nothing was reported."""
    monkeypatch.setattr(authentication, "CONFIRM_S", 0.01)
    said: list[bool] = []
    guarded = Guarded(bus, on_lost=said.append)
    await guarded.guard.open(guarded.tasks)
    stream = f"KV_{bus.subjects.bucket('keys')}"
    with structlog.testing.capture_logs() as logged:
        for losses in (1, 2):
            await guarded.add()
            await eventually(lambda: not guarded.guard.lost)
            await guarded.tasks.aclose()  # whose comparison would have found it
            await bus.js.purge_stream(stream)
            config = json.loads((await bus.nc.request(f"$JS.API.STREAM.INFO.{stream}", b"")).data)["config"]
            await bus.nc.request(f"$JS.API.STREAM.DELETE.{stream}", b"")
            await bus.nc.request(f"$JS.API.STREAM.CREATE.{stream}", json.dumps(config).encode())
            await guarded.guard.table.tail.reconnected()
            await eventually(lambda: not guarded.guard.table.keys)
            assert len(said) == 2 * losses - 2
            guarded.tasks = Tasks("test")
            guarded.tasks.spawn(guarded.guard.table.confirm(), name="confirm-keys")
            await eventually(lambda: guarded.guard.lost)
    assert said == [True, False, True]
    assert [line["event"] for line in logged].count("keys_lost") == 2
    await guarded.tasks.aclose()
    await guarded.guard.close()


async def test_a_key_is_revoked_once_and_the_record_says_by_whom(guarded: Guarded) -> None:
    name = (await guarded.add()).split("-")[1]
    key, was_valid = await key_store.revoke(guarded.bus, name)
    assert was_valid
    assert key.revoked_by == person()
    assert (await key_store.revoke(guarded.bus, name)) == (key, False)
    with pytest.raises(key_store.KeyProblem, match="no key"):
        await key_store.revoke(guarded.bus, "0" * 12)
    with pytest.raises(key_store.KeyProblem, match="id exists"):
        await key_store.add(guarded.bus, key)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_port_that_others_reach_is_named_with_what_to_do(host: str) -> None:
    with listening(host, 0) as listener, pytest.raises(Exposed) as caught:
        check_loopback([listener])
    for what in ("penstock keys create", "--require-keys", "--insecure"):
        assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_two_ports_the_one_that_was_asked_for_is_named() -> None:
    with listening("0.0.0.0", 0) as own, listening("0.0.0.0", 0) as shared:
        with pytest.raises(Exposed) as caught:
            check_loopback([own, shared])
        assert str(caught.value).startswith(f"0.0.0.0:{shared.getsockname()[1]} is reachable")


def test_a_gateway_behind_proxies_needs_keys_also_on_loopback() -> None:
    with pytest.raises(Exposed, match=r"--trusted-proxies 10\.0\.0\.0/8,10\.1\.1\.1 .*--require-keys.*--insecure"):
        check_loopback([], ("10.0.0.0/8", "10.1.1.1"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    with listening(host, 0) as listener:
        check_loopback([listener])
