"""The thread: how it opens, breaks, sleeps and ends."""

import threading
import time
from typing import Any

import pytest

from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer.agent import Agent
from penstock.workers.kv_transfer.transport_protocol import TransferError, TransportUnavailable
from penstock.workers.kv_transfer.transport_thread import IDLE_S, TransportThread
from tests.workers.kv_transfer.loopback import LoopbackAgent, LoopbackNetwork, open_loopback
from tests.workers.kv_transfer.support import WAIT_S, Pool, until


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")]


def test_an_agent_that_cannot_be_made_is_an_error_and_leaves_no_thread() -> None:
    def make(_: str) -> Agent:
        raise TransportUnavailable("no agents today")

    with pytest.raises(TransportUnavailable, match="no agents today"):
        TransportThread(make, "mover-none")
    assert "transfer-mover-none" not in threads()


def test_an_agent_that_breaks_ends_the_transport_with_a_reason_instead_of_silence() -> None:
    network, pool, peer = LoopbackNetwork(), Pool(), Pool()

    class Breaking(LoopbackAgent):
        def post(self, *_: Any) -> Any:
            raise ZeroDivisionError("a bug")

    other = LoopbackAgent(network, "peer", {"kv": peer.memory}).endpoint
    transport = TransportThread(lambda name: Breaking(network, name, {"kv": pool.memory}), "mover-broken")
    first = transport.read(other, "kv", [1], [1]).exception(WAIT_S)
    assert isinstance(first, TransferError)
    assert (first.cause, "a bug" in first.message) == ("unavailable", True)
    second = transport.read(other, "kv", [1], [1]).exception(WAIT_S)
    assert isinstance(second, TransferError)
    assert second.cause == "unavailable"
    transport.close()
    assert "transfer-mover-broken" not in threads()


def test_requests_are_answered_even_if_an_agent_that_broke_cannot_be_closed() -> None:
    network, pool, peer = LoopbackNetwork(), Pool(), Pool()
    entered, leave = threading.Event(), threading.Event()

    class Breaking(LoopbackAgent):
        def progress(self) -> None:
            entered.set()
            assert leave.wait(WAIT_S)
            raise ZeroDivisionError("a bug")

        def close(self) -> None:
            raise ZeroDivisionError("another")

    other = LoopbackAgent(network, "peer", {"kv": peer.memory}).endpoint
    transport = TransportThread(lambda name: Breaking(network, name, {"kv": pool.memory}), "mover-unclosed")
    assert entered.wait(WAIT_S)
    requests = [transport.read(other, "kv", [1], [1]) for _ in range(2)]
    leave.set()
    for request in requests:
        error = request.exception(WAIT_S)
        assert isinstance(error, TransferError)
        assert error.cause == "unavailable"
    transport.close()
    assert "transfer-mover-unclosed" not in threads()


def test_an_agent_that_cannot_be_made_again_ends_the_transport() -> None:
    network, pool = LoopbackNetwork(), Pool()

    def make(name: str) -> Agent:
        if name != "mover-once":
            raise TransportUnavailable("no second one")
        return LoopbackAgent(network, name, {"kv": pool.memory})

    transport = TransportThread(make, "mover-once")
    transport.renew()
    until(lambda: "transfer-mover-once" not in threads(), "ended")
    error = transport.connect(transport.endpoint).exception(WAIT_S)
    assert isinstance(error, TransferError)
    assert (error.cause, "no second one" in error.message) == ("unavailable", True)
    transport.close()


def test_orders_that_nobody_has_taken_yet_are_answered_when_the_transport_ends() -> None:
    network, pool, peer_pool = LoopbackNetwork(), Pool(), Pool()
    entered, leave = threading.Event(), threading.Event()

    class Slow(LoopbackAgent):
        def progress(self) -> None:
            if entered.is_set():
                return
            entered.set()
            assert leave.wait(WAIT_S)

    peer = LoopbackAgent(network, "peer", {"kv": peer_pool.memory}).endpoint
    transport = TransportThread(lambda name: Slow(network, name, {"kv": pool.memory}), "mover-slow")
    assert entered.wait(WAIT_S)
    orders = [transport.read(peer, "kv", [1], [1]) for _ in range(3)]
    drained = transport.drained()
    closing = threading.Thread(target=transport.close)
    closing.start()
    until(lambda: bool(transport._closed), "closing")
    leave.set()
    closing.join(WAIT_S)
    for request in orders:
        error = request.exception(WAIT_S)
        assert isinstance(error, TransferError)
        assert error.cause == "unavailable"
    assert drained.result(WAIT_S) is None


def test_an_error_in_the_callback_of_a_renewal_does_not_end_the_transport() -> None:
    network, pool, peer_pool = LoopbackNetwork(), Pool(), Pool()
    renewed: list[str] = []

    def on_renewal(endpoint: Endpoint) -> None:
        renewed.append(endpoint.agent)
        raise ZeroDivisionError

    transport = open_loopback(network, "mover-renewed", {"kv": pool.memory}, on_renewed=on_renewal)
    peer = LoopbackAgent(network, "peer", {"kv": peer_pool.memory}).endpoint
    assert isinstance(transport, TransportThread)
    transport.renew()
    assert transport.read(peer, "kv", [1], [1]).result(WAIT_S).bytes
    assert renewed == ["mover-renewed.1"]
    transport.close()


def test_closing_from_its_own_thread_does_not_wait_for_itself() -> None:
    network, pool = LoopbackNetwork(), Pool()
    transport = open_loopback(network, "mover-self", {"kv": pool.memory})
    transport.connect(transport.endpoint).add_done_callback(lambda _: transport.close())
    until(lambda: "transfer-mover-self" not in threads(), "ended")


def test_an_order_wakes_an_idle_thread() -> None:
    network, pool, peer_pool = LoopbackNetwork(), Pool(), Pool()
    transport = open_loopback(network, "mover-idle", {"kv": pool.memory})
    peer = LoopbackAgent(network, "peer", {"kv": peer_pool.memory}).endpoint
    took = []
    for _ in range(20):
        start = time.perf_counter()
        transport.read(peer, "kv", [1], [1]).result(WAIT_S)
        took.append(time.perf_counter() - start)
    transport.close()
    assert min(took) < IDLE_S / 2
