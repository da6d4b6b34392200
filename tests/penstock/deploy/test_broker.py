"""The NATS chart's values: a real server runs them, and lets each user in."""

import asyncio
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import yaml

from penstock.deploy.kubernetes import CHART
from penstock.infra.nats_server.binary import find_server
from penstock.infra.nats_server.config import STORE_BYTES, USERS, variable
from penstock.infra.nats_server.server import GARBAGE, GARBAGE_VARIABLE
from penstock.infra.process.child import die_with_parent
from tests.generated.chart import NAMESPACE
from tests.penstock.deploy.support import container, found, manifests, needs_helm, pods
from tests.pipeline.support import free_port, until


def answers(port: int) -> bool:
    try:
        return said_to(port, "nobody", "") != ""
    except OSError:
        return False


def said_to(port: int, user: str, password: str) -> str:
    """What the server says to a client of this name, in NATS's own protocol."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as link,
        link.makefile("rw", newline="\r\n") as lines,
    ):
        assert lines.readline().startswith("INFO ")
        credentials = json.dumps({"user": user, "pass": password, "verbose": False})
        lines.write(f"CONNECT {credentials}\r\nPING\r\n")
        lines.flush()
        return lines.readline().strip()


def nats_conf(values: dict[str, Any], port: int, store: Path, include: Path) -> str:
    """What the NATS chart makes of its values, for one server: see ``config`` in its values.yaml."""
    config = values["config"]
    (directive,) = config["merge"].items()
    assert directive == ("$include", "../penstock/broker.conf")  # beside /etc/nats-config
    size = int(config["jetstream"]["fileStore"]["pvc"]["size"].removesuffix("Gi")) << 30
    made = {"store_dir": str(store), "max_memory_store": 0, "max_file_store": size}
    jetstream = made | config["jetstream"]["merge"]
    rest = json.dumps({"server_name": "demo-nats-0", "port": port, "jetstream": jetstream})
    return f"{{\n  include {os.path.relpath(include, store.parent)};\n{rest[1:]}"


async def test_a_real_server_runs_the_values_and_lets_each_user_in(tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["nats"]
    environ = {name: value for name, value in values["container"]["env"].items() if isinstance(value, dict)}
    assert {name: each["valueFrom"]["secretKeyRef"]["key"] for name, each in environ.items()} == {
        variable(user): user for user in USERS
    }
    passwords = {name: f"p{index}b4{name.lower()}" for index, name in enumerate(environ)}
    (mount,) = (patch["value"] for patch in values["container"]["patch"])
    (volume,) = (patch["value"] for patch in values["podTemplate"]["patch"])
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/etc/penstock")
    include = tmp_path / "broker.conf"
    text = (CHART / "files" / "broker.conf").read_text(encoding="utf-8")
    include.write_text(text.replace(NAMESPACE, "ps"), encoding="utf-8")
    port, conf = free_port(), tmp_path / "nats.conf"
    conf.write_text(nats_conf(values, port, tmp_path / "store", include), encoding="utf-8")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(  # noqa: ASYNC220
            [find_server(), "-c", conf], env={"PATH": os.environ["PATH"], **passwords}, stdout=log, stderr=log,
            preexec_fn=die_with_parent(),
        )  # fmt: skip
    try:
        await until(lambda: asyncio.to_thread(answers, port), "the server answers")
        for user in USERS:
            assert said_to(port, user, passwords[variable(user)]) == "PONG"
            assert said_to(port, user, "wrong").startswith("-ERR 'Authorization")
    finally:
        server.terminate()
        server.wait(30)


def test_as_much_garbage_may_lie_in_a_container_as_in_a_server_of_penstock_up() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["nats"]["container"]["env"]
    services = yaml.safe_load((CHART.parent.parent / "compose" / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    assert values[GARBAGE_VARIABLE] == GARBAGE
    servers = [each for name, each in services.items() if name.startswith("nats")]
    assert servers
    assert {each["environment"][GARBAGE_VARIABLE] for each in servers} == {GARBAGE}


@needs_helm
def test_the_limits_and_rights_of_the_release_s_namespace_reach_the_servers() -> None:
    trees = manifests({"namespace": "blue"})
    text = found(trees, "ConfigMap", "demo-broker")["data"]["broker.conf"]
    assert NAMESPACE not in text
    assert '"blue.request.>"' in text
    made = found(trees, "ConfigMap", "demo-nats-values")["data"]
    assert f'"max_file_store":{STORE_BYTES}' in made["jetstream"]  # and not 1.1e+15, which the server does not read
    given = json.loads(made["values"])
    assert given["config"]["merge"] == {"$include": "../penstock/broker.conf"}
    secret = found(trees, "Secret", "demo-broker")
    assert set(secret["data"]) == set(USERS)
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (job,) = (pod for pod in pods(trees) if container(pod)["name"] == "streams")
    servers = given["config"]["cluster"]["replicas"]
    assert container(job)["args"] == ["streams", "apply", "--namespace=blue", f"--replicas={servers}"]
