"""Sizes in bytes as people write and read them."""

import re

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
