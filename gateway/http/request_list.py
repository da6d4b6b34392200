"""``GET /v1/requests``: its parameters and its body."""

import datetime
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from penstock.gateway.access.authentication import ALL, Sight
from penstock.gateway.apis.endpoints import Aggregator, aggregator_for, encode_answer
from penstock.gateway.apis.images import ImageAggregator
from penstock.gateway.base.chat_objects import Status, error_body
from penstock.gateway.request_log.completion import LATE_S, last_item
from penstock.gateway.request_log.listing import Page, progress_of
from penstock.gateway.request_log.lookup import StoredRequest, erased, has_output, is_whole
from penstock.gateway.service.gateway import Gateway
from penstock.schemas import done
from penstock.schemas.control import Progress
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import PREFIX, check_id, id_of
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.summary import STATES, Criteria, RequestSummary, State, record_is_lost

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
PARAMETERS = ("limit", "after", "model", "state", "since", "until", "tenant", "user", "worker", "code", "key")


class ListedRequest(Struct, frozen=True):
    """A request without its content. ``state`` as in ``GET /v1/requests/{id}``; ``created`` in seconds since 1970.

    ``api_key``: the part of its API key that names it.
    ``workers``: every one that had it, the first one first. ``lost_workers``: those that were lost while they had it;
    of a request that has not ended, no worker is listed before its first token.
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
    api_key: str
    workers: list[str]
    lost_workers: list[str]


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


def parse(query: Mapping[str, str], sight: Sight = ALL) -> ListQuery:
    """
    Args:
        sight: which requests may be listed.
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
            raise _invalid("state", f"state {state[:80]!r} is not one of {names}; several: state=failed,cancelled")
    tenant = query.get("tenant", "")
    if sight.tenant is not None:
        if tenant not in ("", sight.tenant):
            message = (
                f"requests of tenant {tenant[:80]!r} can only be listed with a key of that tenant or an operator's"
            )
            raise ServingError(Code.permission_denied, message, param="tenant")
        tenant = sight.tenant
    criteria = Criteria(
        _moment_ns("since", query),
        _moment_ns("until", query),
        query.get("model", ""),
        tenant,
        query.get("worker", ""),
        query.get("user", ""),
        frozenset(states),
        query.get("code", ""),
        models=sight.models,
        api_key=_prefix_of(query.get("key", "")),
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
        each.api_key,
        each.workers,
        each.lost_workers,
    )


def _prefix_of(text: str) -> str:
    """The part that names an API key, from itself; never from the whole key, which does not belong into a URL."""
    if not text:
        return ""
    if id_of(text.encode()) is not None:
        raise _invalid("key", "key: give the part that names the key, not all of it, and revoke the one that you gave")
    try:
        return PREFIX + check_id(text)
    except ValueError as error:
        raise _invalid("key", f"key: {error}") from None


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
        raise _invalid(name, f"{name} {text[:80]!r} is not a time since 1970")
    return int(seconds * 1e9)


def _invalid(name: str, message: str) -> ServingError:
    return ServingError(Code.invalid_request, message, param=name)


_json = msgspec.json.encode


async def status_of(gateway: Gateway, stored: StoredRequest, base_url: str) -> Status:
    """State and result of a request of any gateway; ``base_url``: of links to generated files."""
    request, record = stored
    if record is None:
        return await _running(gateway, request, base_url)
    collector = await _collector(gateway, request, late=not is_whole(record), ended_ns=record.timings.ended_ns)
    if is_whole(record) or not await _collected(gateway, request, collector):
        if request.no_store and not is_whole(record):
            return await _incomplete(gateway, request, record, base_url)
        collector = await _collector(gateway, request, late=not is_whole(record), ended_ns=record.timings.ended_ns)
        collector.push(done.items(record))
    status = await _ended(request, collector, base_url)
    tokens = record.usage.completion if not has_output(record) else status.output_tokens
    return msgspec.structs.replace(status, worker=record.worker, attempt=record.attempt, output_tokens=tokens)


def final_state(record: done.Done) -> Literal["done", "failed", "cancelled"]:
    """How a request ended."""
    if record.code == Code.cancelled.value:
        return "cancelled"
    return "failed" if record.code else "done"


