"""Applies the topology to a server: streams, buckets and shared consumers are created or enlarged, never deleted.

Limits only grow, except those that the operator has set with ``penstock streams set``: they stay as they are.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nats.aio.client import Client

from penstock.infra.bus.direct_get import parse_time
from penstock.infra.bus.jetstream import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND
from penstock.infra.bus.puller import EXISTS, config_of
from penstock.infra.nats_server.binary import MINIMUM, dotted, parse_version
from penstock.infra.nats_server.jetstream_api import BrokerProblem, Config, existing_config, existing_info, request
from penstock.schemas.streams import (
    HEADROOM,
    MAX_PAYLOAD,
    PROMPTS,
    BucketSpec,
    ConsumerSpec,
    ObjectSpec,
    Topology,
    common_config,
    republish,
    scaled,
    schema_metadata,
    stream_config,
    submissions,
)
from penstock.schemas.subjects import Subjects

_NS = 1_000_000_000
_MIB, _GIB = 1 << 20, 1 << 30
_STORES = {"file": "max_file_store", "memory": "max_memory_store"}
STORE_FAILED = 10049
CREATE_TRIES, CREATE_AGAIN_S = 20, 0.1
_NO_ROOM = (10002, 10005, 10023, 10028, 10047)  # of an account, of a cluster, or of a server
_GROWS = ("max_age", "max_bytes", "duplicate_window", "num_replicas")  # an operator's larger value stays
# Metadata of a stream that names the limits which the operator has set, so that none of them grows here.
SET_BY_OPERATOR = "penstock-set-by-operator"


async def apply(
    nc: Client, topology: Topology, replicas: int = 1, *, size_bytes: int = 0, tags: Sequence[str] = ()
) -> list[str]:
    """Create missing streams and enlarge those that are too small. Returns the changes, one line each.

    Safe to repeat and to run on several machines at once.

    Args:
        size_bytes: of all streams together that are created now, as in ``penstock.schemas.streams.scaled``; 0: their
            own sizes.
        tags: of the servers of a cluster that keep the streams; a server has to have all of them. Streams that are
            elsewhere move there. Empty: any servers, or those where the streams are.
    Raises:
        BrokerProblem: JetStream is off, no server has the tags, a limit is too low, a permission is missing, or an
            existing stream differs in a way that cannot be changed in place.
    """
    await check(nc, topology)
    done = []
    if size_bytes:
        try:
            topology = scaled(topology, size_bytes)
        except ValueError as error:
            raise BrokerProblem(f"--store-size: {error}") from None
    configs = stream_configs(topology, replicas)
    if tags:
        for config in configs:
            config["placement"] = {"tags": list(tags)}
    await _check_room(nc, topology.subjects, configs, replicas, tags)
    last = topology.subjects.awaited  # processes that start meanwhile wait for it
    for config in sorted(configs, key=lambda config: config["name"] == last):
        if config["name"] == last:
            for consumer in topology.consumers:
                done += await _apply_consumer(nc, consumer)
        if size_bytes and config["storage"] == "file":  # a start without the setting does not make it larger
            config["metadata"] = config.get("metadata", {}) | {SET_BY_OPERATOR: "max_bytes"}
        done += await _apply_stream(nc, config)
    return done


async def divide(nc: Client, before: Topology, after: Topology) -> list[str]:
    """Give streams the sizes that another division among cells leaves them. Returns the changes, one line each.

    Only those whose size is that of the division before: others were chosen, or still have more in them. A stream is
    made smaller only while it would be at most half full, so that it deletes nothing and has room.

    Raises:
        BrokerProblem: as ``apply``.
    """
    done = []
    for old, new in zip(stream_configs(before), stream_configs(after), strict=True):
        info = await existing_info(nc, f"STREAM.INFO.{old['name']}", STREAM_NOT_FOUND)
        if info is None or info["config"]["max_bytes"] != old["max_bytes"] or old["max_bytes"] == new["max_bytes"]:
            continue
        if new["max_bytes"] < old["max_bytes"] and 2 * info["state"]["bytes"] > new["max_bytes"]:
            continue
        config = info["config"] | {"max_bytes": new["max_bytes"], "metadata": metadata_of(info["config"])}
        await request(nc, f"STREAM.UPDATE.{old['name']}", config)
        done.append(f"updated {old['name']}: max_bytes")
    return done


async def lost_streams(nc: Client, topology: Topology) -> list[str]:
    """Streams and buckets on the disk that the server does not have. Those in memory are made by gateways, too.

    Raises:
        BrokerProblem: the server does not answer.
    """
    names = [config["name"] for config in stream_configs(topology) if config["storage"] == "file"]
    return [name for name in names if await existing_config(nc, f"STREAM.INFO.{name}", STREAM_NOT_FOUND) is None]


async def apply_submissions(nc: Client, subjects: Subjects, tenant: str, max_pending: int) -> list[str]:
    """Create or change one tenant's stream of submissions.

    Raises:
        BrokerProblem: as ``apply``.
    """
    stream, consumer = submissions(subjects, tenant, max_pending)
    info = await request(nc, f"STREAM.INFO.{subjects.stream('SUBMIT')}", {})
    if 0 < info["config"]["max_bytes"] < stream.max_bytes:  # all streams were made smaller
        stream = replace(stream, max_bytes=info["config"]["max_bytes"])
    config = stream_config(stream, info["config"]["num_replicas"])
    if placed := info["config"].get("placement"):
        config["placement"] = placed
    done = await _apply_stream(nc, config)
    return done + await _apply_consumer(nc, consumer)


async def create_streams(nc: Client, configs: Iterable[Config]) -> None:
    """Create these streams, none of which exists with another configuration.

    Raises:
        BrokerProblem: as ``apply``.
    """
    for config in configs:
        await request(nc, f"STREAM.CREATE.{config['name']}", config)


async def check(nc: Client, topology: Topology) -> None:
    """Check the server's version and limits before anything is created.

    Raises:
        BrokerProblem: one of them does not suffice.
    """
    version = parse_version(f"v{nc.connected_server_version}")
    if version is None or version < MINIMUM:
        raise BrokerProblem(
            f"nats-server {nc.connected_server_version} is too old: at least {dotted(MINIMUM)} is needed. Upgrade the "
            "servers, one after the other in a cluster"
        )
    if nc.max_payload < MAX_PAYLOAD:
        raise BrokerProblem(
            f"the server's max_payload is {nc.max_payload} bytes, {MAX_PAYLOAD} are needed (messages up to "
            f"{MAX_PAYLOAD - HEADROOM} bytes and their headers): set `max_payload: {MAX_PAYLOAD}` in its configuration"
        )
    info = await request(nc, "INFO", {})
    limits = info.get("limits", {})
    _check_limit(limits, "max_streams", len(topology.streams) + len(topology.buckets) + len(topology.objects))


async def _check_room(
    nc: Client, subjects: Subjects, configs: Sequence[Config], replicas: int, tags: Sequence[str]
) -> None:
    """Check that the server has room for what is to be created or enlarged, before anything is.

    A server does not tell its limits (``max_file_store``, ``max_memory_store``) to those who may use it, and counts
    what streams may take, not what they do. So a stream without messages is created with the size in question.
    """
    if tags and await _fits(nc, subjects, "file", _MIB, replicas, tags) is False:
        raise BrokerProblem(
            f"no {replicas} server{'s' if replicas > 1 else ''} of the cluster with room and the "
            f"tag{'s' if len(tags) > 1 else ''} {', '.join(tags)}: set `server_tags: [{', '.join(tags)}]` in the "
            "configuration of the servers that are to keep these streams, or name other tags with --placement-tags"
        )
    needed = dict.fromkeys(_STORES, 0)
    for config in configs:
        existing = await existing_config(nc, f"STREAM.INFO.{config['name']}", STREAM_NOT_FOUND)
        before = max(0, existing["max_bytes"]) if existing is not None else 0
        after = config["max_bytes"] if existing is None else widened(existing, config)["max_bytes"]
        needed[config["storage"]] += max(0, after - before)
    for storage, size in needed.items():
        if not size or await _fits(nc, subjects, storage, size, replicas, tags) is not False:
            continue
        free, taken = 0, size
        while taken - free > _MIB:
            middle = (free + taken) // 2
            fits = await _fits(nc, subjects, storage, middle, replicas, tags)
            free, taken = (middle, taken) if fits else (free, middle)  # what was not shown to be free is not
        raise BrokerProblem(
            f"the streams need {size} bytes of {storage} storage ({size / _GIB:.1f} GiB), and the broker has {free} "
            f"free ({free / _GIB:.1f} GiB): raise {_STORES[storage]} of its `jetstream {{ ... }}` block, or the limit "
            "of its account" + ("; or make all streams smaller with --store-size" if storage == "file" else "")
        )


async def _fits(
    nc: Client, subjects: Subjects, storage: str, size: int, replicas: int, tags: Sequence[str] = ()
) -> bool | None:
    """Whether a stream of this size can be created. None: it was refused otherwise, which is left to the real ones."""
    name = subjects.stream(f"PROBE_{secrets.token_hex(4)}")
    config: Config = {"name": name, "subjects": [f"{subjects.namespace}.probe.{name}"], "max_bytes": size}
    if tags:
        config["placement"] = {"tags": list(tags)}
    try:
        await request(nc, f"STREAM.CREATE.{name}", config | {"storage": storage, "num_replicas": replicas})
    except BrokerProblem as error:
        return False if any(f"({code})" in str(error) for code in _NO_ROOM) else None
    await request(nc, f"STREAM.DELETE.{name}", {})
    return True


def _check_limit(limits: Config, name: str, needed: int) -> None:
    allowed = limits.get(name, -1)
    if 0 <= allowed < needed:
        raise BrokerProblem(
            f"the account's JetStream limit {name} is {allowed}, the streams need {needed}: raise it in the "
            f"account's `jetstream {{ ... }}` block"
        )


def stream_configs(topology: Topology, replicas: int = 1) -> list[Config]:
    """All streams, those behind buckets included, as the JetStream API takes them."""
    return [
        *(stream_config(spec, replicas) for spec in topology.streams),
        *(_bucket(spec, replicas) for spec in topology.buckets),
        *(_objects(spec, replicas) for spec in topology.objects),
    ]


def _bucket(spec: BucketSpec, replicas: int) -> Config:
    """A key-value bucket with history 1, whose keys expire by their own TTL and leave a marker."""
    config = common_config(f"KV_{spec.name}", (f"$KV.{spec.name}.>",), spec.max_bytes, replicas)
    return config | {
        "discard": "new",  # never forget a live key to make room
        "max_msgs_per_subject": 1,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": int(spec.marker_ttl_s * _NS),
        **({"republish": republish(spec.live, False)} if spec.live else {}),
        **schema_metadata(spec.messages),
    }


def _objects(spec: ObjectSpec, replicas: int) -> Config:
    subjects = (f"$O.{spec.name}.C.>", f"$O.{spec.name}.M.>")
    config = common_config(f"OBJ_{spec.name}", subjects, spec.max_bytes, replicas)
    # A full bucket refuses: dropping the oldest chunks would leave objects that cannot be read.
    return config | {"discard": "new", "max_age": int(spec.max_age_s * _NS), "allow_rollup_hdrs": True}


def widened(existing: Config, wanted: Config) -> Config:
    """The existing configuration, extended by the wanted one: subjects are merged, limits never lowered.

    Lowering a limit would delete messages, which only an operator may decide. What the operator has set stays. Prompts
    of an existing stream are not packed, since an earlier build that is still running could not read them.
    """
    merged = existing | {key: value for key, value in wanted.items() if key not in ("retention", "storage")}
    kept = (SET_BY_OPERATOR, PROMPTS)
    described = {key: text for key, text in wanted.get("metadata", {}).items() if key not in kept}
    merged["metadata"] = metadata_of(existing) | described
    merged["subjects"] = list(dict.fromkeys([*existing.get("subjects", []), *wanted["subjects"]]))
    chosen = merged["metadata"].get(SET_BY_OPERATOR, "").split()
    for key in _GROWS:
        if key in wanted and key in existing:
            merged[key] = existing[key] if key in chosen else _larger(existing[key], wanted[key])
    return merged


def changed_by(merged: Config, existing: Config, wanted: Config) -> list[str]:
    """The keys of a wanted configuration whose values the widened one changes, in alphabetical order."""
    before = existing | {"metadata": metadata_of(existing)}
    return sorted(key for key in wanted if merged[key] != before.get(key))


def metadata_of(config: Config) -> dict[str, str]:
    """A stream's metadata without what the server adds to its answers, which must not be sent back."""
    return {key: text for key, text in config.get("metadata", {}).items() if not key.startswith("_nats.")}


