"""Creates and changes API keys for an operator: entries of the ``keys`` bucket, with compare-and-set.

``penstock keys import`` reads what ``penstock keys export`` writes, so several deployments can have the same keys. Each
line is an entry of the bucket as JSON. It has the key's digest, from which the key cannot be computed.
"""

import datetime
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from nats.errors import Error as NatsError

from penstock.infra.bus.audit import person, recorded
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, read
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE, decode_publish_reply
from penstock.schemas.keys import ApiKey, check_fields, check_id, decode
from penstock.schemas.subjects import DEFAULT_TENANT, HEADER_LAST_ON_SUBJECT
from penstock.schemas.tenants import check_name
from penstock.schemas.wire import encode

WITHIN_S = 5.0
TRIES = 5
NONE = "none"


class KeyProblem(ValueError):
    """A key cannot be created or changed; the text says why."""


async def all_keys(
    bus: Bus, unreadable: Callable[[str], None] = lambda key_id: None, *, whole: bool = False
) -> list[ApiKey]:
    """Every key, including revoked ones, newest last.

    Args:
        unreadable: called with the id of each entry that cannot be read; it is left out.
        whole: the keys will be copied, so no field may be missing.
    Raises:
        KeyProblem: a key has fields of a later release, and ``whole`` is set.
    """
    found: list[ApiKey] = []
    async for entry in read(bus, f"KV_{bus.subjects.bucket('keys')}", f"$KV.{bus.subjects.bucket('keys')}.>"):
        try:
            key = decode(entry.data)
        except msgspec.MsgspecError:
            if entry.data:
                unreadable(entry.subject.rpartition(".")[2])
            continue
        if whole:
            try:
                check_fields(msgspec.msgpack.decode(entry.data))
            except ValueError as error:
                raise KeyProblem(f"{key.prefix} cannot be copied: {error}") from None
        found.append(key)
    return sorted(found, key=lambda key: key.created_ns)


async def check_tenant(bus: Bus, tenant: str) -> None:
    """
    Raises:
        KeyProblem: there is no such tenant.
    """
    if not await _is_tenant(bus, tenant):
        raise KeyProblem(f"no tenant {tenant!r}; make it with 'penstock tenants add {tenant}'")


async def check_tenants(bus: Bus, tenants: Iterable[str]) -> None:
    """Check that all tenants of copied keys exist.

    Raises:
        KeyProblem: tenants are missing; the text says how to add them.
    """
    missing = [tenant for tenant in sorted(tenants) if not await _is_tenant(bus, tenant)]
    if missing:
        raise KeyProblem(
            f"the keys are of tenants that are not here: {', '.join(missing)}; nothing was changed. First `penstock "
            "tenants restore`, if the broker lost its disk, or `penstock tenants add` for each, then import again"
        )


async def _is_tenant(bus: Bus, tenant: str) -> bool:
    if tenant == DEFAULT_TENANT:
        return True
    bucket = bus.subjects.bucket("tenants")
    entry = await get_last(bus, f"KV_{bucket}", f"$KV.{bucket}.{tenant}", newest=True)
    return entry is not None and bool(entry.data)


async def add(bus: Bus, key: ApiKey, action: str = "keys create") -> None:
    """
    Args:
        action: its name in the audit log.
    Raises:
        KeyProblem: the broker does not store it.
    """
    limits = changes(ApiKey(key.id, key.digest, tenant=key.tenant), key, time.time_ns(), of_new=True)
    detail = ", ".join(filter(None, (f"of tenant {key.tenant}", limits)))
    async with recorded(bus.nc, bus.subjects, action, key.prefix, detail):
        if not await _write(bus, key, 0):
            raise KeyProblem("a key with this id exists; try again")


