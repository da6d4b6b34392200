"""How many accepted requests of each class wait for a router to place them; each class has room of its own.

Where there are several models, those of one do not take all of it: while fewer requests of a model wait than an equal
share, it gets further room, up to as much again for all models together.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from penstock.gateway.base.common import resolve_priority
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority


class _Class(msgspec.Struct):
    """What a body says of its class."""

    priority: Priority | None = None
    service_tier: str | None = None


_decode = msgspec.json.Decoder(_Class).decode


def class_of(body: bytes) -> Priority:
    """The class that an unchecked body names. Of an unreadable one the default: preparing it reports the error."""
    try:
        said = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Priority.standard
    return resolve_priority(said.priority, said.service_tier)


def by_model(total: int, held: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """How many of the requests that wait are of each model.

    Routers say of which models the requests are that they hold, which are nearly all. What no router has read yet is
    taken to be of the models of this gateway's own requests that have not begun, in their proportions.

    Args:
        total: accepted and not placed, by the broker's count.
        held: of these by routers, by model; their counts may be a moment old.
        own: this gateway's open requests that no worker has started.
    Returns: counts by model, "" for what is not known; they sum up to ``total`` unless ``held`` alone is more.
    """
    counts = Counter({model: count for model, count in held.items() if count > 0})
    rest = total - counts.total()
    if rest <= 0:
        return dict(counts)
    unread = {model: more for model, count in own.items() if (more := count - counts[model]) > 0}
    weights = unread or dict(counts) or {"": 1}
    whole, given = sum(weights.values()), 0
    for seen, (model, weight) in enumerate(sorted(weights.items()), 1):
        share = rest - given if seen == len(weights) else rest * weight // whole
        counts[model] += share
        given += share
    return {model: count for model, count in counts.items() if count}


class QueueLimits:
    """The broker's counts at the last poll, and the requests accepted since.

    Args:
        limit: of each class.
        unstarted: how many open requests of a class no worker has started. Called only near the limit.
    """

    def __init__(self, limit: int, unstarted: Callable[[Priority], int]) -> None:
        self._limit = limit
        self._unstarted = unstarted
        self._looked: Mapping[Priority, int] = dict.fromkeys(Priority, 0)
        self._since: Counter[Priority] = Counter()
        self._most = 0  # of any class, as if all that was accepted since were of the fullest
        self._models: Mapping[str, int] = {}  # what waits of each, at the last poll
        self._models_since: Counter[str] = Counter()

    def accepted(self, priority: Priority, model: str = "") -> None:
        self._since[priority] += 1
        self._most += 1
        if self._models:
            self._models_since[model] += 1

    def since(self, priority: Priority) -> int:
        """How many of a class were accepted since the last poll."""
        return self._since[priority]

    def polled(self, counts: Mapping[Priority, int], before: Mapping[Priority, int]) -> None:
        """
        Args:
            counts: that the broker gave, by class.
            before: ``since`` of each class, just before the broker was asked about it.
        """
        self._looked = counts
        self._since.subtract(before)
        self._most = max(counts.values()) + self._since.total()

    def polled_models(self, counts: Mapping[str, int]) -> None:
        """
        Args:
            counts: what waits of each model that is served, of all classes; empty: there is only one.
        """
        self._models = counts
        self._models_since.clear()

    @property
    def total(self) -> int:
        return sum(self._looked.values())

    @property
    def near(self) -> bool:
        """Whether any class may be full, so that the class of a body has to be read."""
        return self._most >= self._limit

    @property
    def full(self) -> bool:
        """Whether no class has room."""
        return all(self._waiting(priority) >= self._limit for priority in Priority)

    def check(self, priority: Priority, model: str = "") -> None:
        """
        Args:
            model: canonical name; "": not known.
        Raises:
            ServingError: queue_full.
        """
        waiting = self._waiting(priority)
        if waiting >= self._limit and not (waiting < 2 * self._limit and self._has_share(model)):
            raise ServingError(
                Code.queue_full,
                f"{waiting} requests of class {priority.value!r} wait for a worker and the limit of each class is "
                f"{self._limit} (--max-queue); try again later or add workers",
                retry_after=1.0,
            )

    def _has_share(self, model: str) -> bool:
        waiting = self._models.get(model)
        if waiting is None or len(self._models) < 2:
            return False
        return waiting + self._models_since[model] < max(1, self._limit // len(self._models))

    def room(self, priority: Priority) -> int:
        """How many more of a class would be taken."""
        return max(0, self._limit - self._waiting(priority))

    def _waiting(self, priority: Priority) -> int:
        looked, since = self._looked[priority], self._since[priority]
        if looked + since < self._limit:
            return looked + since
        # Some of those accepted since the last poll have begun; counting them is deferred until it matters.
        return looked + min(since, self._unstarted(priority))
