"""The thread of a transport: accepts requests from any thread, drives transfers, sleeps when idle.

The agent is used in this thread only. A direct copy between processes happens inside a call of the agent, so it blocks
this thread and never the caller's.

How an agent's thread sleeps: until there is a command, the agent has something to do, or a time has passed.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal

import structlog

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.agent import Agent
from penstock.workers.kv_transfer.inflight import InflightTransfers, Op, TransferRequest
from penstock.workers.kv_transfer.transport_protocol import (
    QUARANTINE_S,
    TIMEOUT_S,
    TransferError,
    TransferResult,
    Transport,
    TransportStats,
)

POLL_FLOOR_S = 0.001  # poll() counts in milliseconds


class Waker:
    """``wake`` from any thread, the rest from the one that sleeps."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._watched: tuple[int, ...] = ()

    def watch(self, descriptors: Iterable[int]) -> None:
        """Wake up when one of these is readable, too; replaces the ones before."""
        for descriptor in self._watched:
            self._poll.unregister(descriptor)
        self._watched = tuple(descriptors)
        for descriptor in self._watched:
            self._poll.register(descriptor, select.POLLIN)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending
            os.write(self._write, b"\0")

    def sleep(self, seconds: float) -> bool:
        """Sleep; returns whether a watched descriptor ended it. A sleep below a millisecond cannot end early."""
        if seconds < POLL_FLOOR_S:
            time.sleep(seconds)
            return False
        ready = [descriptor for descriptor, _ in self._poll.poll(seconds * 1000)]
        if self._read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
        return any(descriptor != self._read for descriptor in ready)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


log = structlog.get_logger("transfer")

NAP_S = (0.000_05, 0.001)  # between two polls of transfers in flight: short while they progress, then longer
HOT_S = 0.01  # more bytes of a peer are expected within this time after the last
HOT_NAP_S = 0.000_5
IDLE_S = 0.02  # otherwise; a peer's first bytes end it early
SPIN_S = 0.005  # a transfer between GPUs takes about this long at most: it is polled without a pause
CLOSE_S = 5.0


