"""The embedded server and its permissions, on a real nats-server."""

import asyncio
import contextlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from penstock.configs.settings import NatsSettings
from penstock.infra.bus import object_store
from penstock.infra.bus.connection import connect as open_bus
from penstock.infra.bus.puller import config_of
from penstock.infra.nats_server import apply_streams, server
from penstock.infra.nats_server.apply_streams import SET_BY_OPERATOR, apply, metadata_of, stream_configs, widened
from penstock.infra.nats_server.binary import ServerFailed, find_server, parse_version
from penstock.infra.nats_server.config import USERS, ServerConfig, render
from penstock.infra.nats_server.datadir import DataDirBusy, Lock, load_secrets
from penstock.infra.nats_server.jetstream_api import BrokerProblem, Config, existing_info, request
from penstock.infra.nats_server.permissions import BROKER_ROLES, permissions
from penstock.infra.nats_server.retention import set_limits
from penstock.infra.nats_server.server import EmbeddedNats, memory_bytes, was_started_with, with_memory_limit
from penstock.infra.process.sockets import CannotListen
from penstock.launch.nats import apply_at, own_config
from penstock.schemas.streams import PACKED, PROMPTS, topology
from penstock.schemas.subjects import Subjects, cell_namespace
from tests.cluster_support import NODES, three_nodes
from tests.conftest import Connect, round_trip
from tests.pipeline.support import until as eventually

MakeBroker = Callable[..., EmbeddedNats]
S = Subjects()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the far end has no event to wait for
            await asyncio.sleep(0.005)


async def refused(client: Client, errors: list[str], subject: str) -> bool:
    """Whether a publish is a permissions violation; the server answers in order, so a round trip is proof."""
    errors.clear()
    await client.publish(subject, b"x")
    await round_trip(client)
    return any(subject.lower() in error.lower() for error in errors)


# -- configuration ------------------------------------------------------------------------------------------------


def config_text(**more: object) -> str:
    options: dict[str, object] = {"name": "n", "port": 4222, "store_dir": "/data", "subjects": S}
    options["secrets"] = {user: f"pw-{user}" for user in USERS}
    return render(ServerConfig(**(options | more)))  # type: ignore[arg-type]


def test_the_server_listens_on_loopback_only_and_admits_large_messages() -> None:
    text = config_text()
    assert 'host: "127.0.0.1"' in text
    assert "0.0.0.0" not in text
    assert "max_payload: 8388608" in text
    assert "default_max_consumers: -1" in text
    assert 'ping_interval: "1s"' in text
    assert "http:" not in text
    for host in ("127.0.0.1", "0.0.0.0"):  # monitoring asks for no password
        assert 'http: "127.0.0.1:8222"' in config_text(monitor_port=8222, host=host)
    assert 'http: "10.0.0.7:8222"' in config_text(monitor_port=8222, monitor_host="10.0.0.7")
    assert 'sync_interval: "120s"' in text
    assert "sync_interval: always" in config_text(sync_always=True)
    assert "cluster {" not in text


def test_a_printed_configuration_for_other_machines_keeps_monitoring_on_loopback() -> None:
    secrets = {user: f"pw-{user}" for user in USERS}
    cluster = NatsSettings(cluster=("a", "b", "c"), node="a", monitor_port=8222)
    text = own_config(cluster, secrets)
    assert 'host: "0.0.0.0"' in text
    assert 'http: "127.0.0.1:8222"' in text
    asked = own_config(msgspec.structs.replace(cluster, monitor_host="0.0.0.0"), secrets)
    assert 'http: "0.0.0.0:8222"' in asked


def test_the_server_listens_where_it_is_told_to_and_is_reached_on_loopback(tmp_path: Path) -> None:
    assert 'host: "0.0.0.0"' in config_text(host="0.0.0.0")
    broker = EmbeddedNats(tmp_path, host="0.0.0.0")
    broker._secrets = {"worker": "x"}
    assert broker.url("worker").startswith("nats://worker:x@127.0.0.1:")


