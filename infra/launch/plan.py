"""What ``penstock up`` starts: a pure function from its settings to the settings of each child."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.flags import PREFIX, flags_of, to_argv, to_environ
from configs.settings import Common, GatewaySettings, RouterSettings, TraceSettings, UpSettings, WorkerSettings
from infra.launch.groups import Fleet, assign

SECRET = ("nats_url", "sys_nats_url")  # they hold passwords: passed by environment, which ps does not show to others
USERS = {"trace": "operator"}  # of the broker, where it is not the role's own: its position is in the object store
# A flag that a child has under the same name goes through as it is; these mean something else there.
_NOT_PASSED = {"model", "served_model_name", "engine", "http_port", "metrics_port", "threads", "nats_url"}


@dataclass(frozen=True, slots=True)
class Planned:
    """One child: its name, its role (a sub-command of penstock), its settings and the GPUs that it sees."""

    name: str
    role: str
    settings: Common
    gpus: tuple[str, ...] | None = None  # None: all that there are

    @property
    def argv(self) -> list[str]:
        return [self.role, *to_argv(self.settings, hidden=SECRET)]

    @property
    def metrics_port(self) -> int:
        """0: it has none of its own; a gateway's are on its HTTP port."""
        return int(getattr(self.settings, "metrics_port", 0))

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Its environment. A variable for a flag that ``up`` itself has was meant for ``up``, which passes it on."""
        settled = {flag.variable for flag in flags_of(UpSettings)} | {PREFIX + "NAME", PREFIX + "MODE"}
        kept = {key: value for key, value in inherited.items() if key not in settled}
        secrets = [name for name in SECRET if hasattr(self.settings, name)]
        seen = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        if isinstance(self.settings, WorkerSettings) and self.settings.otlp_endpoint:
            kept.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")  # engines would take it for gRPC
        return kept | to_environ(self.settings, secrets) | {"PYTHONUNBUFFERED": "1"} | seen


def plan(
    up: UpSettings,
    fleet: Fleet,
    *,
    ports: Sequence[int],
    listen_fd: int = -1,
    url: Callable[[str], str],
    sys_url: str,
    cores: int,
    metrics_ports: Sequence[int] = (),
    gpus: Sequence[str] | None = None,
) -> list[Planned]:
    """The children, in the order in which they are started.

    Args:
        ports: one per gateway.
        listen_fd: a listening socket that all gateways inherit.
        url: from a role to its NATS URL.
        metrics_ports: of workers and routers, in their order; none: they serve no metrics.
        gpus: that workers may use, as in CUDA_VISIBLE_DEVICES; None: nothing is assigned.
    Raises:
        PlanError: there are too few GPUs.
    """
    model = {"model": fleet.model, "served_model_name": up.served_model_name}
    children: list[Planned] = []
    free = iter(metrics_ports)
    seen = assign(fleet.groups, gpus)

    def add(process: str, name: str, kind: type[Common], /, **settings: Any) -> None:
        told = passed(up, kind) | {"name": name, "nats_url": url(USERS.get(process, process))} | settings
        children.append(Planned(name, process, kind(**told), seen.get(name)))

    # Workers first: they take longest to start.
    native = sum(group.number for group in fleet.groups if group.engine == "native" and group.role != "encode")
    threads = up.threads or max(1, cores // max(1, native))
    for group in fleet.groups:
        for name in group.names:
            more = {"threads": threads} if group.engine == "native" else {}
            add("worker", name, WorkerSettings, **{**model, **more, **group.settings}, metrics_port=next(free, 0))
    for index in range(up.routers):
        add(
            "router",
            f"router-{index}",
            RouterSettings,
            mode=up.router_mode,
            sys_nats_url=sys_url,
            metrics_port=next(free, 0),
        )
    for index, port in enumerate(ports):
        tracing = "all" if up.otlp_endpoint else "asked"
        add(
            "gateway",
            f"gateway-{index}",
            GatewaySettings,
            **model,
            block_size=fleet.block_size,
            http_port=port,
            listen_fd=listen_fd,
            tracing=tracing,
        )
    if up.otlp_endpoint:
        add("trace", "trace-0", TraceSettings)
    return children


def passed(up: UpSettings, kind: type[Common]) -> dict[str, Any]:
    """What a child is told under the names that ``up`` has for it, too."""
    ours = {flag.field for flag in flags_of(UpSettings)} - _NOT_PASSED
    return {flag.field: getattr(up, flag.field) for flag in flags_of(kind) if flag.field in ours}
