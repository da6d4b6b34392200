"""KV-cache events: worker → router, batched per engine step; ``seq`` grows by one per batch of a rank.

A worker's attention data-parallel ranks have a cache each, and each its own sequence of batches. A gap, or a new
``epoch`` (the worker's cache was made anew), voids what was known of that rank; the reader forgets it and asks for a
dump. Events tell when a name enters or leaves the cache, not block operations.
"""

import msgspec

from schemas.wire import decoder


class Stored(msgspec.Struct, frozen=True, omit_defaults=True, tag="s"):
    """Names that can now be reused: packed digests, oldest first, each the child of the last."""

    digests: bytes
    parent: bytes | None = None  # of the first; None: a prompt starts here
    group: int = 0  # layers that share one block table
    tier: int = 0  # 0 device, 1 host, 2 disk


class Removed(msgspec.Struct, frozen=True, omit_defaults=True, tag="r"):
    """Names that can no longer be reused, packed, in no particular order."""

    digests: bytes
    group: int = 0
    tier: int = 0


class Cleared(msgspec.Struct, frozen=True, tag="c"):
    """The whole cache was dropped."""


KvEvent = Stored | Removed | Cleared


class KvBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    worker: str
    epoch: int  # ns since 1970 when the worker's cache was made
    seq: int  # of a rank in an epoch; the first is 0 if its cache was empty, else 1
    events: tuple[KvEvent, ...] = ()
    rank: int = 0


class KvDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """All names in a rank's cache as if freshly stored, parents first, as of just after batch ``seq`` (-1: none yet).

    The pages of one rank come after those of another; a rank without names has an empty one.
    """

    worker: str
    epoch: int
    seq: int
    events: tuple[KvEvent, ...] = ()
    rank: int = 0
    next_page: int = 0  # ask again with this page number; 0: that was all


decode = decoder(KvBatch)
decode_dump = decoder(KvDump)
