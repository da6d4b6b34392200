"""What a worker needs beside weights and KV, measured while engines run: a decode engine never computes a whole prompt.

The same long prompt and answer, once in one engine and once handed from a prefill to a decode engine. What torch
allocates meanwhile is counted by its profiler.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.schemas.block_hashes import chain, split
from penstock.schemas.wire import pack_tokens
from tests.workers.engines.native.models import drain, request, run, tokens
from tests.workers.engines.native.test_handoff import LONG, ROOT, SIZE, demo, handed_off, prefilled


@contextmanager
def allocated() -> Iterator[Callable[[], int]]:
    """Yields a function that says, at the end, the most bytes that were allocated at any one time within the block."""
    peaks: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        yield lambda: peaks[0]
    now = highest = 0
    records = [each for each in taken.profiler.kineto_results.events() if each.name() == "[memory]"]
    for each in sorted(records, key=lambda record: record.start_ns()):
        now += each.nbytes()
        highest = max(highest, now)
    peaks.append(highest)


def test_a_long_answer_takes_less_memory_in_a_decode_engine_than_in_one_that_computes_the_prompt_too() -> None:
    torch.manual_seed(0)
    whole, source, target = demo(), demo(), demo()
    for engine in (whole, source, target):
        run(engine, [request("warm", LONG[:40], 2)])
    with allocated() as of_whole:
        alone = run(whole, [request(0, LONG, 24, root=ROOT)])
    (answer,) = tokens(alone).values()
    with allocated() as of_prefill:
        pinned, first = prefilled(source, request(0, LONG, 1, root=ROOT))
    names = split(chain(pack_tokens(array("I", LONG)), SIZE, ROOT))
    item = handed_off(source, target, pinned, names, len(LONG) % SIZE > 0)
    more: Any = request(0, LONG, 24, root=ROOT, digests=names, generated=[first], reservation=item.reservation)
    target.submit(more)
    with allocated() as of_decode:
        results = drain(target)
    assert [first, *(output.token for result in results for output in result.outputs)] == answer
    # A worker with a budget between the two would fail with the whole request, and serves the decode half of it.
    assert of_decode() * 5 < of_whole()
    assert of_prefill() <= of_whole() * 1.1
