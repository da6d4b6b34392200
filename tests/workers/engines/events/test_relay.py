"""An engine whose events go over ZMQ and back: nothing is lost, others are added, dead publishers are dropped."""

import gc
import itertools
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.settings import WorkerSettings
from penstock.schemas import block_hashes
from penstock.schemas.kv import KvEvent, Removed, Stored
from penstock.schemas.requests import Stop
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import Engine, EngineError, SequenceRequest
from penstock.workers.engines.events import wire
from penstock.workers.engines.events.relay import (
    EventPublisher,
    PublisherAddresses,
    Relay,
    ports,
    source_of,
    start_relay,
)
from penstock.workers.engines.events.translator import Consolidator
from penstock.workers.engines.mock.executor import GREEDY
from tests import standins
from tests.pipeline.support import free_port
from tests.workers.engines.events.support import Names, digest, fold

BOUND_S = 15.0
BLOCK = 4
ROOT = block_hashes.root("rev")
LOOPBACK = "tcp://127.0.0.1:*"

_keys = itertools.count()


def engine(ranks: int = 1, **options: Any) -> Engine:
    given = mock.MockOptions(**{"vocab_size": 1000, "block_size": BLOCK, "total_blocks": 64, "speedup": 0} | options)
    return mock.build_data_parallel(ranks, given) if ranks > 1 else mock.build(given)


def request(prompt: list[int], max_tokens: int = 2, rank: int = 0) -> SequenceRequest:
    return SequenceRequest(next(_keys), prompt, GREEDY, Stop(max_tokens, ignore_eos=True), root=ROOT, rank=rank)


class Reader:
    """The events of a relay, applied as a router applies them."""

    def __init__(self, relay: Any) -> None:
        self.relay = relay
        self.ranks: list[Names] = [{} for _ in range(relay.info.dp_size)]
        self.clears = 0

    def step(self) -> None:
        result = self.relay.step()
        for rank, events in {0: result.events, **result.others}.items():
            fold(events, self.ranks[rank])

    def drain(self) -> None:
        """Step until the relay has no more work."""
        deadline = time.monotonic() + BOUND_S
        while self.relay.has_work():
            assert time.monotonic() < deadline
            self.step()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not holds():
            assert time.monotonic() < deadline, self.ranks
            self.step()


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    made: list[Engine] = []

    def build(inner: Engine, wake: Callable[[], None] = lambda: None, **settings: Any) -> Any:
        given = {"event_plane": "zmq", "kv_events_port": 0} | settings
        made.append(start_relay(inner, WorkerSettings(**given), ROOT, wake))
        return made[-1]

    yield build
    for each in made:
        each.close()


def publisher(endpoint: str = LOOPBACK, replay: str = LOOPBACK, **options: Any) -> EventPublisher:
    return EventPublisher(endpoint, replay, **{"block_size": BLOCK} | options)


def address(made: EventPublisher, replay: bool = True) -> str:
    return made.endpoint + (f"/{made.replay.rpartition(':')[2]}" if replay else "")


def chain(start: int, end: int, tier: int = 0) -> list[KvEvent]:
    return [Stored(digest(n), digest(n - 1) if n else None, tier=tier) for n in range(start, end)]


# -- the engine's own events


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_stream_is_the_engines_own_events(make: Callable[..., Any], ranks: int) -> None:
    inner = engine(ranks, total_blocks=24)
    relay = make(inner)
    reader = Reader(relay)
    for number in range(30):
        relay.submit(request([number % 7, *range(number % 5 * 4)] * 2, rank=number % ranks))
        reader.drain()
    for rank in range(ranks):
        assert reader.ranks[rank]
        assert set(reader.ranks[rank]) == set(fold(inner.dump(rank))) == set(fold(relay.dump(rank)))


def test_all_other_calls_go_to_the_engine(make: Callable[..., Any]) -> None:
    inner = engine()
    relay = make(inner)
    assert relay.info is inner.info
    assert relay.blocked is False
    assert (relay.memory(), relay.vision) == ({}, None)
    relay.submit(request([1, 2, 3], max_tokens=50))
    relay.step()
    assert relay.stats().running == inner.stats().running == 1
    assert relay.cancel("nobody") is False


