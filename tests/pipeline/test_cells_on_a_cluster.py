"""Cells on one NATS cluster: each has its streams on a server of its own, and processes log in as their roles."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from penstock.infra.nats_server.config import USERS
from penstock.infra.nats_server.datadir import load_secrets
from penstock.launch.nats import as_operator
from tests.penstock.deploy.running import answers, ask
from tests.pipeline.support import MODEL, Process, free_port, until
from tests.pipeline.test_own_cluster import printed, server

CELLS = 3


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_each_cell_has_its_streams_on_the_server_with_its_tag_and_outlives_that_of_another(
    tmp_path: Path,
) -> None:
    """Half a minute: three servers, three routers, three workers and a gateway start."""
    clients, monitors, routes = ([free_port() for _ in range(CELLS)] for _ in range(3))
    nodes = [f"127.0.0.1:{port}" for port in routes]
    async with AsyncExitStack() as stack:
        servers = []
        for index, node in enumerate(nodes):
            config = tmp_path / f"node-{index}.conf"
            config.write_text(
                printed(
                    tmp_path, "--cluster", ",".join(nodes), "--node", node, "--nats-port", str(clients[index]),
                    "--store-dir", str(tmp_path / f"store-{index}"), "--cells", str(CELLS),
                    "--monitor-port", str(monitors[index]),
                )
            )  # fmt: skip
            servers.append(await stack.enter_async_context(server(config)))
        for port in monitors:
            await answers(f"http://127.0.0.1:{port}/healthz")
        passwords = load_secrets(tmp_path / "operator" / "secrets.json", USERS)

        def url(role: str) -> str:
            return ",".join(f"nats://{role}:{passwords[role]}@127.0.0.1:{port}" for port in clients)

        cells = ("--cells", str(CELLS))
        tags = ("--placement-tags", ",".join(nodes))
        apply = Process(tmp_path / "apply.log", "streams", "apply", *cells, *tags, nats_url=url("operator"))
        assert apply.wait(90) == 0, apply.log.read_text()
        async with as_operator(url("operator"), "test") as nc:
            for cell, node in enumerate(nodes):
                for stream in ("REQUESTS", "MEMORY_TOKENS"):
                    info = await nc.jetstream().stream_info(f"ps-{cell}_{stream}" if cell else f"ps_{stream}")
                    assert info.cluster is not None
                    assert info.cluster.leader == node

        http = free_port()
        processes = [
            Process(
                tmp_path / "gateway.log", "gateway", "--insecure", "--http-port", str(http),
                "--model", str(MODEL), *cells,
                nats_url=url("gateway"),
            )
        ]  # fmt: skip
        for cell in range(CELLS):
            namespace = ("--namespace", f"ps-{cell}" if cell else "ps")
            processes.append(Process(tmp_path / f"router-{cell}.log", "router", *namespace, nats_url=url("router")))
            processes.append(
                Process(
                    tmp_path / f"worker-{cell}.log", "worker", "--engine", "mock", "--model", str(MODEL),
                    "--mock-speedup", "0", *namespace, nats_url=url("worker"),
                )
            )  # fmt: skip
        for process in processes:
            stack.callback(process.stop)
        at = f"http://127.0.0.1:{http}"

        async def unused() -> set[str] | None:
            """The cells that take no request; None: the gateway is not ready."""
            async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
                try:
                    answer = await client.get(f"{at}/health/ready")
                except httpx.TransportError:
                    return None
                return set(answer.json().get("cells", {})) if answer.status_code == 200 else None

        async def all_are_used() -> bool:
            return await unused() == set()

        async def the_last_is_not() -> bool:
            return await unused() == {"2"}

        await until(all_are_used, "the gateway uses every cell", 60)
        await asyncio.gather(*(ask(at, MODEL.name) for _ in range(30)))
        servers[2].kill()
        servers[2].wait(30)
        await until(the_last_is_not, "the gateway leaves out the cell whose streams are away", 60)
        for _ in range(5):
            await ask(at, MODEL.name)