def test_every_user_has_its_own_password_and_only_the_operator_has_all_rights() -> None:
    text = config_text()
    assert all(f'user: "{user}", password: "pw-{user}"' in text for user in USERS)
    assert [role for role in BROKER_ROLES if ">" in permissions(role, S).publish] == ["operator"]  # type: ignore[union-attr]
    assert permissions("sys", S) is None


def test_a_path_with_blanks_and_quotes_stays_one_string() -> None:
    assert r'store_dir: "/my \"data\" dir"' in config_text(store_dir='/my "data" dir')


def test_permissions_follow_the_namespace() -> None:
    text = config_text(subjects=Subjects("blue"))
    assert "blue.request.>" in text
    assert '"ps.' not in text
    assert "ps_" not in text


def test_an_unknown_role_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such role"):
        permissions("root", S)


# -- permissions --------------------------------------------------------------------------------------------------


@pytest.fixture
async def ready(broker: EmbeddedNats, nc: Client) -> EmbeddedNats:
    """The shared server with the streams of the namespace its users know."""
    await apply(nc, topology(S))
    return broker


@pytest.mark.parametrize(
    ("role", "subject"),
    [
        ("worker", S.request("m", "standard", "r")),
        ("worker", S.work("encode", "other")),
        ("worker", S.submit("m", "default")),
        ("worker", "$JS.API.STREAM.DELETE.ps_TOKENS"),
        ("worker", "$JS.API.CONSUMER.DELETE.ps_REQUESTS.router-standard"),
        ("worker", "$JS.API.CONSUMER.MSG.NEXT.ps_REQUESTS.router-standard"),
        ("gateway", S.kv("m", "w")),
        ("gateway", S.lease("w")),
        ("gateway", S.work("aggregated", "w")),
        ("router", S.kv("m", "w")),
        ("router", S.submit("m", "default")),
        ("router", "$JS.API.STREAM.PURGE.ps_REQUESTS"),
        ("client", S.request("m", "standard", "r")),
        ("client", S.tokens("g0")),
        ("client", "$JS.API.STREAM.INFO.ps_REQUESTS"),
        ("client", "$JS.API.DIRECT.GET.ps_TOKENS"),
        ("client", "$KV.ps_tenants.default"),
        ("client", S.answer("key")),
        ("client", "_INBOX.another"),
    ],
)
async def test_a_role_cannot_publish_what_is_not_its_own(
    ready: EmbeddedNats, role: str, subject: str, connect: Connect
) -> None:
    errors: list[str] = []
    client = await connect(ready, role, errors)
    assert await refused(client, errors, subject)


async def test_a_workers_request_is_not_stored(ready: EmbeddedNats, nc: Client, connect: Connect) -> None:
    worker = await connect(ready, "worker")
    await worker.publish(S.request("m", "standard", "r"), b"forged")
    await round_trip(worker)
    with pytest.raises(NotFoundError):
        await nc.jetstream().get_last_msg(S.stream("REQUESTS"), S.request("m", "standard", "r"), direct=True)


@pytest.mark.parametrize(
    ("role", "subject"),
    [
        ("client", "_INBOX_gateway.>"),
        ("client", S.all("live")),
        ("client", S.all("to")),
        ("client", "_R_.>"),
        ("client", ">"),
        ("worker", "_INBOX_router.>"),
        ("worker", S.all("live")),
        ("gateway", "_INBOX_worker.>"),
        ("router", "_INBOX_gateway.>"),
    ],
)
async def test_a_role_cannot_read_anothers_replies(
    ready: EmbeddedNats, role: str, subject: str, connect: Connect
) -> None:
    errors: list[str] = []
    client = await connect(ready, role, errors)
    await client.subscribe(subject)
    await round_trip(client)
    await until(lambda: any("subscription" in error.lower() for error in errors))


