"""Each role on the real broker, over everything that any role may do and what none may."""

import re
from collections.abc import Callable

import pytest

from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.permissions import BROKER_ROLES, permissions
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.conftest import Connect, round_trip

MakeBroker = Callable[..., EmbeddedNats]
S = Subjects()
NARROW = [role for role in BROKER_ROLES if role != "operator"]
PEOPLE = ("viewer", "reader", "planner", "keys")

# What nobody but the operator may do, whatever the role.
NOBODY = (
    "$JS.API.STREAM.DELETE.ps_DONE",
    "$JS.API.STREAM.PURGE.ps_REQUESTS",
    "$JS.API.STREAM.UPDATE.ps_TOKENS",
    "$JS.API.STREAM.CREATE.mine",
    "$JS.API.STREAM.MSG.DELETE.ps_KV",
    "$JS.API.STREAM.LIST",
    "$JS.API.CONSUMER.DELETE.ps_WORK.worker-7",
    "$JS.API.CONSUMER.DELETE.ps_REQUESTS.router-standard",
    "$JS.API.CONSUMER.CREATE.ps_WORK.spy",
    "$JS.API.CONSUMER.CREATE.ps_WORK.spy.ps.work.>",
    "$JS.API.CONSUMER.DURABLE.CREATE.ps_WORK.spy",
    "$JS.API.CONSUMER.CREATE.ps_REQUESTS.spy.ps.request.m.standard",
    "$JS.API.CONSUMER.PAUSE.ps_WORK.worker-7",
    "$JS.API.DIRECT.GET.ps_SUBMIT",
    "$JS.API.DIRECT.GET.ps_HANDOFF",
    "$JS.API.STREAM.MSG.GET.ps_SUBMIT",
    "$KV.ps_tenants.acme",
    "ps.live.gw",
    "$SYS.REQ.SERVER.PING",
)
# What some role may do of that all the same.
SOME = {"reader": {"$JS.API.DIRECT.GET.ps_SUBMIT", "$JS.API.DIRECT.GET.ps_HANDOFF", "$JS.API.STREAM.MSG.GET.ps_SUBMIT"}}

CONTENT = ("REQUESTS", "WORK", "TOKENS", "DONE", "KV", "HANDOFF", "SUBMIT", "MEMORY_CONTENTS", "MEMORY_TOKENS")
OBJECTS = ("media", "batches", "results", "snapshots")
# Every way to a stored message, or to one that passes: who may use none of them sees no prompt and no answer.
WAYS_TO_CONTENT = (
    *(
        f"$JS.API.{verb}"
        for stream in (*(f"ps_{name}" for name in CONTENT), *(f"OBJ_ps_{name}" for name in OBJECTS), "KV_ps_accounts")
        for verb in (
            f"DIRECT.GET.{stream}",
            f"DIRECT.GET.{stream}.ps.done.a.b.c",
            f"STREAM.MSG.GET.{stream}",
            f"CONSUMER.CREATE.{stream}",
            f"CONSUMER.CREATE.{stream}.spy",
            f"CONSUMER.CREATE.{stream}.spy.ps.work.x",
            f"CONSUMER.CREATE.{stream}.gateway",
            f"CONSUMER.DURABLE.CREATE.{stream}.spy",
            f"CONSUMER.MSG.NEXT.{stream}.gateway",
            f"STREAM.SNAPSHOT.{stream}",
        )
    ),
    "$JS.API.STREAM.CREATE.mirror",
    "$JS.API.STREAM.UPDATE.ps_PLAN",
)
PASSING = (
    *("ps.request.>", "ps.work.>", "ps.tokens.>", "ps.done.>", "ps.memory.>", "ps.submit.>", "ps.ask.>", "ps.answer.>"),
    *("ps.to.>", "ps.live.work.>", "ps.live.gw", "ps.live.>", "ps.>", "$O.>", "$JS.>", "_INBOX.>", "_INBOX_gateway.>"),
    *("_INBOX_worker.>", "_INBOX_reader.>", "ps.ctl.>", "ps.routed.>", "ps.progress.*", "$KV.>"),
)
COMMANDS = (
    *("ps.request.m.standard.abc", "ps.submit.m", "ps.ask.m", "ps.cancel", "ps.ctl.w", "ps.work.decode.w", "ps.erase"),
    *("ps.tokens.gw", "ps.done.a.b.c", "ps.returned.m", "ps.kv.m.w", "ps.verdict", "ps.reading", "$KV.ps_workers.w"),
    *("$KV.ps_budgets.x", "$KV.ps_routers.r", "$O.ps_media.C.x", "$JS.API.STREAM.PURGE.ps_DONE"),
    *("$JS.API.STREAM.MSG.DELETE.ps_DONE", "$JS.API.CONSUMER.DELETE.ps_REQUESTS.router-standard", "$KV.ps_accounts.x"),
)
KEYS, TENANTS = ("$KV.ps_keys.k",), ("$KV.ps_tenants.acme",)
DRAIN, PLAN = ("ps.drain.w",), ("ps.plan.m", "$KV.ps_planners.m")
MAY_NOT = {
    "viewer": (*WAYS_TO_CONTENT, *COMMANDS, *KEYS, *TENANTS, *DRAIN, *PLAN, "$JS.API.DIRECT.GET.KV_ps_keys"),
    "reader": (
        *COMMANDS,
        *KEYS,
        *TENANTS,
        *DRAIN,
        *PLAN,
        "$JS.API.DIRECT.GET.KV_ps_keys",
        "$JS.API.DIRECT.GET.KV_ps_accounts",
    ),
    "planner": (*WAYS_TO_CONTENT, *COMMANDS, *KEYS, *TENANTS, "$JS.API.DIRECT.GET.KV_ps_keys"),
    "keys": (*WAYS_TO_CONTENT, *COMMANDS, *TENANTS, *DRAIN, *PLAN, "$JS.API.DIRECT.GET.KV_ps_routers"),
}
MAY = {"viewer": (), "reader": (), "planner": (*DRAIN, *PLAN), "keys": (*KEYS, "$JS.API.DIRECT.GET.KV_ps_workers")}


