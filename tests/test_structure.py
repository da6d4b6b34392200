"""Who may import whom, read from the source: the folders' contract."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"schemas", "gateway", "router", "workers", "configs", "infra"}
PROGRAMS = sorted((ROOT / "penstock").glob("*.py"))
# What each part may import; a prefix allows what lies below it. The longest prefix of a module's name is its part.
COMMON = ("schemas", "configs", "infra.bus", "infra.metrics", "infra.model")
ALLOWED = {
    "schemas": (),
    "configs": ("schemas",),
    "infra.bus": ("schemas", "configs", "infra.metrics"),
    "infra.metrics": (),
    "infra.model": ("schemas", "configs"),
    "infra.engine_args": ("schemas", "configs"),
    "router": COMMON,
    "gateway": COMMON,
    "workers": (*COMMON, "infra.engine_args"),
    "infra": tuple(sorted(OURS)),
}
# What only these folders may name: everything else must start without it.
CONFINED = {
    "torch": ("workers/engines", "workers/kv_transfer"),
    "tensorrt_llm": ("workers/engines/trtllm",),
    "vllm": ("workers/engines/vllm",),
    "sglang": ("workers/engines/sglang",),
    "nixl": ("workers/kv_transfer/nixl",),
    "diffusers": ("workers/engines/diffusion",),
    "llguidance": (
        "infra/constraints/constraints",
        "infra/constraints/llguidance_releases",
        "workers/engines/constraints",
    ),
    "numpy": (
        "router/placement/arrays",
        "workers/engines",
        "workers/kv_transfer",
        "tests/perf/",
        "penstock/log/sources/checksums",
    ),
}
# Texts that would be names of modules, but are not.
BY_CHANCE = {
    "gateway/http/middleware.py: gateway.access",  # the name of a logger
    "tests/chaos/builds.py: infra.cli",  # of older builds
    "tests/chaos/test_builds.py: infra.cli",
    *(f"tests/test_structure.py: {part}" for part in ALLOWED),
}
MAKES_MODELS = (
    "tests/demo_model/tiny.py",
    "tests/demo_model/",
)  # tools run by hand: no process imports their torch parts


def test_no_merge_conflict_is_left_in_a_file() -> None:
    listed = subprocess.run(
        ["git", "grep", "-IlE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert listed.stdout == ""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


class Module(NamedTuple):
    """What the tests ask of a module. ``imports``: line, module ("" of ``import a``), names behind ``import``.

    ``hidden_types``: classes, and names in their fields' types that are names of their own fields or methods, too.
    """

    docstring: bool
    imports: list[tuple[int, str, list[str]]]
    hidden_types: list[tuple[str, set[str]]]


@cache
def module(path: Path) -> Module:
    """Parsed once: there are hundreds, and their trees are large."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("penstock", *path.relative_to(ROOT).parent.parts)
    found = Module(ast.get_docstring(tree) is not None, [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports.append((node.lineno, "", [within(alias.name) for alias in node.names]))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = within(".".join([*base, *([node.module] if node.module else [])]))
            found.imports.append(
                (node.lineno, "" if name == "penstock" else name, [alias.name for alias in node.names])
            )
        elif isinstance(node, ast.ClassDef) and (hidden := hidden_types(node)):
            found.hidden_types.append((node.name, hidden))
    return found


def within(name: str) -> str:
    """A module's name within the package, as the tables above have it."""
    return name.removeprefix("penstock.")


def hidden_types(made: ast.ClassDef) -> set[str]:
    fields = [each for each in made.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    named = {each.name for each in made.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    named |= {each.target.id for each in fields if isinstance(each.target, ast.Name)}
    return named & {part.id for each in fields for part in ast.walk(each.annotation) if isinstance(part, ast.Name)}


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything a module imports, wherever in it."""
    return [(line, each) for line, name, names in module(path).imports for each in ([name] if name else names)]


def where(path: Path, line: int, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} imports {name}"


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def part_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return max((part for part in ALLOWED if below(name, part)), key=len)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_what_it_may(part: str) -> None:
    paths = [path for path in sources(part.replace(".", "/")) if part_of(path) == part]
    assert paths, f"{part} has no source"
    allowed = (*ALLOWED[part], part)
    forbidden = [
        where(path, line, name)
        for path in paths
        for line, name in imports(path)
        if name.partition(".")[0] in OURS | {"tests"} and not any(below(name, each) for each in allowed)
    ]
    assert forbidden == []


def test_a_part_is_imported_as_one_of_the_package_and_by_no_other_name() -> None:
    """In a checkout, the folders can be found at the top, too: a module would be loaded twice, and each class made
    twice.
    """
    parts = "|".join(sorted(OURS))
    bare = re.compile(rf"(?:{parts})\b")
    name_of_module = re.compile(rf"({parts})((?:\.[a-z_]\w*)+)(?::\w*)?")
    suspicious = re.compile(rf"(?:from|import) {bare.pattern}|[\"'](?:{parts})\.[a-z_]")
    wrong = []
    for path in (*sources("tests"), *(path for folder in OURS for path in sources(folder)), *PROGRAMS):
        text_of_file = path.read_text(encoding="utf-8")
        if not suspicious.search(text_of_file):
            continue
        for node in ast.walk(ast.parse(text_of_file)):
            names: list[str] = []
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names if bare.match(alias.name)]
                case ast.ImportFrom(level=0, module=str(name)) if bare.match(name):
                    names = [name]
                case ast.Constant(value=str(text)):
                    names = re.findall(rf"(?:^|[\n;] *)(?:from|import) {bare.pattern}", text)
                    if (whole := name_of_module.fullmatch(text)) and is_module(whole[1] + whole[2]):
                        names.append(text)
            wrong += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert sorted(set(wrong) - BY_CHANCE) == []


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file()


@pytest.mark.parametrize("library", sorted(CONFINED))
def test_a_heavy_library_is_named_only_where_it_belongs(library: str) -> None:
    wrong = []
    for path in (path for folder in OURS for path in sources(folder)):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith((*MAKES_MODELS, *CONFINED[library])):
            continue
        wrong += [where(path, line, what) for line, what in imports(path) if what.partition(".")[0] == library]
    assert wrong == []


def test_cores_and_schemas_touch_neither_broker_nor_clock() -> None:
    forbidden = {"nats", "faststream", "asyncio", "threading", "uvicorn"}
    pure = [*sources("schemas"), *sources("workers/engines/core")]
    found = [
        where(path, line, name) for path in pure for line, name in imports(path) if name.split(".")[0] in forbidden
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "cli.import_structlog(); import penstock.router.main",
        "cli.import_structlog(); import penstock.gateway.main; from penstock.infra.model import modeldir; "
        "modeldir.load(modeldir.TINY)",
        "import penstock.launch.up; sys.modules.pop('rich', None)",
    ],
)
def test_a_front_process_starts_without_torch_and_those_that_serve_without_rich(code: str) -> None:
    heavy = ("torch", "vllm", "sglang", "tensorrt_llm", "rich")
    code = f"import sys; from penstock.cli import commands as cli; {code}; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    code = "import penstock.cli.commands, penstock.configs.flags, penstock.configs.settings, sys; print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(run.stdout))
    assert loaded.isdisjoint(
        {"torch", "nats", "asyncio", "rich", "structlog", "uvicorn", "penstock.launch", "penstock.infra.broker"}
    )


def test_every_folder_is_a_package_and_says_what_it_is_for() -> None:
    paths = [path for folder in OURS for path in sources(folder)]
    assert [str(path.relative_to(ROOT)) for path in paths if path.stat().st_size and not module(path).docstring] == []


def test_no_field_or_method_hides_a_type_of_the_fields_of_its_class() -> None:
    """Python 3.14 evaluates annotations when they are asked for: ``bytes`` is the class' own ``bytes`` by then."""
    hidden = {
        f"{path.relative_to(ROOT)}: {name}": types
        for folder in sorted(OURS)
        for path in sources(folder)
        for name, types in module(path).hidden_types
    }
    assert hidden == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too: they would hide a circle, not open it."""
    paths = [path for folder in OURS for path in sources(folder)]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {target for target in imported_modules(path, modules) if target != name}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def imported_modules(path: Path, modules: set[str]) -> Iterator[str]:
    for _, name, names in module(path).imports:
        if not name:
            yield from (each for each in names if each in modules)
            continue
        submodules = {f"{name}.{each}" for each in names} & modules
        yield from submodules
        if name in modules and len(submodules) < len(names):
            yield name
