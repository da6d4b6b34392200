"""``penstock top``: what it computes, and the whole command on a real nats-server."""

import asyncio
import io
import json
import os
import pty
import select
import sys
import termios
import time

import msgspec
import pytest
from rich.console import Console

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import by_name
from penstock.infra.nats_server.retention import StreamUse
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.observe import (
    Count,
    DeploymentSnapshot,
    GatewaysView,
    Observer,
    QueueView,
    gateways_line,
    held_by_class,
    hit_rate,
    rates,
    summed,
    tenant_rows,
    workers,
)
from penstock.operate.top import bar, picture, run
from penstock.schemas import wire
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import GpuUse, Load, Registration
from penstock.schemas.routers import TENANTS, HeldByTenant, LostLeases, Member
from penstock.schemas.subjects import Subjects, cell_namespace
from penstock.schemas.summary import RequestSummary, State
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, end
from tests.penstock.operate.support import holds


def summary(worker: str = "w-1", *, state: State = "done", prompt: int = 100, cached: int = 0, out: int = 10,
            ttft_ms: int = 10) -> RequestSummary:  # fmt: skip
    return RequestSummary(
        "id", "m", state, 0, worker=worker, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=out,
        first_token_ns=ttft_ms * 1_000_000, ended_ns=100_000_000,
    )  # fmt: skip


def registration(worker: str, **more: object) -> Registration:
    fields = {"model": "m", "role": "aggregated", "engine": "mock", "epoch": 1, "block_size": 32, "total_blocks": 100,
              "slots": 8, "max_model_len": 64, "name": worker}  # fmt: skip
    return Registration(worker, **(fields | more))  # type: ignore[arg-type]


def test_rates_are_taken_between_the_first_and_the_last_look() -> None:
    seen = rates([Count(100.0, 50, 40), Count(101.0, 99, 99), Count(105.0, 100, 60)], [summary(), summary(out=30)])
    assert (seen.accepted_per_s, seen.ended_per_s, seen.output_tokens_per_s) == (10.0, 4.0, 80.0)


def test_nothing_ended_means_that_times_and_shares_are_unknown() -> None:
    seen = rates([Count(1.0, 0, 0)], [])
    assert (seen.accepted_per_s, seen.failed_share, seen.hit_rate, seen.ttft_p95_ms) == (0.0, None, None, None)


def test_a_hit_rate_counts_tokens_not_requests() -> None:
    assert hit_rate([summary(prompt=900, cached=900), summary(prompt=100)]) == 0.9


def test_workers_share_the_output_by_what_they_finished() -> None:
    found = [registration("w-1", dp_size=2), registration("w-2")]
    one, two = workers(found, [summary("w-1", out=30), summary("w-2", out=10, cached=50)], 400.0)
    assert (one.tokens_per_s, two.tokens_per_s) == (300.0, 100.0)
    assert (one.slots, one.total_blocks, two.hit_rate) == (16, 200, 0.5)


def test_workers_stand_in_the_order_of_the_numbers_in_their_names() -> None:
    names = ["a", "a-worker-2", "a-worker-10", "b-worker-1", "worker-0", "worker-2", "worker-10", "worker-10-1"]
    assert sorted({*names}, key=lambda name: by_name(name, "")) == names


def test_workers_that_are_stopped_or_hang_are_shown_although_their_lease_says_nothing_of_it() -> None:
    found = [
        registration("w-1", load=Load(slowest_step_ms=6_000)),
        registration("w-2", load=Load(running=1, quiet_ms=12_000)),
        registration("w-3"),
    ]
    lost = [LostLeases("w-1", "aggregated", "m", 3, 0), LostLeases("w-0", "aggregated", "m", 1, 0)]
    seen = workers(found, [], 0.0, lost)
    assert [(each.name, each.state, each.lost) for each in seen] == [
        ("w-0", "lost", 1), ("w-1", "ready", 3), ("w-2", "stalled", 0), ("w-3", "ready", 0)
    ]  # fmt: skip
    printed = io.StringIO()
    snapshot = DeploymentSnapshot(1, "ps", tuple(seen), (), rates([Count(1.0, 0, 0)], []), (), ())
    Console(file=printed, width=140).print(picture(snapshot, 140))
    for said in (
        "2 of 4 workers ready", "w-1 lost its lease 3 times in ten minutes",
        "w-0 lost its lease once in ten minutes; it is",
        "w-2 holds its lease, but its engine did nothing for 12 s", "slowest step", "6.00 s",
    ):  # fmt: skip
        assert said in printed.getvalue()


