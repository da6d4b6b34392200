"""The files of the chart that come from the code: ``values.yaml``, its schema, and the broker's limits and accounts.

The files beside ``compose.yaml`` that come from the code: the brokers' configuration, Prometheus's and Grafana's.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec
import yaml

from penstock.configs.flags import flags_of
from penstock.configs.planner_settings import PlannerSettings
from penstock.configs.settings import TraceSettings
from penstock.deploy.kubernetes import CHART
from penstock.deploy.monitoring import datasource, provider, scrape_config
from penstock.deploy.values import (
    KINDS,
    SETTLED,
    SETTLED_OF_PLANNER,
    SETTLED_OF_TRACE,
    Values,
    ValuesSection,
    WorkerDefaults,
    defaults,
)
from penstock.infra.nats_server import config
from penstock.infra.nats_server.binary import TESTED, dotted
from penstock.infra.nats_server.config import USERS, Cluster, ServerConfig, render, variable
from penstock.schemas.subjects import Subjects
from tests.generated.json_schema import schema_components

NAMESPACE = "namespace-of-the-values"  # the chart puts the real one in its place
# The exact release: a tag such as 2.15-alpine would move, and be another server on each node.
NATS_TAG = f"{dotted(TESTED)}-alpine"
NATS = f"""\
# Values of the NATS chart, https://github.com/nats-io/k8s/tree/main/helm/charts/nats.
nats:
  enabled: true
  container:
    image: {{tag: {NATS_TAG}}}
    env:
      GOMEMLIMIT: 6GiB
      GOGC: "50"
PASSWORDS
    merge:
      resources:
        requests: {{cpu: "2", memory: 8Gi}}
        limits: {{memory: 8Gi}}
      securityContext: &confined
        allowPrivilegeEscalation: false
        capabilities: {{drop: [ALL]}}
        seccompProfile: {{type: RuntimeDefault}}
    patch:
      - {{op: add, path: /volumeMounts/-, value: {{name: penstock, mountPath: /etc/penstock}}}}
  reloader: {{merge: {{securityContext: *confined}}}}
  podTemplate:
    # the image's own user has no number; this one may write the volume
    merge:
      spec:
        securityContext:
          {{runAsUser: 1000, runAsGroup: 1000, runAsNonRoot: true, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch}}
    patch:
      - op: add
        path: /spec/volumes/-
        value: {{name: penstock, configMap: {{name: {{$tplYaml: "{{{{ .Release.Name }}}}-broker"}}}}}}
  config:
    cluster: {{enabled: true, replicas: 3}}
    jetstream:
      enabled: true
      fileStore: {{pvc: {{size: 64Gi}}}}
      merge:
        # each stream has its own limit; the server's, by default the volume's size, must not be below their sum
        max_file_store: {config.STORE_BYTES}
        max_memory_store: {config.STORE_BYTES}
        sync_interval: {config.SYNC_S}s
        max_buffered_msgs: {config.BUFFERED_MESSAGES}
        max_buffered_size: {config.BUFFERED_BYTES}
        limits: {{default_max_consumers: {config.CONSUMERS}}}
    # limits and accounts of the users, with what each of them may do
    merge:
      $include: ../penstock/broker.conf
  natsBox: {{enabled: false}}
"""
PASSWORD = """\
      {variable}:
        valueFrom: {{secretKeyRef: {{name: {{$tplYaml: "{{{{ .Release.Name }}}}-broker"}}, key: {user}}}}}
"""


def files() -> dict[Path, str]:
    """Each file that is made here, and its text."""
    return {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        CHART / "files" / "broker.conf": broker_conf(),
    }


def broker_conf() -> str:
    """What each NATS server includes. The passwords come from its environment."""
    made = config.included(
        ServerConfig(
            name="",
            port=0,
            store_dir="",
            secrets={user: f"${variable(user)}" for user in USERS},
            subjects=Subjects(NAMESPACE),
            passwords_from_environment=True,
        )
    )
    return f"# Made by `python -m tests.generated`.\n{made}"


def values_yaml() -> str:
    """The chart's defaults, each key below its meaning."""
    ours = "".join(_documented(Values, defaults(), 0))
    passwords = "".join(PASSWORD.format(variable=variable(user), user=user) for user in USERS)
    nats = NATS.replace("PASSWORDS\n", passwords)
    return f"# Made by `python -m tests.generated` from penstock/deploy/values.py.\n{ours}{nats}"


