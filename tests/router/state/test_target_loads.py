"""What targets have to do, what it costs, and which of them are slow."""

import time
from random import Random

from penstock.router.placement.cost import RequestSize, target_cost
from penstock.router.state.target_loads import LearnedCosts, TargetColumns, TargetLoads, Task
from penstock.schemas.cells import SLOT_TOKENS


def test_a_step_reads_shared_blocks_once_for_every_sequence_and_memory_holds_them_once() -> None:
    """Equal prompts fit where different ones do not, but slow a target's steps down as much."""
    keys = list(range(1, 11))
    loads = TargetLoads()
    loads.put(("w", 0), block_size=32, blocks=1000, slots=4, limit=8)
    for number in range(3):
        loads.add(Task(f"r{number}", ("w", 0), keys, 10, 320, context=10))
    values = loads.load(0)
    assert (values.active_blocks, values.context_blocks) == (10, 30)
    loads.end("r1", ("w", 0))
    assert (values.active_blocks, values.context_blocks) == (10, 20)


def test_a_target_without_a_free_slot_costs_the_wait_for_one() -> None:
    size = RequestSize(320, 10, 1)
    free, taken = (
        TargetColumns(block_size=32, total_blocks=1000, slots=slots, limit=20, sequences=8) for slots in (9, 8)
    )
    assert target_cost(size, 0, 0, taken).whole - target_cost(size, 0, 0, free).whole == SLOT_TOKENS


def test_a_target_that_decodes_at_half_speed_costs_more_for_what_it_decodes_only() -> None:
    """Learnt from how long requests took between their computed prompt and their end."""
    loads, second = TargetLoads(), 1_000_000_000
    for name in "abcd":
        loads.put((name, 0), block_size=32, blocks=1000, slots=4, limit=8)
    now = second
    for number in range(400):
        name = "abcd"[number % 4]
        keys = list(range(10 * number, 10 * number + 10))
        loads.add(Task(f"r{number}", (name, 0), keys, 10, 320, context=10, at_ns=now))
        loads.stored((name, 0), keys, now + second // 20)
        loads.end(f"r{number}", (name, 0), now + second // 20 + (2 if name == "a" else 1) * second)
        now += 5 * second
    slow, fast = loads.load(0), loads.load(1)
    assert 1.7 < slow.decode_slowness < 2.3
    assert (slow.slowness, fast.slowness, fast.decode_slowness) == (1.0, 1.0, 1.0)
    slow_cost, fast_cost = (target_cost(RequestSize(320, 10, 1), 0, 0, at) for at in (slow, fast))
    assert slow_cost.decode > 1.7 * fast_cost.decode
    assert slow_cost.whole - slow_cost.decode == fast_cost.whole - fast_cost.decode


def test_targets_that_join_together_begin_with_the_mean_of_what_others_served() -> None:
    """Each costs the same: thousands hold up no event loop (2,000 took 0.15 s when each looked at all others)."""
    loads = TargetLoads()
    loads.put(("first", 0), block_size=32, blocks=1000, slots=4, limit=8, model="m")
    loads.put(("other", 0), block_size=32, blocks=1000, slots=4, limit=8, model="another")
    loads.sent(("first", 0), 700)
    began = time.thread_time()
    for number in range(2000):
        loads.put((f"w{number}", 0), block_size=32, blocks=1000, slots=4, limit=8, model="m")
    assert time.thread_time() - began < 0.075
    assert {loads.served_tokens((f"w{number}", 0)) for number in range(2000)} == {700}
    loads.sent(("w0", 0), 2001)
    loads.remove(("first", 0))
    loads.put(("late", 0), block_size=32, blocks=1000, slots=4, limit=8, model="m")
    assert loads.served_tokens(("late", 0)) == 701


def test_nothing_is_learnt_of_a_request_that_was_not_served_to_its_end() -> None:
    loads = TargetLoads()
    loads.put(("w", 0), block_size=32, blocks=1000, slots=4, limit=8)
    loads.add(Task("r", ("w", 0), [1, 2], 2, 64, context=2, at_ns=1))
    loads.stored(("w", 0), [1, 2], 10)
    loads.end("r", ("w", 0))
    assert loads.learned_decode.samples == 0
    assert not loads._decoding


def seconds(tokens: int, rng: Random) -> float:
    """A pass of an engine: a constant, so much a token, and what else it had to do."""
    return (0.016 + tokens * 2e-5) * rng.uniform(0.7, 1.5)


def test_a_target_at_half_speed_is_found_whatever_the_lengths_of_its_prompts() -> None:
    learned, rng = LearnedCosts(), Random(1)
    slowness = dict.fromkeys(range(4), 1.0)
    for _ in range(3000):
        number = rng.randrange(4)
        tokens = int(rng.lognormvariate(7 - 2 * (number == 1), 1)) + 1  # one of them caches most of its prompts
        took = seconds(tokens, rng) * (2 if number == 3 else 1)
        slowness[number] = learned.computed("m", (f"w{number}", 0), tokens, took)
    fast = [slowness[0], slowness[1], slowness[2]]
    assert max(fast) < 1.3 * min(fast)
    assert slowness[3] > 1.6 * max(fast)
    assert learned.samples == 3000


def test_models_are_compared_with_themselves_and_a_new_worker_starts_over() -> None:
    learned = LearnedCosts()
    for _ in range(300):
        for rank in range(3):
            assert learned.computed("small", ("s", rank), 1000, 0.01) == 1.0
        assert learned.computed("large", ("l", 0), 1000, 1.0) == 1.0
        slow = learned.computed("small", ("slow", 0), 1000, 0.04)
    assert slow > 3
    learned.forget(("slow", 0))
    assert learned.computed("small", ("slow", 0), 1000, 0.02) < 2
