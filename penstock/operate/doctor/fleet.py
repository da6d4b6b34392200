"""Checks of what runs: gateways, routers, workers, and the way of KV events from an engine to the routers' index."""

import asyncio
import contextlib
import math
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from penstock.cli.figures import counted, show_size, span
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import parse_time, read
from penstock.infra.bus.jetstream import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND
from penstock.infra.bus.worker_leases import registrations, routers
from penstock.infra.nats_server.apply_streams import begins_beyond
from penstock.infra.nats_server.jetstream_api import existing_info, request
from penstock.infra.process.sockets import is_loopback
from penstock.launch.readiness import SAMPLE, get, get_url, metrics
from penstock.launch.state import DeploymentState
from penstock.operate.doctor.finding import (
    CheckResult,
    CheckStatus,
    WorkerUse,
    check_gateway_certificate,
    ok,
    problem,
    warning,
)
from penstock.operate.observe import CLASSES, STALLED_MS, lost_leases
from penstock.router.placement.decide import TransferKind, transfer_kind
from penstock.schemas.audit import KEYS_LOST
from penstock.schemas.audit import decode as decode_audit
from penstock.schemas.fleet import ConnectorUse, GpuUse, Registration, WorkerState
from penstock.schemas.pace import PREFILL, compare
from penstock.schemas.routers import LostLeases

FULL = 0.95
LOST_WITHIN_NS = 7 * 86_400_000_000_000  # how old a gateway's entry may be that the keys are lost
LONG_STEP_MS = 1_000
UNREAD_S = 30.0  # requests wait, and no router has taken one for so long
LOOK_S = 1.0
RECONNECT_S = 5.0  # within which routers take requests again after the broker's start
FREE = 0.01  # of a GPU's memory: the next allocation may fail
UNUSED_BYTES = 1 << 30  # a CUDA context takes about half of that
BUSY_PERCENT = 50  # of a GPU whose workers have nothing to do
HELD = 0.5  # of a pool, for other workers
OFTEN = 2  # lost leases of a worker that are a problem


def check_processes(state: DeploymentState) -> list[CheckResult]:
    """Whether everything that ``penstock up`` supervises runs."""
    down = [process for process in state.processes if process.pid is None and not (process.drained or process.leaving)]
    drained = [process.name for process in state.processes if process.drained]
    findings = [
        problem("processes", f"{each.name} does not run at the moment", f"its log says why: logs/{each.name}.log")
        for each in down
    ]
    if drained:
        names = " ".join(drained)
        findings.append(warning("processes", f"drained: {names}", f"`penstock restart {names}` starts them again"))
    leaving = [each.name for each in state.processes if each.leaving]
    last = (
        f"; {' '.join(leaving)} answer{'' if len(leaving) > 1 else 's'} the last requests, then end" if leaving else ""
    )
    return findings or [ok("processes", f"all {len(state.processes)} run{last}")]


class Keys(NamedTuple):
    """API keys of the broker.

    Attributes:
        there: how many it has, revoked ones included.
        lost_by: ids of gateways that noted within seven days, while there are none, that there were some.
    """

    there: int
    lost_by: tuple[str, ...] = ()


async def answers_as_gateway(host: str, port: int) -> bool:
    """Whether a gateway of Penstock listens there, over HTTP or HTTPS, ready or not."""

    class Answer(msgspec.Struct):
        components: list[object]
        endpoints: list[str]

    for tls in (False, True):
        status, body = await get(host, port, "/health", tls=tls)
        with contextlib.suppress(msgspec.MsgspecError):
            if status:
                msgspec.json.decode(body, type=Answer)
                return True
    return False


async def from_outside(url: str) -> str:
    """A gateway's URL by which other machines reach it; "": it listens on loopback only, or there is no network."""
    parts = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks which address this machine would send from
            address = probe.getsockname()[0]
    except OSError:
        return ""
    if is_loopback(address) or not is_loopback(parts.hostname or ""):
        return ""
    found = f"{parts.scheme}://{address}:{parts.port or 80}"
    return found if (await get_url(found, "/health/live"))[0] else ""


