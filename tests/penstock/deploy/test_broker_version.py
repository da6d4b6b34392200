"""One minimum of nats-server: images, wheel and docs keep to it, and a server of exactly that version serves."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.deploy.kubernetes import CHART
from penstock.infra.nats_server import apply_streams
from penstock.infra.nats_server.binary import MINIMUM, TESTED, WHEEL, dotted, find_server, parse_version
from penstock.infra.nats_server.config import USERS, variable
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.binaries import OLDEST, find_oldest_server
from tests.generated.chart import FOLDER as COMPOSE
from tests.generated.chart import NAMESPACE
from tests.penstock.deploy.running import ask
from tests.penstock.deploy.test_broker import nats_conf
from tests.pipeline.support import MODEL, ROOT, Deployment

IMAGE = re.compile(r"\bnats:(?:\$\{[A-Z_]+:-)?(\d[\w.]*)-alpine\b")
PASSWORDS = {variable(user): f"p{user}0" for user in USERS}
needs_oldest = pytest.mark.skipif(
    find_oldest_server() is None, reason=f"{OLDEST} is not installed: python -m tests.binaries .venv/bin"
)


def tags() -> Iterator[tuple[str, str]]:
    """The tag of each image of NATS that anything here names, with the file."""
    for folder, pattern in ((COMPOSE, "*.yaml"), (CHART, "**/*.yaml"), (ROOT / "docs", "**/*.md")):
        for path in folder.glob(pattern):
            for tag in IMAGE.findall(path.read_text(encoding="utf-8")):
                yield path.name, tag
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    yield "values.yaml", values["nats"]["container"]["image"]["tag"].removesuffix("-alpine")


def test_every_image_is_an_exact_release_that_is_new_enough() -> None:
    """With 2.12 the servers of both default installs exited on their configuration."""
    found = list(tags())
    assert {name for name, _ in found} >= {"compose.yaml", "values.yaml"}
    for name, tag in found:
        version = parse_version(f"v{tag}")
        assert version is not None, f"{name}: {tag} moves; name a release"
        assert version >= MINIMUM, name
        assert tag == dotted(TESTED), name  # what the tests run


def test_the_wheel_and_the_docs_name_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"{WHEEL}=={dotted(TESTED)}" in project["dependencies"]
    assert MINIMUM <= TESTED
    for page in ("operations.md", "kubernetes.md", "troubleshooting.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        named = set(re.findall(r"nats-server (\d+\.\d+\.\d+)", text))
        assert dotted(MINIMUM) in named, page
        assert named <= {dotted(MINIMUM), dotted(TESTED)}, page  # what was seen on the one that tests run may be told


class OldServer:
    """What ``apply`` looks at first."""

    connected_server_version = "2.14.6"


async def test_an_older_broker_is_refused_by_name() -> None:
    with pytest.raises(BrokerProblem, match=rf"nats-server 2\.14\.6 is too old: at least {re.escape(dotted(MINIMUM))}"):
        await apply_streams.apply(OldServer(), topology(Subjects()))  # type: ignore[arg-type]


def configurations(folder: Path) -> Iterator[Path]:
    """What Compose and the chart give to their servers."""
    compose = (COMPOSE / "nats.conf").read_text(encoding="utf-8").replace("/data", str(folder / "compose"))
    (folder / "compose.conf").write_text(compose, encoding="utf-8")
    yield folder / "compose.conf"
    included = (CHART / "files" / "broker.conf").read_text(encoding="utf-8").replace(NAMESPACE, "ps")
    (folder / "broker.conf").write_text(included, encoding="utf-8")
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["nats"]
    chart = nats_conf(values, 4222, folder / "store", folder / "broker.conf")
    (folder / "chart.conf").write_text(chart, encoding="utf-8")
    yield folder / "chart.conf"


@pytest.mark.parametrize("which", [pytest.param("oldest", marks=needs_oldest), "installed"])
def test_a_server_reads_what_compose_and_the_chart_give_it(tmp_path: Path, which: str) -> None:
    server = find_oldest_server() if which == "oldest" else str(find_server())
    assert server is not None
    environ = PASSWORDS | {"PATH": os.environ["PATH"], "NODE": "nats-1"}
    environ |= {f"ROUTE_{n}": f"nats-route://route:p@nats-{n}:6222" for n in (1, 2, 3)}
    for path in configurations(tmp_path):
        command = [server, "-t", "-c", path]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_oldest
@pytest.mark.timeout(180)
async def test_the_oldest_server_serves_a_chat(tmp_path: Path) -> None:
    oldest = find_oldest_server()
    assert oldest is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nats-server").symlink_to(oldest)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    deployment = Deployment(tmp_path, "--model", str(MODEL), "--mock-speedup", "0", PATH=path)
    try:
        log = (deployment.data_dir / "nats.log").read_text(errors="replace")
        assert f"Version:  {dotted(MINIMUM)}" in log
        assert await ask(deployment.urls[0], MODEL.name)
    finally:
        status = deployment.stop()
    assert status == 0
