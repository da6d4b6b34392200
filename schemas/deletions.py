"""An entry about a deleted request, stored before its messages are erased. The key is its id, the key's TTL ``TTL_S``.

Erased messages may reappear: a worker whose publish was stored but never acknowledged repeats its terminal event for up
to ten minutes, and a broker whose disk was full has erased messages again after its restart. Routers that know the id
erase them again. While a broker of a cluster is away, nothing is erased, for ten minutes at most.
"""

import msgspec

from penstock.schemas.wire import decoder

TTL_S = 1800  # longer than a publish is repeated, and than a broker takes to restart


class Deletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The places of the request's messages, without their content.

    Attributes:
        record: the subject of its terminal event.
        messages: their sequences, by stream.
    """

    record: str
    messages: dict[str, tuple[int, ...]] = {}


decode = decoder(Deletion)