def test_an_idle_relay_has_no_work_and_wakes_its_worker_when_events_arrive(make: Callable[..., Any]) -> None:
    woken = threading.Event()
    cache = publisher()
    relay = make(engine(), woken.set, kv_events_from=(address(cache),))
    assert not relay.has_work()
    cache.publish(chain(0, 3))
    assert woken.wait(BOUND_S)
    reader = Reader(relay)
    reader.drain()
    assert set(reader.ranks[0]) == {(digest(n), 0) for n in range(3)}
    assert cache.close()


def test_lost_own_events_are_replaced_by_the_engines_dump(make: Callable[..., Any]) -> None:
    inner = engine()
    relay = make(inner)
    reader = Reader(relay)
    relay.submit(request([1] * 9))
    reader.drain()
    publisher = relay.publishers[0]
    real, publisher.publish = publisher.publish, lambda events: None
    relay.submit(request([2] * 9))
    reader.drain()  # waits in vain, for a bounded time
    publisher.publish = real
    assert set(reader.ranks[0]) < set(fold(inner.dump()))
    relay._inbox.put((0, [], True))
    reader.drain()
    assert set(reader.ranks[0]) == set(fold(inner.dump()))


# -- other publishers


class RawPublisher:
    """A publisher without replay that sends any payload."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind(LOOPBACK)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._numbers = itertools.count()

    def send(self, payload: bytes) -> None:
        self._socket.send_multipart(wire.frames(b"", next(self._numbers), payload))

    def send_until(self, payload: bytes, reader: Reader, holds: Callable[[], bool]) -> None:
        """Send it repeatedly: a subscriber that has not joined yet misses messages."""
        deadline = time.monotonic() + BOUND_S
        while not holds():
            assert time.monotonic() < deadline
            self.send(payload)
            pause = time.monotonic() + 0.05
            while time.monotonic() < pause:
                reader.step()

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_another_publisher_adds_to_the_stream_in_either_format(make: Callable[..., Any]) -> None:
    """Names from one; the hashes and tokens of vLLM from the other."""
    ours, theirs = publisher(rank=1), RawPublisher()
    relay = make(engine(2), kv_events_from=(address(ours), theirs.endpoint))
    reader = Reader(relay)
    ours.publish([*chain(0, 2), *chain(0, 2, tier=1)])
    tokens = list(range(2 * BLOCK))
    event = {"type": "BlockStored", "block_hashes": [b"a" * 32, b"b" * 32], "parent_block_hash": None}
    event |= {"token_ids": tokens, "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None}
    encode = msgspec.msgpack.encode
    names = block_hashes.split(block_hashes.chain(array("I", tokens).tobytes(), BLOCK, ROOT))
    theirs.send_until(encode([1.0, [event]]), reader, lambda: bool(reader.ranks[0] and reader.ranks[1]))
    assert set(reader.ranks[1]) == {(digest(n), tier) for n in range(2) for tier in (0, 1)}
    assert set(reader.ranks[0]) == {(name, 0) for name in names}
    theirs.send(encode([1.0, [{"type": "BlockRemoved", "block_hashes": [b"b" * 32], "medium": "GPU"}]]))
    reader.until(lambda: set(reader.ranks[0]) == {(names[0], 0)})
    assert ours.close()
    theirs.close()


@pytest.mark.parametrize("replay", [True, False])
def test_a_restarted_publisher_is_read_again(make: Callable[..., Any], replay: bool) -> None:
    first = publisher()
    relay = make(engine(), kv_events_from=(address(first, replay),))
    reader = Reader(relay)
    _publish_until_read(first, reader, chain(0, 5))
    assert first.close()
    reader.until(lambda: not reader.ranks[0])
    second = publisher(first.endpoint, first.replay)
    _publish_until_read(second, reader, chain(10, 12), [Stored(digest(10)), Stored(digest(11), digest(10))])
    assert set(reader.ranks[0]) == {(digest(10), 0), (digest(11), 0)}
    assert second.close()


def _publish_until_read(
    publisher: EventPublisher, reader: Reader, about: list[KvEvent], events: list[KvEvent] | None = None
) -> None:
    """Publish until it is read: without replay, a subscriber misses what was sent before it joined."""
    wanted = {(name, 0) for event in about for name in block_hashes.split(getattr(event, "digests", b""))}
    deadline = time.monotonic() + BOUND_S
    while not wanted <= set(reader.ranks[0]):
        assert time.monotonic() < deadline
        publisher.publish(events or about)
        pause = time.monotonic() + 0.05
        while time.monotonic() < pause:
            reader.step()


DIES = """
import sys, time
from penstock.schemas.kv import Stored
from penstock.workers.engines.events.relay import EventPublisher
made = EventPublisher(sys.argv[1], sys.argv[2], block_size=4)
made.publish([Stored(bytes(15) + b"a" + bytes(15) + b"b")])
print("there", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_the_blocks_of_a_dead_or_hanging_publisher_are_dropped_in_time(make: Callable[..., Any], end: str) -> None:
    port, replay = free_port(), free_port()
    argv = [sys.executable, "-c", DIES, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()})
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        relay = make(engine(), kv_events_from=(f"tcp://127.0.0.1:{port}/{replay}",))
        reader = Reader(relay)
        reader.until(lambda: len(reader.ranks[0]) == 2)
        began = time.monotonic()
        process.send_signal(9 if end == "kill" else 19)
        reader.until(lambda: not reader.ranks[0])
        assert time.monotonic() - began < 8
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        wire.encode(1.0, chain(0, 1), block_size=BLOCK + 1),
        wire.encode(1.0, chain(0, 1), BLOCK, rank=7),
    ],
)
def test_a_publisher_of_invalid_payloads_is_forgotten_and_still_read(make: Callable[..., Any], payload: bytes) -> None:
    cache = RawPublisher()
    reader = Reader(make(engine(), kv_events_from=(cache.endpoint,)))
    cache.send_until(wire.encode(1.0, chain(0, 2), BLOCK), reader, lambda: len(reader.ranks[0]) == 2)
    cache.send(payload)
    reader.until(lambda: not reader.ranks[0])
    cache.send(wire.encode(1.0, chain(2, 3), BLOCK))  # its parent is not known any more
    cache.send(wire.encode(1.0, [Stored(digest(50))], BLOCK))
    reader.until(lambda: set(reader.ranks[0]) == {(digest(50), 0)})
    cache.close()


