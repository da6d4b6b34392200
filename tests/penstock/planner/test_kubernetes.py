"""Replicas through a small API server that keeps what is patched, and refuses what the real one refuses."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.planner.connectors import BadCluster, ConnectorFailed, KubernetesApi, Replicas, scale_path

DEPLOYMENT = "/apis/apps/v1/namespaces/serving/deployments/penstock-prefill/scale"
GROUP = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/serving/leaderworkersets/penstock-decode/scale"
WORKLOADS = {"prefill": "deployment/penstock-prefill", "decode": "leaderworkerset/penstock-decode"}


class ApiServer:
    """Scale subresources. A wrong token is 401, an unknown workload 404, another content type 415."""

    def __init__(self, **replicas: int) -> None:
        self.replicas = {DEPLOYMENT: replicas["prefill"], GROUP: replicas["decode"]}
        self.seen: list[tuple[str, str]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.seen.append((method, path))
        status, answer = self.answer(method, path, headers, body)
        data = json.dumps(answer).encode()
        reply = f"HTTP/1.1 {status} -\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
        writer.write(reply + data)
        await writer.drain()
        writer.close()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, object]]:
        if headers.get("authorization") != "bearer secret":
            return 401, {"kind": "Status", "message": "Unauthorized"}
        if path not in self.replicas:
            return 404, {"kind": "Status", "message": "not found"}
        if method == "PATCH":
            if headers.get("content-type") != "application/merge-patch+json":
                return 415, {"kind": "Status", "message": "unsupported media type"}
            self.replicas[path] = json.loads(body)["spec"]["replicas"]
        return 200, {"kind": "Scale", "spec": {"replicas": self.replicas[path]}}


@asynccontextmanager
async def api_server(**replicas: int) -> AsyncIterator[ApiServer]:
    server = ApiServer(**replicas)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield server


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret\n")
    return tmp_path / "token"


async def test_only_what_differs_is_patched(token: Path) -> None:
    async with api_server(prefill=2, decode=3) as server:
        replicas = Replicas(KubernetesApi(server.url, token), "serving", WORKLOADS)  # type: ignore[arg-type]
        assert await replicas.counts() == {"prefill": 2, "decode": 3}
        await replicas.apply({"prefill": 2, "decode": 5})
        assert server.replicas == {DEPLOYMENT: 2, GROUP: 5}
        assert [path for method, path in server.seen if method == "PATCH"] == [GROUP]


async def test_the_token_is_read_again_for_each_request(token: Path) -> None:
    async with api_server(prefill=1, decode=1) as server:
        replicas = Replicas(KubernetesApi(server.url, token), "serving", WORKLOADS)  # type: ignore[arg-type]
        token.write_text("old")  # noqa: ASYNC240
        with pytest.raises(ConnectorFailed, match="status 401 Unauthorized"):
            await replicas.counts()
        token.write_text("secret")  # noqa: ASYNC240
        assert await replicas.counts() == {"prefill": 1, "decode": 1}


async def test_what_the_api_server_refuses_is_said(token: Path) -> None:
    async with api_server(prefill=1, decode=1) as server:
        unknown = Replicas(KubernetesApi(server.url, token), "serving", {"prefill": "deployment/other"})
        with pytest.raises(ConnectorFailed, match=r"GET .*/other/scale: status 404 not found"):
            await unknown.apply({"prefill": 2})
        url = server.url
    gone = Replicas(KubernetesApi(url, token), "serving", {"prefill": "deployment/penstock-prefill"})
    with pytest.raises(ConnectorFailed, match="does not answer"):
        await gone.counts()


def test_the_cluster_is_found_from_within_a_pod(token: Path) -> None:
    import certifi

    (token.parent / "ca.crt").write_text(Path(certifi.where()).read_text())
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert KubernetesApi.find("", token.parent, inside).url == "https://10.0.0.1:6443"
    assert KubernetesApi.find("http://127.0.0.1:8001/").url == "http://127.0.0.1:8001"
    with pytest.raises(BadCluster, match="--kubernetes-url"):
        KubernetesApi.find("", token.parent, {})


@pytest.mark.parametrize("workload", ["penstock-decode", "pod/x", "deployment/", "deployment/a/b"])
def test_a_workload_is_a_kind_and_a_name(workload: str) -> None:
    with pytest.raises(BadCluster, match="is not a workload"):
        scale_path("default", workload)
