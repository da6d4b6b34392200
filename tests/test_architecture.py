"""What the documentation names exists, and the pages that come from the code are current."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml

import tests.generated.log_events
import tests.generated.metrics
import tests.generated.settings
import tests.generated.wire
from penstock.configs import settings
from penstock.deploy.monitoring import flag
from penstock.deploy.values import Thresholds
from penstock.gateway.apis.images import IMAGE_PATHS
from penstock.schemas.errors import Code
from tests import docs_words

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOLDERS = ("schemas", "gateway", "router", "workers", "configs", "infra", "penstock")
SOURCE_ROOTS = (ROOT, ROOT / "workers")
TEST_ROOTS = (ROOT / "tests", ROOT / "tests" / "workers", ROOT / "tests" / "pipeline")
NUMBERS = re.compile(r"S(\d+)(?:–S?(\d+))?$")


class Row(NamedTuple):
    what: str
    where: str  # empty in the tables of failures, which name no places
    tests: list[str]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: str) -> Iterator[list[list[str]]]:
    """The tables of a page: rows of cells, the head first, without the line of dashes."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for found in re.finditer(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = found[0].splitlines()
        yield [cells(head), *map(cells, rows)]


def rows(page: str) -> list[list[str]]:
    found = [row for table in tables(page) for row in table[1:]]
    assert len(found) > 10, f"no table in docs/{page}"
    return found


def requirements() -> list[Row]:
    return [Row(row[0], row[-2], names(row[-1])) for row in rows("requirements.md")]


def failures() -> list[Row]:
    return [Row(row[0], "", names(row[-1])) for row in rows("failures.md")]


def reports() -> list[Row]:
    """The kinds of public reports about other servers that are cured here."""
    return [Row(row[0], "", names(row[-1])) for row in rows("results/reports.md") if "Not cured yet" not in row[-2]]


# ---- what the source defines


@functools.cache
def definitions(path: Path) -> frozenset[str]:
    """Names that a module defines: ``function``, ``CONSTANT``, ``Class``, ``Class.member``."""
    found = set[str]()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(prefix + name)
                case ast.ClassDef(name=name, body=members):
                    found.add(prefix + name)
                    visit(members, f"{prefix}{name}.")
                case ast.Assign(targets=targets):
                    found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


def defines(path: Path, name: str) -> bool:
    """Whether a module, or one of a package, defines ``name``, there or in a class."""
    modules = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []
    return any(each == name or each.endswith(f".{name}") for module in modules for each in definitions(module))


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


def missing(where: str) -> list[str]:
    """Names of a row's places that mean nothing.

    A name that follows a path directly (```folder/module` `name```) must be defined there; any other, somewhere.
    """
    wrong: list[str] = []
    beside: Path | None = None
    last: Path | None = None  # the path that was named just before, with nothing in between
    end = 0
    for found in re.finditer(r"`([^`]+)`", where):
        name = found[1]
        follows, end = not where[end : found.start()].strip(), found.end()
        *_, word = name.split()  # "worker --otlp-endpoint" is a flag of a command
        if word.startswith("--"):
            if word not in flags():
                wrong.append(name)
            continue
        if last is not None and follows:
            if not defines(last, name):
                wrong.append(f"{name} in {last.relative_to(ROOT)}")
            continue
        if last := find(name, SOURCE_ROOTS, beside):
            beside = last if last.is_dir() else last.parent
            continue
        module, _, attribute = name.rpartition(".")
        path = find(module, SOURCE_ROOTS, beside) if module else None
        if not (defines(path, attribute) if path else any(defines(ROOT / folder, name) for folder in FOLDERS)):
            wrong.append(name)
    return wrong