def test_the_use_of_gpus_is_a_column_where_workers_have_some() -> None:
    two = (GpuUse("GPU-a", 80 << 30, 70 << 30, 90), GpuUse("GPU-b", 80 << 30, 10 << 30, 50))
    loads = [Load(gpus=two), Load(gpus=(GpuUse("MIG-a", 1 << 34, 3 << 30),)), Load(gpus=(GpuUse(error="GPU is lost"),))]

    def printed(*loads: Load) -> str:
        seen = workers([registration(f"w-{at}", load=load) for at, load in enumerate(loads)], [], 0.0)
        snapshot = DeploymentSnapshot(1, "ps", tuple(seen), (), rates([Count(1.0, 0, 0)], []), (), ())
        out = io.StringIO()
        Console(file=out, width=160).print(picture(snapshot, 160))
        return out.getvalue()

    found = printed(*loads, Load())
    assert all(said in found for said in ("GPUs", "70% busy, 80.0 GiB", " 3.0 GiB", "unreadable"))
    assert "GPUs" not in printed(Load())


def test_a_worker_that_is_much_slower_than_its_peers_is_marked() -> None:
    def paced(name: str, factor: int) -> Registration:
        load = Load(latency_us=10_000 * factor, engine_us=2_000 * factor, work_ns=100_000 * factor)
        return registration(name, load=load)

    seen = workers([paced("w-1", 1), paced("w-2", 20), registration("idle")], [], 0.0)
    assert [each.slowness for each in seen] == [0.05, 20.0, None]
    for width in (60, 150):  # the line stays where the column does not fit
        printed = io.StringIO()
        snapshot = DeploymentSnapshot(1, "ps", tuple(seen), (), rates([Count(1.0, 0, 0)], []), (), ())
        Console(file=printed, width=width).print(picture(snapshot, width))
        assert "w-2 is 20 times slower than its peers" in printed.getvalue()
        assert ("200.0 ms x20" in printed.getvalue()) is (width == 150)


def test_the_number_of_gateways_has_its_ends_and_the_last_change() -> None:
    assert gateways_line(GatewaysView(4, 0, 4, 4, "", 0), 1) == "gateways 4"
    view = GatewaysView(1, 2, 1, 3, "gateway-1 leaves: together 0.1 cores busy", 20_000_000_000)
    line = "gateways 1 (1 to 3), 2 leaving; gateway-1 leaves 40 s ago: together 0.1 cores busy"
    assert gateways_line(view, 60_000_000_000) == line
    quiet = DeploymentSnapshot(1, "ps", (), (), rates([Count(1.0, 0, 0)], []), (), (), gateways=view)
    out = io.StringIO()
    Console(width=120, file=out).print(picture(msgspec.structs.replace(quiet, at_ns=60_000_000_000), 120))
    assert line in out.getvalue()


def test_what_ended_has_no_heading_while_nothing_has() -> None:
    quiet = DeploymentSnapshot(1, "ps", (), (), rates([Count(1.0, 0, 0)], []), (), ())
    for snapshot, shown in (quiet, False), (msgspec.structs.replace(quiet, recent=(summary(),)), True):
        printed = io.StringIO()
        Console(file=printed, width=100).print(picture(snapshot, 100))
        assert ("ended last" in printed.getvalue()) is shown


def test_a_bar_of_nothing_is_a_dash_and_none_is_longer_than_full() -> None:
    assert bar(1, 0) == "-"
    assert "100%" in bar(30, 10)


