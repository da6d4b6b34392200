"""One small case of each kind that ``make chaos`` draws at random: every client and every disturbance, for seconds."""

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import recipes
from tests.chaos.launch import Starts
from tests.chaos.plan import BROKER, Act, Disturbance, Way
from tests.chaos.run import Options, Report, run

pytestmark = pytest.mark.timeout(300)

SECONDS = 22.0
NOTHING = Disturbance(99.0, Act.kill, "")  # behind the end
# Two at once, the links in either direction, a disk that is full, and a stop that outlasts leases and drains.
DISTURBANCES = (
    Disturbance(2.0, Act.stop, "worker-2", hold_s=16.0),
    Disturbance(3.0, Act.stall, "worker-0", hold_s=4.5, way=Way.out),
    Disturbance(4.0, Act.stall, "gateway-0", hold_s=3.5, way=Way.into),
    Disturbance(8.0, Act.kill, "worker-1"),
    Disturbance(8.0, Act.kill, BROKER),
    Disturbance(11.0, Act.stall, "router-0", hold_s=3.0, way=Way.out),
    Disturbance(13.0, Act.kill, "gateway-1"),
    Disturbance(13.0, Act.restart, "router-1"),
    Disturbance(16.0, Act.fill, BROKER, hold_s=3.0),
)


def asked(report: Report) -> Counter[str]:
    return Counter({kind: row["asked"] for kind, row in report.judgement.rows.items()})


@pytest.mark.slow  # infra/bus/test_erase and request_log/test_catch_up show what a clock that is ahead must not change
async def test_clocks_that_are_30_s_apart_change_no_answer_and_no_deletion(tmp_path: Path) -> None:
    """A gateway ahead made ids of times that had not come: what it deleted was left in the log, and said to be gone."""
    seed = next(seed for seed in range(99) if far_apart(Starts("", seed=seed, clock_s=30.0)))
    kinds = ("delete", "chain", "background", "repeat", "nats", "nats-repeat", "cancel")
    options = Options(6.0, seed=seed, clients=8, kinds=kinds, each=1, clock_s=30.0, disturbances=(NOTHING,))
    report = await run(tmp_path, options, print)
    assert report.clean, report.text
    assert asked(report)["delete"]


def far_apart(starts: Starts) -> bool:
    """A gateway ahead of the other, of its router and of a worker."""
    shifts = {name: starts.shift_s(name, 0) for name in ("gateway-0", "gateway-1", "router-0", "worker-0", "worker-1")}
    return shifts["gateway-0"] == 15.0 == shifts["worker-1"] and {*shifts.values()} == {15.0, -15.0}


async def test_every_kind_of_client_is_served_right_through_every_kind_of_disturbance(tmp_path: Path) -> None:
    said: list[str] = []
    # Those are in the slice of test_disaggregated_survival: what is deleted while the disk is full may come back with
    # it, and pipeline/test_no_store_restart has the deaths of a broker whose memory is needed.
    kinds = tuple(kind for kind in recipes.KINDS if kind not in recipes.PRIVATE)
    options = Options(SECONDS, seed=5, clients=10, kinds=kinds, each=1, disturbances=DISTURBANCES)
    report = await run(tmp_path, options, said.append)
    assert report.clean, "\n".join([*said, report.text])
    there = set(kinds) - {"image", "picture"}
    assert len(set(asked(report)) & there) > len(there) * 0.8, "some may not have had their turn on a loaded machine"
    done = " ".join(said)
    assert "carries nothing out" in done
    assert "carries nothing in" in done
    assert done.count("kill ") == 3


@pytest.mark.slow  # its topology is one more for `make chaos`; pipeline/test_fallback shows each way alone
async def test_requests_whose_model_loses_its_only_worker_are_answered_once_by_another(tmp_path: Path) -> None:
    """Both models compute the same, so that an answer does not depend on which of them gave it."""
    kinds = ("stream", "whole", "nats", "messages", "responses")
    stopped = Disturbance(0.0, Act.stop, "tiny-worker", hold_s=6.0)  # before it has answered anything
    disturbances = (stopped, *(Disturbance(at, Act.kill, "tiny-worker") for at in (9.0, 12.0)))
    options = Options(15.0, seed=5, topology="fallback", clients=8, kinds=kinds, each=1, disturbances=disturbances)
    report = await run(tmp_path, options, print)
    assert report.clean, report.text
    logs = [each.read_text(errors="replace") for each in sorted(tmp_path.rglob("router-*.log"))]  # noqa: ASYNC240
    assert "request_fell_back" in "".join(logs)
