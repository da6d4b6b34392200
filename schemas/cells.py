"""What routers tell gateways so that these can choose the cell of a request. Never stored."""

import msgspec

from penstock.schemas.wire import decoder


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
    """

    model: str
    held: int = 0
    targets: tuple[TargetLoad, ...] = ()


class CellLoads(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the models that a router of the cell owns."""

    router: str
    models: tuple[ModelLoad, ...] = ()


class CellCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request costs in a cell, as its router would place it now.

    Attributes:
        tokens: of work, at the worker where it costs least; 0 if none has room.
        full: no worker has room: it would be held.
        held: prompt tokens of requests that are held already, for each worker.
    """

    tokens: float = 0.0
    full: bool = False
    held: float = 0.0


decode_loads = decoder(CellLoads)
decode_cost = decoder(CellCost)
