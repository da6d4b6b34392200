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
OURS = {"schemas", "configs", "infra", "gateway", "router", "workers", "penstock"}
# Floors, from the ground up: a folder imports only from earlier entries, and nothing from those beside it.
FLOORS = (("schemas",), ("configs",), ("infra",), ("gateway", "router", "workers"), ("penstock",))
# The same within each folder; "." are its own modules. The longest name that a module lies below is its level.
LEVELS = {
    "infra": (
        (".",),
        ("constraints", "process", "engine_args"),
        ("metrics",),
        ("bus", "text", "engine_args.rules"),
        ("text.parsers", "nats_server"),
        ("model",),
        ("deploy.images",),
    ),
    "gateway": (
        ("base",),
        ("media", "grammars", "access", "admission.rate_limits"),
        ("apis.chat",),
        ("apis.responses", "apis.messages", "apis.ollama"),
        ("apis",),
        ("request_log",),
        ("admission",),
        ("service",),
        ("batches",),
        ("http",),
        ("nats",),
        (".",),
    ),
    "router": (("state",), ("placement",), ("held",), ("ownership",), ("recovery",), ("service",), (".",)),
    "workers": (
        ("engines",),
        ("engines.logits", "engines.constraints"),
        ("engines.core",),
        ("engines.events",),
        ("engines.mock", "engines.native.model"),
        ("engines.external",),
        ("engines.native.cuda",),
        ("engines.native",),
        ("engines.diffusion", "engines.embed"),
        ("engines.trtllm", "engines.sglang", "engines.vllm", "engines.openai"),
        ("kv_transfer",),
        ("metrics",),
        ("engine_loop",),
        ("session",),
        ("disagg",),
        ("runners",),
        (".",),
    ),
    "penstock": (
        ("client", "cli"),
        ("launch.recipes",),
        ("launch",),
        ("log_tools.sources",),
        ("log_tools.timeline",),
        ("log_tools.traces",),
        ("log_tools.requests",),
        ("log_tools.export",),
        ("log_tools.replay",),
        ("log_tools.whatif",),
        ("log_tools",),
        ("operate",),
        ("operate.doctor",),
        ("operate.dashboard",),
        ("deploy",),
        ("measure",),
        ("measure.simulation",),
        ("measure.sweep",),
        ("measure.pareto",),
        ("measure.profile",),
        ("planner",),
        ("measure.search",),
        ("measure.slurm",),
        ("chat",),
        (".",),
    ),
}
# What only these folders may name: everything else must start without it.
CONFINED = {
    "torch": ("workers/engines", "workers/kv_transfer", "penstock/client/weights"),
    "tensorrt_llm": ("workers/engines/trtllm",),
    "vllm": ("workers/engines/vllm",),
    "sglang": ("workers/engines/sglang",),
    "nixl": ("workers/kv_transfer/nixl", "penstock/client/weights"),
    "diffusers": ("workers/engines/diffusion",),
    "llguidance": (
        "infra/constraints/constraint_grammar",
        "infra/constraints/llguidance_releases",
        "workers/engines/constraints",
    ),
    "numpy": (
        "router/placement/arrays",
        "workers/engines",
        "workers/kv_transfer",
        "penstock/measure/handoff",
        "penstock/log_tools/requests/slow",
        "penstock/log_tools/requests/text_search",
        "penstock/log_tools/sources/many_checksums",
    ),
}
# Texts that would be names of modules, but are not.
BY_CHANCE = {
    "gateway/http/middleware.py: gateway.access",  # the name of a logger
    "tests/chaos/builds.py: infra.cli",  # of older builds
    "tests/chaos/test_builds.py: infra.cli",
}
# Public classes of two top-level folders: an object of an API on both sides (ToolCall), or of a library (Message).
SHARED_NAMES = {
    "Message",
    "SchedulerConfig",
    "ToolCall",
    "Usage",
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
    public_classes: list[str]


@cache
def module(path: Path) -> Module:
    """Parsed once: there are hundreds, and their trees are large."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = path.relative_to(ROOT).parent.parts
    package = parts if parts[:1] == ("penstock",) else ("penstock", *parts)
    public = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    found = Module(ast.get_docstring(tree) is not None, [], [], public)
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
    """A module's path below the repository with dots, as the tables above have it."""
    below = name.removeprefix("penstock.")
    return below if below.partition(".")[0] in OURS else name


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


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def every_module() -> dict[str, Path]:
    """All of ours, by name; not what lies behind the links in ``penstock``."""
    return {dotted(path): path for folder in OURS for path in sources(folder)}


def folder_of(name: str) -> str:
    return name if every_module()[name].name == "__init__.py" else name.rpartition(".")[0]


def level_of(name: str) -> int:
    """Of a module within its top-level folder."""
    top, _, folder = folder_of(name).partition(".")
    known = {each: level for level, row in enumerate(LEVELS.get(top, ((".",),))) for each in row}
    while folder and folder not in known:
        folder = folder.rpartition(".")[0]
    assert (folder or ".") in known, f"{name} has no level"
    return known[folder or "."]


def imported() -> Iterator[tuple[str, str]]:
    """Modules and what they import of ours. A package's re-exports of its own modules do not count."""
    for name, path in every_module().items():
        for target in imported_modules(path, set(every_module())):
            if target != "penstock" and not (path.name == "__init__.py" and below(target, name)):
                yield name, target


def test_a_folder_imports_only_from_the_floors_below_it() -> None:
    floor = {folder: at for at, row in enumerate(FLOORS) for folder in row}
    wrong = []
    for name, target in imported():
        one, other = name.partition(".")[0], target.partition(".")[0]
        if one != other and floor[other] >= floor[one]:
            wrong.append(f"{name} imports {target}")
    assert wrong == []


@pytest.mark.parametrize("top", sorted(OURS))
def test_within_a_folder_imports_point_down(top: str) -> None:
    wrong = set()
    for name, target in imported():
        if below(name, top) and below(target, top) and folder_of(name) != folder_of(target):
            one, other = level_of(name), level_of(target)
            if other >= one:
                wrong.add(f"{name} (level {one}) imports {target} (level {other})")
    assert sorted(wrong) == []


def test_the_client_imports_nothing_of_the_server() -> None:
    wrong = [(name, target) for name, target in imported() if below(name, "penstock.client")]
    assert [each for each in wrong if not below(each[1], "penstock.client")] == []


def test_a_part_is_imported_as_one_of_the_package_and_by_no_other_name() -> None:
    """In a checkout, the folders can be found at the top, too: a module would be loaded twice, and each class made
    twice.
    """
    parts = "|".join(sorted(OURS - {"penstock"}))
    bare = re.compile(rf"(?:{parts})\b")
    name_of_module = re.compile(rf"({parts})((?:\.[a-z_]\w*)+)(?::\w*)?")
    suspicious = re.compile(rf"(?:from|import) {bare.pattern}|[\"'](?:{parts})\.[a-z_]")
    wrong = []
    for path in (*sources("tests"), *(path for folder in OURS for path in sources(folder))):
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


def test_one_module_knows_the_private_parts_of_faststream() -> None:
    private = ("faststream._internal", "faststream.nats.subscriber", "faststream.nats.broker")
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in OURS
        for path in sources(folder)
        if any(name.startswith(private) for _, name in imports(path))
    ]
    assert set(found) == {"infra/bus/faststream_app.py"}


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
        "cli.import_structlog(); import penstock.router.run_router",
        "cli.import_structlog(); import penstock.gateway.run_gateway; from penstock.infra.model import modeldir; "
        "modeldir.load(modeldir.TINY)",
        "import penstock.launch.up; sys.modules.pop('rich', None)",
    ],
)
def test_a_front_process_starts_without_torch_and_those_that_serve_without_rich(code: str) -> None:
    heavy = ("torch", "vllm", "sglang", "tensorrt_llm", "rich")
    begin = "import sys; from penstock.cli import commands as cli"
    code = f"{begin}; {code}; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_the_log_of_a_stopped_deployment_is_read_without_the_client_and_the_configuration_of_its_broker() -> None:
    code = "import penstock.log_tools.requests.inspect, penstock.log_tools.requests.list_requests, sys; print(sorted("
    code += (
        "{'nats', 'penstock.infra.nats_server.server', 'penstock.infra.nats_server.config'}.intersection(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    loading = "import penstock.cli.commands, penstock.configs.flags, penstock.configs.settings, sys"
    code = f"{loading}; print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(run.stdout))
    assert loaded.isdisjoint(
        {"torch", "nats", "asyncio", "rich", "structlog", "uvicorn", "penstock.launch", "penstock.infra.nats_server"}
    )


def test_every_folder_is_a_package_and_says_what_it_is_for() -> None:
    paths = [path for folder in OURS for path in sources(folder)]
    assert [str(path.relative_to(ROOT)) for path in paths if path.stat().st_size and not module(path).docstring] == []


def test_a_public_class_name_stands_for_one_thing() -> None:
    """Search finds one class, and a reader who meets a name knows which."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, path in every_module().items():
        for each in module(path).public_classes:
            found.setdefault(each, {}).setdefault(name.partition(".")[0], []).append(name)
    repeated = {name: folders for name, folders in found.items() if any(len(each) > 1 for each in folders.values())}
    assert repeated == {}, "within a top-level folder, say what each is of"
    assert {name for name, folders in found.items() if len(folders) > 1} == SHARED_NAMES


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
    modules = set(every_module())
    graph = {name: {*imported_modules(path, modules)} - {name} for name, path in every_module().items()}
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
