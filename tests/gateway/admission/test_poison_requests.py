"""Gateways on a real broker: the first repeat of a poisonous request runs alone, later ones are refused for an hour."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

import penstock.gateway.admission.poison_requests
from penstock.gateway.admission.poison_requests import REFUSED_FROM, WATCHED_FROM, Verdicts
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Diffusion, GenerateRequest, Sampling, new_request_id
from penstock.schemas.streams import topology
from penstock.schemas.subjects import DEFAULT_TENANT, Subjects
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from penstock.schemas.verdicts import HOLDS_S, Verdict, key_of
from tests.infra.bus.support import eventually
from tests.workers.support import dial, request

POISON = (1, 2, 3)
SECRET = b"k" * 32


@pytest.fixture
async def gateways(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[tuple[Verdicts, Verdicts]]:
    async with AsyncExitStack() as stack:
        made = []
        for number in range(2):
            bus = await stack.enter_async_context(dial(broker, pipeline, f"gateway-{number}"))
            verdicts = Verdicts(bus)
            await verdicts.open(bus.tasks.group("gateway"))
            stack.push_async_callback(verdicts.close)
            made.append(verdicts)
        yield made[0], made[1]


def asked(**more: Any) -> GenerateRequest:
    """A request like the others, with an id and a seed of its own."""
    own = new_request_id()
    return request(POISON, id=own, sampling=Sampling(seed=hash(own) & 0xFFFF), **more)


def ends(verdicts: Verdicts, which: GenerateRequest, code: str = "") -> InflightRequest:
    inflight = InflightRequest(which)
    verdicts.follow(inflight)
    finish = Finish("error", None, 0, code, "why") if code else Finish("stop")
    inflight.feed(TokenItem(which.id, 1, WHOLE_REQUEST if code else 0, 0, b"", finish), 1)
    verdicts.released(inflight)
    return inflight


async def refused(verdicts: Verdicts, which: GenerateRequest) -> str:
    with pytest.raises(ServingError) as raised:
        await verdicts.check(which)
    assert raised.value.code is Code.poisoned_request
    assert raised.value.code.status == 422
    return raised.value.message


async def known(verdicts: Verdicts, count: int = 1) -> None:
    await eventually(lambda: len(verdicts.table) == count and not verdicts.storing)


async def test_a_bucket_that_is_made_after_a_gateway_has_started_is_used(
    broker: EmbeddedNats, pipeline: Subjects, nc: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a chart changes all Deployments and makes the streams at the same time."""
    monkeypatch.setattr(penstock.gateway.admission.poison_requests, "AGAIN_S", 0.05)
    await nc.jetstream().delete_stream(f"KV_{pipeline.bucket('verdicts')}")
    async with dial(broker, pipeline, "gateway-0") as bus:
        verdicts, tasks = Verdicts(bus), bus.tasks.group("gateway")
        await verdicts.open(tasks)
        poison = asked()
        ends(verdicts, poison, "poisoned_request")
        assert await verdicts.check(poison) is poison  # nothing is known without the bucket
        await apply(nc, topology(pipeline))
        await eventually(lambda: not len(tasks))
        ends(verdicts, poison, "poisoned_request")
        await known(verdicts)
        assert (await verdicts.check(asked())).repeats_poison
        await verdicts.close()


@pytest.mark.parametrize("no_store", [False, True])
async def test_the_first_repeat_at_any_gateway_runs_alone_and_later_ones_are_refused(
    gateways: tuple[Verdicts, Verdicts], no_store: bool
) -> None:
    first, second = gateways
    poison = asked(no_store=no_store)
    assert await first.check(poison) is poison
    ends(first, poison, "poisoned_request")
    repeat = await first.check(asked(no_store=no_store))  # at once
    assert repeat.repeats_poison
    assert (await first.check(msgspec.structs.replace(repeat, repeats_poison=False))).repeats_poison  # resubmitted
    await known(second)
    await eventually(lambda: all(verdict.repeated for verdict, _ in second.table.values()))
    said = await refused(second, asked(no_store=no_store))
    assert poison.id in said
    assert "60 more minutes" in said
    ends(first, repeat, "poisoned_request")
    await known(first)
    await refused(first, asked(no_store=no_store))
    for other in (request((1, 2, 4)), asked(tenant="acme"), asked(model="other"), asked(revision="newer")):
        assert await second.check(other) is other


async def test_of_two_concurrent_first_repeats_one_runs(gateways: tuple[Verdicts, Verdicts]) -> None:
    ends(gateways[0], asked(), "poisoned_request")
    await known(gateways[0])
    await known(gateways[1])
    results = await asyncio.gather(*(each.check(asked()) for each in gateways), return_exceptions=True)
    assert [isinstance(each, ServingError) for each in results].count(True) == 1
    assert [isinstance(each, GenerateRequest) and each.repeats_poison for each in results].count(True) == 1