# -- the stream after losses


STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["store", "store", "remove", "lose"]), st.integers(0, 9)))


@given(STEPS)
def test_after_losses_the_stream_has_fewer_blocks_and_is_closed(steps: list[tuple[int, str, int]]) -> None:
    """Two publishers; the parent of block n is (n - 1) // 2. No block is announced that neither holds."""
    stream, reader = Consolidator(), fold([])
    held: list[set[int]] = [set(), set()]
    for source, what, number in steps:
        above = (number - 1) // 2 if number else None
        mine = held[source]
        out: list[KvEvent] = []
        if what == "lose":
            out = stream.drop(source)
        elif what == "store" and (above is None or above in mine):
            mine.add(number)
            out = stream.feed(source, [Stored(digest(number), None if above is None else digest(above))])
        elif what == "remove" and number in mine and not {2 * number + 1, 2 * number + 2} & mine:
            mine.remove(number)
            out = stream.feed(source, [Removed(digest(number))])
        fold(out, reader)
        assert {name for name, _ in reader} <= {digest(n) for n in held[0] | held[1]}
        assert set(fold(stream.dump())) == set(reader)


# -- addresses, ports, ends


def test_ports_are_consecutive_and_do_not_overflow() -> None:
    assert ports(5557, 1) == [(5557, 5558)]
    assert ports(5557, 3) == [(5557, 5560), (5558, 5561), (5559, 5562)]
    assert ports(0, 2) == [(0, 0), (0, 0)]
    assert ports(65_534, 1) == [(65_534, 65_535)]
    with pytest.raises(ValueError, match="use 65532 at most"):
        ports(65_534, 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tcp://cache:5557", PublisherAddresses("tcp://cache:5557")),
        ("tcp://[::1]:5557/5558", PublisherAddresses("tcp://[::1]:5557", "tcp://[::1]:5558")),
    ],
)
def test_addresses_of_publishers_are_parsed(text: str, found: PublisherAddresses) -> None:
    assert source_of(text) == found


