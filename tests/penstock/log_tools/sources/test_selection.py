"""Which messages an export is about."""

import msgspec

from penstock.log_tools.sources.log_line import LogLine, Selection
from penstock.schemas import tokens, transfer
from penstock.schemas.done import Done
from penstock.schemas.jobs import Stage
from penstock.schemas.requests import new_request_id
from penstock.schemas.tokens import TokenBatch, TokenItem
from penstock.schemas.transfer import Handoff, Handoffs
from penstock.schemas.wire import encode
from tests.penstock.log_tools.traces import samples

MS = 1_000_000
MINE, OTHER = new_request_id(samples.T0), new_request_id(samples.T0 + 5000 * MS)


def record(stream: str, message: object, name: str = "") -> LogLine:
    return LogLine(stream, 1, "", "s", {"Nats-Msg-Id": name} if name else {}, encode(message))


def test_a_batch_keeps_the_items_of_selected_requests_only() -> None:
    batch = TokenBatch("w", 1, 2, (TokenItem(MINE, 1, 0, 0, b"\1\0\0\0"), TokenItem(OTHER, 1, 0, 0, b"\2\0\0\0")))
    part = Selection(frozenset((MINE,))).part(record("TOKENS", batch))
    assert part is not None
    assert [item.request for item in tokens.decode(part.data).items] == [MINE]
    assert Selection(frozenset(("x",))).part(record("TOKENS", batch)) is None
    lines = Handoffs("w", tuple(Handoff(f"{each}:1:decode", "read", "a", "b", 1) for each in (MINE, OTHER)))
    part = Selection(frozenset((OTHER,))).part(record("HANDOFF", lines))
    assert part is not None
    assert [event.ticket[:36] for event in transfer.decode_ledger(part.data).events] == [OTHER]


def test_a_time_range_includes_its_start_and_not_its_end() -> None:
    at = samples.T0
    assert Selection(since_ns=at).has(MINE)
    assert not Selection(since_ns=at + MS).has(MINE)
    assert Selection(until_ns=at + MS).has(MINE)
    assert not Selection(until_ns=at).has(MINE)
    assert not Selection(since_ns=1).has("mine")


def test_messages_are_recognised_by_their_message_id_or_their_body() -> None:
    asked = samples.request(id=MINE)
    chosen = Selection(frozenset((MINE,)))
    job = msgspec.structs.replace(samples.job(1, Stage("decode", "w")), request=msgspec.Raw(encode(asked)))
    for name, wanted in ((f"{MINE}:2:decode", True), (f"{OTHER}:1", False)):
        assert (chosen.part(record("WORK", job, name)) is not None) == wanted
    done = Done(MINE, "tiny", 1)
    assert chosen.part(record("DONE", done)) is not None
    assert chosen.part(record("DONE", done, f"{OTHER}:returned")) is None


def test_kv_events_belong_to_no_request() -> None:
    kv = LogLine("KV", 1, "", "s", {}, b"")
    assert Selection(frozenset((MINE,)), kv=True).part(kv) is kv
    assert Selection(kv=False).part(kv) is None
