"""Which requests may be what ends their workers, and how they run on. Pure.

A request whose attempt ended with a crash of its worker is a suspect, and so are all that ran there. Suspects are
spread over different workers, so that the next crash names few. One that two crashes name runs alone: its worker runs
nothing else meanwhile, and a model has one such request at a time. If its worker crashes even so, it is the cause.

Each such request takes three workers, and one that differs a little is another one. So the requests of a tenant with
several within an hour are watched, as its gateway has marked them: a single crash is enough for them to run alone.

What is known comes from the log. DONE says of each attempt that a worker, or someone on its behalf, returned it, and
whether it crashed (``done.Returned.crashed``). Jobs carry which attempts were lost with their worker. Such a loss may
turn out to be a crash, once the worker's supervisor or its next life says so. The first one is taken for a crash at
once, since spreading costs nothing; before a third worker the request waits for what is to be known, within a bound.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.done import CRASHES
from penstock.schemas.fleet import State
from penstock.schemas.jobs import ALONE, SUSPECT

EVIDENCE_S = 30.0  # Kubernetes starts a container that crashed a second time again after 20 s
REMEMBERED = 20_000  # unfinished requests with returned attempts


class Standing(enum.StrEnum):
    """How a request may run."""

    free = ""
    suspect = SUSPECT  # away from other suspects
    unknown = "unknown"  # not before it is known why its workers were lost
    alone = ALONE
    poisonous = "poisonous"  # not at all


class ReturnedAttempts:
    """A fold of DONE: which attempts of unfinished requests were returned, and which of them crashed."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, dict[int, str]] = OrderedDict()

    def add(self, request: str, attempt: int, crashed: str) -> None:
        """``crashed``: as in ``done.Returned``. Of several reports of one attempt, the first crash counts."""
        attempts = self._attempts.setdefault(request, {})
        known = attempts.get(attempt, "")
        attempts[attempt] = known if known in CRASHES else crashed or known
        if len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)

    def end(self, request: str) -> None:
        self._attempts.pop(request, None)

    def of(self, request: str) -> Mapping[int, str]:
        return self._attempts.get(request, {})

    def crashes(self, request: str) -> int:
        return count_crashes(self.of(request))

    def parts(self, size: int = 500) -> Iterator[tuple[tuple[str, int, str], ...]]:
        """For a snapshot, see ``update``."""
        entries = [(request, *each) for request, attempts in self._attempts.items() for each in attempts.items()]
        for start in range(0, len(entries), size):
            yield tuple(entries[start : start + size])

    def update(self, entries: Iterable[tuple[str, int, str]]) -> None:
        for entry in entries:
            self.add(*entry)


def count_crashes(returned: Mapping[int, str]) -> int:
    """``returned``: by attempt, as ``ReturnedAttempts`` has it."""
    return sum(crashed in CRASHES for crashed in returned.values())


def standing(
    returned: Mapping[int, str],
    lost: Sequence[tuple[int, str]],
    explained: Callable[[str], bool],
    waited_s: float,
    *,
    repeats: bool = False,
    watched: bool = False,
) -> Standing:
    """How a request may run, after attempts that ended without a result.

    Args:
        returned: by attempt, as ``ReturnedAttempts`` has it.
        lost: attempts that were lost with their worker, and that worker.
        explained: whether a lost worker is known not to have crashed, since it is registered again.
        waited_s: since the last attempt ended.
        repeats: it has the content of a request that was found to be poisonous.
        watched: its tenant has had several of those lately.
    """
    crashes = count_crashes(returned)
    if ALONE in returned.values() or (repeats and crashes):
        return Standing.poisonous
    if repeats:
        crashes = 2
    enough = 1 if watched else 2
    open_losses = len({attempt for attempt, worker in lost if attempt not in returned and not explained(worker)})
    if open_losses and crashes + open_losses >= enough and waited_s < EVIDENCE_S:
        return Standing.unknown
    if crashes >= enough:
        return Standing.alone
    return Standing.suspect if crashes or open_losses else Standing.free


def crowded(tracker: LoadTracker, model: str, suspect: Standing, now_ns: int) -> frozenset[str]:
    """Workers that a suspect avoids: those with more suspects than others of their role.

    One that is to run alone avoids those with more to do: it waits there until that has ended.
    """
    counts: dict[str, dict[str, int]] = {}
    for each in tracker.serving(model):
        if each.state is State.ready:
            sequences = (tracker.load((each.worker, rank), now_ns).sequences for rank in range(each.dp_size))
            busy = sum(sequences) if suspect is Standing.alone else tracker.suspects(each.worker)
            counts.setdefault(each.role, {})[each.worker] = busy
    return frozenset(worker for role in counts.values() for worker, count in role.items() if count > min(role.values()))