async def _running(gateway: Gateway, request: GenerateRequest, base_url: str) -> Status:
    request = await gateway.as_run(request)
    collector = await _collector(gateway, request, late=False)
    progress = await running_progress(gateway, request, collector)
    if progress is None:
        return await _ended(request, collector, base_url)
    state: State = "running" if progress.attempt > 0 else "queued"
    if record_is_lost(request, gateway.bus.clock.now_ns()):
        state = "unknown"
    return msgspec.structs.replace(
        _status(request, state), attempt=max(progress.attempt, 0), output_tokens=progress.tokens
    )


async def _incomplete(gateway: Gateway, request: GenerateRequest, record: done.Done, base_url: str) -> Status:
    """Of a request with ``no_store`` that has ended, while its tokens are late, void to those who follow them, or gone.

    Raises:
        ServingError: request_erased: its grace period is over.
    """
    again = await gateway.read_again(request, record.attempt)
    if again.fold.open:
        ended_s = (gateway.bus.clock.now_ns() - await gateway.cell_of(request.id).records.ended_ns(request.id)) / 1e9
        if ended_s >= gateway.settings.no_store_grace_s:
            raise erased(request.id)
        if ended_s < LATE_S:
            tokens = progress_of(again).tokens
            return msgspec.structs.replace(
                _status(request, "running"), worker=record.worker, attempt=record.attempt, output_tokens=tokens
            )
        again.complete([last_item(record)])
    collector = await _collector(gateway, request, late=True, ended_ns=record.timings.ended_ns)
    collector.push(again.available())
    status = await _ended(request, collector, base_url)
    return msgspec.structs.replace(status, worker=record.worker, attempt=record.attempt)


async def running_progress(
    gateway: Gateway, request: GenerateRequest, collector: Aggregator | ImageAggregator
) -> Progress | None:
    """How far an unfinished request is: from the gateway that follows it, or if none does, from the token stream.

    Returns: None: the collector has its whole answer; the last token comes before the record.
    """
    progress = gateway.cell_of(request.id).progress
    seen = progress.here(request.id)
    if seen is None and request.gateway != gateway.id:
        seen = await progress.ask(request.gateway, request.id)
    if seen is not None:
        return seen
    if await _collected(gateway, request, collector):
        return None
    tokens = collector.usage.completion_tokens
    return Progress(1 if tokens else -1, tokens)


async def _collected(gateway: Gateway, request: GenerateRequest, collector: Aggregator | ImageAggregator) -> bool:
    """Feed a collector from the token stream; returns whether the answer is complete."""
    inflight = await gateway.attach(request, whole=True)
    try:
        return collector.push(inflight.available())
    finally:
        gateway.release(inflight)


async def _ended(request: GenerateRequest, collector: Aggregator | ImageAggregator, base_url: str) -> Status:
    try:
        result = await _result(collector, base_url)
    except ServingError as failure:
        status = _status(request, "cancelled" if failure.code is Code.cancelled else "failed")
        status = msgspec.structs.replace(status, error=error_body(failure).error)
    else:
        status = msgspec.structs.replace(_status(request, "done"), result=result)
    return msgspec.structs.replace(status, output_tokens=collector.usage.completion_tokens)


def _status(request: GenerateRequest, state: State) -> Status:
    return Status(
        id=request.id,
        model=request.named,
        state=state,
        created=request.created_ns // 1_000_000_000,
        deadline=request.deadline_ns // 1_000_000_000,
        gateway=request.gateway,
        client_request_id=request.client_request_id,
    )


async def _collector(
    gateway: Gateway, request: GenerateRequest, *, late: bool, ended_ns: int = 0
) -> Aggregator | ImageAggregator:
    """
    Args:
        ended_ns: when it ended; 0: just now, if it has.
    Raises:
        ServingError: model_unavailable.
    """
    if request.diffusion is not None:
        return ImageAggregator(request)
    ended_ns = ended_ns or gateway.bus.clock.now_ns()
    return aggregator_for(request, await gateway.fleet.detokenizer(request), late=late, ended_ns=lambda: ended_ns)


async def _result(collector: Aggregator | ImageAggregator, base_url: str) -> msgspec.Raw:
    """The result as it was sent; images and videos always as links.

    Raises:
        ServingError: the request failed.
    """
    if isinstance(collector, ImageAggregator):
        return msgspec.Raw(_json(collector.response(base_url)))
    return msgspec.Raw(await encode_answer(collector))
