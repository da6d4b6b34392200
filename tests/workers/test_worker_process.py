"""A whole worker process: in this process where only its logic is asked, in one of its own for signals."""

import asyncio
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from faststream import BaseMiddleware
from structlog.testing import capture_logs

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.faststream_app import JobSubscriber
from penstock.infra.model.modeldir import TINY, ModelError
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import control, fleet, wire
from penstock.schemas.jobs import Candidate, Decision, Job, Revoke, Stage
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import Finish
from penstock.workers.engines.engine_protocol import Engine, EngineError, NodeLost
from penstock.workers.run_worker import check_nodes, check_settings, clear_shared_memory, run
from penstock.workers.runners import token_backend as module
from penstock.workers.runners.token_backend import build_engine, model_path
from penstock.workers.session.process import EXIT_CONFIG, EXIT_ENGINE, EXIT_OK, EXIT_START, WorkerProcess
from tests.infra.bus.support import eventually
from tests.pipeline.support import Oracle, Process
from tests.workers.support import ControlledEngine, LogClient, answer, engine, ids, request

MODEL = "tiny"


def test_engines_send_their_spans_over_http_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("logs.setup", "sys.setswitchinterval"):
        monkeypatch.setattr(f"penstock.workers.run_worker.{name}", lambda *given, **named: None)
    protocol, settings = (
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        WorkerSettings(nodes=2),
    )  # which the native engine refuses
    for endpoint, given, used in (
        ("", None, None),
        ("http://c:4318/v1/traces", None, "http/protobuf"),
        ("http://c:4317", "grpc", "grpc"),
    ):
        monkeypatch.setenv(protocol, given or "")
        if given is None:
            monkeypatch.delenv(protocol)
        assert run(msgspec.structs.replace(settings, otlp_endpoint=endpoint)) == EXIT_CONFIG
        assert os.environ.get(protocol) == used


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "RENEW_S", 0.05)


class Served:
    """``WorkerProcess.serve`` as a task, with an engine in the test's hands."""

    def __init__(
        self,
        broker: EmbeddedNats,
        log: LogClient,
        held: ControlledEngine,
        monkeypatch: pytest.MonkeyPatch,
        drain_s: float = 20.0,
    ) -> None:
        def build(settings: WorkerSettings, path: Path, *callbacks: Callable[..., None]) -> Engine:
            return held

        monkeypatch.setattr(module, "build_engine", build)
        self.log = log
        self.engine = held
        settings = WorkerSettings(
            nats_url=broker.url("operator"),
            namespace=log.bus.subjects.namespace,
            engine="mock",
            model=str(TINY),
            served_model_name=MODEL,
            name="w",
            drain_s=drain_s,
        )
        self.worker = WorkerProcess(settings, module.TokenBackend)
        self.task = asyncio.create_task(self.worker.serve())

    async def registered(self, *, other_than: str = "") -> str:
        """The id of the registered session."""

        def found() -> str:
            known = [worker for worker, registration in self.log.registrations if registration is not None]
            return known[-1] if known and known[-1] != other_than else ""

        await eventually(lambda: found() or self.task.done())
        return found()

    async def streaming(self, worker: str, max_tokens: int = 8) -> GenerateRequest:
        """A request that the engine holds after its first token."""
        self.engine.hold()
        asked = request(model=MODEL, max_tokens=max_tokens)
        await self.log.send_job(worker, asked)
        self.engine.allow(1)
        await self.log.has_streamed(asked)
        return asked

    async def status(self) -> int:
        self.engine.resume()
        return await asyncio.wait_for(self.task, 20)

    async def drain(self, worker: str) -> None:
        """End the process in good order."""
        subject = self.log.bus.subjects.control(worker)
        reply = await self.log.bus.nc.request(subject, wire.encode(control.Drain()), timeout=5)
        assert control.decode_ok(reply.data) == control.Ok()
        assert await self.status() == EXIT_OK


