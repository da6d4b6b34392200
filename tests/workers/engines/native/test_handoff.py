"""Blocks and embeddings of one engine, copied byte by byte into another's pools, give the answers of one engine."""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.schemas.block_hashes import chain, root, split
from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.schemas.transfer import Endpoint, Memory
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import Output, PinnedPrompt, RequestError, SequenceRequest
from penstock.workers.engines.native.build import build, build_encoder
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pool import KvPool, KvShape
from penstock.workers.kv_transfer.agent import check_pool
from penstock.workers.kv_transfer.transport_protocol import TransferError
from penstock.workers.kv_transfer.transport_thread import open_transport
from tests.properties import some
from tests.workers.engines.native.models import drain, request, run, tokens
from tests.workers.engines.native.models import expected as greedy
from tests.workers.engines.native.models import prompt as tuples
from tests.workers.engines.native.pictures import DIRECTORY, asking, encoded, expected, media, prompt
from tests.workers.kv_transfer.support import needs_nixl

DEMO = DIRECTORY.parent / "demo"
ROOT = root("revision")
LONG = tuple((7 + i * i * 13 + i * 5) % 1270 for i in range(530))
SIZE = 32


def demo(**options: Any) -> ScheduledEngine:
    return build(str(DEMO), NativeOptions(**{"kv_blocks": 64, "block_size": SIZE, "device": "cpu", **options}))


def seeing(**options: Any) -> ScheduledEngine:
    return build(
        str(DIRECTORY),
        NativeOptions(**{"kv_blocks": 64, "block_size": SIZE, "device": "cpu", "embed_slots": 8, **options}),
    )


@cache
def whole_answer(length: int, temperature: float) -> list[int]:
    """What one engine answers to the first words of ``LONG``."""
    sampling = Sampling(temperature=temperature, seed=7)
    (found,) = tokens(run(demo(), [request(0, LONG[:length], 16, sampling)])).values()
    return found


@pytest.fixture(scope="module")
def source() -> ScheduledEngine:
    """A prefill engine, whose block numbers are not those of a new one."""
    engine = demo()
    run(engine, [request("before", LONG[5:150], 3)])
    return engine


def copy(source: Memory, target: Memory, blocks: Sequence[int], into: Sequence[int]) -> None:
    """What a transfer does."""
    assert source.layout == target.layout
    assert source.block_bytes == target.block_bytes
    for mine, theirs in zip(blocks, into, strict=True):
        assert 0 <= mine < source.blocks
        assert 0 <= theirs < target.blocks
        size = source.block_bytes
        ctypes.memmove(target.base + theirs * size, source.base + mine * size, size)


def generations(memory: Memory) -> list[int]:
    return list((ctypes.c_uint32 * memory.blocks).from_address(memory.generations))


def prefilled(engine: ScheduledEngine, item: SequenceRequest) -> tuple[PinnedPrompt, int]:
    """Compute the prompt and one token; the prompt's blocks stay held."""
    item.pin = True
    engine.submit(item)
    results = drain(engine)
    (pinned,) = (pinned for result in results for pinned in result.pinned)
    (output,) = (output for result in results for output in result.outputs)
    assert output.finish == "length"
    return pinned, output.token


def handed_off(
    source: ScheduledEngine, target: ScheduledEngine, pinned: PinnedPrompt, digests: list[bytes], tail: bool
) -> SequenceRequest:
    """The held blocks in the target's pool, adopted; a request to be filled in."""
    reservation = target.kv_transfer.reserve(digests, int(tail), 1)
    assert reservation is not None
    mine, theirs = source.memory()["kv"], target.memory()["kv"]
    into = reservation.blocks + reservation.tails
    copy(mine, theirs, pinned.blocks[reservation.have :], into[reservation.have :])
    assert [generations(mine)[block] for block in pinned.blocks] == pinned.generations
    target.kv_transfer.adopt(reservation)
    assert source.release_pinned(pinned.key)
    item = request(0, (1,), 1)
    item.reservation = reservation
    return item


@pytest.mark.parametrize("length", some([530, 512, 20], 530, 20))
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seed"])
@pytest.mark.parametrize(
    "speculative", some(["", str(DEMO.parent / "demo-draft"), "ngram"], "", "ngram"), ids=["plain", "draft", "ngram"]
)
def test_a_prompt_prefilled_elsewhere_continues_as_if_here(
    source: ScheduledEngine, length: int, temperature: float, speculative: str
) -> None:
    words, whole, sampling = LONG[:length], whole_answer(length, temperature), Sampling(temperature, seed=7)
    target = demo(kv_blocks=48, speculative_model=speculative)
    pinned, first = prefilled(source, request(0, words, 1, sampling, root=ROOT))
    assert first == whole[0]
    digests = split(chain(pack_tokens(array("I", words)), SIZE, ROOT))
    item = handed_off(source, target, pinned, digests, length % SIZE > 0)
    more = request(0, words, 16, sampling, root=ROOT, digests=digests, generated=[first], reservation=item.reservation)
    target.submit(more)
    results = drain(target)
    assert [output.token for result in results for output in result.outputs] == whole[1:]
    assert results[0].started[0].cached_tokens == length
    assert results[0].computed_tokens <= (5 if speculative else 1)  # nothing of the prompt
    assert (target.stats().pinned_blocks, source.stats().pinned_blocks) == (0, 0)


