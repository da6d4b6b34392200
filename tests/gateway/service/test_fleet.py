"""How answers are written is no worker's state: it stays the same while no worker is there."""

import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.configs.settings import GatewaySettings
from penstock.gateway.access.authentication import ANYONE, Caller
from penstock.gateway.apis.endpoints import ignored_options
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.base.request_bodies import CHAT, PrepareContext
from penstock.gateway.service.fleet import FleetView
from penstock.infra.bus.connection import connect
from penstock.infra.bus.worker_leases import RegisteredWorker
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.model.modeldir import DEMO, TINY, load
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.requests import CARRIED_CHAT, GenerateRequest, Stop
from penstock.schemas.subjects import Subjects

MODEL = load(DEMO)
DETECTED = ParserNames("basic", "hermes")  # what any worker says of this model's template unless a flag names another


@pytest.fixture
async def view(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[FleetView]:
    bus = await connect(broker.url("operator"), role="gateway", name="test", namespace=pipeline.namespace)
    yield FleetView([bus], [(("demo",), MODEL)], "gw1", GatewaySettings(), GatewayMetrics(MetricScope()), bus.tasks)
    await bus.close()


def join(view: FleetView, name: str, role: str = "aggregated", **fields: Any) -> None:
    registration = Registration(
        name, "demo", role, "mock", epoch=1, block_size=32, total_blocks=9, slots=1, max_model_len=4096,
        tokenizer=MODEL.tokenizer_digest, state=WorkerState.ready, **fields,
    )  # fmt: skip
    member = RegisteredWorker(registration, 1, time.monotonic())
    view.watches[0].members[name] = member
    view.joined(member)


def leave(view: FleetView, name: str) -> None:
    view.left(view.watches[0].members.pop(name), "killed")


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


async def test_requests_carry_their_chat_if_the_first_worker_s_server_takes_nothing_else(view: FleetView) -> None:
    def context() -> PrepareContext:
        found = view.only_context()
        assert found is not None
        return found

    assert not context().carries_chat
    join(view, "a", logits_processors=(CARRIED_CHAT,))
    (_, model), *_ = view.listed()
    assert (context().carries_chat, context().max_model_len, model.card.max_model_len) == (True, 4096, 4096)
    leave(view, "a")
    assert context().carries_chat, "as the last one said"
    join(view, "b")
    assert not context().carries_chat


async def test_what_any_worker_does_not_apply_is_ignored(view: FleetView) -> None:
    join(view, "a")
    body = b'{"seed": 3, "reasoning_effort": "low"}'

    def ignored() -> list[str]:
        return list(ignored_options(CHAT, body, view.unapplied_by(body)))

    assert view.unapplied_by(b"{}") == {}
    assert ignored() == ["reasoning_effort"], "the model's template has no variable of this name"
    join(view, "b", ignored_options=("seed",))
    assert ignored() == ["reasoning_effort", "seed"]
    leave(view, "b")
    assert ignored() == ["reasoning_effort"]


async def test_what_encode_workers_do_not_apply_says_nothing_of_workers_that_are_away(view: FleetView) -> None:
    """Structured output was refused with 400 while the others had died, or had not registered again yet."""

    def known() -> frozenset[str] | None:
        context = view.only_context()
        assert context is not None
        return context.logits_processors

    join(view, "encode-0", "encode")
    assert known() is None, "what the others apply is not known"
    join(view, "a", logits_processors=("constraint",))
    assert known() == {"constraint"}
    leave(view, "a")
    assert known() is None
    join(view, "b")
    assert known() == frozenset(), "a worker that is there applies none"


async def test_a_cell_continues_an_answer_only_with_workers_of_its_revision(view: FleetView) -> None:
    join(view, "a", revision="2f6c")
    assert view.best_of([0], "demo") == view.best_of([0], "demo", "2f6c") == [0]
    assert view.best_of([0], "demo", "9d10") == []


@pytest.mark.parametrize(("canary", "expected"), [("", 0), ("25%", 250), ("100%", 1000)])
async def test_a_share_of_requests_goes_to_the_revision_that_came_last(
    broker: EmbeddedNats, pipeline: Subjects, canary: str, expected: int
) -> None:
    bus = await connect(broker.url("operator"), role="gateway", name="test", namespace=pipeline.namespace)
    settings, metrics = GatewaySettings(canary=canary), GatewayMetrics(MetricScope())
    view = FleetView([bus], [(("demo",), MODEL)], "gw1", settings, metrics, bus.tasks)

    def revisions() -> Counter[str]:
        contexts = [view.only_context() for _ in range(1000)]
        return Counter(context.revision for context in contexts if context is not None)

    try:
        join(view, "a", revision="old")
        assert revisions() == {"old": 1000}
        join(view, "b", revision="new")
        join(view, "c", revision="old")
        assert revisions()["new"] == pytest.approx(expected, abs=80)
        leave(view, "b")
        assert revisions() == {"old": 1000}
        join(view, "d", "decode", revision="new", pair_only=True)
        assert revisions() == {"old": 1000}, "alone it runs no request"
    finally:
        await bus.close()


async def test_a_decode_worker_alone_makes_a_cell_serve_unless_another_cell_has_a_pair(view: FleetView) -> None:
    join(view, "d", "decode", pair_only=True)
    assert not view.serves_in(0)
    join(view, "d", "decode")
    assert view.serves_in(0, "demo")
    assert view.best_of([0], "demo") == [0]
    alone = view._served(0)
    join(view, "p", "prefill")
    view._served_in = [alone, view._served(0), {}]
    assert view.best_of([0, 1, 2], "demo") == [1]
    assert view.best_of([0, 2], "demo") == [0]
    assert view.best_of([2], "demo") == []


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


SMALL = load(TINY)
FOLDERS = {"demo": MODEL, "small": SMALL}


@pytest.fixture
async def learner(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[FleetView]:
    """Of a gateway that was told of no model."""
    bus = await connect(broker.url("operator"), role="gateway", name="test", namespace=pipeline.namespace)
    view = FleetView([bus], [], "gw1", GatewaySettings(), GatewayMetrics(MetricScope()), bus.tasks)
    yield view
    view.store.close()
    await bus.close()


def register(view: FleetView, worker: str, model: str, **fields: Any) -> None:
    described = FOLDERS.get(model, SMALL)
    given = {"source": str(described.path), "tokenizer": described.tokenizer_digest, "epoch": 1} | fields
    registration = Registration(
        worker, model, "aggregated", "mock", block_size=32, total_blocks=9, slots=1, max_model_len=4096, **given
    )
    member = RegisteredWorker(registration, 1, time.monotonic())
    view.watches[0].members[worker] = member
    view.joined(member)


async def refused(view: FleetView, name: str, caller: Caller = ANYONE) -> ServingError:
    with pytest.raises(ServingError) as caught:
        await view.context_for(name, caller)
    return caught.value


async def test_a_model_that_a_worker_registers_is_served_by_its_names_with_its_own_tokenizer(
    learner: FleetView,
) -> None:
    assert (await refused(learner, "demo")).code is Code.model_not_found
    register(learner, "a", "demo", aliases=("gpt-4",))
    only = await learner.context_for("", ANYONE)
    assert learner.only_context() is only, "the one model that there is"
    register(learner, "b", "small")
    assert learner.only_context() is None
    for name, described in (("demo", MODEL), ("gpt-4", MODEL), ("small", SMALL)):
        context = await learner.context_for(name, ANYONE)
        assert context.model.tokenizer_digest == described.tokenizer_digest
        assert name in context.names
    assert [name for name, _ in learner.listed()] == ["demo", "gpt-4", "small"]
    missing = await refused(learner, "")
    assert (missing.code, missing.param) == (Code.invalid_request, "model")
    assert missing.message == "model is missing; name one of 'demo', 'small'"


async def test_what_a_caller_may_not_use_is_neither_read_nor_named(learner: FleetView) -> None:
    register(learner, "a", "demo")
    register(learner, "b", "small")
    own = Caller("acme", "acme", models=["small"])
    assert (await learner.context_for("", own)).names == ("small",)
    error = await refused(learner, "demo", own)
    assert error.code is Code.model_not_found
    assert error.message.endswith("served: 'small'")
    nothing = await refused(learner, "", Caller("acme", "acme", models=["else"]))
    assert nothing.code is Code.model_not_found
    assert "demo" not in nothing.message
    await learner.context_for("demo", ANYONE)  # another caller uses it
    for name, unapplied in (("small", True), ("demo", False), ("nosuch", False)):
        body = b'{"model": "%b", "reasoning_effort": "low"}' % name.encode()
        assert bool(learner.unapplied_by(body, own)) is unapplied, "what its options do tells of a model, too"


async def test_the_canonical_name_of_a_model_goes_before_another_ones_alias(learner: FleetView) -> None:
    register(learner, "a", "demo", aliases=("small",))
    assert (await learner.context_for("small", ANYONE)).model.tokenizer_digest == MODEL.tokenizer_digest
    register(learner, "b", "small")
    assert (await learner.context_for("small", ANYONE)).model.tokenizer_digest == SMALL.tokenizer_digest


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"source": ""}, "do not say where it can be read"),
        ({"source": "/nonexistent/m", "host": "gpu-7"}, "as the worker on host gpu-7 names it"),
        ({"tokenizer": "f" * 32}, "another tokenizer"),
    ],
)
async def test_a_model_that_cannot_be_read_is_refused_with_the_reason_beside_one_that_is_served(
    learner: FleetView, fields: dict[str, Any], said: str
) -> None:
    with capture_logs():
        register(learner, "b", "small")
        register(learner, "a", "demo", **fields)
        error = await refused(learner, "demo")
        assert error.code is Code.model_unavailable
        assert said in error.message
        assert "--model demo=FOLDER" in error.message
        assert error.retry_after is not None
        assert (await learner.context_for("small", ANYONE)).names == ("small",)
        reasons = {each.worker: reason for each, reason in learner.workers()}
    assert reasons["b"] == ""
    assert reasons["a"]


