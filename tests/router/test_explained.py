"""``penstock inspect`` of a request with several stages: its route, the reason, the handoffs, what was given up."""

import io
import time

from rich.console import Console

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.requests.inspect import show
from penstock.log_tools.requests.inspection import inspect
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas import jobs, wire
from penstock.schemas.requests import Media, new_request_id
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from penstock.schemas.transfer import Handoff, Handoffs, Memory
from tests.infra.bus.support import eventually
from tests.router.support import Clients, endpoint, routing
from tests.workers.support import LogClient, request


async def test_the_timeline_of_a_request_with_three_stages_and_two_attempts(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    clients = Clients(log)
    bus, place = log.bus, endpoint("h", embeds=Memory(0, 3 << 20, 10))
    async with routing(broker, pipeline) as one:
        roles = {"e1": "encode", "p1": "prefill", "d1": "decode"}
        stubs = {name: await clients.stub(name, role=role, transfer=place) for name, role in roles.items()}
        await one.knows(*roles)
        media = (Media(b"i" * 32, "image/png", 1000, 2, 4),)
        asked = request(list(range(1, 402)), id=new_request_id(), media=media)
        await clients.ask(asked)
        _, job = await clients.placed(asked)
        await stubs["e1"].hand_off(job)
        await eventually(lambda: one.unfinished == {asked.id: (1, "p1")})
        stubs["d2"] = await clients.stub("d2", role="decode", transfer=place)
        await one.knows("d2")
        await stubs["d1"].stop()
        await log.remove_key("d1")
        _, again = await clients.placed(asked, 2)
        await stubs["e1"].hand_off(again)
        onward = jobs.Job(again.request, 2, again.decision, route=again.route[1:])
        await stubs["p1"].hand_off(onward)
        ticket, now = f"{asked.id}:2:decode", time.time_ns()
        ledger = (
            Handoff(ticket, "offered", "p1", "d2", now, 100),
            Handoff(ticket, "read", "p1", "d2", now + 2_000_000, 100, 10_000, 0.0015),
            Handoff("another", "offered", "p1", "d2", now, 100),
        )
        await bus.js.publish(bus.subjects.handoff("p1"), wire.encode(Handoffs("p1", ledger)))
        await eventually(lambda: one.unfinished == {asked.id: (2, "d2")})
        await stubs["d2"].finish(asked, 2)
        found_timeline = await read_timeline(bus, asked.id)
        out = io.StringIO()
        show(inspect(found_timeline, with_tokens=False), Console(file=out, width=200), now_ns=0)
        output = out.getvalue()
    await clients.stop()
    assert [routed.attempt for routed in found_timeline.routed] == [1, 2]
    for line in (
        "to encode e1 → prefill p1 → decode d1, after waiting",
        "to encode e1 → prefill p1 → decode d2, after waiting",
        "; split: 100 of 100 blocks to compute, worth a transfer on the same host; media through e1",
        "e1: handed embeddings to prefill p1: 100 blocks (300.00 MiB) of pool embeds over",
        "revoked at p1",
        "p1: handed KV to decode d2: 100 blocks (0.01 MiB) of pool kv over nixl, lease of",
        f"ticket {ticket}",
        "p1: offered, 100 blocks",
        "d2: read, 100 blocks, 0.01 MiB in 1.5 ms",
    ):
        assert line in output, output
    assert "another" not in output
    found = inspect(found_timeline, with_tokens=False)
    stages = [(phase.attempt, phase.name, phase.where) for phase in found.phases if phase.service == "worker"]
    stages = [each for each in stages if each[1] in ("encode", "prefill", "decode")]
    expected = [(1, "encode", "e1"), (1, "prefill", "p1")]
    assert stages == [*expected, (2, "encode", "e1"), (2, "prefill", "p1"), (2, "decode", "d2")]
    rows = [cells for line in output.splitlines() if "/" in line and (cells := line.replace(" ←", "").split())]
    shown = {cells[0]: cells[6] for cells in rows if cells[0] in ("e1", "p1", "d1", "d2") and len(cells) >= 7}
    assert shown == {"e1": "encode", "p1": "prefill", "d1": "decode", "d2": "decode"}


async def test_a_request_of_one_stage_has_no_lines_about_stages(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    clients = Clients(log)
    async with routing(broker, pipeline) as one:
        await clients.stub("w1")
        await one.knows("w1")
        asked = request(id=new_request_id())
        await clients.ask(asked)
        await clients.placed(asked)
        out = io.StringIO()
        found = inspect(await read_timeline(log.bus, asked.id), with_tokens=False)
        show(found, Console(file=out, width=200), now_ns=0)
    await clients.stop()
    output = out.getvalue()
    assert "in mode kv to w1, after waiting" in output
    for word in ("→", "split", "stage", "handed"):
        assert word not in output
    assert HEADER_MSG_ID not in output
