"""``penstock keys export`` and ``import``, from one namespace of a real nats-server to another."""

import asyncio
import io
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from infra.broker.server import EmbeddedNats
from infra.bus.connection import Bus
from infra.cli import COMMANDS
from infra.operate import key_store
from infra.operate.key_copies import line_of, read_keys
from infra.operate.keys import VERBS, run
from schemas.keys import ApiKey, digest_of, new_key
from schemas.subjects import Subjects
from tests.infra.bus.support import opened


@pytest.fixture
async def cells(broker: EmbeddedNats) -> AsyncIterator[list[Bus]]:
    """Two deployments on one broker."""
    async with AsyncExitStack() as stack:
        opening = [opened(broker, Subjects(f"t{secrets.token_hex(6)}")) for _ in range(2)]
        yield [await stack.enter_async_context(each) for each in opening]


def key(**more: object) -> ApiKey:
    key_id, text = new_key()
    return ApiKey(key_id, digest_of(text.encode()), requests_per_minute=60, **more)  # type: ignore[arg-type]


async def keys(verb: str, bus: Bus, broker: EmbeddedNats) -> int:
    return await asyncio.to_thread(run, [verb, "--nats-url", broker.url(), "--namespace", bus.subjects.namespace])


async def test_keys_of_one_deployment_become_keys_of_another_and_end_with_them(
    cells: list[Bus], broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def copy() -> str:
        assert await keys("export", cells[0], broker) == 0
        monkeypatch.setattr("sys.stdin", io.StringIO(capsys.readouterr().out))
        assert await keys("import", cells[1], broker) == 0
        return capsys.readouterr().out

    stays, ends, gone, own = key(created_ns=1), key(created_ns=2), key(created_ns=3, revoked_ns=4), key(created_ns=5)
    for each in (stays, ends, gone):
        await key_store.add(cells[0], each)
    await key_store.add(cells[1], own)
    assert await copy() == "2 keys added, 1 revoked, 0 as they were\n"
    await key_store.revoke(cells[0], ends.id)
    assert await copy() == "0 keys added, 1 revoked, 2 as they were\n"
    here = {each.id: each for each in await key_store.all_keys(cells[1])}
    assert here.keys() == {stays.id, ends.id, gone.id, own.id}
    assert (here[stays.id], bool(here[ends.id].revoked_ns)) == (stays, True)
    await key_store.revoke(cells[1], stays.id)
    assert await copy() == "0 keys added, 0 revoked, 3 as they were\n"  # what was revoked here stays so
    assert (await key_store.find(cells[1], stays.id))[0].revoked_ns


async def test_exports_of_several_deployments_are_read_as_one(
    cells: list[Bus], broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stays, ends = key(created_ns=1), key(created_ns=2)
    ended = msgspec.structs.replace(ends, revoked_ns=3)

    async def copy(*lines: ApiKey) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(map(line_of, lines))))
        assert await keys("import", cells[1], broker) == 0
        return capsys.readouterr().out

    assert await copy(stays, ended, stays, ends) == "1 keys added, 1 revoked, 0 as they were\n"
    assert await copy(stays, ends) == "0 keys added, 0 revoked, 2 as they were\n"  # an older export
    assert sorted(await key_store.all_keys(cells[1]), key=lambda each: each.created_ns) == [stays, ended]


@pytest.mark.parametrize("problem", ["tenant", "digest", "line", "later field", "two digests"])
async def test_an_import_that_cannot_be_done_changes_nothing(
    cells: list[Bus], broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    problem: str,
) -> None:  # fmt: skip
    there = key()
    await key_store.add(cells[1], there)
    lines, said = {
        "tenant": (line_of(key(tenant="acme")), "penstock tenants add acme"),
        "digest": (line_of(msgspec.structs.replace(there, digest=bytes(32))), "is another key here"),
        "two digests": (2 * line_of(there) + line_of(msgspec.structs.replace(there, digest=bytes(32))), "line 4"),
        "later field": (line_of(key()).replace("}", ',"networks":["10.0.0.0/8"]}'), "does not know networks"),
        "line": ('{"id": "pst-x", "digest": ""}\n', "line 2"),
    }[problem]
    monkeypatch.setattr("sys.stdin", io.StringIO(line_of(key()) + lines))
    assert await keys("import", cells[1], broker) == 1
    assert said in capsys.readouterr().err
    assert await key_store.all_keys(cells[1]) == [there]


async def test_a_key_with_a_later_releases_fields_is_listed_and_not_exported(
    cells: list[Bus], broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    later = key()
    entry = msgspec.msgpack.encode(msgspec.to_builtins(later, builtin_types=(bytes,)) | {"networks": ["10.0.0.0/8"]})
    await cells[0].js.publish(f"$KV.{cells[0].subjects.bucket('keys')}.{later.id}", entry)
    assert await keys("list", cells[0], broker) == 0
    assert later.prefix in capsys.readouterr().out
    assert await keys("export", cells[0], broker) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{later.prefix} cannot be copied: this release of penstock does not know networks" in said.err


def test_every_verb_is_completed() -> None:
    assert COMMANDS["keys"].choices == VERBS


def test_a_line_is_a_key_again_and_has_no_secret() -> None:
    key_id, text = new_key()
    copied = ApiKey(key_id, digest_of(text.encode()), models=("a",), operator=True)
    assert read_keys([line_of(copied), "\n"]) == [copied]
    assert text.rpartition("-")[2] not in line_of(copied)
