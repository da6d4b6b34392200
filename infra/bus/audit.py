"""Writes the audit log: what this process does, and, in routers, what the broker says that others do.

The broker reports each request to JetStream with the user of its connection (``$JS.EVENT.ADVISORY.API``), and
republishes what is stored in a bucket. Both cannot be left out by who does it, as an entry of a command can.
"""

import asyncio
import contextlib
import getpass
import json
import socket
from collections.abc import AsyncIterator, Mapping

import msgspec
import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import ApiError, decode_publish_reply
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.audit import PUBLIC_KEY, AuditEntry
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import encode

log = structlog.get_logger("audit")

WITHIN_S = 5.0
FLUSH_S = 5
MOST_WAITING = 256  # entries of a process that are not stored yet
EVERY_S = 1.0  # what happens more often within is one entry
MOST_KINDS = 200  # of such entries
TEXT = 1000  # characters of a detail or an error
ADVISORIES = "$JS.EVENT.ADVISORY.API"
QUEUE = "audit"  # each event is written by one router
BUCKETS = ("keys", "tenants")  # whose entries are written by people
PIPELINE = frozenset(f"{role}{second}" for role in ("gateway", "router", "worker") for second in ("", "-2"))
# What changes something; consumers are made to read. The broker does not report single messages that are read.
_WATCHED = (
    *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.RESTORE", "STREAM.SNAPSHOT"),
    *("STREAM.MSG.DELETE", "STREAM.PEER.REMOVE", "STREAM.LEADER.STEPDOWN", "CONSUMER.CREATE"),
    *("CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE", "CONSUMER.PAUSE", "CONSUMER.RESET", "CONSUMER.LEADER.STEPDOWN"),
)


async def broker_user(nc: Client) -> str:
    """The name under which the broker lists the user of this connection, even if it logs in without a name.

    Raises:
        ServingError: it does not say.
    """
    try:
        reply = json.loads((await nc.request("$SYS.REQ.USER.INFO", b"", timeout=WITHIN_S)).data)
        return str(reply["data"]["user"])
    except (NatsError, TimeoutError, OSError, ValueError, KeyError) as error:
        raise ServingError(
            Code.broker_unavailable, f"the broker does not say as which user this is connected ({error!r})"
        ) from error


