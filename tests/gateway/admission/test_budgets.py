"""Budgets: what was spent is the sum of all cells' ledgers, however often their parts are read."""

import asyncio
import datetime
import time
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.errors import Error as NatsError

from penstock.gateway.access.authentication import ANYONE, Caller
from penstock.gateway.admission.budgets import READ_S, Budgets, SpentInCell
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from penstock.schemas.tenants import Limits
from penstock.schemas.usage import HOUR_NS, CountedEnd, UsagePart, UsageRow, following, grown, month_of
from penstock.schemas.wire import encode
from tests.infra.bus.support import eventually
from tests.workers.support import dial

NOVEMBER = int(datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.UTC).timestamp())
HOUR = NOVEMBER // 3600
KEY = ApiKey("0a1b2c3d4e5f", bytes(32), tenant="acme", tokens_per_month=100)
TENANTS = {"acme": Limits(tokens_per_month=150), "zenith": Limits()}


def row(hour: int, tokens: int, tenant: str = "acme", key: str = KEY.prefix) -> UsageRow:
    return UsageRow(hour, tenant, key, "tiny", requests=1, prompt=tokens - 1, completion=1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["acme", "zenith"])), max_size=30),
    st.lists(st.integers(1, 5)),
)
def test_parts_that_grow_are_counted_as_they_are_at_last(log: list[tuple[int, int, str]], cuts: list[int]) -> None:
    messages = [
        CountedEnd(seq, HOUR * HOUR_NS, row(HOUR - back, tokens, tenant))
        for seq, (back, tokens, tenant) in enumerate(log, 1)
    ]
    cell, part = SpentInCell(month_of(NOVEMBER * 10**9)[0]), UsagePart(1)
    at = 0
    for cut in [*cuts, 40]:
        part, left = grown(part, messages[at : at + cut])
        at += cut
        cell.push(part)
        cell.push(part)  # read again after a reconnect
        while left:
            part, left = grown(following(part), left)
            cell.push(part)
    wanted = Counter[str]()
    for _, tokens, tenant in log:
        wanted[tenant] += tokens
    month, _ = month_of(NOVEMBER * 10**9)
    assert {name: cell.spent[month, "tenant", name] for name in wanted} == wanted


def caller(key: ApiKey | None = None, tenant: str = "acme") -> Caller:
    return Caller(tenant, tenant, key=key)


async def test_a_budget_is_of_the_month_and_of_all_cells(broker: EmbeddedNats, pipeline: Subjects) -> None:
    now_s = NOVEMBER
    async with dial(broker, pipeline) as home, dial(broker, Subjects(f"{pipeline.namespace}-1")) as other:
        await apply(other.nc, topology(other.subjects))
        before = UsagePart(1, rows=(row(HOUR - 31 * 24, 900),), closed=True)
        await home.js.publish(home.subjects.usage(1), encode(before))
        await home.js.publish(home.subjects.usage(2), encode(UsagePart(2, rows=(row(HOUR, 60),))))
        await other.js.publish(other.subjects.usage(1), encode(UsagePart(1, rows=(row(HOUR, 39),))))
        budgets = Budgets({KEY.id: KEY}, TENANTS, lambda: now_s * 10**9)
        for bus in (home, other, other):  # a cell that could not be opened is opened again
            await asyncio.wait_for(budgets.follow(bus), 5)
        try:
            budgets.look()
            assert budgets.spent("key", KEY.prefix) == 99
            assert budgets.reached == frozenset()
            await home.js.publish(home.subjects.usage(2), encode(UsagePart(2, rows=(row(HOUR, 61),))))

            def reached() -> bool:
                budgets.look()
                return bool(budgets.reached)

            await eventually(reached)
            with pytest.raises(ServingError) as caught:
                budgets.check(caller(KEY))
            assert caught.value.code is Code.insufficient_quota
            assert "100 tokens of its budget of 100 this month, which ends 2026-12-01 00:00 UTC" in str(caught.value)
            assert caught.value.retry_after == pytest.approx(36 * 3600)
            budgets.check(caller())
            budgets.check(caller(msgspec.structs.replace(KEY, id="000000000000")))
            budgets.check(ANYONE)
            now_s += 36 * 3600
            budgets.look()
            assert budgets.reached == frozenset(), "another month"
        finally:
            await budgets.close()


