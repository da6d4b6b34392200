"""Whether a key admits a request. Pure: the table of keys, the tenants and the time are arguments."""

from collections.abc import Mapping

from penstock.gateway.access.caller import ANYONE, Caller
from penstock.gateway.access.credentials import refused
from penstock.schemas.audit import AuditEntry
from penstock.schemas.errors import ServingError
from penstock.schemas.keys import ApiKey, digest_of, id_of, matches
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.tenants import Limits

_LIST, _STORED = "/v1/requests", ("/v1/requests/", "/v1/responses/", "/v1/files/")
_AUDITED_PATH = 200  # characters
_NOBODY = digest_of(b"")  # compared where no key has the id, so that both refusals take the same time
_UNKNOWN = "the API key is not valid: it may be mistyped, or belong to another deployment"


def find_key(presented: bytes, keys: Mapping[str, ApiKey]) -> ApiKey:
    """The key that was presented. Refusals say more than "not valid" only to who has the whole key.

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
    """Who has this key, or why nobody is admitted with it.

    Args:
        tenants: those that there are, except the default one.
    """
    limits = tenants.get(key.tenant)
    if limits is None:
        if key.tenant != DEFAULT_TENANT:
            return refused(f"the API key {key.prefix} is of a tenant that was removed")
        limits = Limits()
    models: frozenset[str] = frozenset(key.models or limits.models)
    if key.models and limits.models:
        models = frozenset(key.models) & frozenset(limits.models)
        if not models:
            return refused(f"the API key {key.prefix} names no model that its tenant may use")
    sees = None if key.operator else key.tenant
    return Caller(key.tenant, sees, key=key, models=models, own_cache=not limits.shared_cache)


def audited(method: str, path: str, caller: Caller) -> AuditEntry | None:
    """What the audit log says of a request: who deletes, and who reads with a key that sees all tenants.

    None: nothing. Without keys, nobody can be named.
    """
    stored = path.startswith(_STORED) or path == _LIST
    if caller is ANYONE or not stored or (method != "DELETE" and caller.sees is not None):
        return None
    action = {"GET": "read", "HEAD": "read", "DELETE": "delete"}.get(method, method.lower())
    key = caller.key.prefix if caller.key is not None else "a key of the gateway's own"
    return AuditEntry(action, path[:_AUDITED_PATH], key=key)
