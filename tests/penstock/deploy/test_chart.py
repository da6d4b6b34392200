"""The chart's manifests: valid by the published schemas, complete, and agreeing with each other and the processes."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.configs.flags import parse
from penstock.configs.planner_settings import PlannerSettings
from penstock.configs.settings import GatewaySettings, RouterSettings, TraceSettings, WorkerSettings
from penstock.deploy.kubernetes import CHART
from penstock.deploy.monitoring import ALERTS, GRAFANA, alert_rules
from penstock.deploy.values import Thresholds
from penstock.infra.engine_args.tree import decode, parse_yaml
from penstock.infra.nats_server.config import USERS, ServerConfig, included
from penstock.launch.recipes.catalogue import members
from penstock.log_tools.traces.trace_command import check
from penstock.planner.connectors import scale_path
from penstock.schemas.subjects import Subjects
from tests.generated.chart import files
from tests.penstock.deploy.support import (
    Tree,
    command_of,
    container,
    environment,
    forget,
    found,
    helm,
    manifests,
    named,
    needs_helm,
    pods,
    recipe_values,
    refused,
    templates,
)
from tests.penstock.deploy.test_monitoring import known

pytestmark = needs_helm
VERSION = "1.33"
GRACE_S = 15
SETS = sorted({entry.header.set for entry in members().values()})
EVERYTHING = """
model: /models/llama
servedModelName: llama, llama-3
imagePullSecrets: [{name: registry}]
gateway:
  settings: {max-queue: 512, access-log: true, max-body-bytes: 16777216, default-deadline-s: 90.5}
  ingress: {enabled: true, className: nginx, hosts: [llm.example.com], tls: [{secretName: t, hosts: [a.example.com]}]}
  autoscaling: {enabled: true, maxReplicas: 8}
  topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]
  tolerations: [{key: spot, operator: Exists}]
  priorityClassName: high
router:
  settings: {mode: kv, kv-events: false}
  env: [{name: TZ, value: UTC}]
  podAnnotations: {team: serving}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [
    {key: arch, operator: In, values: [amd64]}]}]}}}
workers:
  prefill: {autoscaling: {enabled: true, kind: keda}, podAnnotations: {team: serving}}
  decode: {replicas: 3, autoscaling: {enabled: true}, settings: {logits-processor: ["a=b:C", "d=e:F"]}}
  draw: {role: diffusion, model: /models/painter, resources: {rdma/ib: 1}, nodeSelector: {gpu: h100}}
  drafts: {role: decode, engine: mock, cpu: 500m}
  embed: {model: /models/minilm, gpus: 0}
networkPolicy:
  clients: [{namespaceSelector: {matchLabels: {team: front}}}]
  monitoring: [{namespaceSelector: {matchLabels: {name: monitoring}}}]
  natsClients: [{podSelector: {matchLabels: {app: batch}}}]
monitoring:
  podMonitor: {enabled: true, labels: {release: prometheus}}
  rules: {enabled: true}
  dashboards: {enabled: true}
hub: {token: hf_x}
streams: {record: true}
"""
OWN_NATS = """
models: {enabled: false}
nats: {enabled: false}
broker: {urlsSecret: nats-urls}
workers: {aggregated: {engine: mock}}
networkPolicy: {enabled: false}
"""
CREDENTIALS = """
models: {enabled: false}
nats: {enabled: false}
broker:
  url: tls://nats-1.example.com:4443,tls://nats-2.example.com:4443
  credsSecret: creds
  certSecrets: {gateway: cert-g, router: cert-r, worker: cert-w, planner: cert-p, reader: cert-r,
    operator: cert-o, sys: cert-s}
  caSecret: authority
  ports: [4443]
  peers: [{ipBlock: {cidr: 192.0.2.0/24}}]
workers: {aggregated: {engine: mock, extraVolumes: [{name: more, emptyDir: {}}], extraVolumeMounts: [
  {name: more, mountPath: /more}]}}
planner: {enabled: true}
trace: {enabled: true, endpoint: "https://otel.example.com/v1/traces"}
"""
NATS_TLS = """
broker: {caSecret: nats-tls}
nats:
  config:
    nats: {port: 4333, tls: {enabled: true, secretName: nats-tls}}
"""
PLANNED = """
planner:
  enabled: true
  profiles: {prefill: '{"a": 1}', decode: '{"b": 2}'}
  settings: {ttft: 800, itl: 20, predictor: constant}
workers: {prefill: {}, decode: {replicas: 3}, drafts: {role: encode}}
"""
TRACED = """
trace:
  enabled: true
  endpoint: http://otel-collector.monitoring:4318/v1/traces
  peers: [{namespaceSelector: {matchLabels: {name: monitoring}}}]
  env: [{name: OTEL_EXPORTER_OTLP_HEADERS, valueFrom: {secretKeyRef: {name: otel, key: headers}}}]
  settings: {sample: 0.1, since: 1h}
"""
SEVERAL = """
image: penstock:1
model: /models/llama
servedModelName: llama, llama-3
workers:
  llama-prefill: {role: prefill, engine: mock, autoscaling: {enabled: true}}
  llama-decode: {role: decode, engine: mock, autoscaling: {enabled: true, metric: penstock_worker_running}}
  qwen: {engine: mock, model: Qwen/Qwen3-8B, replicas: 2, autoscaling: {enabled: true, kind: keda}}
  gemma: {engine: mock, model: /models/gemma, servedModelName: small}
  vectors: {role: embed, engine: mock, model: /models/minilm}
monitoring: {podMonitor: {enabled: true}}
"""
TO_ZERO = """
image: penstock:1
model: /models/llama
workers:
  prefill: {engine: mock, autoscaling: &zero {enabled: true, kind: keda, minReplicas: 0}}
  decode: {engine: mock, autoscaling: {<<: *zero, metric: penstock_worker_running}}
monitoring: {podMonitor: {enabled: true}}
"""
CELLS = """
models: {enabled: false}
cells: {count: 3, placementTags: [demo-nats-0, demo-nats-1, "zone-a;ssd"]}
streams: {replicas: 1}
workers:
  prefill: {engine: mock, replicas: 2}
  decode: {engine: mock, autoscaling: {enabled: true, metric: penstock_worker_running}}
