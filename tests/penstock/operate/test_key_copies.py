"""``penstock keys export`` and ``import``, from one namespace of a real nats-server to another."""

import asyncio
import io
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from penstock.cli.commands import COMMANDS
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate import key_store
from penstock.operate.key_store import line_of, read_keys
from penstock.operate.keys import VERBS, run
from penstock.schemas.audit import decode
from penstock.schemas.keys import ApiKey, digest_of, new_key
from penstock.schemas.requests import Priority
from penstock.schemas.subjects import Subjects
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
    assert await copy() == "2 keys added, 0 changed, 1 revoked, 0 as they were\n"
    noted = read(cells[1], cells[1].subjects.stream("AUDIT"), cells[1].subjects.all("audit"))
    did = [(entry.action, entry.what) for entry in [decode(each.data) async for each in noted]]
    assert did == [("keys create", own.prefix), *(("keys import", each.prefix) for each in (stays, ends, gone))]
    await key_store.revoke(cells[0], ends.id)
    assert await copy() == "0 keys added, 0 changed, 1 revoked, 2 as they were\n"
    here = {each.id: each for each in await key_store.all_keys(cells[1])}
    assert here.keys() == {stays.id, ends.id, gone.id, own.id}
    assert (here[stays.id], bool(here[ends.id].revoked_ns)) == (stays, True)
    await key_store.revoke(cells[1], stays.id)
    assert await copy() == "0 keys added, 0 changed, 0 revoked, 3 as they were\n"  # what was revoked here stays so
    assert (await key_store.find(cells[1], stays.id))[0].revoked_ns


async def test_limits_that_are_changed_at_one_deployment_are_changed_where_its_keys_were_copied_to(
    cells: list[Bus], broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = key(created_ns=1)
    for cell in cells:
        await key_store.add(cell, here)

    async def copy(start: int, end: int) -> str:
        assert await keys("export", cells[start], broker) == 0
        monkeypatch.setattr("sys.stdin", io.StringIO(capsys.readouterr().out))
        assert await keys("import", cells[end], broker) == 0
        return capsys.readouterr().out

    await key_store.change(cells[0], here.id, requests_per_minute=7)
    assert await copy(0, 1) == "0 keys added, 1 changed, 0 revoked, 0 as they were\n"
    assert (await key_store.find(cells[1], here.id))[0].requests_per_minute == 7
    assert await copy(0, 1) == "0 keys added, 0 changed, 0 revoked, 1 as they were\n"
    await key_store.change(cells[1], here.id, requests_per_minute=8)
    assert await copy(0, 1) == "0 keys added, 0 changed, 0 revoked, 1 as they were\n"  # it was changed later here
    assert await copy(1, 0) == "0 keys added, 1 changed, 0 revoked, 0 as they were\n"


async def test_a_change_names_what_was_and_what_is_and_leaves_the_rest(
    cells: list[Bus], broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    made = key(created_ns=1, models=("m",), tokens_per_minute=500, about="theirs")
    await key_store.add(cells[0], made)
    place = ["--nats-url", broker.url(), "--namespace", cells[0].subjects.namespace]

    async def change(*flags: str) -> tuple[int, str]:
        status = await asyncio.to_thread(run, ["set", made.prefix, *flags, *place])
        said = capsys.readouterr()
        return status, said.out + said.err

    status, said = await change("--rpm", "1", "--tpm", "none", "--priority", "batch", "--expires", "12h", "--operator")
    assert status == 0
    for part in ("operator: no → yes", "rpm: 60 → 1", "tpm: 500 → none", "priority: none → batch", "expires: none → "):
        assert part in said
    stored, _ = await key_store.find(cells[0], made.id)
    assert (stored.requests_per_minute, stored.tokens_per_minute, stored.priority) == (1, 0, Priority.batch)
    assert (stored.operator, stored.models, stored.about, stored.digest) == (True, ("m",), "theirs", made.digest)
    assert stored.expires_ns > stored.changed_ns > 0
    assert "@" in stored.changed_by
    assert await asyncio.to_thread(run, ["list", "--json", *place]) == 0
    (listed,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (listed["rpm"], listed["tpm"], listed["changed_by"]) == (1, None, stored.changed_by)
    assert (await change("--models", "all", "--priority", "none", "--expires", "never", "--no-operator"))[0] == 0
    stored, _ = await key_store.find(cells[0], made.id)
    assert (stored.models, stored.priority, stored.expires_ns, stored.operator) == ((), None, 0, False)
    for flags, why in (
        ((), "name a limit"),
        (("--about", "x" * 201), "the limit is 200"),
        (("--expires", "2001-01-01"), "is past"),
    ):
        status, said = await change(*flags)
        assert (status, why in said) == (1, True), said
    assert (await key_store.find(cells[0], made.id))[0] == stored
    await key_store.revoke(cells[0], made.id)
    status, said = await change("--rpm", "5")
    assert (status, "was revoked for good" in said) == (1, True)
    for wrong in ("0", "-1", "many"):
        with pytest.raises(SystemExit):
            run(["set", made.prefix, "--rpm", wrong, *place])


async def test_exports_of_several_deployments_are_read_as_one(
    cells: list[Bus], broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stays, ends = key(created_ns=1), key(created_ns=2)
    ended = msgspec.structs.replace(ends, revoked_ns=3)

    async def copy(*lines: ApiKey) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(map(line_of, lines))))
        assert await keys("import", cells[1], broker) == 0
        return capsys.readouterr().out

    assert await copy(stays, ended, stays, ends) == "1 keys added, 0 changed, 1 revoked, 0 as they were\n"
    assert await copy(stays, ends) == "0 keys added, 0 changed, 0 revoked, 2 as they were\n"  # an older export
    assert sorted(await key_store.all_keys(cells[1]), key=lambda each: each.created_ns) == [stays, ended]


@pytest.mark.parametrize("problem", ["tenant", "digest", "line", "later field", "two digests"])
async def test_an_import_that_cannot_be_done_changes_nothing(
    cells: list[Bus], broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    problem: str,
) -> None:  # fmt: skip
    there = key()
    await key_store.add(cells[1], there)
    lines, said = {
        "tenant": (
            line_of(key(tenant="zenith")) + line_of(key(tenant="acme")),
            "not here: acme, zenith; nothing was changed. First `penstock tenants restore`, if the broker",
        ),
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
    assert COMMANDS["keys"].choices == tuple(VERBS)


def test_a_line_is_a_key_again_and_has_no_secret() -> None:
    key_id, text = new_key()
    copied = ApiKey(key_id, digest_of(text.encode()), models=("a",), operator=True)
    assert read_keys([line_of(copied), "\n"]) == [copied]
    assert text.rpartition("-")[2] not in line_of(copied)