async def check_gateways(
    urls: Sequence[str], keys: Keys | None = None, names: Mapping[str, str] = {}
) -> list[CheckResult]:
    """Check whether each gateway could serve a request, and report what it lacks.

    Args:
        keys: of the broker; None: not known.
        names: of those that this machine runs, by URL.
    """

    class Answer(msgspec.Struct):
        reasons: tuple[str, ...] = ()

    findings = []
    open_to_all: dict[str, bool] = {}  # by URL
    lost: set[str] = set()
    for url in urls:
        parts, gateway = urlsplit(url), _label(url, names)
        status, body = await get_url(url, "/health/ready")
        findings += await asyncio.to_thread(check_gateway_certificate, url)
        page = await get_url(url, "/metrics") if status else (0, b"")
        if status and (models := (await get_url(url, "/v1/models"))[0]) in (200, 401):
            open_to_all[url] = models == 200
        values = _values(page[1])
        if values.get("penstock_gateway_keys_lost", 0) > 0:
            lost.add(url)
        if open_to_all.get(url):
            proxied = values.get("penstock_gateway_trusted_proxies", 0) > 0
            if proxied or not is_loopback(parts.hostname or ""):
                who = "whom its proxies let through" if proxied else "who reaches it"
                fix = "make API keys (`penstock keys create`)" + ("" if proxied else ", or let it listen on loopback")
                findings.append(warning("gateway", f"{gateway} answers everyone {who}, without an API key", fix))
        findings += _connections(gateway, *page) if status else []
        if status == 200:
            findings.append(ok("gateway", f"{gateway} is ready"))
        elif not status:
            fix = "check that it runs and that the port is open between here and there"
            findings.append(problem("gateway", f"{gateway} does not answer", fix))
        else:
            try:
                reasons = msgspec.json.decode(body, type=Answer).reasons
            except msgspec.MsgspecError:
                reasons = ()
            text = "; ".join(reasons) or body.decode(errors="replace")[:200]
            findings.append(problem("gateway", f"{gateway} is not ready: {text}", "mend what it names"))
    if len(set(open_to_all.values())) > 1:
        those = [_label(url, names) for url, answers in open_to_all.items() if answers]
        text = f"{', '.join(those)} answer{'' if len(those) > 1 else 's'} without an API key, and others demand one"
        fix = "the broker may have lost its keys: look at `penstock keys list`, and start all with --require-keys"
        findings.append(problem("gateway", text, fix))
    if keys is not None and not open_to_all:  # what no gateway says itself
        lost |= set(keys.lost_by)
    if lost:
        text = f"there were API keys, and the broker has none any more: {' '.join(sorted(lost))} "
        text += f"refuse{'s' if len(lost) == 1 else ''} every request with 401"
        fix = (
            "`penstock keys import < FILE`, with what `penstock keys export` wrote last, or `penstock keys create`; "
            "gateways need no restart. To serve everyone without keys, remove the file that their log names "
            "(`keys_lost`) and start them again"
        )
        findings.append(problem("keys", text, fix))
    elif open_to_all and keys is not None and not keys.there and not any(open_to_all.values()):
        text = "gateways demand an API key, and the broker has none"
        fix = (
            "make one (`penstock keys create`). If there were keys, the broker has lost them: "
            "`penstock keys import < FILE`. Keys of --api-key are still accepted"
        )
        findings.append(warning("keys", text, fix))
    return findings


def _label(url: str, names: Mapping[str, str]) -> str:
    return f"{names[url]} ({url})" if url in names else url


async def find_keys(bus: Bus) -> Keys:
    """
    Raises:
        BrokerProblem: it does not answer.
        ServingError: the audit log cannot be read.
    """
    subjects = bus.subjects
    info = await existing_info(bus.nc, f"STREAM.INFO.KV_{subjects.bucket('keys')}", STREAM_NOT_FOUND)
    count = 0 if info is None else int(info["state"]["messages"])
    audit = subjects.stream("AUDIT")
    if count or await existing_info(bus.nc, f"STREAM.INFO.{audit}", STREAM_NOT_FOUND) is None:
        return Keys(count)
    lost = set()
    # Of all users: on a broker of one's own, a gateway's may have another name.
    async for each in read(bus, audit, subjects.all("audit"), since_ns=time.time_ns() - LOST_WITHIN_NS):
        with contextlib.suppress(msgspec.MsgspecError):
            entry = decode_audit(each.data)
            if entry.action == KEYS_LOST:
                lost.add(entry.what)
    return Keys(count, tuple(sorted(lost)))


def _values(page: bytes) -> dict[str, float]:
    """Samples of a metrics page by name; of several with one name, the last."""
    return {name: float(value) for name, value in SAMPLE.findall(page.decode(errors="replace"))}


