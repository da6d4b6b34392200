"""A suggestion made of the chosen configurations: numbers of workers, and the commands that start them."""

from collections.abc import Mapping

from msgspec import Struct

from infra.bench.profile.choice import Choice, Option, Sla, workers
from infra.bench.profile.data import Profile


class Pool(Struct, frozen=True, kw_only=True):
    """Workers of one role; ``up`` has the flags of each worker."""

    configuration: str
    workers: int
    gpus: int
    up: str
    figures: Option


class Suggestion(Struct, frozen=True, kw_only=True):
    """
    Attributes:
        requests_per_s: the rate that the workers can serve, each busy for ``utilization`` of its time.
        decode_per_prefill: decode workers that one prefill worker feeds.
        commands: shell commands that start these workers.
    """

    sla: Sla
    requests_per_s: float
    utilization: float
    decode_per_prefill: float
    prefill: Pool
    decode: Pool
    commands: tuple[str, ...]


def suggestion(
    profiles: Mapping[str, Profile],
    sla: Sla,
    prefill: Choice,
    decode: Choice,
    *,
    rate: float,
    utilization: float,
) -> Suggestion | None:
    """Combine the best configurations. None: none meets the SLA for prefill, or none for decode.

    Args:
        rate: requests per second; 0: as many as one worker of the faster kind serves.
    """
    best = prefill.best, decode.best
    if best[0] is None or best[1] is None:
        return None
    rate = rate or utilization * max(best[0].requests_per_s, best[1].requests_per_s)
    pools = [
        Pool(
            configuration=option.name,
            workers=workers(option, rate, utilization),
            gpus=option.gpus * workers(option, rate, utilization),
            up=profiles[option.name].setup.up,
            figures=option,
        )
        for option in (best[0], best[1])
    ]
    return Suggestion(
        sla=sla,
        requests_per_s=round(rate, 3),
        utilization=utilization,
        decode_per_prefill=round(best[0].requests_per_s / best[1].requests_per_s, 3),
        prefill=pools[0],
        decode=pools[1],
        commands=commands(*pools),
    )


def commands(prefill: Pool, decode: Pool) -> tuple[str, ...]:
    """One ``penstock up`` if all workers have the same flags, otherwise one command per worker."""
    if prefill.up == decode.up:
        return (f"penstock up --prefill {prefill.workers} --decode {decode.workers} {prefill.up}".rstrip(),)
    return tuple(
        f"penstock worker --role {role} {pool.up}".rstrip()
        for role, pool in (("prefill", prefill), ("decode", decode))
        for _ in range(pool.workers)
    )
