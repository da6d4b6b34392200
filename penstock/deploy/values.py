"""The values of the Helm chart: every key with its type, default and meaning.

``penstock/values.yaml`` has the same keys and defaults for readers, ``penstock/values.schema.json`` is made from here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from penstock.configs.settings import Common, GatewaySettings, RouterSettings, WorkerSettings
from penstock.infra.metrics.scope import FIRST_TOKEN_SECONDS
from penstock.schemas.streams import LONGEST_DEADLINE_S
from penstock.schemas.subjects import Namespace

PoolName = Annotated[str, Meta(pattern=r"^[a-z]([-a-z0-9]{0,20}[a-z0-9])?$")]
Count = Annotated[int, Meta(ge=1)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kKMGTPE]i?)?$")]
Seconds = Annotated[int, Meta(ge=1, le=7 * 86_400)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Metric = Annotated[str, Meta(pattern="^penstock_[a-z_]+$")]
User = Literal[
    "gateway", "router", "worker", "reader", "planner", "operator", "sys"
]  # of the broker, whom pods log in as
Role = Literal["aggregated", "prefill", "decode", "encode", "diffusion", "embed"]
Engine = Literal["native", "mock", "trtllm", "vllm", "sglang"]
Tree = Mapping[str, Any]  # as Kubernetes has it

# What probes, services, volumes and the other processes rely on: the chart sets it, and ``settings`` must not.
SETTLED = {
    *("name", "nats_url", "sys_nats_url", "namespace", "log_format", "log_level", "listen_fd"),
    *("cells", "cell_nats_urls"),
    *(
        "http_host",
        "http_port",
        "require_keys",
        "insecure",
        "metrics_host",
        "metrics_port",
        "drain_s",
        "ready_without_workers",
        "publish_events_and_metrics",
    ),
    *("role", "engine", "model", "served_model_name", "block_size", "extra_engine_args"),
    *("nodes", "node_rank", "leader_address"),
}
# Of `penstock plan`, whose workloads follow from the pools.
SETTLED_OF_PLANNER = {
    *("connector", "data_dir", "history", "since", "json", "decisions"),
    *("kubernetes_url", "kubernetes_namespace", "kubernetes_workloads"),
}
SETTLED_OF_TRACE = {"cells", "cell_nats_urls", "data_dir", "file", "skip_bad", "otlp_endpoint", "once"}
KINDS: Mapping[str, type[Common]] = {"gateway": GatewaySettings, "router": RouterSettings, "worker": WorkerSettings}


def about(text: str) -> Meta:
    return Meta(description=text)


class ValuesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A mapping among the values."""


class Autoscaling(ValuesSection, frozen=True, kw_only=True):
    enabled: bool = False
    kind: Annotated[
        Literal["hpa", "keda"],
        about("hpa: a HorizontalPodAutoscaler, which needs an adapter for external metrics; keda: a ScaledObject"),
    ] = "hpa"
    min_replicas: Annotated[
        int, Meta(ge=0, description="0, with kind: keda, for language models: none while nobody asks for the model")
    ] = 1
    max_replicas: Count = 4
    metric: Annotated[
        Metric,
        about(
            "gauge of docs/metrics.md; its sum over the processes of the release is compared with the target, of a "
            "worker's over its pool. Every gateway reports the whole queue, which counts once"
        ),
    ]
    model: Annotated[
        str, about("label `model` of the metric; default: the pool's where there are several, else any of the release")
    ] = ""
    target: Annotated[int, Meta(ge=1, description="of the metric, for each replica")]
    scale_down_seconds: Annotated[Seconds, about("how long the metric must be low before pods are removed")] = 300


class Disruption(ValuesSection, frozen=True, kw_only=True):
    enabled: bool = True
    max_unavailable: Annotated[int | str, about("pods that may be evicted at a time")] = 1


