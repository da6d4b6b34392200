"""Chooses the cell of a deployment that takes a new request.

Each cell costs, in prompt tokens of work, and the cheapest one takes the request:

    cost of the worker where it costs least + h - 1024 (the cell that is nearest to this gateway)

The cost of a worker is the one by which routers choose (``penstock.router.placement.cost``). For a prompt that is long
enough for it to matter what a cell has cached, the routers of all cells are asked. Simulated on a recorded trace, the
mean time to the first token of eight workers is then within 2 % of one router's, with four cells as with two; from what
gateways can see by themselves it was 5 to 9 % longer. For short prompts the loads suffice that routers publish.

Of more than 16 cells, 16 are compared: the nearest, some that depend on what the prompt begins with, and others in
turn. So a request costs no more in a deployment with 64 cells than in one with 16.

h: tokens that the cell's router holds for each worker, since no worker has room. If all cells hold requests, the work
that is left of a prompt decides, and a quarter of h: a cell whose held requests begin like this one will have computed
its beginning by then. The nearest cell is preferred so that short prompts stay in one cell, and what a gateway sends
goes to few brokers. Where only published loads are known and nothing is held, it is preferred by what one of its
workers computes within ``UNSEEN_S``, if that is more.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog
from blake3 import blake3
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.schemas.block_hashes import split
from penstock.schemas.cells import (
    HELD_UP,
    HELD_UP_COMPUTING,
    MOST_HELD_UP,
    OWN_WORK,
    PASS_TOKENS,
    SLOT_TOKENS,
    CellCost,
    CellLoads,
    ModelLoad,
    RoomAnswer,
    RoomQuestion,
    decode_cost,
    decode_loads,
)
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.wire import encode

NEAREST = 1024.0  # prompt tokens; without it, short prompts and the flushes of a gateway are spread over all cells
# Published loads are up to 20 ms old, and lack what their router has not read yet. What an engine computes meanwhile
# says nothing, and all gateways would follow it to the same cell together: with an engine that takes 1 µs for a token,
# each of four cells got between 1 and 69 requests in 20 ms, instead of 16 to 49. To stay serves 9 % more requests/s at
# 256 and at 512 connections on 16 cores (``tests.perf.scale``, two deployments in turns, 5 and 4 rounds).
UNSEEN_S = 0.04
ASK_TOKENS = 512  # in shorter prompts, what is cached cannot outweigh ``NEAREST``
ASK_LOADS_S = 1.0  # routers publish loads as long as they are asked to
ASK_S = 0.02  # then what gateways can see by themselves decides
# In overload, what a cell holds counts less than prompts that begin alike: these belong together, since one of them is
# computed from what the other has left in a cache. With 1 instead of 1 / 4, the mean is 7 to 45 % higher.
HELD = 1 / 4
# Cells for a request: each that is asked costs the gateway and its router a message. If only eight of 16 are compared,
# the mean time to the first token is 9 to 20 % longer; if all 16, within 1 % of one router's.
CONSIDERED = 16
ALIKE = (
    1,
    8,
    32,
    128,
)  # blocks; for each, one of these cells is the same for all prompts that begin with the same ones
FULL = 1e7  # prompt tokens; a cell without room is taken when all are


class _Target(msgspec.Struct, gc=False):
    """A worker as its router has described it, with what this gateway has sent to its cell since."""

    uncomputed: int
    computing: int
    decoding: int
    waiting: int

    def cost(self, tokens: int) -> float:
        held_up = min(HELD_UP * self.decoding + HELD_UP_COMPUTING * self.computing, MOST_HELD_UP)
        own = (OWN_WORK + held_up) * tokens
        return self.uncomputed * (1.0 + min(tokens / PASS_TOKENS, 1.0)) + own + self.waiting


class _Cell:
    """What is known of one cell."""

    def __init__(self) -> None:
        self.held: dict[str, float] = {}  # tokens for each worker, by model
        self.work_ns: dict[str, int] = {}  # of a token, by model; 0: unknown
        self.targets: dict[str, list[_Target]] = {}

    def cost(self, model: str, tokens: int) -> float:
        targets = self.targets.get(model)
        if not targets:  # nothing is known of them yet
            return OWN_WORK * tokens
        return min(target.cost(tokens) for target in targets) + self.held.get(model, 0.0)

    def preference(self, model: str) -> float:
        """In prompt tokens, as the nearest cell."""
        work_ns = self.work_ns.get(model, 0)
        return max(NEAREST, UNSEEN_S * 1e9 / work_ns) if work_ns and not self.held.get(model) else NEAREST

    def is_idle(self, model: str) -> bool:
        """Whether nothing is held, and a worker has a free slot and no prompt to compute."""
        if self.held.get(model, 0.0):
            return False
        targets = self.targets.get(model, ())
        return any(not (each.uncomputed or each.computing) and each.waiting < SLOT_TOKENS for each in targets)

    def sent(self, model: str, tokens: int) -> None:
        if targets := self.targets.get(model):
            target = min(targets, key=lambda each: each.cost(tokens))
            target.uncomputed += tokens
            target.computing += 1

    def observe(self, load: ModelLoad) -> None:
        self.targets[load.model] = [
            _Target(each.uncomputed, each.computing, each.decoding, each.waiting) for each in load.targets
        ]
        self.held[load.model] = load.held / max(1, len(load.targets))
        self.work_ns[load.model] = load.work_ns


class CellChoice:
    """Pure.

    Args:
        cells: how many there are.
        nearest: the one that is preferred.
    """

    def __init__(self, cells: int, nearest: int) -> None:
        self._cells = [_Cell() for _ in range(cells)]
        self._nearest = nearest
        self._turn = nearest

    def choose(
        self, model: str, tokens: int, usable: Sequence[int], costs: Mapping[int, CellCost] | None = None
    ) -> int:
        """The cell for a request. It counts as sent there, until its router has counted it.

        Args:
            tokens: of the prompt.
            usable: cells with workers and room for it; empty: it waits in the nearest one.
            costs: what routers have answered, by cell; of others, what is known decides.
        """
        best, least = self._nearest, float("inf")
        for number in usable:
            answer = costs.get(number) if costs else None
            if answer is not None:
                cost = answer.tokens + (FULL + HELD * answer.held if answer.full else answer.held)
            else:
                cost = self._cells[number].cost(model, tokens)
            if number == self._nearest:
                cost -= NEAREST if answer is not None else self._cells[number].preference(model)
            if cost < least:
                best, least = number, cost
        self._cells[best].sent(model, tokens)
        return best

    def considered(self, beginnings: Sequence[int], usable: Sequence[int]) -> Sequence[int]:
        """Of many cells, those in which a request is compared: the nearest, those of its beginnings, others in turn.

        Args:
            beginnings: a number for each, which prompts share that begin alike.
        """
        if len(usable) <= CONSIDERED:
            return usable
        chosen = {usable[each % len(usable)] for each in beginnings}
        if self._nearest in usable:
            chosen.add(self._nearest)
        while len(chosen) < CONSIDERED:
            chosen.add(usable[self._turn % len(usable)])
            self._turn += 1
        return sorted(chosen)

    def room(self, model: str, prompt_tokens: Sequence[int], others: Sequence[int], *, stranded: bool) -> list[int]:
        """Cells that take requests of another one, for the first of these; they count as sent there.

        Args:
            prompt_tokens: of each request.
            others: cells with workers of the model that accept requests.
            stranded: their own cell has no worker, so a cell without room takes them, too. Otherwise one takes a
                request for each worker that has no prompt to compute and nothing that waits: more would leave it with
                what it then holds itself.
        """
        chosen: list[int] = []
        for tokens in prompt_tokens:
            usable = [each for each in others if stranded or self._cells[each].is_idle(model)]
            if not usable:
                break
            best = min(usable, key=lambda each: self._cells[each].cost(model, tokens))
            self._cells[best].sent(model, tokens)
            chosen.append(best)
        return chosen

    def observe(self, cell: int, loads: CellLoads) -> None:
        """A router of a cell says how loaded the workers of its models are."""
        for each in loads.models:
            self._cells[cell].observe(each)


def beginnings_of(request: GenerateRequest) -> list[int]:
    """Numbers that requests share whose prompts begin alike, or those of a session."""
    if request.session:
        return [int.from_bytes(blake3(request.session.encode()).digest(4), "little")]
    names = split(request.digests)
    return [int.from_bytes(names[length - 1][:4], "little") for length in ALIKE if length <= len(names)]


log = structlog.get_logger("gateway")


class CellChooser:
    """
    Args:
        buses: of the cells.
        nearest: the cell that is preferred.
    """

    def __init__(self, buses: Sequence[Bus], nearest: int) -> None:
        self._buses = buses
        self._choice = CellChoice(len(buses), nearest)
        self._followed: set[int] = set()

    async def follow(self, cell: int) -> None:
        """Take the loads that a cell's routers publish, which ``keep_asking`` has them do."""
        bus = self._buses[cell]

        async def observe(message: Any) -> None:
            try:
                self._choice.observe(cell, decode_loads(message.data))
            except msgspec.MsgspecError as error:  # of a later release
                log.debug("loads_unreadable", error=str(error))

        await bus.nc.subscribe(bus.subjects.loads, cb=observe)
        self._followed.add(cell)

    async def keep_asking(self) -> None:
        """Ask the routers of all cells for loads, until it is cancelled."""
        while True:
            for cell in self._followed:
                bus = self._buses[cell]
                if bus.connected:
                    bus.nc.post(bus.subjects.cost)
            await asyncio.sleep(ASK_LOADS_S)

    async def choose(self, request: GenerateRequest, usable: Sequence[int]) -> int:
        """The cell for a request.

        Args:
            usable: cells with workers and room for it.
        """
        costs: dict[int, CellCost] = {}
        usable = self._choice.considered(beginnings_of(request), usable)
        if request.prompt_tokens >= ASK_TOKENS and len(usable) > 1:
            tokens = request.prompt_tokens
            asked = encode(msgspec.structs.replace(request, prompt=b"", prompt_length=tokens, client_body=b""))
            answers = await asyncio.gather(*(self._ask(cell, asked) for cell in usable))
            costs = {cell: answer for cell, answer in zip(usable, answers, strict=True) if answer is not None}
        return self._choice.choose(request.model, request.prompt_tokens, usable, costs)

    def room(self, question: RoomQuestion, others: Sequence[int]) -> RoomAnswer:
        """See ``CellChoice.room``."""
        tokens = question.prompt_tokens
        return RoomAnswer(tuple(self._choice.room(question.model, tokens, others, stranded=question.stranded)))

    async def _ask(self, cell: int, request: bytes) -> CellCost | None:
        """None: the cell's router did not answer."""
        bus = self._buses[cell]
        try:
            async with asyncio.timeout(ASK_S):  # publishing to a broker that is away blocks
                reply = await bus.nc.request(bus.subjects.cost, request, timeout=ASK_S)
            return decode_cost(reply.data)
        except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.debug("cost_unknown", cell=cell, error=repr(error))
            return None
