"""The pods of a deployment, as trees: which process, with which settings, volumes, probes and resources. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from configs.flags import BadFlags, flags_of, read, to_argv
from configs.settings import Common, GatewaySettings, RouterSettings, WorkerSettings
from infra.deploy.kubernetes.description import Description, Front, Pool, quantity
from infra.deploy.kubernetes.multinode import KEYS, SSH_PORT
from infra.engine_args.tree import BadArguments

Tree = dict[str, Any]

HTTP_PORT, METRICS_PORT, NATS_PORT = 8000, 9090, 4222
MODELS = "/models"
ENGINE, SCRIPTS = "/etc/penstock/engine", "/etc/penstock/scripts"
GRACE_S = 15.0  # beyond drain_s, to close connections and unregister
GPU = "nvidia.com/gpu"
USER = 1000  # of infra/Containerfile
_PROBE_S = 10
# what probes, services, mounts and the other processes rely on
_SETTLED = {
    *("name", "nats_url", "sys_nats_url", "http_host", "http_port", "metrics_host", "metrics_port", "drain_s"),
    *("role", "engine", "model", "served_model_name", "block_size", "extra_engine_args"),
}


def labels(description: Description, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "penstock",
        "app.kubernetes.io/instance": description.name,
        "app.kubernetes.io/component": component,
    }


def grace(drain_s: float) -> int:
    """Seconds between SIGTERM and SIGKILL: never less than the process itself takes to drain."""
    return math.ceil(drain_s + GRACE_S)


def gateway(description: Description, model: str, block_size: int) -> Tree:
    settings = GatewaySettings(
        model=model,
        served_model_name=description.served_model_name,
        http_host="0.0.0.0",
        http_port=HTTP_PORT,
        block_size=block_size,
        drain_s=description.drain_s,
        log_format="json",
    )
    container = _process(
        "gateway", description.image, settings, description, description.gateway, port=("http", HTTP_PORT)
    ) | {
        "livenessProbe": http("/health/live", HTTP_PORT),
        "readinessProbe": http("/health/ready", HTTP_PORT, period=5, failures=2),
        "volumeMounts": [mount("models", MODELS)],
    }
    return pod(description, "gateway", container, [_models(description)], drain_s=description.drain_s)


def router(description: Description) -> Tree:
    settings = RouterSettings(metrics_port=METRICS_PORT, metrics_host="0.0.0.0", log_format="json")
    container = _process(
        "router", description.image, settings, description, description.router, port=("metrics", METRICS_PORT)
    )
    if not description.nats.url_secret:
        container["env"] = [*_nats(description, "sys", "PENSTOCK_SYS_NATS_URL"), *container["env"]]
    else:
        container["env"].append(secret("PENSTOCK_SYS_NATS_URL", description.nats.url_secret, "sys", optional=True))
    container |= {"livenessProbe": http("/metrics", METRICS_PORT), "readinessProbe": http("/metrics", METRICS_PORT)}
    return pod(description, "router", container, [], drain_s=GRACE_S)


def streams(description: Description) -> Tree:
    """The pod that makes the streams, once; it does nothing if they exist."""
    container = {
        "name": "streams",
        "image": description.image,
        "args": ["streams", "apply"],
        "env": _nats(description, "operator", "PENSTOCK_NATS_URL"),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": _confined(),
    }
    return pod(description, "streams", container, [], drain_s=GRACE_S) | {"restartPolicy": "OnFailure"}


def worker(description: Description, pool: Pool) -> Tree:
    """A worker's pod: alone, or the leader of its group."""
    settings = WorkerSettings(
        role=pool.role,
        engine=pool.engine,  # type: ignore[arg-type]
        model=pool.model,
        served_model_name="" if pool.role == "diffusion" else description.served_model_name,
        block_size=pool.block_size,
        max_model_len=pool.max_len,
        extra_engine_args=f"{ENGINE}/{pool.role}.yaml" if pool.args else "",
        drain_s=pool.spec.drain_s,
        metrics_port=METRICS_PORT,
        metrics_host="0.0.0.0",
        log_format="json",
    )
    container = _process("worker", pool.image, settings, description, None, port=("metrics", METRICS_PORT))
    container["args"] += _extra(f"workers.{pool.role}", settings, pool.spec.flags)
    if pool.nodes > 1:
        container["command"] = [
            *("bash", f"{SCRIPTS}/lead.sh", str(pool.gpus)),
            *("penstock", *container.pop("args")),
        ]
    container |= {
        # It is there once the model is loaded; until then only the time is limited.
        "startupProbe": http("/metrics", METRICS_PORT, failures=math.ceil(pool.spec.load_s / _PROBE_S)),
        "livenessProbe": http("/metrics", METRICS_PORT, failures=6),
        "readinessProbe": http("/metrics", METRICS_PORT),
    }
    return _engine_pod(description, pool, container)


def follower(description: Description, pool: Pool) -> Tree:
    """A pod that only computes for its group's leader."""
    container: Tree = {
        "name": "ranks",
        "image": pool.image,
        "command": ["bash", f"{SCRIPTS}/follow.sh"],
        "env": [{"name": "HF_HOME", "value": f"{MODELS}/hub"}, *_hub(description)],
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": _PROBE_S},
    }
    return _engine_pod(description, pool, container)


