"""What routers and gateways tell each other so that gateways can choose the cell of a request. Never stored."""

import msgspec

from penstock.schemas.wire import decoder


class ModelLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """How loaded the workers of a model are in a cell.

    Attributes:
        model: canonical name.
        tokens: of the least loaded worker, in prompt tokens of work.
        workers: how many take requests.
    """

    model: str
    tokens: float
    workers: int


class CellLoads(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the models that a router of the cell owns."""

    router: str
    models: tuple[ModelLoad, ...] = ()


class SentRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that a gateway sent to a cell.

    Attributes:
        cell: its number within the deployment.
        tokens: of the prompt, that the cell had not cached.
        prefixes: names of the prompt's beginnings, each longer than the one before by as much.
    """

    cell: int
    model: str
    tokens: int
    prefixes: tuple[int, ...] = ()


class SentRequests(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway sent since its last message of this kind."""

    gateway: str
    requests: tuple[SentRequest, ...] = ()


decode_loads = decoder(CellLoads)
decode_sent = decoder(SentRequests)