monitoring: {podMonitor: {enabled: true}}
trace: {enabled: true, endpoint: "https://otel.example.com/v1/traces"}
"""
CELLS_ON_OWN_NATS = OWN_NATS.replace("workers:", "cells: {count: 2, urlsSecrets: [nats-urls-1]}\nworkers:")
CASES = {
    "cells": CELLS,
    "cells on brokers of one's own": CELLS_ON_OWN_NATS,
    "several models": SEVERAL,
    "pools that may have no worker": TO_ZERO,
    "a planner": PLANNED,
    "traces": TRACED,
    "the defaults": "",
    "everything on": EVERYTHING,
    "a NATS of one's own": OWN_NATS,
    "a NATS of one's own with credentials in files": CREDENTIALS,
    "a NATS with TLS": NATS_TLS,
    "a multi-node engine that is scaled": recipe_values("llama4-eagle-gb200").replace(
        "  decode:\n", "  decode:\n    autoscaling: {enabled: true}\n    nvlinkDomain: true\n    topologyKey: clique\n"
    )
    + "monitoring: {scraped: true}\n",
    **{f"recipe {name}": recipe_values(name, hub_secret="hub-token") for name in SETS},
}


@pytest.fixture(scope="module", autouse=True)
def _removed() -> Iterator[None]:
    yield
    forget()


# -- the schemas ------------------------------------------------------------------------------------------------------

# Fields of custom resources, as their API types have them; the pods in them are Kubernetes' own.
_OPEN: Tree = {"type": "object"}


def _closed(properties: Tree, *required: str) -> Tree:
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


CUSTOM: dict[str, tuple[str, Tree]] = {
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", _closed({
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "rolloutStrategy": _OPEN,
        "networkConfig": _OPEN,
        "leaderWorkerTemplate": _closed({
            "leaderTemplate": _OPEN,
            "workerTemplate": _OPEN,
            "size": {"type": "integer", "minimum": 1},
            "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            "subGroupPolicy": _OPEN,
            "volumeClaimTemplates": {"type": "array"},
        }, "workerTemplate"),
    }, "leaderWorkerTemplate")),
    "ComputeDomain": ("resource.nvidia.com/v1beta1", _closed({
        "numNodes": {"type": "integer", "minimum": 1},
        "channel": _closed({"resourceClaimTemplate": _closed({"name": {"type": "string"}}, "name")}),
    }, "numNodes", "channel")),
    "PodMonitor": ("monitoring.coreos.com/v1", _closed({
        "jobLabel": {"type": "string"},
        "selector": _OPEN,
        "podMetricsEndpoints": {"type": "array", "items": _closed({
            "port": {"type": "string"},
            "path": {"type": "string"},
            "interval": {"type": "string"},
            "honorLabels": {"type": "boolean"},
            "relabelings": {"type": "array", "items": _closed({
                "sourceLabels": {"type": "array"}, "targetLabel": {"type": "string"},
            })},
        }, "port")},
    }, "selector", "podMetricsEndpoints")),
    "PrometheusRule": ("monitoring.coreos.com/v1", _closed({"groups": {"type": "array", "minItems": 1}}, "groups")),
    "ScaledObject": ("keda.sh/v1alpha1", _closed({
        "minReplicaCount": {"type": "integer"},
        "maxReplicaCount": {"type": "integer"},
        "cooldownPeriod": {"type": "integer"},
        "scaleTargetRef": _closed({key: {"type": "string"} for key in ("apiVersion", "kind", "name")}, "name"),
        "triggers": {"type": "array", "items": _closed({
            "type": {"const": "prometheus"},
            "metadata": _closed({key: {"type": "string"} for key in ("serverAddress", "query", "threshold")}),
        })},
    }, "scaleTargetRef", "triggers")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid_by_the_published_schemas(case: str) -> None:
    check_objects(manifests(CASES[case]))


def check_objects(trees: list[Tree]) -> None:
    for tree in trees:
        if tree["kind"] in CUSTOM:
            version, schema = CUSTOM[tree["kind"]]
            assert tree["apiVersion"] == version
            jsonschema.validate(tree["spec"], schema)
            for template in templates(tree):
                pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
                valid(json.dumps(pod))
        else:
            valid(json.dumps(tree))


@cache
def valid(tree: str) -> None:
    """Many objects are the same in several cases, and each takes a tenth of a second."""
    import kubernetes_validate  # late: half a second, in each process that collects tests

    kubernetes_validate.validate(json.loads(tree), VERSION, strict=True)


def test_the_schemas_find_what_is_wrong() -> None:
    import kubernetes_validate

    tree = json.loads(json.dumps(found(manifests(), "Deployment", "demo-gateway")))
    tree["spec"]["template"]["spec"]["terminationGrace"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGrace"):
        kubernetes_validate.validate(tree, VERSION, strict=True)


def printed_values() -> Iterator[Any]:
    """Values of the chart in the pages of docs/, by page and line."""
    keys = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")).keys()
    for page in sorted(Path("docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            values = yaml.safe_load(block[1].replace('"…"', '""'))
            if isinstance(values, dict) and values.keys() <= keys:
                at = f"{page.name}:{text.count(chr(10), 0, block.start()) + 1}"
                yield pytest.param(yaml.safe_dump(values), id=at)


@pytest.mark.parametrize("values", [*printed_values()])
def test_values_that_a_page_prints_make_valid_objects(values: str) -> None:
    check_objects(manifests(values))


def test_helm_s_own_lint_finds_nothing() -> None:
    run = helm("lint", "--strict", values=EVERYTHING)
    assert run.returncode == 0, run.stdout
    assert "[WARNING]" not in run.stdout


def test_the_files_that_come_from_the_code_are_current() -> None:
    for path, text in files().items():
        assert path.read_text() == text, "run python -m tests.generated"


# -- objects that refer to each other ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_names_labels_volumes_ports_and_references_hold_together(case: str) -> None:
    trees = manifests(CASES[case])
    made = {(tree["kind"], tree["metadata"]["name"]) for tree in trees}
    assert len(made) == len(trees)
    claims = {
        tree["spec"]["channel"]["resourceClaimTemplate"]["name"] for tree in trees if tree["kind"] == "ComputeDomain"
    }
    for tree in trees:
        assert tree["kind"] == "ConfigMap" or tree["metadata"]["namespace"] == "serving"
        for template in templates(tree):
            spec, only = template["spec"], container(template)
            if tree["kind"] == "Deployment":
                assert selects(tree["spec"]["selector"], template)
            volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
            assert {mount["name"] for mount in only.get("volumeMounts", [])} == set(volumes)
            for volume in volumes.values():
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in made
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in made
            assert {claim["resourceClaimTemplateName"] for claim in spec.get("resourceClaims", [])} <= claims
            # Else a service of ours would set variables that are flags of ours.
            assert spec["enableServiceLinks"] is False
            ports = {port["name"]: port["containerPort"] for port in only.get("ports", [])}
            for probe in (value for key, value in only.items() if key.endswith("Probe")):
                assert next(iter(probe.values()))["port"] in ports
            allowed = only["securityContext"]
            assert allowed["runAsNonRoot"] is True
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"]["drop"] == ["ALL"]
            assert spec["securityContext"]["runAsUser"] == 1000
    for service in (tree for tree in trees if tree["kind"] == "Service"):
        (behind,) = [pod for pod in pods(trees) if selects({"matchLabels": service["spec"]["selector"]}, pod)]
        names = {port["name"] for port in container(behind)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_each_cell_has_routers_and_pools_of_its_own() -> None:
    trees = manifests(CELLS)
    arguments = {each["metadata"]["name"]: each for each in trees if each["kind"] == "Deployment"}
    for cell, namespace in enumerate(("ps", "ps-1", "ps-2")):
        end = f"-{cell}" if cell else ""
        for name in ("router", "prefill", "decode"):
            argv = command_of(arguments[f"demo-{name}{end}"]["spec"]["template"])
            assert f"--namespace={namespace}" in argv
            assert ("NetworkPolicy", f"demo-{name}{end}") in {
                (each["kind"], each["metadata"]["name"]) for each in trees
            }
            assert f"demo-{name}{end}" in named(trees, "PodDisruptionBudget")
        query = json.dumps(found(trees, "HorizontalPodAutoscaler", f"demo-decode{end}"))
        assert f'"namespace": "{namespace}"' in query
    for name in ("gateway", "trace"):
        argv = command_of(arguments[f"demo-{name}"]["spec"]["template"])
        assert {"--namespace=ps", "--cells=3"} <= set(argv)
    (job,) = (pod for pod in pods(trees) if container(pod)["name"] == "streams")
    assert {"--cells=3", "--placement-tags=demo-nats-0,demo-nats-1,zone-a;ssd"} <= set(container(job)["args"])


def test_the_users_of_the_release_s_servers_have_the_rights_of_all_cells() -> None:
    """As the server's configuration has them where we write it."""
    text = found(manifests(CELLS), "ConfigMap", "demo-broker")["data"]["broker.conf"]
    assert "server_tags: [$POD_NAME]" in text
    ours = ServerConfig("n", 1, "", dict.fromkeys(USERS, "x"), Subjects("ps"), cells=3)
    theirs, wanted = (
        [set(re.findall(r'"([^"]+)"', line)) for line in each.splitlines() if re.match(" +(publish|subscribe):", line)]
        for each in (text, included(ours))
    )
    assert len(theirs) == len(wanted)
    assert all(has >= needs for has, needs in zip(theirs, wanted, strict=True))
    assert "server_tags" not in found(manifests(), "ConfigMap", "demo-broker")["data"]["broker.conf"]