def _connections(gateway: str, status: int, page: bytes) -> list[CheckResult]:
    """Whether a gateway refuses connections, or will soon for want of open files."""
    if status != 200:
        return []
    values = _values(page)
    limit, files, refused = (
        int(values.get(f"penstock_gateway_{name}", 0))
        for name in ("max_connections", "files_limit", "connections_refused")
    )
    findings = []
    if files:
        text = f"{gateway} serves {limit} connections at a time: it may have {files} open files"
        findings.append(warning("gateway", text, "raise `ulimit -n` (LimitNOFILE in systemd) and start it again"))
    if refused:
        text = f"{gateway} has refused {counted(refused, 'connection')} beyond its limits since its start"
        findings.append(warning("gateway", text, "raise --max-connections, or add gateways"))
    return findings


async def check_fleet(bus: Bus, state: DeploymentState | None, cell: int = 0) -> list[CheckResult]:
    """Check routers, workers and the streams between them, as the broker sees them.

    Args:
        cell: whose broker it is, by its number.
    Raises:
        ServingError, BrokerProblem: the broker does not answer.
    """
    findings = await _routers(bus)
    workers = await registrations(bus)
    if workers or state is None or state.is_active(cell):
        findings += check_workers(workers)
    else:
        findings.append(ok("workers", "none: this cell takes no new requests and keeps its records"))
    findings += check_paces(workers)
    findings += check_resources(workers)
    findings += check_leases(lost_leases(await routers(bus)), workers, time.time_ns())
    findings += await _kv_events(bus, workers, state, cell)
    return findings


async def _routers(bus: Bus) -> list[CheckResult]:
    stream = bus.subjects.stream("REQUESTS")
    pulls = held = unread = 0
    untaken_s = 0.0
    for priority in CLASSES:
        info = await existing_info(bus.nc, f"CONSUMER.INFO.{stream}.router-{priority}", CONSUMER_NOT_FOUND)
        if info is None:
            text = f"consumer router-{priority} of {stream} is missing, so no router reads its requests"
            return [problem("router", text, "make it again: `penstock streams apply`")]
        if await begins_beyond(bus.nc, info):
            text = (
                f"consumer router-{priority} of {stream} begins at {info['config']['opt_start_seq']}, a position in a "
                "stream that was lost, so no router reads the requests before"
            )
            return [problem("router", text, "replace it: `penstock streams apply`")]
        untaken_s = max(untaken_s, await _untaken_s(bus, info))
        pulls += info.get("num_waiting", 0)
        held += info["num_ack_pending"]
        unread += info["num_pending"]
    if not pulls:
        text = "no router takes requests" + (f"; {unread} wait" if unread else "")
        return [problem("router", text, "start one: `penstock router`")]
    if untaken_s:
        since = "since the broker started" if untaken_s == math.inf else f"for {span(untaken_s * 1e3)}"
        text = f"{counted(unread, 'request')} unread: routers have taken none of a class {since}"
        fix = (
            "add workers if routers hold as many as they may (`penstock top`); if not, look in their logs for "
            "`pull_refused` and `pull_failed`, and restart them"
        )
        return [problem("router", text, fix)]
    waiting = f"; held for lack of a worker: {counted(held, 'request')}" if held else ""
    return [ok("router", f"requests are taken{waiting}")]


async def _untaken_s(bus: Bus, info: dict[str, Any]) -> float:
    """For how long a consumer has delivered nothing although messages wait, if longer than ``UNREAD_S``; else 0.

    Infinity: it has delivered nothing since the broker started. The messages themselves are not looked at: a viewer may
    not read them.
    """
    if not info["num_pending"]:
        return 0.0
    label = f"{info['stream_name']}.{info['name']}"
    last = info["delivered"].get("last_active")
    untaken_s = (bus.clock.now_ns() - parse_time(last or info["created"])) / 1e9
    if untaken_s <= UNREAD_S:
        return 0.0
    await asyncio.sleep(LOOK_S if last else RECONNECT_S)  # what has come just now is delivered meanwhile
    later = await existing_info(bus.nc, f"CONSUMER.INFO.{label}", CONSUMER_NOT_FOUND)
    stands = later is not None and later["delivered"]["stream_seq"] == info["delivered"]["stream_seq"]
    return 0.0 if not stands else untaken_s if last else math.inf


