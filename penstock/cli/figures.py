"""Figures as people read and write them at a terminal: times, durations, counts, sizes in bytes, quantiles."""

import contextlib
import datetime
import re
from collections.abc import Sequence
from typing import TypeVar

_AGO = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9, "d": 86400e9}


def duration_ns(text: str) -> int:
    """Nanoseconds of "300ms", "90s", "15m", "2h", "7d".

    Raises:
        ValueError: anything else.
    """
    match = _AGO.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write 300ms, 90s, 15m, 2h or 7d")
    return int(float(match[1]) * _UNITS[match[2]])


def moment_ns(text: str, now_ns: int, zone: datetime.tzinfo | None = None) -> int:
    """Unix time in ns of a duration before ``now_ns`` ("15m"), or of an ISO 8601 time.

    A time of day alone ("14:03:10.250") is today's, or yesterday's if today's is still to come.

    Args:
        zone: of a time that names none; None: the local one.
    Raises:
        ValueError: neither of the two.
    """
    if _AGO.fullmatch(text.strip()):
        return now_ns - duration_ns(text)
    if ":" in text:  # "2026" would be a time of day, too
        with contextlib.suppress(ValueError):
            time_of_day = datetime.time.fromisoformat(text.strip())
            time_of_day = time_of_day.replace(tzinfo=time_of_day.tzinfo or zone)
            today = datetime.datetime.fromtimestamp(now_ns / 1e9, time_of_day.tzinfo).date()
            at = datetime.datetime.combine(today, time_of_day)
            if at.timestamp() > now_ns / 1e9:
                at -= datetime.timedelta(days=1)
            return round(at.timestamp() * 1e6) * 1000
    try:
        at = datetime.datetime.fromisoformat(text.strip())
        seconds = at.replace(tzinfo=at.tzinfo or zone).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time: write how long ago (15m, 2h, 7d), a time of day (09:30:10) "
            "or an ISO 8601 time (2026-11-22T09:30)"
        ) from None
    return int(seconds * 1e9)


def clock(at_ns: int, now_ns: int) -> str:
    """Local time of day with milliseconds, after the date unless that is today's."""
    at = datetime.datetime.fromtimestamp(at_ns / 1e9)
    today = datetime.datetime.fromtimestamp(now_ns / 1e9).date()
    text = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}"
    return text if at.date() == today else f"{at:%Y-%m-%d} {text}"


def span(ms: float | None) -> str:
    """A duration for a column of a table; "" for None."""
    if ms is None:
        return ""
    if ms < 1000:
        return f"{ms:.1f} ms"
    return f"{ms / 1e3:.2f} s" if ms < 60_000 else f"{int(ms // 60_000)} min {ms % 60_000 / 1e3:.0f} s"


def show_duration(seconds: float) -> str:
    """A duration in its largest fitting unit: "45 s", "90 min", "36 h", "7 d"."""
    for unit, size, up_to in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if seconds < up_to * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{round(seconds / 86400, 1):g} d"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count and its noun.

    Args:
        plural: of the noun; default: with an "s".
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?)?B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "4GiB", "500MB" or "1073741824". Units with an "i" are powers of 1,024, others of 1,000.

    Raises:
        ValueError: anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write 512MiB, 4GiB or a number of bytes")
    unit = found[2] or ""
    return int(float(found[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")])


def show_size(size: float) -> str:
    """Bytes with a binary unit and up to one decimal: "0 B", "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


T = TypeVar("T")


def quantile(ordered: Sequence[float], share: float, nothing: T) -> float | T:
    """The value below which ``share`` of the ordered values are, by nearest rank; ``nothing`` of no values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else nothing
