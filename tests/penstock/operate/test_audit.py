"""The audit log on a real broker: who did what is in it, and nobody can write it for another or take it away."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import pytest

from penstock.cli import commands
from penstock.configs.logs import setup
from penstock.infra.bus.audit import Auditor, Watch, broker_user, of_advisory
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.nats_server.jetstream_api import BrokerProblem, request
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.audit import AuditLine, described, unexplained
from penstock.schemas.audit import AuditEntry
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import encode
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, end
from tests.penstock.planner.test_loop import register

MakeBroker = Callable[..., EmbeddedNats]
S = Subjects()


@pytest.fixture
async def server(make_broker: MakeBroker) -> EmbeddedNats:
    made = make_broker()
    await made.start()
    return made


@pytest.fixture
async def bus(server: EmbeddedNats) -> AsyncIterator[Bus]:
    """The operator's."""
    async with opened(server, S) as bus:
        yield bus


@pytest.fixture
async def watch(server: EmbeddedNats, bus: Bus) -> AsyncIterator[Watch]:
    """As a router runs it, with a router's rights. Its log lines are not what commands print meanwhile."""
    setup("json", "error")
    refusals: list[str] = []
    async with await connect(server.url("router"), role="router", name="router:r-0") as own:
        own.on_refused.append(refusals.append)
        made = Watch(own, Auditor(own, own.tasks))
        own.tasks.spawn(made.run(), name="audit")
        while not made.ready:  # noqa: ASYNC110 - bounded by the test's own limit
            await asyncio.sleep(0.01)
        yield made
    assert not refusals


async def run(*argv: str) -> int:
    return await asyncio.to_thread(commands.main, argv)


