"""Whoever runs a deployment is warned before records, or their prompts, are discarded sooner than promised."""

import dataclasses
from typing import Any

import pytest
from nats.aio.client import Client
from structlog.testing import capture_logs

from penstock.gateway.admission.storage import DAY, Retention, retention_s
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.apply_streams import apply
from penstock.schemas.streams import WEEK, StreamSpec, topology
from penstock.schemas.subjects import Subjects

SIZE = 1 << 20


@pytest.mark.parametrize(
    ("age_days", "size", "days"),
    [(0, 0, 7), (1, 50, 2), (3.5, 50, 7), (7, 60, 7), (0.5, 100, 0.5), (7, 1, 7)],
)
def test_records_are_kept_as_long_as_the_stream_takes_to_fill_but_not_longer_than_promised(
    age_days: float, size: int, days: float
) -> None:
    assert retention_s(age_s=age_days * DAY, size=size, max_bytes=100, max_age_s=WEEK) == pytest.approx(days * DAY)


def test_a_stream_without_limits_keeps_what_it_has() -> None:
    assert retention_s(age_s=1.0, size=10, max_bytes=-1, max_age_s=WEEK) == WEEK


@pytest.mark.parametrize("name", ["DONE", "REQUESTS"])
async def test_a_stream_that_fills_too_fast_is_named_once_with_the_fix(
    name: str, nc: Client, subjects: Subjects
) -> None:
    whole = topology(subjects)

    def shrink(spec: StreamSpec) -> StreamSpec:
        return dataclasses.replace(spec, max_bytes=SIZE) if spec.name == subjects.stream(name) else spec

    def subject(request: str) -> str:
        done = name == "DONE"
        return subjects.done("default", "m", request) if done else subjects.request("m", "standard", request)

    await apply(nc, dataclasses.replace(whole, streams=tuple(map(shrink, whole.streams))))
    bus = Bus(nc, subjects)
    looked: list[float] = []
    retention = Retention(bus, lambda: looked.append(retention.kept_s))

    async def store(start: int, count: int) -> list[Any]:
        for number in range(start, start + count):
            await bus.js.publish(subject(f"r{number:03}"), bytes(10_000))
        with capture_logs() as logs:
            await retention.look()
        return [entry for entry in logs if entry["event"].endswith("_kept_shorter")]

    assert not await store(0, 0)
    assert looked[-1] == WEEK
    assert not await store(0, 20)
    (warning,) = await store(20, 40)
    assert warning["event"] == f"{'records' if name == 'DONE' else 'prompts'}_kept_shorter"
    assert warning["promised_days"] == 7
    assert warning["days"] < 1
    assert f"penstock streams set {name} --max-bytes" in warning["action"]
    assert looked[-1] < DAY if name == "DONE" else looked[-1] == WEEK
    assert not await store(60, 10)
