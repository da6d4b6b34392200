"""The advisor's limits for the block size, against a real block manager: both ends cost more than the middle."""

import random
from array import array

import pytest

from penstock.infra.engine_args.rules import check
from penstock.infra.engine_args.rules.rule import Context
from penstock.infra.engine_args.tree import decode
from penstock.schemas.block_hashes import chain
from penstock.workers.engines.core.blocks import BlockManager

ROOT = b"\0" * 16
TOKEN_S = 1 / 20_000  # to compute one prompt token anew
DESCRIPTOR_S = 9e-6  # of one more NIXL descriptor: 128 KiB ones move 13 GB/s, 2 MiB ones 165 GB/s
SIZES = (4, 8, 16, 32, 64, 128, 256, 512)


def workload(seed: int) -> "list[array[int]]":
    """Conversations: each prompt is an earlier one, cut somewhere, and new tokens."""
    rng = random.Random(seed)
    prompts = [array("I", (rng.randrange(1 << 16) for _ in range(4096)))]
    for _ in range(60):
        base = rng.choice(prompts)
        prompts.append(base[: rng.randrange(1024, 4096)] + array("I", (rng.randrange(1 << 16) for _ in range(512))))
    return prompts


def cost(prompts: "list[array[int]]", size: int) -> tuple[float, int, int]:
    """(seconds, tokens reused, blocks handed off) with an unlimited cache of blocks of this size."""
    manager = BlockManager(sum(len(prompt) // size + 1 for prompt in prompts))
    reused = moved = 0
    for prompt in prompts:
        packed = chain(prompt.tobytes(), size, ROOT)
        digests = [packed[at : at + 16] for at in range(0, len(packed), 16)]
        hits = manager.match(digests, len(digests))
        table = manager.take(hits, len(digests) - len(hits))
        assert table is not None
        manager.name(table, digests, len(hits), len(digests))
        manager.release(table)
        reused += len(hits) * size
        moved += len(digests)
    fresh = sum(map(len, prompts)) - reused
    return fresh * TOKEN_S + moved * DESCRIPTOR_S, reused, moved


@pytest.mark.parametrize("seed", [1, 2])
def test_both_ends_of_the_block_sizes_are_worse_and_the_advisor_says_so(seed: int) -> None:
    prompts = workload(seed)
    found = {size: cost(prompts, size) for size in SIZES}
    reused, moved = [found[size][1] for size in SIZES], [found[size][2] for size in SIZES]
    assert reused == sorted(reused, reverse=True)
    assert moved == sorted(moved, reverse=True)
    best = min(SIZES, key=lambda size: found[size][0])
    warned = {
        size
        for size in SIZES
        if check(decode({"kv_cache_config": {"tokens_per_block": size}, "max_num_tokens": 8192}), Context())
    }
    assert warned == {4, 8, 256, 512}
    assert best not in warned
    assert all(found[size][0] > found[best][0] for size in warned)
    assert found[4][0] > found[16][0] < found[512][0]