async def test_a_learned_model_follows_its_workers_to_another_tokenizer(learner: FleetView) -> None:
    register(learner, "a", "m", source=str(DEMO), tokenizer=MODEL.tokenizer_digest)
    first = await learner.context_for("m", ANYONE)
    register(learner, "b", "m", source=str(TINY), tokenizer=SMALL.tokenizer_digest, epoch=2)
    assert (await learner.context_for("m", ANYONE)).model is first.model, "the first one still serves"
    register(learner, "a", "m", source=str(DEMO), tokenizer=MODEL.tokenizer_digest, state=WorkerState.draining)
    assert (await learner.context_for("m", ANYONE)).model.tokenizer_digest == SMALL.tokenizer_digest
    # Answers that were made before are read with the tokenizer that made them.
    for tokens, described in ((MODEL.tokenizer_digest, MODEL), (SMALL.tokenizer_digest, SMALL)):
        request = GenerateRequest("r", "m", "gw1", b"", Stop(4), 0, 0, tokenizer=tokens)
        detokenizer = await learner.detokenizer(request)
        assert detokenizer is not None
        assert detokenizer.longest_bytes == described.detokenizer.longest_bytes
    unknown = GenerateRequest("r", "m", "gw1", b"", Stop(4), 0, 0, tokenizer="e" * 32)
    with pytest.raises(ServingError, match="with the tokenizer that made it") as caught:
        await learner.detokenizer(unknown)
    assert caught.value.code is Code.model_unavailable


