"""The prompts of active requests against plain multisets."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.state.prefix_index import MAX_BLOCKS, ActivePrefixes
from tests.properties import examples

# A key names a whole prefix: the prompt's path so far, in base 3.
PROMPTS = st.lists(st.integers(0, 1), max_size=6).map(
    lambda path: [int("".join(map(str, (1, *path[: end + 1]))), 3) for end in range(len(path))]
)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "forget", "sweep"]), st.integers(0, 2), PROMPTS))


@examples(150)
@given(STEPS, PROMPTS)
def test_a_prompt_matches_the_longest_prefix_that_active_prompts_of_a_target_have(
    steps: list[tuple[str, int, list[int]]], asked: list[int]
) -> None:
    prefixes, active = ActivePrefixes(), {(f"w{n}", 0): list[list[int]]() for n in range(3)}
    for what, number, keys in steps:
        target = (f"w{number}", 0)
        prompts = active[target]
        before = Counter(key for prompt in prompts for key in prompt)
        if what == "add":
            assert prefixes.add(target, keys) == len(set(keys) - set(before))
            prompts.append(keys)
        elif what == "remove" and prompts:
            gone = prompts.pop(number % len(prompts))
            left = {key for prompt in prompts for key in prompt}
            assert prefixes.remove(target, gone) == len(set(gone) - left)
        elif what == "forget":
            prefixes.forget(target)
            prompts.clear()
        elif what == "sweep":
            prefixes.sweep(number)
    expected = {}
    for target, prompts in active.items():
        held = {key for prompt in prompts for key in prompt}
        leading = next((at for at, key in enumerate(asked) if key not in held), len(asked))
        if leading:
            expected[target] = leading
    assert prefixes.match(asked) == expected
    prefixes.sweep(MAX_BLOCKS)
    assert prefixes.match(asked) == expected
