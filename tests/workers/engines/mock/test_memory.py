"""Handoffs between mocks move real bytes, and wrong ones are noticed."""

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from msgspec.structs import replace
from safetensors.torch import save

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.block_hashes import chain, media_extra, root, split
from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.transfer import Memory
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import (
    BlockReservation,
    EngineError,
    MediaReservation,
    MediaSpan,
    PinnedPrompt,
    RequestError,
    SequenceRequest,
    StepResult,
)
from penstock.workers.engines.mock import MockOptions, build, build_encoder, encoder_from_settings, from_settings
from penstock.workers.engines.mock.executor import GREEDY, MockVocabulary, expected_tokens
from penstock.workers.engines.mock.memory import BLOCK_BYTES, SLOT_BYTES, embedding

SIZE, IMAGE_TOKENS = 8, 5
ROOT = root("revision")
PROMPT = list(range(40, 93))  # 53 tokens: six full blocks, and five in the last
RAW = (b"first picture", b"second picture")
VISION = modeldir.MODELS / "demo-vision"
VOCABULARY = MockVocabulary(300)


def engine(**options: Any) -> ScheduledEngine:
    sizes = {"block_size": SIZE, "total_blocks": 64, "memory_block_bytes": BLOCK_BYTES, "image_tokens": IMAGE_TOKENS}
    return build(MockOptions(vocab_size=300, speedup=0, embed_slots=6, **sizes | options))


def spans(slots: Sequence[Sequence[int]], raws: Sequence[bytes] = RAW) -> list[MediaSpan]:
    """The first picture lies across two blocks; the second ends in the prompt's last one."""
    starts = (6, 46)
    return [
        MediaSpan(start, IMAGE_TOKENS, blake3(raw).digest(), of)
        for start, raw, of in zip(starts, raws, slots, strict=True)
    ]


def request(
    count: int = 20,
    *,
    key: object = "k",
    prompt: Sequence[int] = PROMPT,
    media: Sequence[MediaSpan] = (),
    sampling: Sampling = GREEDY,
    **more: Any,
) -> SequenceRequest:
    extra = media_extra((span[:3] for span in media), SIZE)
    stop = Stop(count, ignore_eos=True)
    return SequenceRequest(key, prompt, sampling, stop, root=ROOT, media=media, extra=extra, **more)


def steps(mock: ScheduledEngine, *requests: SequenceRequest) -> list[StepResult]:
    for item in requests:
        mock.submit(item)
    results = []
    while mock.has_work():
        result = mock.step()
        assert not result.failures
        results.append(
            replace(result, pinned=list(result.pinned), started=list(result.started))
        )  # the engine's own lists
        assert len(results) < 1000, "it hangs"
    return results


def tokens(results: list[StepResult], key: object = "k") -> list[int]:
    return [output.token for result in results for output in result.outputs if output.key == key]


def encoded(mock: ScheduledEngine | EncodeEngine, raws: Sequence[bytes] = RAW) -> MediaReservation:
    reservation = mock.vision.reserve([(blake3(raw).digest(), IMAGE_TOKENS) for raw in raws])
    assert reservation is not None
    mock.vision.encode(reservation, {at: mock.vision.prepare(raw, "image/png") for at, raw in enumerate(raws)})
    return reservation


def copy(source: Memory, target: Memory, blocks: Sequence[int], into: Sequence[int]) -> None:
    assert source.layout == target.layout
    for mine, theirs in zip(blocks, into, strict=True):
        size = source.block_bytes
        ctypes.memmove(target.base + theirs * size, source.base + mine * size, size)


def handed_off(
    source: ScheduledEngine, target: ScheduledEngine, item: SequenceRequest, tails: int = 1
) -> tuple[BlockReservation, int]:
    """Prefill in one, copy what it holds into the other: (adopted, first token)."""
    item.pin = True
    results = steps(source, item)
    (pinned,) = (pinned for result in results for pinned in result.pinned)
    (first,) = tokens(results)
    return adopted(source, target, pinned, item, tails), first