def _engine_pod(description: Description, pool: Pool, container: Tree) -> Tree:
    """Volumes and resources that every pod of an engine needs."""
    mounts = [mount("models", MODELS), mount("shm", "/dev/shm")]
    # TensorRT-LLM and NCCL exchange through shared memory, of which a container has 64 MiB otherwise.
    volumes = [_models(description), {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pool.spec.shm}}]
    if pool.args:
        mounts.append(mount("engine", ENGINE, read_only=True))
        volumes.append({"name": "engine", "configMap": {"name": f"{description.name}-engine"}})
    if pool.nodes > 1:
        mounts += [mount("scripts", SCRIPTS, read_only=True), mount("ssh", KEYS, read_only=True)]
        volumes.append({"name": "scripts", "configMap": {"name": f"{description.name}-scripts"}})
        volumes.append({"name": "ssh", "secret": {"secretName": f"{description.name}-ssh", "defaultMode": 0o400}})
    extended = quantity({**({GPU: pool.gpus} if pool.gpus else {}), **pool.spec.resources})
    requests = {"cpu": pool.spec.cpu, "memory": pool.spec.memory}
    resources: Tree = {"requests": requests | extended, "limits": {"memory": pool.spec.memory} | extended}
    spec: Tree = {}
    if pool.spec.nvlink_domain:
        resources["claims"] = [{"name": "nvlink"}]
        claim = f"{description.name}-{pool.role}-nvlink"
        spec["resourceClaims"] = [{"name": "nvlink", "resourceClaimTemplateName": claim}]
    if pool.spec.node_selector:
        spec["nodeSelector"] = dict(pool.spec.node_selector)
    if pool.gpus:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    # Pinned memory for RDMA; the ulimit itself is the container runtime's.
    allowed = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if pool.gpus else {}
    container |= {"volumeMounts": mounts, "resources": resources} | allowed
    return pod(description, pool.role, container, volumes, drain_s=pool.spec.drain_s) | spec


def _process(
    role: str, image: str, settings: Common, description: Description, front: Front | None, *, port: tuple[str, int]
) -> Tree:
    """A container that runs one of our processes."""
    container: Tree = {
        "name": role,
        "image": image,
        "args": [role, *to_argv(settings, hidden=("nats_url", "sys_nats_url"))],
        "env": [
            {"name": "PENSTOCK_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *_nats(description, role, "PENSTOCK_NATS_URL"),
            {"name": "HF_HOME", "value": f"{MODELS}/hub"},
            *_hub(description),
        ],
        "ports": [{"name": port[0], "containerPort": port[1]}],
    }
    if front is not None:
        container["args"] += _extra(role, settings, front.flags)
        container["resources"] = {
            "requests": {"cpu": front.cpu, "memory": front.memory}, "limits": {"memory": front.memory},
        }  # fmt: skip
        container["securityContext"] = _confined()
    return container


def _extra(where: str, settings: Common, flags: Sequence[str]) -> Sequence[str]:
    """Further flags of a process.

    Raises:
        BadArguments: it would not start with them, or no longer be what the other objects say.
    """
    argv = to_argv(settings)
    try:
        plain, made = read(type(settings), argv), read(type(settings), [*argv, *flags])
    except BadFlags as error:
        raise BadArguments([f"{where}.flags: {' '.join(str(error).split())}"]) from error
    for flag in flags_of(type(settings)):
        if flag.field in _SETTLED and getattr(plain, flag.field) != getattr(made, flag.field):
            raise BadArguments([f"{where}.flags: {flag.name} follows from the rest of the description; leave it out"])
    return flags


def pod(description: Description, component: str, container: Tree, volumes: list[Tree], *, drain_s: float) -> Tree:
    spec: Tree = {
        # A service called penstock-nats would give every pod a variable PENSTOCK_NATS_PORT, which is a flag of ours.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace(drain_s),
        "containers": [container],
    }
    if volumes:
        spec["volumes"] = volumes
        # The image's user writes what it fetches from the hub to the shared volume.
        spec["securityContext"] = {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}
    return spec


def _nats(description: Description, role: str, variable: str) -> list[Tree]:
    """The variable with a role's URL. The password comes from a Secret and is in no manifest."""
    if description.nats.url_secret:
        return [secret(variable, description.nats.url_secret, role)]
    password = f"{role.upper()}_PASSWORD"
    url = f"nats://{role}:$({password})@{description.name}-nats.{description.namespace}:{NATS_PORT}"
    return [secret(password, f"{description.name}-nats", role), {"name": variable, "value": url}]


def _hub(description: Description) -> list[Tree]:
    return [secret("HF_TOKEN", description.hub_secret, "token")] if description.hub_secret else []


def secret(variable: str, name: str, key: str, *, optional: bool = False) -> Tree:
    reference: Tree = {"name": name, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _models(description: Description) -> Tree:
    claim = description.weights.claim or f"{description.name}-models"
    return {"name": "models", "persistentVolumeClaim": {"claimName": claim}}


def mount(name: str, path: str, *, read_only: bool = False) -> Tree:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def http(path: str, port: int, *, period: int = _PROBE_S, failures: int = 3) -> Tree:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _confined() -> Tree:
    return {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