def matches(pattern: str, subject: str) -> bool:
    """As the broker does it: "*" one token, ">" the rest."""
    exact = re.escape(pattern).replace(r"\*", r"[^.]+")
    return re.fullmatch(exact.removesuffix(">") + (r".+" if exact.endswith(">") else ""), subject) is not None


def samples(patterns: tuple[str, ...]) -> list[str]:
    """One subject for each pattern."""
    return [pattern.replace("*", "x").replace(">", "x.y") for pattern in patterns]


@pytest.fixture
async def ready(make_broker: MakeBroker, connect: Connect) -> EmbeddedNats:
    """A server of its own: what is allowed here leaves nonsense in its streams."""
    server = make_broker()
    await server.start()
    await apply(await connect(server), topology(S))
    return server


@pytest.mark.parametrize("role", NARROW)
async def test_a_role_may_publish_what_its_rights_say_and_nothing_else(
    ready: EmbeddedNats, connect: Connect, role: str
) -> None:
    own = permissions(role, S)
    assert own is not None
    every = {subject for other in NARROW for subject in samples(permissions(other, S).publish)} | {*NOBODY}  # type: ignore[union-attr]
    every |= {*own.deny}
    errors: list[str] = []
    client = await connect(ready, role, errors)
    for subject in sorted(every):
        await client.publish(subject, b"")
    await round_trip(client)
    refused = {subject for subject in every if any(f'"{subject.lower()}"' in error.lower() for error in errors)}
    allowed = {subject for subject in every if any(matches(one, subject) for one in own.publish)}
    assert refused == every - (allowed - {*own.deny})
    assert refused >= {*NOBODY} - SOME.get(role, set())


@pytest.mark.parametrize("role", PEOPLE)
async def test_who_watches_plans_or_manages_keys_reaches_no_content_and_gives_no_other_orders(
    ready: EmbeddedNats, connect: Connect, role: str
) -> None:
    errors: list[str] = []
    client = await connect(ready, role, errors)
    for subject in (*MAY_NOT[role], *MAY[role]):
        await client.publish(subject, b"{}")
    passing = [subject for subject in PASSING if subject != f"_INBOX_{role}.>"]
    for subject in passing:
        await client.subscribe(subject)
    await round_trip(client)
    refused = {error.partition('"')[2].partition('"')[0].lower() for error in errors}
    assert refused == {subject.lower() for subject in (*MAY_NOT[role], *passing)}


@pytest.mark.parametrize("role", NARROW)
async def test_a_role_may_subscribe_to_what_its_rights_say_and_nothing_else(
    ready: EmbeddedNats, connect: Connect, role: str
) -> None:
    own = permissions(role, S)
    assert own is not None
    every = {subject for other in NARROW for subject in permissions(other, S).subscribe}  # type: ignore[union-attr]
    every |= {">", "ps.>", "$JS.>", "$SYS.>", "ps.work.>", "ps.request.>", "ps.tokens.>", "_INBOX_operator.>"}
    errors: list[str] = []
    client = await connect(ready, role, errors)
    for subject in sorted(every):
        await client.subscribe(subject)
    await round_trip(client)
    refused = {subject for subject in every if any(f'"{subject.lower()}"' in error.lower() for error in errors)}
    assert refused == {subject for subject in every if not any(covers(one, subject) for one in own.subscribe)}


def covers(allowed: str, wanted: str) -> bool:
    """Whether a subscription with wildcards lies within one that is allowed."""
    return allowed == wanted or (
        matches(allowed, wanted.replace(">", "x.y").replace("*", "x"))
        and not (wanted.endswith(">") and not allowed.endswith(">"))
    )
