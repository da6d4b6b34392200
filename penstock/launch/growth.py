"""Workers that join a deployment which runs: their settings and GPUs. Pure."""

import re
from collections.abc import Callable, Sequence

from penstock.configs.settings import WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.launch.groups import Fleet, Group, PlanError
from penstock.launch.plan import Planned, passed, worker_state, workers

_NAME = re.compile(r"([a-z0-9][a-z0-9-]*)-(\d{1,4})")


def further(
    up: UpSettings,
    fleet: Fleet,
    names: Sequence[str],
    children: Sequence[Planned],
    *,
    url: Callable[[str], str],
    cores: int,
    metrics_ports: Sequence[int] = (),
    gpus: Sequence[str] | None = None,
) -> list[Planned]:
    """
    Args:
        names: of workers that the deployment does not have yet, such as decode-2. Their role must have workers.
        children: what the deployment has; their GPUs stay theirs.
        metrics_ports: one for each name; empty: they serve no metrics.

    Raises:
        PlanError: there are no such workers here, or too few GPUs.
    """
    largest = {group: max(_indices(group, names), default=-1) + 1 for group in map(_stem, fleet.groups)}
    larger = fleet._replace(
        groups=tuple(group._replace(number=max(group.number, largest[_stem(group)])) for group in fleet.groups)
    )
    settings = dict(workers(up, larger, cores))
    groups = {name: group for group in larger.groups for name in group.names}
    free = [gpu for gpu in gpus or () if all(gpu not in (child.gpus or ()) for child in children)]
    ports = iter(metrics_ports)
    added = []
    for name in names:
        if name not in settings:
            stems = ", ".join(f"{_stem(group)}-N" for group in fleet.groups)
            raise PlanError(f"no worker {name!r} can be added: this deployment has {stems}")
        own, free = _gpus(name, groups[name], gpus, free)
        values = passed(up, WorkerSettings) | {"name": name, "nats_url": url("worker")} | settings[name]
        settled = WorkerSettings(**values, metrics_port=next(ports, 0), state_dir=worker_state(up))
        added.append(Planned(name, "worker", settled, own))
    return added


def _gpus(
    name: str, group: Group, gpus: Sequence[str] | None, free: list[str]
) -> tuple[tuple[str, ...] | None, list[str]]:
    """A worker's GPUs, and those that are left."""
    if not gpus or not group.gpus:
        return None, free
    if group.alone or free:
        if len(free) < group.gpus:
            raise PlanError(f"{name} needs {group.gpus} GPUs, {len(free)} of {len(gpus)} are free")
        return tuple(free[: group.gpus]), free[group.gpus :]
    match = _NAME.fullmatch(name)
    assert match is not None
    return (gpus[int(match[2]) % len(gpus)],), free


def _stem(group: Group) -> str:
    return group._replace(number=1).names[0].rpartition("-")[0]


def _indices(stem: str, names: Sequence[str]) -> list[int]:
    matches = (_NAME.fullmatch(name) for name in names)
    return [int(match[2]) for match in matches if match and match[1] == stem]
