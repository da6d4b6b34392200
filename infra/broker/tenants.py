"""The tenants of a data folder: one file that says who they are, and one with the credentials of each.

The broker's configuration takes the passwords from here at each start, ``penstock tenants`` writes it and has the
running broker reload it. What gateways and routers need (``schemas.tenants.Limits``) is in the ``tenants`` bucket too.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from infra.broker.config import tenant_accounts
from infra.broker.datadir import write_private
from schemas.subjects import Subjects
from schemas.tenants import MAX_PENDING, Limits

INCLUDE = "tenants.conf"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the file."""

    password: str
    models: tuple[str, ...] = ()
    max_pending: int = MAX_PENDING
    weight: float = 1.0
    shared_cache: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(self.models, self.max_pending, self.weight, self.shared_cache)


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


def write_accounts(data_dir: Path, client_password: str, subjects: Subjects) -> None:
    """The accounts as the broker's configuration includes them."""
    passwords = {name: tenant.password for name, tenant in load(data_dir).items()}
    write_private(data_dir / INCLUDE, tenant_accounts(client_password, passwords, subjects))


@contextmanager
def held(data_dir: Path) -> Iterator[None]:
    """Locks the tenants against changes by other processes; waits for the lock."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(data_dir / "tenants.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def credentials_path(data_dir: Path, tenant: str) -> Path:
    return data_dir / "tenants" / f"{tenant}.json"


def write_credentials(data_dir: Path, tenant: str, nats_url: str) -> Path:
    """The file that the tenant's clients need; its path."""
    path = credentials_path(data_dir, tenant)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # Also in parts: many NATS clients ignore the user and the password in a URL.
    parts = urlsplit(nats_url)
    login = {
        "server": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    write_private(path, json.dumps({"tenant": tenant, "nats_url": nats_url, **login}, indent=2) + "\n")
    return path