def test_what_routers_hold_is_added_up_by_class_and_tenant() -> None:
    many = tuple((f"t-{number}", 9) for number in range(TENANTS))
    one = Member("r-1", 1, held=(HeldByTenant("standard", (*many[1:], ("ann", 5)), 2), HeldByTenant("later", ())))
    two = Member("r-2", 1, held=(HeldByTenant("standard", (("ann", 5), *many[:1])), HeldByTenant("batch", (), 4)))
    held = held_by_class([one, two])
    assert held["standard"] == HeldByTenant("standard", (("ann", 10), *many[:-1]), 2 + 9)
    assert held["batch"] == HeldByTenant("batch", (), 4)
    assert held["interactive"] == HeldByTenant("interactive")


def test_a_row_for_each_of_the_tenants_that_have_most_of_all_classes() -> None:
    one = QueueView("interactive", 0, 9, (("ann", 5), ("zoe", 1)), 1)
    many = tuple((f"t-{number}", 4) for number in range(TENANTS - 1))
    rows = tenant_rows([one, QueueView("batch", 0, 9, (("bob", 9), *many), 2)])
    assert rows[:3] == [("bob", (0, 9)), ("ann", (5, 0)), ("t-0", (0, 4))]
    assert (len(rows), rows[-1]) == (TENANTS + 1, ("", (2, 6))), "zoe and one more are among the others"
    assert tenant_rows([QueueView("batch", 3, 0)]) == []


async def test_a_look_sees_workers_queues_and_what_ended(bus: Bus) -> None:
    me = registration("w-1", load=Load(running=3, used_blocks=40))
    await bus.js.publish(bus.subjects.lease("w-1"), wire.encode(me))
    await holds(bus, ("acme", 7), others=2)
    observer = Observer(bus)
    await observer.look()
    waiting, over = await accept(bus), await accept(bus)
    await end(bus, over, 1, 2, code="invalid_request")
    seen = await observer.look()
    (worker,) = seen.workers
    assert (worker.running, worker.used_blocks, worker.state) == (3, 40, "ready")
    assert {queue.priority: queue.unread for queue in seen.queues}[waiting.priority.value] == 2
    assert {queue.priority: (queue.tenants, queue.others) for queue in seen.queues}["batch"] == ((("acme", 7),), 2)
    assert [each.id for each in seen.recent] == [over.id]
    assert seen.rates.failed_share == 1.0
    assert seen.rates.accepted_per_s > seen.rates.ended_per_s > 0
    text = io.StringIO()
    Console(file=text, width=150).print(picture(seen, 150))
    for part in ("w-1", "1 of 1 workers ready", "invalid_request", "REQUESTS", "failed 100%", "acme", "others"):
        assert part in text.getvalue()


def test_rates_of_cells_add_up() -> None:
    one, other = [Count(1.0, 10, 10), Count(3.0, 20, 14)], [Count(2.0, 5, 5), Count(3.0, 6, 8)]
    assert (rates(one, []).accepted_per_s, rates(one, []).ended_per_s) == (5.0, 2.0)
    both = rates(one, [summary(out=8)], other, [Count(9.0, 1, 1)])
    assert (both.accepted_per_s, both.ended_per_s, both.output_tokens_per_s) == (6.0, 5.0, 40.0)


def test_streams_of_cells_are_shown_as_one() -> None:
    one = StreamUse("ps_DONE", "records", 3, 100, 1000, 50.0, 900.0, 2, last_seq=9)
    other = StreamUse("ps-1_DONE", "records", 4, 300, 1000, 70.0, 900.0, 1, ("max_age",), 5)
    bucket = StreamUse("KV_ps-1_workers", "", 1, 10, 20, 1.0, 0.0, 0)
    done, workers_ = summed([("ps", [one]), ("ps-1", [other, bucket])])
    assert (done.name, done.messages, done.bytes, done.max_bytes, done.oldest_s) == ("ps_DONE", 7, 400, 2000, 70.0)
    assert (done.last_seq, done.consumers, done.operator_set) == (14, 3, ("max_age",))
    assert workers_ == bucket


