"""Which part of a prompt many others begin with."""

from collections.abc import Iterator
from itertools import count
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.placement.decision_inputs import ADDED, LENGTHS, PROMPTS, USES, SharedPrefixes

SYSTEM = list(range(1000, 1100))


def fresh() -> Iterator[int]:
    return count(1_000_000)


def look(prefixes: SharedPrefixes, system: list[int], ids: Iterator[int], targets: int = 2, own: int = 40) -> int:
    return prefixes.blocks([*system, *(next(ids) for _ in range(own))], targets)


def test_a_system_prompt_is_shared_once_each_target_would_use_it_several_times() -> None:
    prefixes, ids = SharedPrefixes(), fresh()
    found = [look(prefixes, SYSTEM, ids) for _ in range(200)]
    longest = max(length for length in LENGTHS if length <= len(SYSTEM))
    assert found[:4] == [0] * 4
    assert found[-1] == longest
    first = found.index(longest)
    assert USES * 2 <= first <= len(LENGTHS) / ADDED + USES * 2


def test_the_turns_of_a_conversation_share_nothing() -> None:
    prefixes, ids = SharedPrefixes(), fresh()
    prompt = list[int]()
    for _ in range(200):
        prompt += [next(ids) for _ in range(5)]
        assert prefixes.blocks(prompt, 1) == 0


def test_more_targets_need_more_prompts() -> None:
    def needed(targets: int) -> int:
        prefixes, ids = SharedPrefixes(), fresh()
        return next(n for n in range(10_000) if look(prefixes, SYSTEM, ids, targets))

    assert needed(1) < needed(8) < needed(64)


def test_a_prefix_that_is_no_longer_used_is_forgotten() -> None:
    prefixes, ids = SharedPrefixes(), fresh()
    for _ in range(150):
        look(prefixes, SYSTEM, ids)
    for _ in range(3 * PROMPTS * 2):
        assert look(prefixes, [], ids) == 0
    assert look(prefixes, SYSTEM, ids) == 0


def test_a_prefix_that_stays_in_use_stays_shared() -> None:
    prefixes, ids, rng = SharedPrefixes(), fresh(), Random(1)
    found = [look(prefixes, SYSTEM, ids) for _ in range(3000) if rng.random() < 0.8 or not look(prefixes, [], ids)]
    assert min(found[500:]) > 90


def test_what_is_remembered_is_bounded() -> None:
    prefixes, ids = SharedPrefixes(), fresh()
    for _ in range(20 * PROMPTS):
        look(prefixes, [], ids, targets=1)
    assert len(prefixes._branches) + len(prefixes._older) <= 2 * ADDED * PROMPTS


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 120)), max_size=80), st.integers(1, 4))
def test_at_most_the_prompt_is_shared_and_only_what_several_prompts_have(
    prompts: list[tuple[int, int]], targets: int
) -> None:
    prefixes = SharedPrefixes()
    before: list[list[int]] = []
    for family, blocks in prompts:
        keys = [family * 1000 + n for n in range(blocks)]
        shared = prefixes.blocks(keys, targets)
        assert 0 <= shared <= blocks
        if shared:
            assert sum(each[:shared] == keys[:shared] for each in before) >= USES * targets
        before.append(keys)
