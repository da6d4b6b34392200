"""Decides requests by the workers and loads of a ``LoadTracker``, in the cheaper of two ways. No clock, no NATS.

A loop over the targets decides every request. For more than a few targets array operations come to the same decision
faster, where numpy is installed.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from penstock.configs.settings import RouterMode
from penstock.router.placement.decide import decide
from penstock.router.placement.routing import ALONE, ModelPart, RoutingContext, RoutingDecision, RoutingRequest, Weights
from penstock.router.placement.sessions import Sessions, SharedPrefixes
from penstock.router.state.depths import TargetId, as_dict
from penstock.router.state.load_tracker import MODELS_CACHED, LoadTracker

if TYPE_CHECKING:
    from penstock.router.placement.arrays import ArrayDecisions

# Targets, up to which a loop over them is cheaper in a router. Without anything between two decisions, arrays win from
# one target on. But each request changes rows that they have to copy, so they win from four on, and after code that
# empties the caches from nine on.
FEW = 4

# In SERVED of targets that other routers prefer: 100 tokens of work for each one that this router prefers, up to 3,000.
# The more targets, the less it costs to choose among some of them, and the more requests come before others know.
OTHERS_SERVED = 25_600
MOST_OTHERS_SERVED = 768_000
PREFERENCE_NS = 1_000_000_000  # for so long a router prefers the same targets; a change takes 4 µs per target


def array_decisions(tracker: LoadTracker, few: int = FEW) -> "ArrayDecisions | None":
    """None: numpy is not installed."""
    if find_spec("numpy") is None:
        return None
    from penstock.router.placement.arrays import ArrayDecisions

    return ArrayDecisions(tracker, few)


class Decisions:
    """A decision is a function of the tracker's state and of the arguments of ``decide``.

    Args:
        arrays: of the same tracker; None: a loop decides everything.
    """

    def __init__(
        self, tracker: LoadTracker, arrays: "ArrayDecisions | None", mode: RouterMode, weights: Weights
    ) -> None:
        self._arrays = arrays
        self._tracker = tracker
        self._mode: RouterMode = mode
        self._weights = weights
        self._shared: dict[str, SharedPrefixes] = {}  # by model
        # By model: version of the workers, part that is preferred, number of parts; None: it places all requests.
        self._parts: dict[str, tuple[int, int, int] | None] = {}
        self.sessions = Sessions(lambda request: tracker.request(request) is not None)

    def shared_blocks(self, model: str, keys: Sequence[int], routers: int) -> int:
        """Leading blocks of a prompt that many prompts begin with, for ``RoutingRequest``; it counts from now on.

        Args:
            routers: that place the model's requests; this one sees one of so many prompts.
        """
        serving = self._tracker.serving(model)
        if self._mode != "kv" or not serving or not len(keys):
            return 0
        prefixes = self._shared.get(model)
        if prefixes is None:
            if len(self._shared) >= MODELS_CACHED:
                self._shared.clear()
            prefixes = self._shared[model] = SharedPrefixes()
        return prefixes.blocks(keys, len(serving) * serving[0].dp_size / routers)

    def _prefer(self, name: str, part: ModelPart, now_ns: int) -> None:
        """Have routers prefer different targets, since they do not know each other's latest decisions.

        They take turns, by their clocks, with each part: some routers place more requests than others.

        Args:
            name: of the model, or an alias, which some of its workers may not have.
            part: of the model that the name stands for.
        """
        model = self._tracker.models().get(name)
        if model is None:  # requests may name any model
            return
        number = (part.number + now_ns // PREFERENCE_NS) % part.routers
        state = (self._tracker.version, number, part.routers) if part.routers > 1 else None
        if self._parts.get(model) == state:
            return
        self._parts[model] = state
        pools: dict[str, list[TargetId]] = {}
        for worker in self._tracker.serving(model):
            pools.setdefault(worker.role, []).extend((worker.worker, rank) for rank in range(worker.dp_size))
        for pool in pools.values():
            more = min(OTHERS_SERVED * len(pool) // part.routers, MOST_OTHERS_SERVED)
            for at, target in enumerate(pool):
                self._tracker.loads.count_more(target, 0 if at % part.routers == number else more)

    def decide(
        self,
        request: RoutingRequest,
        keys: Sequence[int],
        overlaps: Mapping[TargetId, int],
        *,
        now_ns: int,
        seed: int,
        number: int = 0,
        waited_s: float | None = None,
        part: ModelPart = ALONE,
    ) -> RoutingDecision:
        """
        Args:
            keys: of the full blocks of its prompt, as far as they may be reused.
            overlaps, seed, number, waited_s: as in ``RoutingContext``.
            part: this router's.
        """
        if part.routers > 1 or self._parts:
            self._prefer(request.model, part, now_ns)
        tracker, weights = self._tracker, self._weights
        leading: Mapping[TargetId, int] = tracker.loads.prefixes(keys) if self._mode == "kv" else {}
        if self._arrays is not None and self._mode == "kv":
            decision = self._arrays.decide(
                request, overlaps, leading, weights, now_ns=now_ns, seed=seed, waited_s=waited_s
            )
            if decision is not None:
                return decision
        targets, cached, active = tracker.targets(now_ns, request.model), as_dict(overlaps), as_dict(leading)
        return decide(RoutingContext(request, targets, cached, self._mode, weights, seed, number, active, waited_s))
