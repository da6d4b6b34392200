"""The generated log is one that every reader of logs understands."""

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.requests.find_requests import ended
from penstock.log_tools.requests.inspection import inspect
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas.subjects import Subjects
from penstock.schemas.summary import Criteria
from tests.infra.bus.support import opened
from tests.perf.recording import record


async def test_every_recorded_request_has_its_whole_way_in_the_log(broker: EmbeddedNats, subjects: Subjects) -> None:
    async with opened(broker, subjects) as bus:
        ids = await record(bus, 300, seed=7)
        found = {each.summary.id: each.summary async for _, each in ended(bus, Criteria())}
        assert set(found) == set(ids)
        assert {each.state for each in found.values()} == {"done", "failed", "cancelled"}
        twice = [name for name in ids if found[name].attempts == 2]
        assert twice
        for name in (*twice[:2], *ids[:6], ids[-1]):
            timeline = await read_timeline(bus, name, with_tokens=True)
            seen = inspect(timeline)
            assert seen.missing == ()
            kinds = {entry.kind for entry in seen.events}
            assert {"accepted", "queued", "routed", "assigned", "tokens", "done"} <= kinds
            split = len(timeline.routed[-1].decision.route) == 2
            assert {"prefilled", "handed_off", "transfer"} <= kinds or not split
            assert ("returned" in kinds) == (name in twice)
