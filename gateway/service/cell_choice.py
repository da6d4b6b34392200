"""Which cell of a deployment takes a new request, and what gateways have to hear for that.

Each cell costs, in prompt tokens of work, and the cheapest one takes the request:

    2 · u + load - 1024 (the cell that is nearest to this gateway)

u: tokens of the prompt that the cell has not cached, as far as gateways have seen what was sent there
load: of the cell's least loaded worker, as its routers say, with its share of what gateways have sent there since

u counts twice, once for this request and once for those that come behind it, as it does in the choice of a worker
(``penstock.router.placement.cost``). The nearest cell is preferred so that short prompts stay in one cell, and what a
gateway sends goes to few brokers.

The routers of each cell say how loaded its workers are. Gateways tell each other at home what they have just sent: what
is not known of others for 10 ms costs 7 % of the mean time to the first token (simulated on a recorded trace).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.block_hashes import DIGEST_BYTES
from penstock.schemas.cells import CellLoads, ModelLoad, SentRequest, SentRequests, decode_loads, decode_sent
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.wire import encode

OWN_WORK = 2.0
NEAREST = 1024.0  # prompt tokens; without it, short prompts and the flushes of a gateway are spread over all cells
STEP_TOKENS = 256  # of a prompt's blocks, one of so many tokens is remembered
PREFIXES = 1 << 18  # remembered for each cell: of 64 million tokens


class _CellLoad:
    """What is known of one cell."""

    def __init__(self) -> None:
        self.loads: dict[str, ModelLoad] = {}
        self.sent: dict[str, float] = {}  # tokens, by model, since ``loads`` came
        self.prefixes: OrderedDict[int, None] = OrderedDict()

    def cached(self, prefixes: Sequence[int]) -> int:
        """How many of a prompt's beginnings the cell has."""
        known = self.prefixes
        for count, prefix in enumerate(prefixes):
            if prefix not in known:
                return count
        return len(prefixes)

    def load(self, model: str) -> float:
        known, sent = self.loads.get(model), self.sent.get(model, 0.0)
        return sent if known is None else known.tokens + sent / max(1, known.workers)

    def note(self, sent: SentRequest) -> None:
        self.sent[sent.model] = self.sent.get(sent.model, 0.0) + sent.tokens
        for prefix in sent.prefixes:
            self.prefixes[prefix] = None
            self.prefixes.move_to_end(prefix)
        while len(self.prefixes) > PREFIXES:
            self.prefixes.popitem(last=False)


class CellChoice:
    """
    Args:
        cells: how many there are.
        nearest: the one that is preferred.
    """

    def __init__(self, cells: int, nearest: int) -> None:
        self._cells = [_CellLoad() for _ in range(cells)]
        self._nearest = nearest

    def choose(self, request: GenerateRequest, usable: Sequence[int]) -> SentRequest:
        """The cell for a request. It counts as sent there from now on, here; pass the result on to other gateways.

        Args:
            usable: cells with workers and room for it; empty: it waits in the nearest one.
        """
        prefixes, step = prefixes_of(request), _step(request) * request.block_size
        tokens = request.prompt_tokens
        best, least, uncached = self._nearest, float("inf"), tokens
        for number in usable:
            cell = self._cells[number]
            missing = max(1, tokens - step * cell.cached(prefixes))
            cost = OWN_WORK * missing + cell.load(request.model) - (NEAREST if number == self._nearest else 0.0)
            if cost < least:
                best, least, uncached = number, cost, missing
        sent = SentRequest(best, request.model, uncached, prefixes)
        self.note(sent)
        return sent

    def note(self, sent: SentRequest) -> None:
        """A gateway sent a request to a cell."""
        if 0 <= sent.cell < len(self._cells):
            self._cells[sent.cell].note(sent)

    def observe(self, cell: int, loads: CellLoads) -> None:
        """A router of a cell says how loaded the workers of its models are."""
        known = self._cells[cell]
        for each in loads.models:
            known.loads[each.model] = each
            known.sent.pop(each.model, None)


def prefixes_of(request: GenerateRequest) -> tuple[int, ...]:
    """Names of a prompt's beginnings of ``STEP_TOKENS``, twice as many, and so on; of full blocks only."""
    digests, width = request.digests, _step(request) * DIGEST_BYTES
    return tuple(
        int.from_bytes(digests[end - DIGEST_BYTES : end - DIGEST_BYTES + 8], "little")
        for end in range(width, len(digests) + 1, width)
    )


def _step(request: GenerateRequest) -> int:
    """Blocks between two beginnings that are remembered."""
    return max(1, STEP_TOKENS // request.block_size)


log = structlog.get_logger("gateway")

TELL_S = 0.005
MOST = 256  # requests in one message


class CellNews:
    """
    Args:
        buses: of the cells, home first.
        gateway: id of this one.
    """

    def __init__(self, buses: Sequence[Bus], gateway: str, choice: CellChoice, tasks: Tasks) -> None:
        self._buses = buses
        self._gateway = gateway
        self._choice = choice
        self._tasks = tasks
        self._sent: list[SentRequest] = []
        self._telling: asyncio.Task[None] | None = None

    async def follow(self, cell: int) -> None:
        bus = self._buses[cell]
        await bus.nc.subscribe(bus.subjects.loads, cb=self._on_loads(cell))
        if not cell:  # at home, gateways hear of each other
            await bus.nc.subscribe(bus.subjects.sent, cb=self._on_sent)

    def sent(self, request: SentRequest) -> None:
        """This gateway sent a request: others hear of it in a moment."""
        self._sent.append(request)
        if self._telling is None or self._telling.done():
            self._telling = self._tasks.spawn(self._tell(), name="tell-sent")

    async def _tell(self) -> None:
        await asyncio.sleep(TELL_S)
        home = self._buses[0]
        while self._sent:
            part, self._sent = self._sent[:MOST], self._sent[MOST:]
            # Nothing waits for a broker that is away: what others do not hear costs little.
            home.nc.post(home.subjects.sent, encode(SentRequests(self._gateway, tuple(part))))

    def _on_loads(self, cell: int) -> Any:
        async def handle(message: Any) -> None:
            try:
                loads = decode_loads(message.data)
            except msgspec.MsgspecError as error:
                log.debug("loads_unreadable", error=str(error))
                return
            self._choice.observe(cell, loads)

        return handle

    async def _on_sent(self, message: Any) -> None:
        try:
            told = decode_sent(message.data)
        except msgspec.MsgspecError as error:
            log.debug("sent_unreadable", error=str(error))
            return
        if told.gateway != self._gateway:
            for each in told.requests:
                self._choice.note(each)
