"""Who may import whom, read from the source: the folders' contract."""

import ast
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
    "nixl": ("workers/kv_transfer/nixl",),
    "diffusers": ("workers/engines/diffusion",),
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
    code += "; import sys; print([name for name in ('torch', 'vllm', 'tensorrt_llm') if name in sys.modules])"
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


def test_no_module_is_long_and_no_function_neither() -> None:
    """450 lines a module and 60 a function, but for kernels: Triton compiles each as one function."""
    long: list[str] = []
    for folder in sorted(OURS):
        for path in sources(folder):
            text = path.read_text(encoding="utf-8")
            if text.count("\n") > 450:
                long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    if lines > 60:
                        long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert long == []


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)
