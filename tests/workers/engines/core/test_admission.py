"""Who gets blocks, and when: sequences with and without a reservation in one queue. None may wait for itself.

A reservation holds a prompt's blocks until its sequences run; one without a reservation that is before them in the
queue needs blocks that may be among those.
"""

import random

from penstock.workers.engine_loop.loop import BlockWait, BlockWaitQueue
from penstock.workers.engines.core.engine import scheduler_stats
from penstock.workers.engines.core.queue import MOST_PASSED, AdapterSlots
from penstock.workers.engines.core.sequence import LoadedAdapter, ScheduledSequence
from penstock.workers.engines.engine_protocol import BlockReservation, Output
from tests.workers.engines.core.support import ROOT, Bench, check_pool, names, request


def prompt(number: int, tokens: int) -> list[int]:
    return [1000 * number + at for at in range(tokens)]


def reserved(bench: Bench, asked: list[int], users: int = 1) -> BlockReservation:
    """Blocks for a prompt that came from elsewhere."""
    found = bench.scheduler.reservations.reserve(names(asked), users if len(asked) % 4 else 0, users)
    assert found is not None
    bench.scheduler.reservations.adopt(found)
    return found


def adopt(bench: Bench, key: object, asked: list[int], found: BlockReservation, max_tokens: int = 8) -> None:
    bench.scheduler.submit(request(key, asked, max_tokens, root=ROOT, generated=[7], reservation=found))


def outputs(got: dict[object, list[object]], key: object) -> int:
    return sum(isinstance(item, Output) for item in got[key])


def test_one_whose_blocks_are_there_goes_before_a_head_that_waits_for_them() -> None:
    bench = Bench(total_blocks=10)
    first = prompt(1, 24)
    found = reserved(bench, first)
    bench.scheduler.submit(request("plain", prompt(2, 24), root=ROOT))  # 7 of 10 blocks, 6 are reserved
    adopt(bench, "handed", first, found)
    got = bench.finish()
    assert (outputs(got, "plain"), outputs(got, "handed")) == (8, 7)
    assert scheduler_stats(bench.scheduler).preemptions == 0
    check_pool(bench.blocks, [])


def test_a_prompt_from_another_worker_waits_for_no_chunk_of_those_that_are_computed_here() -> None:
    bench = Bench(max_batched_tokens=32, mixed_chunk_tokens=4)
    bench.scheduler.submit(request("runs", prompt(1, 8), root=ROOT))
    bench.step()
    for number in (2, 3):
        bench.scheduler.submit(request(number, prompt(number, 9), root=ROOT))
    adopt(bench, "handed", prompt(4, 8), reserved(bench, prompt(4, 8)))
    bench.step()
    assert bench.shape == [("runs", 8, 1, True), (2, 0, 4, False), ("handed", 8, 1, True)]
    for _ in range(2):
        bench.step()
    assert bench.shape == [
        ("runs", 10, 1, True),
        (2, 8, 1, True),
        ("handed", 10, 1, True),
        (3, 0, 4, False),
    ]
    bench.finish()
    check_pool(bench.blocks, [])


def test_prompts_that_no_step_has_tokens_for_hold_no_blocks() -> None:
    """Otherwise handoffs would find none free, and tenants that come later would wait for all of them."""
    bench = Bench(total_blocks=20, max_batched_tokens=32, mixed_chunk_tokens=4)
    bench.scheduler.submit(request("runs", prompt(1, 8), max_tokens=12, root=ROOT))
    bench.step()
    for number in range(2, 7):
        bench.scheduler.submit(request(number, prompt(number, 9), root=ROOT))
    bench.step()
    assert bench.shape == [("runs", 8, 1, True), (2, 0, 4, False)]
    assert len(bench.scheduler.running) == 2
    adopt(bench, "handed", prompt(7, 16), reserved(bench, prompt(7, 16)))
    bench.step()
    assert bench.shape == [("runs", 9, 1, True), (2, 4, 4, False), ("handed", 16, 1, True)]
    bench.finish()
    check_pool(bench.blocks, [])


def test_what_the_head_of_the_queue_needs_is_reserved_for_nobody_behind_it() -> None:
    bench = Bench(total_blocks=10)
    bench.scheduler.submit(request("runs", prompt(1, 16), max_tokens=3, root=ROOT))
    bench.step()  # holds 4, then 5
    bench.scheduler.submit(request("head", prompt(2, 24), root=ROOT))
    bench.step()
    assert bench.scheduler.reservations.reserve(names(prompt(3, 8)), 0, 1) is None, (
        "there is room, but the head waits for it"
    )
    bench.scheduler.cancel("head")
    assert bench.scheduler.reservations.reserve(names(prompt(3, 8)), 0, 1) is not None


