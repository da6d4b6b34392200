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


def labels(given: Description, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "penstock",
        "app.kubernetes.io/instance": given.name,
        "app.kubernetes.io/component": component,
    }


def grace(drain_s: float) -> int:
    """Seconds between SIGTERM and SIGKILL: never less than the process itself takes to drain."""
    return math.ceil(drain_s + GRACE_S)


def gateway(given: Description, model: str, block_size: int) -> Tree:
    settings = GatewaySettings(
        model=model,
        served_model_name=given.served_model_name,
        http_host="0.0.0.0",
        http_port=HTTP_PORT,
        block_size=block_size,
        drain_s=given.drain_s,
        log_format="json",
    )
    container = _process("gateway", given.image, settings, given, given.gateway, port=("http", HTTP_PORT)) | {
        "livenessProbe": http("/health/live", HTTP_PORT),
        "readinessProbe": http("/health/ready", HTTP_PORT, period=5, failures=2),
        "volumeMounts": [mount("models", MODELS)],
    }
    return pod(given, "gateway", container, [_models(given)], drain_s=given.drain_s)


def router(given: Description) -> Tree:
    settings = RouterSettings(metrics_port=METRICS_PORT, metrics_host="0.0.0.0", log_format="json")
    container = _process("router", given.image, settings, given, given.router, port=("metrics", METRICS_PORT))
    if not given.nats.url_secret:
        container["env"] = [*_nats(given, "sys", "PENSTOCK_SYS_NATS_URL"), *container["env"]]
    else:
        container["env"].append(secret("PENSTOCK_SYS_NATS_URL", given.nats.url_secret, "sys", optional=True))
    container |= {"livenessProbe": http("/metrics", METRICS_PORT), "readinessProbe": http("/metrics", METRICS_PORT)}
    return pod(given, "router", container, [], drain_s=GRACE_S)


def streams(given: Description) -> Tree:
    """The pod that makes the streams, once; it does nothing where they are."""
    container = {
        "name": "streams",
        "image": given.image,
        "args": ["streams", "apply"],
        "env": _nats(given, "operator", "PENSTOCK_NATS_URL"),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": _confined(),
    }
    return pod(given, "streams", container, [], drain_s=GRACE_S) | {"restartPolicy": "OnFailure"}


def worker(given: Description, pool: Pool) -> Tree:
    """A pod that serves: alone, or as the leader of its group."""
    settings = WorkerSettings(
        role=pool.role,
        engine=pool.engine,  # type: ignore[arg-type]
        model=pool.model,
        served_model_name="" if pool.role == "diffusion" else given.served_model_name,
        block_size=pool.block_size,
        max_model_len=pool.max_len,
        extra_engine_args=f"{ENGINE}/{pool.role}.yaml" if pool.args else "",
        drain_s=pool.spec.drain_s,
        metrics_port=METRICS_PORT,
        metrics_host="0.0.0.0",
        log_format="json",
    )
    container = _process("worker", pool.image, settings, given, None, port=("metrics", METRICS_PORT))
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
    return _engine_pod(given, pool, container)


def follower(given: Description, pool: Pool) -> Tree:
    """A pod that only computes for its group's leader."""
    container: Tree = {
        "name": "ranks",
        "image": pool.image,
        "command": ["bash", f"{SCRIPTS}/follow.sh"],
        "env": [{"name": "HF_HOME", "value": f"{MODELS}/hub"}, *_hub(given)],
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": _PROBE_S},
    }
    return _engine_pod(given, pool, container)


def _engine_pod(given: Description, pool: Pool, container: Tree) -> Tree:
    """Volumes and resources that every pod of an engine needs."""
    mounts = [mount("models", MODELS), mount("shm", "/dev/shm")]
    # TensorRT-LLM and NCCL exchange through shared memory, of which a container has 64 MiB otherwise.
    volumes = [_models(given), {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pool.spec.shm}}]
    if pool.args:
        mounts.append(mount("engine", ENGINE, read_only=True))
        volumes.append({"name": "engine", "configMap": {"name": f"{given.name}-engine"}})
    if pool.nodes > 1:
        mounts += [mount("scripts", SCRIPTS, read_only=True), mount("ssh", KEYS, read_only=True)]
        volumes.append({"name": "scripts", "configMap": {"name": f"{given.name}-scripts"}})
        volumes.append({"name": "ssh", "secret": {"secretName": f"{given.name}-ssh", "defaultMode": 0o400}})
    extended = quantity({**({GPU: pool.gpus} if pool.gpus else {}), **pool.spec.resources})
    requests = {"cpu": pool.spec.cpu, "memory": pool.spec.memory}
    resources: Tree = {"requests": requests | extended, "limits": {"memory": pool.spec.memory} | extended}
    spec: Tree = {}
    if pool.spec.nvlink_domain:
        resources["claims"] = [{"name": "nvlink"}]
        claim = f"{given.name}-{pool.role}-nvlink"
        spec["resourceClaims"] = [{"name": "nvlink", "resourceClaimTemplateName": claim}]
    if pool.spec.node_selector:
        spec["nodeSelector"] = dict(pool.spec.node_selector)
    if pool.gpus:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    # Pinned memory for RDMA; the ulimit itself is the container runtime's.
    allowed = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if pool.gpus else {}
    container |= {"volumeMounts": mounts, "resources": resources} | allowed
    return pod(given, pool.role, container, volumes, drain_s=pool.spec.drain_s) | spec


def _process(
    role: str, image: str, settings: Common, given: Description, front: Front | None, *, port: tuple[str, int]
) -> Tree:
    """A container that runs one of our processes."""
    container: Tree = {
        "name": role,
        "image": image,
        "args": [role, *to_argv(settings, hidden=("nats_url", "sys_nats_url"))],
        "env": [
            {"name": "PENSTOCK_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *_nats(given, role, "PENSTOCK_NATS_URL"),
            {"name": "HF_HOME", "value": f"{MODELS}/hub"},
            *_hub(given),
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


def pod(given: Description, component: str, container: Tree, volumes: list[Tree], *, drain_s: float) -> Tree:
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


def _nats(given: Description, role: str, variable: str) -> list[Tree]:
    """The variable with a role's URL. The password comes from a Secret and is in no manifest."""
    if given.nats.url_secret:
        return [secret(variable, given.nats.url_secret, role)]
    password = f"{role.upper()}_PASSWORD"
    url = f"nats://{role}:$({password})@{given.name}-nats.{given.namespace}:{NATS_PORT}"
    return [secret(password, f"{given.name}-nats", role), {"name": variable, "value": url}]


def _hub(given: Description) -> list[Tree]:
    return [secret("HF_TOKEN", given.hub_secret, "token")] if given.hub_secret else []


def secret(variable: str, name: str, key: str, *, optional: bool = False) -> Tree:
    reference: Tree = {"name": name, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _models(given: Description) -> Tree:
    claim = given.weights.claim or f"{given.name}-models"
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