async def test_a_broken_engine_ends_the_process_in_good_order(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = engine(max_running=1)
    served = Served(broker, log, held, monkeypatch)
    worker = await served.registered()
    held.hold()
    running, waiting = request(model=MODEL), request(model=MODEL)
    await log.send_job(worker, running)
    held.allow(1)
    await log.has_streamed(running)
    await log.send_job(worker, waiting)
    held.breaks_at = held.steps
    assert await served.status() == EXIT_ENGINE == 70
    back = [await log.handed_back(asked) for asked in (running, waiting)]
    assert [event.poison for event in back] == [True, False]
    assert all("the device is gone" in event.reason for event in back)
    await eventually(lambda: log.registrations[-1] == (worker, None))
    assert held.closes == 1
    assert not log.done


async def test_a_lost_machine_ends_the_process_and_blames_no_request(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = engine(max_running=1)
    served = Served(broker, log, held, monkeypatch)
    worker = await served.registered()
    running = await served.streaming(worker)
    served.worker.engine_failed(NodeLost("node 1 of 2 has ended"))
    event = await log.handed_back(running)
    assert await served.status() == EXIT_ENGINE
    assert not event.poison
    assert "node 1 of 2 has ended" in event.reason


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"nodes": 2, "engine": "trtllm", "leader_address": "a"}, "trtllm-llmapi-launch"),
        ({"nodes": 2, "engine": "vllm"}, "add --leader-address"),
        ({"nodes": 2, "engine": "vllm", "leader_address": "a", "node_rank": 2}, "the nodes are 0 to 1"),
        ({"node_rank": 1, "engine": "sglang"}, "Add --nodes"),
    ],
)
def test_nodes_that_cannot_be_one_engine_are_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_nodes(WorkerSettings(**flags))


