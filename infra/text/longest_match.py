"""One regular expression for many texts, such as a tokenizer's added tokens."""

import re
from collections.abc import Collection
from os.path import commonprefix


def longest_of(texts: Collection[str]) -> str:
    """A pattern that matches the longest of these texts, and nothing if there are none.

    It is a tree of their beginnings: a plain alternation tries all of a thousand texts at each "<" of 8 KB, for 60 ms.
    """
    return _tree([*texts]) if texts else "(?!)"


def _tree(texts: list[str]) -> str:
    start = commonprefix(texts)  # noqa: RUF071 - of characters
    branches: dict[str, list[str]] = {}
    for text in texts:
        if rest := text[len(start) :]:
            branches.setdefault(rest[0], []).append(rest)
    if not branches:
        return re.escape(start)
    optional = "?" if start in texts else ""
    return f"{re.escape(start)}(?:{'|'.join(map(_tree, branches.values()))}){optional}"
