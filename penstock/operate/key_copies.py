"""The same API keys in several deployments: what ``penstock keys export`` writes, ``penstock keys import`` reads.

A line is an entry of the ``keys`` bucket as JSON. It has the key's digest, and nobody can make the key from that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.operate import key_store
from penstock.operate.key_store import KeyProblem
from penstock.schemas.keys import ApiKey, check_fields, check_id
from penstock.schemas.tenants import check_name

DIGEST_BYTES = 32
MAX_LINE = 65_536  # characters


class Copied(NamedTuple):
    """How many keys were added, changed and revoked, and how many were as they should be."""

    added: int
    changed: int
    revoked: int
    unchanged: int


def line_of(key: ApiKey) -> str:
    return msgspec.json.encode(key).decode() + "\n"


def read_keys(lines: Iterable[str]) -> list[ApiKey]:
    """What the lines say, each key once: a key that one line says is revoked is revoked.

    Raises:
        ValueError: a line is not a key, has a later release's fields, or a key has two digests; the text has the
            line's number.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key = msgspec.json.decode(line[:MAX_LINE], type=ApiKey)
            check_fields(msgspec.json.decode(line[:MAX_LINE]))
            if check_id(key.id) != key.id or len(key.digest) != DIGEST_BYTES:
                raise ValueError("its id or its digest is damaged")
            check_name(key.tenant)
            known = keys.get(key.id, key)
            if known.digest != key.digest:
                raise ValueError(f"{key.prefix} has another digest in an earlier line")
        except ValueError as error:  # msgspec's are, too
            raise ValueError(
                f"line {number} is not what this release's `penstock keys export` writes: {error}"
            ) from None
        keys[key.id] = known if known.revoked_ns or (not key.revoked_ns and known.changed_ns > key.changed_ns) else key
    return list(keys.values())


async def copy_into(bus: Bus, keys: Sequence[ApiKey]) -> Copied:
    """Add the keys that are not here, give others the limits that they were given later there, and revoke those that
    were revoked there. Nothing else changes.

    Revoked keys are added as such: an older export of another deployment may have them as valid ones.

    Raises:
        KeyProblem: a tenant is not here, the broker does not store the keys, or a key has another digest here.
    """
    here = {key.id: key for key in await key_store.all_keys(bus)}
    new = [key for key in keys if key.id not in here]
    valid = [key for key in new if not key.revoked_ns]
    await key_store.check_tenants(bus, {key.tenant for key in valid})
    for key in keys:
        if key.id in here and key.digest != here[key.id].digest:
            raise KeyProblem(f"{key.prefix} is another key here; nothing was changed")
    for key in new:
        await key_store.add(bus, key)
    ended = [key for key in keys if key.revoked_ns and key.id in here and not here[key.id].revoked_ns]
    for key in ended:
        await key_store.revoke(bus, key.id)
    later = [key for key in valid_here(keys, here) if key.changed_ns > here[key.id].changed_ns]
    for key in later:
        await key_store.replace(bus, key)
    revoked, there = len(ended) + len(new) - len(valid), sum(key.id in here for key in keys)
    return Copied(len(valid), len(later), revoked, there - len(ended) - len(later))


def valid_here(keys: Sequence[ApiKey], here: Mapping[str, ApiKey]) -> list[ApiKey]:
    """Those that are here, too, and were revoked at neither place."""
    return [key for key in keys if key.id in here and not key.revoked_ns and not here[key.id].revoked_ns]
