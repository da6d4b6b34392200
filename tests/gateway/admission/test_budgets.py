"""Budgets: what was spent is the sum of all cells' ledgers, however often their parts are read."""

import asyncio
import datetime
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.access.authentication import ANYONE, Caller
from penstock.gateway.admission.budgets import Budgets, SpentInCell
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
        for bus in (home, other):
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