def adopted(
    source: ScheduledEngine, target: ScheduledEngine, pinned: PinnedPrompt, item: SequenceRequest, tails: int = 1
) -> BlockReservation:
    digests = split(chain(pack_tokens(array("I", item.prompt)), SIZE, ROOT, item.extra))
    reservation = target.kv_transfer.reserve(digests, tails, max(1, tails))
    assert reservation is not None
    mine, theirs = source.memory()["kv"], target.memory()["kv"]
    copy(mine, theirs, pinned.blocks[reservation.have : len(digests)], reservation.blocks[reservation.have :])
    for tail in reservation.tails:
        copy(mine, theirs, pinned.blocks[len(digests) :], [tail])
    target.kv_transfer.adopt(reservation)
    source.release_pinned(pinned.key)
    return reservation


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=3)])
@pytest.mark.parametrize("length", [53, 48, 5])
def test_a_prompt_prefilled_elsewhere_continues_as_if_here(length: int, sampling: Sampling) -> None:
    source, target, prompt = engine(), engine(total_blocks=40), PROMPT[:length]
    steps(source, request(3, prompt=[1, 2, 3]))  # block numbers differ between the two
    reservation, first = handed_off(
        source, target, request(1, prompt=prompt, sampling=sampling), int(length % SIZE > 0)
    )
    more = request(20, prompt=prompt, sampling=sampling, generated=[first], reservation=reservation)
    results = steps(target, more)
    assert [first, *tokens(results)] == expected_tokens(prompt, 20, VOCABULARY, sampling=sampling)
    assert results[0].started[0].cached_tokens == length
    assert target.stats().pinned_blocks == 0


def test_each_choice_continues_in_its_own_copy_of_the_last_block() -> None:
    source, target = engine(), engine()
    drawn = Sampling(temperature=1, seed=5)
    reservation, _ = handed_off(source, target, request(1, sampling=drawn), tails=3)
    whole = [expected_tokens(PROMPT, 20, VOCABULARY, sampling=drawn, choice=choice) for choice in range(3)]
    results = steps(
        target,
        *(
            request(20, key=n, sampling=drawn, choice=n, generated=whole[n][:1], reservation=reservation)
            for n in range(3)
        ),
    )
    assert [tokens(results, n) for n in range(3)] == [each[1:] for each in whole]
    # and what they completed is right, too: somebody else finds it
    later = steps(target, request(5, prompt=[*PROMPT, *whole[1]]))
    assert later[0].started[0].cached_tokens == 72


@pytest.mark.parametrize("place", [0, 3, 5, 6])
def test_a_block_with_other_bytes_is_named(place: int) -> None:
    source, target = engine(), engine()
    reservation, first = handed_off(source, target, request(1))
    blocks = reservation.blocks + reservation.tails
    address = target.memory()["kv"].base + blocks[place] * BLOCK_BYTES
    ctypes.memset(address + 4, 0, BLOCK_BYTES - 4)
    target.submit(request(20, generated=[first], reservation=reservation))
    begin, end = place * SIZE, min(place * SIZE + SIZE, len(PROMPT))
    with pytest.raises(EngineError, match=rf"block {blocks[place]} does not hold the tokens {begin} to {end}"):
        target.step()


def test_blocks_in_the_wrong_order_are_noticed() -> None:
    source, target = engine(), engine()
    reservation, first = handed_off(source, target, request(1))
    pool = target.memory()["kv"]
    copy(pool, pool, [reservation.blocks[1]], [reservation.blocks[2]])
    target.submit(request(20, generated=[first], reservation=reservation))
    with pytest.raises(EngineError, match=f"block {reservation.blocks[2]} does not hold"):
        target.step()


def test_blocks_that_were_never_written_are_noticed() -> None:
    target = engine()
    digests = split(chain(pack_tokens(array("I", PROMPT)), SIZE, ROOT))
    reservation = target.kv_transfer.reserve(digests, 1, 1)
    assert reservation is not None
    target.kv_transfer.adopt(reservation)
    target.submit(request(20, generated=[5], reservation=reservation))
    with pytest.raises(EngineError, match="does not hold the tokens 0 to 8"):
        target.step()