def test_both_ends_of_a_handoff_bring_back_what_they_have_in_host_memory() -> None:
    """The prompt has left both pools; of it, the target has the beginning and reads the rest."""
    words, beginning = LONG[:512], LONG[:256]
    source, target = (demo(kv_blocks=24, kv_offloading_size=0.1) for _ in range(2))
    run(source, [request("first", words, 1, root=ROOT)])
    run(target, [request("first", beginning, 1, root=ROOT)])
    for engine in (source, target):
        run(engine, [request(at, [(3 + at) * token % 1270 for token in LONG[:530]], 20) for at in range(2)])
    pinned, first = prefilled(source, request(0, words, 1, root=ROOT))
    assert source.stats().loaded_blocks >= 15
    digests = split(chain(pack_tokens(array("I", words)), SIZE, ROOT))
    item = handed_off(source, target, pinned, digests, tail=False)
    assert (item.reservation.have, item.reservation.loaded) == (8, 8)
    more = request(0, words, 16, root=ROOT, digests=digests, generated=[first], reservation=item.reservation)
    target.submit(more)
    results = drain(target)
    assert [first, *(output.token for result in results for output in result.outputs)] == whole_answer(512, 0.0)


@needs_nixl
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latents_move_over_nixl_and_nothing_of_the_prompt_is_computed(
    name: str, model_dir: Callable[[str], Path]
) -> None:
    directory, words = model_dir(name), tuples(29)
    options = NativeOptions(device="cpu", block_size=8, kv_blocks=24)
    source, target = build(str(directory), options), build(str(directory), options)
    run(source, [request("before", words[:11], 3)])
    owner, reader = (
        open_transport("nixl", f"latents-{name}-{at}", engine.memory()) for at, engine in enumerate((source, target))
    )
    try:
        pinned, first = prefilled(source, request(0, words, 1, root=ROOT))
        digests = split(chain(pack_tokens(array("I", words)), 8, ROOT))
        reservation = target.kv_transfer.reserve(digests, 1, 1)
        assert reservation is not None
        into = reservation.blocks + reservation.tails
        moved = reader.read(owner.endpoint, "kv", pinned.blocks, into, generations=pinned.generations).result(20)
        assert moved.bytes == len(into) * 3 * 8 * (32 + 8) * 4  # layers, tokens, values of the latent, bytes of each
        target.kv_transfer.adopt(reservation)
        target.submit(request(0, words, 16, root=ROOT, digests=digests, generated=[first], reservation=reservation))
        results = drain(target)
    finally:
        reader.close()
        owner.close()
    answer = [first, *(output.token for result in results for output in result.outputs)]
    assert answer == greedy(directory, words, 16)
    assert (results[0].started[0].cached_tokens, results[0].computed_tokens) == (len(words), 1)


def test_latents_and_the_heads_made_of_them_are_never_exchanged(model_dir: Callable[[str], Path]) -> None:
    engine = build(str(model_dir("deepseek_v3")), NativeOptions(device="cpu", block_size=8, kv_blocks=4))
    latents = engine.memory()["kv"]
    assert latents.layout == "float32(3,1,8,1,40)"
    for size in (24, 5):  # keys of its four heads; heads of as many bytes as the latents
        heads = KvPool(KvShape(3, 4, size), 4, 8, torch.float32, torch.device("cpu")).memory()
        ends = [Endpoint("a", "nixl", pools={"kv": latents}), Endpoint("b", "nixl", pools={"kv": heads})]
        with pytest.raises(TransferError, match="blocks of 3840 bytes there" if size == 24 else "holds 'float32"):
            check_pool(ends[1], ends[0], "kv")


def test_memory_is_where_the_blocks_are() -> None:
    engine = demo(kv_blocks=5)
    memory = engine.memory()["kv"]
    executor: Any = engine.executor
    assert (memory.blocks, memory.kind, memory.device) == (5, "cpu", 0)
    assert memory.layout == f"float32(8,2,{SIZE},2,64)"
    assert memory.block_bytes == 8 * 2 * SIZE * 2 * 64 * 4
    run(engine, [request(0, LONG[:40], 4)])
    for block in range(5):
        bytes_there = ctypes.string_at(memory.base + block * memory.block_bytes, memory.block_bytes)
        assert bytes_there == executor.pool.data[block].numpy().tobytes()
    assert sum(generations(memory)) == 2


@pytest.fixture(scope="module")
def encoder() -> EncodeEngine:
    return build_encoder(str(DIRECTORY), NativeOptions(device="cpu", embed_slots=5))