class PodValues(ValuesSection, frozen=True, kw_only=True):
    """What all pods have."""

    image: Annotated[str, about("default: `image`; of a pool: as its engine needs")] = ""
    env: Annotated[tuple[Tree, ...], about("further variables, as Kubernetes has them")] = ()
    extra_volumes: Annotated[tuple[Tree, ...], about("further volumes of the pod, as Kubernetes has them")] = ()
    extra_volume_mounts: Annotated[tuple[Tree, ...], about("where they are in the container")] = ()
    pod_annotations: Mapping[str, str] = {}
    pod_labels: Mapping[str, str] = {}
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Tree, ...] = ()
    affinity: Tree = {}
    topology_spread_constraints: tuple[Tree, ...] = ()
    priority_class_name: str = ""
    pod_disruption_budget: Disruption = Disruption()


class RouterValues(PodValues, frozen=True, kw_only=True):
    replicas: Count = 2
    cpu: Quantity = "2"
    memory: Annotated[Quantity, about("requested, and the limit")] = "4Gi"
    settings: Annotated[Tree, about("flags of `penstock router` without their dashes, as in `mode: kv`")] = {}


class PlannerValues(PodValues, frozen=True, kw_only=True):
    """Scales the pools of the language model `model` by load and latency limits: `penstock plan`."""

    enabled: bool = False
    dry_run: Annotated[bool, about("decide and log, but change nothing")] = False
    cpu: Quantity = "500m"
    memory: Annotated[Quantity, about("requested, and the limit")] = "1Gi"
    profiles: Annotated[
        Mapping[PoolName, str],
        about(
            "what a worker can do, by role: text of the profile.json of `penstock profile endpoint`; default: "
            "`settings.profile`"
        ),
    ] = {}
    settings: Annotated[Tree, about("flags of `penstock plan` without their dashes, as in `ttft: 800`")] = {}


class TraceValues(PodValues, frozen=True, kw_only=True):
    """Sends a trace of each request to an OpenTelemetry collector: `penstock trace`. For its headers see `env`."""

    enabled: bool = False
    endpoint: Annotated[
        str,
        Meta(
            pattern="^(https?://[^/]+.*)?$",
            description="OTLP/HTTP URL of the collector, as in http://otel-collector.monitoring:4318/v1/traces",
        ),
    ] = ""
    peers: Annotated[
        tuple[Tree, ...], about("where it is, as a NetworkPolicy's `to`; default: any address, on the port of the URL")
    ] = ()
    cpu: Quantity = "500m"
    memory: Annotated[Quantity, about("requested, and the limit")] = "1Gi"
    settings: Annotated[Tree, about("flags of `penstock trace` without their dashes, as in `sample: 0.1`")] = {}


class Service(ValuesSection, frozen=True, kw_only=True):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Annotated[int, Meta(ge=1, le=65535)] = 80
    annotations: Mapping[str, str] = {}


class Ingress(ValuesSection, frozen=True, kw_only=True):
    enabled: bool = False
    class_name: str = ""
    annotations: Annotated[
        Mapping[str, str], about("of the controller; it must not buffer text/event-stream, nor end slow answers")
    ] = {}
    hosts: tuple[str, ...] = ("penstock.example.com",)
    paths: Annotated[
        tuple[Annotated[str, Meta(pattern="^/")], ...],
        about("prefixes that are published; the Service also has /metrics, /docs and /health"),
    ] = ("/v1", "/tokenize", "/detokenize")
    tls: Annotated[tuple[Tree, ...], about("as an Ingress has it: secretName, hosts")] = ()


class GatewayValues(PodValues, frozen=True, kw_only=True):
    replicas: Count = 2
    cpu: Quantity = "2"
    memory: Annotated[Quantity, about("requested, and the limit")] = "4Gi"
    drain_seconds: Annotated[Seconds, about("that open requests may take to finish")] = 30
    require_keys: Annotated[
        bool,
        about("refuse requests without an API key; false: the Service is open to anyone until the first key exists"),
    ] = True
    settings: Annotated[Tree, about("flags of `penstock gateway` without their dashes, as in `max-queue: 512`")] = {}
    service: Service = Service()
    ingress: Ingress = Ingress()
    autoscaling: Autoscaling = Autoscaling(metric="penstock_gateway_open_requests", target=200)


