"""Writes recorded messages as the streams of a data folder, under their own sequences and times.

A broker gives every message that is published a new sequence and the present time. ``explain``, traces and what-if
need the recorded ones, so the store's files are written instead: nats-server ``filestore.go`` reads a stream without an
index from its blocks, and marks missing sequences as deleted.
"""

import hashlib
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from penstock.infra.broker.apply import stream_configs
from penstock.infra.bus.direct_get import parse_time
from penstock.log.sources.checksums import checksums
from penstock.log.sources.export_file import ExportFile
from penstock.log.sources.log_copy import MEDIA, STREAMS_DIR, stream_name, without_limits
from penstock.log.sources.log_line import STREAMS, BadLine, LogLine
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects

RESTORED = (*STREAMS, MEDIA)
BLOCK_BYTES = 4 << 20
_HEADER = struct.Struct("<IQqH")  # length (top bit: has headers), sequence, time in ns, length of the subject
_HAS_HEADERS = 1 << 31
_CHECKSUM_BYTES = 8


class StreamFiles:
    """One stream of a data folder. ``add`` its messages in order, then ``close``.

    Args:
        name: with the namespace.
        subjects: where the messages are to be.
        recorded: the namespace in which they were recorded.
    """

    def __init__(self, data_dir: Path, name: str, config: dict[str, Any], subjects: Subjects, recorded: str) -> None:
        self._folder = data_dir / STREAMS_DIR / name
        self._name = name
        self._config = config
        self._from, self._to = (prefix(namespace, name) for namespace in (recorded, subjects.namespace))
        self._parts: list[tuple[bytes, bytes, bytes, bytes]] = []  # header, subject, headers, body
        self._bytes = 0
        self._blocks = 0
        self._last = 0
        self.messages = 0
        (self._folder / "msgs").mkdir(mode=0o700, parents=True)

    def add(self, record: LogLine) -> None:
        """
        Raises:
            BadLine: a sequence that does not follow the one before, or a subject of another namespace.
        """
        if record.seq <= self._last:
            raise BadLine(f"sequence {record.seq} of {record.stream} comes after {self._last}")
        if not record.subject.startswith(self._from):
            raise BadLine(f"subject {record.subject} does not begin with {self._from}")
        self._last = record.seq
        subject = (self._to + record.subject[len(self._from) :]).encode()
        headers = b""
        if record.headers:
            lines = "".join(f"{name}: {value}\r\n" for name, value in record.headers.items())
            headers = f"NATS/1.0\r\n{lines}\r\n".encode()
        size = _HEADER.size + len(subject) + len(record.data) + _CHECKSUM_BYTES
        if headers:
            size += 4 + len(headers)
        head = _HEADER.pack(size | bool(headers) << 31, record.seq, parse_time(record.time), len(subject))
        self._parts.append((head, subject, headers, record.data))
        self._bytes += size
        self.messages += 1
        if self._bytes >= BLOCK_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the buffered messages and the stream's metadata."""
        self._flush()
        meta, checksum = without_limits(self._name, msgspec.json.encode(self._config))
        (self._folder / "meta.inf").write_bytes(meta)
        (self._folder / "meta.sum").write_text(checksum)

    def _flush(self) -> None:
        if not self._parts:
            return
        self._blocks += 1
        key = hashlib.sha256(f"{self._name}-{self._blocks}".encode()).digest()
        # The server's checksum leaves out both lengths.
        hashed = [head[4:20] + subject + headers + data for head, subject, headers, data in self._parts]
        sums = checksums([key] * len(hashed), hashed)
        out = bytearray()
        for (head, subject, headers, data), checksum in zip(self._parts, sums, strict=True):
            length = len(headers).to_bytes(4, "little") if headers else b""
            out += b"".join((head, subject, length, headers, data, checksum))
        (self._folder / "msgs" / f"{self._blocks}.blk").write_bytes(out)
        self._parts.clear()
        self._bytes = 0


def prefix(namespace: str, stream: str) -> str:
    """The common beginning of a stream's or a bucket's subjects."""
    return f"$O.{namespace}_media." if stream.startswith("OBJ_") else f"{namespace}."


def restore(
    exported: ExportFile, data_dir: Path, namespace: str, streams: Collection[str] = RESTORED
) -> dict[str, int]:
    """Write an export into a data folder without these streams; the number of messages by stream.

    The streams have no age limit. No broker may run on the folder.

    Args:
        namespace: the streams' own; the file's subjects move there.
        streams: whose messages are written; the others stay empty.
    Raises:
        BadLine: a damaged line; see ``ExportFile.records`` and ``StreamFiles.add``.
        OSError: the folder cannot be written.
    """
    subjects = Subjects(namespace)
    targets = {stream_name(subjects, stream): stream for stream in RESTORED}
    configs = {config["name"]: config for config in stream_configs(topology(subjects)) if config["name"] in targets}
    files = {
        targets[name]: StreamFiles(
            data_dir, name, config | {"created": "2026-01-01T00:00:00Z"}, subjects, exported.header.namespace
        )
        for name, config in configs.items()
    }
    for record in exported.records(streams):
        if record.stream in files:  # others are of a later build
            try:
                files[record.stream].add(record)
            except BadLine as error:
                exported.reject(error)
    for each in files.values():
        each.close()
    return {stream: each.messages for stream, each in files.items()}
