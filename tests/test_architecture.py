"""What ARCHITECTURE.md names exists: each file, flag and name of its map of requirements, each test of its tables."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from configs import settings

ROOT = Path(__file__).parent.parent
FOLDERS = ("schemas", "gateway", "router", "workers", "configs", "infra")
SOURCE_ROOTS = (ROOT, ROOT / "workers")
TEST_ROOTS = (ROOT / "tests", ROOT / "tests" / "workers", ROOT / "tests" / "pipeline")
NUMBERS = re.compile(r"S(\d+)(?:–S?(\d+))?$")


class Row(NamedTuple):
    """``where``: None in the table of failures, which tells no places."""

    what: str
    where: list[str] | None
    tests: list[str]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def table(section: str) -> Iterator[list[str]]:
    """Cells of the rows of a section's table, without its head."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {section}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert len(lines) > 10, f"no table in section {section}"
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def requirements() -> list[Row]:
    return [Row(what, names(where), names(tests)) for what, where, tests in table("Requirements")]


def failures() -> list[Row]:
    return [Row(what, None, names(tests)) for what, _, tests in table("Failures") if tests or not what.startswith("**")]


@functools.cache
def source() -> str:
    """Every module of ours, and what is shipped beside them."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(paths))


@functools.cache
def flags() -> frozenset[str]:
    kinds = [kind for name, kind in vars(settings).items() if name.endswith("Settings")]
    fields = {field for kind in kinds for field in kind.__struct_fields__}
    return frozenset(f"--{field.replace('_', '-')}" for field in fields | {f"no_{field}" for field in fields})


def find(name: str, roots: tuple[Path, ...], beside: Path | None) -> Path | None:
    """The file or folder that a name means: beside the one that was named before it, or from one of the roots."""
    for root in (beside, *roots):
        if root is None:
            continue
        for path in (root / name, root / f"{name}.py"):
            if path.exists():
                return path
        if "*" in name and (found := sorted(root.glob(name)) or sorted(root.glob(f"{name}.py"))):
            return found[0]
    return None


def is_identifier(name: str) -> bool:
    """Of our source; and no path that leads nowhere."""
    plain = re.fullmatch(r"[A-Za-z_.]+", name) is not None
    return plain and all(re.search(rf"\b{part}\b", source()) for part in name.split("."))


def is_in_module(name: str, beside: Path | None) -> bool:
    """``folder/module.name``."""
    module, _, attribute = name.rpartition(".")
    path = find(module, SOURCE_ROOTS, beside) if module else None
    return path is not None and path.is_file() and re.search(rf"\b{attribute}\b", text_of(path)) is not None


def missing(row: Row) -> list[str]:
    """Names of a row's places that mean nothing."""
    wrong, beside = [], None
    for name in row.where or []:
        *_, last = name.split()  # "worker --otlp-endpoint" is a flag of a command
        if last.startswith("--"):
            if last not in flags():
                wrong.append(name)
        elif path := find(name, SOURCE_ROOTS, beside):
            beside = path if path.is_dir() else path.parent
        elif not is_identifier(name) and not is_in_module(name, beside):
            wrong.append(name)
    return wrong


def missing_tests(row: Row) -> list[str]:
    """Names of a row's tests that no file or function has."""
    wrong: list[str] = []
    path = beside = None
    for name in row.tests:
        if name.startswith("python -m "):
            if find(name.removeprefix("python -m ").replace(".", "/"), (ROOT,), None) is None:
                wrong.append(name)
            continue
        file, _, function = name.partition("::")
        if name.startswith("…"):  # another one of the same file
            function = name
        else:
            path = find(file, TEST_ROOTS, beside)
        if path is None:
            wrong.append(name)
            continue
        beside = path if path.is_dir() else path.parent
        function = function.partition("[")[0]  # of one parameter
        if function and not (path.is_file() and re.search(as_pattern(function), text_of(path))):
            wrong.append(name)
    return wrong


def as_pattern(function: str) -> str:
    """Of the definition of a test whose name is given with ``…`` for what was left out."""
    return r"def test_\w*" + r"\w*".join(map(re.escape, function.removeprefix("test_").split("…")))


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("row", requirements(), ids=lambda row: row.what)
def test_a_requirement_is_where_it_is_said_to_be(row: Row) -> None:
    assert row.where, "no place is named"
    assert missing(row) == []


@pytest.mark.parametrize("row", requirements() + failures(), ids=lambda row: row.what)
def test_the_test_of_a_requirement_or_failure_exists(row: Row) -> None:
    assert row.tests, "no test is named"
    assert missing_tests(row) == []


def test_no_requirement_up_to_the_engines_is_left_out() -> None:
    found = set[int]()
    for row in requirements():
        for each in row.what.split(","):
            numbers = NUMBERS.match(each.strip())
            assert numbers, f"{each} is no number of a requirement"
            found |= set(range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1))
    assert set(range(1, 151)) - found == set()