async def test_a_gateway_is_not_ready_before_budgets_are_read_for_a_while(
    broker: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would let in whoever has spent everything."""
    monkeypatch.setattr("penstock.gateway.admission.budgets.FOLLOW_AGAIN_S", 0.02)
    start, may_read = LogTail.start, False

    async def start_later(self: LogTail, **options: Any) -> None:
        if not may_read:
            raise ServingError(Code.broker_unavailable, "not yet")
        await start(self, **options)

    monkeypatch.setattr(LogTail, "start", start_later)
    async with dial(broker, pipeline) as bus:
        await bus.js.publish(bus.subjects.usage(1), encode(UsagePart(1, rows=(row(HOUR, 100),))))
        tenants: dict[str, Limits] = {}
        budgets = Budgets({}, tenants, lambda: NOVEMBER * 10**9)
        assert not budgets.unread(time.monotonic())
        following = asyncio.create_task(budgets.follow(bus))
        await eventually(lambda: budgets._unread)
        assert not budgets.unread(time.monotonic()), "nobody has a budget"
        tenants["acme"] = Limits(tokens_per_month=100)
        assert budgets.unread(time.monotonic())
        assert not budgets.unread(time.monotonic() + READ_S), "a ledger that cannot be read stops nothing for ever"
        may_read = True
        await asyncio.wait_for(following, 5)
        try:
            assert not budgets.unread(time.monotonic())
            assert budgets.reached == {("tenant", "acme")}, "known as soon as it is ready"
        finally:
            await budgets.close()


def test_a_budget_that_was_changed_or_is_of_another_month_refuses_nothing_before_the_next_look() -> None:
    now_s, tenants = NOVEMBER, dict(TENANTS)
    budgets = Budgets({KEY.id: KEY}, tenants, lambda: now_s * 10**9)
    cell = SpentInCell(month_of(NOVEMBER * 10**9)[0])
    cell.push(UsagePart(1, rows=(row(HOUR, 150),)))
    budgets._cells.append(cell)
    budgets.look()
    assert budgets.reached == {("key", KEY.prefix), ("tenant", "acme")}
    for who in (caller(KEY), caller()):
        with pytest.raises(ServingError):
            budgets.check(who)
    budgets.check(caller(msgspec.structs.replace(KEY, tokens_per_month=0), tenant="zenith"))
    tenants["acme"] = Limits(tokens_per_month=151)
    budgets.check(caller())
    del tenants["acme"]
    budgets.check(caller())
    now_s += 36 * 3600
    budgets.check(caller(KEY, tenant="zenith"))


def test_a_look_asks_for_the_month_once_however_many_keys_there_are() -> None:
    asked = 0

    def now_ns() -> int:
        nonlocal asked
        asked += 1
        return NOVEMBER * 10**9

    keys = {f"{number:012x}": ApiKey(f"{number:012x}", bytes(32), tokens_per_month=1) for number in range(100)}
    Budgets(keys, {}, now_ns).look()
    assert asked == 1


async def test_a_ledger_that_cannot_be_read_is_tried_again_whatever_the_reason(
    broker: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ServingError(Code.broker_unavailable, "away"), NatsError("closed"), TimeoutError()]
    start = LogTail.start

    async def fail_and_start(tail: LogTail, **options: int) -> None:
        if errors:
            raise errors.pop()
        await start(tail, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LogTail, "start", fail_and_start)
    monkeypatch.setattr("penstock.gateway.admission.budgets.FOLLOW_AGAIN_S", 0.01)
    async with dial(broker, pipeline) as bus:
        await bus.js.publish(bus.subjects.usage(1), encode(UsagePart(1, rows=(row(HOUR, 60),))))
        made = Budgets({}, TENANTS, lambda: NOVEMBER * 10**9)
        await asyncio.wait_for(made.follow(bus), 5)
        assert made.spent("tenant", "acme") == 60
        await made.close()
