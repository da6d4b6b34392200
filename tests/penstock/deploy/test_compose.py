"""compose.yaml: read by docker-compose itself, agreeing with images and monitoring, and its processes serve."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from penstock.configs.flags import parse
from penstock.configs.settings import GatewaySettings, RouterSettings, WorkerSettings
from penstock.deploy.monitoring import ALERTS, GRAFANA
from penstock.infra.nats_server.binary import find_server
from penstock.infra.nats_server.config import USERS, variable
from penstock.infra.nats_server.permissions import BROKER_ROLES
from penstock.infra.process.child import die_with_parent
from penstock.operate.keys import _parser as keys_parser
from tests.generated.chart import DASHBOARDS, FOLDER, compose_files, nats_conf
from tests.infra.deploy.images.test_images import instructions, stages
from tests.penstock.deploy.running import Here, answers, ask
from tests.pipeline.support import MODEL, free_port, until

TEXT = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
VARIABLE = re.compile(r"\$\{([A-Z_0-9]+)(?::([-?])([^}]*))?\}")
PASSWORDS = {variable(user): f"p{user}0" for user in (*USERS, "grafana")}
PASSWORDS |= {f"{role.upper()}_LOGIN": f"{role}:{PASSWORDS[variable(role)]}" for role in (*BROKER_ROLES, "sys")}
KINDS: dict[str, Any] = {"gateway": GatewaySettings, "router": RouterSettings, "worker": WorkerSettings}
Tree = dict[str, Any]


def services(environ: Mapping[str, str], override: str = "") -> dict[str, Tree]:
    """The services, with variables filled in and another file laid over them as compose does."""

    def value(match: re.Match[str]) -> str:
        if match[1] in environ:
            return environ[match[1]]
        assert match[2] == "-", f"{match[1]} must be set: {match[3]}"
        return match[3]

    made: dict[str, Tree] = yaml.safe_load(VARIABLE.sub(value, TEXT))["services"]
    for name, service in (yaml.safe_load(VARIABLE.sub(value, override))["services"] if override else {}).items():
        before = made.setdefault(name, {})
        for key, own in service.items():
            before[key] = before.get(key, {}) | own if isinstance(own, dict) else own
    return made


def with_cells(folder: Path, cells: int) -> str:
    """What the script writes for so many cells, which is put into this folder."""
    for name in ("compose.yaml", "nats.conf", "cells.sh"):
        shutil.copy(FOLDER / name, folder)
    subprocess.run(["sh", folder / "cells.sh", str(cells)], check=True, timeout=30, capture_output=True)
    return (folder / "compose.override.yaml").read_text()


def test_the_files_that_come_from_the_code_are_current() -> None:
    for path, text in compose_files().items():
        assert path.read_text() == text, "run python -m tests.generated"


@pytest.mark.parametrize("cells", [1, 3])
def test_docker_compose_reads_it_and_fills_in_the_same(tmp_path: Path, cells: int) -> None:
    compose = shutil.which("docker-compose")
    if compose is None:
        pytest.skip("docker-compose is not installed")
    override = with_cells(tmp_path, cells) if cells > 1 else ""
    files = ["--file", str(FOLDER / "compose.yaml")]
    files += ["--file", str(tmp_path / "compose.override.yaml")] if override else []
    command = [compose, *files, "--project-directory", str(FOLDER), "--profile", "gpu"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "COMPOSE_PROJECT_NAME": "penstock"}
    done = subprocess.run(
        [*command, "config"], capture_output=True, text=True, check=False, timeout=60, env=environ | PASSWORDS
    )
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    ours = services(PASSWORDS, override)
    assert set(read) == set(ours)
    for name, service in ours.items():
        assert read[name].get("command") == service.get("command")
        assert read[name].get("environment", {}) == service.get("environment", {})
        assert read[name].get("depends_on", {}) == service.get("depends_on", {})
    if not (FOLDER / ".env").exists():  # which would have them
        done = subprocess.run([*command, "config"], capture_output=True, text=True, check=False, env=environ)
        assert done.returncode != 0
        assert "run ./passwords.sh first" in done.stderr


def test_a_service_waits_for_what_it_needs_and_says_whether_it_is_healthy() -> None:
    ours = services(PASSWORDS)
    for name, service in ours.items():
        for other, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "test" in ours[other]["healthcheck"], (name, other)
            else:
                assert wanted == {"condition": "service_completed_successfully"}
                assert other == "streams"
        assert service.get("healthcheck"), name
    assert set(ours["streams"]["depends_on"]) == {"nats-1", "nats-2", "nats-3"}


def test_each_cell_has_servers_routers_and_workers_like_those_of_the_first(tmp_path: Path) -> None:
    override = with_cells(tmp_path, 3)
    first, ours = services(PASSWORDS), services(PASSWORDS, override)
    kinds = ("nats-1", "nats-2", "nats-3", "router", "worker", "worker-gpu")
    assert set(ours) == {*first, *(f"cell-{cell}-{kind}" for cell in (1, 2) for kind in kinds)}
    for cell in (1, 2):
        for kind in kinds:
            service = ours[f"cell-{cell}-{kind}"]
            wanted = json.loads(re.sub(r"nats-([123])", rf"cell-{cell}-nats-\1", json.dumps(first[kind])))
            if kind.startswith("nats"):
                wanted.pop("ports", None)  # that of this machine is the first cell's
                wanted["volumes"][0] = f"./nats.cell-{cell}.conf:/etc/nats/nats.conf:ro"
            else:
                wanted["environment"]["PENSTOCK_NAMESPACE"] = f"ps-{cell}"
                wanted["networks"] = {"default": {"aliases": [kind]}}  # by which Prometheus finds it
            if kind == "worker-gpu":
                (device,) = wanted["deploy"]["resources"]["reservations"]["devices"]
                del device["count"]
                device["device_ids"] = [str(cell)]
            assert service == wanted
        assert f"cell-{cell}-nats-3" in yaml.safe_load(override)["volumes"]
        told = (tmp_path / f"nats.cell-{cell}.conf").read_text()
        assert told == nats_conf(f"ps-{cell}")  # with the rights of that cell
    servers = {cell: [f"cell-{cell}-nats-{server}" for server in (1, 2, 3)] for cell in (1, 2)}
    assert set(ours["streams"]["depends_on"]) == {"nats-1", "nats-2", "nats-3", *servers[1], *servers[2]}
    for name, user in (("gateway", "gateway"), ("streams", "operator")):
        assert ours[name]["command"] == first[name]["command"]
        variables = ours[name]["environment"]
        assert variables.items() >= first[name]["environment"].items()
        assert variables["PENSTOCK_CELLS"] == "3"
        urls = [[urlsplit(url) for url in each.split(";")] for each in variables["PENSTOCK_CELL_NATS_URLS"].split(",")]
        assert [[url.hostname for url in each] for each in urls] == [servers[1], servers[2]]
        assert {url.username for each in urls for url in each} == {user}
    settings = parse(GatewaySettings, [], environ=ours["gateway"]["environment"], prog="p")
    assert (settings.cells, len(settings.cell_nats_urls), settings.active_cells) == (3, 2, 0)


def test_another_number_of_cells_replaces_the_file_and_a_user_s_own_stays(tmp_path: Path) -> None:
    with_cells(tmp_path, 3)
    assert "cell-2-router" not in with_cells(tmp_path, 2)
    assert [path.name for path in tmp_path.glob("nats.cell-*")] == ["nats.cell-1.conf"]
    script = ["sh", str(tmp_path / "cells.sh")]
    subprocess.run([*script, "1"], check=True, timeout=30, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} == {"compose.yaml", "nats.conf", "cells.sh"}
    own = tmp_path / "compose.override.yaml"
    own.write_text("services: {}\n")
    for number, status, says in (
        ("2", 1, "is not of this script"),
        ("0", 2, "from 1 to 16"),
        ("17", 2, "from 1 to 16"),
    ):
        done = subprocess.run([*script, number], check=False, timeout=30, capture_output=True, text=True)
        assert (done.returncode, says in done.stderr) == (status, True)
        assert own.read_text() == "services: {}\n"


def test_processes_read_their_arguments_and_are_confined_and_given_time_to_drain() -> None:
    for name, service in services(PASSWORDS).items():
        role = service["command"][0] if "command" in service else ""
        if role not in KINDS:
            continue
        settings = parse(KINDS[role], service["command"][1:], prog=role, environ=service["environment"])
        assert int(service["stop_grace_period"].removesuffix("s")) >= getattr(settings, "drain_s", 0) + 15
        assert service["healthcheck"]["test"][:4] == ["CMD", "penstock", "health", role]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        if "build" in service:
            build = service["build"]
            context = (FOLDER / build["context"]).resolve()
            assert (context / build["dockerfile"]).is_file()
            assert (context / "pyproject.toml").is_file()
            assert build["target"] in stages(), name


def test_a_gateway_still_knows_that_there_were_keys_when_its_container_is_made_again() -> None:
    tree = yaml.safe_load(TEXT)
    gateway = tree["services"]["gateway"]
    mounts = dict(volume.split(":")[::-1] for volume in gateway["volumes"])
    volume = mounts[gateway["environment"]["PENSTOCK_STATE_DIR"]]
    assert volume in tree["volumes"], "a named one: an anonymous one would go with the container"
    assert any("install -d -o 1000" in line and "/var/lib/penstock" in line for line in instructions("gateway"))


def test_the_command_for_the_first_key_is_one_of_the_image_and_its_user_may_make_keys() -> None:
    page = (FOLDER.resolve().parents[2] / "docs" / "containers.md").read_text()
    (line,) = re.findall("docker compose run --rm streams (keys create .*)", page)
    words = shlex.split(line.replace("$KEYS_LOGIN", "keys:secret"))
    args = keys_parser().parse_args(words[1:])
    url = urlsplit(args.nats_url)
    assert (url.username, url.password, url.port) == ("keys", "secret", 4222)
    assert url.hostname in services(PASSWORDS)["streams"]["depends_on"]


def test_prometheus_and_grafana_get_the_files_of_the_monitoring_folder() -> None:
    ours = services(PASSWORDS)
    mounted = {}
    for name in ("prometheus", "grafana"):
        for volume in ours[name]["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                mounted[target] = (FOLDER / source).resolve()
                assert mounted[target].exists()
    assert mounted["/etc/prometheus/alerts.yml"] == ALERTS.resolve()
    assert mounted[DASHBOARDS] == GRAFANA.resolve()
    (job,) = yaml.safe_load(mounted["/etc/prometheus/prometheus.yml"].read_text())["scrape_configs"]
    assert job["job_name"] == "penstock"  # which the alerts ask for
    targets = {name: each["port"] for each in job["dns_sd_configs"] for name in each["names"]}
    assert set(targets) <= set(ours)
    for name, port in targets.items():
        stage = ours[name].get("build", {"target": name})["target"]
        assert f"EXPOSE {port}" in stages()[stage][1]


def test_promtool_accepts_prometheus_s_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    shutil.copy(FOLDER / "prometheus.yml", tmp_path)
    shutil.copy(ALERTS, tmp_path)
    command = ["promtool", "check", "config", tmp_path / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def test_passwords_are_written_once_and_those_of_new_users_are_added(tmp_path: Path) -> None:
    script = tmp_path / "passwords.sh"
    shutil.copy(FOLDER / "passwords.sh", script)
    subprocess.run(["sh", script], check=True, timeout=30, capture_output=True)
    written = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    assert set(written) == {*PASSWORDS, "COMPOSE_PROJECT_NAME"}
    assert all(re.fullmatch("([a-z]+:)?p[0-9a-f]{32}", written[name]) for name in PASSWORDS)
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    # After an upgrade there are users that the file lacks; the others keep their passwords.
    lines = (tmp_path / ".env").read_text().splitlines(keepends=True)
    (tmp_path / ".env").write_text("".join(line for line in lines if not line.startswith("VIEWER_PASSWORD")))
    subprocess.run(["sh", script], check=True, timeout=30, capture_output=True)
    again = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    assert again["VIEWER_LOGIN"] == f"viewer:{again['VIEWER_PASSWORD']}"
    for name in ("VIEWER_PASSWORD", "VIEWER_LOGIN"):
        assert again.pop(name) != written.pop(name)
    assert again == written
    ignored = (FOLDER.resolve().parents[2] / ".dockerignore").read_text().splitlines()
    assert ignored[-1] == "**/.env"  # after what lets folders through


def test_passwords_are_rotated_while_those_before_are_valid(tmp_path: Path) -> None:
    script = tmp_path / "passwords.sh"
    shutil.copy(FOLDER / "passwords.sh", script)

    def after(*words: str) -> dict[str, str]:
        subprocess.run(["sh", script, *words], check=True, timeout=30, capture_output=True)
        return dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())

    def changed(before: dict[str, str], now: dict[str, str]) -> set[str]:
        assert before.keys() == now.keys()
        return {name for name in now if now[name] != before[name]}

    first = after()
    for login, used, other in (
        ("gateway-2", "GATEWAY_2_PASSWORD", "GATEWAY_PASSWORD"),
        ("gateway", "GATEWAY_PASSWORD", "GATEWAY_2_PASSWORD"),
    ):
        rotated = after("rotate", "gateway")
        assert changed(first, rotated) == {used, "GATEWAY_LOGIN"}
        assert rotated["GATEWAY_LOGIN"] == f"{login}:{rotated[used]}"
        urls = services(rotated)["gateway"]["environment"]["PENSTOCK_NATS_URL"].split(",")
        assert {urlsplit(url).username for url in urls} == {login}
        assert {urlsplit(url).password for url in urls} == {rotated[used]}
        first = after("retire", "gateway")
        assert changed(rotated, first) == {other}
    assert changed(first, after("rotate")) == {
        name
        for role in BROKER_ROLES
        if role != "client"
        for name in (f"{role.upper()}_LOGIN", f"{role.upper()}_2_PASSWORD")
    }
    for words in (("rotate", "sys"), ("retire", "root"), ("revoke",)):
        before = (tmp_path / ".env").read_text()
        done = subprocess.run(["sh", script, *words], check=False, timeout=30, capture_output=True, text=True)
        assert (done.returncode, words[-1] in done.stderr) == (2, True)
        assert (tmp_path / ".env").read_text() == before


@asynccontextmanager
async def broker(service: Tree, folder: Path, replaced: Mapping[str, str], files: Path) -> AsyncIterator[None]:
    """One of the NATS servers.

    Args:
        files: the folder of the configuration that it mounts.
    """
    folder.mkdir()  # noqa: ASYNC240
    text = (files / service["volumes"][0].partition(":")[0]).read_text()
    for inside, here in ({"/data": str(folder / "store")} | dict(replaced)).items():
        text = text.replace(inside, here)
    (folder / "nats.conf").write_text(text)
    environ = {"PATH": os.environ["PATH"]}
    for name, value in service["environment"].items():
        environ[name] = value
        for inside, here in replaced.items():
            environ[name] = environ[name].replace(inside, here)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(  # noqa: ASYNC220
            [find_server(), "-c", folder / "nats.conf"], env=environ, stdout=log, stderr=log,
            preexec_fn=die_with_parent(),
        )  # fmt: skip
    try:
        yield
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow  # test_runs has the command lines of the chart, pipeline/test_cluster has three servers
@pytest.mark.timeout(180)
@pytest.mark.parametrize("cells", [1, 2])
async def test_the_command_lines_serve_a_request_over_three_servers(tmp_path: Path, cells: int) -> None:
    files = tmp_path / "compose"
    files.mkdir()
    override = with_cells(files, cells) if cells > 1 else ""
    ours = services(PASSWORDS | {"ENGINE": "mock", "MODEL": str(MODEL)}, override)
    of_cells = ["", *(f"cell-{cell}-" for cell in range(1, cells))]
    # Longer names first: they contain those of the first cell.
    names = [f"{cell}nats-{server}" for cell in reversed(of_cells) for server in (1, 2, 3)]
    clients, routes, monitors = ({name: free_port() for name in names} for _ in range(3))
    addresses = {f"{name}:4222": f"127.0.0.1:{clients[name]}" for name in names}
    addresses |= {f"{name}:6222": f"127.0.0.1:{routes[name]}" for name in names}
    addresses["/var/lib/penstock"] = str(tmp_path / "state")
    services_of_cells = [f"{cell}{kind}" for kind in ("router", "worker") for cell in of_cells]
    ports = {name: free_port() for name in ("gateway", *services_of_cells)}
    async with AsyncExitStack() as stack:
        for name in names:
            own = {
                "port: 4222": f"port: {clients[name]}", "0.0.0.0:6222": f"127.0.0.1:{routes[name]}",
                "127.0.0.1:8222": f"127.0.0.1:{monitors[name]}", '"0.0.0.0"': '"127.0.0.1"',
            }  # fmt: skip
            await stack.enter_async_context(
                broker(ours[name], tmp_path / name, own | addresses, files if cells > 1 else FOLDER)
            )
        for name in names:
            path = ours[name]["healthcheck"]["test"][-1].partition(":8222")[2]
            await answers(f"http://127.0.0.1:{monitors[name]}{path}")
        here = Here(tmp_path, addresses)
        streams = here.start("streams", ours["streams"]["command"], ours["streams"]["environment"])
        assert streams.wait(90) == 0, streams.log.read_text()
        processes = {}
        for role, port in ports.items():
            image = {"PENSTOCK_HTTP_PORT": str(port), "PENSTOCK_METRICS_PORT": str(port)}
            processes[role] = here.start(role, ours[role]["command"], ours[role]["environment"] | image)
        try:
            for role, port in ports.items():
                await answers(f"http://127.0.0.1:{port}{'/health/ready' if role == 'gateway' else '/metrics'}")

            async def all_cells_are_used() -> bool:
                async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
                    ready = await client.get(f"http://127.0.0.1:{ports['gateway']}/health/ready")
                    return not ready.json().get("cells")

            await until(all_cells_are_used, "the gateway uses every cell")
            checks = [
                here.start(f"health-{role}", ours[role]["healthcheck"]["test"][2:], {
                    "PENSTOCK_HTTP_PORT": str(port), "PENSTOCK_METRICS_PORT": str(port),
                })
                for role, port in ports.items()
            ]  # fmt: skip
            for check in checks:
                assert check.wait() == 0, check.log.read_text()
            assert await ask(f"http://127.0.0.1:{ports['gateway']}", MODEL.name)
        finally:
            for process in processes.values():
                process.ask_to_stop()
            statuses = {role: process.stop() for role, process in processes.items()}
        assert statuses == dict.fromkeys(processes, 0)


def test_a_gateway_behind_a_proxy_is_told_which_addresses_are_the_proxys() -> None:
    variables = yaml.safe_load(TEXT)["services"]["gateway"]["environment"]
    assert variables["PENSTOCK_TRUSTED_PROXIES"] == "${TRUSTED_PROXIES:-}"
    assert parse(GatewaySettings, [], environ={"PENSTOCK_TRUSTED_PROXIES": ""}, prog="p").trusted_proxies == ()
    told = parse(GatewaySettings, [], environ={"PENSTOCK_TRUSTED_PROXIES": "172.16.0.0/12"}, prog="p")
    assert told.trusted_proxies == ("172.16.0.0/12",)
