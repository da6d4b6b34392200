"""Replicas of the Helm chart's workers, by the scale subresource of the Kubernetes API.

A pod that Kubernetes ends gets SIGTERM: its worker drains within the chart's ``drainSeconds``. Which pod that is,
Kubernetes decides. A horizontal autoscaler of the same workers would undo the changes: leave ``autoscaling`` off.
"""

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import httpcore2

from penstock.measure.planner.connectors import ConnectorFailed
from penstock.schemas.plans import Role

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GROUPS = {"deployment": "apps/v1", "statefulset": "apps/v1", "leaderworkerset": "leaderworkerset.x-k8s.io/v1"}
TIMEOUT_S = 10.0


class BadCluster(ValueError):
    """No API server is known, or a workload is named wrongly."""


class Api:
    """
    Args:
        url: of the API server, such as that of `kubectl proxy`.
        token_file: read for each request, since Kubernetes renews it; None: no token.
    """

    def __init__(self, url: str, token_file: Path | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        self._token_file = token_file
        self._tls = tls

    @classmethod
    def find(cls, url: str, account: Path = ACCOUNT, environ: Mapping[str, str] = os.environ) -> "Api":
        """The API server at ``url``; "": the one of the cluster that this process runs in, as its service account.

        Raises:
            BadCluster: this process runs in no cluster.
        """
        if url:
            return cls(url)
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (account / "token").is_file():
            raise BadCluster(
                "this process runs in no Kubernetes cluster: name the API server with --kubernetes-url, such as "
                "http://127.0.0.1:8001 of `kubectl proxy`"
            )
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account / "token", tls)

    async def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """
        Raises:
            ConnectorFailed: no answer, or one that is no success.
        """
        headers = [("Accept", "application/json"), ("Content-Type", "application/merge-patch+json")]
        if self._token_file is not None:
            headers.append(("Authorization", f"Bearer {self._token_file.read_text().strip()}"))
        limits = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)
        try:
            async with httpcore2.AsyncConnectionPool(ssl_context=self._tls) as pool:
                response = await pool.request(
                    method,
                    f"{self.url}{path}",
                    headers=headers,
                    content=None if body is None else json.dumps(body).encode(),
                    extensions={"timeout": limits},
                )
            answer = json.loads(response.content or b"{}")
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            raise ConnectorFailed(f"{self.url}{path} does not answer: {str(error) or type(error).__name__}") from error
        except ValueError:
            answer = {}
        if response.status >= 300 or not isinstance(answer, dict):
            said = answer.get("message", "") if isinstance(answer, dict) else ""
            raise ConnectorFailed(f"{method} {path}: status {response.status} {said}".rstrip())
        return answer


class Replicas:
    """
    Args:
        workloads: kind/name of each role, such as ``deployment/penstock-decode``.
    """

    name: ClassVar[str] = "kubernetes"

    def __init__(self, api: Api, namespace: str, workloads: Mapping[Role, str]) -> None:
        self._api = api
        self._paths = {role: scale_path(namespace, workload) for role, workload in workloads.items()}

    async def counts(self) -> dict[Role, int]:
        return {role: await self._replicas(path) for role, path in self._paths.items()}

    async def apply(self, targets: Mapping[Role, int]) -> None:
        for role, target in targets.items():
            path = self._paths[role]
            if await self._replicas(path) != target:
                await self._api.call("PATCH", path, {"spec": {"replicas": target}})

    async def _replicas(self, path: str) -> int:
        scale = await self._api.call("GET", path)
        return int((scale.get("spec") or {}).get("replicas") or 0)


def scale_path(namespace: str, workload: str) -> str:
    """The scale subresource of ``kind/name``.

    Raises:
        BadCluster: an unknown kind, or no name.
    """
    kind, _, name = workload.partition("/")
    if kind not in GROUPS or not name or "/" in name:
        raise BadCluster(f"{workload!r} is no workload: write {', '.join(f'{each}/NAME' for each in GROUPS)}")
    return f"/apis/{GROUPS[kind]}/namespaces/{namespace}/{kind}s/{name}/scale"
