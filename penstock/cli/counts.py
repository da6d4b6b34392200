"""Counts as people read them: "1 request", "2,048 requests"."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count and its noun.

    Args:
        plural: of the noun; default: with an "s".
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
