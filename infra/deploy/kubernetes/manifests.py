"""All objects of a deployment: a pure function from its description to trees, and to YAML."""

from collections.abc import Mapping
from typing import Any

import yaml

from infra.broker.config import USERS, ServerConfig, render
from infra.deploy.kubernetes import pods
from infra.deploy.kubernetes.description import Description, Pool, pools
from infra.deploy.kubernetes.multinode import SCRIPTS
from infra.recipes.catalogue import RecipeEntry
from schemas.subjects import Subjects

Tree = dict[str, Any]

_NATS_CONFIG, _NATS_STORE = "/etc/nats", "/data"
_MONITOR_PORT = 8222


def manifests(
    description: Description, members: Mapping[str, RecipeEntry] = {}, texts: Mapping[str, str] = {}
) -> list[Tree]:
    """The objects, in an order in which they may be applied.

    Args:
        members: the recipe's files by role; ``texts``: what is in them.
    Raises:
        BadArguments: the description contradicts itself.
    """
    found = pools(description, members, texts)
    language = next((pool for pool in found if pool.role != "diffusion"), None)
    resources = []
    if configs := {f"{pool.role}.yaml": pool.args for pool in found if pool.args}:
        resources.append(_config(description, "engine", configs))
    if any(pool.nodes > 1 for pool in found):
        resources.append(_config(description, "scripts", SCRIPTS))
    if not description.weights.claim:
        resources.append(
            _claim(description, "models", description.weights.size, description.weights.storage_class, "ReadWriteMany")
        )
    if not description.nats.url_secret:
        resources += _broker(description)
    resources.append(_object(description, "batch/v1", "Job", "streams", "streams", {
        # Tried again until the broker is there.
        "backoffLimit": 20,
        "ttlSecondsAfterFinished": 600,
        "template": _template(description, "streams", pods.streams(description)),
    }))  # fmt: skip
    resources.append(_deployment(description, "router", description.router.replicas, pods.router(description)))
    model, block_size = (language.model, language.block_size) if language else ("", found[0].block_size)
    resources.append(
        _deployment(description, "gateway", description.gateway.replicas, pods.gateway(description, model, block_size))
    )
    resources.append(_service(description, "gateway", [("http", 80, pods.HTTP_PORT)]))
    for pool in found:
        resources += _workers(description, pool)
    return resources


def to_yaml(objects: list[Tree], head: str = "") -> str:
    """One document per object."""
    return head + "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000) for each in objects
    )


def secrets_needed(description: Description, objects: list[Tree]) -> str:
    """Comment lines: the commands that make the Secrets which the objects refer to."""
    lines = []
    scope = f"kubectl -n {description.namespace} create secret generic"
    if not description.nats.url_secret:
        # A letter first: the server reads a password that begins with digits as a number.
        users = " ".join(f"--from-literal={user}=p$(openssl rand -hex 16)" for user in USERS)
        lines.append(f"{scope} {description.name}-nats {users}")
    if any(each["kind"] == "LeaderWorkerSet" for each in objects):
        lines.append("ssh-keygen -q -t ed25519 -N '' -f ./penstock-ssh")
        lines.append(
            f"{scope} {description.name}-ssh --from-file=ssh-privatekey=./penstock-ssh "
            "--from-file=ssh-publickey=./penstock-ssh.pub"
        )
    if description.hub_secret:
        lines.append(f"{scope} {description.hub_secret} --from-literal=token=$HF_TOKEN")
    if any(each["kind"] == "LeaderWorkerSet" for each in objects):
        lines.append("needs LeaderWorkerSet: https://lws.sigs.k8s.io/docs/installation/")
    return "# Made by `penstock kubernetes render`. Before it is applied:\n" + "".join(
        f"#   {line}\n" for line in lines
    )


