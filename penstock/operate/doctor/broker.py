"""Checks of the broker: reachable, authorised, new enough, with its streams, room and the same clock."""

import asyncio
import contextlib
import math
import socket
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from nats.errors import Error as NatsError

from penstock.cli.figures import counted, show_duration, show_size
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import parse_time, read
from penstock.infra.bus.jetstream import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND
from penstock.infra.nats_server.apply_streams import changed_by, check, stream_configs, widened
from penstock.infra.nats_server.jetstream_api import BrokerProblem, existing_config, existing_info, request, running_pid
from penstock.infra.nats_server.retention import StreamUse, uses
from penstock.log_tools.sources.data_folder import STREAMS_DIR
from penstock.log_tools.sources.store_files import Damage, can_verify_much, check_files
from penstock.operate.doctor.finding import CheckResult, check_broker_certificate, ok, problem, skipped, warning
from penstock.schemas.errors import ServingError
from penstock.schemas.streams import LONGEST_DEADLINE_S, Topology, divided, topology
from penstock.schemas.usage import HOUR_NS, decode

NEARLY_FULL = 0.8
SKEW_S = 1.0
APPLY = "run `penstock streams apply` with the operator's credentials"
ROW_BYTES = 135  # of a combination in an hour, as the ledger of usage stores it (measured)
DAY_NS, USAGE_WITHIN_S = 24 * HOUR_NS, 5.0
HISTORY = ("REQUESTS", "WORK", "DONE", "TOKENS", "KV")
ENDLESS = (
    "DONE",
    "KV",
    "TOKENS",
    "HANDOFF",
    "PLAN",
)  # these discard their oldest when they are full, which is harmless


def check_address(url: str) -> CheckResult:
    """Why nothing answers at a URL: its name, its port, or what listens there."""
    parts = urlsplit(url.split(",")[0])
    host, port = parts.hostname or "", parts.port or 4222
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        return problem("broker", f"{host} is not a known host", "check the name, in Kubernetes also the namespace")
    try:
        with socket.create_connection((host, port), timeout=3) as link:
            link.settimeout(3)
            greeting = link.recv(5)
    except OSError as error:
        fix = "start it (`penstock up` or `penstock nats`), or check the port and firewalls"
        return problem("broker", f"nothing answers at {host}:{port} ({error.strerror or 'timed out'})", fix)
    if greeting != b"INFO ":
        return problem("broker", f"what listens at {host}:{port} is not a NATS server", "check the port")
    return ok("broker", f"{host}:{port} answers")


def _version(bus: Bus) -> str:
    version = bus.nc.connected_server_version
    return f"{version.major}.{version.minor}.{version.patch}"


async def check_broker(bus: Bus, cells: int = 1) -> list[CheckResult]:
    """All checks of a broker that is connected.

    Args:
        cells: of the deployment; the streams are those of one.
    """
    findings = [ok("broker", f"connected to nats-server {_version(bus)}"), *check_broker_certificate(bus)]
    expected = divided(topology(bus.subjects), cells)
    try:
        await check(bus.nc, expected)
    except BrokerProblem as error:
        return [*findings, problem("broker settings", str(error), "change the server's configuration as it says")]
    findings.append(ok("broker settings", "JetStream, limits and version are as needed"))
    try:
        findings.append(await _streams(bus, expected))
        in_memory = {spec.name for spec in expected.streams if spec.memory}
        streams = await uses(bus, expected)
        findings += _fill(streams, bus.subjects.stream("REQUESTS"), in_memory)
        findings += check_history(streams)
        findings += await _usage(bus, streams)
        findings.append(_replicas(streams))
        findings.append(await _clock(bus))
    except BrokerProblem as error:
        findings.append(problem("streams", str(error), APPLY))
    return findings


