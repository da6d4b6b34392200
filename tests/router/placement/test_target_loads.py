"""What targets have to do, and what it costs."""

from router.placement.cost import SLOT_TOKENS, RequestSize, target_cost
from router.placement.target_loads import ACTIVE, CONTEXT, TargetLoads, Task


def test_a_step_reads_shared_blocks_once_for_every_sequence_and_memory_holds_them_once() -> None:
    """Equal prompts fit where different ones do not, but slow a target's steps down as much."""
    keys = list(range(1, 11))
    loads = TargetLoads()
    loads.put(("w", 0), block_size=32, blocks=1000, slots=4, limit=8)
    for number in range(3):
        loads.add(Task(f"r{number}", ("w", 0), keys, 10, 320, context=10))
    values = loads.load(0)
    assert (values[ACTIVE], values[CONTEXT]) == (10, 30)
    loads.end("r1", ("w", 0))
    assert (values[ACTIVE], values[CONTEXT]) == (10, 20)


def test_a_target_without_a_free_slot_costs_the_wait_for_one() -> None:
    size = RequestSize(320, 10, 1)
    free, taken = ([32, 1000, slots, 20, 8, 0, 0, 0, 0, 1.0] for slots in (9, 8))
    assert target_cost(size, 0, 0, taken).whole - target_cost(size, 0, 0, free).whole == SLOT_TOKENS