@pytest.mark.parametrize("no_store", [False, True])
async def test_a_repeat_that_is_answered_withdraws_the_verdict(
    gateways: tuple[Verdicts, Verdicts], no_store: bool
) -> None:
    first, second = gateways
    ends(first, asked(no_store=no_store), "poisoned_request")
    repeat = await first.check(asked(no_store=no_store))
    await known(second)
    ends(first, repeat, "cancelled")  # says nothing
    await refused(first, asked(no_store=no_store))
    ends(first, repeat)
    again = asked(no_store=no_store)
    assert await first.check(again) is again
    await known(second, 0)


def variation(number: int, **more: Any) -> GenerateRequest:
    """Another digest with each number."""
    asked_again = asked(**more)
    return msgspec.structs.replace(asked_again, sampling=Sampling(temperature=number / 100))


@pytest.mark.parametrize("tenant", ["acme", DEFAULT_TENANT])
async def test_requests_of_a_tenant_with_several_verdicts_are_watched_and_with_many_refused(
    gateways: tuple[Verdicts, Verdicts], tenant: str
) -> None:
    first, second = gateways
    for number in range(REFUSED_FROM):
        checked = await first.check(variation(number, tenant=tenant))
        assert checked.watched is (number >= WATCHED_FROM)
        assert not checked.repeats_poison
        ends(first, checked, "poisoned_request")
        await known(first, number + 1)
    await known(second, REFUSED_FROM)
    fresh = variation(50, tenant=tenant)
    if tenant == DEFAULT_TENANT:  # nobody knows whose it is
        assert (await second.check(fresh)).watched
    else:
        assert "10 different requests of tenant 'acme'" in await refused(second, fresh)
    other = variation(50, tenant="another")
    assert await second.check(other) is other
    hour_ago = time.time_ns() - (HOLDS_S + 1) * 10**9
    for key in list(second.of_tenant[tenant])[WATCHED_FROM - 1 :]:
        second.of_tenant[tenant][key] = hour_ago
    assert await second.check(fresh) is fresh
    assert len(second.table) == WATCHED_FROM - 1


async def test_a_verdict_that_is_withdrawn_does_not_count(gateways: tuple[Verdicts, Verdicts]) -> None:
    first, _ = gateways
    for number in range(WATCHED_FROM):
        ends(first, variation(number), "poisoned_request")
        await known(first, number + 1)
    repeat = await first.check(variation(0))
    assert repeat.watched
    assert repeat.repeats_poison
    ends(first, repeat)
    await known(first, WATCHED_FROM - 1)
    assert not (await first.check(variation(50))).watched
    assert {tenant: len(keys) for tenant, keys in first.of_tenant.items()} == {DEFAULT_TENANT: WATCHED_FROM - 1}


async def test_a_verdict_holds_for_an_hour(gateways: tuple[Verdicts, Verdicts]) -> None:
    first, _ = gateways
    ends(first, asked(), "poisoned_request")
    await known(first)
    [(key, (verdict, revision))] = first.table.items()
    first.table[key] = Verdict(verdict.request, time.time_ns() - (HOLDS_S + 1) * 10**9), revision
    late = asked()
    assert await first.check(late) is late


async def test_of_a_request_that_is_not_to_be_stored_nothing_is_in_the_bucket(
    gateways: tuple[Verdicts, Verdicts], broker: EmbeddedNats, pipeline: Subjects
) -> None:
    first, _ = gateways
    poison = asked(no_store=True)
    ends(first, poison, "poisoned_request")
    await known(first)
    key = key_of(poison, first._secret or b"")

    async def stored(bus: Bus, of: str) -> bool:
        bucket = pipeline.bucket("verdicts")
        return await get_last(bus, f"KV_{bucket}", f"$KV.{bucket}.{of}", newest=True) is not None

    async with dial(broker, pipeline) as bus:
        assert not await stored(bus, key)
        assert await stored(bus, "secret")
        ends(first, asked(tenant="acme"), "poisoned_request")
        await known(first, 2)
        assert await stored(bus, key_of(asked(tenant="acme"), first._secret or b""))


async def test_without_the_bucket_of_an_earlier_broker_nothing_is_refused(
    broker: EmbeddedNats, subjects: Subjects
) -> None:
    async with dial(broker, subjects) as bus:
        verdicts = Verdicts(bus)
        await verdicts.open(bus.tasks.group("gateway"))
        poison = asked()
        ends(verdicts, poison, "poisoned_request")
        await eventually(lambda: not verdicts.storing)
        assert await verdicts.check(poison) is poison
        await verdicts.close()


def test_the_key_is_of_what_is_computed_and_not_of_what_differs_in_each_request() -> None:
    one, other = asked(session="a", user="u", salt="s"), asked(deadline_s=5.0, client_request_id="mine")
    assert key_of(one, SECRET) == key_of(other, SECRET)
    assert key_of(one, SECRET) != key_of(one, b"l" * 32)
    drawn = Diffusion("image", "a cat", 8, 8, 1, "png", seed=1)
    images = [asked(diffusion=msgspec.structs.replace(drawn, seed=seed)) for seed in (1, 2)]
    assert key_of(images[0], SECRET) == key_of(images[1], SECRET) != key_of(one, SECRET)
    assert key_of(asked(n=2), SECRET) != key_of(one, SECRET)