def _larger(one: int, other: int) -> int:
    """0 and -1 mean without limit."""
    return one if one <= 0 else other if other <= 0 else max(one, other)


async def _create(nc: Client, name: str, config: Config) -> None:
    """Create a stream, again where the server could not make its folder.

    When an account's last stream is deleted (here: the one that tried for room), the server removes the folder that
    streams are in, a moment after it has answered. A stream that is created just then fails.
    """
    for _ in range(CREATE_TRIES):
        try:
            await request(nc, f"STREAM.CREATE.{name}", config)
        except BrokerProblem as error:
            if f"({STORE_FAILED})" not in str(error):
                raise
            await asyncio.sleep(CREATE_AGAIN_S)
        else:
            return
    await request(nc, f"STREAM.CREATE.{name}", config)


async def _apply_stream(nc: Client, config: Config) -> list[str]:
    name = config["name"]
    existing = await existing_config(nc, f"STREAM.INFO.{name}", STREAM_NOT_FOUND)
    if existing is None:
        await _create(nc, name, config)
        return [f"created {name}"]
    for key in ("retention", "storage"):
        if existing[key] != config[key]:
            raise BrokerProblem(
                f"stream {name} exists with {key} {existing[key]!r}, {config[key]!r} is needed and cannot be changed "
                "in place: use another --namespace, or move that stream away"
            )
    merged = widened(existing, config)
    changed = changed_by(merged, existing, config)
    if not changed:
        return []
    await request(nc, f"STREAM.UPDATE.{name}", merged)
    return [f"updated {name}: {', '.join(changed)}"]


