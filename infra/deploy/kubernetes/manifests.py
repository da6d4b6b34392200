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


def manifests(given: Description, members: Mapping[str, RecipeEntry] = {}, texts: Mapping[str, str] = {}) -> list[Tree]:
    """The objects, in an order in which they may be applied.

    Args:
        members: the recipe's files by role; ``texts``: what is in them.
    Raises:
        BadArguments: the description cannot be.
    """
    found = pools(given, members, texts)
    language = next((pool for pool in found if pool.role != "diffusion"), None)
    made = []
    if configs := {f"{pool.role}.yaml": pool.args for pool in found if pool.args}:
        made.append(_config(given, "engine", configs))
    if any(pool.nodes > 1 for pool in found):
        made.append(_config(given, "scripts", SCRIPTS))
    if not given.weights.claim:
        made.append(_claim(given, "models", given.weights.size, given.weights.storage_class, "ReadWriteMany"))
    if not given.nats.url_secret:
        made += _broker(given)
    made.append(_object(given, "batch/v1", "Job", "streams", "streams", {
        # Tried again until the broker is there.
        "backoffLimit": 20,
        "ttlSecondsAfterFinished": 600,
        "template": _template(given, "streams", pods.streams(given)),
    }))  # fmt: skip
    made.append(_deployment(given, "router", given.router.replicas, pods.router(given)))
    model, block_size = (language.model, language.block_size) if language else ("", found[0].block_size)
    made.append(_deployment(given, "gateway", given.gateway.replicas, pods.gateway(given, model, block_size)))
    made.append(_service(given, "gateway", [("http", 80, pods.HTTP_PORT)]))
    for pool in found:
        made += _workers(given, pool)
    return made


def to_yaml(objects: list[Tree], head: str = "") -> str:
    """One document per object."""
    return head + "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000) for each in objects
    )


def secrets_needed(given: Description, objects: list[Tree]) -> str:
    """Comment lines: the commands that make the Secrets which the objects refer to."""
    lines = []
    scope = f"kubectl -n {given.namespace} create secret generic"
    if not given.nats.url_secret:
        # A letter first: the server reads a password that begins with digits as a number.
        users = " ".join(f"--from-literal={user}=p$(openssl rand -hex 16)" for user in USERS)
        lines.append(f"{scope} {given.name}-nats {users}")
    if any(each["kind"] == "LeaderWorkerSet" for each in objects):
        lines.append("ssh-keygen -q -t ed25519 -N '' -f ./penstock-ssh")
        lines.append(
            f"{scope} {given.name}-ssh --from-file=ssh-privatekey=./penstock-ssh "
            "--from-file=ssh-publickey=./penstock-ssh.pub"
        )
    if given.hub_secret:
        lines.append(f"{scope} {given.hub_secret} --from-literal=token=$HF_TOKEN")
    if any(each["kind"] == "LeaderWorkerSet" for each in objects):
        lines.append("needs LeaderWorkerSet: https://lws.sigs.k8s.io/docs/installation/")
    return "# Made by `penstock kubernetes render`. Before it is applied:\n" + "".join(
        f"#   {line}\n" for line in lines
    )


