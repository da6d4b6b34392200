"""The processes run with exactly the arguments and variables of the chart, on its broker, and answer a request."""

import base64
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from penstock.deploy.kubernetes import CHART
from penstock.infra.nats_server.binary import find_server
from penstock.infra.process.child import die_with_parent
from tests.penstock.deploy.running import Here, answers, ask
from tests.penstock.deploy.support import (
    Tree,
    command_of,
    container,
    environment,
    forget,
    found,
    manifests,
    needs_helm,
    pods,
)
from tests.penstock.deploy.test_broker import nats_conf
from tests.penstock.log_tools.traces.collector import Collector
from tests.pipeline.support import MODEL, free_port, until

pytestmark = [needs_helm, pytest.mark.timeout(180)]
VALUES = f"""
model: {MODEL}
streams: {{replicas: 1}}
models: {{enabled: false}}
gateway: {{requireKeys: false, settings: {{max-queue: 64}}}}
workerDefaults: {{engine: mock, settings: {{mock-speedup: 0}}}}
workers: {{prefill: {{}}, decode: {{}}}}
trace: {{enabled: true, endpoint: "http://collector:4318/v1/traces"}}
"""


@asynccontextmanager
async def broker(trees: list[Tree], folder: Path, port: int) -> AsyncIterator[None]:
    """A nats-server with the limits, users and passwords that the chart gives to those of its release."""
    (folder / "broker.conf").write_text(found(trees, "ConfigMap", "demo-broker")["data"]["broker.conf"])
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["nats"]
    conf = folder / "nats.conf"
    conf.write_text(nats_conf(values, port, folder / "store", folder / "broker.conf"))
    passwords = {f"{user.upper().replace('-', '_')}_PASSWORD": password for user, password in secret(trees).items()}
    with (folder / "nats.log").open("wb") as log:
        server = subprocess.Popen(  # noqa: ASYNC220
            [find_server(), "-c", conf], env={"PATH": os.environ["PATH"], **passwords}, stdout=log, stderr=log,
            preexec_fn=die_with_parent(),
        )  # fmt: skip
    try:
        yield
    finally:
        server.terminate()
        server.wait(30)


def secret(trees: list[Tree]) -> dict[str, str]:
    data = found(trees, "Secret", "demo-broker")["data"]
    return {user: base64.b64decode(password).decode() for user, password in data.items()}


def variables(template: Tree, passwords: dict[str, str], name: str) -> dict[str, str]:
    """A container's environment, as the kubelet makes it."""
    made = {}
    for variable, each in environment(template).items():
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == "demo-broker"
            made[variable] = passwords[source["secretKeyRef"]["key"]]
        else:
            made[variable] = name if source else each["value"]
    return made


@pytest.mark.parametrize("cells", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_the_chart_s_command_lines_serve_a_request(tmp_path: Path, cells: int) -> None:
    trees, port = manifests(VALUES + f"cells: {{count: {cells}}}\n"), free_port()
    forget()
    passwords = secret(trees)
    processes = {}
    collector = Collector()
    collector.start()
    async with broker(trees, tmp_path, port):
        streams, *running = sorted(pods(trees), key=lambda pod: container(pod)["name"] != "streams")
        ports = {}
        for template in (streams, *running):
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            ports[component] = free_port()
            here = Here(tmp_path, {
                "demo-nats.serving:4222": f"127.0.0.1:{port}", "=::": "=127.0.0.1",
                "-port=8000": f"-port={ports[component]}", "-port=9090": f"-port={ports[component]}",
                "http://collector:4318/v1/traces": collector.url,
                "/home/penstock": str(tmp_path), "/models/hub": str(tmp_path / "hub"),
            })  # fmt: skip
            process = here.start(component, command_of(template), variables(template, passwords, component))
            if component == "streams":
                assert process.wait(60) == 0, process.log.read_text()
                continue
            processes[component] = (process, template)
        of_cells = {f"{name}{end}" for name in ("router", "prefill", "decode") for end in ("", "-1")[:cells]}
        assert set(processes) == {"gateway", "trace"} | of_cells

        async def traced() -> bool:
            return any(span.service == "penstock-gateway" for span in collector.spans)

        try:
            for component, (_process, template) in processes.items():
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    if component == "trace":
                        continue
                    path = container(template)[probe]["httpGet"]["path"]
                    await answers(f"http://127.0.0.1:{ports[component]}{path}")
            at = f"http://127.0.0.1:{ports['gateway']}"

            async def all_are_used() -> bool:
                async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
                    return not (await client.get(f"{at}/health/ready")).json().get("cells")

            await until(all_are_used, "the gateway uses every cell")
            assert await ask(at, MODEL.name)
            await until(traced, "the collector has the request's trace")
        finally:
            for process, _template in processes.values():
                process.ask_to_stop()
            statuses = {component: process.stop() for component, (process, _template) in processes.items()}
            collector.stop()
        assert statuses == dict.fromkeys(processes, 0)