async def test_the_way_of_a_request_needs_no_more_than_the_roles_have(ready: EmbeddedNats, connect: Connect) -> None:
    errors: list[str] = []
    roles = ("gateway", "router", "worker", "client")
    gateway, router, worker, client = [await connect(ready, role, errors) for role in roles]
    live: list[str] = []

    async def follow(message: object) -> None:
        live.append(message.subject)  # type: ignore[attr-defined]

    for follower in (gateway, router):
        await follower.subscribe(S.all("live"), cb=follow)
        await round_trip(follower)

    await client.publish(S.submit("m"), b"{}", headers={"Penstock-Reply-To": S.reply("me")})
    await round_trip(client)
    answers = [await client.subscribe(subject) for subject in (S.reply("me"), S.answer("key"))]
    await round_trip(client)
    submits = await gateway.jetstream().pull_subscribe_bind("gateway", S.stream("SUBMIT"))
    (submit,) = await submits.fetch(1, timeout=5)
    assert submit.subject == S.submit("m", "default")
    await submit.ack_sync()
    await gateway.publish(S.mailbox("default", S.reply("me")), b"answer")
    await gateway.publish(S.answer("key", "default"), b"answer")
    assert [(await sub.next_msg(timeout=5)).data for sub in answers] == [b"answer"] * 2

    await gateway.jetstream().publish(S.request("m", "standard", "r"), b"request")
    requests = await router.jetstream().pull_subscribe_bind("router-standard", S.stream("REQUESTS"))
    (request,) = await requests.fetch(1, timeout=5)
    await router.jetstream().publish(S.work("aggregated", "w1"), b"job")
    await request.ack_sync()

    consumer = ConsumerConfig(
        name="w1", durable_name="w1", filter_subject=S.work("aggregated", "w1"), ack_policy=AckPolicy.EXPLICIT
    )
    await worker.jetstream().add_consumer(S.stream("WORK"), consumer)
    work = await worker.jetstream().pull_subscribe_bind("w1", S.stream("WORK"))
    (job,) = await work.fetch(1, timeout=5)
    await job.in_progress()
    for subject in (S.tokens("g0"), S.kv("m", "w1"), S.lease("w1"), S.done("t", "m", "r"), S.returned("m")):
        await worker.jetstream().publish(subject, b"x")
    await job.ack_sync()

    control = await worker.subscribe(S.control("w1"))
    await round_trip(worker)
    asking = asyncio.create_task(router.request(S.control("w1"), b"dump", timeout=5))
    await (await control.next_msg(timeout=5)).respond(b"ok")
    assert (await asking).data == b"ok"
    # Once only: the right to answer is not a right to publish.
    for subject in (S.tokens("g0"), S.done("t", "m", "r"), S.lease("w1")):
        await router.jetstream().publish(subject, b"x")

    last = await gateway.jetstream().get_last_msg(S.stream("TOKENS"), S.tokens("g0"), direct=True)
    assert last.data == b"x"
    await until(lambda: S.live(S.lease("w1")) in live and S.live(S.tokens("g0")) in live)
    assert errors == []


async def test_gateways_store_media_and_workers_read_them(ready: EmbeddedNats, connect: Connect) -> None:
    errors: list[str] = []
    gateway = await connect(ready, "gateway", errors)
    worker = await connect(ready, "worker", errors)
    body = os.urandom(300_000)
    store = await gateway.jetstream().object_store(S.bucket("media"))
    await store.put("picture", body)
    into = io.BytesIO()
    await (await worker.jetstream().object_store(S.bucket("media"))).get("picture", writeinto=into)
    assert into.getvalue() == body
    assert errors == []
    assert await refused(worker, errors, f"$O.{S.bucket('media')}.C.forged")


