"""The prefix index after a message of the KV stream, from the stream alone."""

from penstock.operate.index_command import index_at
from tests.router.state.test_snapshots import stream


def test_an_index_at_a_sequence_says_what_the_stream_does_not_have() -> None:
    entries = [(seq, 0, data) for seq, data in stream(3, 60)]
    assert index_at(60, entries, 1000).awaiting_dump() == []
    assert index_at(60, entries[30:], 1000).awaiting_dump(), "the beginning is missing"
    damaged = [*entries[:5], (6, 0, b"\xc1"), *entries[6:]]
    assert index_at(60, damaged, 1000).awaiting_dump() != []


def test_messages_after_the_sequence_do_not_count() -> None:
    entries = [(seq, 0, data) for seq, data in stream(3, 60)]
    assert index_at(40, entries, 1000).checksum() == index_at(40, entries[:40], 1000).checksum()
