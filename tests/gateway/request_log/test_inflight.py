"""What one open answer keeps: items in order, each once, and a bounded number for a client that does not read."""

import asyncio
import random
import traceback

import msgspec
import pytest

from penstock.gateway.request_log.inflight import MAX_ITEMS, PORTION_BYTES, InflightRequest, limit_of
from penstock.infra.process.turns import AT_ONCE, TurnBudget
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Sampling, Stop
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from penstock.schemas.wire import pack_tokens


def request_of(n: int = 1, logprobs: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        id="r",
        model="m",
        gateway="g",
        prompt=b"",
        stop=Stop(max_tokens=10),
        created_ns=0,
        deadline_ns=1,
        digests=b"",
        block_size=32,
        sampling=Sampling(logprobs=logprobs),
        n=n,
    )


def item(first: int, count: int = 1, *, attempt: int = 1, choice: int = 0, end: bool = False) -> TokenItem:
    finish = Finish("length") if end else None
    return TokenItem("r", attempt, choice, first, pack_tokens(range(first, first + count)), finish)


def tokens_of(items: list[TokenItem]) -> bytes:
    return b"".join(one.tokens for one in items)


async def taken(inflight: InflightRequest) -> list[TokenItem]:
    """All that is there, portion by portion."""
    out: list[TokenItem] = []
    while inflight.buffered:
        portion = await inflight.take()
        assert portion
        out += portion
    return out


async def test_items_are_taken_in_portions_that_do_not_stall_the_loop() -> None:
    inflight = InflightRequest(request_of())
    for number in range(500):
        inflight.feed(item(number * 16, 16), number)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(other())
    await asyncio.sleep(0)
    portions = []
    while inflight.buffered:
        portions.append(await inflight.take())
    watching.cancel()
    assert all(len(tokens_of(portion)) <= PORTION_BYTES + 64 for portion in portions)
    assert tokens_of([one for portion in portions for one in portion]) == pack_tokens(range(8000))
    assert turns >= len(portions), "others had their turn between two portions"


async def test_a_client_that_does_not_read_costs_a_bounded_number_of_items() -> None:
    inflight = InflightRequest(request_of())
    asked: list[InflightRequest] = []
    inflight.on_behind = asked.append
    for seq in range(1, 100_000):
        inflight.feed(item(seq - 1), seq)
    assert len(inflight.buffered) <= MAX_ITEMS + 1
    assert inflight.paused
    assert asked == [], "nothing is read again before the client reads on"
    kept = await taken(inflight)
    assert tokens_of(kept) == pack_tokens(range(len(kept)))
    assert not inflight.ended
    waiting = asyncio.create_task(inflight.take())
    await asyncio.sleep(0)
    assert asked == [inflight]
    assert inflight.seq == len(kept) - 1, "from the entry on that was not seen whole"
    assert inflight.feed_past(item(len(kept)), len(kept) + 1)
    assert tokens_of(await waiting) == pack_tokens([len(kept)])


async def test_the_end_is_known_while_a_client_does_not_read() -> None:
    for last in (item(99_999, end=True), TokenItem("r", 1, WHOLE_REQUEST, 0, b"", Finish("error"))):
        inflight = InflightRequest(request_of())
        for seq in range(1, 5_000):
            inflight.feed(item(seq - 1), seq)
        assert not inflight.ended
        inflight.feed(last, 5_000)
        assert inflight.ended


async def test_an_end_of_an_attempt_that_was_fenced_off_is_none() -> None:
    inflight = InflightRequest(request_of(n=2))
    inflight.fall_behind()
    inflight.feed(item(5, choice=0, end=True), 1)
    inflight.feed(item(5, attempt=2, choice=1, end=True), 2)
    assert not inflight.ended
    inflight.feed(item(5, attempt=2, choice=0, end=True), 3)
    assert inflight.ended


def fence(attempt: int) -> TokenItem:
    return TokenItem("r", attempt, WHOLE_REQUEST, 0)


async def test_a_late_end_behind_a_fence_is_none_while_a_client_does_not_read() -> None:
    inflight = InflightRequest(request_of())
    inflight.fall_behind()
    inflight.feed(fence(2), 1)
    inflight.feed(item(5, end=True), 2)
    assert not inflight.ended


async def test_a_late_end_that_comes_before_its_fence_is_read_leaves_the_rest_to_the_record() -> None:
    """A client attaches while the tokens of a fenced attempt arrive live, and its request ended with that attempt."""
    inflight = InflightRequest(request_of())
    inflight.fall_behind()
    inflight.feed(item(3, 2, end=True), 9)
    for seq, past in enumerate((item(0, 3), fence(2), item(3, attempt=2)), 1):
        assert inflight.feed_past(past, seq)
    assert not inflight.ended
    inflight.seq = 8
    inflight.hold()
    inflight.feed(item(4, end=True), 9)
    assert inflight.join()
    assert not inflight.ended, "it waits for the record, which is looked up for those that have not ended"
    inflight.complete([item(0, 5, end=True)])
    assert inflight.ended
    assert tokens_of(await taken(inflight)) == pack_tokens(range(5))