class WorkerDefaults(PodValues, frozen=True, kw_only=True):
    """What a pool of ``workers`` leaves out."""

    role: Annotated[Role | Literal[""], about('default: the name of the pool, or "aggregated"')] = ""
    engine: Engine = "native"
    model: Annotated[str, about("default: `model`; pools with another language model are behind the same address")] = ""
    served_model_name: Annotated[
        str, about("names that clients use; default: `servedModelName`, or the model's own where the pool names one")
    ] = ""
    replicas: Annotated[Count, about("engines")] = 1
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("of each pod; default: what the engine arguments ask for over all nodes, 1 for native, 0 for mock"),
    ] = None
    nodes: Annotated[
        Count, about("pods that together are one engine; more than one: trtllm, vllm, sglang, by LeaderWorkerSet")
    ] = 1
    engine_args: Annotated[str, about("trtllm, vllm, sglang: text of the engine arguments")] = ""
    settings: Annotated[Tree, about("flags of `penstock worker` without their dashes, as in `max-running: 64`")] = {}
    drain_seconds: Annotated[Seconds, about("that running requests may take to finish")] = 30
    load_seconds: Annotated[Seconds, about("that weights may take to load")] = 3600
    cpu: Quantity = "16"
    memory: Annotated[Quantity, about("requested, and the limit")] = "64Gi"
    shared_memory: Annotated[Quantity, about("size of /dev/shm, which counts as memory")] = "16Gi"
    resources: Annotated[Mapping[str, int | str], about("further ones of each pod, such as `rdma/ib: 1`")] = {}
    read_only_root_filesystem: Annotated[
        bool | None, about("default: yes for native and mock, no for the others, which compile at run time")
    ] = None
    nvlink_domain: Annotated[
        bool, about("the pods of an engine share memory over NVLink across nodes (GB200): needs NVIDIA's DRA driver")
    ] = False
    topology_key: Annotated[str, about("node label; each engine's pods are placed where it has one value")] = ""
    autoscaling: Autoscaling = Autoscaling(metric="penstock_gateway_queued_requests", target=4)


class CellValues(ValuesSection, frozen=True, kw_only=True):
    """Cells of the deployment: each has its own streams, and routers and pools of `workers` with this many replicas."""

    count: Annotated[int, Meta(ge=1, le=64)] = 1
    placement_tags: Annotated[
        tuple[Annotated[str, Meta(pattern="^[^,]+$")], ...],
        about(
            "of each cell in turn: tags of the NATS servers that keep its streams, several separated by semicolons; "
            "the servers of the release are tagged with the names of their pods, RELEASE-nats-0 and so on. Default: any"
        ),
    ] = ()
    urls_secrets: Annotated[
        tuple[str, ...],
        about(
            "of each cell after the first, if it has its own NATS: Secret with its URL under each user, as in "
            "`broker.urlsSecret`; semicolons between several URLs of one. Default: that of the first"
        ),
    ] = ()


class Streams(ValuesSection, frozen=True, kw_only=True):
    replicas: Annotated[int, Meta(ge=1, le=5, description="copies of each stream; at most one per NATS server")] = 3
    record: Annotated[bool, about("keep tokens, jobs and KV events for 7 days, as records are, for replay")] = False


