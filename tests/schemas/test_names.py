"""Names: block digests, request ids, subjects, streams, error codes, packed tokens."""

import re
import struct
import uuid
from array import array
from itertools import combinations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas import block_hashes, fleet, jobs, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority
from penstock.schemas.streams import HEADROOM, MAX_PAYLOAD, Topology, topology
from penstock.schemas.subjects import Subjects, token
from penstock.schemas.wire import pack_tokens, unpack_tokens

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)
TOPOLOGY = topology(Subjects("ps"))


# --- packed tokens ---


@given(token_lists)
def test_tokens_travel_as_little_endian_u32(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == struct.pack(f"<{len(tokens)}I", *tokens)
    assert unpack_tokens(packed).tolist() == tokens
    assert pack_tokens(array("I", tokens)) == packed


def test_only_whole_ids_in_range_are_packed() -> None:
    for wrong in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            pack_tokens(wrong)
    with pytest.raises(ValueError):
        unpack_tokens(b"\0\0\0")


# --- blocks ---


def test_digests_are_known_values() -> None:
    """Changing these makes every cache and index of a running fleet worthless."""
    root = block_hashes.root("rev")
    assert root.hex() == "e3a704a176d503ef1ab792c835e81447"
    assert block_hashes.root("rev", "lora", "salt").hex() == "cf09309eae3e650fe2c0aa0480b928c2"
    assert block_hashes.chain(pack_tokens(range(8)), 4, root).hex() == (
        "0043c615592f4e025d2ea60b643de8db" + "1dbc3fc15a9f2e1075f0ace3139d5446"
    )


def test_a_digest_is_blake3_of_parent_tokens_and_media() -> None:
    parent, tokens, media = b"\1" * 16, pack_tokens([1, 2]), b"\2" * 32
    assert block_hashes.extend(parent, tokens, media) == blake3(parent + tokens + media).digest()[:16]


@given(token_lists, st.integers(1, 9), st.dictionaries(st.integers(0, 5), st.binary(min_size=1, max_size=4)))
def test_a_chain_is_repeated_extension(tokens: list[int], size: int, extra: dict[int, bytes]) -> None:
    parent = block_hashes.root("rev")
    expected = []
    for number in range(len(tokens) // size):
        block = pack_tokens(tokens[number * size : (number + 1) * size])
        parent = block_hashes.extend(parent, block, extra.get(number, b""))
        expected.append(parent)
    packed = block_hashes.chain(pack_tokens(tokens), size, block_hashes.root("rev"), extra)
    assert block_hashes.split(packed) == expected
    assert block_hashes.keys_of(packed) == tuple(map(block_hashes.key_of, expected))


@given(st.text(max_size=3), st.text(max_size=3), st.text(max_size=3), st.text(max_size=3))
def test_roots_differ_unless_all_parts_agree(a: str, b: str, c: str, d: str) -> None:
    assert (block_hashes.root(a, b) == block_hashes.root(c, d)) == ((a, b) == (c, d))
    assert (block_hashes.root("r", a, b) == block_hashes.root("r", c, d)) == ((a, b) == (c, d))


@pytest.mark.parametrize(("unsigned", "signed"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_index_keys_are_signed_64_bit(unsigned: int, signed: int) -> None:
    digest = unsigned.to_bytes(8, "little") + b"\xff" * 8
    assert block_hashes.key_of(digest) == signed
    assert block_hashes.keys_of(digest * 3) == (signed,) * 3


def test_half_a_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        block_hashes.split(bytes(17))
    assert block_hashes.keys_of(b"") == ()


# --- ids ---


@given(st.integers(0, 253_402_300_799 * 10**9), st.binary(min_size=10, max_size=10))
def test_request_ids_are_uuid7_and_have_their_time(now_ns: int, randomness: bytes) -> None:
    text = requests.new_request_id(now_ns, randomness)
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert requests.time_of(text) == now_ns // 1_000_000 * 1_000_000
    assert text == requests.new_request_id(now_ns, randomness)


def test_an_id_of_a_year_that_no_log_can_be_asked_for_is_none() -> None:
    with pytest.raises(ValueError, match="year 9999"):
        requests.time_of("ffffffff-ffff-7fff-bfff-ffffffffffff")


@given(st.integers(0, 2**60), st.integers(1_000_000, 2**50))
def test_later_ids_sort_behind_earlier_ones(now_ns: int, later_ns: int) -> None:
    assert requests.new_request_id(now_ns) < requests.new_request_id(now_ns + later_ns)


def test_ids_of_one_moment_differ() -> None:
    assert len({requests.new_request_id(10**18) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("text", ["", "x", str(uuid.UUID(int=0)), "9849f5ed-c8a2-4c68-ae2b-b92fd6983451"])
def test_other_ids_have_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        requests.time_of(text)


# --- codes ---


def test_every_code_has_a_name_and_a_status() -> None:
    for code in Code:
        assert code.name == code.value
        assert 400 <= code.status < 600
    assert Code.queue_full.status == 429


def test_an_error_carries_what_a_gateway_needs() -> None:
    error = ServingError(Code.queue_full, "wait", param="n", retry_after=2.0)
    assert (str(error), error.code, error.param, error.retry_after) == ("wait", Code.queue_full, "n", 2.0)


def test_priorities_are_served_in_their_order() -> None:
    assert [priority.rank for priority in Priority] == [0, 1, 2]


def test_a_load_header_comes_back_and_grows_at_its_end() -> None:
    header = jobs.load_header(10, 4, "gw-1", 99, Priority.batch, 3)
    assert jobs.read_load_header(header + " later") == (10, 4, "gw-1", 99, "batch", 3, ())
    route = (jobs.Stage("prefill", "p-1"), jobs.Stage("decode", "d-1", 2))
    header = jobs.load_header(10, 4, "gw-1", 99, Priority.batch, 3, route)
    assert jobs.read_load_header(header + " later").route == route
    assert jobs.read_load_header("10 4 gw-1 99 batch").n == 1
    with pytest.raises(ValueError):
        jobs.read_load_header("10 4 gw-1")
    with pytest.raises(ValueError):
        jobs.read_load_header("10 4 gw-1 99 batch 3 prefill")


def test_leases_outlive_several_renewals() -> None:
    assert fleet.LEASE_S >= 3 * fleet.RENEW_S
    assert int(fleet.LEASE_S) == fleet.LEASE_S, "Nats-TTL takes whole seconds"


# --- subjects and streams ---


@given(st.text(max_size=20))
def test_any_name_becomes_one_subject_token(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]+", token(name))


@given(st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True))
def test_a_plain_name_stays_as_it_is(name: str) -> None:
    assert token(name) == name


def test_what_nats_gives_a_meaning_is_replaced() -> None:
    assert token("Qwen/Qwen2.5-0.5B") == "Qwen_Qwen2_5-0_5B"
    assert token("a.*.>\t\n b") == "a_b"
    assert token("") == "_"


@pytest.mark.parametrize("name", ["", "Ps", "a.b", "a b", "1a", "_a", "a" * 33, "a>", "a\n"])
def test_a_bad_namespace_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        Subjects(name)


def test_live_subjects_keep_the_rest_of_the_name() -> None:
    s = Subjects("ps")
    assert s.live(s.tokens("gw")) == "ps.live.gw"
    assert s.live(s.all("tokens")) == "ps.live.>"
    assert s.live(s.kv("m", "w")) == "ps.live.kv.m.w"
    assert s.live(s.all("work")) == "ps.live.work.>"
    assert s.live(s.done("t", "m", "r")) == "ps.live.done.t.m.r"
    assert s.live(s.lease("w")) == "ps.live.bucket.w"


def overlap(a: str, b: str) -> bool:
    """Whether some subject matches both patterns."""
    one, other = a.split("."), b.split(".")
    for x, y in zip(one, other, strict=False):
        if ">" in (x, y):
            return True
        if x != y and "*" not in (x, y):
            return False
    return len(one) == len(other)


def names(t: Topology) -> list[str]:
    return [s.name for s in t.streams] + [f"KV_{b.name}" for b in t.buckets] + [f"OBJ_{o.name}" for o in t.objects]


def test_names_are_unique_and_of_the_namespace() -> None:
    found = names(TOPOLOGY)
    assert len(found) == len(set(found))
    assert all("ps_" in name for name in found)
    consumers = [(c.stream, c.name) for c in TOPOLOGY.consumers]
    assert len(consumers) == len(set(consumers))
    assert {stream for stream, _ in consumers} <= set(found)


def test_no_two_streams_store_the_same_subject() -> None:
    stored = [subject for stream in TOPOLOGY.streams for subject in stream.subjects]
    for one, other in combinations(stored, 2):
        assert not overlap(one, other), (one, other)


def test_nothing_republished_is_stored_again() -> None:
    stored = [subject for stream in TOPOLOGY.streams for subject in stream.subjects]
    stored += [f"$KV.{bucket.name}.>" for bucket in TOPOLOGY.buckets]
    for _, destination in [
        *(s.live for s in TOPOLOGY.streams if s.live),
        *(b.live for b in TOPOLOGY.buckets if b.live),
    ]:
        for subject in stored:
            assert not overlap(destination, subject), (destination, subject)


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("WORK", "ps.work.aggregated.w"),
        ("KV", "ps.kv.m.w"),
        ("TOKENS", "ps.tokens.gw"),
        ("DONE", "ps.done.t.m.r"),
        ("DONE", "ps.returned.m"),
        ("KV_workers", "$KV.ps_workers.w"),
        ("KV_tenants", "$KV.ps_tenants.acme"),
    ],
)
def test_readers_listen_where_the_server_republishes(name: str, subject: str) -> None:
    """The server maps source to destination by their common wildcard tail; ``Subjects.live`` must say the same."""
    live = [s.live for s in TOPOLOGY.streams if s.name == f"ps_{name}"] or [
        b.live for b in TOPOLOGY.buckets if name == b.name.replace("ps_", "KV_")
    ]
    assert live[0]
    source, destination = (pattern.removesuffix(">") for pattern in live[0])
    assert subject.startswith(source)
    assert destination + subject.removeprefix(source) == TOPOLOGY.subjects.live(subject)


def test_live_subjects_of_different_streams_do_not_mix() -> None:
    s = TOPOLOGY.subjects
    others = [s.live(subject) for subject in (s.all("work"), s.all("kv"), s.all("done"), s.all("returned"))]
    others.append(s.live(s.lease("w")))
    for one, other in combinations(others, 2):
        assert not overlap(one, other)
    for other in others:
        assert not overlap(s.live(s.tokens("gw-1")), other)


def test_every_consumer_reads_what_its_stream_stores() -> None:
    for consumer in TOPOLOGY.consumers:
        stream = next(s for s in TOPOLOGY.streams if s.name == consumer.stream)
        for wanted in consumer.filter_subjects:
            assert any(overlap(wanted, subject) for subject in stream.subjects)


def test_each_class_of_requests_has_one_consumer_that_reads_it() -> None:
    for priority in Priority:
        subject = TOPOLOGY.subjects.request("m", priority.value, "01932c07-a4b8-7000-8000-0123456789ab")
        filters = [(c.name, wanted) for c in TOPOLOGY.consumers for wanted in c.filter_subjects]
        readers = [name for name, wanted in filters if overlap(wanted, subject)]
        assert readers == [f"router-{priority.value}"]


def test_a_request_is_found_in_the_shard_that_its_id_names() -> None:
    s, request_id = TOPOLOGY.subjects, "01932c07-a4b8-7000-8000-0123456789ab"
    assert s.request("m", "batch", request_id) == "ps.request.m.batch.9ab"
    assert s.shard_of(request_id) == "ps.request.*.*.9ab"


def test_every_stream_is_bounded() -> None:
    ages = [s.max_age_s for s in TOPOLOGY.streams] + [o.max_age_s for o in TOPOLOGY.objects]
    sizes = [s.max_bytes for s in TOPOLOGY.streams] + [o.max_bytes for o in TOPOLOGY.objects]
    sizes += [b.max_bytes for b in TOPOLOGY.buckets]
    assert min(ages) > 0
    assert min(sizes) > 0
    assert TOPOLOGY.reserved_bytes + TOPOLOGY.reserved_memory == sum(sizes)
    assert TOPOLOGY.reserved_memory == sum(s.max_bytes for s in TOPOLOGY.streams if s.memory) > 0
    assert 0 < HEADROOM < MAX_PAYLOAD


def test_two_namespaces_share_nothing() -> None:
    other = topology(Subjects("other"))
    assert not set(names(TOPOLOGY)) & set(names(other))
    for stream in TOPOLOGY.streams:
        for theirs in other.streams:
            assert not any(overlap(a, b) for a in stream.subjects for b in theirs.subjects)


def test_with_record_all_that_a_replay_needs_is_kept_as_long_as_records() -> None:
    kept = {stream.name: stream.max_age_s for stream in topology(Subjects(), record=True).streams}
    assert kept["ps_KV"] == kept["ps_WORK"] == kept["ps_TOKENS"] == kept["ps_DONE"] == 7 * 86_400
    shorter = {stream.name: stream.max_age_s for stream in TOPOLOGY.streams}
    assert shorter["ps_DONE"] == kept["ps_DONE"]
    assert shorter["ps_TOKENS"] == 3600
