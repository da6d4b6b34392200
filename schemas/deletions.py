"""A deleted request, noted before anything of it is erased. The key is its id, the key's TTL ``TTL_S``.

Messages of it may come back: a worker whose publish was stored, but never acknowledged, sends its terminal event again
for up to ten minutes, and a broker whose disk was full has what it had erased again after its restart. Whoever knows
the id erases them once more. While a broker of a cluster is away, none is erased, for ten minutes at most.
"""

import msgspec

from penstock.schemas.wire import decoder

TTL_S = 1800  # longer than anybody repeats a publish, and than a broker takes to be there again


class Deletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the request's messages were. Nothing of what they said.

    Attributes:
        record: the subject of its terminal event.
        messages: their sequences, by stream.
    """

    record: str
    messages: dict[str, tuple[int, ...]] = {}


decode = decoder(Deletion)
