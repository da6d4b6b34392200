"""What routers and gateways tell each other so that a request runs in the cell that suits it. Never stored.

A router that cannot place what it holds asks a gateway, which sees all cells, for others that have room. What it then
gives to another cell, it stores in WORK as a job, at a role and under the name of that cell instead of a worker's.
"""

import re

import msgspec

from penstock.schemas.wire import decoder

# What a request costs at a worker: ``penstock.router.placement.cost`` has the formula and the letters. Gateways
# estimate it by the same figures, from the loads below.
OWN_WORK = 2.0
HELD_UP = 1 / 40  # of each sequence: with 1 / 64 answers at the knee take 5 % longer, with 1 / 32 the p99 is 5 % higher
HELD_UP_COMPUTING = 1 / 8  # of each that is not computed; many of them are in the running pass, where u delays none
MOST_HELD_UP = 2.5  # of all these: a higher end lengthens the p99, a lower one the mean
PASS_TOKENS = 8192  # for prompts of this length A counts twice; an engine computes about as many tokens in a pass
SLOT_TOKENS = 3000.0  # prompt tokens that a target computes in the time in which one of its slots becomes free


class TargetLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """How loaded a worker is, or one attention data-parallel rank of it.

    Attributes:
        uncomputed: prompt tokens that it has yet to compute.
        computing: sequences whose prompt it has yet to compute.
        decoding: sequences that it is decoding.
        waiting: in prompt tokens of work, what a further request waits for besides: steps that read the context of
            all sequences, sequences beyond its slots, and the prompts that it was sent lately.
    """

    uncomputed: int = 0
    computing: int = 0
    decoding: int = 0
    waiting: int = 0


class ModelLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """How loaded the workers of a model are in a cell.

    Attributes:
        model: canonical name.
        held: prompt tokens of requests that no worker has room for.
        targets: that compute prompts.
        work_ns: that the slowest of them spends on a token, as in ``fleet.Load``; 0: unknown.
    """

    model: str
    held: int = 0
    targets: tuple[TargetLoad, ...] = ()
    work_ns: int = 0


class CellLoads(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the models that a router of the cell owns."""

    router: str
    models: tuple[ModelLoad, ...] = ()


class CellCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request costs in a cell, as its router would place it now.

    Attributes:
        tokens: of work, at the worker where it costs least; of a request that would be held, the work of those of its
            prompt that the cell neither caches nor computes nor has in what is held already.
        full: no worker has room, or others are held: it would be held.
        held: prompt tokens of requests that are held already, for each worker.
    """

    tokens: float = 0.0
    full: bool = False
    held: float = 0.0


class RoomQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which other cells would take requests that a router holds.

    Attributes:
        model: canonical name.
        prompt_tokens: of each request, in the order in which they are held.
        stranded: no worker is here for them; False: there are too few, so only a cell with room helps.
        revision: of the model, which alone can continue them; "": any.
    """

    model: str
    prompt_tokens: tuple[int, ...]
    stranded: bool = False
    revision: str = ""


class RoomAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """``cells``: for the first requests of the question, the numbers of cells within the deployment, from 0 on."""

    cells: tuple[int, ...] = ()


CELL = "cell"  # role, in WORK, of what runs in another cell


def cell_target(number: int) -> str:
    """The name of a cell in place of a worker's, by its number within the deployment."""
    return f"{CELL}-{number}"


def number_of(target: str) -> int:
    """Inverse of ``cell_target``.

    Raises:
        ValueError: it is no name of a cell.
    """
    kind, _, number = target.partition("-")
    if kind != CELL:
        raise ValueError(f"{target!r} names no cell")
    return int(number)


def is_cell(target: str) -> bool:
    """Whether it is the name of a cell in place of a worker's."""
    kind, _, number = target.partition("-")
    return kind == CELL and number.isdecimal()


def returned_by(number: int, guest: str, why: str) -> str:
    """Why an attempt was returned, by a cell that had it under an id of its own.

    Args:
        number: of the cell within the deployment.
        guest: that id.
    """
    return f"cell {number} as {guest}: {why}"


_RETURNED_BY = re.compile(r"returned: cell [0-9]+ as ([0-9a-f-]{36}): ")


def guest_in(ended: str) -> str:
    """The id that a cell had for an attempt, from how the attempt ended (``EarlierWorker.ended``); "": it says none."""
    found = _RETURNED_BY.match(ended)
    return found[1] if found is not None else ""


decode_room_question = decoder(RoomQuestion)
decode_room_answer = decoder(RoomAnswer)
decode_loads = decoder(CellLoads)
decode_cost = decoder(CellCost)