def check_workers(workers: Sequence[Registration]) -> list[CheckResult]:
    """Whether the registered workers can serve their models, and how well."""
    if not workers:
        fix = "start one: `penstock worker --model DIR`; if one runs, its log says why it is not registered"
        return [problem("workers", "none is registered", fix)]
    by_model: dict[str, list[Registration]] = defaultdict(list)
    for each in workers:
        by_model[each.model].append(each)
    findings = []
    for model, those in by_model.items():
        findings += _model(model, those)
    return findings


def _model(model: str, workers: Sequence[Registration]) -> list[CheckResult]:
    ready = [each for each in workers if each.state is WorkerState.ready]
    roles = {each.role for each in ready}
    findings: list[CheckResult] = []
    if not roles & {"aggregated", "decode", "diffusion", "embed"}:
        text = f"{model}: only {', '.join(sorted(roles)) or 'draining'} workers"
        findings.append(problem("roles", text, "start aggregated workers, or decode workers beside prefill workers"))
    elif roles == {"decode"}:
        fix = "start prefill workers, or aggregated ones instead"
        findings.append(warning("roles", f"{model}: decode workers compute prompts themselves", fix))
    for name, fix in (
        ("revision", "drain the workers of one; until then the newer ones stand by"),
        ("tokenizer", "give all workers and gateways the same model directory"),
        ("block_size", "start all workers with the same --block-size: they share no prefixes otherwise"),
    ):
        values = {getattr(each, name) for each in ready if getattr(each, name)}
        if len(values) > 1:
            text = f"{model}: {len(values)} different {name.replace('_', ' ')}s among its workers"
            findings.append(warning("same model", text, fix))
    findings += [finding for each in ready for finding in _load(each)]
    findings += _uneven(model, ready)
    if any(each.role in ("prefill", "decode") and each.transfer is None for each in ready):
        fix = "start it with --transfer auto and NIXL installed"
        findings.append(problem("KV transport", f"{model}: a {'/'.join(sorted(roles))} worker cannot move KV", fix))
    findings += _pairs(model, ready)
    return findings or [ok("workers", f"{model}: {len(ready)} ready, {', '.join(sorted(roles))}")]


def _pairs(model: str, ready: Sequence[Registration]) -> list[CheckResult]:
    """Prefill and decode workers whose KV does not fit any of the other role: routers pair none of them."""
    names: dict[str, dict[TransferKind, list[str]]] = {"prefill": defaultdict(list), "decode": defaultdict(list)}
    for each in ready:
        if each.role in names and (kind := transfer_kind(each)) is not None:
            names[each.role][kind].append(each.name or each.worker)
    findings = []
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        alone = sorted(name for kind, those in names[role].items() if kind not in names[other] for name in those)
        if alone and names[other]:
            text = f"{model}: the KV of {', '.join(alone)} ({role}) fits no {other} worker's, so that none of it moves"
            fix = (
                "give both roles the same --engine, --dtype, --kv-dtype, --block-size, --quantization, --max-model-len "
                "and --hybrid-kv-cache"
            )
            findings.append(warning("pairs", text, fix))
    return findings


def check_leases(lost: Sequence[LostLeases], workers: Sequence[Registration], now_ns: int) -> list[CheckResult]:
    """Workers that lose their lease over and over, which are stopped for seconds, and those that hold it and hang."""
    findings = []
    by_name = {each.lasting_name: each for each in workers}
    together = max(lost, key=lambda each: (each.together, each.last_ns), default=None)
    if together is not None and together.together:
        times = "once" if together.together == 1 else f"{together.together} times"
        text = f"all workers lost their leases at once, or while the broker was away: {times} in ten minutes"
        fix = (
            "the broker stopped, elected a leader, or stood still, not the workers: see its log, its disk and its "
            "machine; where workers share a machine, that may have stood still"
        )
        findings.append(warning("all leases", text, fix))
    for each in lost:
        if not each.count and each.worker in by_name:
            continue
        times = {0: "with all others", 1: "once"}.get(each.count, f"{each.count} times")
        ago_s = max(0, round((now_ns - each.last_ns) / 1e9))
        text = f"{each.worker} lost its lease {times} in ten minutes, {ago_s} s ago the last time"
        there = by_name.get(each.worker)
        if there is None:
            text += "; it is not registered now"
        elif there.load.slowest_step_ms:
            text += f"; its slowest step within a minute took {span(there.load.slowest_step_ms)}"
        fix = (
            "its process crashes, or stands still for seconds: see its log, then its machine (memory that is swapped, "
            "a throttled CPU, a debugger, the network); `penstock dead list` shows requests that crash workers"
        )
        findings.append((problem if each.count >= OFTEN else warning)("leases", text, fix))
    for worker in workers:
        if worker.load.quiet_ms >= STALLED_MS:
            text = f"{worker.name or worker.worker} holds its lease, but its engine did nothing for "
            text += f"{worker.load.quiet_ms / 1000:.0f} s although it has something to do"
            fix = "see its log and its GPU; restart it: `penstock restart`. Routers take its requests away after 120 s"
            findings.append(problem("engine", text, fix))
    if workers and all(each.check == "all leases" for each in findings):
        findings.append(ok("leases", "no worker lost its lease on its own within ten minutes"))
    return findings


