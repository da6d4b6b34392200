"""What is installed: every package of ours, and the client under its own import name."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("schemas", "gateway", "router", "workers", "configs", "infra")


SOURCE_TREE_ONLY = {"infra.demo_model", "infra.eval"}  # tools that train and examine the models that are shipped


def test_every_package_is_installed_and_the_client_as_penstock() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names = {".".join(folder.parts) for folder in folders} - SOURCE_TREE_ONLY - {"gateway.client"} | {"penstock"}
    assert sorted(built["packages"]) == sorted(names)
    assert built["package-dir"] == {"penstock": "gateway/client"}


def test_the_client_works_under_its_own_name_without_the_rest(tmp_path: Path) -> None:
    """As installed: a folder called penstock, and nothing else of ours."""
    (tmp_path / "penstock").symlink_to(ROOT / "gateway" / "client")
    code = (
        "import sys; from penstock import Client, Position; assert Position.parse(str(Position('k'))).key == 'k'; "
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & {set(FOLDERS)!r}))"
    )
    environ = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
