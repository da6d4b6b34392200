"""Request ids: UUIDv7, which contain the time, so that a request is found in the log by a short scan."""

import os
import time
from uuid import UUID

CELL_AT = 36  # bit; the last 12 bits choose a request's shard in the log (``subjects``), and stay random


def new_request_id(now_ns: int | None = None, randomness: bytes | None = None, *, cell: int = -1) -> str:
    """A UUIDv7 (RFC 9562, section 5.7) as text: 48 bits of Unix milliseconds, then 74 random bits.

    Args:
        randomness: 10 bytes to use instead, for ids that several processes derive from the same input.
        cell: the three hexadecimal digits behind the last hyphen; -1: they are random, too.
    """
    ms = (time.time_ns() if now_ns is None else now_ns) // 1_000_000
    value = (ms << 80) | int.from_bytes(os.urandom(10) if randomness is None else randomness, "big")
    if cell >= 0:
        value = value & ~(0xFFF << CELL_AT) | cell << CELL_AT
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_ANSWERS = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # how ids of answers begin
_LONGEST_SHOWN = 80  # characters of what is no id
_LAST_MS = 253_402_300_799_999  # the year 9999, the last that RFC 3339 can write


def request_of_answer(answer_id: str) -> str:
    """The id of the request that an answer, or a request, names."""
    for prefix in _ANSWERS:
        answer_id = answer_id.removeprefix(prefix)
    return answer_id


def time_of(request_id: str) -> int:
    """The Unix time at which the id was made, in ns with millisecond resolution.

    Raises:
        ValueError: not a UUIDv7, or its time is beyond the year 9999.
    """
    try:
        uuid = UUID(request_id)
    except ValueError:
        uuid = UUID(int=0)
    if uuid.version != 7:
        shown = request_id if len(request_id) <= _LONGEST_SHOWN else request_id[:_LONGEST_SHOWN] + "…"
        raise ValueError(f"{shown!r} is not a request id, which is a UUIDv7 as in the X-Request-Id header")
    if (ms := uuid.int >> 80) > _LAST_MS:
        raise ValueError(f"{request_id!r} has a time beyond the year 9999")
    return ms * 1_000_000