async def begins_beyond(nc: Client, info: Config) -> bool:
    """Whether a consumer begins behind the end of its stream: at a position in a stream that was lost since.

    Args:
        info: what the JetStream API says of the consumer.
    Raises:
        BrokerProblem: the server does not answer.
    """
    last: int = info["config"].get("opt_start_seq", 0) - 1
    if last < 1:
        return False
    end: int = (await request(nc, f"STREAM.INFO.{info['stream_name']}", {}))["state"]["last_seq"]
    return last > end


async def _begins_too_late(nc: Client, info: Config) -> bool:
    """Whether a consumer never delivers messages that were stored after it was made, for they are before its start.

    Also when the stream, which begins again at 1, has reached that position. To see this, a message is read.
    """
    if await begins_beyond(nc, info):
        return True
    last: int = info["config"].get("opt_start_seq", 0) - 1
    if last < 1:
        return False
    try:
        found = await request(nc, f"STREAM.MSG.GET.{info['stream_name']}", {"seq": last})
    except BrokerProblem:  # it has been deleted
        return False
    return parse_time(found["message"]["time"]) > parse_time(info["created"])


async def _apply_consumer(nc: Client, spec: ConsumerSpec) -> list[str]:
    label = f"{spec.stream}.{spec.name}"
    info = await existing_info(nc, f"CONSUMER.INFO.{label}", CONSUMER_NOT_FOUND)
    config = config_of(spec)
    if info is not None and await _begins_too_late(nc, info):  # where it begins cannot be changed
        await request(nc, f"CONSUMER.DELETE.{label}", {})
        await _create_consumer(nc, label, {"stream_name": spec.stream, "config": config})
        return [f"replaced {label}: it passed over messages before {info['config']['opt_start_seq']}"]
    if info is None:
        created = await _create_consumer(nc, label, {"stream_name": spec.stream, "config": config})
        return [f"created {label}"] if created else await _apply_consumer(nc, spec)
    existing: Config = info["config"]
    config.pop("deliver_policy")  # where it began is fixed; one that was made again begins where the last one was
    merged = {k: v for k, v in existing.items() if k not in ("filter_subject", "filter_subjects")} | config
    merged.pop("metadata", None)
    changed = sorted(key for key in config if existing.get(key) != config[key])
    if not changed:
        return []
    await request(nc, f"CONSUMER.CREATE.{label}", {"stream_name": spec.stream, "config": merged})
    return [f"updated {label}: {', '.join(changed)}"]


async def _create_consumer(nc: Client, label: str, body: Config) -> bool:
    """False: it is there. A running process has just made it again, and it begins where that one's last one was."""
    try:
        await request(nc, f"CONSUMER.CREATE.{label}", body | {"action": "create"})
    except BrokerProblem as error:
        if f"({EXISTS})" not in str(error):
            raise
        return False
    return True
