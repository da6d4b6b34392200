"""``GET /v1/usage``: what a key has used, in the form of OpenAI's usage API, from the ledgers of all cells."""

import asyncio
import re
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.access.authentication import Caller, caller_of
from penstock.gateway.base.request_bodies import invalid
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.direct_get import read
from penstock.infra.process.turns import TimeSlice
from penstock.schemas import usage
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.usage import UsageSum, UsageTable, month_of

MOST_RESULTS = 10_000
TURN_S = 30.0  # that a question waits for those before it
WIDTHS = {"1h": "hour", "1d": "day", "1mo": "month"}
GROUPS = {"project_id": "tenant", "api_key_id": "key", "model": "model", "adapter": "adapter"}
_NS = 1_000_000_000


class UsageResult(Struct):
    """``images``: pictures and videos that were made. ``num_reasoning_unknown``: requests whose reasoning is not among
    ``output_reasoning_tokens``, since its marks are not single tokens. What was not grouped by is null."""

    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    num_model_requests: int
    images: int
    output_reasoning_tokens: int
    num_reasoning_unknown: int
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    adapter: str | None = None
    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"


class UsageBucket(Struct):
    """``start_time``, ``end_time``: Unix time."""

    start_time: int
    end_time: int
    results: list[UsageResult]
    object: Literal["bucket"] = "bucket"


class MissedUsage(Struct):
    """``messages``: at most this many were discarded before they were counted. Unix time; 0: not known."""

    messages: int
    start_time: int
    end_time: int


class TokenBudget(Struct):
    """Of this month. ``resets_at``: Unix time."""

    tokens_per_month: int
    used: int
    resets_at: int


class UsagePage(Struct):
    """Intervals in which something was used; ``budget``: null if the key has none."""

    data: list[UsageBucket]
    missed: list[MissedUsage]
    budget: TokenBudget | None = None
    has_more: bool = False
    next_page: str | None = None
    object: Literal["page"] = "page"


class UsageEndpoint:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turn = asyncio.Lock()  # a ledger of 13 months may be large

    async def get(self, request: Request) -> Response:
        """
        Raises:
            ServingError: invalid_request; overloaded; broker_unavailable.
        """
        gateway, caller, query = self._gateway, caller_of(request.scope), request.query_params
        now_ns = gateway.bus.clock.now_ns()
        width = query.get("bucket_width", "1d")
        if width not in WIDTHS:
            raise invalid("bucket_width", f"bucket_width {width[:20]!r} must be one of {', '.join(WIDTHS)}")
        asked = [name for part in query.multi_items() for name in _names(part) if name]
        if unknown := [name for name in asked if name not in GROUPS]:
            raise invalid("group_by", f"group_by {unknown[0][:40]!r} must be one of {', '.join(GROUPS)}")
        groups = list(dict.fromkeys(asked))
        since_s = _seconds(query, "start_time", month_of(now_ns)[0])
        until_s = _seconds(query, "end_time", now_ns // _NS + 1)
        own = caller.key.prefix if caller.key is not None and caller.sees is not None else ""
        table = UsageTable(
            [GROUPS[name] for name in groups],
            WIDTHS[width],
            since_ns=since_s * _NS,
            until_ns=until_s * _NS,
            of=(lambda row: row.key == own) if own else (lambda row: True),
        )
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise ServingError(
                Code.overloaded, "the usage of others is being read by this gateway; try again", retry_after=5.0
            ) from None
        try:
            await self._read(table)
        finally:
            self._turn.release()
        data: dict[int, UsageBucket] = {}
        for each in table.sums():
            bucket = data.setdefault(each.begin_s, UsageBucket(each.begin_s, each.end_s, []))
            bucket.results.append(_result(each, groups))
        missed = [MissedUsage(gap.messages, gap.since_ns // _NS, gap.until_ns // _NS) for gap in table.gaps]
        page = UsagePage(list(data.values()), missed, self._budget(caller, now_ns))
        return Response(msgspec.json.encode(page), media_type="application/json")

    async def _read(self, table: UsageTable) -> None:
        time_slice = TimeSlice()
        for cell in self._gateway.cells:
            stream, parts = cell.bus.subjects.stream("USAGE"), cell.bus.subjects.all("usage")
            async for entry in read(cell.bus, stream, parts, since_ns=table.begin_ns):
                table.add(usage.decode(entry.data))
                if len(table) > MOST_RESULTS:
                    raise invalid("bucket_width", f"there are more than {MOST_RESULTS} results; ask for a shorter time")
                await time_slice.yield_if_spent()

    def _budget(self, caller: Caller, now_ns: int) -> TokenBudget | None:
        key = caller.key
        if key is None or not key.tokens_per_month:
            return None
        return TokenBudget(key.tokens_per_month, self._gateway.budgets.spent("key", key.prefix), month_of(now_ns)[1])


def _names(item: tuple[str, str]) -> list[str]:
    """OpenAI's clients write ``group_by`` or ``group_by[]`` once for each."""
    name, value = item
    return value.split(",") if name in ("group_by", "group_by[]") else []


def _seconds(query: Any, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not re.fullmatch("[0-9]{1,11}", text):
        raise invalid(name, f"{name} {text[:20]!r} must be a Unix time in seconds")
    return int(text)


def _result(each: UsageSum, groups: list[str]) -> UsageResult:
    total = each.total
    named = {name: value or None for name, value in zip(groups, each.of, strict=True)}
    return UsageResult(
        total.prompt,
        total.cached,
        total.completion,
        total.requests,
        total.images,
        total.reasoning,
        total.reasoning_unknown,
        named.get("project_id"),
        named.get("api_key_id"),
        named.get("model"),
        named.get("adapter"),
    )