async def find(bus: Bus, key_id: str) -> tuple[ApiKey, int]:
    """A key and its revision.

    Raises:
        KeyProblem: there is none, or it cannot be read.
    """
    entry = await get_last(bus, f"KV_{bus.subjects.bucket('keys')}", _subject(bus, key_id), newest=True)
    if entry is None or not entry.data:
        raise KeyProblem(f"no key pst-{key_id}; `penstock keys list --all` shows all keys")
    try:
        return decode(entry.data), entry.seq
    except msgspec.MsgspecError as error:
        raise KeyProblem(
            f"the entry of pst-{key_id} cannot be read ({error}); no gateway admits anyone with it"
        ) from None


async def revoke(bus: Bus, key_id: str) -> tuple[ApiKey, bool]:
    """Revoke a key for good; gateways refuse it from the moment at which they read the entry.

    Returns: the key, and whether it was valid until now.
    Raises:
        KeyProblem: there is none, or the broker does not store it.
    """
    for _ in range(TRIES):
        key, revision = await find(bus, key_id)
        if key.revoked_ns:
            return key, False
        key = msgspec.structs.replace(key, revoked_ns=time.time_ns(), revoked_by=person())
        async with recorded(bus.nc, bus.subjects, "keys revoke", key.prefix, f"of tenant {key.tenant}"):
            if await _write(bus, key, revision):
                return key, True
    raise KeyProblem("others change this key at the same time; try again")


async def change(bus: Bus, key_id: str, **fields: object) -> tuple[ApiKey, ApiKey]:
    """Change fields of a key; gateways apply them from the moment at which they read the entry.

    Returns: the key before and after.
    Raises:
        KeyProblem: there is none, it was revoked, or the broker does not store it.
    """
    for _ in range(TRIES):
        before, revision = await find(bus, key_id)
        if before.revoked_ns:
            raise KeyProblem(f"{before.prefix} was revoked for good: create another key")
        after = msgspec.structs.replace(before, **fields, changed_ns=time.time_ns(), changed_by=person())
        detail = changes(before, after, time.time_ns())
        async with recorded(bus.nc, bus.subjects, "keys set", before.prefix, detail):
            if await _write(bus, after, revision):
                return before, after
    raise KeyProblem("others change this key at the same time; try again")


async def replace(bus: Bus, key: ApiKey) -> None:
    """Replace a key with the same id.

    Raises:
        KeyProblem: there is none, or the broker does not store it.
    """
    before, revision = await find(bus, key.id)
    detail = changes(before, key, time.time_ns())
    async with recorded(bus.nc, bus.subjects, "keys import", key.prefix, detail):
        if not await _write(bus, key, revision):
            raise KeyProblem("others change this key at the same time; try again")


async def _write(bus: Bus, key: ApiKey, revision: int) -> bool:
    """Replace this revision of an entry; False: there is a newer one."""
    try:
        message = await bus.nc.request(
            _subject(bus, key.id), encode(key), timeout=WITHIN_S, headers={HEADER_LAST_ON_SUBJECT: str(revision)}
        )
        reply = decode_publish_reply(message.data)
    except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        raise KeyProblem(
            f"the broker does not store keys ({error!r}); it needs the bucket {bus.subjects.bucket('keys')!r}, which "
            "`penstock streams apply` creates, and credentials of the role keys"
        ) from None
    if reply.error is not None and reply.error.err_code != WRONG_LAST_SEQUENCE:
        raise KeyProblem(f"the broker does not store the key: {reply.error}")
    return reply.error is None


def _subject(bus: Bus, key_id: str) -> str:
    return f"$KV.{bus.subjects.bucket('keys')}.{key_id}"


def state(key: ApiKey, now_ns: int) -> str:
    """ "valid", "expired" or "revoked"."""
    if key.revoked_ns:
        return "revoked"
    return "expired" if key.expires_ns and now_ns >= key.expires_ns else "valid"


