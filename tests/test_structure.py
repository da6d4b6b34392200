"""Who may import whom, read from the source: the folders' contract."""

import ast
import graphlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"schemas", "gateway", "router", "workers", "configs", "infra"}
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
    "llguidance": ("infra/model/constraints", "workers/engines/constraints"),
    "numpy": (
        "router/placement/arrays",
        "workers/engines",
        "workers/kv_transfer",
        "infra/bench/",
        "infra/replay/checksums",
    ),
}
MAKES_MODELS = (
    "infra/demo_model/tiny.py",
    "infra/demo_model/",
)  # tools run by hand: no process imports their torch parts


def test_no_merge_conflict_is_left_in_a_file() -> None:
    listed = subprocess.run(
        ["git", "grep", "-IlE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert listed.stdout == ""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything a module imports, wherever in it."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])


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
        "import router.main",
        "import gateway.main; from infra.model import modeldir; modeldir.load(modeldir.TINY)",
        "import infra.launch.main",
    ],
)
def test_a_front_process_starts_without_torch(code: str) -> None:
    code += "; import sys; print([name for name in ('torch', 'vllm', 'sglang', 'tensorrt_llm') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    code = "import infra.cli, configs.flags, configs.settings, sys; print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(run.stdout))
    assert loaded.isdisjoint(
        {"torch", "nats", "asyncio", "rich", "structlog", "uvicorn", "infra.launch", "infra.broker"}
    )


def test_every_folder_is_a_package_and_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for folder in OURS
        for path in sources(folder)
        if path.read_text(encoding="utf-8").strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_modules_and_functions_are_short_and_take_few_parameters() -> None:
    """At most 450 lines a module, 60 lines and 8 positional parameters a function.

    Kernels are exempt: Triton compiles each as one function, and passes tensors and their strides by position.
    """
    too_large: list[str] = []
    lengths: list[int] = []
    for path in (path for folder in sorted(OURS) for path in sources(folder)):
        name, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        lengths += [text.count("\n")] if text else []
        if text.count("\n") > 450:
            too_large.append(f"{name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 60:
                    too_large.append(f"{name}: {node.name} has {lines} lines")
                if len(positional(node)) > 8:
                    too_large.append(f"{name}: {node.name} has {len(positional(node))} positional parameters")
    assert too_large == []
    assert 80 <= statistics.median(lengths) <= 140


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of the parameters that can be passed by position, without ``self`` and ``cls``."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too: they would hide a circle, not open it."""
    paths = [path for folder in OURS for path in sources(folder)]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = {target for target in imported_modules(path, modules) if target != module}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def imported_modules(path: Path, modules: set[str]) -> Iterator[str]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            submodules = {f"{name}.{alias.name}" for alias in node.names} & modules
            yield from submodules
            if name in modules and len(submodules) < len(node.names):
                yield name
