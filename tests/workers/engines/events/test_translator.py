"""From vLLM's KV events to our names, as its publisher sends them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas import block_hashes
from penstock.schemas.kv import Cleared, Removed, Stored
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.events import wire
from penstock.workers.engines.events.translator import EventTranslator, PublishedFormat
from tests import standins
from tests.workers.engines.events.support import fold

SIZE = 4
ROOT = block_hashes.root("test")
TENANT = b"another tenant's"


def names(tokens: Sequence[int], root: bytes = ROOT) -> list[bytes]:
    return block_hashes.split(block_hashes.chain(pack_tokens(tokens), SIZE, root))


def stored(hashes: list[Any], tokens: Sequence[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | more


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | more


TOKENS = range(100, 112)


def test_names_are_those_of_the_router() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    assert translator.feed([stored([1, 2, 3], TOKENS)]) == [Stored(b"".join(names(TOKENS)))]
    more = range(100, 116)
    assert translator.feed([stored([4], more[12:], parent=3)]) == [Stored(names(more)[3], names(more)[2])]
    assert translator.feed([removed(4), removed(3)]) == [Removed(names(more)[3] + names(more)[2])]
    assert translator.feed([{"type": "AllBlocksCleared"}]) == [Removed(names(TOKENS)[1] + names(TOKENS)[0])]
    assert (translator.dump(), translator.counts.malformed) == ([], 0)


def test_blocks_of_pairs_have_the_names_of_their_first_tokens() -> None:
    """SGLang's with a draft head. Two can differ in the token that follows: their name goes with the last of them."""
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    pairs = [[each, each + 1] for each in TOKENS]
    assert translator.feed([stored([1, 2, 3], pairs)]) == [Stored(b"".join(names(TOKENS)))]  # type: ignore[arg-type]
    other = [*pairs[4:7], [107, 9]]
    assert translator.feed([stored([4], other, parent=1)]) == []  # type: ignore[arg-type]
    assert translator.names == 4
    assert translator.feed([removed(3, 2)]) == [Removed(names(TOKENS)[2])]
    assert translator.feed([removed(4)]) == [Removed(names(TOKENS)[1])]
    assert (translator.counts.malformed, translator.names) == (0, 1)


def test_media_behind_a_block_are_not_in_its_name() -> None:
    """vLLM 0.33 with a draft head: a hash covers the tokens and media that the head reads behind its block."""
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    digest = bytes(range(32))
    extra = block_hashes.media_extra([(4, 4, digest)], SIZE)
    expected = block_hashes.split(block_hashes.chain(pack_tokens(TOKENS), SIZE, ROOT, extra))
    extras = [[[digest.hex(), SIZE]], [[digest.hex(), 0]], None]
    more: dict[str, Any] = {"extra_keys": extras, "lookahead_token_ids": [[104], [108], [7]]}
    assert translator.feed([stored([1, 2, 3], TOKENS, **more)]) == [Stored(b"".join(expected))]
    other: dict[str, Any] = {"extra_keys": [None], "lookahead_token_ids": [[8]]}
    assert translator.feed([stored([4], TOKENS[8:], parent=2, **other)]) == []
    assert translator.feed([removed(3)]) == []
    assert translator.feed([removed(4)]) == [Removed(expected[2])]


def test_a_salt_is_the_root_of_its_tenant_s_names() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    found = translator.feed([stored([1, 2], TOKENS[:8], extra_keys=[[TENANT.hex()], None])])
    assert found == [Stored(b"".join(names(TOKENS[:8], TENANT)))]


@pytest.mark.parametrize(
    "more",
    [
        {"parent_block_hash": 99},
        {"lora_name": "adapter"},
        {"extra_keys": [[["image", 0]]]},
        {"extra_keys": [["salt", ["image", 0]]]},
        {"extra_keys": [[b"embedding"]]},
    ],
)
def test_what_cannot_be_named_for_certain_is_left_out_with_what_hangs_below(more: dict[str, Any]) -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    assert translator.feed([stored([1], TOKENS[:4], **more), stored([2], TOKENS[4:8], parent=1)]) == []
    assert translator.counts.unnamed == 2
    assert translator.feed([removed(1, 2)]) == []


def test_blocks_of_another_size_are_remembered_and_their_removal_is_not_announced() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    translator.feed([stored([1], TOKENS[:4])])
    assert translator.feed([stored([2], TOKENS[4:6], parent=1, block_size=2)]) == []
    assert translator.counts.partial == 1
    assert translator.feed([removed(2)]) == []