def check_paces(workers: Sequence[Registration]) -> list[CheckResult]:
    """Workers that are much slower than their peers. Routers avoid them, so that nothing else shows them."""
    found = compare(workers)
    findings = []
    for worker in workers:
        pace = found.get(worker.worker)
        if pace is None or not pace.is_slow:
            continue
        name = worker.name or worker.worker
        own, others = span(pace.latency_us / 1e3), span(pace.peer_latency_us / 1e3)
        what = "for a prompt" if worker.role == PREFILL else "from token to token"
        text = f"{name} is {pace.slowness:.0f} times slower than its peers: {own} {what}, and they {others}"
        text += f" ({counted(pace.peers, 'peer')}{', ' + worker.device if worker.device else ''})"
        fix = (
            "compare its machine with theirs: other programs on its GPU or cores, throttled clocks (`nvidia-smi -q -d "
            "PERFORMANCE`), swapped memory, a slow link between its GPUs. Until it is repaired: "
            f"`penstock drain {name}`. Routers send it less meanwhile"
        )
        findings.append(warning("slow worker", text, fix))
    if found and not findings:
        findings.append(
            ok("slow worker", f"of {counted(len(found), 'worker')} with peers none is much slower than they")
        )
    return findings


def _load(worker: Registration) -> list[CheckResult]:
    findings = []
    blocks = worker.total_blocks * worker.dp_size
    if worker.load.waiting and worker.load.used_blocks > FULL * blocks:
        text = f"{worker.name}: {worker.load.waiting} sequences wait for KV blocks"
        fix = "add workers, or give it more memory: --kv-blocks, or the engine's memory fraction"
        findings.append(warning("KV memory", text, fix))
    elif worker.load.waiting > worker.slots * worker.dp_size:
        text = f"{worker.name}: {worker.load.waiting} sequences wait for a slot"
        findings.append(warning("slots", text, "add workers, or raise --max-running if its memory allows"))
    if worker.role == "aggregated" and worker.load.slowest_step_ms >= LONG_STEP_MS and worker.max_batched_tokens:
        text = f"{worker.name}: a step took {span(worker.load.slowest_step_ms)} within a minute, and all answers waited"
        text += f" for it: up to {worker.max_batched_tokens} tokens of prompts are computed at once"
        fix = "lower --max-batched-tokens; with --engine trtllm set enable_chunked_prefill, and max_num_tokens"
        findings.append(warning("chunked prefill", text, fix))
    if not worker.kv_events and worker.role != "encode":
        text = f"{worker.name} publishes no KV events: requests do not find their prefixes there"
        findings.append(warning("KV events", text, "leave the prefix cache and publishing of events on"))
    return findings


def _uneven(model: str, ready: Sequence[Registration]) -> list[CheckResult]:
    """Workers with a queue while others of their role have nothing to do."""
    findings = []
    for role in sorted({each.role for each in ready}):
        those = [each for each in ready if each.role == role]
        idle = [each for each in those if not each.load.running and not each.load.waiting]
        hot = [each for each in those if each.load.waiting and each.load.running >= each.slots * each.dp_size]
        if not idle or not hot:
            continue
        most = max(hot, key=lambda each: each.load.waiting)
        text = (
            f"{model}: {counted(most.load.waiting, 'sequence')} wait at {most.name or most.worker}, and "
            f"{counted(len(idle), f'{role} worker')} of {len(those)} have nothing to do"
        )
        fix = (
            "see why requests go there: `penstock whatif`, and `penstock inspect` of one that waited. Those that name "
            "a worker stay with it; a low --overlap-weight of routers lets cached prefixes count less"
        )
        findings.append(warning("uneven load", text, fix))
    return findings


