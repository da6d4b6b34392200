"""The targets of one kind of request as arrays."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.router.placement.aggregated import aggregated_pool, is_plain
from penstock.router.placement.columns import Column, Rows
from penstock.router.placement.filters import rejection
from penstock.router.placement.routing import RoutingRequest
from penstock.router.state.depths import Depths, TargetBits, TargetId, bits_of
from penstock.router.state.load import Load, RoutingTarget
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration

POOLS_CACHED = 256  # kinds of requests
IDLE = Load()
_SINGLE = 4  # targets for each depth, on average, up to which a loop over them is cheaper
_NO_ROWS: Rows = np.zeros(0, np.intp)


class Pool(NamedTuple):
    """The targets of one kind of request, in the order of ``LoadTracker.targets``.

    Attributes:
        usable: whether a target would take a request of no length, if it had room.
        longest, largest: tokens of prompt and answer together, tokens of a prompt, that a target takes.
        least_longest, least_largest: that every target takes.
        block_size: of all targets, or of each.
        places: of the targets of bits, with the version that they are of.
    """

    ids: Sequence[TargetId]
    registrations: Sequence[Registration]
    position: Mapping[TargetId, int]
    rows: Rows
    usable: NDArray[np.bool_]
    longest: Column
    largest: Column
    least_longest: float
    least_largest: float
    block_size: Column | float
    places: dict[TargetBits, tuple[int, dict[int, int], Rows]]

    def column(self, blocks: Mapping[TargetId, int]) -> Column:
        """Values of some targets in their places, 0 in the others; those of other pools' targets are left out."""
        if isinstance(blocks, Depths):
            return self._column_of(blocks)[:-1]
        column: Column = np.zeros(len(self.ids) + 1)
        if blocks:
            elsewhere, place = len(self.ids), self.position.get
            column[[place(target, elsewhere) for target in blocks]] = list(blocks.values())
        return column[:-1]

    def _column_of(self, depths: Depths) -> Column:
        """With one more element, for targets of other pools."""
        masks = depths.masks
        if not masks:
            return np.zeros(len(self.ids) + 1)
        by_bit, places = self._places_of(depths.bits)
        if len(masks) * _SINGLE > len(by_bit):
            values = [0] * (len(self.ids) + 1)
            for mask, depth in zip(masks, depths.numbers, strict=True):
                at = by_bit.get(mask)
                if at is not None:
                    values[at] = depth
                    continue
                for bit in bits_of(mask):
                    values[by_bit[bit]] = depth
            return np.array(values, np.float64)
        column: Column = np.zeros(len(self.ids) + 1)
        width = len(places) // 8
        if len(masks) == 1:
            column[places[_set_bits(masks[0].to_bytes(width, "little"))]] = depths.numbers[0]
            return column
        packed = b"".join([mask.to_bytes(width, "little") for mask in masks])
        counts = [mask.bit_count() for mask in masks]
        column[places[_set_bits(packed) & (len(places) - 1)]] = np.repeat(depths.numbers, counts)
        return column

    def _places_of(self, bits: TargetBits) -> tuple[dict[int, int], Rows]:
        """The place of the target of each bit: by bit, and by its number. The latter has 8, 16, 32, ... elements."""
        version, by_bit, places = self.places.get(bits, (-1, {}, _NO_ROWS))
        if version != bits.version:
            most = max((bit.bit_length() for bit in bits.targets), default=0)
            places = np.full(max(8, 1 << (most - 1).bit_length()), len(self.ids), np.intp)
            by_bit = {bit: self.position.get(target, len(self.ids)) for bit, target in bits.targets.items()}
            for bit, at in by_bit.items():
                places[bit.bit_length() - 1] = at
            self.places[bits] = bits.version, by_bit, places
        return by_bit, places

    def allowed(self, request: RoutingRequest) -> NDArray[np.bool_]:
        """Targets that take the request now or once they have room."""
        tokens = request.prompt_tokens
        if tokens + request.max_tokens <= self.least_longest and tokens < self.least_largest:
            return self.usable
        return self.usable & (tokens + request.max_tokens <= self.longest) & (tokens < self.largest)

    def rejection(self, at: int, request: RoutingRequest) -> str:
        """Why a target never takes the request; "": it does, once it has room."""
        return rejection(request, RoutingTarget(self.ids[at], self.registrations[at], IDLE))


def _set_bits(masks: bytes) -> Rows:
    return np.unpackbits(np.frombuffer(masks, np.uint8), bitorder="little").view(np.bool_).nonzero()[0]


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
        longest = np.array([each.max_model_len for each in registrations], np.float64)
        sizes = {each.block_size for each in registrations}
        largest = np.array([each.total_blocks * each.block_size for each in registrations], np.float64)
        return Pool(
            ids,
            registrations,
            {target: at for at, target in enumerate(ids)},
            np.array([self._tracker.loads.row(target) for target in ids], np.intp),
            np.array([not rejection(small, RoutingTarget(("", 0), each, IDLE)) for each in registrations]),
            longest,
            largest,
            longest.min(),
            largest.min(),
            sizes.pop() if len(sizes) == 1 else np.array([each.block_size for each in registrations], np.float64),
            {},
        )
