"""``GET /v1/requests``: its parameters and its body."""

import datetime
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from penstock.gateway.log.listing import Page
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.summary import STATES, Criteria, RequestSummary, State

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
PARAMETERS = ("limit", "after", "model", "state", "since", "until", "tenant", "user", "worker", "code")


class ListedRequest(Struct, frozen=True):
    """A request without its content. ``state`` as in ``GET /v1/requests/{id}``; ``created`` in seconds since 1970.

    ``ttft_ms``: until the first token; null: none yet. ``duration_ms``: null while it has not ended.
    """

    id: str
    model: str
    state: State
    created: float
    tenant: str
    priority: str
    endpoint: str
    user: str
    client_request_id: str
    worker: str
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    duration_ms: float | None
    code: str
    message: str


class RequestList(Struct, frozen=True):
    """The newest first. A page may be empty though there is a next one: pass its ``next_after`` as ``after``."""

    data: list[ListedRequest]
    has_more: bool
    next_after: str
    object: Literal["list"] = "list"


class ListQuery(Struct, frozen=True):
    criteria: Criteria
    limit: int
    after: str


def parse(query: Mapping[str, str], sees: str | None = None) -> ListQuery:
    """
    Args:
        sees: the only tenant whose requests may be listed; None: all.
    Raises:
        ServingError: invalid_request, with the parameter at fault; permission_denied: of another tenant.
    """
    for name in query:
        if name not in PARAMETERS:
            raise _invalid(name, f"unknown parameter {name[:80]!r}; there are {', '.join(PARAMETERS)}")
    text = query.get("limit", str(DEFAULT_LIMIT))
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LIMIT:
        raise _invalid("limit", f"limit {text[:80]!r}: give a number from 1 to {MAX_LIMIT}")
    states = [each for each in query.get("state", "").split(",") if each]
    for state in states:
        if state not in STATES:
            names = ", ".join(STATES)
            raise _invalid("state", f"state {state[:80]!r} is none of {names}; several: state=failed,cancelled")
    tenant = query.get("tenant", "")
    if sees is not None:
        if tenant not in ("", sees):
            message = (
                f"requests of tenant {tenant[:80]!r} can only be listed with a key of that tenant or an operator's"
            )
            raise ServingError(Code.permission_denied, message, param="tenant")
        tenant = sees
    criteria = Criteria(
        _moment_ns("since", query),
        _moment_ns("until", query),
        query.get("model", ""),
        tenant,
        query.get("worker", ""),
        query.get("user", ""),
        frozenset(states),
        query.get("code", ""),
    )
    return ListQuery(criteria, int(text), query.get("after", ""))


def body(page: Page) -> RequestList:
    """The response."""
    return RequestList([_listed(each) for each in page.found], bool(page.after), page.after)


def _listed(each: RequestSummary) -> ListedRequest:
    return ListedRequest(
        each.id,
        each.model,
        each.state,
        each.created_ns / 1e9,
        each.tenant,
        each.priority,
        each.endpoint,
        each.user,
        each.client_request_id,
        each.worker,
        each.attempts,
        each.prompt_tokens,
        each.cached_tokens,
        each.completion_tokens,
        each.ttft_ms,
        each.duration_ms,
        each.code,
        each.message,
    )


def _moment_ns(name: str, query: Mapping[str, str]) -> int:
    """Unix time in ns of seconds since 1970, or of an ISO 8601 time (UTC without a zone); 0: not given."""
    text = query.get(name, "")
    if not text:
        return 0
    try:
        seconds = float(text)
    except ValueError:
        try:
            at = datetime.datetime.fromisoformat(text.replace(" ", "+"))  # a "+" in a URL is a blank
        except ValueError:
            raise _invalid(name, f"{name} {text[:80]!r}: give seconds since 1970, or 2026-11-22T09:30:00Z") from None
        seconds = (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()
    if not 0 <= seconds < 1e11:
        raise _invalid(name, f"{name} {text[:80]!r} is no time since 1970")
    return int(seconds * 1e9)


def _invalid(name: str, message: str) -> ServingError:
    return ServingError(Code.invalid_request, message, param=name)
