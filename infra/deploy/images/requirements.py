"""What an image installs besides Penstock itself: ``python requirements.py [--without NAME,...] [EXTRA ...]``.

It reads ``pyproject.toml`` in the working directory and needs nothing but Python, so that the layer of dependencies
depends on that file alone.
"""

import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: Sequence[str], without: Collection[str] = ()) -> list[str]:
    """The project's dependencies and those of its extras, each once.

    Args:
        without: packages that are left out, because the image brings its own.
    Raises:
        KeyError: there is no such extra.
    """
    found = [*project["dependencies"], *(each for extra in extras for each in _of(project, extra))]
    return list(dict.fromkeys(each for each in found if _name(each) not in without))


def _of(project: dict[str, Any], extra: str) -> Iterator[str]:
    for each in project["optional-dependencies"][extra]:
        if _name(each) != project["name"]:
            yield each
            continue
        for inner in each.partition("[")[2].rstrip("]").split(","):
            yield from _of(project, inner)


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0]


def main(argv: Sequence[str]) -> None:
    rest = list(argv)
    without: Sequence[str] = ()
    if rest[:1] == ["--without"]:
        without, rest = rest[1].split(","), rest[2:]
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join(requirements(project, rest, without)))


if __name__ == "__main__":
    main(sys.argv[1:])