class TransportThread:
    """A ``Transport`` over any kind of agent.

    Args:
        make: makes and tries an agent of the given name; called in the thread that will own it.
        name: of the first agent; later ones are called ``name.1``, ``name.2``.
        on_renewed: called in that thread with the new endpoint, which peers need from then on.
        quarantine_s: how long a given-up transfer may stay unfinished before the agent is renewed.

    Raises:
        TransportUnavailable: there is no agent.
    """

    def __init__(
        self,
        make: Callable[[str], Agent],
        name: str,
        *,
        on_renewed: Callable[[Endpoint], None] = lambda _: None,
        quarantine_s: float = QUARANTINE_S,
    ) -> None:
        self._name = name
        self._waker = Waker()
        self._lock = threading.Lock()
        self._commands: deque[Callable[[InflightTransfers], None]] = deque()
        self._closed = ""  # the reason, once it is closed
        self._renewed = on_renewed
        opened: Future[InflightTransfers] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened, make, quarantine_s), name=f"transfer-{name}", daemon=True
        )
        self._thread.start()
        try:
            self._transfers = opened.result()
        except BaseException:
            self._thread.join()
            self._waker.close()
            raise

    @property
    def endpoint(self) -> Endpoint:
        return self._transfers.agent.endpoint

    def read(
        self,
        peer: Endpoint,
        pool: str,
        remote: Sequence[int],
        local: Sequence[int],
        *,
        generations: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> "Future[TransferResult]":
        now = time.monotonic()
        op: Op = "COMPARE" if generations and not local else "READ"
        return self._submit(
            TransferRequest(
                op=op, peer=peer, pool=pool, local=local, remote=remote, generations=generations, layers=layers,
                started=now, deadline=now + timeout,
            )
        )  # fmt: skip

    def write(
        self, peer: Endpoint, pool: str, local: Sequence[int], remote: Sequence[int], *, timeout: float = TIMEOUT_S
    ) -> "Future[TransferResult]":
        now = time.monotonic()
        return self._submit(
            TransferRequest(
                op="WRITE", peer=peer, pool=pool, local=local, remote=remote, started=now, deadline=now + timeout
            )
        )

    def connect(self, peer: Endpoint, *, reads: bool = True, timeout: float = TIMEOUT_S) -> "Future[None]":
        now = time.monotonic()
        connected: Future[None] = Future()
        connected.set_running_or_notify_cancel()

        def report(done: "Future[TransferResult]") -> None:
            if error := done.exception():
                connected.set_exception(error)
            else:
                connected.set_result(None)

        request = TransferRequest(op="CONNECT", peer=peer, reads=reads, started=now, deadline=now + timeout)
        self._submit(request).add_done_callback(report)
        return connected

    def drained(self) -> "Future[None]":
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        if not self._command(lambda transfers: transfers.drain(future)):
            future.set_result(None)  # closed: no peer reaches the pools
        return future

    def forget(self, agent: str) -> None:
        self._command(lambda transfers: transfers.forget(agent, time.monotonic()))

    def renew(self) -> None:
        """Close the agent and make another, as after a quarantine that took too long; peers lose the old one."""
        self._command(lambda transfers: transfers.renew(time.monotonic()))

    def stats(self) -> TransportStats:
        return self._transfers.stats()

    def close(self) -> None:
        self._close("it was closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("transfer_thread_join_timeout", agent=self._name)

    def _submit(self, request: TransferRequest) -> "Future[TransferResult]":
        request.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, as the transfer cannot
        if not self._command(lambda transfers: transfers.start(request, time.monotonic())):
            request.future.set_exception(TransferError("unavailable", f"transport {self._name}: {self._closed}"))
        return request.future

    def _command(self, command: Callable[[InflightTransfers], None]) -> bool:
        with self._lock:  # nothing may be added after the thread has read the last command
            if self._closed:
                return False
            self._commands.append(command)
            self._waker.wake()
        return True

    def _close(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = reason
            self._waker.wake()

    # -- the thread

    def _run(self, opened: "Future[InflightTransfers]", make: Callable[[str], Agent], quarantine_s: float) -> None:
        try:
            transfers = InflightTransfers(make, self._name, self._on_agent_renewed, quarantine_s)
        except BaseException as error:
            opened.set_exception(error)
            return
        self._waker.watch(transfers.agent.events)
        opened.set_result(transfers)
        try:
            self._loop(transfers)
        except Exception as error:  # the agent failed or could not be made: fail every transfer
            log.exception("transfer_thread_failed", agent=self._name)
            self._close(f"it broke: {error!r}")
        finally:
            self._end(transfers)

    def _loop(self, transfers: InflightTransfers) -> None:
        active, hot_until = time.monotonic(), 0.0  # when something last happened here; until when a peer is at work
        while not self._closed:
            now = time.monotonic()
            if self._commands:
                active = now
                self._run_commands(transfers)
            if transfers.step(now, time.monotonic):
                active = time.monotonic()
                continue
            if transfers.spins(now - SPIN_S):
                continue  # each poll releases the GIL
            if transfers.busy:
                nap = min(max((now - active) / 16, NAP_S[0]), NAP_S[1])
            else:
                nap = HOT_NAP_S if now < hot_until else IDLE_S
            if self._waker.sleep(nap):
                active = time.monotonic()
                hot_until = active + HOT_S

    def _run_commands(self, transfers: InflightTransfers) -> None:
        while self._commands:
            self._commands.popleft()(transfers)

    def _on_agent_renewed(self, endpoint: Endpoint) -> None:
        self._waker.watch(self._transfers.agent.events)
        log.warning("transfer_agent_renewed", agent=endpoint.agent)
        try:
            self._renewed(endpoint)
        except Exception:  # an error of the caller's must not end the thread
            log.exception("renewal_callback_failed", agent=endpoint.agent)

    def _end(self, transfers: InflightTransfers) -> None:
        self._waker.watch(())
        try:
            transfers.end("unavailable", f"transport {self._name}: {self._closed}", time.monotonic())
        except Exception:
            log.exception("transfer_cleanup_failed", agent=self._name)
        try:
            self._run_commands(transfers)  # what came in just before is refused
        finally:
            with self._lock:
                self._waker.close()


def open_transport(
    backend: Literal["auto", "nixl"],
    agent: str,
    pools: Mapping[str, Memory],
    *,
    on_renewed: Callable[[Endpoint], None] = lambda _: None,
    quarantine_s: float = QUARANTINE_S,
) -> Transport:
    """Open a transport for these pools, which must stay where they are until the process ends.

    Args:
        backend: NIXL is the only one, so "auto" selects it.
        agent: a name that no other incarnation of any worker ever has.
        on_renewed: called in the transport's thread when the agent had to be replaced, with the endpoint that peers
            need from then on.
        quarantine_s: how long a transfer that timed out may stay unfinished before the agent is replaced.

    Raises:
        TransportUnavailable: what to install, or what failed when it was tried.
    """
    return TransportThread(partial(_nixl, pools), agent, on_renewed=on_renewed, quarantine_s=quarantine_s)


def _nixl(pools: Mapping[str, Memory], name: str) -> Agent:
    from penstock.workers.kv_transfer.nixl import NixlAgent, load

    return NixlAgent(load(), name, pools)
