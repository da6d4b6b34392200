"""When a gateway of a starting deployment counts as ready."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from penstock.launch import readiness as module
from penstock.launch.readiness import Readiness
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Registration

READY = b'{"status": "ready", "reasons": [], "components": [], "endpoints": []}'
ONE_CELL = b'{"status": "ready", "reasons": [], "cells": {"1": "no router takes requests"}}'
WAITS = b'{"status": "not ready", "reasons": ["no worker"], "components": [], "endpoints": []}'
PAGE = b"# HELP python_gc_objects_collected_total Objects collected during gc\n"


@asynccontextmanager
async def answering(status: bytes, body: bytes) -> AsyncIterator[str]:
    """Whoever listens there, whatever is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 " + status + b"\r\n\r\n" + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("status", "body", "workers", "waits"),
    [
        (b"200 OK", READY, ["worker-0"], None),
        (b"503 Service Unavailable", WAITS, ["worker-0"], "no worker"),
        (b"503 Service Unavailable", WAITS, [], None),
        (b"200 OK", PAGE, ["worker-0"], "another process answers on http://127.0.0.1:"),
        (b"200 OK", PAGE, [], "another process answers on http://127.0.0.1:"),
        (b"200 OK", b"", [], "another process answers on http://127.0.0.1:"),
    ],
)
async def test_a_gateway_is_ready_when_it_says_so_itself(
    status: bytes, body: bytes, workers: list[str], waits: str | None
) -> None:
    """A metrics page of another deployment, for one, answers every path with 200."""
    ready: list[str] = []
    async with answering(status, body) as url:
        readiness = Readiness(workers, {"gateway-0": url}, ready.append)
        readiness.waiting.pop("worker-0", None)  # it is registered
        await readiness.look([cast(Any, None)])
    assert ready == ([] if waits else ["gateway-0"])
    assert (waits or "") in readiness.waiting.get("gateway-0", "")


@pytest.mark.parametrize(("cells", "waits"), [((0, 1), "cell 1: no router takes requests"), ((0,), None), ((), None)])
async def test_a_gateway_is_ready_when_it_uses_every_cell_that_has_workers(
    cells: tuple[int, ...], waits: str | None
) -> None:
    async with answering(b"200 OK", ONE_CELL) as url:
        readiness = Readiness([], {"gateway-0": url}, lambda name: None, cells)
        await readiness.look([cast(Any, None)])
    assert readiness.waiting.get("gateway-0") == waits


async def test_a_worker_is_ready_when_its_own_process_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of one that was killed outlives it by seconds: a start within them has a namesake."""
    found = [Registration("old", "m", "aggregated", "mock", 1, 32, 9, 1, 99, name="worker-0", pid=7)]

    async def registered(bus: object) -> list[Registration]:
        if not found:
            raise ServingError(Code.broker_unavailable, "the bucket has no leader")
        return found

    monkeypatch.setattr(module, "registrations", registered)
    ready: list[str] = []
    readiness = Readiness(["worker-0"], {}, ready.append, pid_of={"worker-0": 8}.__getitem__)
    await readiness.look([cast(Any, None)])
    assert (ready, readiness.waiting) == ([], {"worker-0": "is not registered yet"})
    found.clear()
    await readiness.look([cast(Any, None)])
    assert (ready, readiness.waiting) == ([], {"worker-0": "is not registered yet"})
    found.append(Registration("new", "m", "aggregated", "mock", 2, 32, 9, 1, 99, name="worker-0", pid=8))
    found.append(Registration("other", "m", "aggregated", "mock", 2, 32, 9, 1, 99, name="worker-of-others", pid=9))
    await readiness.look([cast(Any, None)])
    assert (ready, readiness.waiting) == (["worker-0"], {})