def person() -> str:
    """Who works here, for the record."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


async def write(nc: Client, subjects: Subjects, user: str, entry: AuditEntry) -> None:
    """Store an entry. Where the stream is missing, as before an upgrade's `penstock streams apply`, it is only logged.

    Raises:
        ServingError: the broker does not store it.
    """
    try:
        reply = decode_publish_reply((await nc.request(subjects.audit(user), encode(entry), timeout=WITHIN_S)).data)
    except NoRespondersError:
        log.warning("audit_stream_missing", did=entry.action, what=entry.what, fix="run `penstock streams apply`")
        return
    except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        raise ServingError(Code.broker_unavailable, f"the audit log does not take an entry ({error!r})") from error
    if reply.error is not None:
        raise ServingError(Code.broker_unavailable, f"the audit log does not take an entry: {reply.error}")


@contextlib.asynccontextmanager
async def recorded(nc: Client, subjects: Subjects, action: str, what: str, detail: str = "") -> AsyncIterator[None]:
    """Note what is done within, before it is done, and if it fails, that.

    Raises:
        ServingError: it cannot be noted; nothing was done.
    """
    user = await broker_user(nc)
    entry = AuditEntry(action, what, detail if len(detail) <= TEXT else f"{detail[:TEXT]}…", person())
    await write(nc, subjects, user, entry)
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        why = "it was cut short" if isinstance(error, asyncio.CancelledError) else str(error) or repr(error)
        with contextlib.suppress(ServingError):
            await write(nc, subjects, user, msgspec.structs.replace(entry, error=why[:TEXT]))
        raise


class Auditor:
    """Entries of a process that does not wait for them: a request is not refused because its entry is not stored."""

    def __init__(self, bus: Bus, tasks: Tasks) -> None:
        self._bus = bus
        self._tasks = tasks
        self._user = ""
        self._waiting = 0

    def note(self, entry: AuditEntry) -> None:
        """Log an entry, and store it in the background."""
        log.info("audit", did=entry.action, what=entry.what, key=entry.key, user=entry.user, count=entry.count)
        if self._waiting >= MOST_WAITING:
            log.warning("audit_not_stored", did=entry.action, what=entry.what, error="too many entries wait")
            return
        self._waiting += 1
        self._tasks.spawn(self._store(entry), name="audit")

    async def _store(self, entry: AuditEntry) -> None:
        try:
            self._user = self._user or self._bus.user or await broker_user(self._bus.nc)
            await write(self._bus.nc, self._bus.subjects, self._user, entry)
        except ServingError as error:
            log.warning("audit_not_stored", did=entry.action, what=entry.what, error=error.message)
        finally:
            self._waiting -= 1


class _Client(msgspec.Struct):
    user: str = ""
    name: str = ""
    host: str = ""
    id: int = 0
    name_tag: str = ""  # of a JWT: as who signed it called the user


class _Response(msgspec.Struct):
    error: ApiError | None = None


class _Advisory(msgspec.Struct):
    subject: str
    client: _Client = msgspec.field(default_factory=_Client)
    response: str = ""


_decode_advisory = msgspec.json.Decoder(_Advisory).decode
_decode_response = msgspec.json.Decoder(_Response).decode


class Watch:
    """Writes what the broker says: changes of streams and consumers, and entries that are stored in buckets by people.
    What the pipeline's own users do is left out.

    Args:
        users: by their public keys, those who log in by nkeys.
    """

    def __init__(self, bus: Bus, auditor: Auditor, users: Mapping[str, str] | None = None) -> None:
        self._bus = bus
        self._auditor = auditor
        self._users = users or {}
        self._seen: dict[AuditEntry, int] = {}
        self._more = 0
        self.ready = False  # everything that happens from now on is seen

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._bus.nc.subscribe(ADVISORIES, queue=QUEUE, cb=self._on_advisory)
        for name in BUCKETS:
            subject = self._bus.subjects.live(f"$KV.{self._bus.subjects.bucket(name)}.>")
            await self._bus.nc.subscribe(subject, queue=QUEUE, cb=self._on_stored)
        while True:
            if not self.ready:
                with contextlib.suppress(NatsError, OSError):  # an answer is lost with the connection it was to come by
                    await self._bus.nc.flush(FLUSH_S)
                    self.ready = True
            await asyncio.sleep(EVERY_S)
            self.flush()

    def flush(self) -> None:
        """Write what was seen."""
        seen, self._seen = self._seen, {}
        more, self._more = self._more, 0
        for entry, count in seen.items():
            self._auditor.note(msgspec.structs.replace(entry, count=count))
        if more:
            self._auditor.note(AuditEntry("api", "others", user="unknown", count=more))

    async def _on_advisory(self, message: object) -> None:
        entry = of_advisory(message.data, self._bus.subjects, self._users)  # type: ignore[attr-defined]
        if entry is not None:
            self._count(entry)

    async def _on_stored(self, message: object) -> None:
        *_, bucket, name = message.subject.split(".")  # type: ignore[attr-defined]
        headers = message.headers or {}  # type: ignore[attr-defined]
        detail = f"revision {headers.get('Nats-Sequence', '?')}" + ("" if message.data else ", deleted")  # type: ignore[attr-defined]
        self._count(AuditEntry("stored", f"{bucket}.{name}", detail, user="*"))

    def _count(self, entry: AuditEntry) -> None:
        if entry not in self._seen and len(self._seen) >= MOST_KINDS:
            self._more += 1
            return
        self._seen[entry] = self._seen.get(entry, 0) + 1


def of_advisory(data: bytes, subjects: Subjects, users: Mapping[str, str] | None = None) -> AuditEntry | None:
    """What the broker's report of a request says; None: it is not watched, or about another namespace.

    Args:
        users: by their public keys, those who log in by nkeys. A JWT has its user's name.
    """
    try:
        advisory = _decode_advisory(data)
    except msgspec.MsgspecError:
        return None
    client, request = advisory.client, advisory.subject.removeprefix("$JS.API.")
    verb = next((verb for verb in _WATCHED if request.startswith(f"{verb}.")), "")
    stream, _, rest = request[len(verb) + 1 :].partition(".")
    own = stream.removeprefix("KV_").removeprefix("OBJ_").startswith(f"{subjects.namespace}_")
    user = client.name_tag or (users or {}).get(client.user, client.user)
    if not verb or not own or user in PIPELINE:
        return None
    if verb == "CONSUMER.CREATE" and stream == subjects.stream("WORK") and PUBLIC_KEY.fullmatch(user):
        name, _, filtered = rest.partition(".")
        if filtered.startswith(subjects.all("work")[:-1]) and filtered.rpartition(".")[2] == name:
            return None  # a worker's own, at its start: others would learn nothing by it, but take its jobs
    error = ""
    with contextlib.suppress(msgspec.MsgspecError):
        found = _decode_response(advisory.response).error
        error = str(found)[:TEXT] if found is not None else ""
    role = f"{user}: " if user != client.user else ""
    connection = f"{role}{client.name or 'unnamed'} at {client.host}, {client.id}"
    what = f"{stream}.{rest}" if rest else stream
    return AuditEntry("api", what, verb.lower().replace(".", " "), user=client.user, connection=connection, error=error)