class Broker(ValuesSection, frozen=True, kw_only=True):
    make_passwords: Annotated[
        bool, about("make the Secret RELEASE-broker, with a password per user, and keep it; false: it exists")
    ] = True
    urls_secret: Annotated[
        str,
        about(
            "for a NATS of your own (`nats.enabled: false`): Secret with a URL under each of gateway, router, worker, "
            "operator, under planner and reader if these run, and, if there is one, sys"
        ),
    ] = ""
    url: Annotated[
        str,
        Meta(pattern="^((nats|tls)://[^@]+)?$"),
        about("or its URLs without credentials, comma-separated; one of the Secrets below has these"),
    ] = ""
    creds_secret: Annotated[str, about("Secret with a credentials file (JWT and seed) under each of these users")] = ""
    nkeys_secret: Annotated[str, about("Secret with the seed of an nkey under each of these users")] = ""
    cert_secrets: Annotated[
        Mapping[User, str], about("Secrets with client certificates (tls.crt, tls.key), by user")
    ] = {}
    ca_secret: Annotated[
        str,
        about(
            "Secret whose ca.crt has the authorities of the servers' certificates, for URLs with tls://; default: the "
            "system's"
        ),
    ] = ""
    second: Annotated[
        bool,
        about("of the NATS of the release: pods log in as the other user of their role, while passwords are changed"),
    ] = False
    system_user: Annotated[
        bool, about("routers log in to the system account as sys, too, to notice at once when a worker's link breaks")
    ] = True
    ports: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65535)], ...],
        about("of a NATS of your own: what network policies let all pods reach"),
    ] = (4222,)
    peers: Annotated[
        tuple[Tree, ...], about("where it is, as a NetworkPolicy's `to`; default: any address, on these ports")
    ] = ()


class Models(ValuesSection, frozen=True, kw_only=True):
    """The volume of weights, which workers and gateways mount at /models."""

    enabled: Annotated[bool, about("false: an empty folder in each pod, for the demo model")] = True
    existing_claim: Annotated[str, about("default: a claim is made, and kept when the release is deleted")] = ""
    size: Quantity = "1Ti"
    storage_class: str = ""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany"] = "ReadWriteMany"


class Hub(ValuesSection, frozen=True, kw_only=True):
    existing_secret: Annotated[str, about("Secret whose key `token` fetches models from the Hugging Face hub")] = ""
    token: Annotated[str, about("or the token itself, for a Secret that is made of it")] = ""


class NetworkPolicy(ValuesSection, frozen=True, kw_only=True):
    enabled: bool = True
    clients: Annotated[tuple[Tree, ...], about("who reaches gateways, as a NetworkPolicy's `from`; default: all")] = ()
    nats_clients: Annotated[
        tuple[Tree, ...], about("who else reaches the NATS of the release, such as clients of the NATS API")
    ] = ()
    monitoring: Annotated[
        tuple[Tree, ...], about("who reads metrics, as a NetworkPolicy's `from`; default: all of the cluster")
    ] = ()
    internet: Annotated[
        bool, about("gateways and workers may fetch images and models: TCP 80 and 443 to any address")
    ] = True
    egress: Annotated[tuple[Tree, ...], about("further rules for all pods")] = ()


class PodMonitor(ValuesSection, frozen=True, kw_only=True):
    enabled: Annotated[bool, about("needs the Prometheus operator")] = False
    labels: Annotated[Mapping[str, str], about("that your Prometheus selects")] = {}
    interval: Annotated[str, Meta(pattern="^[0-9]+(ms|s|m)$")] = "15s"


class Switch(ValuesSection, frozen=True, kw_only=True):
    enabled: bool = False
    labels: Mapping[str, str] = {}


