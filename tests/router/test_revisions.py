"""Requests and the revisions of their model: placed in one, gone on with in the same, or ended with the reason."""

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code
from penstock.schemas.fleet import LoraAdapter, WorkerState
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.recovery.test_recovery import lose, on, streamed
from tests.router.support import Clients, Routing, routing
from tests.workers.support import LogClient, answer, request


async def test_one_revision_serves_and_the_next_takes_over_when_it_drains(clients: Clients, one: Routing) -> None:
    old = await clients.stub("z-old", revision="old", epoch=1)
    await clients.stub("a-new", revision="new", epoch=2)
    await one.knows("z-old", "a-new")
    asked = [request(revision=pin) for pin in ("", "old", "new")]
    await clients.ask(*asked)
    assert [(await clients.placed(each))[0] for each in asked] == ["z-old", "z-old", "a-new"]
    assert (await clients.placed(asked[0]))[1].decision.revision == "old"
    await old.change(state=WorkerState.draining)
    await eventually(lambda: one.router.cluster.tracker.worker("z-old").state is WorkerState.draining)  # type: ignore[union-attr]
    moved = [request(revision=pin) for pin in ("", "old")]
    await clients.ask(*moved)
    assert [(await clients.placed(each))[0] for each in moved] == ["a-new", "a-new"]
    assert one.metric("penstock_router_revision_moves_total") == 1


async def test_a_worker_that_is_named_is_taken_whatever_revision_serves(clients: Clients, one: Routing) -> None:
    await clients.stub("old", revision="old", epoch=1)
    await clients.stub("new", revision="new", epoch=2)
    await one.knows("old", "new")
    asked = request(worker="new")
    await clients.ask(asked)
    assert (await clients.placed(asked))[0] == "new"


async def test_a_worker_with_another_tokenizer_is_given_nothing(clients: Clients, one: Routing) -> None:
    await clients.stub("foreign", revision="other", epoch=1, tokenizer="t2", slots=100)
    await one.knows("foreign")
    asked = request(tokenizer="t1")
    await clients.ask(asked)
    await eventually(lambda: one.waiting == [asked.id])
    await clients.stub("own", revision="r", epoch=2, tokenizer="t1")
    assert (await clients.placed(asked))[0] == "own"
    await clients.stub("older-build", revision="r", epoch=3)  # does not say: as before
    asked = request(tokenizer="t1", worker="older-build")
    await clients.ask(asked)
    assert (await clients.placed(asked))[0] == "older-build"


async def test_an_answer_that_has_begun_waits_for_its_revision(log: LogClient, clients: Clients, one: Routing) -> None:
    asked = request(max_tokens=20)
    stub = await on(clients, one, "w1", asked, revision="old")
    await clients.stub("w2", revision="new", epoch=2, slots=100)
    await one.knows("w2")
    await streamed(log, asked, answer(asked, 7))
    await lose(clients, stub)
    await eventually(lambda: one.waiting == [asked.id])
    other = request()  # is not held up by it
    await clients.ask(other)
    assert (await clients.placed(other))[0] == "w2"
    await clients.stub("w3", revision="old", epoch=3)
    name, job = await clients.placed(asked, 2)
    assert (name, job.decision.revision) == ("w3", "old")


async def test_an_answer_whose_revision_does_not_come_back_ends_with_the_reason(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    async with routing(broker, pipeline, revision_wait_s=0.5) as one:
        asked, unstarted = request(max_tokens=20), request()
        stub = await on(clients, one, "w1", asked, revision="old")
        await clients.ask(unstarted)
        await clients.placed(unstarted)
        await clients.stub("w2", revision="new", epoch=2)
        await one.knows("w2")
        await streamed(log, asked, answer(asked, 7))
        await eventually(lambda: len(one.unfinished) == 2)
        await lose(clients, stub)
        assert (await clients.placed(unstarted, 2))[0] == "w2"  # it has streamed nothing yet
        end = await log.end(asked)
        assert end.code == Code.revision_unavailable
        assert "first 7 tokens" in end.message
        assert "--revision-wait-s" in end.message
        assert one.unfinished[unstarted.id] == (2, "w2")


async def test_a_request_waits_for_a_worker_with_its_adapter_and_ends_if_none_comes(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients
) -> None:
    served = LoraAdapter("poet", "0a", loaded=True)
    async with routing(broker, pipeline, revision_wait_s=0.5) as one:
        await clients.stub("w1", adapters=(LoraAdapter("poet", "0b"),))
        await one.knows("w1")
        gone, waits = request(lora="poet@0c"), request(lora=served.id)
        await clients.ask(gone)
        end = await log.end(gone)
        assert end.code == Code.revision_unavailable
        assert "no worker of 'm' has had LoRA adapter poet@0c for 0.5 s (--revision-wait-s)" in end.message
        await clients.ask(waits)
        await eventually(lambda: one.waiting == [waits.id])
        await clients.stub("w2", adapters=(served,))
        assert (await clients.placed(waits))[0] == "w2"
