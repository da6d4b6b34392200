"""KV-cache events: worker → router, batched per engine step; ``seq`` grows by one per batch of a rank.

Each attention data-parallel rank of a worker has its own cache and its own sequence of batches. A gap, or a new
``epoch`` (the worker made a new cache), invalidates what a reader has of that rank: it drops it and requests a dump.
Events report names that enter or leave the cache, not block operations.
"""

import msgspec

from penstock.schemas.wire import decoder


class Stored(msgspec.Struct, frozen=True, omit_defaults=True, tag="s"):
    """Blocks that can be reused from now on: packed digests, oldest first, each the child of the one before."""

    digests: bytes
    parent: bytes | None = None  # of the first one; None: it begins a prompt
    group: int = 0  # layers that share one block table
    tier: int = 0  # 0 device, 1 host, 2 disk


class Removed(msgspec.Struct, frozen=True, omit_defaults=True, tag="r"):
    """Blocks that can no longer be reused: packed digests in any order."""

    digests: bytes
    group: int = 0
    tier: int = 0


class Cleared(msgspec.Struct, frozen=True, tag="c"):
    """The whole cache was dropped."""


KvEvent = Stored | Removed | Cleared


class KvBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """What changed in the cache of one rank of a worker, in one message."""

    worker: str
    epoch: int  # ns since 1970 when the worker's cache was made
    seq: int  # of a rank in an epoch; the first is 0 if its cache was empty, else 1
    events: tuple[KvEvent, ...] = ()
    rank: int = 0


class KvDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """All blocks in a rank's cache as ``Stored`` events, parents first, as of just after batch ``seq`` (-1: none yet).

    The ranks' pages come one rank after the other. A rank without blocks has one empty page.
    """

    worker: str
    epoch: int
    seq: int
    events: tuple[KvEvent, ...] = ()
    rank: int = 0
    next_page: int = 0  # the page to request next; 0: this is the last one


decode = decoder(KvBatch)
decode_dump = decoder(KvDump)
