"""Names of KV blocks: a chain of blake3 digests, equal on every machine.

A block is ``block_size`` tokens. Its digest covers every token before it, so equal digests mean equal prefixes. Digests
are sent packed, 16 bytes each; routers key their index by the first 8 (``key_of``).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct

from blake3 import blake3

from penstock.schemas.subjects import DEFAULT_TENANT

DIGEST_BYTES = 16
DEFAULT_BLOCK_SIZE = 32

_OF_TENANT = "tenant/"
_KEY = Struct("<q")


@lru_cache(maxsize=256)  # few have a salt
def root(revision: str, lora: str = "", salt: str = "") -> bytes:
    """The parent digest of a first block: everything except tokens that decides the KV content.

    ``revision`` names the weights; ``salt`` separates tenants that must not share cache.
    """
    parts = b"".join(len(part).to_bytes(4, "little") + part for part in map(str.encode, (revision, lora, salt)))
    return blake3(parts).digest(length=DIGEST_BYTES)


def tenant_salt(tenant: str, chosen: str) -> str:
    """The salt of a tenant's requests with a client's ``cache_salt``; unique for each (tenant, chosen).

    For the default tenant it is the chosen salt itself, unless that could be another tenant's.
    """
    if tenant == DEFAULT_TENANT and not chosen.startswith(_OF_TENANT):
        return chosen
    return f"{_OF_TENANT}{tenant}/{chosen}"


def extend(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """The digest of one block: parent ‖ its tokens as packed u32 ‖ hashes of media whose placeholders are in it."""
    return blake3(parent + tokens + extra).digest(length=DIGEST_BYTES)


def chain(tokens: bytes, block_size: int, parent: bytes, extra: Mapping[int, bytes] | None = None) -> bytes:
    """Packed digests of every full block of ``tokens`` (packed u32), oldest first.

    Args:
        extra: by block position, concatenated media hashes of that block.
    """
    width = block_size * 4
    digests = []
    if extra:
        for position, start in enumerate(range(0, len(tokens) - width + 1, width)):
            parent = extend(parent, tokens[start : start + width], extra.get(position, b""))
            digests.append(parent)
    else:
        for start in range(0, len(tokens) - width + 1, width):
            parent = blake3(parent + tokens[start : start + width]).digest(DIGEST_BYTES)
            digests.append(parent)
    return b"".join(digests)


def media_extra(spans: Iterable[tuple[int, int, bytes]], block_size: int) -> dict[int, bytes]:
    """The ``extra`` of ``chain``: the media in each block.

    Args:
        spans: (position of its first placeholder token, placeholder tokens, blake3 of the raw bytes) per medium, in
            order.
    """
    extra: dict[int, bytes] = {}
    for position, tokens, digest in spans:
        for block in range(position // block_size, -(-(position + tokens) // block_size)):
            extra[block] = extra.get(block, b"") + digest
    return extra


def split(digests: bytes) -> list[bytes]:
    """Packed digests as a list.

    Raises:
        ValueError: the length is not a multiple of 16.
    """
    if len(digests) % DIGEST_BYTES:
        raise ValueError(f"{len(digests)} bytes are not a whole number of {DIGEST_BYTES}-byte digests")
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]


def key_of(digest: bytes) -> int:
    """A router's index key: the first 8 bytes as a signed 64-bit integer."""
    key: int = _KEY.unpack_from(digest)[0]
    return key


def keys_of(digests: bytes) -> tuple[int, ...]:
    """Index keys of packed digests."""
    count = len(digests) // DIGEST_BYTES
    return Struct("<" + "q8x" * count).unpack(digests[: count * DIGEST_BYTES])