def test_reservations_that_all_lack_blocks_end_the_last_one_first() -> None:
    bench = Bench(total_blocks=10)
    handed = [prompt(number, 16) for number in range(2)]
    found = [reserved(bench, asked) for asked in handed]
    for number, asked in enumerate(handed):  # resumed: each needs three blocks more, and two are left
        again = {"root": ROOT, "generated": [7] * 9, "reservation": found[number]}
        bench.scheduler.submit(request(number, asked, 12, **again))
    result = bench.step()
    assert [start.key for start in result.started] == [0]
    got = bench.finish()
    assert [outputs(got, number) for number in range(2)] == [2, 3]
    check_pool(bench.blocks, [])


def test_a_reservation_is_used_also_when_another_copy_had_its_names() -> None:
    """Two handoffs of one prompt at a time: the second one's copies have no name, and the first one's are evicted."""
    bench = Bench(total_blocks=14, max_running=1)
    same = prompt(1, 24)
    first, second = reserved_twice(bench, same)
    adopt(bench, "first", same, first, max_tokens=2)
    bench.step()
    bench.scheduler.submit(request("other", prompt(2, 24), max_tokens=2, root=ROOT))  # evicts what the first one left
    adopt(bench, "second", same, second, max_tokens=4)
    computed = 0
    for _ in range(40):
        if not bench.scheduler.has_work():
            break
        bench.step()
        computed += sum(count for key, _, count, _ in bench.shape if key == "second")
    assert not bench.scheduler.has_work()
    assert computed == 3, "the prompt was brought here, and is not computed"
    check_pool(bench.blocks, [])


def reserved_twice(bench: Bench, asked: list[int]) -> tuple[BlockReservation, BlockReservation]:
    """Both before either is filled."""
    first, second = (bench.scheduler.reservations.reserve(names(asked), 0, 1) for _ in range(2))
    assert first is not None
    assert second is not None
    bench.scheduler.reservations.adopt(first)
    bench.scheduler.reservations.adopt(second)
    return first, second


def test_a_waiting_reservation_gives_way_before_anything_that_runs() -> None:
    bench = Bench(total_blocks=8, max_running=2)
    for key in "ab":
        bench.scheduler.submit(request(key, prompt(ord(key), 6), max_tokens=10, root=ROOT))
    bench.step()
    handed = prompt(1, 8)
    adopt(bench, "handed", handed, reserved(bench, handed))
    got = bench.finish()
    assert {key: outputs(got, key) for key in got} == {"a": 9, "b": 9, "handed": 7}  # and one before
    assert scheduler_stats(bench.scheduler).preemptions == 0
    check_pool(bench.blocks, [])


def test_a_prompt_without_its_first_token_has_its_last_token_computed() -> None:
    bench = Bench()
    asked = prompt(1, 10)
    bench.scheduler.submit(request("a", asked, 3, root=ROOT, reservation=reserved(bench, asked)))
    bench.step()
    assert bench.shape == [("a", 8, 2, True)]
    assert outputs(bench.finish(), "a") == 2
    check_pool(bench.blocks, [])


def test_one_without_a_reservation_gets_its_turn_although_handoffs_never_stop_coming() -> None:
    bench = Bench(total_blocks=12)
    for number in range(3, 200):
        if number == 10:
            bench.scheduler.submit(request("plain", prompt(1, 40), max_tokens=3, root=ROOT))
        asked = prompt(number, 10)
        found = bench.scheduler.reservations.reserve(names(asked), 1, 1)
        if found is not None:
            bench.scheduler.reservations.adopt(found)
            adopt(bench, number, asked, found, max_tokens=5)
        if any(item.key == "plain" for item in bench.step().outputs):
            assert number < 10 + 3 * 8
            return
    raise AssertionError("it waits for ever")