async def test_a_drain_order_is_answered_and_ends_the_process(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = engine()
    served = Served(broker, log, held, monkeypatch)
    worker = await served.registered()
    asked = await served.streaming(worker)
    await served.drain(worker)
    assert ids((await log.end(asked)).choices[0].tokens) == answer(asked)
    await eventually(lambda: log.registrations[-1] == (worker, None))
    assert held.closes == 1


async def test_a_worker_that_is_drained_for_good_ends_with_a_status_of_its_own(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(broker, log, engine(), monkeypatch)
    worker = await served.registered()
    order = wire.encode(control.Drain(stay_down=True))
    await log.bus.nc.request(log.bus.subjects.control(worker), order, timeout=5)
    assert await served.status() == control.DRAINED


async def test_who_may_have_workers_drain_may_not_have_them_tell_or_move_blocks(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(broker, log, engine(), monkeypatch)
    worker = await served.registered()
    subject = log.bus.subjects.drain(worker)
    for order in (control.DumpKv(), control.PinPrefix("t", "reader", b"", 9.0)):
        reply = await log.bus.nc.request(subject, wire.encode(order), timeout=5)
        assert "only drain" in control.decode_ok(reply.data).error
    reply = await log.bus.nc.request(subject, wire.encode(control.Drain(stay_down=True)), timeout=5)
    assert control.decode_ok(reply.data) == control.Ok()
    assert await served.status() == control.DRAINED


async def test_a_cancel_message_reaches_the_session(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = engine()
    served = Served(broker, log, held, monkeypatch)
    worker = await served.registered()
    asked = await served.streaming(worker, max_tokens=500)
    await log.bus.nc.publish(log.bus.subjects.cancel, wire.encode(control.Cancel(asked.id, "gone")))
    await log.bus.nc.request(log.bus.subjects.control(worker), wire.encode(control.DumpKv(1)), timeout=5)
    held.resume()
    assert (await log.end(asked)).code == "cancelled"
    await served.drain(worker)


async def test_jobs_of_a_whole_process_reach_its_handler_by_the_short_way(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FastStream is given anywhere in the process may turn it off: a middleware, types to cast, a context."""
    taken: list[Any] = []
    process = JobSubscriber.process_message

    async def noted(self: JobSubscriber, msg: Any) -> Any:
        taken.append(msg)
        return await process(self, msg)

    monkeypatch.setattr(JobSubscriber, "process_message", noted)
    served = Served(broker, log, engine(), monkeypatch)
    worker = await served.registered()
    asked = request(model=MODEL)
    await log.send_job(worker, asked)
    assert (await log.end(asked)).worker == worker
    assert taken == []
    session = served.worker.session
    assert session is not None
    session._broker.add_middleware(BaseMiddleware)
    again = request(model=MODEL)
    await log.send_job(worker, again)
    assert (await log.end(again)).worker == worker
    assert len(taken) == 1
    await served.drain(worker)


async def test_after_losing_its_lease_the_process_continues_under_a_new_name(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = engine()
    served = Served(broker, log, held, monkeypatch)
    old = await served.registered()
    asked = await served.streaming(old, max_tokens=500)
    said = len(log.batches)
    session = served.worker.session
    assert session is not None
    await log.remove_key(old)
    await asyncio.wait_for(session.lost.wait(), 10)
    held.resume()
    new = await served.registered(other_than=old)
    assert new != old
    again = request(model=MODEL)
    await log.send_job(new, again)
    assert (await log.end(again)).worker == new
    session, subjects = served.worker.session, log.bus.subjects
    assert session is not None
    assert {each.subject.template for each in session._broker.subscribers} == {
        subjects.cancel,
        subjects.control(new),
        subjects.drain(new),
        subjects.work("aggregated", new),
    }, "those of the old name are gone"
    assert {batch.worker for batch in log.batches[said:]} == {new}
    assert not log.ends(asked)
    assert not log.returned
    await served.drain(new)
    assert held.closes == 1


async def test_sigterm_during_a_stream_ends_it_properly(
    broker: EmbeddedNats, log: LogClient, pipeline: Subjects, tmp_path: Path
) -> None:
    process = Process(
        tmp_path / "worker.log",
        *("worker", "--engine", "mock", "--model", str(TINY), "--namespace", pipeline.namespace),
        *("--log-format", "json", "--log-level", "debug", "--served-model-name", MODEL),
        nats_url=broker.url("operator"),
    )
    await asyncio.to_thread(process.wait_for, "worker_registered")
    worker = log.registrations[-1][0]
    asked = request(model=MODEL, max_tokens=150)  # about a second
    await log.send_job(worker, asked)
    await log.has_streamed(asked)
    assert not log.ends(asked)
    assert await asyncio.to_thread(process.stop) == 0
    end = await log.end(asked)
    assert (end.code, end.choices[0].reason) == ("", "length")
    assert ids(end.choices[0].tokens) == log.streamed(asked) == answer(asked, vocabulary=Oracle().vocabulary)
    await eventually(lambda: log.registrations[-1] == (worker, None))
    assert "drain_timeout" not in process.log.read_text()


async def test_a_worker_that_served_waits_for_streams_that_the_broker_has_lost(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.session.process.AGAIN_S", 0.05)
    monkeypatch.setattr("penstock.workers.session.process.MOST_AGAIN_S", 0.1)
    served = Served(broker, log, engine(), monkeypatch)
    worker = await served.registered()
    js, stream = log.bus.js, log.bus.subjects.stream("WORK")
    config = (await js.stream_info(stream)).config
    await js.delete_stream(stream)
    session = served.worker.session
    assert session is not None
    with capture_logs() as lines:
        session.lost.set()  # as after 5 s without its consumer
        await eventually(
            lambda: [line["event"] for line in lines].count("registration_waits") > 1 or served.task.done()
        )
        assert not served.task.done(), served.task
        assert all("streams apply" in line["action"] for line in lines if line["event"] == "registration_waits")
        await js.add_stream(config)
        again = await served.registered(other_than=worker)
    asked = request(model=MODEL)
    await log.send_job(again, asked)
    assert ids((await log.end(asked)).choices[0].tokens) == answer(asked)
    served.worker.stop()
    assert await served.status() == EXIT_OK


def test_faststream_lists_what_a_worker_reads_with_the_schemas_of_its_messages(tmp_path: Path) -> None:
    """By the command that the documentation names."""
    out = tmp_path / "asyncapi.json"
    command = ("docs", "gen", "--factory", "penstock.workers.session.process:application", "--out", str(out))
    run = subprocess.run([sys.executable, "-m", "faststream", *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = json.loads(out.read_text())
    schemas = made["components"]["schemas"]

    def payloads(title: str) -> set[str]:
        payload = made["components"]["messages"][f"{title}:SubscribeMessage"]["payload"]
        return {each["$ref"].rpartition("/")[2] for each in payload.get("oneOf", [payload])}

    found = {channel["address"]: payloads(title) for title, channel in made["channels"].items()}
    assert found == {
        "ps.work.{role}.{worker}": {"Job", "Encoded", "Prefilled", "Revoke"},
        "ps.cancel": {"Cancel"},
        "ps.ctl.{worker}": {
            *("DumpKv", "Drain", "Release", "Push", "Reserve", "Fetch", "PinPrefix", "Sleep", "Wake", "RecordTrace")
        },
        "ps.drain.{worker}": {"Drain", "Sleep", "Wake", "RecordTrace"},
    }
    decision = Decision(
        "kv", "w-1", "router", 1, candidates=(Candidate("w-1", slots=4),), route=(Stage("decode", "w"),)
    )
    job = Job(msgspec.Raw(b"{}"), 2, decision, resume=(b"abcd",), endings=(Finish("length", None, 0),))
    for message in (job, Revoke("r1", 2), control.Cancel("r1"), control.DumpKv(3), control.Drain(stay_down=True)):
        schema = {"$ref": f"#/components/schemas/{type(message).__name__}", "components": {"schemas": schemas}}
        jsonschema.validate(json.loads(msgspec.json.encode(message)), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"type": "other"}, schema)


def ended(broker: EmbeddedNats, home: Path, *flags: str, **environ: str) -> tuple[int, str]:
    """Exit status and last words of a mock worker that cannot start."""
    process = Process(
        home / "worker.log",
        *("worker", "--engine", "mock", "--model", str(TINY), "--log-format", "json", *flags),
        nats_url=broker.url("operator"),
        **environ,
    )
    return process.wait(), process.log.read_text(errors="replace")


def test_a_worker_whose_transfer_backend_is_broken_does_not_start_and_says_why(
    broker: EmbeddedNats, tmp_path: Path
) -> None:
    status, said = ended(broker, tmp_path, "--role", "prefill", UCX_TLS="no_such_transport")
    assert status == EXIT_CONFIG
    assert "start_failed" in said
    assert "NIXL" in said


def test_a_broker_that_cannot_be_used_is_reported_while_an_engine_still_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("logs.setup", "sys.setswitchinterval"):
        monkeypatch.setattr(f"penstock.workers.run_worker.{name}", lambda *given, **named: None)
    goes_on = threading.Event()

    def load(*_: object) -> Engine:
        goes_on.wait(60)
        raise EngineError("nobody waits for it")

    monkeypatch.setattr(module, "build_engine", load)
    monkeypatch.setattr(module, "JOIN_S", 0.1)
    monkeypatch.setenv("PENSTOCK_NATS_CREDS", str(tmp_path / "missing"))
    settings = WorkerSettings(name="w", engine="mock", model=str(TINY), state_dir=str(tmp_path))
    began = time.monotonic()
    assert run(settings) == EXIT_START
    assert time.monotonic() - began < 50, "it waited for the engine"
    goes_on.set()


def test_shared_memory_that_a_killed_engine_left_is_removed_and_folders_are_not(tmp_path: Path) -> None:
    (tmp_path / "psm_099df0f7").write_bytes(bytes(8192))
    (tmp_path / "sem.mp-x").write_bytes(b"1")
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "staged").write_bytes(b"2")
    (tmp_path / "link").symlink_to(tmp_path / "penstock" / "staged")
    (tmp_path / "psm of another").write_bytes(b"3")
    with (tmp_path / "psm of another").open("r+b") as used, mmap.mmap(used.fileno(), 1), capture_logs() as logged:
        clear_shared_memory(tmp_path)
        clear_shared_memory(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "penstock", "psm of another"]
    assert (tmp_path / "penstock" / "staged").exists()
    assert [(each["event"], each["files"]) for each in logged] == [("shared_memory_cleared", 2)]


def test_a_worker_whose_server_is_not_there_yet_ends_so_that_it_is_started_again(
    broker: EmbeddedNats, tmp_path: Path
) -> None:
    """With the status of a wrong setting, no supervisor would: a server that restarts would have lost its worker."""
    status, said = ended(broker, tmp_path, "--engine", "openai", "--url", "http://127.0.0.1:1")
    assert status == EXIT_START
    assert "the server at http://127.0.0.1:1" in said


def test_settings_that_contradict_each_other_end_the_process_with_the_way_out(
    broker: EmbeddedNats, tmp_path: Path
) -> None:
    flags = ("--event-plane", "zmq", "--mock-ranks", "3", "--kv-events-port", "65531")
    status, said = ended(broker, tmp_path, *flags)
    assert status == EXIT_CONFIG
    assert "use 65530 at most" in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"role": "encode"}, "needs no encode worker"),
        ({"role": "decode", "mock_ranks": 2}, "only workers of --role aggregated have ranks"),
    ],
    ids=str,
)
def test_an_engine_is_not_built_for_a_role_that_it_cannot_have(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, ModelError), match=words):
        build_engine(WorkerSettings(engine="mock", **settings), TINY)


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang"])
def test_engines_that_cannot_read_weights_of_another_directory_say_how_to_join_them(engine: Any) -> None:
    with pytest.raises(ModelError, match="shared_weights join"):
        model_path(WorkerSettings(engine=engine, model="demo-vision"))
    assert model_path(WorkerSettings(engine=engine, model="tiny")) == TINY


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"role": "decode", "prefix_cache": False}, "prefix cache"),
        ({"role": "encode", "tensor_parallel_size": 2}, "a vision tower is not split"),
        ({"engine": "mock", "tensor_parallel_size": 2}, "--engine mock shares no layers"),
        ({"role": "prefill", "transfer": "none"}, "--transfer auto"),
        ({"role": "encode", "transfer": "none"}, "--transfer auto"),
        ({"role": "decode", "scheduler_policy": "guaranteed_no_evict"}, "--role aggregated or prefill"),
        ({"kv_events_from": ("tcp://a:1",)}, "add --event-plane zmq"),
        ({"event_plane": "zmq", "prefix_cache": False}, "no KV events"),
        ({"event_plane": "zmq", "publish_events_and_metrics": False}, "no KV events"),
        ({"event_plane": "zmq", "role": "encode"}, "no KV events"),
        ({"engine": "trtllm", "scheduler_policy": "guaranteed_no_evict"}, "--extra-engine-args"),
        ({"engine": "vllm", "kv_offloading_size": 1.0}, "--engine native or mock"),
        ({"engine": "mock", "kv_disk": "cache"}, "--engine native, where"),
        ({"role": "encode", "engine": "native", "kv_disk": "cache"}, "where it keeps KV"),
        ({"engine": "vllm", "speculative_model": "ngram"}, "--extra-engine-args"),
        ({"engine": "openai", "role": "prefill", "url": "http://a"}, "leave out --role prefill"),
        ({"engine": "native", "url": "http://a"}, "the server of --engine openai"),
        ({"engine": "sglang", "logits_processor": ("a:b",)}, "runs no logits processors.* or use --engine native"),
        (
            {"engine": "sglang", "default_logits_processors": "a"},
            "runs no logits processors.* or use --engine native",
        ),
        ({"role": "encode", "logits_processor": ("a:b",)}, "--role encode runs no logits processors"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_settings(WorkerSettings(**settings))
