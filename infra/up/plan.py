"""What ``penstock up`` starts: a pure function from its settings to the settings of each child."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from configs import modeldir
from configs.flags import PREFIX, flags_of, to_argv, to_environ
from configs.settings import Common, GatewaySettings, RouterSettings, UpSettings, WorkerSettings

MEDIA = (
    *("max_media_bytes", "max_image_pixels", "max_images", "media_timeout_s"),
    *("allowed_local_media_path", "allow_private_media_addresses"),
)
SECRET = ("nats_url", "sys_nats_url")  # they hold passwords: passed by environment, which ps does not show to others


@dataclass(frozen=True, slots=True)
class Planned:
    """One child: its name, its role (a sub-command of penstock) and its settings."""

    name: str
    role: str
    settings: Common

    @property
    def argv(self) -> list[str]:
        return [self.role, *to_argv(self.settings, hidden=SECRET)]

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Its environment. A variable for a flag that ``up`` itself has was meant for ``up``, which passes it on."""
        settled = {flag.variable for flag in flags_of(UpSettings)} | {PREFIX + "NAME", PREFIX + "MODE"}
        kept = {key: value for key, value in inherited.items() if key not in settled}
        secrets = [name for name in SECRET if hasattr(self.settings, name)]
        return kept | to_environ(self.settings, secrets) | {"PYTHONUNBUFFERED": "1"}


def plan(up: UpSettings, *, ports: list[int], url: Callable[[str], str], sys_url: str, cores: int) -> list[Planned]:
    """The children, in the order in which they are started.

    Args:
        ports: one per gateway.
        url: from a role to its NATS URL.
    """
    common = {"namespace": up.namespace, "log_format": up.log_format, "log_level": up.log_level}
    # The mock engine has no use for weights, but for a long context.
    model = {
        "model": up.model or str(modeldir.TINY if up.engine == "mock" else modeldir.DEMO),
        "served_model_name": up.served_model_name,
    }
    children: list[Planned] = []

    def add(process: str, name: str, kind: Callable[..., Common], /, **settings: object) -> None:
        children.append(Planned(name, process, kind(name=name, nats_url=url(process), **common, **settings)))

    # Workers first: they take longest to start.
    roles = workers_of(up)
    computing = sum(count for role, count in roles.items() if role != "encode")
    threads = up.threads or (max(1, cores // max(1, computing)) if up.engine == "native" else 0)
    for role, count in roles.items():
        for index in range(count):
            add(
                "worker",
                f"{'worker' if role == 'aggregated' else role}-{index}",
                WorkerSettings,
                **model,
                role=role,
                engine=up.engine,
                block_size=up.block_size,
                kv_blocks=up.kv_blocks,
                max_running=up.max_running,
                mock_speedup=up.mock_speedup,
                threads=threads,
                handoff_lease_s=up.handoff_lease_s,
                drain_s=up.drain_s,
            )
    for index in range(up.routers):
        add(
            "router",
            f"router-{index}",
            RouterSettings,
            mode=up.router_mode,
            local_prefill_tokens=up.local_prefill_tokens,
            sys_nats_url=sys_url,
        )
    for index, port in enumerate(ports):
        add(
            "gateway",
            f"gateway-{index}",
            GatewaySettings,
            **model,
            chat_template=up.chat_template,
            http_host=up.http_host,
            http_port=port,
            block_size=up.block_size,
            max_queue=up.max_queue,
            drain_s=up.drain_s,
            **{name: getattr(up, name) for name in MEDIA},
        )
    return children


def workers_of(up: UpSettings) -> dict[str, int]:
    """How many workers of each role."""
    split = up.prefill + up.decode > 0
    whole = up.workers if up.workers >= 0 else 0 if split else 1
    return {"aggregated": whole, "prefill": up.prefill, "decode": up.decode, "encode": up.encode}