async def _streams(bus: Bus, expected: Topology) -> CheckResult:
    """Whether all streams and consumers are there, as this release wants them."""
    missing, other, paused = [], [], []
    for config in stream_configs(expected):
        existing = await existing_config(bus.nc, f"STREAM.INFO.{config['name']}", STREAM_NOT_FOUND)
        if existing is None:
            missing.append(config["name"])
        else:
            changed = changed_by(widened(existing, config), existing, config)
            other += [f"{config['name']} ({', '.join(changed)})"] if changed else []
    for consumer in expected.consumers:
        if consumer.stream in missing:
            continue
        label = f"{consumer.stream}.{consumer.name}"
        info = await existing_info(bus.nc, f"CONSUMER.INFO.{label}", CONSUMER_NOT_FOUND)
        if info is None:
            missing.append(label)
        elif info.get("paused"):
            paused.append(f"{consumer.stream} {consumer.name}")
    if missing:
        return problem("streams", f"missing: {', '.join(missing)}", APPLY)
    if paused:
        fix = "resume each with NATS's own tool: `nats consumer resume STREAM CONSUMER`"
        return problem("streams", f"paused, so that nobody gets their messages: {', '.join(paused)}", fix)
    if other:
        return warning("streams", f"not as this release makes them: {', '.join(other)}", APPLY)
    return ok("streams", "all there")


def _fill(streams: list[StreamUse], queue: str, in_memory: Collection[str]) -> list[CheckResult]:
    findings = []
    for use in streams:
        if not use.max_bytes or use.bytes < NEARLY_FULL * use.max_bytes or use.name.endswith(ENDLESS):
            continue
        text = f"{use.name} is {use.bytes / use.max_bytes:.0%} full"
        effect = "gateways refuse requests when it is full" if use.name == queue else "it discards its oldest messages"
        stem = use.name.rpartition("_")[2]
        findings.append(
            warning("stream size", text, f"enlarge it: `penstock streams set {stem} --max-bytes …`; {effect}")
        )
    stored = [use for use in streams if use.name not in in_memory]
    size, limit = (show_size(sum(getattr(use, name) for use in stored)) for name in ("bytes", "max_bytes"))
    text = f"no stream is nearly full; on the disk they have {size} and may grow to {limit} for each copy"
    return findings or [ok("stream size", text)]


def check_history(streams: list[StreamUse]) -> list[CheckResult]:
    """How far back the log reaches: what is deleted because its stream is full, not because of its age."""
    early = [use for use in streams if use.name.endswith(HISTORY) and use.max_age_s and 0 < use.reach_s < use.max_age_s]
    if not early:
        return [ok("history", "at the present rates, every stream keeps its messages as long as it may")]
    text = "; ".join(
        f"{use.name} keeps about {show_duration(use.reach_s)} at the present rate, not {show_duration(use.max_age_s)}"
        for use in early
    )
    # What runs is continued from its job, and shown from its tokens.
    if all(use.reach_s >= LONGEST_DEADLINE_S for use in early):
        return [ok("history", text)]
    fix = "enlarge what `inspect` and `replay` need: `penstock streams set STREAM --max-bytes …`"
    return [warning("history", text, fix)]


async def _usage(bus: Bus, streams: list[StreamUse]) -> list[CheckResult]:
    """``check_usage`` of the ledger's last day, if it may be read."""
    name, now_ns = bus.subjects.stream("USAGE"), time.time_ns()
    found: Counter[int] = Counter()
    try:
        async with asyncio.timeout(USAGE_WITHIN_S):
            parts = read(bus, name, bus.subjects.all("usage"), since_ns=now_ns - DAY_NS)
            async for entry in parts:
                found.update(row.hour for row in decode(entry.data).rows)
    except (ServingError, NatsError, TimeoutError, msgspec.MsgspecError):
        return []
    hour = now_ns // HOUR_NS
    rows = [count for each, count in found.items() if hour - 24 <= each < hour] or list(found.values())
    return [check_usage(use, max(rows, default=0)) for use in streams if use.name == name]


def check_usage(use: StreamUse, combinations: int) -> CheckResult:
    """How far back the ledger of usage will reach.

    Args:
        combinations: of tenant, key, model and adapter in the fullest hour of the last day.
    """
    hourly, hours = combinations * ROW_BYTES, use.max_age_s / 3600
    if not use.max_bytes or not hourly or hourly * hours <= use.max_bytes:
        return ok("usage", "the ledger keeps its hours as long as it may")
    held, needed = show_duration(3600 * use.max_bytes / hourly), math.ceil(hourly * hours / 2**30)
    text = (
        f"{use.name} holds about {held}, not {show_duration(use.max_age_s)}, with {combinations:,} combinations of "
        "tenant, key, model and adapter an hour; the oldest hours go first, and budgets need the current month"
    )
    return warning("usage", text, f"enlarge it: `penstock streams set USAGE --max-bytes {needed}GiB`")