@pytest.mark.parametrize("options", [{}, {"total_blocks": 14}, {"max_batched_tokens": 7}])
def test_its_own_cache_and_preemptions_pass_the_same_check(options: dict[str, int]) -> None:
    mock = engine(**options)
    for _ in range(2):
        results = steps(mock, *(request(30, key=n, prompt=PROMPT[: 30 + n]) for n in range(5)))
        for n in range(5):
            assert tokens(results, n) == expected_tokens(PROMPT[: 30 + n], 30, VOCABULARY)
    assert mock.stats().hit_tokens > 0
    assert (mock.stats().preemptions > 0) == ("total_blocks" in options)


@pytest.mark.parametrize("memory_block_bytes", [0, BLOCK_BYTES])
def test_the_answer_depends_on_the_pictures(memory_block_bytes: int) -> None:
    mock = engine(memory_block_bytes=memory_block_bytes)
    seen = encoded(mock)
    said = tokens(steps(mock, request(media=spans(seen.slots))))
    assert said == expected_tokens(PROMPT, 20, VOCABULARY, media=[embedding(raw) for raw in RAW])
    assert said != expected_tokens(PROMPT, 20, VOCABULARY)
    assert said != expected_tokens(PROMPT, 20, VOCABULARY, media=[embedding(raw) for raw in reversed(RAW)])
    swapped = encoded(mock, RAW[::-1])
    other = tokens(steps(mock, request(media=spans(swapped.slots, RAW[::-1]))))
    assert other == expected_tokens(PROMPT, 20, VOCABULARY, media=[embedding(raw) for raw in reversed(RAW)])
    again = tokens(steps(mock, request(media=spans(seen.slots))))  # now from the cache
    assert again == said


def test_a_wrong_picture_in_the_right_slot_changes_the_answer() -> None:
    mock = engine()
    seen = encoded(mock)
    ctypes.memset(mock.memory()["embeds"].base + seen.slots[1][0] * SLOT_BYTES, 0, SLOT_BYTES)
    said = tokens(steps(mock, request(media=spans(seen.slots))))
    assert said != expected_tokens(PROMPT, 20, VOCABULARY, media=[embedding(raw) for raw in RAW])


@pytest.mark.parametrize("chunk", [8192, 7])
def test_encoded_prefilled_and_decoded_in_three_places(chunk: int) -> None:
    encoder = build_encoder(image_tokens=IMAGE_TOKENS, embed_slots=9, vocab_size=300)
    source, target = engine(max_batched_tokens=chunk), engine()
    encoded(encoder, [b"in the way"])
    done = encoded(encoder)
    there = source.vision.reserve([(blake3(raw).digest(), IMAGE_TOKENS) for raw in RAW])
    assert there is not None
    for mine, theirs in zip(done.slots, there.slots, strict=True):
        copy(encoder.memory()["embeds"], source.memory()["embeds"], mine, theirs)
    source.vision.adopt(there)
    reservation, first = handed_off(source, target, request(1, media=spans(there.slots)))
    # The decode worker never sees the pictures; they are in the blocks.
    more = request(20, media=spans([(), ()]), generated=[first], reservation=reservation)
    whole = [first, *tokens(steps(target, more))]
    assert whole == expected_tokens(PROMPT, 20, VOCABULARY, media=[embedding(raw) for raw in RAW])


def test_without_pictures_or_their_blocks_a_sequence_fails_alone() -> None:
    source, target = engine(), engine()
    seen = encoded(source)
    reservation, first = handed_off(source, target, request(1, media=spans(seen.slots)))
    reservation.digests = reservation.digests[:2]
    target.kv_transfer.release(reservation)
    with pytest.raises(RequestError) as caught:
        target.submit(request(20, media=spans([(), ()]), generated=[first]))
    assert caught.value.code == Code.transfer_failed
    empty = target.kv_transfer.reserve([], 0, 1)
    assert empty is not None
    for at in range(64):  # evict what was adopted
        steps(target, request(1, key=at, prompt=[at + 100] * 9))
    target.submit(request(20, media=spans([(), ()]), generated=[first], reservation=empty))
    target.submit(request(20, key="other"))
    result = target.step()
    assert [(failure.key, failure.code) for failure in result.failures] == [("k", Code.transfer_failed)]
    assert [output.key for output in result.outputs] == ["other"]
    assert not target.cancel("k")