@pytest.mark.parametrize("text", ["", "cache:1", "tcp://:1", "tcp://a", "tcp://a:x", "tcp://a:1/", "tcp://a:70000"])
def test_invalid_addresses_are_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        source_of(text)


class Closing:
    """An engine that counts how often it was closed."""

    def __init__(self, **info: Any) -> None:
        self._engine = engine()
        self.info = msgspec.structs.replace(self._engine.info, **info)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        self._engine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize(
    ("settings", "info", "error"),
    [
        ({"kv_events_port": 65_535}, {}, ValueError),
        ({"kv_events_from": ("nonsense",)}, {}, ValueError),
        ({}, {"kv_events": False}, ValueError),
        ({"kv_events_host": "192.0.2.1"}, {}, EngineError),
    ],
)
def test_invalid_settings_are_refused_at_the_start_and_the_engine_is_closed(
    settings: dict[str, Any], info: dict[str, Any], error: type[Exception]
) -> None:
    inner = Closing(**info)
    before = threading.active_count()
    with pytest.raises(error):
        start_relay(inner, WorkerSettings(**{"kv_events_port": 0} | settings), ROOT, lambda: None)  # type: ignore[arg-type]
    assert inner.closed == 1
    assert threading.active_count() == before


def test_a_port_that_another_worker_uses_is_refused_with_the_fix() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        inner = Closing()
        with pytest.raises(EngineError, match=f"{port}: .*ports of its own, or 0 for any free ones"):
            start_relay(inner, WorkerSettings(kv_events_port=port), ROOT, lambda: None)
    assert inner.closed == 1


def test_closing_leaves_neither_threads_nor_sockets(make: Callable[..., Any]) -> None:
    def counts() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def once() -> None:
        cache = publisher()
        relay = start_relay(
            engine(2), WorkerSettings(kv_events_port=0, kv_events_from=(address(cache),)), ROOT, lambda: None
        )
        relay.submit(request([1] * 9, rank=1))
        Reader(relay).drain()
        relay.close()
        assert cache.close()

    once()  # what the library opens once for all
    before = counts()
    for _ in range(3):
        once()
    assert counts() == before


def test_vllms_subscribers_can_read_a_workers_events(make: Callable[..., Any]) -> None:
    """Decoded with vLLM's own types; the hashes are our block names."""
    with standins.installed():
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    relay = make(engine(2, total_blocks=8), kv_events_topic="kv")
    read: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    context = zmq.Context()
    with context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
        sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        sub.connect(relay.publishers[1].endpoint)
        dealer.connect(relay.publishers[1].replay)
        reader = Reader(relay)
        for number in range(12):
            relay.submit(request([number] * 9, rank=1))
            reader.drain()
        dealer.send_multipart(wire.replay_request(0))
        while dealer.poll(int(BOUND_S * 1000)):
            parts = dealer.recv_multipart()
            if wire.parse_message(parts).number == wire.END:
                break
            read.put(parts)
    context.term()
    held: set[bytes | int] = set()
    kinds = set()
    expected = 0
    while not read.empty():
        parts = read.get()
        assert parts[-3] == b"kv"
        assert wire.parse_message(parts).number == expected
        expected += 1
        batch = msgspec.msgpack.decode(parts[-1], type=KVEventBatch)
        assert batch.data_parallel_rank == 1
        for event in batch.events:
            kinds.add(type(event))
            if isinstance(event, BlockStored):
                assert (event.block_size, event.token_ids, event.medium) == (BLOCK, [], "GPU")
                assert event.parent_block_hash is None or event.parent_block_hash in held
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held.difference_update(event.block_hashes)
    assert kinds == {BlockStored, BlockRemoved}
    assert {(name, 0) for name in held} == set(reader.ranks[1])


def test_a_relay_has_all_methods_of_an_engine(make: Callable[..., Any]) -> None:
    missing = [name for name in vars(Engine) if not name.startswith("_") and not hasattr(make(engine()), name)]
    assert missing == []
    assert isinstance(make(engine()), Relay)
