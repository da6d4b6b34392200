"""Count the words that people wrote in docs/: ``python -m tests.docs_words`` prints them, page by page.

Prose counts: what a reader reads from start to end. Tables, which are looked up, and fenced code, which is pasted, have
a column each and do not count. Pages that a program writes are left out, and so are marked parts of other pages.
"""

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
# Written by `python -m tests.generated` and `python -m tests.clients table`; the last two show files of the root.
GENERATED = frozenset(
    {"settings.md", "metrics.md", "wire.md", "log-events.md", "clients.md", "changelog.md", "architecture.md"}
)

_MADE = re.compile(r"<!-- made by .*?<!-- end\b[^>]*-->|<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^(?P<indent> *)(?P<mark>```+)[^\n]*\n.*?^(?P=indent)(?P=mark) *$", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"^ *\|.*$", re.MULTILINE)
_RULE = re.compile(r"[|\s:-]+")


class Words(NamedTuple):
    prose: int
    tables: int
    code: int


def count(text: str) -> Words:
    """The words of a page in Markdown. What stands between marks of a generator is nobody's."""
    text = _MADE.sub("", text)
    code = sum(len(found[0].split()) for found in _FENCE.finditer(text))
    text = _FENCE.sub("", text)
    rows = [found[0] for found in _TABLE.finditer(text)]
    tables = sum(len(row.replace("|", " ").split()) for row in rows if not _RULE.fullmatch(row))
    return Words(len(_TABLE.sub("", text).split()), tables, code)


def pages(docs: Path = DOCS) -> dict[str, Words]:
    """Each page that people write, by its path in docs/."""
    found = {str(path.relative_to(docs)): path for path in sorted(docs.rglob("*.md"))}
    return {name: count(path.read_text(encoding="utf-8")) for name, path in found.items() if name not in GENERATED}


def prose(words: dict[str, Words]) -> int:
    return sum(page.prose for page in words.values())


def main() -> None:
    words = pages()
    print(f"{'prose':>7} {'tables':>7} {'code':>7}")
    for name, page in sorted(words.items(), key=lambda item: item[1].prose):
        print(f"{page.prose:7,} {page.tables:7,} {page.code:7,}  {name}")
    tables, code = (sum(page[column] for page in words.values()) for column in (1, 2))
    print(f"{prose(words):7,} {tables:7,} {code:7,}  all")


if __name__ == "__main__":
    main()