async def test_a_look_sees_all_cells_and_names_those_that_do_not_answer(broker: EmbeddedNats, bus: Bus) -> None:
    home, namespace = bus.subjects.namespace, cell_namespace(bus.subjects.namespace, 1)
    async with opened(broker, Subjects(namespace)) as cell:
        for worker, at in (("w-1", bus), ("w-2", cell)):
            await at.js.publish(at.subjects.lease(worker), wire.encode(registration(worker)))
        await holds(bus, ("acme", 7))
        await holds(cell, ("acme", 3), others=1)
        observer = Observer(bus, cell, numbers=(4, 5))
        await observer.look()
        requests = [await accept(at) for at in (bus, cell, cell)]
        for at, request in zip((bus, cell), requests[:2], strict=True):
            await end(at, request, 1)
        seen = await observer.look()
        assert {each.id: each.cell for each in seen.workers} == {"w-1": 4, "w-2": 5}
        assert [(each.number, each.namespace, each.workers) for each in seen.cells] == [(4, home, 1), (5, namespace, 1)]
        queues = {queue.priority: queue for queue in seen.queues}
        assert queues[requests[0].priority.value].unread == 3
        assert (queues["batch"].tenants, queues["batch"].others) == ((("acme", 10),), 1)
        assert [each.id for each in seen.recent] == [requests[1].id, requests[0].id]
        assert {each.name: each.messages for each in seen.streams}[bus.subjects.stream("REQUESTS")] == 3
        assert seen.rates.accepted_per_s > seen.rates.ended_per_s > 0

        await cell.js.delete_stream(f"KV_{cell.subjects.bucket('workers')}")
        seen = await observer.look()
        assert [each.id for each in seen.workers] == ["w-1"]
        assert [bool(each.problem) for each in seen.cells] == [False, True]
        text = io.StringIO()
        Console(file=text, width=150).print(picture(seen, 150))
        assert f"cell 5: {seen.cells[1].problem}"[:60] in text.getvalue()
    await bus.js.delete_stream(f"KV_{bus.subjects.bucket('workers')}")
    with pytest.raises(ServingError):
        await observer.look()


async def test_a_cell_whose_broker_is_away_is_shown_as_such(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace]
    there += ["--cells", "2", "--cell-nats-urls", "nats://127.0.0.1:1"]
    assert await asyncio.to_thread(run, ["--once", "--json", "--interval", "200ms", *there]) == 0
    home, away = json.loads(capsys.readouterr().out)["cells"]
    assert (home["number"], home["problem"]) == (0, "")
    assert (away["number"], away["namespace"]) == (1, cell_namespace(bus.subjects.namespace, 1))
    assert "127.0.0.1:1" in away["problem"]


async def test_the_command_prints_one_object_per_look(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--once", "--json", "--interval", "200ms", "--nats-url", broker.url()]
    assert await asyncio.to_thread(run, [*flags, "--namespace", bus.subjects.namespace]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["namespace"] == bus.subjects.namespace
    assert abs(seen["at_ns"] - time.time_ns()) < 60e9
    assert {queue["priority"] for queue in seen["queues"]} == {"interactive", "standard", "batch"}


async def test_q_ends_it_and_the_terminal_is_as_before(bus: Bus, broker: EmbeddedNats) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    flags = ["--interval", "200ms", "--nats-url", broker.url(), "--namespace", bus.subjects.namespace]
    top = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "top", *flags, stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(30):
            shown = b""
            while b"workers ready" not in shown:
                shown += await asyncio.to_thread(os.read, ours, 1 << 16)
            assert not termios.tcgetattr(theirs)[3] & termios.ICANON
            os.write(ours, b"xq")
            while top.returncode is None:  # what it writes has to be read, or it waits
                if (await asyncio.to_thread(select.select, [ours], [], [], 0.1))[0]:
                    os.read(ours, 1 << 16)
        assert top.returncode == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        if top.returncode is None:
            top.kill()
            await top.wait()
        os.close(ours)
        os.close(theirs)
