"""The credentials of tenants, and of a data folder's broker users.

Tenants and passwords of the broker that belongs to a data folder are in a file there: its configuration takes the
passwords from it at each start, ``penstock tenants`` writes it and has the running broker reload it. Those of any other
broker are in a bucket of it (``Accounts``), so that all operators see the same ones, whatever machine they work on.
Each operator's folder has copies (``copies``), from which they are restored when the broker has lost its disk. Each
tenant gets one file with its credentials.

What gateways and routers need (``penstock.schemas.tenants.Limits``) is in the ``tenants`` bucket of both.

Each role has two broker users, one of which is in use. So the other can get a new password while processes and clients
are connected (``penstock passwords``).
"""

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

import msgspec
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE
from penstock.infra.nats_server.config import passwords, tenant_accounts
from penstock.infra.nats_server.datadir import write_private
from penstock.infra.nats_server.permissions import SECOND
from penstock.schemas.subjects import DEFAULT_TENANT, Subjects
from penstock.schemas.tenants import MAX_PENDING, Limits, check_name
from penstock.schemas.tenants import decode as decode_limits

INCLUDE = "tenants.conf"
WRONG_LAST_SEQUENCE_CONSTANT = 10164  # the same, of a server that says less
ACCOUNTS_BYTES = 16 << 20  # some hundred bytes a tenant


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the file."""

    password: str  # of its first user; "": it has none
    second_password: str = ""
    second: bool = False  # its credentials are those of its second user
    models: tuple[str, ...] = ()
    max_pending: int = MAX_PENDING
    weight: float = 1.0
    shared_cache: bool = False
    tokens_per_month: int = 0
    max_waiting: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})

    @property
    def login(self) -> tuple[str, bool]:
        """The password that its clients should use, and whether it is that of the second user."""
        return (self.second_password if self.second else self.password), self.second

    @property
    def passwords(self) -> dict[str, str | bool]:
        """The fields that are about its passwords."""
        return {"password": self.password, "second_password": self.second_password, "second": self.second}

    def with_password(self, password: str, *, keep_old: bool = False) -> "Tenant":
        """With a new one.

        Args:
            keep_old: the earlier one stays valid, too, until ``without_old``.
        Raises:
            ValueError: two are valid already.
        """
        if not keep_old:
            return msgspec.structs.replace(self, password=password, second_password="", second=False)
        if self.password and self.second_password:
            raise ValueError("its earlier password is still valid: end that first, with --end-old")
        if self.second:
            return msgspec.structs.replace(self, password=password, second=False)
        return msgspec.structs.replace(self, second_password=password, second=True)

    def without_old(self) -> "Tenant":
        """Only the password of ``login`` is valid.

        Raises:
            ValueError: it was the only one.
        """
        if not (self.password and self.second_password):
            raise ValueError("it has one password only; --keep-old makes another one beside it")
        return msgspec.structs.replace(self, **{"password" if self.second else "second_password": ""})


Tenants = dict[str, Tenant]


def new_password() -> str:
    return secrets.token_urlsafe(24)


def load(data_dir: Path) -> Tenants:
    """
    Raises:
        ValueError: the file is damaged.
    """
    path = data_dir / "tenants.json"
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tenants)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is damaged ({error}): repair it, or remove it and add the tenants again") from error


def save(data_dir: Path, tenants: Tenants) -> None:
    write_private(data_dir / "tenants.json", msgspec.json.format(msgspec.json.encode(tenants)).decode())


def write_accounts(
    data_dir: Path, client_passwords: tuple[str, str], subjects: Subjects, existing: Tenants | None = None
) -> None:
    """The accounts as the broker's configuration includes them.

    Args:
        client_passwords: of the two users of the default tenant; "": there is none.
        existing: None: those of the data folder.
    """
    found = load(data_dir) if existing is None else existing
    passwords = {name: (tenant.password, tenant.second_password) for name, tenant in found.items()}
    write_private(data_dir / INCLUDE, tenant_accounts(client_passwords, passwords, subjects))


class Copies(NamedTuple):
    """A data folder's copies of a broker's tenants, which the broker may have lost.

    Attributes:
        tenants: with their passwords.
        without_limits: tenants whose limits the folder lacks.
        only_credentials: of these it has a file with credentials alone; others may have removed them since.
        client_password: of the default tenant; "": unknown.
    """

    tenants: Tenants
    without_limits: frozenset[str]
    only_credentials: frozenset[str]
    client_password: str


def copies(data_dir: Path) -> Copies:
    """From the list of all tenants, what the servers included of them, and the credentials of each, in this order.

    Raises:
        ValueError: a file is damaged.
    """
    full = load(data_dir)
    included = _included(data_dir / INCLUDE)
    credentials = dict(map(_login_in, sorted((data_dir / "tenants").glob("*.json"))))
    client = included.pop(DEFAULT_TENANT, None) or credentials.pop(DEFAULT_TENANT, None)
    credentials.pop(DEFAULT_TENANT, None)
    listed = included | full
    return Copies(
        credentials | listed,
        frozenset((included.keys() | credentials.keys()) - full.keys()),
        frozenset(credentials.keys() - listed.keys()) if listed else frozenset(),
        client.password if client is not None else "",
    )


_INCLUDED = re.compile(r'user: "(client|tenant2?-[a-z0-9-]+)", password: ("(?:[^"\\]|\\.)*")')


def _included(path: Path) -> Tenants:
    """The passwords in the accounts that ``write_accounts`` made."""
    found: Tenants = {}
    for user, quoted in _INCLUDED.findall(path.read_text(encoding="utf-8")) if path.exists() else ():
        kind, _, name = user.partition("-")
        name = name or DEFAULT_TENANT
        before = found.get(name, Tenant(password=""))
        field = "second_password" if kind == "tenant2" else "password"
        found[name] = msgspec.structs.replace(before, **{field: json.loads(quoted)})
    return {name: msgspec.structs.replace(each, second=not each.password) for name, each in found.items()}


def _login_in(path: Path) -> tuple[str, Tenant]:
    """The tenant and password in a file of ``write_credentials``."""
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
        name, parts = check_name(file["tenant"]), urlsplit(file["nats_url"].partition(",")[0])
        password, user = unquote(parts.password or ""), unquote(parts.username or "")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): remove it, or repair it") from error
    if not password:
        raise ValueError(f"{path} has no password: remove it, or repair it")
    second = user.startswith("tenant2-")
    return name, Tenant(password="", second_password=password, second=True) if second else Tenant(password=password)


class Accounts:
    """The tenants of a broker of one's own, in a bucket that no user but the operator may read.

    Attributes:
        tenants: all but the default one.
        client_password: of the default one.
    """

    def __init__(self, js: JetStreamContext, name: str, bucket: KeyValue) -> None:
        self._js, self._name = js, name
        self._bucket = bucket
        self._revisions: dict[str, int] = {}
        self.tenants: Tenants = {}
        self.client_password = ""

    @classmethod
    async def find(cls, nc: Client, subjects: Subjects) -> "Accounts | None":
        """Read them, and write nothing; None: the broker has none yet, or has lost them.

        Raises:
            ValueError: it has no streams of this namespace, or an entry is damaged.
        """
        js, name = nc.jetstream(), subjects.bucket("accounts")
        try:
            accounts = cls(js, name, await js.key_value(name))
        except BucketNotFoundError:
            if not await _has_streams(js, subjects):
                raise ValueError(
                    f"the broker has no streams of namespace {subjects.namespace!r}: `penstock streams apply` first"
                ) from None
            return None
        await accounts.read()
        return accounts

    @classmethod
    async def open(cls, nc: Client, subjects: Subjects, earlier: Tenants, client_password: str) -> "Accounts":
        """Read them, and make them if the broker has none.

        Args:
            earlier: of this operator's data folder, where releases before the bucket kept them; taken if it is new.
            client_password: taken if the bucket has none.
        Raises:
            ValueError: as ``find``.
        """
        accounts = await cls.find(nc, subjects)
        new = accounts is None
        if accounts is None:
            js, name = nc.jetstream(), subjects.bucket("accounts")
            info = await js.stream_info(f"KV_{subjects.bucket('tenants')}")
            replicas = info.config.num_replicas or 1
            bucket = await js.create_key_value(
                KeyValueConfig(bucket=name, history=1, max_bytes=ACCOUNTS_BYTES, replicas=replicas)
            )
            accounts = cls(js, name, bucket)
            await accounts.read()
        if not accounts.client_password:
            await accounts._write(DEFAULT_TENANT, Tenant(password=client_password))
        for tenant, entry in earlier.items() if new else ():
            if tenant not in accounts.tenants:
                await accounts._write(tenant, entry)
        await accounts.read()
        return accounts

    @staticmethod
    async def missing(nc: Client, subjects: Subjects, names: Iterable[str]) -> bool:
        """Whether the broker has no tenants at all: it is new, or has lost its store."""
        js = nc.jetstream()
        try:
            await js.stream_info(f"KV_{subjects.bucket('accounts')}")
            return False
        except NotFoundError:
            if not await _has_streams(js, subjects):
                return True
        # Releases before the bucket kept passwords in the folder alone, and the limits here.
        return not any([await limits_at(nc, subjects, name) for name in names])

    async def read(self) -> None:
        """
        Raises:
            ValueError: an entry is damaged.
        """
        prefix = f"$KV.{self._name}."
        # Not by a consumer, as the client's ``keys()``: the broker reports each one, and the audit log is of changes.
        info = await self._js.stream_info(f"KV_{self._name}", subjects_filter=f"{prefix}>")
        found: Tenants = {}
        for name in (subject.removeprefix(prefix) for subject in info.state.subjects or {}):
            try:
                entry = await self._bucket.get(name)
            except KeyNotFoundError:  # removed since
                continue
            try:
                found[name] = msgspec.json.decode(entry.value or b"", type=Tenant)
            except msgspec.MsgspecError as error:
                raise ValueError(f"tenant {name} in {self._bucket._stream} is damaged ({error})") from error
            self._revisions[name] = entry.revision or 0
        self.client_password = found.pop(DEFAULT_TENANT).password if DEFAULT_TENANT in found else ""
        self.tenants = found

    async def put(self, name: str, tenant: Tenant) -> None:
        """Add or change one.

        Raises:
            ValueError: another operator has changed it since it was read.
        """
        await self._write(name, tenant)
        await self.read()

    async def put_client(self, password: str) -> None:
        """Change the password of the default tenant.

        Raises:
            ValueError: as ``put``.
        """
        await self.put(DEFAULT_TENANT, Tenant(password=password))

    async def remove(self, name: str) -> None:
        """
        Raises:
            ValueError: another operator has changed it since it was read.
        """
        try:
            await self._bucket.delete(name, last=self._revisions[name])
        except APIError as error:
            if error.err_code not in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_CONSTANT):
                raise
            raise ValueError(_CHANGED.format(name)) from None
        self._revisions.pop(name)
        await self.read()

    async def was_removed(self, name: str) -> bool:
        """Whether an operator has removed this tenant, and the broker has not forgotten it."""
        try:
            await self._bucket.get(name)
        except KeyNotFoundError as error:
            return error.op is not None  # the marker of a deletion
        return False

    async def _write(self, name: str, tenant: Tenant) -> None:
        value = msgspec.json.encode(tenant)
        try:
            if name in self._revisions:
                await self._bucket.update(name, value, last=self._revisions[name])
            else:
                await self._bucket.create(name, value)
        except KeyWrongLastSequenceError:
            raise ValueError(_CHANGED.format(name)) from None


async def _has_streams(js: JetStreamContext, subjects: Subjects) -> bool:
    try:
        await js.stream_info(f"KV_{subjects.bucket('tenants')}")
    except NotFoundError:
        return False
    return True


async def limits_at(nc: Client, subjects: Subjects, name: str) -> Limits | None:
    """What gateways and routers know of a tenant; None: nothing."""
    try:
        entry = await (await nc.jetstream().key_value(subjects.bucket("tenants"))).get(name)
    except (KeyNotFoundError, BucketNotFoundError):
        return None
    return decode_limits(entry.value) if entry.value else None


async def copy_limits(home: Client, subjects: Subjects, cell: Client, cell_subjects: Subjects) -> list[str]:
    """Give a cell's routers the limits of tenants that home has: weights are per tenant, and keys are at home.

    Returns:
        The tenants whose limits were new to the cell, or are no longer there.
    Raises:
        NatsError, TimeoutError: a broker refuses it, or does not answer.
    """
    wanted, there = await _limits(home, subjects), await _limits(cell, cell_subjects)
    changed = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    for name in changed:
        headers = None if name in wanted else {"KV-Operation": "DEL"}
        subject = f"$KV.{cell_subjects.bucket('tenants')}.{name}"
        await cell.jetstream().publish(subject, wanted.get(name, b""), headers=headers)
    return changed


async def _limits(nc: Client, subjects: Subjects) -> dict[str, bytes]:
    """What gateways and routers know of all tenants, encoded."""
    js, bucket = nc.jetstream(), subjects.bucket("tenants")
    try:
        info = await js.stream_info(f"KV_{bucket}", subjects_filter=f"$KV.{bucket}.>")
    except NotFoundError:
        return {}
    found = {}
    for name in (subject.rpartition(".")[2] for subject in info.state.subjects or {}):
        with suppress(KeyNotFoundError):  # the marker of a tenant that was removed
            entry = await (await js.key_value(bucket)).get(name)
            found[name] = entry.value or b""
    return found


_CHANGED = "another operator has changed tenant {!r} at the same time: look at `penstock tenants list`, and try again"


@contextmanager
def held(data_dir: Path) -> Iterator[None]:
    """Locks the tenants against changes by other processes; waits for the lock.

    Raises:
        ValueError: the folder cannot be written.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(data_dir / "tenants.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        why = f"{data_dir} cannot be written ({error.strerror})"
        raise ValueError(f"{why}: name a folder for credentials with --data-dir") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def credentials_path(data_dir: Path, tenant: str) -> Path:
    return data_dir / "tenants" / f"{tenant}.json"


def with_user(urls: str, user: str, password: str) -> str:
    """The same servers and schemes, with other credentials; comma-separated, as ``urls``."""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return ",".join(f"{scheme}://{login}@{host}" for scheme, host in map(_server, urls.split(",")))


def _server(url: str) -> tuple[str, str]:
    """Scheme, and host with port, of a URL that may have neither scheme nor credentials."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        scheme, rest = "nats", scheme
    return scheme, rest.rpartition("@")[2].rstrip("/")


def write_credentials(data_dir: Path, tenant: str, nats_url: str) -> Path:
    """The file that the tenant's clients need; its path.

    Args:
        nats_url: of all servers, comma-separated, with the same credentials.
    """
    path = credentials_path(data_dir, tenant)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # Also in parts: many NATS clients ignore the user and the password in a URL.
    parts = urlsplit(nats_url.partition(",")[0])
    login = {
        "server": ",".join(f"{scheme}://{host}" for scheme, host in map(_server, nats_url.split(","))),
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    write_private(path, json.dumps({"tenant": tenant, "nats_url": nats_url, **login}, indent=2) + "\n")
    return path


PASSWORDS_INCLUDE = "passwords.conf"
SECOND_IN_USE = "second_in_use"  # key of secrets.json: the roles that log in as their second user


def user_in_use(secrets: Mapping[str, str], role: str) -> str:
    """As which of its two users a role logs in."""
    return role + SECOND if role in secrets.get(SECOND_IN_USE, "").split() else role


def other_user(secrets: Mapping[str, str], role: str) -> str:
    return role if user_in_use(secrets, role) != role else role + SECOND


def store(data_dir: Path, secrets: Mapping[str, str]) -> None:
    write_private(data_dir / "secrets.json", json.dumps(dict(secrets), indent=2))


def write_passwords(data_dir: Path, secrets: Mapping[str, str], subjects: Subjects) -> None:
    """The files with passwords that the configuration of the folder's broker includes."""
    write_private(data_dir / PASSWORDS_INCLUDE, passwords(secrets))
    write_accounts(data_dir, client_passwords(secrets), subjects)


def client_passwords(secrets: Mapping[str, str]) -> tuple[str, str]:
    return secrets["client"], secrets[f"client{SECOND}"]