async def test_workers_store_results_and_gateways_read_them(ready: EmbeddedNats, connect: Connect) -> None:
    name, data = "01932c07-a4b8-7000-8000-0123456789ab-1-0.png", b"pixels" * 200_000
    async with contextlib.AsyncExitStack() as stack:
        buses = {}
        for role in ("worker", "gateway"):
            buses[role] = await open_bus(ready.url(role), role=role, name=f"test-{role}")
            stack.push_async_callback(buses[role].close)
        await object_store.put(buses["worker"], "results", name, data)
        assert await object_store.get(buses["gateway"], "results", name, limit=1 << 24) == data
    errors: list[str] = []
    gateway = await connect(ready, "gateway", errors)
    assert await refused(gateway, errors, f"$O.{S.bucket('results')}.C.forged")


async def test_routers_store_and_replace_snapshots(ready: EmbeddedNats, connect: Connect) -> None:
    errors: list[str] = []
    router = await connect(ready, "router", errors)
    store = await router.jetstream().object_store(S.bucket("snapshots"))
    for body in (b"one" * 1000, b"two" * 1000):
        await store.put("index", body)
    into = io.BytesIO()
    await store.get("index", writeinto=into)
    assert into.getvalue() == b"two" * 1000
    assert errors == []


async def test_the_system_user_receives_a_disconnect_by_name(ready: EmbeddedNats, connect: Connect) -> None:
    ear = await connect(ready, "sys")
    gone = await ear.subscribe("$SYS.ACCOUNT.APP.DISCONNECT")
    await round_trip(ear)
    worker = await connect(ready, "worker")
    await worker.close()
    event = json.loads((await gone.next_msg(timeout=5)).data)
    assert event["client"]["name"] == "test-worker"


# -- streams ------------------------------------------------------------------------------------------------------


async def test_a_broker_that_takes_too_small_messages_is_named_before_anything_is_created(pipeline: Subjects) -> None:
    """nats-server's own default is 1 MiB; long prompts would fail, one by one."""
    nc: Any = SimpleNamespace(connected_server_version="2.15.1", max_payload=1 << 20)  # asking it fails
    with pytest.raises(
        BrokerProblem, match=r"max_payload is 1048576 bytes, 8388608 are needed.*set `max_payload: 8388608`"
    ):
        await apply(nc, topology(pipeline))


async def test_applying_twice_changes_nothing(nc: Client, subjects: Subjects) -> None:
    wanted = topology(subjects)
    first = await apply(nc, wanted)
    assert len(first) == len(stream_configs(wanted)) + len(wanted.consumers)
    assert await apply(nc, wanted) == []


async def test_applying_never_narrows_what_an_operator_widened(nc: Client, pipeline: Subjects) -> None:
    js, name = nc.jetstream(), pipeline.stream("REQUESTS")
    config = (await js.stream_info(name)).config
    wider = config.evolve(max_bytes=config.max_bytes * 2, subjects=[*config.subjects, f"{pipeline.namespace}.extra"])
    await js.update_stream(wider)
    assert await apply(nc, topology(pipeline)) == []
    after = (await js.stream_info(name)).config
    assert after.max_bytes == config.max_bytes * 2
    assert f"{pipeline.namespace}.extra" in after.subjects


async def test_prompts_are_packed_in_new_streams_and_where_an_operator_says_so(nc: Client, pipeline: Subjects) -> None:
    """A process of an earlier build could not read them."""
    js, name = nc.jetstream(), pipeline.stream("REQUESTS")
    config = (await js.stream_info(name)).config
    assert config.metadata is not None
    assert config.metadata[PROMPTS] == PACKED
    earlier = {key: text for key, text in config.metadata.items() if key != PROMPTS and not key.startswith("_nats.")}
    await js.update_stream(config.evolve(metadata=earlier))
    assert await apply(nc, topology(pipeline)) == []
    assert PROMPTS not in ((await js.stream_info(name)).config.metadata or {})
    await set_limits(nc, name, None, None, packs=True)
    after = (await js.stream_info(name)).config
    assert (after.metadata or {})[PROMPTS] == PACKED
    assert (after.max_age, after.max_bytes) == (config.max_age, config.max_bytes)


