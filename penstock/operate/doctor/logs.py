"""Known causes in the logs of a deployment, with what to do about each."""

import re
from pathlib import Path
from typing import NamedTuple

from penstock.operate.doctor.finding import Finding, Status, ok, skipped

TAIL_BYTES = 512 << 10  # of each log


class _Known(NamedTuple):
    check: str
    pattern: re.Pattern[bytes]
    status: Status
    fix: str


_KNOWN = (
    _Known(
        "GPU memory",
        re.compile(rb"CUDA out of memory|OutOfMemoryError|CUDNN_STATUS_ALLOC_FAILED", re.IGNORECASE),
        Status.problem,
        "lower one of: tokens per step (--max-batched-tokens, the engine's max_num_tokens), sequences at once "
        "(--max-running, max_batch_size), share of memory for KV (free_gpu_memory_fraction, --kv-blocks)",
    ),
    _Known(
        "machine memory",
        re.compile(rb"Cannot allocate memory|\bMemoryError"),
        Status.problem,
        "start fewer workers, or lower --kv-blocks",
    ),
    _Known(
        "port",
        re.compile(rb"address already in use|cannot listen on", re.IGNORECASE),
        Status.warning,
        "another program has the port: end it, or choose another one",
    ),
    _Known(
        "GPU driver",
        re.compile(rb"no kernel image is available|CUDA driver version is insufficient|NCCL error", re.IGNORECASE),
        Status.problem,
        "bring torch's CUDA build, the driver and the GPU together: `nvidia-smi` shows what the driver supports",
    ),
    _Known(
        "disk",
        re.compile(rb"no space left on device", re.IGNORECASE),
        Status.warning,
        "make room on the data folder's disk",
    ),
    _Known(
        "broker rights",
        re.compile(rb"permissions violation|authorization violation", re.IGNORECASE),
        Status.problem,
        "compare the user's permissions with docs/roles.md, and its password with secrets.json",
    ),
    _Known(
        "KV transport",
        re.compile(rb"nixl.{0,80}(?:error|failed)|UCX\s+ERROR", re.IGNORECASE),
        Status.warning,
        "requests went on by computing their prompts again; see docs/disaggregation.md for UCX_TLS and RDMA",
    ),
)


def check_logs(folder: Path) -> list[Finding]:
    """What the logs of the last runs tell, each cause once."""
    if not folder.is_dir():
        return [skipped("logs", f"no logs in {folder}")]
    causes: dict[str, tuple[_Known, list[str], str]] = {}
    for path in sorted(folder.glob("*.log")):
        text = tail(path, TAIL_BYTES)
        for pattern in _KNOWN:
            if (match := pattern.pattern.search(text)) is None:
                continue
            line = text[text.rfind(b"\n", 0, match.start()) + 1 :].split(b"\n", 1)[0]
            _, names, _ = causes.setdefault(pattern.check, (pattern, [], line.decode(errors="replace")[:160]))
            names.append(path.name)
    return [
        Finding(check, pattern.status, f"{', '.join(names)}: {line}", pattern.fix)
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