def test_embeddings_of_an_encode_worker_are_those_of_the_whole_model(encoder: EncodeEngine) -> None:
    numbers = (1, 2)
    engine, done = seeing(), encoded(encoder, numbers)
    there = engine.vision.reserve(media(numbers))
    assert there is not None
    source, target = encoder.memory()["embeds"], engine.memory()["embeds"]
    for mine, theirs in zip(done.slots, there.slots, strict=True):
        copy(source, target, mine, theirs)
    before = encoder.vision.generations(done)
    assert before == [generations(source)[slot] for slots in done.slots for slot in slots]
    engine.vision.adopt(there)
    encoder.vision.release(done)
    requests = [
        asking(number, prompt(1), [slots], [number]) for number, slots in zip(numbers, there.slots, strict=True)
    ]
    assert tokens(run(engine, requests)) == {number: expected(prompt(1), (number,)) for number in numbers}
    again = engine.vision.reserve(media(numbers))
    assert again is not None
    assert again.have == [True, True]


def test_an_encode_worker_holds_no_language_model_and_generates_nothing(encoder: EncodeEngine) -> None:
    inner: Any = encoder.vision.encoder
    names = {name.split(".")[1] for name, _ in inner._model.named_parameters()}
    assert names == {"vision_tower", "multi_modal_projector"}
    assert set(encoder.memory()) == {"embeds"}
    assert (encoder.has_work(), encoder.blocked, encoder.dump(), encoder.cancel(0)) == (False, False, [], False)
    assert not encoder.step().outputs
    info = encoder.info
    assert (info.name, info.block_size, info.total_blocks, info.kv_events) == ("native", 32, 5, False)
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (8192, 1280, (1278, 1276))
    with pytest.raises(RequestError) as caught:
        encoder.submit(request(0, (1,), 1))
    assert caught.value.code == Code.unsupported
    used = encoder.stats().used_blocks
    reservation = encoded(encoder, (3,))
    assert encoder.stats().used_blocks == used + 1
    encoder.vision.release(reservation)
    assert encoder.stats().used_blocks == used


def test_a_text_model_has_nothing_to_encode() -> None:
    with pytest.raises(UnsupportedModel, match="images of llama models are not supported, only those of llava"):
        build_encoder(str(DEMO), NativeOptions(device="cpu"))


def test_pictures_prefilled_elsewhere_continue_without_their_embeddings() -> None:
    source, target = seeing(), seeing()
    words, whole = prompt(1), expected(prompt(1), (1,))
    reservation = encoded(source, (1,))
    item = asking(0, words, reservation.slots, [1], count=1, root=ROOT)
    pinned, first = prefilled(source, item)
    digests = split(chain(pack_tokens(array("I", words)), SIZE, ROOT, item.extra))
    shell = handed_off(source, target, pinned, digests, True)
    more = asking(0, words, [()], [1], root=ROOT, generated=[first], reservation=shell.reservation)
    target.submit(more)
    assert [output.token for result in drain(target) for output in result.outputs] == whole[1:]


def test_pictures_that_are_lost_with_their_blocks_end_the_sequence_alone() -> None:
    """Preempted behind adopted blocks, which are evicted: it cannot be computed again."""
    source, target = seeing(), seeing(kv_blocks=7, prefix_cache=True)
    words = prompt(1)
    reservation = encoded(source, (1,))
    item = asking("seen", words, reservation.slots, [1], count=1, root=ROOT)
    pinned, first = prefilled(source, item)
    digests = split(chain(pack_tokens(array("I", words)), SIZE, ROOT, item.extra))
    target.submit(request("other", LONG[:90], 100))
    outputs: list[Output] = list(target.step().outputs)
    shell = handed_off(source, target, pinned, digests, True)
    target.submit(
        asking("seen", words, [()], [1], count=60, root=ROOT, generated=[first], reservation=shell.reservation)
    )
    failures = []
    while target.has_work():
        result = target.step()
        outputs += result.outputs
        failures += result.failures
    (failure,) = failures
    assert (failure.key, failure.code) == ("seen", Code.transfer_failed)
    assert target.stats().preemptions > 0
    (whole,) = tokens(run(seeing(), [request("other", LONG[:90], 100)])).values()
    assert [output.token for output in outputs if output.key == "other"] == whole


def test_whole_models_and_encode_workers_have_the_same_layout_and_other_dtypes_another(encoder: EncodeEngine) -> None:
    assert encoder.memory()["embeds"].layout == seeing().memory()["embeds"].layout == "float32(64,256)"
    other = build_encoder(str(DIRECTORY), NativeOptions(device="cpu", dtype="bfloat16", embed_slots=1))
    assert other.memory()["embeds"].layout == "bfloat16(64,256)"
    reservation = encoded(other, (1,))
    inner: Any = other.vision.encoder
    assert torch.isfinite(inner.pool.data[reservation.slots[0]]).all()


def test_closing_gives_the_memory_back() -> None:
    engine = seeing()
    engine.vision.release(encoded(engine, (1,)))
    engine.close()
    with pytest.raises(AssertionError, match="closed"):
        engine.memory()