def test_cells_on_brokers_of_their_own_get_their_urls() -> None:
    trees = manifests(CELLS_ON_OWN_NATS)
    for name, secret in (
        ("demo-router", "nats-urls"),
        ("demo-router-1", "nats-urls-1"),
        ("demo-aggregated-1", "nats-urls-1"),
    ):
        url = environment(found(trees, "Deployment", name)["spec"]["template"])["PENSTOCK_NATS_URL"]
        assert url["valueFrom"]["secretKeyRef"]["name"] == secret
    gateway = environment(found(trees, "Deployment", "demo-gateway")["spec"]["template"])
    assert gateway["CELL_1_URL"]["valueFrom"]["secretKeyRef"] == {"name": "nats-urls-1", "key": "gateway"}
    assert gateway["PENSTOCK_CELL_NATS_URLS"]["value"] == "$(CELL_1_URL)"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("cells: {count: 2, placementTags: [a]}", "name the tags of each of the 2 cells; there are 1"),
        (OWN_NATS + "cells: {count: 3, urlsSecrets: [a]}", "one for each of the 2 cells after the first; there are"),
        ("cells: {count: 2, urlsSecrets: [a]}", "they go with broker.urlsSecret"),
        (
            "cells: {count: 2}\nworkers: {mock: {engine: mock}, mock-1: {engine: mock}}",
            "pool mock has this name in cell 1",
        ),
        ("cells: {count: 0}", "cells"),
    ],
)
def test_cells_that_do_not_fit_are_refused_with_the_reason(values: str, says: str) -> None:
    assert says in refused("models: {enabled: false}\n" + values.replace("models: {enabled: false}\n", ""))


def selects(selector: Tree, template: Tree) -> bool:
    """Whether a label selector matches a pod."""
    labels = template["metadata"]["labels"]
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("case", CASES)
def test_every_budget_and_policy_selects_pods_and_every_pod_has_a_policy(case: str) -> None:
    trees = manifests(CASES[case])
    every = pods(trees)
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for tree in (tree for tree in trees if tree["kind"] == kind):
            selector = tree["spec"].get("selector") or tree["spec"]["podSelector"]
            if selector["matchLabels"].get("app.kubernetes.io/name") != "nats":
                assert any(selects(selector, pod) for pod in every), tree["metadata"]["name"]
    policies = [tree["spec"]["podSelector"] for tree in trees if tree["kind"] == "NetworkPolicy"]
    for pod in every:
        assert not policies or sum(selects(policy, pod) for policy in policies) == 1
    # At most one pod of a component is evicted at a time.
    budgets = [tree["spec"] for tree in trees if tree["kind"] == "PodDisruptionBudget"]
    assert all(budget["maxUnavailable"] == 1 for budget in budgets)
    alone = ("demo-planner", "demo-trace")  # of which there is one
    scaled = [name for name in named(trees, "Deployment") if name not in alone]
    assert len(budgets) == len(scaled) + len(named(trees, "LeaderWorkerSet"))


def test_policies_let_through_what_the_processes_need_and_only_that() -> None:
    trees = manifests(EVERYTHING)
    policy = {name: found(trees, "NetworkPolicy", f"demo-{name}")["spec"] for name in ("gateway", "router", "decode")}
    assert policy["gateway"]["ingress"] == [
        {
            "ports": [{"port": "http"}],
            "from": [
                {"namespaceSelector": {"matchLabels": {"team": "front"}}},
                {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}},
            ],
        }
    ]
    assert [rule["ports"] for rule in policy["router"]["ingress"]] == [[{"port": "metrics"}]]
    among = policy["decode"]["ingress"][1]["from"][0]["podSelector"]
    seen = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods(trees) if selects(among, pod)}
    assert seen == {"prefill", "decode", "draw", "drafts", "embed"}  # KV moves among workers; nobody else reaches them
    for one in policy.values():
        to_broker = [rule for rule in one["egress"] if rule.get("ports") == [{"port": 4222}]]
        assert to_broker[0]["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "nats"
        assert any({"port": 53, "protocol": "UDP"} in rule.get("ports", []) for rule in one["egress"])
    assert [{"port": 80}, {"port": 443}] in [rule.get("ports") for rule in policy["gateway"]["egress"]]
    assert [{"port": 80}, {"port": 443}] not in [rule.get("ports") for rule in policy["router"]["egress"]]
    broker = found(trees, "NetworkPolicy", "demo-broker")["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": {"app": "batch"}}} in broker[0]["from"]
    # Without a client rule, every address reaches the gateways.
    assert "from" not in found(manifests(), "NetworkPolicy", "demo-gateway")["spec"]["ingress"][0]


