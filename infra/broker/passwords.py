"""The passwords of a data folder's broker users: two users per role, one of which is in use.

So the other can get a new password while processes and clients are connected (``penstock passwords``).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from penstock.infra.broker.config import passwords
from penstock.infra.broker.datadir import write_private
from penstock.infra.broker.roles import SECOND
from penstock.infra.broker.tenants import write_accounts
from penstock.schemas.subjects import Subjects

INCLUDE = "passwords.conf"
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
    write_private(data_dir / INCLUDE, passwords(secrets))
    write_accounts(data_dir, client_passwords(secrets), subjects)


def client_passwords(secrets: Mapping[str, str]) -> tuple[str, str]:
    return secrets["client"], secrets[f"client{SECOND}"]
