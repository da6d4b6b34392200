"""Publishers and subscribers over ZMQ: nothing is lost that can be replayed, losses are reported, all is closed."""

import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.schemas.kv import KvEvent, Stored
from penstock.workers.engines.events import relay as publishing
from penstock.workers.engines.events import wire
from penstock.workers.engines.events.relay import EventPublisher
from penstock.workers.engines.events.subscriber import Subscriber
from penstock.workers.engines.events.translator import Consolidator
from tests.workers.engines.events.support import digest, fold

BOUND_S = 10.0


class Reader:
    """Collects what a subscriber delivers."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[tuple[list[bytes], bool]] = queue.SimpleQueue()
        self.lost = 0

    def take(self, payloads: list[bytes], lost: bool) -> None:
        self.received.put((payloads, lost))

    def batches(self, count: int) -> list[wire.NamedBatch]:
        found: list[wire.NamedBatch] = []
        while len(found) < count:
            payloads, lost = self.received.get(timeout=BOUND_S)
            self.lost += lost
            found += map(named, payloads)
        return found


def named(payload: bytes) -> wire.NamedBatch:
    batch = wire.decode(payload)
    assert isinstance(batch, wire.NamedBatch)
    return batch


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[EventPublisher]:
    made = EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", clock=lambda: 1.5)
    yield made
    assert made.close()


@pytest.fixture
def subscribe() -> Iterator[Callable[..., Subscriber]]:
    made: list[Subscriber] = []

    def make(publisher: EventPublisher, reader: Reader, replay: bool = True) -> Subscriber:
        endpoint = publisher.replay if replay else ""
        made.append(Subscriber(publisher.endpoint, endpoint, reader.take, check_s=0.05))
        return made[-1]

    yield make
    for each in made:
        assert each.close()


def chain(start: int, end: int) -> list[KvEvent]:
    return [Stored(digest(n), digest(n - 1) if n else None) for n in range(start, end)]


def test_a_late_subscriber_receives_all_messages(
    publisher: EventPublisher, subscribe: Callable[..., Subscriber]
) -> None:
    reader = Reader()
    for number in range(5):
        publisher.publish(chain(number, number + 1))
    subscribe(publisher, reader)
    publisher.publish(chain(5, 6))
    found = reader.batches(6)
    assert [batch.events for batch in found] == [tuple(chain(n, n + 1)) for n in range(6)]
    assert (found[0].time, found[0].rank, reader.lost) == (1.5, None, 0)


def test_messages_that_are_no_longer_kept_are_reported_as_lost(tmp_path: Path) -> None:
    publisher = EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", replay_messages=2)
    for number in range(6):
        publisher.publish(chain(number, number + 1))
    reader = Reader()
    peek = zmq.Context()
    with peek.socket(zmq.DEALER) as dealer:  # all six have been sent
        dealer.connect(publisher.replay)
        while True:
            dealer.send_multipart(wire.replay_request(5))
            assert dealer.poll(BOUND_S * 1000)
            first = wire.parse_message(dealer.recv_multipart())
            if first.number == 5:
                break
    peek.term()
    subscriber = Subscriber(publisher.endpoint, publisher.replay, reader.take, check_s=0.05)
    assert [batch.events for batch in reader.batches(2)] == [tuple(chain(4, 5)), tuple(chain(5, 6))]
    assert reader.lost == 1
    assert subscriber.close()
    assert publisher.close()


def test_messages_are_kept_for_replay_up_to_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "REPLAY_BYTES", 20_000)
    publisher = EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    for number in range(50):
        publisher.publish(chain(0, 20 + number))
    assert publisher.close()
    assert 0 < sum(len(payload) for _, payload in publisher._kept) <= 20_000
    assert publisher._kept[-1][0] == 49


def test_two_publishers_of_a_worker_become_one_stream_over_three_hops(
    tmp_path: Path, subscribe: Callable[..., Subscriber]
) -> None:
    """Engines' publishers -> consolidator -> its own publisher -> a reader; numbers have no gaps on any hop."""
    engines = [EventPublisher(f"ipc://{tmp_path}/e{n}", f"ipc://{tmp_path}/r{n}", rank=n) for n in range(2)]
    last = EventPublisher(f"ipc://{tmp_path}/out", f"ipc://{tmp_path}/again")
    received: queue.SimpleQueue[tuple[int, list[bytes], bool]] = queue.SimpleQueue()
    subscribers = [
        Subscriber(
            each.endpoint, each.replay, lambda found, lost, n=number: received.put((n, found, lost)), check_s=0.05
        )
        for number, each in enumerate(engines)
    ]
    reader = Reader()
    subscribe(last, reader)
    for number in range(20):
        engines[number % 2].publish(chain(0, number + 1))
    stream, count, sent = Consolidator(), 0, 0
    while count < 20:
        rank, payloads, lost = received.get(timeout=BOUND_S)
        assert not lost
        count += len(payloads)
        for payload in payloads:
            batch = named(payload)
            assert batch.rank == rank
            if out := stream.feed(rank, batch.events):
                last.publish(out)
                sent += 1
    announced = fold(event for batch in reader.batches(sent) for event in batch.events)
    assert announced == fold(chain(0, 20))
    assert announced == fold(stream.dump())
    assert reader.lost == 0
    for each in (*subscribers, *engines, last):
        assert each.close()  # type: ignore[attr-defined]


