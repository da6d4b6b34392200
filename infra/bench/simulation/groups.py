"""Workers in groups, each with a router of its own that knows nothing of the others, and a dispatcher in front.

The dispatcher chooses the group of each request. It reads no KV events: it knows which prefixes it sent where, at the
lengths at which ``shared_prefixes`` counts, and what each group has to compute and to decode.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from infra.bench.simulation.cache import StoredRun
from infra.bench.simulation.policy import Fleet, Placement, Policy, Target
from infra.bench.simulation.trace import Request
from router.placement.shared_prefixes import LENGTHS, SharedPrefixes


class GroupedPolicy:
    """
    Args:
        groups: number of groups; worker ``n`` is in group ``n % groups``.
        router: makes the router of a group.
    """

    def __init__(self, groups: int, router: Callable[[], Policy]) -> None:
        self._numbers = range(groups)
        self._routers = [router() for _ in self._numbers]
        self._shared = SharedPrefixes()
        self._sent: list[set[int]] = [set() for _ in self._numbers]  # last keys of prefixes
        self._computing: list[dict[int, int]] = [{} for _ in self._numbers]  # by request: tokens to compute
        self._active: list[dict[int, int]] = [{} for _ in self._numbers]  # by request: tokens of the prompt
        self._group: dict[int, int] = {}

    def start(self, fleet: Fleet, requests: Sequence[Request]) -> None:
        self._block = fleet.block_size
        self._targets = len(fleet.entrances) / len(self._numbers)
        for number, router in enumerate(self._routers):
            router.start(replace(fleet, workers=fleet.workers[number :: len(self._numbers)]), requests)

    def _load(self, number: int) -> float:
        """What a group's mean worker has to do, in prompt tokens. Few prompts mostly find a worker without any."""
        computing = self._computing[number]
        waiting = min(1.0, len(computing) / self._targets) ** 2
        return (sum(computing.values()) * waiting + sum(self._active[number].values()) / 16) / self._targets

    def _missing(self, number: int, request: Request, lengths: Sequence[int]) -> int:
        """Tokens of a prompt that a group was not sent."""
        sent = self._sent[number]
        known = next((at for at, length in enumerate(lengths) if request.keys[length - 1] not in sent), len(lengths))
        return max(1, request.prompt_tokens - self._block * (lengths[known - 1] if known else 0))

    def _choose(self, request: Request) -> int:
        lengths = LENGTHS[: bisect_right(LENGTHS, len(request.keys))]
        unshared = request.prompt_tokens - self._block * self._shared.blocks(request.keys, len(self._numbers))
        missing = [self._missing(number, request, lengths) for number in self._numbers]
        best = min(self._numbers, key=lambda at: 2 * max(1, min(missing[at], unshared)) + self._load(at))
        self._group[request.index] = best
        self._sent[best].update(request.keys[length - 1] for length in lengths)
        self._active[best][request.index] = request.prompt_tokens
        if missing[best] >= self._block:
            self._computing[best][request.index] = missing[best]
        return best

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        number = self._choose(request)
        placed = self._routers[number].arrive(request, now_ns)
        return None if placed is None else self._of_fleet(number, placed)

    def _of_fleet(self, number: int, placed: Placement) -> Placement:
        (worker, rank), decode, groups = placed.target, placed.decode, len(self._numbers)
        target = worker * groups + number, rank
        return placed._replace(target=target, decode=decode and (decode[0] * groups + number, decode[1]))

    def decode(self, request: Request, now_ns: int) -> Target:
        raise AssertionError("decode workers are chosen with the prefill worker")

    def pump(self, now_ns: int) -> Iterator[tuple[Request, Placement]]:
        for number, router in enumerate(self._routers):
            for request, placed in router.pump(now_ns):
                yield request, self._of_fleet(number, placed)

    def wake(self) -> int | None:
        return min((wake for router in self._routers if (wake := router.wake()) is not None), default=None)

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        worker, number = divmod(target[0], len(self._numbers))
        self._routers[number].events((worker, target[1]), stored, removed, now_ns)

    def prefilled(self, request: Request, now_ns: int) -> None:
        number = self._group[request.index]
        self._computing[number].pop(request.index, None)
        self._routers[number].prefilled(request, now_ns)

    def finished(self, request: Request, now_ns: int) -> None:
        number = self._group.pop(request.index)
        self._computing[number].pop(request.index, None)
        del self._active[number][request.index]
        self._routers[number].finished(request, now_ns)