def test_of_several_attention_windows_the_largest_is_followed() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    small: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_sliding_window": 512}
    large: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_sliding_window": 32768}
    assert translator.feed([stored([1], TOKENS[:4], **small)]) == [Stored(names(TOKENS[:4])[0])]
    assert translator.feed([stored([1], TOKENS[:4], **large)]) == [Cleared(), Stored(names(TOKENS[:4])[0])]
    assert translator.feed([stored([2], TOKENS[4:8], parent=1, **small), removed(1, group_idx=0)]) == []
    assert translator.counts.filtered == 1
    assert translator.feed([removed(1, group_idx=1)]) == [Removed(names(TOKENS[:4])[0])]
    full = stored([7], TOKENS[:4], group_idx=2)
    assert translator.feed([full]) == [Stored(names(TOKENS[:4])[0])]  # no window: it sees all


def test_arrays_of_earlier_releases_of_vllm_have_their_salts_and_groups() -> None:
    tenant = bytes.fromhex("ab" * 8)
    salted = ["BlockStored", [1], None, [*TOKENS[:4]], SIZE, None, "GPU", None, [[tenant.hex()]], 3, "full_attention"]
    state = ["BlockStored", [1], None, [*TOKENS[:4]], SIZE, None, "GPU", None, None, 0, "mamba"]
    gone = [["BlockRemoved", [1], "GPU", 0], ["BlockRemoved", [1], "GPU", 3]]
    payload = msgspec.msgpack.encode([1.0, [salted, state, *gone], 0])
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    (name,) = names(TOKENS[:4], tenant)
    events = wire.decode_raw(payload)
    assert translator.feed(events[:3]) == [Stored(name)]
    assert translator.feed(events[3:]) == [Removed(name)]


def test_layers_with_a_state_are_not_followed_where_others_have_attention() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    state: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "mamba"}
    full: dict[str, Any] = {"group_idx": 3, "kv_cache_spec_kind": "full_attention"}
    first, second = names(TOKENS[:8])
    translator.feed([stored([1], TOKENS[:4], **state)])
    assert translator.feed([stored([1, 2], TOKENS[:8], **full)]) == [Cleared(), Stored(first + second)]
    assert translator.feed([stored([3], TOKENS[8:], parent=2, **state), removed(1, group_idx=0)]) == []
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    assert translator.feed([stored([1], TOKENS[:4], **window, kv_cache_spec_sliding_window=4096)]) == []
    assert translator.feed([removed(2, group_idx=3)]) == [Removed(second)]


def test_an_offloaded_block_that_is_told_by_its_hash_alone_is_a_copy_of_the_one_known() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    first, second = names(TOKENS[:8])
    translator.feed([stored([1, 2], TOKENS[:8], group_idx=0)])
    bare = stored([2], [], block_size=0, medium="CPU", group_idx=0)
    assert translator.feed([bare]) == [Stored(second, first, tier=1)]
    assert translator.feed([bare | {"block_hashes": [7]}, bare | {"group_idx": 1}]) == []
    assert translator.feed([removed(2, group_idx=0)]) == [Removed(second)]  # the copy does not keep it
    assert translator.feed([removed(2, group_idx=0, medium="CPU")]) == [Removed(second, tier=1)]
    assert translator.feed([removed(7, group_idx=0, medium="CPU")]) == []
    assert (translator.counts.unnamed, translator.counts.malformed) == (1, 0)


def test_memory_that_is_not_the_workers_own_is_left_out() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    (name,) = names(TOKENS[:4])
    shared = stored([1], TOKENS[:4], medium="STORAGE", locality="REMOTE")
    assert translator.feed([shared, shared | {"locality": "SOMEWHERE"}]) == []
    assert translator.feed([stored([1], TOKENS[:4], medium="", locality="LOCAL")]) == [Stored(name)]
    assert translator.feed([removed(1, locality="REMOTE"), stored([1], TOKENS[:4], medium="cpu")]) == [
        Stored(name, tier=1)
    ]
    assert translator.feed([stored([2], TOKENS[4:8], parent=1, medium="OBJ"), removed(1, medium="OBJ")]) == []
    assert (translator.counts.filtered, translator.counts.malformed) == (5, 0)


def test_a_host_copy_is_announced_with_its_tier() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    (name,) = names(TOKENS[:4])
    translator.feed([stored([1], TOKENS[:4])])
    assert translator.feed([stored([1], TOKENS[:4], medium="CPU")]) == [Stored(name, tier=1)]
    assert translator.feed([removed(1)]) == [Removed(name)]
    assert translator.dump() == [Stored(name, tier=1)]


