"""The interface between a simulated fleet and a routing policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.measure.simulation.cache import LowerChanges, StoredRun
from penstock.measure.simulation.engine import MAX_SEQUENCES, PassTimes
from penstock.measure.simulation.trace import Request
from penstock.router.placement.cost import TIER_COSTS

Target = tuple[int, int]  # number of the worker in the fleet, rank


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """
    Attributes:
        role: "aggregated", "prefill" or "decode".
        blocks: KV blocks of each rank.
        ranks: attention data-parallel ranks, each a target of its own; their passes run in step.
        slowness: factor on the duration of each pass.
        decode_slowness: a further factor on its decode part.
        times: of its passes; None: the mock's.
        lower: blocks of host memory and of a disk behind each rank's; 0: it has none.
        tier_costs: to bring a block back from each, where computing it is 1.
    """

    role: str = "aggregated"
    blocks: int = 16384
    ranks: int = 1
    slowness: float = 1.0
    decode_slowness: float = 1.0
    max_sequences: int = MAX_SEQUENCES
    times: PassTimes | None = None
    lower: tuple[int, int] = (0, 0)
    tier_costs: tuple[float, float] = TIER_COSTS


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """
    Attributes:
        transfer_ns_per_token: of a prompt that is handed from a prefill to a decode worker.
        move_ns: of reading a prefix from another worker, however short.
        move_ns_per_token: of each token of it, in addition.
        encoders: workers that encode media before the prompt can be computed.
        encode_cache: media whose embeddings each of them keeps.
    """

    workers: tuple[WorkerSpec, ...]
    block_size: int = 64
    transfer_ns_per_token: int = 0
    encoders: int = 0
    encode_ms: float = 60.0
    encode_cache: int = 256
    move_ns: int = 4_000_000
    move_ns_per_token: int = 600  # as between two H200 of one host

    @property
    def targets(self) -> list[Target]:
        return [(number, rank) for number, worker in enumerate(self.workers) for rank in range(worker.ranks)]

    def with_role(self, *roles: str) -> list[Target]:
        return [target for target in self.targets if self.workers[target[0]].role in roles]

    @property
    def entrances(self) -> list[Target]:
        """Targets that a new request can be sent to by a simple rule: those that compute prompts."""
        return self.with_role("aggregated", "prefill")


class Placement(NamedTuple):
    """Where a request goes.

    Attributes:
        decode: takes over from a prefill worker; None: the policy is asked when the prompt is computed.
        whole: a prefill worker runs the request to its end.
        source: from which the target reads a prefix first; None: it computes what it lacks.
        prefix_blocks: leading blocks of the prompt that the source has, as far as is known.
    """

    target: Target
    decode: Target | None = None
    encoder: int | None = None
    whole: bool = False
    source: Target | None = None
    prefix_blocks: int = 0


class Policy(Protocol):
    """A routing policy. Times are ns of simulated time; a request is known by its ``index``.

    Policies that inherit from it hold nothing and look at no events, unless they say otherwise.
    """

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        """Before the run. The requests are all there will be; a fair policy does not look at them."""

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        """Place a request; None: hold it."""

    def decode(self, request: Request, now_ns: int) -> Target:
        """Choose the decode worker of a prompt that was placed without one."""

    def pump(self, now_ns: int) -> Iterable[tuple[Request, Placement]]:
        """Placements of held requests; asked after each instant with an event."""
        return ()

    def wake(self) -> int | None:
        """When ``pump`` is to be asked even without an event; asked only while requests are held."""
        return None

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        """Blocks that a target has stored and removed in the passes that ended now."""
        return

    def lower_events(self, target: Target, changes: Sequence[LowerChanges]) -> None:
        """The same of each lower tier with those before it; comes first."""
        return

    def prefilled(self, request: Request, now_ns: int) -> None:
        """The prompt is computed."""
        return

    def finished(self, request: Request, now_ns: int) -> None:
        """The request has ended."""
