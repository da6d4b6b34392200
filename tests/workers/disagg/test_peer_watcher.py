"""Which workers are reached when they register, on a real nats-server, and what is said of those that are not."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from penstock.workers.kv_transfer.transport_thread import TransportThread
from tests.infra.bus.support import eventually
from tests.workers.kv_transfer.loopback import LoopbackNetwork
from tests.workers.support import engine, run_worker


@pytest.mark.parametrize("reached", [True, False])
async def test_partners_are_reached_before_any_block_moves_and_those_that_cannot_be_are_named(
    broker: EmbeddedNats, pipeline: Subjects, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, reads = TransportThread.connect, list[bool]()

    def connecting(self: TransportThread, *peer: Any, **how: Any) -> Any:
        reads.append(how["reads"])
        return connect(self, *peer, **how)

    monkeypatch.setattr(TransportThread, "connect", connecting)
    here = LoopbackNetwork("here")
    there = here if reached else LoopbackNetwork("there")  # no way leads to it, though it is registered
    with capture_logs() as lines:
        async with (
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=here, role="prefill") as prefill,
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=there, role="decode") as decode,
        ):
            wanted = "peer_connected" if reached else "peer_connect_failed"
            await eventually(lambda: len([line for line in lines if line["event"] == wanted]) == 2)
            logged = [line for line in lines if line["event"].startswith("peer_")]
            assert {line["worker"] for line in logged} == {prefill.id, decode.id}
            assert {line["event"] for line in logged} == {wanted}
            assert sorted(reads) == [False, True], "the decode worker alone has memory for reads"
            if not reached:
                assert all(line["log_level"] == "warning" for line in logged)
                assert all("is not there" in line["error"] for line in logged)


async def test_workers_that_never_meet_are_not_reached(broker: EmbeddedNats, pipeline: Subjects) -> None:
    """Of the same role, or of another model, unless prefixes move."""
    alone: dict[str, Any] = {"move_prefixes": "off"}
    network = LoopbackNetwork("here")
    with capture_logs() as lines:
        async with (
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=network, role="prefill", **alone),
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=network, role="prefill", **alone),
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=network, role="decode", model="other"),
            run_worker(
                broker, pipeline, engine(memory_block_bytes=64), network=network, role="decode", **alone
            ) as last,
        ):
            await eventually(lambda: sum(line["event"] == "peer_connected" for line in lines) >= 4)
            logged = [line["worker"] for line in lines if line["event"] == "peer_connected"]
            assert sorted(logged.count(worker) for worker in set(logged)) == [
                1,
                1,
                2,
            ]  # both prefills by it, it by both
            assert logged.count(last.id) == 2


@pytest.mark.parametrize(("host", "reached"), [("here", 6), ("", 0)], ids=["same host", "elsewhere"])
async def test_workers_that_move_prefixes_meet_where_they_can_read_memory(
    broker: EmbeddedNats, pipeline: Subjects, host: str, reached: int
) -> None:
    network, moves = LoopbackNetwork(host), {"move_prefixes": "on"}
    with capture_logs() as lines:
        async with (
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=network, **moves),
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=network, **moves) as second,
            run_worker(broker, pipeline, engine(memory_block_bytes=64), network=network, **moves) as third,
        ):
            await eventually(lambda: sum(line["event"] == "peer_connected" for line in lines) >= reached)
            await second.frees_everything()
            await third.frees_everything()
    assert sum(line["event"] == "peer_connected" for line in lines) == reached
