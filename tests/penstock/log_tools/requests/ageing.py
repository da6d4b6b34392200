"""Makes a stopped nats-server's messages older, as if the folder had been left alone for that long."""

import hashlib
import struct
from pathlib import Path

from penstock.log_tools.sources.highway_hash import highway_hash_64

_HEADER = struct.Struct("<IQqH")  # length (top bit: has headers), sequence, time in ns, length of the subject
_HAS_HEADERS = 1 << 31
_CHECKSUM_BYTES = 8


def age(stream: Path, by_ns: int) -> int:
    """Rewrite every message of a stream's folder (nats-server ``filestore.go``); how many there were."""
    count = 0
    for block in (stream / "msgs").glob("*.blk"):
        key = hashlib.sha256(f"{stream.name}-{block.stem}".encode()).digest()
        old, new, at = block.read_bytes(), bytearray(), 0
        while at < len(old):
            length, seq, time_ns, subject_bytes = _HEADER.unpack_from(old, at)
            end = at + (length & ~_HAS_HEADERS)
            body = old[at + _HEADER.size : end - _CHECKSUM_BYTES]
            header = _HEADER.pack(length, seq, time_ns - by_ns, subject_bytes)
            hashed = body
            if length & _HAS_HEADERS:  # the checksum leaves out the length of the headers
                hashed = body[:subject_bytes] + body[subject_bytes + 4 :]
            new += header + body + highway_hash_64(key, header[4:20] + hashed)
            at, count = end, count + 1
        block.write_bytes(bytes(new))
    (stream / "msgs" / "index.db").unlink(missing_ok=True)  # it holds times, too; the server makes it anew
    return count