async def test_a_model_without_workers_is_served_until_it_is_forgotten(
    learner: FleetView, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(learner, "a", "demo")
    register(learner, "b", "small")
    assert learner.has_worker()
    leave(learner, "a")
    learner.forget()
    assert (await learner.context_for("demo", ANYONE)).names == ("demo",), "its requests wait in the queue"
    assert [name for name, _ in learner.listed()] == ["demo", "small"]
    monkeypatch.setattr("penstock.gateway.service.fleet.FORGET_S", -1.0)
    learner.forget()
    assert (await refused(learner, "demo")).code is Code.model_not_found
    assert [name for name, _ in learner.listed()] == ["small"]


async def test_a_gateway_that_was_told_of_a_model_serves_no_other_one(view: FleetView) -> None:
    join(view, "a")
    register(view, "b", "small")
    assert [name for name, _ in view.listed()] == ["demo"]
    assert (await refused(view, "small")).code is Code.model_not_found
    assert view.serves_elsewhere("small")


async def test_no_more_models_are_learned_than_the_limit_and_one_without_workers_makes_room(
    learner: FleetView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.service.fleet.MAX_LEARNED", 2)
    register(learner, "a", "demo")
    register(learner, "b", "small")
    with capture_logs() as logs:
        register(learner, "c", "third")
    assert [entry["model"] for entry in logs if entry["event"] == "too_many_models"] == ["third"]
    leave(learner, "b")
    register(learner, "c", "third")
    assert [model.name for model in learner.models] == ["demo", "third"]