async def test_a_new_consumer_has_one_filter(nc: Client, pipeline: Subjects) -> None:
    config = (await nc.jetstream().consumer_info(pipeline.stream("REQUESTS"), "router-batch")).config
    assert (config.filter_subject, config.filter_subjects) == (f"{pipeline.namespace}.request.*.batch.*", None)


async def test_applying_widens_and_says_what(nc: Client, pipeline: Subjects) -> None:
    js, name = nc.jetstream(), pipeline.stream("REQUESTS")
    await js.publish(pipeline.request("m", "standard", "r"), b"kept")
    config = (await js.stream_info(name)).config
    await js.update_stream(config.evolve(max_bytes=1 << 20, allow_direct=False))
    assert await apply(nc, topology(pipeline)) == [f"updated {name}: allow_direct, max_bytes"]
    assert (await js.stream_info(name)).state.messages == 1


async def test_a_consumer_that_a_router_makes_again_meanwhile_is_left_to_it(
    nc: Client, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`streams apply` failed: "deliver policy can not be updated"."""
    label = f"{pipeline.stream('REQUESTS')}.router-batch"
    [spec] = [each for each in topology(pipeline).consumers if f"{each.stream}.{each.name}" == label]
    await request(nc, f"CONSUMER.DELETE.{label}", {})
    config = config_of(spec) | {"deliver_policy": "by_start_sequence", "opt_start_seq": 1}

    async def overtaken(nc: Client, verb: str, not_found: int) -> Config | None:
        found = await existing_info(nc, verb, not_found)
        if found is None:
            await request(nc, f"CONSUMER.CREATE.{label}", {"stream_name": spec.stream, "config": config})
        return found

    monkeypatch.setattr(apply_streams, "existing_info", overtaken)
    assert await apply(nc, topology(pipeline)) == []
    found = await request(nc, f"CONSUMER.INFO.{label}", {})
    assert found["config"]["deliver_policy"] == "by_start_sequence"


async def test_streams_say_how_their_messages_are_encoded_and_what_they_are(nc: Client, pipeline: Subjects) -> None:
    found = {}
    for name in ("SUBMIT", "WORK", "DONE", "MEMORY_TOKENS", "KV_workers", "KV_idempotency"):
        stream = f"KV_{pipeline.bucket(name[3:])}" if name.startswith("KV_") else pipeline.stream(name)
        metadata = (await request(nc, f"STREAM.INFO.{stream}", {}))["config"].get("metadata", {})
        found[name] = metadata.get("penstock-encoding"), metadata.get("penstock-schema")
    assert found == {
        "SUBMIT": ("application/json", "ChatCompletionRequest CompletionRequest EmbeddingRequest"),
        "WORK": ("application/msgpack", "Job Encoded Prefilled Revoke"),
        "DONE": ("application/msgpack", "Done Returned"),
        "MEMORY_TOKENS": ("application/msgpack", "TokenBatch"),
        "KV_workers": ("application/msgpack", "Registration"),
        "KV_idempotency": (None, None),
    }


async def test_a_stream_of_an_earlier_build_is_described_and_keeps_what_is_in_it(
    nc: Client, pipeline: Subjects
) -> None:
    name = pipeline.stream("REQUESTS")
    await nc.jetstream().publish(pipeline.request("m", "standard", "r"), b"kept")
    config = (await request(nc, f"STREAM.INFO.{name}", {}))["config"]
    described = {key: text for key, text in metadata_of(config).items() if key != PROMPTS}
    await request(nc, f"STREAM.UPDATE.{name}", config | {"metadata": {SET_BY_OPERATOR: "max_age", "theirs": "x"}})
    assert await apply(nc, topology(pipeline)) == [f"updated {name}: metadata"]
    info = await request(nc, f"STREAM.INFO.{name}", {})
    assert metadata_of(info["config"]) == described | {SET_BY_OPERATOR: "max_age", "theirs": "x"}
    assert info["state"]["messages"] == 1
    assert await apply(nc, topology(pipeline)) == []


async def test_a_stream_of_another_nature_is_a_named_problem(nc: Client, subjects: Subjects) -> None:
    await nc.jetstream().add_stream(
        name=subjects.stream("WORK"), subjects=[subjects.all("work")], retention="workqueue"
    )
    with pytest.raises(BrokerProblem, match=r"_WORK exists with retention 'workqueue'"):
        await apply(nc, topology(subjects))


def test_widening_keeps_what_it_does_not_know() -> None:
    existing = {
        "name": "A",
        "subjects": ["a"],
        "max_age": 0,
        "later_field": 7,
        "metadata": {"_nats.ver": "2", "x": "y"},
    }
    merged = widened(existing, {"name": "A", "subjects": ["b"], "max_age": 5})
    assert merged == {
        "name": "A", "subjects": ["a", "b"], "max_age": 0, "later_field": 7, "metadata": {"x": "y"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "subject",
    ["work.aggregated.w1", "kv.m.w1", "tokens.g1", "done.t.m.r", "returned.m", "lease"],
)
async def test_what_is_stored_is_delivered_where_the_schema_says(nc: Client, pipeline: Subjects, subject: str) -> None:
    stored = pipeline.lease("w1") if subject == "lease" else f"{pipeline.namespace}.{subject}"
    subscription = await nc.subscribe(pipeline.live(stored))
    await round_trip(nc)
    first = await nc.jetstream().publish(stored, b"one")
    second = await nc.jetstream().publish(stored, b"two")
    assert second.seq == first.seq + 1
    for sequence, last in ((first.seq, 0), (second.seq, first.seq)):
        message = await subscription.next_msg(timeout=5)
        assert message.headers["Nats-Sequence"] == str(sequence)
        assert message.headers["Nats-Last-Sequence"] == str(last)
        assert message.headers["Nats-Subject"] == stored
        bare = subject.startswith(("work", "done", "returned"))  # these are followed by their headers alone
        assert (message.data == b"") == bare


async def test_an_expired_lease_leaves_a_marker_on_the_live_subject(nc: Client, pipeline: Subjects) -> None:
    subscription = await nc.subscribe(pipeline.live(pipeline.lease("w1")))
    await round_trip(nc)
    await nc.jetstream().publish(pipeline.lease("w1"), b"alive", headers={"Nats-TTL": "1s"})
    assert (await subscription.next_msg(timeout=5)).data == b"alive"
    marker = await subscription.next_msg(timeout=5)
    assert marker.headers["Nats-Marker-Reason"] == "MaxAge"


async def test_a_server_without_jetstream_is_named(make_broker: MakeBroker, connect: Connect) -> None:
    server = make_broker(jetstream=False)
    await server.start()
    client = await connect(server)
    with pytest.raises(BrokerProblem, match="JetStream is not enabled"):
        await apply(client, topology(S))


async def test_a_role_that_may_not_create_streams_gets_an_error_that_says_so(
    make_broker: MakeBroker, connect: Connect
) -> None:
    server = make_broker()
    await server.start()
    client = await connect(server, "gateway")
    with pytest.raises(BrokerProblem, match=r"may not use \$JS.API.INFO.*operator"):
        await apply(client, topology(S))


async def test_a_small_max_payload_is_named_with_the_fix(
    make_broker: MakeBroker, monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    monkeypatch.setattr("penstock.infra.nats_server.config.MAX_PAYLOAD", 1 << 20)
    server = make_broker()
    await server.start()
    client = await connect(server)
    with pytest.raises(BrokerProblem, match="set `max_payload: 8388608`"):
        await apply(client, topology(S))


# -- life ---------------------------------------------------------------------------------------------------------


async def test_a_killed_server_comes_back_on_the_same_port_with_its_messages(
    make_broker: MakeBroker, connect: Connect
) -> None:
    server = make_broker()
    await server.start()
    client = await connect(server)
    await apply(client, topology(S))
    await client.jetstream().publish(S.request("m", "standard", "r"), b"kept")
    port, pid = server.port, server.pid
    server.kill()
    assert server.pid is None
    await server.start()
    assert (server.port, server.pid != pid) == (port, True)
    await until(lambda: client.is_connected)
    message = await client.jetstream().get_last_msg(S.stream("REQUESTS"), S.request("m", "standard", "r"), direct=True)
    assert message.data == b"kept"


def test_a_server_has_half_of_the_memory_and_in_a_small_container_as_much_as_fits() -> None:
    assert with_memory_limit({"A": "b"}, 24 << 30) == {"A": "b", "GOMEMLIMIT": "12288MiB", "GOGC": "50"}
    assert with_memory_limit({}, 3 << 29) == {"GOMEMLIMIT": "1024MiB", "GOGC": "50"}
    assert with_memory_limit({}, 1 << 30) == {"GOMEMLIMIT": "768MiB", "GOGC": "50"}
    assert with_memory_limit({}, 256 << 20) == {"GOMEMLIMIT": "192MiB", "GOGC": "50"}
    chosen = {"GOMEMLIMIT": "3GiB", "GOGC": "100"}
    assert with_memory_limit(chosen, 24 << 30) == chosen


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_the_server_gets_its_memory_limit(make_broker: MakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMEMLIMIT", raising=False)
    server = make_broker()
    await server.start()
    variables = (await asyncio.to_thread(Path(f"/proc/{server.pid}/environ").read_bytes)).split(b"\0")
    expected = with_memory_limit({}, memory_bytes())
    assert {f"{name}={value}".encode() for name, value in expected.items()} <= set(variables)


async def test_a_new_supervisor_keeps_port_and_secrets_and_ends_the_stale_server(make_broker: MakeBroker) -> None:
    first = make_broker()
    await first.start()
    first._lock.release()  # as if its process had been killed
    second = make_broker()
    await second.start()
    assert await first.wait() != 0 or first.pid is None
    assert second.url("worker") == first.url("worker")


async def test_two_servers_never_share_a_data_directory(make_broker: MakeBroker) -> None:
    await make_broker().start()
    with pytest.raises(DataDirBusy, match=rf"pid {os.getpid()}\).*--data-dir"):
        await make_broker().start()


async def test_a_taken_port_is_named(make_broker: MakeBroker) -> None:
    first = make_broker("one")
    await first.start()
    with pytest.raises(CannotListen, match=f"--nats-port: port {first.port} is in use"):
        await make_broker("two", port=first.port).start()


async def test_an_unusable_store_is_reported_with_the_servers_words(make_broker: MakeBroker, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "nats").write_text("not a directory")
    with pytest.raises(ServerFailed, match=r"nats\.log"):
        await make_broker().start()


async def test_another_namespace_on_the_same_data_gets_its_own_permissions(
    make_broker: MakeBroker, connect: Connect
) -> None:
    first = make_broker()
    await first.start()
    await first.stop()
    second = make_broker(namespace="blue")
    await second.start()
    errors: list[str] = []
    worker = await connect(second, "worker", errors)
    assert await refused(worker, errors, S.tokens("g0"))
    assert not await refused(worker, errors, Subjects("blue").tokens("g0"))


async def test_secrets_and_configuration_are_private(make_broker: MakeBroker) -> None:
    server = make_broker()
    await server.start()
    for name in ("secrets.json", "nats.conf"):
        assert stat.S_IMODE((server.data_dir / name).stat().st_mode) == 0o600


def test_damaged_secrets_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text("{")
    with pytest.raises(ValueError, match="remove it"):
        load_secrets(tmp_path / "secrets.json", USERS)


def test_a_lock_is_free_again_after_release(tmp_path: Path) -> None:
    one, two = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    one.acquire("x")
    one.acquire("x")
    with pytest.raises(DataDirBusy):
        two.acquire("x")
    one.release()
    two.acquire("x")
    two.release()


@pytest.mark.parametrize(
    ("text", "version"),
    [("nats-server: v2.15.1", (2, 15, 1)), ("nats-server: v2.14.0-RC.1", (2, 14, 0)), ("what?", None)],
)
def test_versions_are_read_from_the_servers_own_words(text: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("proc", [True, False])
def test_a_process_is_recognised_by_a_whole_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, proc: bool
) -> None:
    """Otherwise the broker of another folder, whose path has this one in it, would be ended or reloaded."""
    if not proc:  # as on macOS
        if not shutil.which("ps"):
            pytest.skip("needs ps")
        monkeypatch.setattr(server, "Path", lambda path: Path(f"{tmp_path}{path}"))
        monkeypatch.setenv("COLUMNS", "5")  # ps cuts its lines at the terminal's width unless asked not to
    # A new process has no arguments yet when Popen returns, so it says that it runs.
    command = ["sh", "-c", "echo; read end", "sh", "60.5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = [was_started_with(child.pid, argument) for argument in ("60.5", "60", "0.5")]
        child.kill()
    assert found == [True, False, False]
    assert not was_started_with(child.pid, "60.5")


def test_a_binary_is_found_without_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    find_server.cache_clear()
    assert find_server().name.startswith("nats-server")
    find_server.cache_clear()


async def test_streams_of_cells_are_on_the_servers_with_their_tags_and_move_with_them(tmp_path: Path) -> None:
    """Three servers of one cluster take 4 s to start. Roles may use the streams of all cells."""
    async with three_nodes(tmp_path, cells=2) as cluster:
        second = Subjects(cell_namespace(cluster.subjects.namespace, 1))
        await apply_at(cluster.url(), second, cells=2, tags=("node-1",))
        streams = [config["name"] for config in stream_configs(topology(second))]
        assert {(await cluster.placement(name))[0] for name in streams} == {1}
        with pytest.raises(BrokerProblem, match=r"tag nowhere: set `server_tags: \[nowhere\]`"):
            await apply_at(cluster.url(), second, cells=2, tags=("nowhere",))
        assert await apply_at(cluster.url(), second, cells=2) == [], "without tags they stay where they are"
        done = await apply_at(cluster.url(), second, cells=2, tags=("node-2",))
        assert {"placement" in line for line in done} == {True}

        async def moved() -> bool:
            return (await cluster.placement(second.stream("REQUESTS")))[0] == 2

        await eventually(moved, "the stream is on the server with the other tag")
        gateway = await cluster.client(0, "gateway")
        errors: list[str] = []

        async def failed(error: Exception) -> None:
            errors.append(str(error))

        gateway._error_cb = failed
        try:
            assert not await refused(gateway, errors, second.request("m", "standard", "r-1"))
            assert await refused(gateway, errors, Subjects(f"{second.namespace}1").request("m", "standard", "r-1"))
        finally:
            await gateway.close()


@pytest.mark.slow
async def test_streams_are_applied_once_a_cluster_without_a_leader_has_one(tmp_path: Path) -> None:
    async with three_nodes(tmp_path) as cluster:
        await apply_at(cluster.url(), cluster.subjects, replicas=NODES)
        for node in range(NODES):
            cluster.kill(node)
        await asyncio.gather(*(node.wait() for node in cluster.nodes))
        starting = asyncio.create_task(cluster.restart(0))  # it is ready once there is a leader

        async def leaderless() -> bool:
            with contextlib.suppress(OSError, TimeoutError, NatsError):
                client = await cluster.client(0)
                try:
                    return b"10008" in (await client.request("$JS.API.INFO", b"", timeout=5)).data
                finally:
                    await client.close()
            return False

        await eventually(leaderless, "the cluster has no leader")
        applied = asyncio.create_task(apply_at(cluster.url(nodes=[0]), cluster.subjects, replicas=NODES))
        async with asyncio.timeout(60):
            await asyncio.gather(starting, cluster.restart(1), cluster.restart(2), applied)