class Thresholds(ValuesSection, frozen=True, kw_only=True):
    """From which values on alerts fire; ``penstock monitoring`` has the same as flags.

    A budget is the share of requests that may be bad in a month. Alerts on its burn rate compare two windows, so that
    they begin soon and end soon after the cause.
    """

    ttft: Annotated[float, Meta(gt=0, description="seconds to the first token, P95 over ten minutes")] = 5.0
    itl: Annotated[float, Meta(gt=0, description="seconds between two tokens, P99 over ten minutes")] = 0.5
    failed: Annotated[Share, about("share of the requests that fail, over five minutes")] = 0.05
    failed_budget: Annotated[Share, about("share of the requests that may fail in a month")] = 0.01
    late: Annotated[
        float,
        Meta(
            description="seconds after which a first token is late: a bucket of penstock_gateway_ttft_seconds",
            extra_json_schema={"enum": [bound for bound in FIRST_TOKEN_SECONDS if bound < LONGEST_DEADLINE_S]},
        ),
    ] = 3.0
    late_budget: Annotated[Share, about("share of the first tokens that may be late in a month")] = 0.05
    burn_fast: Annotated[
        float, Meta(ge=1, description="times the rate that uses a budget up in a month, over 1 h and 5 min: critical")
    ] = 14.4
    burn_slow: Annotated[float, Meta(ge=1, description="the same over 6 h and 30 min: a warning")] = 6.0
    broker_mount: Annotated[
        str,
        Meta(
            pattern='^[^"$]+$',
            description="mount points of brokers' disks on hosts with node_exporter, as a regular expression; / if "
            "they have no file system of their own",
        ),
    ] = "/var/lib/(nats|penstock).*"
    slow_worker: Annotated[float, Meta(gt=1, description="times slower than its peers that a worker may be")] = 4.0


class AlertValues(Switch, frozen=True, kw_only=True):
    thresholds: Thresholds = Thresholds()


class Monitoring(ValuesSection, frozen=True, kw_only=True):
    pod_monitor: PodMonitor = PodMonitor()
    rules: Annotated[AlertValues, about("PrometheusRule with the alerts of docs/monitoring.md")] = AlertValues()
    dashboards: Annotated[Switch, about("ConfigMap with the Grafana dashboards, for Grafana's sidecar")] = Switch(
        labels={"grafana_dashboard": "1"}
    )
    scraped: Annotated[
        bool, about("your Prometheus finds the pods without the PodMonitor, with its labels for autoscaling and rules")
    ] = False
    prometheus: Annotated[str, about("URL that KEDA asks")] = "http://prometheus-operated.monitoring:9090"


class Values(ValuesSection, frozen=True, kw_only=True):
    """All of ours. Helm adds ``global`` and, for the dependency, ``nats``."""

    image: Annotated[str, about("of gateways, routers and mock workers; see docs/containers.md")] = (
        "registry.example.com/penstock:0.1.0"
    )
    native_image: Annotated[str, about("of workers with the native engine, also of images and videos")] = (
        "registry.example.com/penstock-native:0.1.0"
    )
    engine_image: Annotated[str, about("of workers with trtllm, vllm or sglang")] = ""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[Tree, ...] = ()
    namespace: Annotated[Namespace, about("prefix of all NATS subjects and streams")] = "ps"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    model: Annotated[str, about("directory on the models volume or Hugging Face id; default: demo model")] = ""
    served_model_name: Annotated[str, about("name that clients use; default: the model's")] = ""
    block_size: Annotated[Count, about("tokens per KV block, the same for all workers of the language model")] = 32
    gateway: GatewayValues = GatewayValues()
    router: RouterValues = RouterValues()
    planner: PlannerValues = PlannerValues()
    trace: TraceValues = TraceValues()
    workers: Annotated[
        Mapping[PoolName, Mapping[str, Any]],
        about("pools by name, with the keys of `workerDefaults`; default: one pool, aggregated"),
    ] = {}
    worker_defaults: WorkerDefaults = WorkerDefaults()
    broker: Broker = Broker()
    cells: CellValues = CellValues()
    streams: Streams = Streams()
    models: Models = Models()
    hub: Hub = Hub()
    network_policy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    nats: Annotated[Tree, about("values of the NATS chart; `enabled: false`: the NATS of `broker.urlsSecret`")] = field(
        default_factory=dict
    )


def defaults() -> dict[str, Any]:
    """The values as YAML has them, without the NATS chart's."""
    built: dict[str, Any] = msgspec.to_builtins(Values())
    del built["nats"]
    return built