def _workers(given: Description, pool: Pool) -> list[Tree]:
    spec = pods.worker(given, pool)
    made = []
    if pool.spec.nvlink_domain:
        name = f"{pool.role}-nvlink"
        made.append(_object(given, "resource.nvidia.com/v1beta1", "ComputeDomain", name, pool.role, {
            "numNodes": pool.nodes * pool.spec.replicas,
            "channel": {"resourceClaimTemplate": {"name": f"{given.name}-{name}"}},
        }))  # fmt: skip
    if pool.nodes == 1:
        return [*made, _deployment(given, pool.role, pool.spec.replicas, spec, at_once=False)]
    body = {
        "replicas": pool.spec.replicas,
        "startupPolicy": "LeaderCreated",  # the leader waits for the others
        "leaderWorkerTemplate": {
            "size": pool.nodes,
            # MPI cannot continue without one of its ranks.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _template(given, pool.role, spec),
            "workerTemplate": _template(given, f"{pool.role}-ranks", pods.follower(given, pool)),
        },
    }
    grouped = _object(given, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", pool.role, pool.role, body)
    if pool.spec.topology_key:
        key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
        grouped["metadata"]["annotations"] = {key: pool.spec.topology_key}
    return [*made, grouped]


def _broker(given: Description) -> list[Tree]:
    """One nats-server; its passwords come from the Secret, by its environment."""
    config = render(
        ServerConfig(
            name=f"{given.name}-nats",
            port=pods.NATS_PORT,
            store_dir=_NATS_STORE,
            secrets={user: f"${user.upper()}_PASSWORD" for user in USERS},
            subjects=Subjects(),
            host="0.0.0.0",
            monitor_port=_MONITOR_PORT,
            passwords_from_environment=True,
        )
    )
    nats = given.nats
    container = {
        "name": "nats",
        "image": nats.image,
        "args": ["-c", f"{_NATS_CONFIG}/nats.conf"],
        "env": [pods.secret(f"{user.upper()}_PASSWORD", f"{given.name}-nats", user) for user in USERS],
        "ports": [{"name": "nats", "containerPort": pods.NATS_PORT}],
        "livenessProbe": pods.http("/healthz?js-server-only=true", _MONITOR_PORT),
        "readinessProbe": pods.http("/healthz", _MONITOR_PORT),
        "resources": {"requests": {"cpu": nats.cpu, "memory": nats.memory}, "limits": {"memory": nats.memory}},
        "volumeMounts": [
            pods.mount("config", _NATS_CONFIG, read_only=True), pods.mount("store", _NATS_STORE),
        ],
    }  # fmt: skip
    volumes = [{"name": "config", "configMap": {"name": f"{given.name}-nats"}}]
    spec = pods.pod(given, "nats", container, volumes, drain_s=30.0)
    claim = _claim(given, "store", nats.storage, nats.storage_class, "ReadWriteOnce")
    claim = {"metadata": {"name": "store"}, "spec": claim["spec"]}
    body = {
        "replicas": 1,
        "serviceName": f"{given.name}-nats",
        "selector": {"matchLabels": pods.labels(given, "nats")},
        "template": _template(given, "nats", spec),
        "volumeClaimTemplates": [claim],
    }
    service = _service(given, "nats", [("nats", pods.NATS_PORT, pods.NATS_PORT)], headless=True)
    return [
        _config(given, "nats", {"nats.conf": config}),
        service,
        _object(given, "apps/v1", "StatefulSet", "nats", "nats", body),
    ]


def _deployment(given: Description, component: str, replicas: int, spec: Tree, *, at_once: bool = True) -> Tree:
    # GPUs are not there twice: an engine's successor starts when it has gone.
    update = {} if at_once else {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}}
    return _object(given, "apps/v1", "Deployment", component, component, {
        "replicas": replicas,
        "selector": {"matchLabels": pods.labels(given, component)},
        **update,
        "template": _template(given, component, spec),
    })  # fmt: skip


def _template(given: Description, component: str, spec: Tree) -> Tree:
    return {"metadata": {"labels": pods.labels(given, component)}, "spec": spec}


def _service(given: Description, component: str, ports: list[tuple[str, int, int]], *, headless: bool = False) -> Tree:
    return _object(given, "v1", "Service", component, component, {
        **({"clusterIP": "None"} if headless else {}),
        "selector": pods.labels(given, component),
        "ports": [{"name": name, "port": port, "targetPort": target} for name, port, target in ports],
    })  # fmt: skip


def _config(given: Description, name: str, data: Mapping[str, str]) -> Tree:
    tree = _object(given, "v1", "ConfigMap", name, name, {})
    del tree["spec"]
    return tree | {"data": dict(data)}


def _claim(given: Description, name: str, size: str, storage_class: str, mode: str) -> Tree:
    chosen = {"storageClassName": storage_class} if storage_class else {}
    return _object(given, "v1", "PersistentVolumeClaim", name, name, {
        "accessModes": [mode], "resources": {"requests": {"storage": size}}, **chosen,
    })  # fmt: skip


def _object(given: Description, version: str, kind: str, name: str, component: str, spec: Tree) -> Tree:
    meta = {"name": f"{given.name}-{name}", "namespace": given.namespace, "labels": pods.labels(given, component)}
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as they are, and no anchors: people read this."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, data: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _text)
