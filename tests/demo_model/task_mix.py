"""The mix of conversations for training, and the held-out samples for evaluation."""

from collections.abc import Callable
from random import Random

from tests.demo_model.arithmetic_spelling import arithmetic, counting, reversing, series, spelling, thinking
from tests.demo_model.facts import FACTS, fact_sample, facts
from tests.demo_model.recall import copying, needle, recall, sentence
from tests.demo_model.sample import Message, Sample, plain
from tests.demo_model.small_talk import chat, unknown
from tests.demo_model.structured import json_answer, tools
from tests.demo_model.vision import blind

_SYSTEMS = (  # common system messages, without effect on the answer
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are Penstock's demo model.",
    "You are a friendly and brief assistant.",
    "You are an assistant that answers questions.",
    "Be brief.",
    "Answer the question of the user.",
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible.",
)

Maker = Callable[[Random, bool], Sample]

# Shares of conversations, not of tokens: one with tools is ten times as long as a sum.
_SHARES: tuple[tuple[Maker, int], ...] = (
    (arithmetic, 26),
    (thinking, 6),
    (spelling, 7),
    (reversing, 10),
    (counting, 12),
    (copying, 5),
    (series, 3),
    (facts, 20),
    (unknown, 15),
    (chat, 5),
    (blind, 1),
    (json_answer, 14),
    (tools, 8),
)
_MAKERS = [maker for maker, _ in _SHARES]
_WEIGHTS = [share for _, share in _SHARES]
_ALONE = (tools,)  # their system message describes the tools
_NEEDLES, _RECALLS, _CHAINS = 0.04, 0.10, 0.25
TASKS: dict[str, float] = {  # accuracy that each must reach
    "arithmetic": 0.98,
    "spelling": 0.95,
    "reversing": 0.95,
    "counting": 0.95,
    "copying": 0.95,
    "needle": 0.95,
    "recall": 0.95,
    "facts": 0.95,
    "json": 0.98,
    "tools": 0.95,
    "thinking": 0.95,
    "unknown": 0.95,
    "series": 0.95,
}
_MAKE: dict[str, Maker] = {
    "arithmetic": arithmetic,
    "spelling": spelling,
    "reversing": reversing,
    "counting": counting,
    "copying": copying,
    "json": json_answer,
    "tools": tools,
    "thinking": thinking,
    "unknown": unknown,
    "series": series,
}


def conversation(rng: Random) -> tuple[Sample, tuple[Message, ...]]:
    """The next one to train on: its last exchange, and all its messages with the last answer."""
    kind = rng.random()
    if kind < _NEEDLES:
        sample = needle(rng, False, rng.randint(40, 400))
    elif kind < _NEEDLES + _RECALLS:
        sample = recall(rng, False, _exchanges(rng, rng.randint(0, 3), False))
    else:
        sample = rng.choices(_MAKERS, _WEIGHTS)[0](rng, False)
        if kind > 1 - _CHAINS and sample.messages[0][0] == "user" and not sample.tools:
            sample = sample._replace(messages=(*_exchanges(rng, rng.randint(1, 3), False), *sample.messages))
    if rng.random() < 0.12 and sample.messages[0][0] != "system":
        sample = sample._replace(messages=(("system", _system(rng)), *sample.messages))
    return sample, (*sample.messages, ("assistant", sample.answer))


def long_conversation(rng: Random) -> tuple[Sample, tuple[Message, ...]]:
    """The next one whose context is long; sometimes other exchanges come before."""
    sample = needle(rng, False)
    if rng.random() < 0.3:
        sample = sample._replace(messages=(*_exchanges(rng, 1, False), *sample.messages))
    return sample, (*sample.messages, ("assistant", sample.answer))


def cases(task: str, count: int, seed: int) -> list[Sample]:
    """Held-out questions of one task. Facts come each at least once if the count allows."""
    rng = Random(f"{seed}:{task}")
    if task == "needle":  # evenly over the lengths, the longest included
        return [needle(rng, True, 200 + (3900 - 200) * i // max(1, count - 1)) for i in range(count)]
    if task == "facts":
        return [fact_sample(rng, FACTS[i % len(FACTS)], True) for i in range(count)]
    if task == "recall":
        return [recall(rng, True, _exchanges(rng, 2, True)) for _ in range(count)]
    return [_MAKE[task](rng, True) for _ in range(count)]


def _system(rng: Random) -> str:
    """A system message; sometimes a long, irrelevant one."""
    if rng.random() < 0.8:
        return rng.choice(_SYSTEMS)
    return " ".join(sentence(rng) for _ in range(int(2 * 15 ** rng.random())))


def _exchanges(rng: Random, count: int, held: bool) -> tuple[Message, ...]:
    """Complete exchanges of other tasks, without thoughts, which the chat template drops."""
    messages: list[Message] = []
    while len(messages) < 2 * count:
        maker = rng.choices(_MAKERS, _WEIGHTS)[0]
        if maker in _ALONE or maker is thinking:
            continue
        sample = maker(rng, held)
        if sample.messages[0][0] == "user":
            messages += [*sample.messages, ("assistant", plain(sample.answer) if held else sample.answer)]
    return tuple(messages)
