"""Authenticates HTTP requests: finds the caller and its permissions, before anything else happens.

A key comes in ``Authorization: Bearer …`` or ``x-api-key``. It is never read from the URL, which proxies and logs keep.
A request with two different credentials is refused, because a proxy in front and this gateway might trust different
ones. Whether a key admits a request is a pure function of the key table, the tenants and the time.

The table is the ``keys`` bucket: a change arrives within milliseconds, over the republished subject. Once a second the
gateway also compares its position with the end of the bucket. A table that was not confirmed for ``STALE_S`` admits no
one, because a key may have been revoked meanwhile.

What tenants may do is the ``tenants`` bucket as a live table (``TenantTable``), for both APIs.
"""

import asyncio
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.audit import AuditEntry
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey, Limited, decode, digest_of, id_of, matches
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.tenants import Limits, check_name
from penstock.schemas.tenants import decode as decode_limits

log = structlog.get_logger("gateway")

CONFIRM_S = 1.0
STALE_S = 5.0


class KeyTable:
    """``keys`` by id.

    Args:
        changed: called with the id of a key that was added, changed or removed.
        confirmed: called whenever the table was found to match the bucket.
    """

    def __init__(
        self,
        bus: Bus,
        changed: Callable[[str], None],
        confirmed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bucket = bus.subjects.bucket("keys")
        self._stream, self._subject = f"KV_{bucket}", f"$KV.{bucket}.>"
        self.tail = LogTail.of_bucket(bus, "keys", self._on_entry, self._forget)
        self._bus = bus
        self._changed = changed
        self._on_confirmed = confirmed
        self._clock = clock
        self._read = False  # set once all entries that existed at the start were read
        self._confirmed = 0.0  # start of the last comparison that found the table current
        self.keys: dict[str, ApiKey] = {}
        self.unreadable: set[str] = set()  # unreadable entries, by id

    async def start(self, tasks: Tasks) -> None:
        """
        Raises:
            ServingError: the bucket cannot be read.
        """
        began = self._clock()
        await self.tail.start()
        self._read, self._confirmed = True, began
        log.info("keys_read", keys=len(self.keys))
        tasks.spawn(self.confirm(), name="confirm-keys")

    async def stop(self) -> None:
        await self.tail.stop()

    @property
    def current(self) -> bool:
        """Whether the table has all changes that are older than ``STALE_S``."""
        return self._clock() - self._confirmed < STALE_S

    async def confirm(self) -> None:
        while True:
            await asyncio.sleep(CONFIRM_S)
            began = self._clock()
            try:
                async with asyncio.timeout(STALE_S):
                    end = await get_last(self._bus, self._stream, self._subject, newest=True, within_s=STALE_S)
                    # The bucket ends elsewhere: a change was missed, or the broker lost its disk and has a new bucket.
                    if (end.seq if end is not None else 0) != self.tail.position:
                        await self.tail.catch_up()
            except (ServingError, TimeoutError) as error:
                log.debug("keys_not_confirmed", error=repr(error))
                continue
            if end is None or end.seq <= self.tail.position:
                self._confirmed = began
                self._on_confirmed()

    def _forget(self) -> None:
        """The bucket was recreated: a key that is not in it is no longer valid."""
        names = [*self.keys, *self.unreadable]
        self.keys.clear()
        self.unreadable.clear()
        for name in names:
            self._changed(name)

    def _on_entry(self, entry: Entry) -> None:
        name = entry.subject.rpartition(".")[2]
        self.unreadable.discard(name)
        if not entry.data:
            self.keys.pop(name, None)
            self._changed(name)
            return
        try:
            key = decode(entry.data)
            check_name(key.tenant)
            if key.id != name:
                raise ValueError("it has the id of another key")
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("key_unreadable", key=name, error=str(error))
            self.unreadable.add(name)
            self.keys.pop(name, None)  # refuse the key rather than admit it by its earlier entry
        else:
            before, self.keys[name] = self.keys.get(name), key
            if self._read:
                event = "key_added" if before is None else "key_changed"
                log.info("key_revoked" if key.revoked_ns else event, key=key.prefix, tenant=key.tenant, by=key.made_by)
        self._changed(name)


CALLER = "penstock.caller"  # in the ASGI scope of a request


class Sight(NamedTuple):
    """Which stored requests may be read.

    Attributes:
        tenant: whose requests; None: those of all tenants.
        models: canonical names of the models, and names of the adapters, that they ran on. Empty: all.
    """

    tenant: str | None = None
    models: frozenset[str] = frozenset()

    def includes(self, request: GenerateRequest) -> bool:
        return self.tenant in (None, request.tenant) and (not self.models or request.named in self.models)


ALL = Sight()


_NO_LIMITS = Limits()


class Caller:
    """
    Args:
        tenant: the tenant that the requests belong to.
        sees: the tenant whose requests and answers may be read. None: those of all tenants.
        key: the API key. None if keys are not in use, or the request came over NATS.
        models: the models that may be named. Empty: all.
        own_cache: KV is not shared with other tenants.
        limits: of the tenant.

    Attributes:
        limited_by: its key and its tenant, if they have limits.
    """

    __slots__ = ("_base", "_context", "key", "limited_by", "models", "own_cache", "sees", "tenant")

    def __init__(
        self,
        tenant: str,
        sees: str | None,
        *,
        key: ApiKey | None = None,
        models: Iterable[str] = (),
        own_cache: bool = True,
        limits: Limits = _NO_LIMITS,
    ) -> None:
        self.tenant = tenant
        self.sees = sees
        self.key = key
        self.models = frozenset(models)
        self.own_cache = own_cache
        self.limited_by = _limited_by(tenant, key, limits)
        self._base: PrepareContext | None = None
        self._context: PrepareContext | None = None

    def may_name(self, model: str) -> bool:
        return not self.models or model in self.models

    def context(self, base: PrepareContext) -> PrepareContext:
        """The context in which this caller's bodies are prepared."""
        if self._context is None or self._base is not base:
            self._base = base
            self._context = base._replace(
                tenant=self.tenant,
                allowed=self.models or None,
                priority=self.key.priority if self.key is not None else None,
                own_cache=self.own_cache,
                api_key=self.key.prefix if self.key is not None else "",
            )
        return self._context

    def own(self, request: GenerateRequest) -> GenerateRequest:
        """Assign a request that was prepared without a caller's context to this caller."""
        highest = self.key.priority if self.key is not None else None
        priority = highest if highest is not None and request.priority.rank < highest.rank else request.priority
        api_key = self.key.prefix if self.key is not None else ""
        if (self.tenant, api_key) == (request.tenant, request.api_key) and priority is request.priority:
            return request
        return msgspec.structs.replace(request, tenant=self.tenant, priority=priority, api_key=api_key)


def _limited_by(tenant: str, key: ApiKey | None, limits: Limits) -> tuple[Limited, ...]:
    found: tuple[Limited, ...] = ()
    if key is not None and key.limited:
        amounts = key.requests_per_minute, key.tokens_per_minute, key.max_concurrent
        found = (Limited(key.id, f"the API key {key.prefix}", *amounts),)
    if limits.limited:
        amounts = limits.requests_per_minute, limits.tokens_per_minute, 0
        found += (Limited(f"tenant-{tenant}", f"the tenant {tenant!r}", *amounts),)
    return found


OPERATOR = Caller(DEFAULT_TENANT, None)  # the caller with a key that the gateway was started with
ANYONE = Caller(DEFAULT_TENANT, None)  # every caller, while no keys are in use


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """The caller of a request that was admitted."""
    found: Caller = scope[CALLER]
    return found


AUTHORIZATION, API_KEY = b"authorization", b"x-api-key"
_SCHEME = b"bearer "
WANTED = "send it as 'Authorization: Bearer pst-…' or 'x-api-key: pst-…'"


def presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The credential in ASGI headers, whose names are lower case.

    Raises:
        ServingError: invalid_api_key: there is no credential, there are several, or it is not a bearer token.
    """
    found = b""
    for name, value in headers:
        if name == AUTHORIZATION:
            if value[:7].lower() != _SCHEME:
                raise refused(f"the Authorization header is not a bearer token; {WANTED}")
            key = value[7:].strip(b" ")
        elif name == API_KEY:
            key = value.strip(b" ")
        else:
            continue
        if not key:
            raise refused(f"the API key is empty; {WANTED}")
        if found and found != key:
            raise refused("the request presents different credentials; send one")
        found = key
    if not found:
        raise refused(f"this gateway needs an API key; {WANTED}")
    return found


def refused(message: str) -> ServingError:
    return ServingError(Code.invalid_api_key, message)


_LIST = "/v1/requests"
_STORED = (
    *("/v1/requests/", "/v1/responses/", "/v1/files/", "/v1/media/", "/v1/batches/"),
    "/v1/messages/batches/",
)
_AUDITED_PATH = 200  # characters
_NOBODY = digest_of(b"")  # compared if no key has the id, so that both refusals take the same time
_UNKNOWN = "the API key is not valid: it may be mistyped, or belong to another deployment"


def find_key(presented: bytes, keys: Mapping[str, ApiKey]) -> ApiKey:
    """Find the presented key. An error tells more than "not valid" only to callers that have the whole key.

    Raises:
        ServingError: invalid_api_key.
    """
    name = id_of(presented)
    if name is None:
        raise refused(_UNKNOWN)
    key = keys.get(name)
    if not matches(presented, key.digest if key is not None else _NOBODY) or key is None:
        raise refused(_UNKNOWN)
    return key


def check_valid(key: ApiKey, now_ns: int) -> None:
    """
    Raises:
        ServingError: invalid_api_key: the key was revoked or has expired.
    """
    if key.revoked_ns:
        raise refused(f"the API key {key.prefix} was revoked")
    if key.expires_ns and now_ns >= key.expires_ns:
        raise refused(f"the API key {key.prefix} has expired")


def caller_with(key: ApiKey, tenants: Mapping[str, Limits]) -> Caller | ServingError:
    """The caller with this key, or the error that everyone with this key gets.

    Args:
        tenants: all tenants except the default one.
    """
    limits = tenants.get(key.tenant)
    if limits is None:
        if key.tenant != DEFAULT_TENANT:
            return refused(f"the API key {key.prefix} belongs to a tenant that was removed")
        limits = Limits()
    models: frozenset[str] = frozenset(key.models or limits.models)
    if key.models and limits.models:
        models = frozenset(key.models) & frozenset(limits.models)
        if not models:
            return refused(f"the API key {key.prefix} names no model that its tenant may use")
    sees = None if key.operator else key.tenant
    return Caller(key.tenant, sees, key=key, models=models, own_cache=not limits.shared_cache, limits=limits)


def audited(method: str, path: str, caller: Caller) -> AuditEntry | None:
    """The audit entry for a request that deletes, or that reads with a key which sees all tenants.

    None for all other requests, and while no keys are in use, since then the caller has no name.
    """
    stored = path.startswith(_STORED) or path == _LIST
    if caller is ANYONE or not stored or (method != "DELETE" and caller.sees is not None):
        return None
    action = {"GET": "read", "HEAD": "read", "DELETE": "delete"}.get(method, method.lower())
    key = caller.key.prefix if caller.key is not None else "a key of the gateway's own"
    return AuditEntry(action, path[:_AUDITED_PATH], key=key)


# Open to everyone, because they show no request and no tenant. All other paths need a key, even unknown ones.
OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/openapi.json", "/docs", "/"}
)


def noted_in(state_dir: str, namespace: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file by which a gateway remembers that there are keys. None: it has no state folder."""
    folder = state_dir or environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(folder).expanduser() / f"{namespace}-has-keys" if folder else None


class Guard:
    """
    Args:
        tenants: a live table of all tenants except the default one.
        always: keys are required even while there are none.
        noted: a file that exists once there are keys. Without it, a gateway on loopback behind a proxy would answer
            everyone after the broker has lost its disk.
        own: an operator's keys that the gateway was started with. They are not in the broker's bucket.
        on_lost: called with True when the broker has lost all keys, and with False when it has some again.

    Attributes:
        closed: requests need a key. Never becomes false again: neither an emptied bucket nor unreadable entries may
            open the gateway.
        lost: there were keys, but the broker no longer has any.
        table: the keys in the broker's bucket.
    """

    def __init__(
        self,
        bus: Bus,
        tenants: Mapping[str, Limits],
        *,
        always: bool = False,
        noted: Path | None = None,
        own: Sequence[str] = (),
        on_lost: Callable[[bool], None] = lambda lost: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = KeyTable(bus, self._changed, self._compared, clock)
        self._tenants = tenants
        self._callers: dict[str, Caller | ServingError] = {}
        self._own = [hashlib.sha256(key.encode()).digest() for key in own]
        self._noted = noted
        self._had_keys = noted is not None and noted.exists()
        self._on_lost = on_lost
        self.lost = False
        self.closed = always or bool(own) or self._had_keys

    async def open(self, tasks: Tasks) -> None:
        """
        Raises:
            ServingError: the keys cannot be read.
        """
        await self.table.start(tasks)
        self._compared()

    async def close(self) -> None:
        await self.table.stop()

    def admit(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """The caller of a request.

        Raises:
            ServingError: invalid_api_key; broker_unavailable: the validity of keys is unknown.
        """
        if not self.closed or path in OPEN_PATHS:
            return ANYONE
        given = presented(headers)
        if self._own:
            digest = hashlib.sha256(given).digest()
            if sum(
                hmac.compare_digest(digest, each) for each in self._own
            ):  # compares all, so that the duration reveals nothing
                return OPERATOR
        key = find_key(given, self.table.keys)
        self._check_current()
        check_valid(key, time.time_ns())
        caller = self._callers.get(key.id)
        if caller is None:
            caller = self._callers[key.id] = caller_with(key, self._tenants)
        if isinstance(caller, ServingError):
            raise caller
        return caller

    def caller_with_key(self, key_id: str, tenant: str) -> Caller:
        """The caller of a request that was accepted with a key earlier, with the key's current permissions.

        Args:
            key_id: "": the request came without a key, or with one of the gateway's own.
        Raises:
            ServingError: invalid_api_key: the key is no longer valid.
        """
        if not key_id:
            if tenant == DEFAULT_TENANT:
                return ANYONE
            return Caller(tenant, tenant, limits=self._tenants.get(tenant, _NO_LIMITS))
        key = self.table.keys.get(key_id)
        if key is None:
            raise refused("the API key that this was asked with was removed")
        check_valid(key, time.time_ns())
        caller = caller_with(key, self._tenants)
        if isinstance(caller, ServingError):
            raise caller
        return caller

    def caller_naming(self, key_id: str, tenant: str) -> Caller:
        """The caller of a request over NATS that names a key of its tenant, whose password the broker has checked.

        Raises:
            ServingError: invalid_api_key: the tenant has no such key, or it is no longer valid; broker_unavailable: the
                validity of keys is unknown.
        """
        self._check_current()
        key = self.table.keys.get(key_id)
        if key is None or key.tenant != tenant:
            raise refused(f"tenant {tenant!r} has no API key pst-{key_id}")
        caller = self.caller_with_key(key_id, tenant)
        limits = self._tenants.get(tenant, _NO_LIMITS)
        return Caller(tenant, tenant, key=key, models=caller.models, own_cache=caller.own_cache, limits=limits)

    def _check_current(self) -> None:
        if not self.table.current:
            message = f"keys cannot be checked: the broker has not confirmed them for {STALE_S:g} s; try again"
            raise ServingError(Code.broker_unavailable, message, retry_after=1.0)

    def tenants_changed(self) -> None:
        """Called when a tenant was added or removed, or its limits were changed."""
        self._callers.clear()

    def _compared(self) -> None:
        """Called when the table equals the bucket. Reports the loss of all keys, and their return, once each."""
        lost = self._had_keys and not self.table.keys and not self.table.unreadable
        if lost == self.lost:
            return
        self.lost = lost
        self._on_lost(lost)
        if not lost:
            log.info("keys_found", keys=len(self.table.keys))
            return
        log.error(
            "keys_lost",
            noted=str(self._noted or ""),
            action="the broker has lost all keys: restore it, import them with `penstock keys import`, or make new "
            "ones; to serve everyone instead, remove the file, if there is one, and start again",
        )

    def _changed(self, key_id: str) -> None:
        self._callers.pop(key_id, None)
        self.closed = True  # an entry exists, readable or not
        if self._had_keys:
            return
        self._had_keys = True
        if self._noted is None:
            return
        try:
            self._noted.parent.mkdir(parents=True, exist_ok=True)
            self._noted.touch()
        except OSError as error:
            log.warning("keys_not_noted", file=str(self._noted), error=str(error), action="set --require-keys")


class TenantTable:
    """
    Attributes:
        known: tenants with an entry; ``default`` is always there, and needs none.
        on_joined, on_left: called with names as they come and go, ``default`` first.
        on_changed: called after every change.
    """

    def __init__(self, bus: Bus) -> None:
        self._tail = LogTail.of_bucket(bus, "tenants", self._on_entry)
        self.on_joined: Callable[[str], None] = lambda tenant: None
        self.on_left: Callable[[str], None] = lambda tenant: None
        self.on_changed: Callable[[], None] = lambda: None
        self.known: dict[str, Limits] = {}
        self._callers: dict[str, Caller] = {}

    async def start(self) -> None:
        """
        Raises:
            ServingError: the bucket cannot be read.
        """
        self.on_joined(DEFAULT_TENANT)
        await self._tail.start()

    async def stop(self) -> None:
        await self._tail.stop()

    def limits(self, tenant: str) -> Limits:
        return self.known.get(tenant, _NO_LIMITS)

    def caller(self, tenant: str) -> Caller:
        """Who asks for this tenant over NATS, where the broker has checked the password."""
        found = self._callers.get(tenant)
        if found is None:
            limits = self.limits(tenant)
            found = self._callers[tenant] = Caller(tenant, tenant, own_cache=not limits.shared_cache, limits=limits)
        return found

    def check_model(self, tenant: str, model: str) -> None:
        """
        Raises:
            ServingError: model_not_found.
        """
        models = self.limits(tenant).models
        if models and model not in models:
            served = ", ".join(map(repr, models))
            raise ServingError(
                Code.model_not_found,
                f"model {model[:200]!r} is not served to {tenant!r}; served: {served}",
                param="model",
            )

    def _on_entry(self, entry: Entry) -> None:
        tenant = entry.subject.rpartition(".")[2]
        self._callers.pop(tenant, None)
        if not entry.data:
            if self.known.pop(tenant, None) is not None:
                self.on_left(tenant)
                self.on_changed()
            return
        try:
            limits = decode_limits(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("tenant_unreadable", tenant=tenant, error=str(error))
            return
        existed = tenant in self.known
        self.known[tenant] = limits
        if not existed:
            self.on_joined(tenant)
        self.on_changed()
