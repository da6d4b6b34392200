"""Which router owns which model: a pure function of the routers' registrations and the models that have workers.

All routers compute it from the same bucket, so they agree without asking each other, a moment after every change.
"""

from collections.abc import Collection, Iterable

from penstock.schemas.routers import Member


def assign(models: Collection[str], members: Iterable[Member]) -> dict[str, str]:
    """The owner of each model.

    A router keeps the models that it owns, up to its share: the numbers of models of two routers differ by at most one.
    Where several claim a model, the earliest keeps it. Other models go to the routers that own fewest, earliest first.
    """
    by_age = _by_age(members)
    if not by_age:
        return {}
    share, larger_shares = divmod(len(models), len(by_age))
    owners: dict[str, str] = {}
    counts = {member.router: 0 for member in by_age}
    for member in by_age:
        for model in sorted(member.models):
            if model not in models or model in owners or counts[member.router] > share:
                continue
            if counts[member.router] == share:
                if not larger_shares:
                    continue
                larger_shares -= 1
            owners[model] = member.router
            counts[member.router] += 1
    for model in sorted(set(models) - set(owners)):
        router = min(counts, key=counts.__getitem__)
        owners[model] = router
        counts[router] += 1
    return owners


def default_owner(owners: dict[str, str], members: Iterable[Member]) -> str:
    """The owner of all models without workers: one that reads requests anyway; "": there is no router."""
    by_age = [member.router for member in _by_age(members)]
    busy = set(owners.values())
    return next((router for router in by_age if router in busy), by_age[0] if by_age else "")


def _by_age(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: (member.since_ns, member.router))