# -- settings of the processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_process_reads_its_arguments_and_outlives_its_drain(case: str) -> None:
    kinds: dict[str, Any] = {"gateway": GatewaySettings, "router": RouterSettings, "worker": WorkerSettings}
    seen = set()
    for template in pods(manifests(CASES[case])):
        argv, only = command_of(template), container(template)
        if not argv or argv[0] not in kinds:
            continue
        seen.add(argv[0])
        settings = parse(kinds[argv[0]], argv[1:], prog=argv[0], environ={})
        # In this time the pod leaves its Service, drains, and closes.
        spare = template["spec"]["terminationGracePeriodSeconds"] - getattr(settings, "drain_s", 0)
        assert spare >= GRACE_S + (5 if argv[0] == "gateway" else 0)
        ports = {port["name"]: port["containerPort"] for port in only["ports"]}
        assert list(ports.values()) == [getattr(settings, "metrics_port", 0) or settings.http_port]
        # Probes come from outside of the pod.
        assert getattr(settings, "metrics_host", "::") == "::" == getattr(settings, "http_host", "::")
        assert "@" not in " ".join(argv)  # no passwords
        assert {"PENSTOCK_NATS_URL", "PENSTOCK_NAME"} <= set(environment(template))
        probes = {only[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert probes == ({"/health/live", "/health/ready"} if argv[0] == "gateway" else {"/metrics"})
        assert settings.log_format == "json"
    assert seen == set(kinds)


def test_settings_become_flags_with_their_values() -> None:
    trees = manifests(EVERYTHING)
    (template,) = templates(found(trees, "Deployment", "demo-gateway"))
    gateway = parse(GatewaySettings, command_of(template)[1:], prog="g", environ={})
    assert (gateway.max_queue, gateway.access_log, gateway.default_deadline_s) == (512, True, 90.5)
    assert gateway.max_body_bytes == 16 << 20
    assert gateway.served_model_name == "llama,llama-3"
    (template,) = templates(found(trees, "Deployment", "demo-router"))
    assert parse(RouterSettings, command_of(template)[1:], prog="r", environ={}).kv_events is False
    assert environment(template)["TZ"]["value"] == "UTC"
    (template,) = templates(found(trees, "Deployment", "demo-decode"))
    worker = parse(WorkerSettings, command_of(template)[1:], prog="w", environ={})
    assert worker.logits_processor == ("a=b:C", "d=e:F")


def test_a_pool_takes_its_role_from_its_name_or_says_it() -> None:
    trees = manifests(EVERYTHING)
    roles = {}
    for name in named(trees, "Deployment"):
        (template,) = templates(found(trees, "Deployment", name))
        argv = command_of(template)
        if argv[0] == "worker":
            settings = parse(WorkerSettings, argv[1:], prog="w", environ={})
            gpus = container(template)["resources"]["limits"].get("nvidia.com/gpu", "0")
            roles[name] = (settings.role, settings.engine, settings.model, gpus)
    assert roles == {
        "demo-prefill": ("prefill", "native", "/models/llama", "1"),
        "demo-decode": ("decode", "native", "/models/llama", "1"),
        "demo-draw": ("diffusion", "native", "/models/painter", "1"),
        "demo-drafts": ("decode", "mock", "/models/llama", "0"),
        "demo-embed": ("embed", "native", "/models/minilm", "0"),
    }
    (template,) = templates(found(trees, "Deployment", "demo-draw"))
    assert container(template)["resources"]["limits"]["rdma/ib"] == "1"
    assert template["spec"]["nodeSelector"] == {"gpu": "h100"}


def test_prefill_and_decode_get_their_files_gpus_memory_and_volume() -> None:
    trees = manifests(recipe_values("llama3", hub_secret="hub-token", counts={"prefill": 2, "decode": 1}))
    data = found(trees, "ConfigMap", "demo-engine")["data"]
    assert set(data) == {"prefill.yaml", "decode.yaml"}
    for role in ("prefill", "decode"):
        assert decode(parse_yaml(data[f"{role}.yaml"])).max_seq_len == 18432
        tree = found(trees, "Deployment", f"demo-{role}")
        (template,) = templates(tree)
        only, spec = container(template), template["spec"]
        settings = parse(WorkerSettings, command_of(template)[1:], prog="worker", environ={})
        assert (settings.role, settings.engine, settings.max_model_len) == (role, "trtllm", 18432)
        mounts = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
        assert settings.extra_engine_args == f"{mounts['engine']}/{role}.yaml"
        assert only["image"] == "registry.example.com/engine:1"
        assert only["resources"]["limits"]["nvidia.com/gpu"] == "1" == only["resources"]["requests"]["nvidia.com/gpu"]
        shm = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert mounts["shm"] == "/dev/shm"
        assert environment(template)["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}
        assert environment(template)["HF_HOME"]["value"].startswith(mounts["models"])
        # An hour to load, then checked every ten seconds.
        assert only["startupProbe"]["failureThreshold"] * only["startupProbe"]["periodSeconds"] == 3600
        assert tree["spec"]["progressDeadlineSeconds"] > 3600
        assert tree["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert found(trees, "Deployment", "demo-prefill")["spec"]["replicas"] == 2
    assert found(trees, "PersistentVolumeClaim", "demo-models")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_planner_may_scale_the_pools_that_it_plans_and_nothing_else() -> None:
    trees = manifests(PLANNED)
    (template,) = templates(found(trees, "Deployment", "demo-planner"))
    assert template["spec"]["serviceAccountName"] == found(trees, "ServiceAccount", "demo-planner")["metadata"]["name"]
    argv = command_of(template)
    settings = parse(PlannerSettings, argv[1:], prog="plan", environ={})
    assert (argv[0], settings.connector, settings.ttft, settings.itl) == ("plan", "kubernetes", 800, 20)
    assert settings.predictor == "constant"
    workloads = dict(each.split("=") for each in settings.kubernetes_workloads)
    (rule,) = found(trees, "Role", "demo-planner")["rules"]
    # What it asks of the API server is what its role allows.
    for workload in workloads.values():
        path = scale_path(settings.kubernetes_namespace, workload).split("/")
        assert [path[1], path[2], path[5], path[8]] == ["apis", rule["apiGroups"][0], "serving", "scale"]
        assert f"{path[6]}/scale" in rule["resources"]
        assert path[7] in rule["resourceNames"]
        assert "replicas" not in found(trees, "Deployment", path[7])["spec"]  # an upgrade would set it back
    assert (set(workloads), rule["verbs"]) == ({"prefill", "decode"}, ["get", "patch"])
    assert len(rule["resourceNames"]) == 2
    binding = found(trees, "RoleBinding", "demo-planner")
    assert binding["roleRef"]["name"] == "demo-planner"
    assert [each["name"] for each in binding["subjects"]] == ["demo-planner"]
    # Profiles are where --profile looks, prefill first.
    (volume,) = (each for each in template["spec"]["volumes"] if each["name"] == "profiles")
    data = found(trees, "ConfigMap", "demo-profiles")["data"]
    texts = {item["path"]: data[item["key"]] for item in volume["configMap"]["items"]}
    (mount,) = (each for each in container(template)["volumeMounts"] if each["name"] == "profiles")
    folders = [folder.removeprefix(f"{mount['mountPath']}/") for folder in settings.profile]
    assert [texts[f"{folder}/profile.json"] for folder in folders] == ['{"a": 1}', '{"b": 2}']
    assert environment(template)["PLANNER_PASSWORD"]["valueFrom"]["secretKeyRef"]["key"] == "planner"
    # All other pods have no token.
    others = [pod["spec"] for pod in pods(trees) if pod["spec"] is not template["spec"]]
    assert not any(spec["automountServiceAccountToken"] for spec in others)


def test_a_planner_of_several_nodes_scales_groups_and_a_dry_run_nothing() -> None:
    values = yaml.safe_load(recipe_values("llama4-eagle-gb200"))
    trees = manifests(values | {"planner": {"enabled": True, "dryRun": True}})
    kinds = {rule["resources"][0]: rule["resourceNames"] for rule in found(trees, "Role", "demo-planner")["rules"]}
    assert kinds == {"deployments/scale": ["demo-prefill"], "leaderworkersets/scale": ["demo-decode"]}
    (template,) = templates(found(trees, "Deployment", "demo-planner"))
    settings = parse(PlannerSettings, command_of(template)[1:], prog="plan", environ={})
    assert (settings.connector, settings.profile) == ("dry-run", ("mock",))
    assert found(trees, "LeaderWorkerSet", "demo-decode")["spec"]["replicas"] == 1


def test_traces_are_sent_to_the_collector_and_nothing_else_reaches_it() -> None:
    trees = manifests(TRACED)
    deployment = found(trees, "Deployment", "demo-trace")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    (template,) = templates(found(trees, "Deployment", "demo-trace"))
    argv = command_of(template)
    settings = parse(TraceSettings, argv[1:], prog="trace", environ={})
    assert (argv[0], settings.otlp_endpoint) == ("trace", "http://otel-collector.monitoring:4318/v1/traces")
    assert (settings.sample, settings.since, settings.namespace) == (0.1, "1h", "ps")
    check(settings)
    assert environment(template)["OTEL_EXPORTER_OTLP_HEADERS"]["valueFrom"]["secretKeyRef"]["name"] == "otel"
    to_collector = {"ports": [{"port": 4318}], "to": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]}
    reach = [
        tree["metadata"]["name"]
        for tree in trees
        if tree["kind"] == "NetworkPolicy" and to_collector in tree["spec"].get("egress", [])
    ]
    assert reach == ["demo-trace"]
    assert found(trees, "NetworkPolicy", "demo-trace")["spec"]["ingress"] is None
    for url, port in (("https://otel.example.com/v1/traces", 443), ("http://[2001:db8::1]/v1/traces", 80)):
        policy = found(manifests({"trace": {"enabled": True, "endpoint": url}}), "NetworkPolicy", "demo-trace")
        assert {"ports": [{"port": port}]} in policy["spec"]["egress"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("trace: {enabled: true}", "trace.endpoint: name the URL of the collector"),
        ("trace: {enabled: true, endpoint: collector}", "endpoint"),
        ("trace: {settings: {request: r}}", "request"),
        ("workers: {trace: {}}", "workers.trace: the name is taken"),
    ],
)
def test_an_exporter_of_traces_that_could_not_work_is_refused(values: str, said: str) -> None:
    assert said in refused(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("planner: {enabled: true}\nworkers: {decode: {autoscaling: {enabled: true}}}", "disable one of the two"),
        ("planner: {enabled: true}\nworkers: {decode: {}, more: {role: decode}}", "two pools have the role decode"),
        ("planner: {enabled: true}\nworkers: {encode: {}}", "no pool has a role that it scales"),
        ("planner: {settings: {ttfd: 1}}", "ttfd"),
        ("planner: {settings: {kubernetes-url: x}}", "kubernetes-url"),
    ],
)
def test_a_planner_that_could_not_work_is_refused(values: str, said: str) -> None:
    assert said in refused(values)


def test_a_change_of_engine_arguments_replaces_the_engines() -> None:
    values = recipe_values("llama3")
    before, after = (
        found(manifests(text), "Deployment", "demo-decode")["spec"]["template"]["metadata"]["annotations"]
        for text in (values, values.replace("max_seq_len: 18432", "max_seq_len: 9216"))
    )
    assert before != after


def test_llama_4_decodes_on_two_gb200_trays_whose_leader_serves() -> None:
    values = yaml.safe_load(recipe_values("llama4-eagle-gb200"))
    values["workers"]["decode"] |= {
        "drainSeconds": 120, "nvlinkDomain": True, "topologyKey": "nvidia.com/gpu.clique",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-GB200"},
    }  # fmt: skip
    trees = manifests(values)
    prefill = found(trees, "Deployment", "demo-prefill")
    assert container(prefill["spec"]["template"])["resources"]["limits"]["nvidia.com/gpu"] == "4"
    group = found(trees, "LeaderWorkerSet", "demo-decode")
    assert group["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "nvidia.com/gpu.clique"
    }
    body = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], body["size"], body["restartPolicy"]) == (1, 2, "RecreateGroupOnPodRestart")
    leader, ranks = body["leaderTemplate"], body["workerTemplate"]
    assert container(leader)["command"][:4] == ["bash", "/etc/penstock/scripts/lead.sh", "4", "penstock"]
    settings = parse(WorkerSettings, command_of(leader)[1:], prog="worker", environ={})
    assert (settings.role, settings.model) == ("decode", "nvidia/Llama-4-Maverick-17B-128E-Instruct-FP8")
    args = decode(parse_yaml(found(trees, "ConfigMap", "demo-engine")["data"]["decode.yaml"]))
    assert args.gpus == 4 * body["size"]
    assert args.speculative_config is not None
    # The others only compute: no broker, no work of ours. Their metrics are on a page of each pod's own.
    assert container(ranks)["command"] == ["bash", "/etc/penstock/scripts/follow.sh"]
    for template in (leader, ranks):
        assert environment(template)["PROMETHEUS_MULTIPROC_DIR"]["value"] == "/tmp/metrics"
        assert {port["name"] for port in container(template)["ports"]} >= {"metrics"}
    assert environment(ranks)["METRICS_PORT"]["value"] == "9090"
    assert "PENSTOCK_NATS_URL" not in environment(ranks)
    for template in (leader, ranks):
        only = container(template)
        assert only["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert only["resources"]["claims"] == [{"name": "nvlink"}]
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-GB200"}
        assert environment(template)["SSH_PORT"]["value"] == "2222"
    assert found(trees, "ComputeDomain", "demo-decode-nvlink")["spec"]["numNodes"] == 2
    assert leader["spec"]["terminationGracePeriodSeconds"] == 135
    assert set(found(trees, "ConfigMap", "demo-scripts")["data"]) == {"lead.sh", "follow.sh"}


@pytest.mark.parametrize(("engine", "size"), [("vllm", "tensor_parallel_size"), ("sglang", "tp_size")])
def test_vllm_and_sglang_on_two_pods_find_each_other_and_need_no_ssh(engine: str, size: str) -> None:
    trees = manifests(
        {
            "engineImage": "e",
            "model": "m",
            "workers": {"decode": {"engine": engine, "nodes": 2, "gpus": 8, "engineArgs": f"{size}: 16\n"}},
        }
    )
    body = found(trees, "LeaderWorkerSet", "demo-decode")["spec"]["leaderWorkerTemplate"]
    leader, ranks = body["leaderTemplate"], body["workerTemplate"]
    for index, template in enumerate((leader, ranks)):
        told = {"$(LWS_WORKER_INDEX)": str(index), "$(LWS_LEADER_ADDRESS)": "demo-decode-0.demo-decode.serving"}
        argv = container(template)["args"][1:]
        for variable, value in told.items():
            argv = [word.replace(variable, value) for word in argv]
        settings = parse(WorkerSettings, argv, prog="worker", environ={})
        assert (settings.nodes, settings.node_rank, settings.leader_address) == (
            2, index, "demo-decode-0.demo-decode.serving",
        )  # fmt: skip
        assert container(template)["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert not {"ssh", "scripts"} & {volume["name"] for volume in template["spec"]["volumes"]}
        assert [port["name"] for port in container(template)["ports"]] == ["metrics"]
        assert container(template)["readinessProbe"]["httpGet"]["port"] == "metrics"
    assert "PENSTOCK_NATS_URL" in environment(leader)
    assert "PENSTOCK_NATS_URL" not in environment(ranks)
    assert "demo-scripts" not in named(trees, "ConfigMap")


def test_engines_of_another_s_image_may_write_to_their_root_and_ours_may_not() -> None:
    for recipe, writable in (("llama3", True), ("", False)):
        trees = manifests(recipe_values(recipe))
        for template in pods(trees):
            only = container(template)
            read_only = only["securityContext"].get("readOnlyRootFilesystem")
            assert read_only is not (writable and only["name"] == "worker")


@pytest.mark.parametrize("case", CASES)
def test_pods_may_run_where_a_namespace_demands_the_restricted_standard(case: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/: also those with GPUs."""
    for template in pods(manifests(CASES[case])):
        spec = template["spec"]
        for each in (*spec["containers"], *spec.get("initContainers", ())):
            allowed = each["securityContext"]
            assert (allowed["runAsNonRoot"], allowed["allowPrivilegeEscalation"]) == (True, False)
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {kind for volume in spec.get("volumes", ()) for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "csi", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}


def test_the_release_s_own_brokers_may_run_there_too() -> None:
    data = found(manifests(), "ConfigMap", "demo-nats-values")["data"]
    values = json.loads(data["values"])
    for part in ("container", "reloader"):
        confined = values[part]["merge"]["securityContext"]
        assert (confined["allowPrivilegeEscalation"], confined["capabilities"]) == (False, {"drop": ["ALL"]})
        assert confined["seccompProfile"] == {"type": "RuntimeDefault"}
    assert values["podTemplate"]["merge"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_a_worker_alone_in_its_pod_clears_shared_memory_and_a_rank_beside_others_does_not() -> None:
    """A pod's /dev/shm outlives its containers; ranks of TensorRT-LLM run before the worker does."""
    (alone,) = templates(found(manifests(), "Deployment", "demo-aggregated"))
    assert "--clear-shm" in command_of(alone)
    ranks = [
        template
        for template in pods(manifests(recipe_values("llama4-eagle-gb200")))
        if "mpirun" in str(container(template).get("command"))
    ]
    assert not any("--clear-shm" in str(container(template)) for template in ranks)


def test_pods_get_the_url_of_their_role_with_the_password_from_the_secret() -> None:
    trees = manifests(recipe_values("llama3"))
    for name, user in (("gateway", "gateway"), ("router", "router"), ("prefill", "worker")):
        (template,) = templates(found(trees, "Deployment", f"demo-{name}"))
        found_env = environment(template)
        password = f"{user.upper()}_PASSWORD"
        assert found_env[password]["valueFrom"]["secretKeyRef"] == {"name": "demo-broker", "key": user}
        url = f"nats://{user}:$({password})@demo-nats.serving:4222"
        assert found_env["PENSTOCK_NATS_URL"]["value"] == url
        names = list(found_env)
        assert names.index(password) < names.index("PENSTOCK_NATS_URL")  # Kubernetes expands what stands before
    own = manifests(OWN_NATS)
    assert "demo-broker" not in named(own, "Secret")
    assert not named(own, "ConfigMap")
    (template,) = templates(found(own, "Deployment", "demo-aggregated"))
    assert environment(template)["PENSTOCK_NATS_URL"]["valueFrom"]["secretKeyRef"]["name"] == "nats-urls"


def test_a_pod_gets_the_files_of_its_user_and_of_no_other() -> None:
    trees = manifests(CREDENTIALS)
    assert "password" not in json.dumps(trees).lower()
    for name, users in (
        ("gateway", ["gateway"]), ("router", ["router", "sys"]), ("aggregated", ["worker"]), ("planner", ["planner"]),
        ("trace", ["reader"]),
    ):  # fmt: skip
        (template,) = templates(found(trees, "Deployment", f"demo-{name}"))
        variables = {key: each["value"] for key, each in environment(template).items() if "value" in each}
        mounts = {each["mountPath"]: each["name"] for each in container(template)["volumeMounts"]}
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        authority = volumes[mounts[variables["PENSTOCK_NATS_CA"].removesuffix("/ca.crt")]]
        assert authority["secret"] == {"secretName": "authority", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        assert {each for each in volumes if each.startswith("nats-")} == {
            "nats-ca",
            *(f"nats-{user}" for user in users),
        }
        for user in users:
            prefix = "PENSTOCK_SYS_NATS_" if user == "sys" else "PENSTOCK_NATS_"
            assert variables[f"{prefix}URL"].startswith("tls://nats-1.example.com:4443,")
            files = {}
            for source in volumes[f"nats-{user}"]["projected"]["sources"]:
                secret = source["secret"]
                files |= {item["path"]: (secret["name"], item["key"]) for item in secret["items"]}
            at = {key: variables[f"{prefix}{key}"].split("/") for key in ("CREDS", "CERT", "KEY")}
            assert {mounts["/".join(path[:-1])] for path in at.values()} == {f"nats-{user}"}
            assert files[at["CREDS"][-1]] == ("creds", user)
            assert files[at["CERT"][-1]] == (f"cert-{user[0]}", "tls.crt")
            assert files[at["KEY"][-1]] == (f"cert-{user[0]}", "tls.key")
        to_broker = {"ports": [{"port": 4443}], "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}
        assert to_broker in found(trees, "NetworkPolicy", f"demo-{name}")["spec"]["egress"]
    without = manifests(CREDENTIALS.replace("caSecret:", "systemUser: false\n  caSecret:"))
    (template,) = templates(found(without, "Deployment", "demo-router"))
    assert not any("SYS" in name for name in environment(template))
    assert all(each["name"] != "nats-sys" for each in template["spec"]["volumes"])


def test_every_pod_may_reach_a_nats_of_one_s_own() -> None:
    """The values of `kubernetes render --urls-secret` left no way to the broker."""
    trees = manifests(recipe_values("", engine="mock", urls_secret="urls"))
    policies = [tree for tree in trees if tree["kind"] == "NetworkPolicy"]
    assert len(policies) == 4
    for policy in policies:
        assert {"ports": [{"port": 4222}]} in policy["spec"]["egress"]


def test_the_release_s_own_nats_speaks_tls_where_its_chart_is_told_to() -> None:
    trees = manifests(NATS_TLS)
    every = [pod for pod in pods(trees) if "PENSTOCK_NATS_URL" in environment(pod)]
    assert len(every) == 4
    for pod in every:
        assert environment(pod)["PENSTOCK_NATS_URL"]["value"].endswith("@demo-nats.serving:4333")
        assert environment(pod)["PENSTOCK_NATS_URL"]["value"].startswith("tls://")
        assert environment(pod)["PENSTOCK_NATS_CA"]["value"] == "/etc/penstock/nats/ca/ca.crt"
    allowed = found(trees, "NetworkPolicy", "demo-broker")["spec"]["ingress"][0]["ports"]
    assert allowed == [{"port": 4333}]
    router = next(pod for pod in every if container(pod)["name"] == "router")
    assert environment(router)["PENSTOCK_SYS_NATS_URL"]["value"].startswith("tls://sys:")


def test_an_ingress_publishes_the_api_and_no_metrics_or_docs() -> None:
    (rule,) = found(manifests(EVERYTHING), "Ingress", "demo-gateway")["spec"]["rules"]
    assert {each["path"] for each in rule["http"]["paths"]} == {"/v1", "/tokenize", "/detokenize"}
    everything = manifests({"gateway": {"ingress": {"enabled": True, "paths": ["/"]}}})
    (rule,) = found(everything, "Ingress", "demo-gateway")["spec"]["rules"]
    assert [each["path"] for each in rule["http"]["paths"]] == ["/"]


def test_the_nats_service_is_called_as_its_chart_calls_it() -> None:
    for release, extra, host in (
        ("llm", {}, "llm-nats"),
        ("nats-llm", {}, "nats-llm"),
        ("llm", {"fullnameOverride": "broker"}, "broker"),
    ):
        trees = manifests({"nats": extra}, release=release)
        (template,) = templates(found(trees, "Deployment", f"{release}-gateway"))
        assert f"@{host}.serving:4222" in environment(template)["PENSTOCK_NATS_URL"]["value"]


# -- scaling, monitoring ----------------------------------------------------------------------------------------------


def test_queues_scale_pools_by_a_metric_that_exists() -> None:
    trees = manifests(EVERYTHING)
    scaler = found(trees, "HorizontalPodAutoscaler", "demo-decode")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "demo-decode"}
    (metric,) = scaler["metrics"]
    labels = {"kubernetes_namespace": "serving", "namespace": "ps", "release": "demo"}
    assert metric["external"]["metric"] == {
        "name": "penstock_gateway_queued_requests", "selector": {"matchLabels": labels},
    }  # fmt: skip
    matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
    scaled = found(trees, "ScaledObject", "demo-prefill")["spec"]
    series = f"penstock_gateway_queued_requests{{{matchers}}}"
    assert scaled["triggers"][0]["metadata"]["query"] == f"sum(max by (namespace, model) ({series}))"
    # Every label that is selected by is one that the processes or the PodMonitor give to their series.
    relabelings = found(trees, "PodMonitor", "demo-monitoring")["spec"]["podMetricsEndpoints"][0]["relabelings"]
    assert {*labels, "pool"} <= {"namespace", "model"} | {each["targetLabel"] for each in relabelings}
    gateways = found(trees, "HorizontalPodAutoscaler", "demo-gateway")["spec"]
    names = {metric["external"]["metric"]["name"] for spec in (scaler, gateways) for metric in spec["metrics"]}
    assert names <= known()
    # The autoscaler alone says how many there are.
    for name in ("gateway", "prefill", "decode"):
        assert "replicas" not in found(trees, "Deployment", f"demo-{name}")["spec"]
    assert found(trees, "Deployment", "demo-draw")["spec"]["replicas"] == 1
    group = manifests(CASES["a multi-node engine that is scaled"])
    target = found(group, "HorizontalPodAutoscaler", "demo-decode")["spec"]["scaleTargetRef"]
    assert target["kind"] == "LeaderWorkerSet"
    assert target["name"] in named(group, "LeaderWorkerSet")


def test_pools_of_several_models_are_behind_the_same_gateways() -> None:
    trees = manifests(SEVERAL)
    (template,) = templates(found(trees, "Deployment", "demo-gateway"))
    gateway = parse(GatewaySettings, command_of(template)[1:], prog="p", environ={})
    wanted = ("llama llama-3=/models/llama", "Qwen/Qwen3-8B=Qwen/Qwen3-8B", "small=/models/gemma")
    assert sorted(gateway.model) == sorted(wanted)
    assert gateway.served_model_name == ""
    workers = {}
    for name in ("llama-prefill", "llama-decode", "qwen", "gemma", "vectors"):
        (template,) = templates(found(trees, "Deployment", f"demo-{name}"))
        settings = parse(WorkerSettings, command_of(template)[1:], prog="p", environ={})
        workers[name] = (settings.role, settings.model, settings.served_model_name)
    assert workers == {
        "llama-prefill": ("prefill", "/models/llama", "llama,llama-3"),
        "llama-decode": ("decode", "/models/llama", "llama,llama-3"),
        "qwen": ("aggregated", "Qwen/Qwen3-8B", ""),
        "gemma": ("aggregated", "/models/gemma", "small"),
        "vectors": ("embed", "/models/minilm", ""),
    }


def test_a_pool_is_scaled_by_the_queue_of_its_own_model_where_there_are_several() -> None:
    trees = manifests(SEVERAL)
    (metric,) = found(trees, "HorizontalPodAutoscaler", "demo-llama-prefill")["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"]["model"] == "llama"
    (trigger,) = found(trees, "ScaledObject", "demo-qwen")["spec"]["triggers"]
    assert 'model="Qwen/Qwen3-8B"' in trigger["metadata"]["query"]
    (running,) = found(trees, "HorizontalPodAutoscaler", "demo-llama-decode")["spec"]["metrics"]
    assert "model" not in running["external"]["metric"]["selector"]["matchLabels"], "its own series have the pool"


def test_the_planner_scales_the_pools_of_the_release_s_own_model() -> None:
    planned = SEVERAL.replace("autoscaling: {enabled: true}", "").replace(", autoscaling: {enabled: true, metric: "
        "penstock_worker_running}", "").replace("engine: mock, }", "engine: mock}")  # fmt: skip
    trees = manifests(planned + "planner: {enabled: true}\n")
    (template,) = templates(found(trees, "Deployment", "demo-planner"))
    settings = parse(PlannerSettings, command_of(template)[1:], prog="p", environ={})
    assert settings.model == "llama"
    assert sorted(settings.kubernetes_workloads) == [
        "decode=deployment/demo-llama-decode", "prefill=deployment/demo-llama-prefill",
    ]  # fmt: skip
    assert "replicas" not in found(trees, "Deployment", "demo-llama-decode")["spec"]
    assert found(trees, "Deployment", "demo-gemma")["spec"]["replicas"] == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_pool_without_workers_starts_one_when_its_model_is_asked_for(several: bool, tmp_path: Path) -> None:
    more = "  qwen: {engine: mock, model: Qwen/Qwen3-8B, autoscaling: *zero}\nmonitoring"
    trees = manifests(TO_ZERO.replace("monitoring", more) if several else TO_ZERO)
    (template,) = templates(found(trees, "Deployment", "demo-gateway"))
    assert parse(GatewaySettings, command_of(template)[1:], prog="p", environ={}).ready_without_workers
    at = {"release": "demo", "kubernetes_namespace": "serving"}
    gauge, tests = "penstock_gateway_model_idle_seconds", []
    for pool, model in (("prefill", "llama"), ("decode", "llama"), ("qwen", "Qwen/Qwen3-8B"))[: 3 if several else 2]:
        scaled = found(trees, "ScaledObject", f"demo-{pool}")["spec"]
        assert scaled["minReplicaCount"] == 0
        _, asked = (each["metadata"] for each in scaled["triggers"])
        assert asked["threshold"] == "1", "it asks for one worker, and the other trigger for more"
        for name, idle, value in ((model, "600 Inf 3", 1), (model, "600 Inf 121", 0), ("gone", "_ _ _", 0)):
            labels = at | {"model": name}
            series = [(labels | {"process": "gateway-0"}, "Inf _ Inf"), (labels | {"process": "gateway-1"}, idle)]
            series += [({**labels, "release": "other"}, "0 0 0")] + [({**at, "model": "else"}, "0 0 0")] * several
            tests.append({
                "interval": "1m",
                "input_series": [
                    {"series": gauge + "{" + ",".join(f'{k}="{v}"' for k, v in own.items()) + "}", "values": values}
                    for own, values in series
                ],
                "promql_expr_test": [
                    {"expr": asked["query"], "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": value}]}
                ],
            })  # fmt: skip
    assert gauge in known()
    check_rules({"evaluation_interval": "1m", "tests": tests}, tmp_path)


def by_adapter(metric: Tree) -> str:
    """The query that the Prometheus adapter makes of an external metric, by the rules in the chart's README."""
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    (rules,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(rules:.*?)```", readme, re.DOTALL))
    for rule in rules["rules"]["external"]:
        wanted = re.fullmatch(r'\{__name__=~"(.*)"\}', rule["seriesQuery"])
        if re.fullmatch(wanted[1] if wanted else rule["seriesQuery"], metric["name"]):
            matchers = ",".join(f'{name}="{value}"' for name, value in metric["selector"]["matchLabels"].items())
            query = rule["metricsQuery"].replace("<<.Series>>", metric["name"])
            return str(query.replace("<<.LabelMatchers>>", matchers))
    raise AssertionError(f"no rule for {metric['name']}")


def test_a_queue_counts_once_and_a_release_is_not_scaled_by_another(tmp_path: Path) -> None:
    """Two gateways showed 70 waiting requests where 35 waited, and releases with one namespace scaled each other."""
    running = {"enabled": True, "metric": "penstock_worker_running"}
    values = {
        "gateway": {"autoscaling": {"enabled": True}},
        "workers": {"aggregated": {"autoscaling": {"enabled": True}}, "decode": {"autoscaling": running}},
        "monitoring": {"scraped": True},
    }
    adapter = {}
    for tree in manifests(values):
        if tree["kind"] == "HorizontalPodAutoscaler":
            (metric,) = tree["spec"]["metrics"]
            adapter[tree["metadata"]["name"].removeprefix("demo-")] = by_adapter(metric["external"]["metric"])
    for pool in (values["gateway"], *values["workers"].values()):
        pool["autoscaling"]["kind"] = "keda"  # type: ignore[index]
    keda = {
        tree["metadata"]["name"].removeprefix("demo-"): tree["spec"]["triggers"][0]["metadata"]["query"]
        for tree in manifests(values)
        if tree["kind"] == "ScaledObject"
    }
    series, at = [], {"namespace": "ps", "model": "m"}
    for release, factor in (("demo", 1), ("other", 100)):
        place = at | {"release": release, "kubernetes_namespace": "serving"}
        for process, opened in (("gateway-0", 3), ("gateway-1", 4)):
            own = place | {"process": process, "pool": "gateway"}
            series += [("penstock_gateway_queued_requests", own, 35 * factor)]
            series += [("penstock_gateway_open_requests", own, opened * factor)]
        for pool in ("aggregated", "decode", "decode"):
            own = place | {"process": f"{pool}-{len(series)}", "pool": pool}
            series += [("penstock_worker_running", own, 5 * factor)]
    expected = {"gateway": 7, "aggregated": 35, "decode": 10}
    assert set(adapter) == set(keda) == set(expected)
    tests = {
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": [
                {"series": name + "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}", "values": str(value)}
                for name, labels, value in series
            ],
            "promql_expr_test": [
                {"expr": queries[name], "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": value}]}
                for queries in (adapter, keda)
                for name, value in expected.items()
            ],
        }],
    }  # fmt: skip
    check_rules(tests, tmp_path)


def check_rules(tests: Tree, folder: Path) -> None:
    """What Prometheus makes of expressions."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    (folder / "test.yml").write_text(yaml.safe_dump(tests), encoding="utf-8")
    command = [promtool, "test", "rules", folder / "test.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


OWN = 'kubernetes_namespace="serving",release="demo"'
VOLUMES = 'namespace="serving",persistentvolumeclaim=~"demo-nats-js-demo-nats-[0-9]+"'


def for_all(groups: Any) -> Any:
    """A release's rules without what limits them to it."""
    text = yaml.safe_dump(groups, width=10_000).replace("{" + OWN + "}", "").replace(OWN + ",", "")
    return yaml.safe_load(text.replace(VOLUMES, 'persistentvolumeclaim=~".*-nats-js-.*"'))


def test_a_release_s_alerts_ask_for_its_own_series_only() -> None:
    """With two releases in a cluster, each alert came from both, also where one release had other thresholds."""
    (group,) = found(manifests(EVERYTHING), "PrometheusRule", "demo-monitoring")["spec"]["groups"]
    asked = 0
    for rule in group["rules"]:
        # `by` and `on` have names of labels, and what is quoted has none of series.
        expr = re.sub(r"\b(by|on) \([^)]*\)", "", rule["expr"])
        selectors = re.findall(r"(?:\b(?:penstock|kubelet)_\w+|\bup|(?<=\())(\{[^}]*\})", expr)
        series = re.findall(r"\b(?:penstock_|kubelet_)\w+|\bup\b|__name__", re.sub(r'"[^"]*"', "", expr))
        if "node_filesystem" in expr:  # of hosts, which have no releases
            continue
        assert len(selectors) >= 1
        capacity = [name for name in series if name == "kubelet_volume_stats_capacity_bytes"]  # matched by its labels
        assert len(selectors) == len(series) - len(capacity), expr
        assert all(OWN in each or VOLUMES in each for each in selectors), expr
        asked += len(selectors)
    assert asked > len(group["rules"])
    elsewhere = {**yaml.safe_load(CREDENTIALS), "monitoring": {"rules": {"enabled": True}, "scraped": True}}
    rules = found(manifests(elsewhere), "PrometheusRule", "demo-monitoring")["spec"]["groups"][0]["rules"]
    assert any('{persistentvolumeclaim=~".*-nats-js-.*"}' in rule["expr"] for rule in rules)


def test_dashboards_and_alerts_are_those_of_the_monitoring_folder() -> None:
    trees = manifests(EVERYTHING)
    rules = for_all(found(trees, "PrometheusRule", "demo-monitoring")["spec"]["groups"])
    assert rules == yaml.safe_load(ALERTS.read_text())["groups"]
    own = {"enabled": True, "thresholds": {"ttft": 2, "late": 1.5, "failedBudget": 0.001, "slowWorker": 8}}
    trees_changed = manifests({"monitoring": {"rules": own, "scraped": True}})
    changed = for_all(found(trees_changed, "PrometheusRule", "demo-monitoring")["spec"]["groups"])
    thresholds = Thresholds(ttft=2, late=1.5, failed_budget=0.001, slow_worker=8)
    assert changed == yaml.safe_load(alert_rules(thresholds))["groups"] != rules
    boards = found(trees, "ConfigMap", "demo-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in boards["data"].items()} == {
        f"penstock-{path.name}": json.loads(path.read_text()) for path in GRAFANA.glob("*.json")
    }
    monitor = found(trees, "PodMonitor", "demo-monitoring")["spec"]
    scraped = {each["port"] for each in monitor["podMetricsEndpoints"]}
    running = [pod for pod in pods(trees) if container(pod).get("ports")]
    assert all(selects(monitor["selector"], pod) for pod in running)
    assert {port["name"] for pod in running for port in container(pod)["ports"]} == scraped
    # The alert on processes that are down asks for this job.
    assert 'up{job="penstock",' in ALERTS.read_text()
    assert all(pod["metadata"]["labels"][monitor["jobLabel"]] == "penstock" for pod in running)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers: {prefill: {engine: trtllm}}", "engineImage: name the image with penstock and trtllm"),
        ("engineImage: e\nworkers: {prefill: {engine: trtllm}}", "workers.prefill.model: name a directory"),
        ("workers: {draw: {role: diffusion}}", "workers.draw.model: name a directory"),
        ("workers: {decode: {engineArgs: 'a: 1'}}", "read by trtllm, vllm and sglang, not by native"),
        ("workers: {decode: {nodes: 2}}", "only trtllm, vllm and sglang run one engine over several nodes"),
        ("workers: {decode: {nvlinkDomain: true}}", "are for engines of several nodes"),
        (
            "workers: {a: {engine: mock, model: /models/x/m}, b: {engine: mock, model: /models/y/m}}",
            "would both be called m; give one a servedModelName of its own",
        ),
        ("workers: {gateway: {}}", "workers.gateway: the name is taken"),
        (
            "engineImage: e\nmodel: m\nworkers: {decode: {engine: vllm, gpus: 2}}",
            "workers.decode.gpus: 2 x 1 nodes, the engine's arguments ask for 1",
        ),
        ("engineImage: e\nmodel: m\nworkers: {decode: {engine: vllm, engineArgs: '{'}}", "workers.decode.engineArgs: "),
        ("nats: {enabled: false}", "broker.urlsSecret: name the Secret"),
        ("nats: {enabled: false}\nbroker: {url: 'tls://n:4222'}", "broker.url has no credentials"),
        ("nats: {enabled: false}\nbroker: {url: 'tls://u:p@n:4222'}", "url"),
        (
            "nats: {enabled: false}\nbroker: {url: 'tls://n:4222', urlsSecret: u, credsSecret: c}",
            "url and urlsSecret exclude each other",
        ),
        (
            "nats: {enabled: false}\nbroker: {url: 'tls://n:4222', nkeysSecret: k, credsSecret: c}",
            "credsSecret and nkeysSecret exclude each other",
        ),
        (
            "nats: {enabled: false}\nbroker: {url: 'tls://n:4222', certSecrets: {gateway: g}}",
            "name the Secret with this user's certificate",
        ),
        ("nats: {config: {nats: {tls: {enabled: true}}}}", "nats.config.nats.tls.secretName: name the Secret"),
        (NATS_TLS.replace("broker: {caSecret: nats-tls}", ""), "broker.caSecret: name the Secret"),
        (
            "workers: {a: {engine: mock, autoscaling: {enabled: true, kind: keda}}}",
            "workers.a.autoscaling: it reads penstock_gateway_queued_requests from Prometheus, and nothing collects",
        ),
        (TO_ZERO.replace("keda", "hpa"), "autoscaling.minReplicas: 0 is for pools of language models with kind: keda"),
        (TO_ZERO.replace("engine: mock", "role: embed, model: m"), "minReplicas: 0 is for pools of language models"),
        ("gateway: {autoscaling: {enabled: true}}", "gateway.autoscaling: it reads penstock_gateway_open_requests"),
        ("broker: {caSecret: ca}", "broker.caSecret: the NATS of the release has no TLS"),
        (
            "nats: {enabled: false}\nbroker: {url: 'tls://a:1,nats://b:1', credsSecret: c, caSecret: ca}",
            "broker.caSecret: it is for TLS, and broker.url has nats://b:1; write tls://",
        ),
        (
            CREDENTIALS.replace("  caSecret: authority\n", "").replace("tls://nats-1", "nats://nats-1"),
            "broker.certSecrets: it is for TLS, and broker.url has nats://nats-1.example.com:4443",
        ),
        ("gateway: {autoscaling: {enabled: true, minReplicas: 9}}", "minReplicas 9 is above maxReplicas 4"),
        ("gateway: {settings: {nope: 1}}", "nope"),
        ("gateway: {settings: {http-port: 9}}", "http-port"),
        ("router: {settings: {mode: best}}", "mode"),
        ("workers: {aggregated: {settings: {kv-blocks: abc}}}", "kv-blocks"),
        ("workers: {decode: {replica: 2}}", "replica"),
        ("models: {size: much}", "size"),
        ("namespace: Upper", "namespace"),
        ("gateway: {autoscaling: {metric: requests}}", "metric"),
        ("monitoring: {rules: {thresholds: {late: 4}}}", "late"),
        ("monitoring: {rules: {enabled: true}}", "monitoring.rules: the alerts ask for the series of this release"),
        (
            "monitoring: {scraped: true, rules: {enabled: true, thresholds: {lateBudget: 0.2}}}",
            "thresholds.lateBudget: its burn alerts could never fire",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, says: str) -> None:
    assert says in refused(text)


def test_an_engine_s_arguments_decide_its_gpus() -> None:
    trees = manifests(
        "engineImage: e\nmodel: m\nworkers:\n  aggregated:\n    engine: vllm\n"
        "    engineArgs: |\n      tensor_parallel_size: 4\n      data_parallel_size: 2\n"
    )
    (template,) = templates(found(trees, "Deployment", "demo-aggregated"))
    assert container(template)["resources"]["limits"]["nvidia.com/gpu"] == "8"
