"""KV events, applied as a router applies them."""

from collections.abc import Iterable

from penstock.schemas.block_hashes import split
from penstock.schemas.kv import Cleared, KvEvent, Removed, Stored

Names = dict[tuple[bytes, int], bytes | None]  # (digest, tier) -> parent


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def fold(events: Iterable[KvEvent], names: Names | None = None) -> Names:
    """Blocks after the events. Asserts: each stored once and removed once; on the device parents first and last."""
    found: Names = {} if names is None else names
    for event in events:
        if isinstance(event, Cleared):
            found.clear()
        elif isinstance(event, Stored):
            parent = event.parent
            for each in split(event.digests):
                assert (each, event.tier) not in found, "stored twice"
                assert event.tier or parent is None or (parent, 0) in found, "a child came before its parent"
                found[each, event.tier] = parent
                parent = each
        else:
            assert isinstance(event, Removed)
            for each in split(event.digests):
                del found[each, event.tier]
                assert event.tier or (each, 0) not in {(p, 0) for (_, t), p in found.items() if not t}, "parent first"
    return found
