"""Decides requests by the workers and loads of a ``LoadTracker``, in the cheaper of two ways. No clock, no NATS.

A loop over the targets decides every request. For more than a few targets array operations come to the same decision
faster, where numpy is installed.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from configs.settings import RouterMode
from router.depths import TargetId, as_dict
from router.load_tracker import MODELS_CACHED, LoadTracker
from router.placement.sessions import Sessions
from router.placement.shared_prefixes import SharedPrefixes
from router.policy import decide
from router.routing import RoutingContext, RoutingDecision, RoutingRequest, Weights

if TYPE_CHECKING:
    from router.placement.arrays.decisions import ArrayDecisions

# Targets, up to which a loop over them is cheaper in a router. Without anything between two decisions, arrays win from
# one target on. But each request changes rows that they have to copy, so they win from four on, and after code that
# empties the caches from nine on.
FEW = 4


def array_decisions(tracker: LoadTracker, few: int = FEW) -> "ArrayDecisions | None":
    """None: numpy is not installed."""
    if find_spec("numpy") is None:
        return None
    from router.placement.arrays.decisions import ArrayDecisions

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
        self.sessions = Sessions(lambda request: tracker.request(request) is not None)

    def shared_blocks(self, model: str, keys: Sequence[int], routers: int = 1) -> int:
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

    def decide(
        self,
        request: RoutingRequest,
        keys: Sequence[int],
        overlaps: Mapping[TargetId, int],
        *,
        now_ns: int,
        seed: int,
        turn: int = 0,
        waited_s: float | None = None,
    ) -> RoutingDecision:
        """
        Args:
            keys: of the full blocks of its prompt, as far as they may be reused.
            overlaps, seed, turn, waited_s: as in ``RoutingContext``.
        """
        tracker, weights = self._tracker, self._weights
        leading: Mapping[TargetId, int] = tracker.loads.prefixes(keys) if self._mode == "kv" else {}
        if self._arrays is not None and self._mode == "kv":
            decision = self._arrays.decide(
                request, overlaps, leading, weights, now_ns=now_ns, seed=seed, waited_s=waited_s
            )
            if decision is not None:
                return decision
        targets, cached, active = tracker.targets(now_ns, request.model), as_dict(overlaps), as_dict(leading)
        return decide(RoutingContext(request, targets, cached, self._mode, weights, seed, turn, active, waited_s))