def _replicas(streams: list[StreamUse]) -> CheckResult:
    """Whether another server of a cluster may be stopped now."""
    servers = sorted({server for use in streams for server in use.incomplete})
    if not servers:
        return ok("replicas", "each copy of each stream is there and current")
    count = sum(bool(use.incomplete) for use in streams)
    text = f"of {count} of {len(streams)} streams, the copy of {' and '.join(servers)} is away or behind"
    return warning("replicas", text, "start that server, and wait until this is gone before you stop another one")


async def _clock(bus: Bus) -> CheckResult:
    """The broker's clock against this machine's, as far as the round trip allows."""
    began = time.time()
    info = await request(bus.nc, f"STREAM.INFO.{bus.subjects.stream('DONE')}", {})
    ended = time.time()
    server_time = parse_time(info["ts"]) / 1e9
    skew = server_time - ended if server_time > ended else server_time - began if server_time < began else 0.0
    if abs(skew) > SKEW_S:
        text = f"the broker's is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
        return warning("clock", text, "synchronise clocks (chrony, NTP): deadlines and timings compare them")
    return ok("clock", "this machine's and the broker's agree")


VERIFIED_BYTES = 32 << 20  # 0.3 s of CPU time; all of 733 MiB take 5 s
NAMED = 3  # damaged messages per stream


def check_stored_messages(data_dirs: Sequence[Path], *, everything: bool) -> list[CheckResult]:
    """Whether the checksums of messages in the streams' files are right. The broker says nothing of single messages.

    Args:
        data_dirs: of all cells whose files are on this machine.
        everything: read all, not only the newest.
    """
    removed = [each for each in data_dirs if not (each / STREAMS_DIR).is_dir() and _serves(each)]
    if removed:
        text = f"{', '.join(str(each / STREAMS_DIR) for each in removed)} was removed while the broker runs"
        fix = "let open requests end, then restart the broker: it loses what it holds whenever it ends"
        return [problem("stored messages", text, fix)]
    folders = [path.parent for each in data_dirs for path in (each / STREAMS_DIR).glob("*/meta.inf")]
    if not folders:
        text = "the files of the streams are on the broker's machine: name their data folder there (--data-dir)"
        return [skipped("stored messages", text)] if everything else []
    if not can_verify_much():
        return [skipped("stored messages", "verifying checksums needs numpy: pip install 'penstock[router]'")]
    began = time.perf_counter()
    found = check_files(folders, 0 if everything else VERIFIED_BYTES)
    took = f"{show_size(found.read_bytes)} of {show_size(found.all_bytes)} read in {time.perf_counter() - began:.1f} s"
    more = "" if found.read_bytes == found.all_bytes else ", the newest first: `penstock doctor --verify` reads all"
    fix = (
        "the disk returned other bytes than the broker wrote: check the disk, and restore (`penstock restore`) what "
        "`penstock requests` shows as unknown"
    )
    by_stream: dict[str, list[Damage]] = {}
    for damage in found.damages:
        by_stream.setdefault(damage.stream, []).append(damage)
    findings = [problem("stored messages", _damaged(each), fix) for each in by_stream.values()]
    if found.unreadable:
        text = f"only the broker reads {', '.join(found.unreadable)}, which it encrypts or compresses"
        findings.append(skipped("stored messages", text))
    return [*findings, ok("stored messages", f"{took}{more}")]


def _serves(data_dir: Path) -> bool:
    """Whether a broker runs on a folder."""
    with contextlib.suppress(BrokerProblem):
        return running_pid(data_dir) > 0
    return False


def _damaged(damages: Sequence[Damage]) -> str:
    """What is damaged in one stream."""
    messages = [each for damage in damages for each in damage.messages]
    lost = sum(damage.lost_bytes for damage in damages)
    parts = [f"{counted(len(messages), 'message')} with a wrong checksum"] if messages else []
    parts += [f"{show_size(lost)} that are not whole messages"] if lost else []
    text = f"{damages[0].stream} has {' and '.join(parts)} in {', '.join(damage.file for damage in damages[:NAMED])}"
    text += ", …" if len(damages) > NAMED else ""
    names = [f"{seq} ({subject})" for seq, subject in messages[:NAMED]]
    return f"{text}: {', '.join(names)}{', …' if len(messages) > NAMED else ''}" if names else text