def public(key: ApiKey, now_ns: int) -> dict[str, object]:
    """What may be shown of a key."""
    return {
        "key": key.prefix,
        "state": state(key, now_ns),
        "tenant": key.tenant,
        "operator": key.operator,
        "models": ",".join(key.models) or "all",
        "rpm": key.requests_per_minute or None,
        "tpm": key.tokens_per_minute or None,
        "monthly_tokens": key.tokens_per_month or None,
        "max_concurrent": key.max_concurrent or None,
        "priority": key.priority.value if key.priority else None,
        "created": day(key.created_ns),
        "created_by": key.created_by,
        "changed": day(key.changed_ns) or None,
        "changed_by": key.changed_by or None,
        "expires": day(key.expires_ns) or None,
        "revoked": day(key.revoked_ns) or None,
        "revoked_by": key.revoked_by or None,
        "about": key.about,
    }


def day(at_ns: int) -> str:
    return f"{datetime.datetime.fromtimestamp(at_ns / 1e9):%Y-%m-%d %H:%M:%S}" if at_ns else ""


def changes(before: ApiKey, after: ApiKey, now_ns: int, *, of_new: bool = False) -> str:
    """The changed fields that may be shown, such as "rpm: 60 → 120, expires: none → 2027-01-31 00:00:00".

    Args:
        of_new: there was no key before, so earlier values are left out.
    """
    old, new = public(before, now_ns), public(after, now_ns)
    names = [name for name in new if old[name] != new[name] and not name.startswith(("changed", "created"))]
    return ", ".join(f"{name}: {'' if of_new else f'{_shown(old[name])} → '}{_shown(new[name])}" for name in names)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value in (None, "") else str(value)


DIGEST_BYTES = 32
MAX_LINE = 65_536  # characters


class Copied(NamedTuple):
    """Numbers of keys that were added, changed, revoked, and left as they were."""

    added: int
    changed: int
    revoked: int
    unchanged: int


def line_of(key: ApiKey) -> str:
    return msgspec.json.encode(key).decode() + "\n"


def read_keys(lines: Iterable[str]) -> list[ApiKey]:
    """The keys of all lines, each once. A key is revoked if any line says so.

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
        except ValueError as error:  # includes msgspec's errors
            raise ValueError(
                f"line {number} is not what this release's `penstock keys export` writes: {error}"
            ) from None
        keys[key.id] = known if known.revoked_ns or (not key.revoked_ns and known.changed_ns > key.changed_ns) else key
    return list(keys.values())


async def copy_into(bus: Bus, keys: Sequence[ApiKey]) -> Copied:
    """Add missing keys, apply limits that were changed later in the export, and revoke keys that it has as revoked.

    Nothing else changes. Revoked keys are added, too: an older export of another deployment may have them as valid.

    Raises:
        KeyProblem: a tenant is missing, the broker does not store the keys, or a key has another digest here.
    """
    here = {key.id: key for key in await all_keys(bus)}
    new = [key for key in keys if key.id not in here]
    valid = [key for key in new if not key.revoked_ns]
    await check_tenants(bus, {key.tenant for key in valid})
    for key in keys:
        if key.id in here and key.digest != here[key.id].digest:
            raise KeyProblem(f"{key.prefix} is another key here; nothing was changed")
    for key in new:
        await add(bus, key, "keys import")
    ended = [key for key in keys if key.revoked_ns and key.id in here and not here[key.id].revoked_ns]
    for key in ended:
        await revoke(bus, key.id)
    later = [key for key in valid_here(keys, here) if key.changed_ns > here[key.id].changed_ns]
    for key in later:
        await replace(bus, key)
    revoked, there = len(ended) + len(new) - len(valid), sum(key.id in here for key in keys)
    return Copied(len(valid), len(later), revoked, there - len(ended) - len(later))


def valid_here(keys: Sequence[ApiKey], here: Mapping[str, ApiKey]) -> list[ApiKey]:
    """Keys that are in both places, and revoked in neither."""
    return [key for key in keys if key.id in here and not key.revoked_ns and not here[key.id].revoked_ns]
