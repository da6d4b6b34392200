"""A slow target is found, and equal ones do not look different."""

from random import Random

from penstock.router.state.load import LearnedCosts


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


def test_models_are_compared_with_themselves_and_a_new_worker_begins_anew() -> None:
    learned = LearnedCosts()
    for _ in range(300):
        for rank in range(3):
            assert learned.computed("small", ("s", rank), 1000, 0.01) == 1.0
        assert learned.computed("large", ("l", 0), 1000, 1.0) == 1.0
        slow = learned.computed("small", ("slow", 0), 1000, 0.04)
    assert slow > 3
    learned.forget(("slow", 0))
    assert learned.computed("small", ("slow", 0), 1000, 0.02) < 2