def _documented(kind: type[ValuesSection], tree: Mapping[str, Any], depth: int) -> Iterator[str]:
    hints = get_type_hints(kind, include_extras=True)
    indent = "  " * depth
    for field in msgspec.structs.fields(kind):
        name, hint = field.encode_name, hints[field.name]
        if name not in tree:
            continue
        bare, metas = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
        section = bare if isinstance(bare, type) and issubclass(bare, ValuesSection) else None
        for text in (meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description):
            yield f"{indent}# {text}\n"
        if section is None:
            value = yaml.safe_dump(tree[name], default_flow_style=True, width=1000).removesuffix("...\n").strip()
            yield f"{indent}{name}: {value}\n"
            continue
        if section.__doc__ and depth == 0 and not section.__doc__.startswith("What all"):
            yield from (
                f"# {line.strip()}\n" for line in section.__doc__.replace("``", "`").splitlines() if line.strip()
            )
        yield f"{indent}{name}:\n"
        yield from _documented(section, tree[name], depth + 1)


def schema() -> dict[str, Any]:
    """JSON Schema of the values. Each ``settings`` takes the flags of its process that the chart leaves free."""
    (top, worker), parts = schema_components([Values, WorkerDefaults], ref_template="#/definitions/{name}")
    for part in parts.values():
        part.pop("required", None)  # what is left out is the chart's default
    for part, kind in (("GatewayValues", "gateway"), ("RouterValues", "router"), ("WorkerDefaults", "worker")):
        parts[part]["properties"]["settings"] |= _settings(KINDS[kind], SETTLED)
    taken = (SETTLED | SETTLED_OF_PLANNER) - {"model"}
    parts["PlannerValues"]["properties"]["settings"] |= _settings(PlannerSettings, taken)
    parts["TraceValues"]["properties"]["settings"] |= _settings(TraceSettings, SETTLED | SETTLED_OF_TRACE)
    whole = parts.pop("Values")
    whole["properties"]["workers"]["additionalProperties"] = {"anyOf": [worker, {"type": "null"}]}
    whole["properties"]["global"] = {"type": "object"}
    del whole["title"]
    assert top["$ref"].endswith("/Values")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **whole, "definitions": parts}


def _settings(kind: type[msgspec.Struct], settled: Collection[str]) -> dict[str, Any]:
    free = {flag.field.replace("_", "-"): flag for flag in flags_of(kind) if flag.field not in settled}
    properties = {}
    for name, flag in free.items():
        taken = msgspec.json.schema(flag.type)
        taken.pop("default", None)
        if taken.get("type") == "integer":
            taken["type"] = "number"  # helm may read large integers as floats
            taken["multipleOf"] = 1
        properties[name] = {"anyOf": [taken, {"type": "null"}], "description": flag.help}
    return {"type": "object", "properties": properties, "additionalProperties": False}


FOLDER = Path(__file__).parents[2] / "infra" / "deploy" / "compose"
SERVERS = 3
DASHBOARDS = "/var/lib/grafana/dashboards"
# Each process of these services, whatever number there is of it.
TARGETS = ({"names": ["gateway"], "port": 8000}, {"names": ["router", "worker", "worker-gpu"], "port": 9090})


def compose_files() -> dict[Path, str]:
    """Each file, and its text."""
    return {
        FOLDER / "nats.conf": nats_conf(),
        FOLDER / "prometheus.yml": _yaml(
            scrape_config({"dns_sd_configs": [{"type": "A", "refresh_interval": "5s", **each} for each in TARGETS]})
        ),
        FOLDER / "grafana" / "datasources.yaml": _yaml(datasource("http://prometheus:9090")),
        FOLDER / "grafana" / "dashboards.yaml": _yaml(provider(DASHBOARDS)),
    }


def nats_conf(namespace: str = "ps") -> str:
    """The configuration that all servers share. What differs, and what is secret, comes from their environment."""
    return render(
        ServerConfig(
            name="",
            port=4222,
            store_dir="/data",
            secrets={user: f"${variable(user)}" for user in USERS},
            subjects=Subjects(namespace),
            host="0.0.0.0",
            monitor_port=8222,
            passwords_from_environment=True,
            cluster=Cluster("penstock", "$NODE", 6222, tuple(f"$ROUTE_{number + 1}" for number in range(SERVERS))),
        )
    ).replace("# Generated by penstock at every start; edits are lost.", "# Made by `python -m tests.generated`.", 1)


def _yaml(tree: object) -> str:
    text: str = yaml.safe_dump(tree, sort_keys=False)
    return f"# Made by `python -m tests.generated`.\n{text}"
