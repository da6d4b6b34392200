"""Where a worker is asked: subjects that follow from namespace, role and name, and flags that change each."""

import pytest

from penstock.configs.flags import parse
from penstock.configs.settings import WorkerSettings
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.workers.kv_transfer.loopback import LoopbackNetwork
from tests.workers.support import LogClient, engine, run_worker


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
@pytest.mark.parametrize(("flags", "name"), [((), "worker"), (("--name", "left"), "left")])
async def test_work_comes_by_role_and_name(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, role: str, flags: tuple[str, ...], name: str
) -> None:
    settings = parse(WorkerSettings, ["--role", role, *flags], prog="worker", environ={})
    held, network = engine(memory_block_bytes=64), LoopbackNetwork("here")
    async with run_worker(broker, pipeline, held, network=network, role=settings.role, name=settings.name) as worker:
        assert worker.id.rpartition("-")[0] == name  # the rest differs between its sessions
        stream = pipeline.stream("WORK")
        consumer = await log.bus.js.consumer_info(stream, worker.id)
        assert consumer.config.filter_subject == f"{pipeline.namespace}.work.{role}.{worker.id}"
        await eventually(lambda: log.registered(worker.id))
        found = log.registered(worker.id)
        assert found is not None
        assert (found.role, found.name) == (role, settings.name)
        info = held.info
        for size in ("total_blocks", "slots", "max_model_len", "block_size", "max_batched_tokens"):
            assert getattr(found, size) == getattr(info, size) > 0