async def listed(server: EmbeddedNats, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    """What ``penstock audit`` prints to a viewer."""
    capsys.readouterr()
    assert await run("audit", "--json", "--nats-url", server.url("viewer"), *flags) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def until(server: EmbeddedNats, capsys: pytest.CaptureFixture[str], wanted: Callable[[dict[str, Any]], bool],
                *flags: str) -> dict[str, Any]:  # fmt: skip
    async with asyncio.timeout(20):
        while True:
            found = [each for each in await listed(server, capsys, *flags) if wanted(each)]
            if found:
                return found[-1]
            await asyncio.sleep(0.05)


async def test_what_commands_change_is_listed_with_the_user_of_their_connection(
    server: EmbeddedNats, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, planner, operator = (server.url(role) for role in ("keys", "planner", "operator"))
    assert await run("keys", "create", "--quiet", "--nats-url", keys) == 0
    prefix = capsys.readouterr().out.rpartition("-")[0]
    assert await run("keys", "set", prefix, "--rpm", "7", "--nats-url", keys) == 0
    night = ("--rpm", "9", "--models", "tiny", "--about", "of the night")
    assert await run("keys", "set", prefix, *night, "--nats-url", keys) == 0
    capsys.readouterr()
    assert await run("keys", "set", prefix, "--tenant", "blue", "--rpm", "8", "--nats-url", keys) == 1
    assert "the tenant of a key cannot change: `penstock keys create --tenant blue` makes" in capsys.readouterr().err
    assert await run("keys", "revoke", prefix, "--nats-url", operator) == 0
    await register(bus, "w-1")
    assert await run("drain", "w-1", "--force", "--nats-url", planner) == 1
    assert await run("tenants", "add", "acme", "--weight", "2", "--data-dir", str(server.data_dir)) == 0
    changed = ("--models", "tiny", "--weight", "3", "--data-dir", str(server.data_dir))
    assert await run("tenants", "add", "acme", *changed) == 0
    limits = ("--max-age", "2h", "--max-bytes", "2GiB", "--yes")
    assert await run("streams", "set", "KV", *limits, "--nats-url", operator) == 0
    asked = await accept(bus)
    await end(bus, asked, 1)
    assert await run("forget", asked.id, "--yes", "--nats-url", operator) == 0
    found = await listed(server, capsys)
    seen = [(each["user"], each["action"], each["what"], each["detail"]) for each in found]
    assert seen == [
        ("keys", "keys create", prefix, "of tenant default"),
        ("keys", "keys set", prefix, "rpm: none → 7"),
        ("keys", "keys set", prefix, "models: all → tiny, rpm: 7 → 9, about: none → of the night"),
        ("operator", "keys revoke", prefix, "of tenant default"),
        ("planner", "drain", "w-1", "ready → draining, id w-1"),
        ("planner", "drain", "w-1", "ready → draining, id w-1"),
        ("operator", "tenants add", "acme", "weight: 2"),
        ("operator", "tenants add", "acme", "models: all → tiny, weight: 2 → 3"),
        ("operator", "streams set", "ps_KV", "max-age: 60 min → 2 h, max-bytes: 1.0 GiB → 2.0 GiB"),
        ("operator", "forget", asked.id, "1 request"),
    ]
    assert all("@" in each["by"] and not each["seen_by"] for each in found)
    assert "does not answer" in found[5]["error"], "what fails says so"
    assert [each["user"] for each in await listed(server, capsys, "--user", "planner")] == ["planner"] * 2
    assert await run("audit", "--data-dir", str(server.data_dir)) == 0
    printed = capsys.readouterr().out
    assert f"keys set  {prefix}  rpm: none → 7  by " in printed


async def test_a_drain_that_a_person_types_beside_the_data_folder_is_of_the_operator(
    server: EmbeddedNats, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await register(bus, "w-1")
    assert await run("drain", "w-1", "--force", "--data-dir", str(server.data_dir)) == 1
    assert "does not answer" in capsys.readouterr().err
    found = await listed(server, capsys)
    assert [(each["user"], each["action"]) for each in found] == [("operator", "drain")] * 2


async def test_changed_passwords_are_entries_and_both_users_of_a_role_are_found_by_its_name(
    server: EmbeddedNats, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    del bus  # it makes the streams
    place = ("--data-dir", str(server.data_dir))
    for step in ("rotate", "retire", "rotate"):
        assert await run("passwords", step, "keys", "planner", *place) == 0
        if step == "rotate":
            assert await run("keys", "create", "--quiet", "--nats-url", server.url("keys")) == 0
    found = await listed(server, capsys)
    assert [(each["user"], each["action"], each["what"]) for each in found if each["action"] != "keys create"] == [
        ("operator", "passwords rotate", "keys-2, planner-2"),
        ("operator", "passwords retire", "keys, planner"),
        ("operator", "passwords rotate", "keys, planner"),
    ]
    assert [each["user"] for each in await listed(server, capsys, "--user", "keys")] == ["keys-2", "keys"]
    assert [each["user"] for each in await listed(server, capsys, "--user", "keys-2")] == ["keys-2"]


async def test_what_is_done_past_the_commands_is_seen_by_a_router(
    server: EmbeddedNats, bus: Bus, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    intruder = await nats.connect(server.url("keys"), inbox_prefix="_INBOX_keys")
    await intruder.jetstream().publish("$KV.ps_keys.0a1b2c3d4e5f", b"x")
    await intruder.close()
    stored = await until(server, capsys, lambda each: each["action"] == "stored")
    assert (stored["user"], stored["what"], stored["seen_by"]) == ("*", "keys.0a1b2c3d4e5f", "router")
    person = await nats.connect(server.url("operator"), name="curious", inbox_prefix="_INBOX_operator")
    await person.jetstream().publish("ps.plan.m", b"x")
    for _ in range(3):
        await person.request("$JS.API.STREAM.MSG.DELETE.ps_PLAN", b'{"seq":7}')
    await person.request("$JS.API.STREAM.PURGE.ps_PLAN", b"{}")
    await person.request("$JS.API.STREAM.UPDATE.ps_PLAN", b'{"name":"ps_PLAN","storage":"memory"}')
    await person.request("$JS.API.STREAM.INFO.ps_PLAN", b"")
    await person.close()
    purged = await until(server, capsys, lambda each: each["detail"] == "stream purge")
    assert (purged["user"], purged["what"], purged["seen_by"]) == ("operator", "ps_PLAN", "router")
    assert "curious at 127.0.0.1" in purged["connection"]
    failed = await until(server, capsys, lambda each: each["detail"] == "stream update")
    assert failed["error"]
    found = await listed(server, capsys)
    assert sum(each["count"] for each in found if each["detail"] == "stream msg delete") == 3
    assert not any("info" in each["detail"] for each in found)


async def test_a_router_whose_connection_breaks_at_its_start_stays_and_sees_what_is_done_later(
    server: EmbeddedNats, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended after 10 s: the broker's answer that it sees everything from now on was lost."""
    async with await connect(server.url("router"), role="router", name="router:r-0") as own:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        watch = Watch(own, Auditor(own, own.tasks))
        watching = asyncio.create_task(watch.run())
        assert not (await asyncio.wait({watching}, timeout=0.1))[0]
        server.kill()
        await server.wait()
        await server.start()
        while not watch.ready:
            assert not watching.done(), watching.exception()
            await asyncio.sleep(0.01)
        assert await run("keys", "create", "--quiet", "--nats-url", server.url("keys")) == 0
        await until(server, capsys, lambda each: each["action"] == "keys create")
        watching.cancel()


async def test_what_a_command_notes_is_not_listed_a_second_time_as_the_broker_says_it(
    server: EmbeddedNats, bus: Bus, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("keys", "create", "--quiet", "--nats-url", server.url("keys")) == 0
    assert await run("streams", "set", "KV", "--max-age", "2h", "--yes", "--nats-url", server.url("operator")) == 0
    await until(server, capsys, lambda each: each["action"] == "stored", "--all")
    await until(server, capsys, lambda each: each["detail"] == "stream update", "--all")
    mine = [each for each in await listed(server, capsys) if each["what"] != "others"]
    assert [each["action"] for each in mine] == ["keys create", "streams set"]


async def test_reading_the_tenants_is_no_entry(
    server: EmbeddedNats, bus: Bus, watch: Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each read was several: of one consumer each that the client makes to list the keys of a bucket."""
    place = ("--nats-url", server.url("operator"), "--data-dir", str(tmp_path))
    for argv in (("add", "acme"), ("add", "blue"), ("remove", "blue"), ("list",), ("conf",)):
        capsys.readouterr()
        assert await run("tenants", *argv, *place) == 0
        if argv == ("list",):
            assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tenant", "acme"]
    assert await run("streams", "set", "KV", "--max-age", "2h", "--yes", "--nats-url", server.url("operator")) == 0
    await until(server, capsys, lambda each: each["what"] == "ps_KV" and each["detail"] == "stream update", "--all")
    found = await listed(server, capsys, "--all")
    assert [each for each in found if "accounts" in each["what"] and each["detail"] != "stream create"] == []


async def test_no_user_writes_for_another_or_takes_an_entry_away(server: EmbeddedNats, bus: Bus) -> None:
    entry = encode(AuditEntry("keys create", "pst-000000000000"))
    for user, other in (("keys", "operator"), ("operator", "keys"), ("gateway", "router"), ("planner", "keys")):
        refusals: list[str] = []
        async with await connect(server.url(user), role=user, name="test") as own:
            own.on_refused.append(refusals.append)
            assert await broker_user(own.nc) == user
            await own.nc.publish(S.audit(other), entry)
            await own.nc.publish(S.audit(user), entry)
            await broker_user(own.nc)
        assert len(refusals) == 1, (user, refusals)
        assert S.audit(other) in refusals[0]
    stored = (await request(bus.nc, "STREAM.INFO.ps_AUDIT", {}))["state"]["messages"]
    for verb, body in (("STREAM.PURGE", {}), ("STREAM.MSG.DELETE", {"seq": 1})):
        with pytest.raises(BrokerProblem):
            await request(bus.nc, f"{verb}.ps_AUDIT", body)
    with pytest.raises(BrokerProblem, match="may not use"):
        await request(bus.nc, "STREAM.DELETE.ps_AUDIT", {})
    assert (await request(bus.nc, "STREAM.INFO.ps_AUDIT", {}))["state"]["messages"] == stored >= 4


async def test_nothing_is_done_that_cannot_be_noted(
    server: EmbeddedNats, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full, or the stream has lost its leader: here it takes no message of this size."""
    config = (await request(bus.nc, "STREAM.INFO.ps_AUDIT", {}))["config"]
    metadata = {key: text for key, text in config.get("metadata", {}).items() if not key.startswith("_nats.")}
    await request(bus.nc, "STREAM.UPDATE.ps_AUDIT", config | {"max_msg_size": 1, "metadata": metadata})
    assert await run("keys", "create", "--nats-url", server.url("keys")) == 1
    assert "the audit log does not take an entry" in capsys.readouterr().err
    assert await run("keys", "list", "--nats-url", server.url("keys")) == 0
    assert "there are no valid keys" in capsys.readouterr().out


async def test_before_the_upgrades_streams_are_made_commands_work_and_say_that_nothing_is_noted(
    server: EmbeddedNats, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (server.data_dir / "nats.conf").read_text()
    assert '"$JS.API.STREAM.DELETE.ps_AUDIT"' in config
    sys = await nats.connect(server.url("operator"), inbox_prefix="_INBOX_operator")
    await sys.close()
    async with opened(server, Subjects("old")) as other:  # of this namespace the operator may delete it
        await request(other.nc, "STREAM.DELETE.old_AUDIT", {})
    flags = ("--nats-url", server.url("operator"), "--namespace", "old")
    assert await run("keys", "create", "--quiet", *flags) == 0
    assert "audit_stream_missing" in capsys.readouterr().err


def advisory(subject: str, user: str = "operator", **more: str) -> bytes:
    client = {"user": user, "name": "n", "host": "h", "id": 7, "acc": "APP"} | more
    return json.dumps({"subject": subject, "client": client, "response": '{"success":true}'}).encode()


def test_questions_other_namespaces_and_the_pipeline_itself_are_not_written() -> None:
    assert of_advisory(advisory("$JS.API.STREAM.PURGE.ps_DONE"), S) == AuditEntry(
        "api", "ps_DONE", "stream purge", user="operator", connection="n at h, 7"
    )
    read_by = of_advisory(advisory("$JS.API.CONSUMER.CREATE.ps_DONE.spy.ps.done.>", "reader"), S)
    assert read_by is not None
    assert (read_by.user, read_by.what, read_by.detail) == ("reader", "ps_DONE.spy.ps.done.>", "consumer create")
    for subject, user in (
        ("$JS.API.STREAM.INFO.ps_DONE", "operator"),
        ("$JS.API.STREAM.PURGE.blue_DONE", "operator"),
        ("$JS.API.STREAM.MSG.DELETE.ps_REQUESTS", "router"),
        ("$JS.API.STREAM.MSG.DELETE.ps_REQUESTS", "router-2"),
    ):
        assert of_advisory(advisory(subject, user), S) is None
    assert of_advisory(b"{", S) is None


def test_who_logs_in_by_an_nkey_or_a_jwt_is_known_where_its_name_is() -> None:
    """Each worker's start looked as if a foreign program had made a consumer."""
    key = f"U{'A' * 55}"
    start = "$JS.API.CONSUMER.CREATE.ps_WORK.w-1.ps.work.decode.w-1"
    assert of_advisory(advisory(start, key), S) is None, "a worker's own consumer"
    for other in ("$JS.API.CONSUMER.CREATE.ps_WORK.spy.ps.work.decode.w-1", "$JS.API.CONSUMER.CREATE.ps_DONE.w.ps.x.w"):
        assert of_advisory(advisory(other, key), S) is not None
    assert of_advisory(advisory(start, "operator"), S) is not None
    purge = "$JS.API.STREAM.PURGE.ps_DONE"
    assert of_advisory(advisory(purge, key), S) is not None
    assert of_advisory(advisory(purge, key), S, {key: "router-2"}) is None
    seen = of_advisory(advisory(purge, key), S, {key: "operator"})
    assert seen is not None
    assert (seen.user, seen.connection) == (key, "operator: n at h, 7")
    assert of_advisory(advisory(purge, key, name_tag="gateway"), S) is None, "a JWT has its user's name"
    of_jwt = of_advisory(advisory(purge, key, name_tag="keys"), S)
    assert of_jwt is not None
    assert of_jwt.connection == "keys: n at h, 7"


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (AuditEntry("api", "ps_DONE", "stream purge"), ("stream purge", "ps_DONE", "")),
        (AuditEntry("api", "KV_ps_accounts", "stream create"), ("stream create", "bucket ps_accounts", "")),
        (
            AuditEntry("api", "ps_DONE.spy.ps.done.>", "consumer create"),
            ("consumer create", "ps_DONE", "spy reads ps.done.>"),
        ),
        (
            AuditEntry("stored", "keys.0a1b2c3d4e5f", "revision 3"),
            ("key stored", "pst-0a1b2c3d4e5f", ""),
        ),
        (
            AuditEntry("stored", "tenants.acme", "revision 3, deleted"),
            ("tenant deleted", "acme", ""),
        ),
        (AuditEntry("keys set", "pst-0a", "rpm: 1 → 2"), ("keys set", "pst-0a", "rpm: 1 → 2")),
    ],
)
def test_what_the_broker_says_is_shown_in_the_words_of_other_commands(
    entry: AuditEntry, shown: tuple[str, str, str]
) -> None:
    assert described(entry) == shown


def test_only_what_is_near_and_of_the_same_user_explains_what_the_broker_says() -> None:
    noted = AuditLine(10**12, "operator", AuditEntry("forget", "x"))
    deletes = AuditEntry("api", "ps_DONE.1", "stream msg delete", user="operator")
    near, late = (
        AuditLine(10**12 + 5, "operator", deletes, "router"),
        AuditLine(10**12 + 10**11, "operator", deletes, "router"),
    )
    other = AuditLine(10**12 + 5, "reader", deletes, "router")
    assert unexplained([noted, near, late, other]) == [noted, late, other]