def test_closing_leaves_neither_threads_nor_sockets(tmp_path: Path) -> None:
    gc.collect()

    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def once() -> None:
        publisher = EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
        subscriber = Subscriber(publisher.endpoint, publisher.replay, lambda found, lost: None)
        publisher.publish(chain(0, 1))
        assert subscriber.close()
        assert subscriber.close()
        assert publisher.close()

    once()  # what the library opens once for all
    before = counts()
    for _ in range(3):
        once()
    assert counts() == before


def test_an_idle_publisher_sleeps(tmp_path: Path) -> None:
    def switches() -> int:
        status = Path(f"/proc/self/task/{publisher._thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    publisher = EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    try:
        time.sleep(0.05)  # its thread starts
        before = switches()
        time.sleep(0.3)
        assert switches() - before < 5
    finally:
        assert publisher.close()


def test_an_unusable_address_is_an_error_and_nothing_stays_open(tmp_path: Path) -> None:
    first = EventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    with pytest.raises(zmq.ZMQError):
        EventPublisher("tcp://192.0.2.1:9", f"ipc://{tmp_path}/other")
    assert first.close()


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU"],
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]], "block_size": 4},
    ],
)
def test_events_that_are_arrays_or_have_pairs_of_tokens_are_read_with_their_rank(event: Any) -> None:
    payload = msgspec.msgpack.encode([1.0, [event], 3])
    assert wire.decode(payload) == wire.RawBatch(3)
    assert wire.decode_raw(payload)[0]["block_hashes"] == [1]


@pytest.mark.parametrize("parts", [[], [b"x"], [b"", b"short", b"payload"]])
def test_malformed_messages_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(ValueError):
        wire.parse_message(parts)


def test_messages_have_the_public_format() -> None:
    assert wire.frames(b"t", 258, b"p") == [b"t", b"\0\0\0\0\0\0\x01\x02", b"p"]
    assert wire.frames(b"", wire.END, b"") == [b"", b"\xff" * 8, b""]
    assert wire.parse_message([b"id", b"", b"t", b"\xff" * 8, b""]).number == wire.END
    assert wire.replay_request(1) == [b"", b"\0" * 7 + b"\x01"]
    for wrong in (b"", b"\xc1", b"\x01", b"\x92\x01\x02"):
        with pytest.raises(ValueError):
            wire.decode_raw(wrong)
        with pytest.raises(ValueError):
            wire.decode(wrong)
