"""How answers are written is no worker's state: it stays the same while no worker is there."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from configs.settings import GatewaySettings
from gateway.fleet import FleetView
from gateway.metrics import Metrics
from infra.broker.server import EmbeddedNats
from infra.bus.connection import connect
from infra.bus.registry import RegisteredWorker
from infra.metrics.scope import MetricScope
from infra.model.modeldir import DEMO, load
from infra.model.parsers.registry import ParserNames
from schemas.fleet import Registration, State
from schemas.subjects import Subjects

MODEL = load(DEMO)
DETECTED = ParserNames("basic", "hermes")  # what any worker says of this model's template unless a flag names another


@pytest.fixture
async def view(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[FleetView]:
    bus = await connect(broker.url("operator"), role="gateway", name="test", namespace=pipeline.namespace)
    yield FleetView(bus, [(("demo",), MODEL)], "gw1", GatewaySettings(), Metrics(MetricScope()), bus.tasks)
    await bus.close()


def join(view: FleetView, name: str, role: str = "aggregated", **fields: Any) -> None:
    registration = Registration(
        name, "demo", role, "mock", epoch=1, block_size=32, total_blocks=9, slots=1, max_model_len=4096,
        tokenizer=MODEL.tokenizer_digest, state=State.ready, **fields,
    )  # fmt: skip
    member = RegisteredWorker(registration, 1, time.monotonic())
    view.watch.members[name] = member
    view._joined(member)


def leave(view: FleetView, name: str) -> None:
    view._left(view.watch.members.pop(name), "killed")


def parsers(view: FleetView) -> ParserNames | None:
    context = view.only_context()
    assert context is not None
    return context.parsers


async def test_before_the_first_worker_the_template_says_how_answers_are_written(view: FleetView) -> None:
    assert parsers(view) == DETECTED


async def test_what_the_last_worker_said_holds_until_another_one_comes(view: FleetView) -> None:
    join(view, "a", tool_call_parser="mistral")
    assert parsers(view) == ParserNames("", "mistral")
    leave(view, "a")
    assert parsers(view) == ParserNames("", "mistral")
    join(view, "prefill-0", "prefill")
    assert parsers(view) == ParserNames("", "mistral"), "prefill workers write no answers"
    join(view, "b", reasoning_parser="basic", tool_call_parser="hermes")
    assert parsers(view) == DETECTED


async def test_workers_without_parsers_have_answers_written_without(view: FleetView) -> None:
    join(view, "a")
    assert parsers(view) is None
    leave(view, "a")
    assert parsers(view) is None


async def test_what_any_worker_does_not_apply_is_ignored(view: FleetView) -> None:
    join(view, "a")
    assert view.ignored_by(b"{}") == frozenset()
    join(view, "b", ignored_options=("seed",))
    assert view.ignored_by(b"{}") == {"seed"}
    leave(view, "b")
    assert view.ignored_by(b"{}") == frozenset()


async def test_a_parser_that_this_gateway_does_not_know_is_told_once_and_reads_nothing(view: FleetView) -> None:
    with capture_logs() as logs:
        join(view, "a", tool_call_parser="acme", reasoning_parser="basic")
        assert parsers(view) == ParserNames("basic", "")
        leave(view, "a")
        join(view, "a", tool_call_parser="acme", reasoning_parser="basic")
        assert parsers(view) == ParserNames("basic", "")
    [told] = [entry for entry in logs if entry["event"] == "workers_name_unknown_parsers"]
    assert told["parsers"] == ["acme"]
    assert "--parser-families" in told["fix"]