@given(st.integers(0, 2**64 - 1))
def test_a_hash_is_the_same_signed_or_not(value: int) -> None:
    signed = value - (1 << 64) if value >= 1 << 63 else value
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    translator.feed([stored([value], TOKENS[:4])])
    assert translator.feed([removed(signed)]) == [Removed(names(TOKENS[:4])[0])]


@given(st.lists(st.dictionaries(st.text(max_size=12), st.none() | st.integers() | st.text(max_size=4)) | st.integers()))
def test_nothing_in_an_event_can_raise(events: list[Any]) -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    kinds = [each | {"type": "BlockStored"} if isinstance(each, dict) else each for each in events]
    assert translator.feed([*events, *kinds]) == []
    assert translator.counts.malformed == 2 * len(events)


def test_lost_events_void_what_was_known() -> None:
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    translator.feed([stored([1, 2], TOKENS[:8])])
    assert translator.forget() == [Cleared()]
    assert translator.forget() == []
    assert translator.feed([stored([3], TOKENS[8:], parent=2)]) == []


def test_the_stand_in_s_encoding_is_read() -> None:
    """Its structs are copied from vLLM's source, so these are the bytes that vLLM sends."""
    if standins.real("vllm"):
        pytest.skip("the real one is tested by the contract suite")
    with standins.installed():
        from vllm.distributed import kv_events as real

        batch = real.KVEventBatch(
            1.0,
            [
                real.BlockStored([b"h" * 32], None, list(TOKENS[:4]), SIZE, None, "GPU", None, group_idx=0),
                real.BlockRemoved([b"h" * 32], "GPU", 0),
                real.AllBlocksCleared(),
            ],
            0,
        )
        payload = msgspec.msgpack.encode(batch)
    (name,) = names(TOKENS[:4])
    results = EventTranslator(PublishedFormat(SIZE, ROOT)).feed(wire.decode_raw(payload))
    assert results == [Stored(name), Removed(name)]
    assert fold(results) == {}


def test_a_payload_of_sglang_s_own_encoder_is_read() -> None:
    """Made with sglang 0.5.23: a block of a tenant is stored and removed, then all are."""
    payload = bytes.fromhex(
        "93cb3ff00000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391fbb1706172656e745f626c6f63"
        "6b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055aa63"
        "616368655f73616c74b06162616261626162616261626162616283a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368"
        "657391fba66d656469756da347505581a474797065b0416c6c426c6f636b73436c6561726564c0"
    )
    first, *rest = wire.decode_raw(payload)
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    tenant = bytes.fromhex("ab" * 8)
    assert translator.feed([first]) == [Stored(names([1, 2, 3, 4], tenant)[0])]
    child = first | {"block_hashes": [9], "parent_block_hash": -5, "token_ids": [5, 6, 7, 8]}
    assert translator.feed([child]) == [Stored(names(range(1, 9), tenant)[1], names([1, 2, 3, 4], tenant)[0])]
    translator.feed([{**child, "medium": "CPU_PINNED"}])
    assert translator.counts.malformed == 0
    translator.feed(rest)
    assert [event.tier for event in translator.dump() if not isinstance(event, Cleared)] == [1]


def test_a_payload_whose_events_are_arrays_is_read() -> None:
    """Made with sglang 0.5.17: a block and, in host memory, the next one are stored; one is removed, then all are."""
    payload = bytes.fromhex(
        "93cb3ff00000000000009497ab426c6f636b53746f72656491fbc0940102030404c0a347505597ab426c6f636b53746f7265649109fb9405"
        "06070804c0aa4350555f50494e4e454493ac426c6f636b52656d6f76656491fba347505591b0416c6c426c6f636b73436c656172656400"
    )
    first, second = names(range(1, 9))
    translator = EventTranslator(PublishedFormat(SIZE, ROOT))
    events = wire.decode_raw(payload)
    assert translator.feed(events[:2]) == [Stored(first), Stored(second, first, tier=1)]
    assert translator.feed(events[2:]) == [Removed(first)]
    assert translator.counts.malformed == 0
    unknown = msgspec.msgpack.encode([1.0, [["BlockStored"], [], ["What"], [7]]])
    assert translator.feed(wire.decode_raw(unknown)) == []
    assert translator.counts.malformed == 4