def test_memory_says_what_lies_in_it() -> None:
    mock = engine()
    kv, embeds = mock.memory()["kv"], mock.memory()["embeds"]
    assert (kv.blocks, kv.block_bytes, kv.layout) == (64, BLOCK_BYTES, "mock(8,64)")
    assert (embeds.blocks, embeds.block_bytes, embeds.layout) == (6, SLOT_BYTES, "mock(5,64)")
    encoder = build_encoder(image_tokens=IMAGE_TOKENS, vocab_size=300)
    assert encoder.memory()["embeds"].layout == embeds.layout
    seen = encoded(mock)
    for raw, (slot,) in zip(RAW, seen.slots, strict=True):
        assert ctypes.string_at(embeds.base + slot * SLOT_BYTES, SLOT_BYTES) == embedding(raw)
    assert ctypes.c_uint32.from_address(embeds.generations + 4 * seen.slots[0][0]).value == 1
    mock.close()


def test_an_embedding_takes_as_many_tokens_as_it_has_rows() -> None:
    mock = engine()
    raw = save({"x": torch.zeros(12, 4)})
    reservation = mock.vision.reserve([(blake3(raw).digest(), 12)])
    assert reservation is not None
    mock.vision.encode(reservation, {0: mock.vision.prepare(raw, "embedding")})
    (slots,) = reservation.slots
    pool = mock.memory()["embeds"]
    assert b"".join(ctypes.string_at(pool.base + s * SLOT_BYTES, SLOT_BYTES) for s in slots) == embedding(raw, 3)
    media = [MediaSpan(2, 12, blake3(raw).digest(), slots)]
    said = tokens(steps(mock, request(media=media)))
    assert said == expected_tokens(PROMPT, 20, VOCABULARY, media=[embedding(raw, 3)])


@pytest.mark.parametrize(
    ("raw", "kind"), [(b"", "image/png"), (b"x", "video/mp4"), (b"x", "embedding"), (save({}), "embedding")]
)
def test_what_is_no_medium_is_refused(raw: bytes, kind: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine().vision.prepare(raw, kind)
    assert caught.value.code == Code.invalid_request


def test_settings_decide_which_engines_have_memory_and_take_images() -> None:
    def made(role: Any, path: Path) -> ScheduledEngine:
        return from_settings(WorkerSettings(engine="mock", role=role, kv_blocks=50, embed_slots=7), path)

    assert made("aggregated", modeldir.TINY).memory() == {}
    assert set(made("prefill", modeldir.TINY).memory()) == {"kv"}
    assert set(made("decode", VISION).memory()) == {"kv", "embeds"}
    aggregated = made("aggregated", VISION)
    assert set(aggregated.memory()) == {"embeds"}
    assert (aggregated.vision.slot_tokens, aggregated.memory()["embeds"].blocks) == (64, 7)
    assert made("aggregated", modeldir.TINY).vision is None


def test_the_mock_of_an_encode_worker_needs_a_vision_model() -> None:
    settings = WorkerSettings(engine="mock", role="encode", embed_slots=7, block_size=16)
    encoder = encoder_from_settings(settings, VISION)
    info = encoder.info
    assert (info.name, info.block_size, info.total_blocks, info.vocab_size) == ("mock", 16, 7, 1280)
    assert encoder.vision.slot_tokens == 64
    with pytest.raises(modeldir.ModelError, match="takes no images"):
        encoder_from_settings(settings, modeldir.TINY)


def test_a_block_too_small_for_its_checksums_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 12 bytes, not 8"):
        engine(memory_block_bytes=8)
