"""Messages between routers and gateways about the loads of cells and the choice of a cell. Never stored.

A router that cannot place its held requests asks a gateway, which sees all cells, for cells with room. It passes a
request to another cell by a job in WORK, addressed to the role ``cell`` and the name of that cell.
"""

import re

import msgspec

from penstock.schemas.wire import decoder

# Constants of a request's cost at a worker: ``penstock.router.placement.cost`` has the formula and the letters.
# Gateways estimate costs with the same constants, from the loads below.
OWN_WORK = 2.0
HELD_UP = 1 / 40  # of each sequence: with 1 / 64 answers at the knee take 5 % longer, with 1 / 32 the p99 is 5 % higher
HELD_UP_COMPUTING = 1 / 8  # of each that is not computed; many of them are in the running pass, where u delays none
MOST_HELD_UP = 2.5  # limit of their sum: a higher one lengthens the p99, a lower one the mean
PASS_TOKENS = 8192  # for prompts of this length A counts twice; an engine computes about as many tokens in a pass
SLOT_TOKENS = 3000.0  # prompt tokens that a target computes in the time in which one of its slots becomes free


class TargetLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """The load of a worker, or of one of its attention data-parallel ranks.

    Attributes:
        uncomputed: prompt tokens that it has yet to compute.
        computing: sequences whose prompt it has yet to compute.
        decoding: sequences that it is decoding.
        waiting: other work that delays a further request, in prompt tokens: steps that read the context of all
            sequences, sequences beyond its slots, and recently sent prompts.
    """

    uncomputed: int = 0
    computing: int = 0
    decoding: int = 0
    waiting: int = 0


class ModelLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """The load of a model's workers in a cell.

    Attributes:
        model: canonical name.
        held: prompt tokens of requests that no worker has room for.
        targets: loads of the targets that compute prompts.
        work_ns: time that the slowest target spends on a token, as in ``fleet.Load``; 0: unknown.
    """

    model: str
    held: int = 0
    targets: tuple[TargetLoad, ...] = ()
    work_ns: int = 0


class CellLoads(msgspec.Struct, frozen=True, omit_defaults=True):
    """The loads of the models that a router of the cell owns."""

    router: str
    models: tuple[ModelLoad, ...] = ()


class CellCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of a request in a cell, if its router placed it now.

    Attributes:
        tokens: tokens of work at the cheapest worker. If the request would be held, the work of the prompt tokens that
            the cell neither caches nor computes, and that no held request shares.
        full: the request would be held, because no worker has room or other requests are held.
        held: prompt tokens of held requests, per worker.
    """

    tokens: float = 0.0
    full: bool = False
    held: float = 0.0


class RoomQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Asks which other cells would take requests that a router holds.

    Attributes:
        model: canonical name.
        prompt_tokens: prompt tokens of each request, in the order in which they are held.
        stranded: this cell has no worker for them; False: it has too few, so only a cell with room helps.
        revision: the only revision of the model that can continue them; "": any.
    """

    model: str
    prompt_tokens: tuple[int, ...]
    stranded: bool = False
    revision: str = ""


class RoomAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """``cells``: numbers of cells in the deployment, from 0, one for each of the first requests of the question."""

    cells: tuple[int, ...] = ()


CELL = "cell"  # role in WORK of requests that run in another cell


def cell_target(number: int) -> str:
    """The name of a cell where a worker's name is expected, from its number in the deployment."""
    return f"{CELL}-{number}"


def number_of(target: str) -> int:
    """Inverse of ``cell_target``.

    Raises:
        ValueError: it is not the name of a cell.
    """
    kind, _, number = target.partition("-")
    if kind != CELL:
        raise ValueError(f"{target!r} names no cell")
    return int(number)


def is_cell(target: str) -> bool:
    """Whether this is the name of a cell, not of a worker."""
    kind, _, number = target.partition("-")
    return kind == CELL and number.isdecimal()


def returned_by(number: int, guest: str, why: str) -> str:
    """The reason of an attempt that another cell returned.

    Args:
        number: the other cell's number in the deployment.
        guest: the request's id in the other cell.
    """
    return f"cell {number} as {guest}: {why}"


_RETURNED_BY = re.compile(r"returned: cell [0-9]+ as ([0-9a-f-]{36}): ")


def guest_in(ended: str) -> str:
    """The id of an attempt in another cell, from ``EarlierWorker.ended``; "": it has none."""
    found = _RETURNED_BY.match(ended)
    return found[1] if found is not None else ""


decode_room_question = decoder(RoomQuestion)
decode_room_answer = decoder(RoomAnswer)
decode_loads = decoder(CellLoads)
decode_cost = decoder(CellCost)
