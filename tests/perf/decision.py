"""The CPU time of one routing decision (prefix match, scoring, job message) by the number of workers."""

import os
import random
from collections.abc import Callable, Iterator

from penstock.router.placement.decisions import Decisions, array_decisions
from penstock.router.placement.job_message import build_job
from penstock.router.placement.pending import PendingRequest, routing_request
from penstock.router.placement.routing import Weights
from penstock.router.state.holders import keys_view
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.prefix_index import PrefixIndex
from penstock.router.state.sent import Positions
from penstock.schemas import wire
from penstock.schemas.blocks import DEFAULT_BLOCK_SIZE
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import DecisionInputs, LoadHeader
from penstock.schemas.kv import KvBatch, Stored
from penstock.schemas.requests import GenerateRequest, Stop

WORKERS = (2, 8, 64, 512)
PROMPT_TOKENS = 2_000
ACTIVE = 15  # requests at each worker, with prompts of their own
_BLOCKS = PROMPT_TOKENS // DEFAULT_BLOCK_SIZE
HELD: dict[str, Callable[[int, int], int]] = {
    "no worker has it": lambda worker, workers: 0,
    "all have all": lambda worker, workers: _BLOCKS,
    "all at different depths": lambda worker, workers: 1 + worker * (_BLOCKS - 1) // max(1, workers - 1),
}


class Fleet:
    """Workers with active requests and some blocks of a prompt.

    Args:
        held: how many leading blocks of the prompt each worker holds, by the worker's number.
    """

    def __init__(self, workers: int, held: Callable[[int, int], int]) -> None:
        draw = random.Random(workers)
        self.index, self.tracker = PrefixIndex(1 << 24), LoadTracker()
        digests = os.urandom(16 * _BLOCKS)
        for number in range(workers):
            name = f"worker-{number:04}-0123abcd"
            registration = Registration(name, "m", "aggregated", "mock", 1, DEFAULT_BLOCK_SIZE, 16384, 256, 131072)
            self.tracker.put_worker(registration)
            blocks = digests[: 16 * held(number, workers)]
            own = Stored(os.urandom(16 * 64))
            self.index.apply(KvBatch(name, 1, 0, (own, Stored(blocks)) if blocks else (own,)))
            for active in range(ACTIVE):
                load = LoadHeader(draw.randrange(100, 4000), 0, "gateway", 1 << 62, "standard", 1)
                keys = keys_view(os.urandom(16 * 20))
                self.tracker.admit(
                    f"{number}-{active}", 1, name, load, now_ns=1, role="aggregated", echoed=True, keys=keys
                )
        request = GenerateRequest(
            "01890000-0000-7000-8000-000000000000",
            "m",
            "gateway",
            os.urandom(4 * PROMPT_TOKENS),
            Stop(64),
            1,
            1 << 62,
            digests,
        )
        self._pending = PendingRequest(request, wire.encode(request), "reply", 1)
        self._decisions = Decisions(self.tracker, array_decisions(self.tracker), "kv", Weights())
        self._turn = 0

    def place(self) -> bytes:
        """Take one request from its arrival to the bytes of its job, without admitting it."""
        self._turn += 1
        pending, turn = self._pending, self._turn
        keys = keys_view(pending.request.digests)
        request = routing_request(pending, keys, avoid=frozenset(), revision=None)
        decision = self._decisions.decide(request, keys, self.index.depths(keys), now_ns=turn, seed=turn, number=turn)
        job = build_job(
            pending,
            decision,
            mode="kv",
            router="router-0",
            revision="",
            prompt_blocks=len(keys),
            positions=Positions(turn, turn, turn),
            now_ns=turn,
            inputs=DecisionInputs(turn, turn, 0, 0),
        )
        return wire.encode(job)


def decisions() -> Iterator[tuple[int, str, Callable[[], bytes]]]:
    """For each case: the number of workers, which of them hold the prompt, and the call to measure."""
    for workers in WORKERS:
        for what, held in HELD.items():
            yield workers, what, Fleet(workers, held).place