def check_resources(workers: Sequence[Registration]) -> list[CheckResult]:
    """What GPUs and connectors of all workers have in use, and what is wrong with them.

    A finding "resources" for each worker, in order of their names.
    """
    findings: list[CheckResult] = []
    by_gpu: dict[str, list[Registration]] = defaultdict(list)  # workers share GPUs, in pods with names of their own
    for each in workers:
        for identity in {gpu.id for gpu in each.load.gpus if gpu.id}:
            by_gpu[identity].append(each)
    full: set[str] = set()
    for each in workers:
        name, gpus = each.name or each.worker, each.load.gpus
        for number, gpu in enumerate(gpus):
            where = f"GPU {number} of {name} on {gpu.host or each.host}"
            if gpu.error:
                fix = (
                    "look for Xid errors in the log of that machine's kernel and at `nvidia-smi` there; drain the "
                    f"worker (`penstock drain {name}`) before the GPU is reset"
                )
                findings.append(problem("GPU", f"{where} cannot be read: {gpu.error}", fix))
            elif gpu.total_bytes - gpu.used_bytes < FREE * gpu.total_bytes and gpu.id not in full:
                full.add(gpu.id)
                text = f"{where} has {show_size(gpu.total_bytes - gpu.used_bytes)} of {show_size(gpu.total_bytes)} free"
                fix = "leave the engine less (--kv-blocks, or its memory fraction), or end what else runs there"
                findings.append(warning("GPU memory", text, fix))
        unused = [
            gpu for gpu in gpus
            if gpu.total_bytes and gpu.used_bytes < UNUSED_BYTES and not gpu.busy_percent > 0
            and len(by_gpu[gpu.id]) == 1
        ]  # fmt: skip
        if 0 < len(unused) < len(gpus):
            text = f"{name} on {each.host} sees {len(gpus)} GPUs, and {len(unused)} of them have nothing in memory"
            fix = "start a worker on each (CUDA_VISIBLE_DEVICES), or one over all of them (--tensor-parallel-size)"
            findings.append(warning("unused GPUs", text, fix))
        findings += _connector(name, each)
        findings.append(_use(name, each, by_gpu))
    return findings


def _connector(name: str, worker: Registration) -> list[CheckResult]:
    use, findings = worker.load.connector, []
    if use is None:
        return []
    if use.quarantined_blocks:
        text = f"{name}: {counted(use.quarantined_blocks, 'block')} cannot be used until a transfer that failed ends"
        fix = "look at the network between the machines and at `transfer` in the worker's log; see docs/rdma.md"
        findings.append(warning("KV transport", text, fix))
    held, total = use.pinned_blocks + use.reserved_blocks, worker.total_blocks * worker.dp_size
    if total and held > HELD * total:
        text = (
            f"{name} keeps {held} of {counted(total, 'block')} for handoffs: {use.pinned_blocks} for readers, in "
            f"{counted(use.leases, 'lease')}, and {use.reserved_blocks} for KV that is being read"
        )
        fix = "add decode workers if prefill workers keep blocks for readers; else look at the speed of transfers"
        findings.append(warning("KV transport", text, fix))
    if 0 < use.buffer_tokens < worker.max_model_len:
        text = f"{name}: its connector's buffers take prompts of {use.buffer_tokens} tokens, and it accepts more"
        fix = f"set cache_transceiver_config.max_tokens_in_buffer to {worker.max_model_len}, or lower --max-model-len"
        findings.append(warning("KV transport", text, fix))
    return findings


def _use(name: str, worker: Registration, by_gpu: Mapping[str, Sequence[Registration]]) -> CheckResult:
    load = worker.load
    use = WorkerUse(
        *(name, worker.role, worker.model, worker.host),
        *(load.running, load.waiting, worker.slots * worker.dp_size),
        *(load.used_blocks, worker.total_blocks * worker.dp_size),
        *(load.gpus, load.connector),
        _note(worker, by_gpu),
    )
    parts = [
        f"{name} on {use.host or 'an unknown host'}: {use.running} of {use.slots} slots, {use.waiting} waiting",
        *(f"GPU {number}{gpu.host and f' on {gpu.host}'} {show_gpu(gpu)}" for number, gpu in enumerate(use.gpus)),
        *([show_connector(use.connector)] if use.connector is not None else []),
        *([use.note] if use.note else []),
    ]
    return CheckResult("resources", CheckStatus.ok, "; ".join(parts), use=use)


