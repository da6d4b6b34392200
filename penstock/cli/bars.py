"""Bars of a waterfall in text. Pure."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(start: int, end: int, whole: int, width: int) -> str:
    """A bar for the part ``start`` .. ``end`` of ``whole``: blanks, then blocks, in eighths of a column.

    The bar has at least one mark and at most ``width`` columns.
    """
    first = max(0, min(width * 8 - 1, start * width * 8 // whole))
    length = max(1, min(width * 8 - first, (end - start) * width * 8 // whole))
    column, part = divmod(first, 8)
    if part and length < 8:
        return " " * column + "▐"
    blocks, rest = divmod(length + (part if part else 0), 8)
    return " " * column + ("█" * blocks + (_EIGHTHS[rest] if rest else "") or "▏")