# ---- what the tests are called


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """Names of the test functions of a file, or of all files below a folder."""
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return frozenset(name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")))


def pattern(function: str) -> re.Pattern[str]:
    """Of the name of a test, in which ``…`` stands for what was left out."""
    prefix = "" if function.startswith("test_") else "test_.*"
    return re.compile(prefix + ".*".join(map(re.escape, function.split("…"))))


def missing_tests(row: Row) -> list[str]:
    """Names of a row's tests that no file or function has."""
    wrong: list[str] = []
    path: Path | None = None
    beside: Path | None = None
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
        if not (any(map(pattern(function).fullmatch, functions_of(path))) if function else functions_of(path)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("page", ["requirements.md", "failures.md", "results/reports.md"])
def test_no_row_has_an_empty_cell(page: str) -> None:
    for head, *body in tables(page):
        assert [row for row in body if len(row) != len(head) or not all(row)] == []


@pytest.mark.parametrize("row", requirements(), ids=lambda row: row.what)
def test_a_requirement_is_met_where_its_row_points(row: Row) -> None:
    assert names(row.where), "no place is named"
    assert missing(row.where) == []


@pytest.mark.parametrize("row", requirements() + failures() + reports(), ids=lambda row: row.what)
def test_the_test_of_a_requirement_failure_or_report_exists(row: Row) -> None:
    assert row.tests, "no test is named"
    assert missing_tests(row) == []


def test_no_requirement_is_left_out() -> None:
    found = set[int]()
    for row in requirements():
        for each in row.what.split(","):
            numbers = NUMBERS.match(each.strip())
            assert numbers, f"{each} is no number of a requirement"
            found |= set(range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1))
    assert set(range(1, 203)) - found == set()  # 203 asks for nothing


def test_a_name_that_its_module_does_not_define_is_found() -> None:
    assert missing("`schemas/tokens` `PROMPT`, `schemas/token_dedup`, `Job.scored`, `--namespace`") == []
    assert missing("`schemas/tokens` `Puller`") == ["Puller in schemas/tokens.py"]
    assert missing("`schemas/tokens.Puller`, `NoSuchClass`, `schemas/none`, `--no-such-flag`") == [
        "schemas/tokens.Puller",
        "NoSuchClass",
        "schemas/none",
        "--no-such-flag",
    ]


# ---- the way of a request


def test_the_way_of_a_request_visits_files_that_exist_each_once() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    way = text.partition("## The way of one request")[2].partition("\n## ")[0].partition("Through several workers")[0]
    steps = re.findall(r"^(\d+)\. `([^`]+)`", way, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) > 20
    assert len({path for _, path in steps}) == len(steps)
    assert [path for _, path in steps if not (ROOT / path).is_file()] == []


def test_the_map_names_packages_and_modules_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = text.partition("\n## Map\n")[2].partition("\n### ")[0].splitlines()
    wrong = []
    for folders, _, core, shell in (cells(line) for line in lines[3:] if line.startswith("| `")):
        roots = [ROOT / folder for folder in names(folders)]
        assert all(root.is_dir() for root in roots), folders
        wrong += [name for name in names(core + shell) if find(name.rstrip("/"), tuple(roots), None) is None]
    assert wrong == []


# ---- pages for users


@pytest.mark.parametrize(
    "source",
    [tests.generated.settings, tests.generated.metrics, tests.generated.wire, tests.generated.log_events],
    ids=lambda source: source.PAGE.name,
)
def test_a_page_that_comes_from_the_code_is_current(source: ModuleType) -> None:
    assert source.PAGE.read_text(encoding="utf-8") == source.page(), "run: python -m tests.generated"


def test_the_http_page_has_every_error_with_its_status() -> None:
    found = {(row[0], row[1].strip("`")) for table in tables("http.md") for row in table if row[0].isdigit()}
    assert found == {(str(code.status), code.value) for code in Code}


def test_the_http_page_has_every_endpoint() -> None:
    text = (ROOT / "gateway" / "http" / "app.py").read_text(encoding="utf-8")
    paths = {path.replace(":path}", "}") for path in re.findall(r'"(/[a-z][\w./{}:-]*)"', text)} | set(
        IMAGE_PATHS.values()
    )
    page = (DOCS / "http.md").read_text(encoding="utf-8")
    assert len(paths) > 10
    assert {path for path in paths if f" {path}`" not in page} == set()


COMMAND_FLAGS = frozenset(
    flag
    for path in (
        *(ROOT / "penstock").rglob("*.py"),
        *(ROOT / "infra").rglob("*.py"),
        *(ROOT / "tests" / "chaos").rglob("*.py"),
    )
    for flag in re.findall(r'\(\s*"(--[a-z0-9-]+)",', path.read_text(encoding="utf-8"))
) | {"--help", "--topology"}  # of commands with their own parsers
COMMAND_FLAGS |= {flag(field) for field in Thresholds.__struct_fields__}
# Of Dynamo, then aiperf and guidellm, then docker.
PEERS_FLAGS = frozenset(
    {"--migration-limit", "--artifact-dir", "--endpoint-type", "--streaming", "--synthetic-input-tokens-mean"}
    | {"--output-tokens-mean", "--request-rate", "--input-file", "--request-count", "--extra-inputs"}
    | {"--backend", "--profile", "--data", "--constraint", "--output"}
    | {"--build-arg"}
)


@pytest.mark.parametrize(
    "page", ["README.md", "ARCHITECTURE.md", *(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
)
def test_the_flags_that_a_page_names_exist(page: str) -> None:
    known = frozenset(re.findall(r"`(--[a-z0-9-]+)`", tests.generated.settings.page())) | flags()
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    if page == "docs/migration.md":  # the first column has those of other servers
        prose = re.sub(r"^\|[^|]*\|", "|", prose, flags=re.MULTILINE)
    named = set(re.findall(r"`(--[a-z0-9-]+)[ `]", prose))
    assert named - known - COMMAND_FLAGS - PEERS_FLAGS == set()


def test_the_flags_that_an_error_names_exist() -> None:
    known = frozenset(re.findall(r"`(--[a-z0-9-]+)`", tests.generated.settings.page())) | flags() | COMMAND_FLAGS
    strings, raised = set[str](), set[str]()
    for part in ("penstock", "configs", "gateway", "infra", "router", "schemas", "workers"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found = strings if not isinstance(node, ast.Raise) else raised
                texts = ast.walk(node) if found is raised else [node]
                found |= {t.value for t in texts if isinstance(t, ast.Constant) and isinstance(t.value, str)}
    named = {name for text in raised for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+\b(?!-)", text)}
    assert len(named) > 100
    assert named - known - strings - PEERS_FLAGS - {"--servers"} == set()  # the last is of systemd's own flags


def test_the_changelog_has_no_links_to_files() -> None:
    """It is also a page of the site, in docs/, from where a link that works on the front page leads nowhere."""
    assert re.findall(r"\]\((?!https?://)[^)]*\)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("page", "limit"), [("README.md", 150), ("ARCHITECTURE.md", 250)])
def test_a_page_stays_short(page: str, limit: int) -> None:
    """What a program writes between marks is looked up, not read."""
    text = re.sub(r"<!-- made by .*?<!-- end\b[^>]*-->", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(text.splitlines()) <= limit


# ---- the site


def test_a_person_can_finish_the_documentation() -> None:
    words = docs_words.pages()
    assert "operations.md" in words
    assert docs_words.prose(words) <= 50_000, "run: python -m tests.docs_words"


def test_words_of_tables_code_and_generated_parts_are_no_prose() -> None:
    page = """# Two words

<!-- made by `python -m tests.generated`: a table -->
made words
<!-- end: a table -->

| head | of a table |
|---|---|
| cell | - |

Three words more.

- in a list

  ```sh
  pasted --flag
  ```
"""
    # "#" and "-" are words of the marks' own: a few too many are no harm.
    assert docs_words.count(page) == docs_words.Words(prose=3 + 3 + 4, tables=6, code=4)


@functools.cache
def shelves() -> dict[str, list[str]]:
    """The pages of each shelf, as the site's navigation has them."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return {
        name: [path for page in pages for path in page.values()]
        for shelf in nav
        for name, pages in shelf.items()
        if isinstance(pages, list)
    }


def test_the_front_page_has_each_page_on_the_shelf_of_the_navigation() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    for name in ("Learn", "Do", "Reference", "Explain"):
        shelf = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"\]\(([\w/-]+\.md)\)", shelf)) - {"results/index.md"} == set(shelves()[name])


def test_every_page_is_in_the_navigation_once() -> None:
    found = sorted(["index.md", *(path for pages in shelves().values() for path in pages)])
    assert found == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_links_of_the_architecture_lead_to_the_same_pages_from_the_site() -> None:
    """The site includes the body of ARCHITECTURE.md, whose relative links would lead nowhere from docs/."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    body = text.partition("[start:body] -->")[2].partition("<!-- --8<-- [end:body]")[0]
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", body) == [], "use [text][name], with targets in both files"
    target = re.compile(r"^\[([\w-]+)\]: (\S+)$", re.MULTILINE)
    targets = dict(target.findall(text))
    assert set(re.findall(r"\]\[([\w-]+)\]", body)) == set(targets)
    on_site = dict(target.findall((DOCS / "architecture.md").read_text(encoding="utf-8")))
    assert {name: f"docs/{path}" for name, path in on_site.items()} == targets


# Not the summary, whose rows link to the figures, and not the list of others' reports.
RESULTS = sorted(path.name for path in (DOCS / "results").glob("*.md") if path.name not in ("index.md", "reports.md"))
COMMAND = re.compile(
    r"penstock (?:bench|up|plan|replay|requests)|python -m (?:tests\.|pytest)|make (?:conformance|test-hosts)"
)


@pytest.mark.parametrize("page", RESULTS)
def test_figures_have_a_command_and_a_build(page: str) -> None:
    """A build that a page names at its top is that of all its sections."""
    top, *sections = re.split(r"^## ", (DOCS / "results" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    build = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,10}\b")
    for section in sections:
        title = section.partition("\n")[0]
        if "|---|" in section and "This is a calculation" not in section:
            assert build.search(section) or build.search(top), f"{title} names no build"
            assert COMMAND.search(section), f"{title} names no command"
