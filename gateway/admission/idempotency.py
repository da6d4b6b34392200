"""Idempotency keys: a client's key stands for the request that was first made under it, for a day.

Both APIs use it: ``Idempotency-Key`` over HTTP, ``Nats-Msg-Id`` over NATS. The key is stored with the request's id
before the request is in the log. A gateway that finds a key without a request submits it under that id; the log stores
it once.
"""

from typing import NamedTuple

import msgspec
from blake3 import blake3
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE, compare_and_set
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import time_of
from penstock.schemas.wire import decoder, encode

KEEP_S = 86_400
STALE_NS = 60_000_000_000  # a request is stored, or given up, long before its claim is this old
_TIMEOUT_S = 5.0
_TRIES = 3


class Identity(msgspec.Struct, frozen=True):
    """One entry of the ``idempotency`` bucket."""

    request: str
    body: bytes  # digest; empty for a request that is not to be stored


class Claim(NamedTuple):
    """``fresh``: the key had not been claimed before. ``revision``: of the bucket's entry."""

    request: str
    fresh: bool
    revision: int = 0


class IdempotencyConflict(ServingError):
    """A key was used again for something else."""

    def __init__(self) -> None:
        super().__init__(
            Code.idempotency_conflict, "this key was used with another body; use a new one for a new request"
        )


_identity = decoder(Identity)


def digest_of(body: bytes) -> bytes:
    return blake3(body).digest(length=16)


def _subject(bus: Bus, tenant: str, name: str) -> str:
    digest = blake3(f"{tenant}\0{name}".encode()).hexdigest(length=20)
    return f"$KV.{bus.subjects.bucket('idempotency')}.{tenant}.{digest}"


async def claim(bus: Bus, tenant: str, name: str, body: bytes | None, request_id: str) -> Claim:
    """The request that ``name`` stands for: ``request_id``, unless another was claimed within a day.

    Args:
        body: None: nothing of it may be stored, not even its digest. Another body is then not noticed.
    Raises:
        ServingError: idempotency_conflict: it was claimed with another body; broker_unavailable.
    """
    subject, digest = _subject(bus, tenant, name), _digest(body)
    revision = 0
    for _ in range(_TRIES):
        made = await _write(bus, subject, Identity(request_id, digest), revision)
        if made:
            return Claim(request_id, True, made)
        stored = await _get(bus, subject)
        if stored is None:
            revision = 0
        elif not stored[0]:
            revision = stored[1]  # a marker of one that expired
        else:
            return _checked(stored, digest, request_id)
    raise _unavailable("its key is being claimed by others")


async def reclaim(
    bus: Bus,
    tenant: str,
    name: str,
    body: bytes | None,
    request_id: str,
    claimed: Claim,
    *,
    deleted: bool = False,
) -> Claim:
    """Take over a claim whose request is not in the log: under its own id, or under a new one if that is old.

    An id says when its request was stored, so an old one would not be found again.

    Args:
        deleted: the request was in the log, which discards its id from then on: take a new one in any case.
    Raises:
        ServingError: idempotency_conflict; broker_unavailable.
    """
    if not deleted and bus.clock.now_ns() - time_of(claimed.request) < STALE_NS:
        return claimed
    subject, digest = _subject(bus, tenant, name), _digest(body)
    made = await _write(bus, subject, Identity(request_id, digest), claimed.revision)
    if made:
        return Claim(request_id, True, made)
    stored = await _get(bus, subject)
    if stored is None or not stored[0]:
        raise _unavailable("its key is being claimed by others")
    return _checked(stored, digest, request_id)


async def find_claim(bus: Bus, tenant: str, name: str, digest: bytes | None = None) -> Claim | None:
    """The request that ``name`` stands for; None: none that is known.

    Args:
        digest: of the body, if given: it must be the one that it was claimed with.
    Raises:
        ServingError: idempotency_conflict; broker_unavailable.
    """
    stored = await _get(bus, _subject(bus, tenant, name))
    if stored is None or not stored[0]:
        return None
    return _checked(stored, digest, "")


def _digest(body: bytes | None) -> bytes:
    return digest_of(body) if body is not None else b""


def _checked(stored: tuple[bytes, int], digest: bytes | None, request_id: str) -> Claim:
    stored_claim = _identity(stored[0])
    if digest and stored_claim.body and stored_claim.body != digest:
        raise IdempotencyConflict
    # Our own, if its acknowledgement was lost.
    return Claim(stored_claim.request, stored_claim.request == request_id, stored[1])


async def _get(bus: Bus, subject: str) -> tuple[bytes, int] | None:
    """Value and revision as the leader has them: a replica may not have the newest yet."""
    entry = await get_last(bus, f"KV_{bus.subjects.bucket('idempotency')}", subject, newest=True, within_s=_TIMEOUT_S)
    return (entry.data or b"", entry.seq) if entry is not None else None


async def _write(bus: Bus, subject: str, value: Identity, revision: int) -> int:
    """Store a claim in the place of this revision; its own revision, or 0: there is another one.

    Raises:
        ServingError: broker_unavailable.
    """
    try:
        reply = await compare_and_set(bus.nc, subject, encode(value), revision, _TIMEOUT_S, ttl_s=KEEP_S)
    except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        raise _unavailable(repr(error)) from None
    if reply.error is None:
        return reply.seq
    if reply.error.err_code != WRONG_LAST_SEQUENCE:
        raise _unavailable(str(reply.error))
    return 0


def _unavailable(why: str) -> ServingError:
    return ServingError(
        Code.broker_unavailable, f"the broker does not confirm the key ({why}); try again", retry_after=1.0
    )