def _workers(description: Description, pool: Pool) -> list[Tree]:
    spec = pods.worker(description, pool)
    resources = []
    if pool.spec.nvlink_domain:
        name = f"{pool.role}-nvlink"
        resources.append(_object(description, "resource.nvidia.com/v1beta1", "ComputeDomain", name, pool.role, {
            "numNodes": pool.nodes * pool.spec.replicas,
            "channel": {"resourceClaimTemplate": {"name": f"{description.name}-{name}"}},
        }))  # fmt: skip
    if pool.nodes == 1:
        return [*resources, _deployment(description, pool.role, pool.spec.replicas, spec, at_once=False)]
    body = {
        "replicas": pool.spec.replicas,
        "startupPolicy": "LeaderCreated",  # the leader waits for the others
        "leaderWorkerTemplate": {
            "size": pool.nodes,
            # MPI cannot continue without one of its ranks.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _template(description, pool.role, spec),
            "workerTemplate": _template(description, f"{pool.role}-ranks", pods.follower(description, pool)),
        },
    }
    grouped = _object(description, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", pool.role, pool.role, body)
    if pool.spec.topology_key:
        key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
        grouped["metadata"]["annotations"] = {key: pool.spec.topology_key}
    return [*resources, grouped]


def _broker(description: Description) -> list[Tree]:
    """One nats-server; its passwords come from the Secret, by its environment."""
    config = render(
        ServerConfig(
            name=f"{description.name}-nats",
            port=pods.NATS_PORT,
            store_dir=_NATS_STORE,
            secrets={user: f"${user.upper()}_PASSWORD" for user in USERS},
            subjects=Subjects(),
            host="0.0.0.0",
            monitor_port=_MONITOR_PORT,
            passwords_from_environment=True,
        )
    )
    nats = description.nats
    container = {
        "name": "nats",
        "image": nats.image,
        "args": ["-c", f"{_NATS_CONFIG}/nats.conf"],
        "env": [pods.secret(f"{user.upper()}_PASSWORD", f"{description.name}-nats", user) for user in USERS],
        "ports": [{"name": "nats", "containerPort": pods.NATS_PORT}],
        "livenessProbe": pods.http("/healthz?js-server-only=true", _MONITOR_PORT),
        "readinessProbe": pods.http("/healthz", _MONITOR_PORT),
        "resources": {"requests": {"cpu": nats.cpu, "memory": nats.memory}, "limits": {"memory": nats.memory}},
        "volumeMounts": [
            pods.mount("config", _NATS_CONFIG, read_only=True), pods.mount("store", _NATS_STORE),
        ],
    }  # fmt: skip
    volumes = [{"name": "config", "configMap": {"name": f"{description.name}-nats"}}]
    spec = pods.pod(description, "nats", container, volumes, drain_s=30.0)
    claim = _claim(description, "store", nats.storage, nats.storage_class, "ReadWriteOnce")
    claim = {"metadata": {"name": "store"}, "spec": claim["spec"]}
    body = {
        "replicas": 1,
        "serviceName": f"{description.name}-nats",
        "selector": {"matchLabels": pods.labels(description, "nats")},
        "template": _template(description, "nats", spec),
        "volumeClaimTemplates": [claim],
    }
    service = _service(description, "nats", [("nats", pods.NATS_PORT, pods.NATS_PORT)], headless=True)
    return [
        _config(description, "nats", {"nats.conf": config}),
        service,
        _object(description, "apps/v1", "StatefulSet", "nats", "nats", body),
    ]


def _deployment(description: Description, component: str, replicas: int, spec: Tree, *, at_once: bool = True) -> Tree:
    # There are no spare GPUs: a new engine starts when the old one has ended.
    update = {} if at_once else {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}}
    return _object(description, "apps/v1", "Deployment", component, component, {
        "replicas": replicas,
        "selector": {"matchLabels": pods.labels(description, component)},
        **update,
        "template": _template(description, component, spec),
    })  # fmt: skip


def _template(description: Description, component: str, spec: Tree) -> Tree:
    return {"metadata": {"labels": pods.labels(description, component)}, "spec": spec}


def _service(
    description: Description, component: str, ports: list[tuple[str, int, int]], *, headless: bool = False
) -> Tree:
    return _object(description, "v1", "Service", component, component, {
        **({"clusterIP": "None"} if headless else {}),
        "selector": pods.labels(description, component),
        "ports": [{"name": name, "port": port, "targetPort": target} for name, port, target in ports],
    })  # fmt: skip


def _config(description: Description, name: str, data: Mapping[str, str]) -> Tree:
    tree = _object(description, "v1", "ConfigMap", name, name, {})
    del tree["spec"]
    return tree | {"data": dict(data)}


def _claim(description: Description, name: str, size: str, storage_class: str, mode: str) -> Tree:
    chosen = {"storageClassName": storage_class} if storage_class else {}
    return _object(description, "v1", "PersistentVolumeClaim", name, name, {
        "accessModes": [mode], "resources": {"requests": {"storage": size}}, **chosen,
    })  # fmt: skip


def _object(description: Description, version: str, kind: str, name: str, component: str, spec: Tree) -> Tree:
    meta = {
        "name": f"{description.name}-{name}",
        "namespace": description.namespace,
        "labels": pods.labels(description, component),
    }
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as they are, and no anchors: people read this."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, data: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _text)