def _note(worker: Registration, by_gpu: Mapping[str, Sequence[Registration]]) -> str:
    """Hot: there is more to do than it can; idle: there is nothing to do."""
    load = worker.load
    if load.waiting and load.running >= worker.slots * worker.dp_size:
        return "hot: no free slot"
    if load.waiting and load.used_blocks >= FULL * worker.total_blocks * worker.dp_size:
        return "hot: no free KV blocks"
    if worker.leaves or worker.rests:
        return worker.rests or worker.state.value
    if load.running or load.waiting:
        return ""
    for gpu in load.gpus:
        sharing = by_gpu.get(gpu.id, (worker,))
        if gpu.busy_percent >= BUSY_PERCENT and not any(each.load.running or each.load.waiting for each in sharing):
            return "busy without requests"
    return "idle"


def show_gpu(gpu: GpuUse) -> str:
    """Memory and use of a GPU in a few words."""
    if gpu.error:
        return gpu.error
    memory = f"{show_size(gpu.used_bytes)} of {show_size(gpu.total_bytes)}" if gpu.total_bytes else "memory unknown"
    return f"{memory}, " + (f"{gpu.busy_percent}% busy" if gpu.busy_percent >= 0 else "use unknown")


def show_connector(use: ConnectorUse) -> str:
    """What a connector holds, in a few words."""
    parts = [use.name, f"{show_size(use.registered_bytes)} registered" if use.registered_bytes >= 0 else "size unknown"]
    parts += [f"{show_size(use.buffer_bytes)} in buffers"] if use.buffer_bytes > 0 else []
    parts += [f"buffers for {use.buffer_tokens} tokens"] if use.buffer_tokens else []
    parts += [f"{use.transfers} moving"] if use.transfers > 0 else []
    parts += [f"{use.pinned_blocks} blocks pinned ({counted(use.leases, 'lease')})"] if use.leases else []
    parts += [f"{use.reserved_blocks} reserved"] if use.reserved_blocks else []
    parts += [f"{use.quarantined_blocks} in quarantine"] if use.quarantined_blocks else []
    return ", ".join(parts)


async def _kv_events(
    bus: Bus, workers: Sequence[Registration], state: DeploymentState | None, cell: int
) -> list[CheckResult]:
    """Counts at each step: engine, stream, index. Where they end is where the chain is broken."""
    publishing = [each for each in workers if each.kv_events and each.role in ("aggregated", "prefill", "decode")]
    if not publishing:
        return []
    stream = bus.subjects.stream("KV")
    info = await request(bus.nc, f"STREAM.INFO.{stream}", {"subjects_filter": bus.subjects.all("kv")})
    counts = info["state"].get("subjects") or {}
    cached = sum(each.load.cached_blocks + each.load.used_blocks for each in publishing)
    messages = sum(counts.get(bus.subjects.kv(each.model, each.worker), 0) for each in publishing)
    indexed = await _indexed(state, cell)
    steps = f"{counted(cached, 'block')} in {counted(len(publishing), 'engine')}, "
    steps += f"{counted(messages, 'message')} in {stream}"
    if indexed is None:
        return [ok("KV events", steps)]
    steps += f", {counted(min(indexed), 'block')} in each router's index"
    if cached and not messages:
        # After an hour without events the stream is empty, and routers know the blocks from dumps.
        if min(indexed):
            return [ok("KV events", steps)]
        fix = "look for `kv` in the workers' logs; an external engine's publisher port must be free on each rank"
        return [problem("KV events", f"the engines' events do not arrive: {steps}", fix)]
    if messages and cached and not min(indexed):
        fix = "look at the routers' logs; they ask workers for a dump after a gap"
        return [problem("KV events", f"the index is empty: {steps}", fix)]
    return [ok("KV events", steps)]


async def _indexed(state: DeploymentState | None, cell: int) -> list[int] | None:
    """Blocks in the index of each router of a cell that serves metrics; None: none does."""
    of_cell = [each for each in state.processes if each.cell == cell] if state else []
    routers = [each for each in of_cell if each.role == "router" and each.metrics_url]
    blocks = [value for each in routers if (value := (await metrics(each)).get("penstock_router_index_blocks"))
             is not None]  # fmt: skip
    return [int(value) for value in blocks] or None
