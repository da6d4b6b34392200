"""Request ids: UUIDv7, so that an id tells when it was made and a timeline is found by a short scan."""

import os
import time
from uuid import UUID


def new_request_id(now_ns: int | None = None, randomness: bytes | None = None) -> str:
    """A UUIDv7 (RFC 9562, section 5.7) as text: 48 bits of Unix milliseconds, then 74 random bits.

    Args:
        randomness: 10 bytes to use instead, for ids that several processes must arrive at.
    """
    ms = (time.time_ns() if now_ns is None else now_ns) // 1_000_000
    value = (ms << 80) | int.from_bytes(os.urandom(10) if randomness is None else randomness, "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_LAST_MS = 253_402_300_799_999  # the year 9999, the last that RFC 3339 can write


def time_of(request_id: str) -> int:
    """Nanoseconds since 1970 at which the id was made (millisecond resolution).

    Raises:
        ValueError: not a UUIDv7, or of a time that no log can be asked for.
    """
    uuid = UUID(request_id)
    if uuid.version != 7:
        raise ValueError(f"{request_id!r} is not a UUIDv7")
    if (ms := uuid.int >> 80) > _LAST_MS:
        raise ValueError(f"{request_id!r} is of a time beyond the year 9999")
    return ms * 1_000_000