@pytest.mark.parametrize("seed", range(20))
async def test_pauses_and_reading_again_lose_nothing_and_repeat_nothing(seed: int) -> None:
    """A client that reads in fits and starts, against a log; the reader pauses and resumes as the request says."""
    rng = random.Random(seed)
    n = rng.choice([1, 3])
    inflight = InflightRequest(request_of(n=n))
    inflight.limit = rng.choice([1, 5, 40])
    behind: list[InflightRequest] = []
    inflight.on_behind = behind.append
    log: list[list[TokenItem]] = []
    positions = [0] * n
    got: list[bytes] = [b""] * n
    if late := rng.random() < 0.3:
        inflight.fall_behind()
        behind.append(inflight)

    async def read_some() -> None:
        for one in await inflight.take():
            got[one.choice] += one.tokens

    def read_log() -> None:
        while behind:
            reading = behind.pop()
            past = [entry for entry in enumerate(log, 1) if entry[0] > reading.seq]
            for seq, items in past:
                if not all(reading.feed_past(one, seq) for one in items):
                    return
            reading.seq = len(log)
            reading.hold()
            assert reading.join()

    for seq in range(1, 400):
        entry = []
        for choice in range(n):
            if rng.random() < 0.7 and positions[choice] < 300:
                count = rng.randint(1, 3)
                entry.append(item(positions[choice], count, choice=choice))
                positions[choice] += count
        log.append(entry)
        for one in entry:
            inflight.feed(one, seq)
        if rng.random() < 0.2 and not (late and inflight.behind):
            reading = asyncio.create_task(read_some())
            await asyncio.sleep(0)
            read_log()
            await asyncio.sleep(0)
            if not reading.done():
                reading.cancel()
    for _ in range(10_000):
        if got == [pack_tokens(range(position)) for position in positions]:
            break
        reading = asyncio.create_task(read_some())
        await asyncio.sleep(0)
        read_log()
        await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
    assert got == [pack_tokens(range(position)) for position in positions]


async def test_a_record_completes_an_answer_that_lacks_its_end() -> None:
    inflight = InflightRequest(request_of())
    inflight.feed(item(0, 3), 1)
    inflight.fall_behind(1)
    inflight.complete([item(0, 10_000, end=True)])
    assert inflight.ended
    items = await taken(inflight)
    assert tokens_of(items) == pack_tokens(range(10_000))
    assert items[-1].finish == Finish("length")
    assert max(len(one.tokens) for one in items) <= PORTION_BYTES


async def test_waiting_for_the_first_item_ends_when_asked() -> None:
    inflight = InflightRequest(request_of())
    assert await inflight.take_within(0.01) == []
    inflight.feed(item(0), 1)
    assert await inflight.take_within(5) == [item(0)]
    inflight.fail(ServingError(Code.deadline_exceeded, "late"))
    with pytest.raises(ServingError):
        await inflight.take_within(5)


async def test_of_many_readers_few_are_woken_in_one_turn_and_the_others_take_what_came_meanwhile() -> None:
    turns, opened, took = TurnBudget(lambda: 0.0), [InflightRequest(request_of()) for _ in range(200)], []

    async def read(inflight: InflightRequest) -> None:
        took.append(await inflight.take())

    for inflight in opened:
        inflight.turns = turns
    reading = [asyncio.create_task(read(inflight)) for inflight in opened]
    await asyncio.sleep(0)
    for inflight in opened:
        inflight.feed(item(0), 1)
    await asyncio.sleep(0)
    assert 0 < len(took) <= AT_ONCE
    assert took == [[item(0)]] * len(took)
    for inflight in opened:
        inflight.feed(item(1), 2)
    await asyncio.gather(*reading)
    assert took[-1] == [item(0), item(1)]


async def test_an_error_that_ends_many_requests_keeps_none_of_them() -> None:
    error = ServingError(Code.cancelled, "the client disconnected")
    for _ in range(3):
        inflight = InflightRequest(request_of())
        inflight.fail(error)
        with pytest.raises(ServingError) as raised:
            await inflight.take()
        frames = [frame for frame, _ in traceback.walk_tb(raised.tb)]
        assert [frame.f_code.co_name for frame in frames].count("take") == 1


def test_items_with_log_probabilities_count_more() -> None:
    assert limit_of(request_of()) > limit_of(request_of(logprobs=0)) > limit_of(request_of(logprobs=20))
    assert limit_of(request_of(n=128)) >= 128, "one step of all choices fits"
    assert msgspec.structs.asdict(request_of())["n"] == 1