class World:
    """A worker's pool without a worker: random arrivals, of prompts and of handoffs that wait for room first.

    One step of the engine is the unit of time. A handoff waits ``PATIENCE`` steps for room, as the stages do in
    seconds, is on its way for a few more, and may fail.
    """

    PATIENCE = 12

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.bench = Bench(
            total_blocks=rng.randint(6, 40),
            max_running=rng.choice([1, 2, 4, 8]),
            max_batched_tokens=rng.choice([4, 16, 64]),
        )
        self.scheduler = self.bench.scheduler
        self.room = BlockWaitQueue()
        self.now = 0
        self.asked: dict[int, int] = {}  # when
        self.open: set[int] = set()
        self.sequences: dict[int, int] = {}  # of an open one, how many have not ended
        self.waits: dict[int, tuple[BlockWait[BlockReservation], list[int], int]] = {}
        self.coming: list[tuple[int, int, BlockReservation, list[int], int]] = []  # when, which, ...
        self.pinned: list[tuple[int, object]] = []  # until when
        self.moving: list[tuple[int, BlockReservation]] = []  # prefixes that are read from elsewhere, until when
        self.longest = 0
        self.given_way = 0
        self.fallen_back = 0
        reclaim = self.scheduler.queue.reclaim

        def counted() -> bool:
            found = reclaim()
            self.given_way += found
            return found

        self.scheduler.queue.reclaim = counted  # type: ignore[method-assign]

    def arrive(self, number: int) -> None:
        rng, pool = self.random, 4 * self.bench.blocks.total_blocks
        length = rng.randint(1, max(1, pool * 3 // 4))
        base = rng.randint(1, 3) * 1000 if rng.random() < 0.4 else number * 1000 + 10_000  # some share their beginning
        asked = [base + at for at in range(length)]
        users = rng.choice([1, 1, 1, 2])
        self.asked[number] = self.now
        self.open.add(number)
        self.sequences[number] = users
        if rng.random() < 0.3:
            self.submit(number, asked, users, None)
            return
        tails = users if length % 4 else 0
        wait: BlockWait[BlockReservation] = BlockWait(
            "kv", lambda _: self.scheduler.reservations.reserve(names(asked), tails, users)
        )
        self.waits[number] = wait, asked, users
        self.room.add(wait, self.scheduler)  # type: ignore[arg-type]

    def submit(self, number: int, asked: list[int], users: int, found: BlockReservation | None) -> None:
        left = 4 * self.bench.blocks.total_blocks - len(asked)
        most = self.random.randint(2, max(2, min(left, 24)))
        for user in range(users):
            pin = found is None and users == 1 and self.random.random() < 0.1
            key = (number, user)
            self.scheduler.submit(
                request(key, asked, most, root=ROOT, generated=[7], reservation=found, pin=pin, choice=user)
            )

    def end(self, number: int) -> None:
        self.open.discard(number)
        self.longest = max(self.longest, self.now - self.asked[number])

    def cancel(self, number: int) -> None:
        if number in self.waits:
            wait, _, _ = self.waits.pop(number)
            self.room.cancel_wait(wait, self.scheduler)  # type: ignore[arg-type]
            if (found := wait.answer.result()) is not None:  # it was answered just before
                self.scheduler.reservations.release(found)
        for user in range(2):
            self.scheduler.cancel((number, user))
        for each in [each for each in self.coming if each[1] == number]:
            self.coming.remove(each)
            self.scheduler.reservations.release(each[2])
        self.end(number)

    def answered(self) -> None:
        for number, (wait, asked, users) in list(self.waits.items()):
            if not wait.answer.done() and self.now - self.asked[number] >= self.PATIENCE:
                self.room.cancel_wait(wait, self.scheduler)  # type: ignore[arg-type]
            if not wait.answer.done():
                continue
            del self.waits[number]
            found = wait.answer.result()
            if found is None:
                self.fallen_back += 1
                self.submit(number, asked, users, None)
            else:
                self.coming.append((self.now + self.random.randint(0, 6), number, found, asked, users))

    def brought(self) -> None:
        for each in [each for each in self.coming if each[0] <= self.now]:
            self.coming.remove(each)
            _, number, found, asked, users = each
            if self.random.random() < 0.1:  # the transfer failed
                self.scheduler.reservations.release(found)
                self.submit(number, asked, users, None)
            else:
                self.scheduler.reservations.adopt(found)
                self.submit(number, asked, users, found)

    def move_prefixes(self) -> None:
        """Prefixes come from other workers into the cache, and others read what is there."""
        rng, reservations = self.random, self.scheduler.reservations
        asked = names([rng.randint(1, 3) * 1000 + at for at in range(4 * rng.randint(1, 8))])
        if rng.random() < 0.1 and (found := reservations.reserve(asked, 0, 0)) is not None:
            self.moving.append((self.now + rng.randint(0, 6), found))
        for each in [each for each in self.moving if each[0] <= self.now]:
            self.moving.remove(each)
            if rng.random() < 0.8:
                reservations.adopt(each[1])
            reservations.release(each[1])
        if rng.random() < 0.1 and reservations.pin(key := ("reader", self.now), reservations.find(asked)):
            self.pinned.append((self.now + 8, key))

    def step(self) -> None:
        self.now += 1
        self.answered()
        self.brought()
        self.move_prefixes()
        result = self.bench.step()
        self.pinned += [(self.now + 8, one.key) for one in result.pinned]
        for until, key in [each for each in self.pinned if each[0] <= self.now]:
            self.pinned.remove((until, key))
            self.scheduler.pinned.release(key)
        over = [item.key for item in result.outputs if item.finish] + [item.key for item in result.failures]
        for number, _ in over:  # type: ignore[misc]
            self.sequences[number] -= 1
            if not self.sequences[number]:
                self.end(number)
        self.room.serve(self.scheduler)  # type: ignore[arg-type]
        self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        tables = [each.blocks for each in scheduler.running] + scheduler.pinned.tables
        promised = {id(s.reservation): s.reservation for s in scheduler.queue.waiting.values() if s.reservation}
        promised |= {id(each[2]): each[2] for each in self.coming}
        promised |= {id(found): found for _, found in self.moving}
        answered = [wait.answer.result() for wait, _, _ in self.waits.values() if wait.answer.done()]
        promised |= {id(found): found for found in answered if found is not None}
        tables += [each.blocks + each.tails for each in promised.values()]
        check_pool(self.bench.blocks, tables)


def run(seed: int, requests: int = 24) -> World:
    """Until all that came has ended."""
    world = World(seed)
    rng = world.random
    number = 0
    for _ in range(20_000):
        if number < requests and rng.random() < 0.3:
            world.arrive(number)
            number += 1
        if world.open and rng.random() < 0.02:
            world.cancel(rng.choice(sorted(world.open)))
        world.step()
        if number == requests and not world.open:
            break
    assert not world.open, f"after {world.now} steps {world.open} have not ended"
    for _, key in world.pinned:
        world.scheduler.pinned.release(key)
    for _, found in world.moving:
        world.scheduler.reservations.release(found)
    stats = scheduler_stats(world.scheduler)
    assert (stats.used_blocks, stats.pinned_blocks, stats.waiting) == (0, 0, 0)
    assert (world.scheduler.reservations.expected, world.scheduler.queue.reserved) == (0, 0)
    assert not world.room
    return world


def test_whatever_the_pool_and_whoever_comes_everyone_ends_and_no_block_is_lost() -> None:
    """Nobody waits 1,000 steps (427 were the most when this was written)."""
    worlds = [run(seed) for seed in range(150)]
    assert max(world.longest for world in worlds) < 1000
    assert sum(scheduler_stats(world.scheduler).preemptions for world in worlds) > 100, "nobody was preempted"
    assert sum(world.given_way for world in worlds) > 20, "no reservation gave way"
    assert sum(world.fallen_back for world in worlds) > 100, "nobody gave up waiting for room"


def with_slots(bench: Bench, slots: int) -> dict[int, object]:
    """Give a bench slots for adapters; what is copied into each, as steps see it."""
    held: dict[int, object] = {}
    bench.scheduler.queue.adapters = AdapterSlots(slots, held.__setitem__)
    return held


def submit(bench: Bench, key: object, tokens: int, adapter: str = "", max_tokens: int = 4) -> None:
    loaded = LoadedAdapter(adapter, adapter) if adapter else None
    bench.scheduler.submit(request(key, prompt(hash(key) % 97, tokens), max_tokens, root=ROOT), adapter=loaded)


def test_one_whose_adapter_has_no_slot_is_passed_by_so_many_and_then_by_none() -> None:
    bench = Bench(max_running=4)
    with_slots(bench, 1)
    submit(bench, "long", 8, "a", 900)
    bench.step()
    submit(bench, "waits", 8, "b")
    for number in range(MOST_PASSED + 20):
        submit(bench, number, 4, "a" if number % 2 else "")
    before, now = 0, [sequence.key for sequence in bench.scheduler.running]
    while "waits" not in now:
        bench.step()
        now = [sequence.key for sequence in bench.scheduler.running]
        waiting = len(bench.scheduler.queue)
        before = MOST_PASSED + 21 - waiting if "waits" not in now else before
        if before == MOST_PASSED and now == ["long"]:
            bench.scheduler.cancel("long")
        assert before <= MOST_PASSED
    assert before == MOST_PASSED


def test_never_do_more_adapters_run_than_there_are_slots_and_each_sequence_finds_its_own() -> None:
    """Random steps in a pool that is too small, so that sequences are preempted, too."""
    draw = random.Random(5)
    for slots in (1, 2, 3):
        bench = Bench(total_blocks=24, max_running=6)
        held = with_slots(bench, slots)
        used: set[str] = set()

        def token(scheduled: ScheduledSequence, held: dict[int, object] = held, used: set[str] = used) -> int:
            """What the executor would see."""
            sequence = scheduled.sequence
            if sequence.adapter is not None:
                assert held[sequence.adapter_slot] == sequence.adapter.id
                used.add(sequence.adapter.id)
            return 100

        bench.token = token
        left = 120
        while left or bench.scheduler.has_work():
            if left and draw.random() < 0.6:
                left -= 1
                submit(bench, left, draw.randrange(1, 30), draw.choice(["", *"abcde"]), draw.randrange(1, 25))
            if draw.random() < 0.05:
                bench.scheduler.cancel(draw.randrange(120))
            if bench.scheduler.has_work():
                used.clear()
                bench.step()
                assert len(used) <= slots
        assert bench.scheduler.report.preemptions
        submit(bench, "last", 4, "f")
        last = bench.scheduler.by_key["last"]
        assert bench.scheduler.queue.adapters.has_room(last), "a slot is in use though nothing runs"


# -- prefixes that other workers read


def computed(bench: Bench, asked: list[int]) -> list[bytes]:
    """A prompt is in the cache, and nobody holds its blocks."""
    bench.scheduler.submit(request("first", asked, 1, root=ROOT))
    bench.finish()
    return names(asked)


def test_blocks_that_are_pinned_for_a_reader_stay_until_they_are_released() -> None:
    bench = Bench(total_blocks=10)
    asked = computed(bench, prompt(1, 24))
    reservations = bench.scheduler.reservations
    found = reservations.find(asked)
    assert reservations.pin("reader", found) == len(found.blocks) == 6
    while bench.blocks.evict():
        pass
    assert reservations.find(asked) == found
    assert bench.scheduler.pinned.release("reader")
    while bench.blocks.evict():
        pass
    assert reservations.find(asked).blocks == []
    check_pool(bench.blocks, [])


def test_of_found_blocks_that_have_another_content_by_now_only_those_before_are_pinned() -> None:
    bench = Bench(total_blocks=6)
    reservations = bench.scheduler.reservations
    found = reservations.find(computed(bench, prompt(1, 20)))
    assert len(found.blocks) == 5
    table = bench.blocks.take([], 3)  # the unused one, and the last two, which are evicted first
    assert table is not None
    bench.blocks.release(table)
    assert reservations.pin("reader", found) == 3
    assert [bench.blocks.generations[block] for block in found.blocks[:3]] == found.generations[:3]


def test_a_prefix_is_pinned_from_its_first_block_on_or_not_at_all() -> None:
    """Else what is in front of pinned blocks would be evicted before them."""
    bench = Bench(total_blocks=10)
    reservations = bench.scheduler.reservations
    found = reservations.find(computed(bench, prompt(1, 24))[2:])
    assert len(found.blocks) == 4
    assert reservations.pin("reader", found) == 0


def test_no_block_is_pinned_that_running_sequences_need_to_grow() -> None:
    bench = Bench(total_blocks=6)
    asked = computed(bench, prompt(1, 16))
    bench.scheduler.submit(request("runs", prompt(2, 7), 16, root=ROOT))
    bench.step()
    reservations = bench.scheduler.reservations
    assert reservations.pin("reader", reservations.find(asked)) == 0
    assert not bench.scheduler.pinned.release("reader")


def test_a_block_that_is_evicted_while_it_is_looked_up_is_not_found() -> None:
    """The engine thread may do so between any two reads of the thread that looks."""
    bench = Bench(total_blocks=6)
    asked = computed(bench, prompt(1, 16))
    blocks = bench.blocks

    class Evicting(dict[bytes, int]):
        reads = 0

        def get(self, name: bytes, default: int | None = None) -> int | None:  # type: ignore[override]
            found = dict.get(self, name, default)
            self.reads += 1
            if self.reads == 5:  # of the third block, before its generation is read
                table = blocks.take([], blocks.available)
                assert table is not None
                blocks.release(table)
            return found

    blocks.cache = Evicting(blocks.cache)
    found = bench.scheduler.reservations.find(asked)
    assert len(found.blocks) == 2
    assert [blocks.generations[block] for block in found.blocks] != found.generations, "the reader sees that these went"
