"""How long streams keep their messages, and how large they may become: read, checked and set.

A limit that is set here is marked in the stream's metadata, so that ``streams apply`` does not raise it again.
"""

import time
from collections.abc import Sequence

import msgspec
from nats.aio.client import Client

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import parse_time, read
from penstock.infra.bus.jetstream import STREAM_NOT_FOUND
from penstock.infra.nats_server.apply_streams import SET_BY_OPERATOR, metadata_of
from penstock.infra.nats_server.jetstream_api import BrokerProblem, Config, existing_config, existing_info, request
from penstock.schemas.streams import HOUR, LONGEST_DEADLINE_S, MIB, PACKED, PROMPTS, Topology

_NS = 1_000_000_000
MIN_BYTES = 16 * MIB
MAX_BYTES = 1 << 60
MAX_AGE_S = 100 * 365 * 86400.0  # the broker counts nanoseconds in 63 bits
# A stream that the pipeline works from must outlast the longest request; KV and HANDOFF only what routers catch up on.
MIN_AGE_S = LONGEST_DEADLINE_S
LEAST_S = 60.0  # a stream that is younger says little of the rate
SETTABLE = ("REQUESTS", "WORK", "TOKENS", "DONE", "KV", "HANDOFF", "AUDIT", "USAGE")


class StreamUse(msgspec.Struct, frozen=True):
    """A stream as it is now. Sizes in bytes, ages in seconds; a limit of 0 means that there is none.

    Attributes:
        oldest_s: age of its first message; 0 if it is empty.
        operator_set: limits that the operator has set: "max_age", "max_bytes".
        last_seq: of its newest message, also if that is deleted; 0: it never had one.
        incomplete: servers of a cluster whose copy of it is away or behind.
    """

    name: str
    description: str
    messages: int
    bytes: int
    max_bytes: int
    oldest_s: float
    max_age_s: float
    consumers: int
    operator_set: tuple[str, ...] = ()
    last_seq: int = 0
    incomplete: tuple[str, ...] = ()

    @property
    def reach_s(self) -> float:
        """How old its messages become before they are deleted, if they come as fast as since the oldest; 0: unknown."""
        if not self.max_bytes or not self.bytes or self.oldest_s < LEAST_S:
            return self.max_age_s
        full_s = self.oldest_s * self.max_bytes / self.bytes
        return min(full_s, self.max_age_s or full_s)


class Loss(msgspec.Struct, frozen=True):
    """What new limits delete at once: up to ``messages`` because of their age, ``bytes`` because of the size."""

    messages: int
    bytes: int

    def __bool__(self) -> bool:
        return bool(self.messages or self.bytes)


async def uses(bus: Bus, topology: Topology, names: Sequence[str] | None = None) -> list[StreamUse]:
    """All streams of a namespace that exist, those behind buckets included; with ``names``, these of them.

    Raises:
        BrokerProblem: the broker does not answer, or refuses.
    """
    descriptions = {spec.name: spec.description for spec in topology.streams}
    names = names or [
        *descriptions,
        *(f"KV_{spec.name}" for spec in topology.buckets),
        *(f"OBJ_{spec.name}" for spec in topology.objects),
    ]
    usages = []
    now_s = time.time()
    for name in names:
        info = await existing_info(bus.nc, f"STREAM.INFO.{name}", STREAM_NOT_FOUND)
        if info is not None:
            usages.append(_use(info, descriptions.get(name, ""), now_s))
    return usages


def _use(info: Config, description: str, now_s: float) -> StreamUse:
    config, state = info["config"], info["state"]
    first_s = parse_time(state["first_ts"]) / 1e9 if state["messages"] else now_s
    return StreamUse(
        config["name"],
        description,
        state["messages"],
        state["bytes"],
        max(0, config["max_bytes"]),
        max(0.0, now_s - first_s),
        config["max_age"] / _NS,
        state["consumer_count"],
        tuple(config.get("metadata", {}).get(SET_BY_OPERATOR, "").split()),
        state["last_seq"],
        tuple(
            replica["name"]
            for replica in info.get("cluster", {}).get("replicas") or ()
            if replica.get("offline") or not replica["current"]
        ),
    )


def check(stream: str, max_age_s: float | None, max_bytes: int | None, *, packs: bool = False) -> None:
    """Check these limits of a stream (its name without the namespace); None: unchanged.

    Raises:
        ValueError: they are not, or there is no such stream.
    """
    if stream not in SETTABLE:
        raise ValueError(f"{stream!r}: the limits of {', '.join(SETTABLE)} can be set")
    if packs and stream != "REQUESTS":
        raise ValueError(f"--pack-prompts: {stream} has no prompts of its own; give REQUESTS")
    if max_age_s is None and max_bytes is None and not packs:
        raise ValueError("give --max-age, --max-bytes or --pack-prompts")
    if max_age_s is not None and max_age_s < MIN_AGE_S:
        raise ValueError(
            f"--max-age: {stream} must keep messages for at least {MIN_AGE_S / HOUR:g} h, the longest deadline of a "
            "request; otherwise running requests could be lost"
        )
    if max_bytes is not None and max_bytes < MIN_BYTES:
        raise ValueError(f"--max-bytes: at least {MIN_BYTES // MIB} MiB")
    if (max_age_s or 0) > MAX_AGE_S or (max_bytes or 0) > MAX_BYTES:
        raise ValueError(f"--max-age is at most {MAX_AGE_S / 86400:.0f}d, --max-bytes {MAX_BYTES >> 40}TiB")


async def loss(bus: Bus, use: StreamUse, max_age_s: float | None, max_bytes: int | None) -> Loss:
    """What a stream would delete at once under new limits.

    Raises:
        ServingError: the stream cannot be read.
        BrokerProblem: the broker refuses.
    """
    messages = 0
    if max_age_s is not None and use.oldest_s > max_age_s:
        info = await request(bus.nc, f"STREAM.INFO.{use.name}", {})
        first_kept = info["state"]["last_seq"] + 1
        async for entry in read(bus, use.name, ">", since_ns=int((time.time() - max_age_s) * _NS), batch=1):
            first_kept = entry.seq
            break
        messages = first_kept - info["state"]["first_seq"]
    return Loss(messages, max(0, use.bytes - max_bytes) if max_bytes is not None else 0)


async def set_limits(
    nc: Client, name: str, max_age_s: float | None, max_bytes: int | None, *, packs: bool = False
) -> None:
    """Set the limits of a stream; None: unchanged.

    Args:
        packs: gateways pack prompts from now on, see ``penstock.schemas.streams.PROMPTS``.
    Raises:
        BrokerProblem: there is no such stream, or the broker refuses.
    """
    config = await existing_config(nc, f"STREAM.INFO.{name}", STREAM_NOT_FOUND)
    if config is None:
        raise BrokerProblem(f"there is no stream {name}: run `penstock streams apply`")
    metadata = metadata_of(config)
    chosen = set(metadata.get(SET_BY_OPERATOR, "").split())
    if max_age_s is not None:
        config["max_age"] = int(max_age_s * _NS)
        config["duplicate_window"] = min(config.get("duplicate_window", 0), config["max_age"])
        chosen.add("max_age")
    if max_bytes is not None:
        config["max_bytes"] = max_bytes
        chosen.add("max_bytes")
    config["metadata"] = metadata | {SET_BY_OPERATOR: " ".join(sorted(chosen))} | ({PROMPTS: PACKED} if packs else {})
    await request(nc, f"STREAM.UPDATE.{name}", config)
