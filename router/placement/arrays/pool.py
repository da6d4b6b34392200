"""The targets of one kind of request as arrays."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.filters import rejection
from router.holders import TargetId
from router.load import Load, RoutingTarget
from router.load_tracker import LoadTracker
from router.placement.aggregated import aggregated_pool, is_plain
from router.placement.arrays.columns import Column, Rows
from router.routing import RoutingRequest
from schemas.fleet import Registration

POOLS_CACHED = 256  # kinds of requests
IDLE = Load()


class Pool(NamedTuple):
    """The targets of one kind of request, in the order of ``LoadTracker.targets``.

    Attributes:
        usable: whether a target would take a request of no length, if it had room.
        longest, largest: tokens of prompt and answer together, tokens of a prompt, that a target takes.
    """

    ids: Sequence[TargetId]
    registrations: Sequence[Registration]
    position: Mapping[TargetId, int]
    rows: Rows
    usable: NDArray[np.bool_]
    longest: Column
    largest: Column

    def fill(self, column: Column, blocks: Mapping[TargetId, int]) -> None:
        """Write what is known of some targets to their places in ``column``."""
        if not blocks:
            return
        known = [at for at in map(self.position.get, blocks) if at is not None]
        if len(known) == len(blocks):
            column[known] = list(blocks.values())
            return
        column[known] = [count for target, count in blocks.items() if target in self.position]

    def allowed(self, request: RoutingRequest) -> NDArray[np.bool_]:
        """Targets that take the request now or once they have room."""
        tokens = request.prompt_tokens
        return self.usable & (tokens + request.max_tokens <= self.longest) & (tokens < self.largest)


class Pools:
    """The pools of a ``LoadTracker``."""

    def __init__(self, tracker: LoadTracker) -> None:
        self._tracker = tracker
        self._version = -1
        self._cache: dict[tuple[str, str | None, str, frozenset[str]], Pool | None] = {}

    def pool(self, request: RoutingRequest) -> Pool | None:
        """The pool of a request; None: it has to be decided in the general way (``aggregated``)."""
        if not is_plain(request):
            return None
        if self._version != self._tracker.version or len(self._cache) > POOLS_CACHED:
            self._version = self._tracker.version
            self._cache.clear()
        kind = (request.model, request.revision, request.tokenizer, request.processors)
        if kind not in self._cache:
            self._cache[kind] = self._made(request)
        return self._cache[kind]

    def _made(self, request: RoutingRequest) -> Pool | None:
        serving = aggregated_pool(self._tracker, request)
        if not serving:
            return None
        each_rank = [(each, rank) for each in serving for rank in range(each.dp_size)]
        ids = [(registration.worker, rank) for registration, rank in each_rank]
        registrations = [registration for registration, _ in each_rank]
        small = msgspec.structs.replace(request, prompt_tokens=0, max_tokens=0)
        return Pool(
            ids,
            registrations,
            {target: at for at, target in enumerate(ids)},
            np.array([self._tracker.loads.row(target) for target in ids], np.intp),
            np.array([not rejection(small, RoutingTarget(("", 0), each, IDLE)) for each in registrations]),
            np.array([each.max_model_len for each in registrations], np.float64),
            np.array([each.total_blocks * each.block_size for each in registrations], np.float64),
        )
