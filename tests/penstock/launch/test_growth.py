"""What joins a running deployment, workers and cells, is as if it had been started with it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.settings import GatewaySettings, WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.launch.groups import PlanError, WorkerFleet, WorkerGroup, fleet_of
from penstock.launch.plan import (
    PlannedProcess,
    cell_of,
    further,
    held,
    in_cells,
    joined_cell,
    kind_of,
    lacking_cells,
    of_further_cells,
    plan,
    resumed,
    spared_worker,
)
from penstock.launch.state import CellCounts, read_cells, write_cells


def url(role: str, cell: int) -> str:
    return f"nats://{role}@h"


def deployment(up: UpSettings, gpus: tuple[str, ...] | None = None) -> tuple[WorkerFleet, list[PlannedProcess]]:
    fleet = fleet_of(up)
    return fleet, plan(up, fleet, ports=[8000], url=url, sys_url=lambda cell: "", cores=4, gpus=gpus)


def test_a_further_worker_is_as_the_deployment_would_have_started_it() -> None:
    up = UpSettings(gateways="1", cells=1, engine="mock", prefill=1, decode=2, mock_speedup=3.0)
    fleet, children = deployment(up)
    larger = UpSettings(gateways="1", cells=1, engine="mock", prefill=1, decode=4, mock_speedup=3.0)
    expected = {child.name: child for child in deployment(larger)[1]}
    added = further(up, fleet, ["decode-2", "decode-3"], children, url=url, cores=4)
    assert added == [expected["decode-2"], expected["decode-3"]]
    assert isinstance(added[0].settings, WorkerSettings)
    assert added[0].settings.mock_speedup == 3.0


def test_metrics_ports_are_dealt_out_in_order() -> None:
    up = UpSettings(gateways="1", cells=1, engine="mock")
    fleet, children = deployment(up)
    added = further(up, fleet, ["worker-1", "worker-2"], children, url=url, cores=4, metrics_ports=[9100, 9101])
    assert [child.metrics_port for child in added] == [9100, 9101]


def test_a_role_without_workers_is_refused() -> None:
    up = UpSettings(gateways="1", cells=1, engine="mock")
    fleet, children = deployment(up)
    with pytest.raises(PlanError, match=r"'decode-0' can be added: this deployment has worker-N"):
        further(up, fleet, ["decode-0"], children, url=url, cores=4)


def test_gpus_that_are_in_use_are_not_given_again() -> None:
    group = WorkerGroup("aggregated", 1, {"role": "aggregated", "engine": "trtllm", "model": "m"}, gpus=2, alone=True)
    fleet, up = WorkerFleet((group,), "trtllm", "m", 32), UpSettings(cells=1, engine="trtllm")
    there = [PlannedProcess("worker-0", "worker", WorkerSettings(), ("0", "1"))]
    (added,) = further(up, fleet, ["worker-1"], there, url=url, cores=4, gpus=("0", "1", "2", "3"))
    assert added.gpus == ("2", "3")
    with pytest.raises(PlanError, match="worker-2 needs 2 GPUs, 0 of 4 are free"):
        further(up, fleet, ["worker-2"], [*there, added], url=url, cores=4, gpus=("0", "1", "2", "3"))


def test_engines_that_share_gpus_take_turns_when_none_is_free() -> None:
    group = WorkerGroup("aggregated", 2, {"role": "aggregated", "engine": "native", "model": "m"}, gpus=1)
    there = [PlannedProcess(f"worker-{n}", "worker", WorkerSettings(), (str(n),)) for n in range(2)]
    added = further(
        UpSettings(cells=1), WorkerFleet((group,), "native", "m", 32), ["worker-2", "worker-3"], there,
        url=url, cores=4,
        gpus=("0", "1"),
    )  # fmt: skip
    assert [child.gpus for child in added] == [("0",), ("1",)]


def apart(engine: str, prefill: int, decode: int, **more: Any) -> WorkerFleet:
    counts = {"prefill": prefill, "decode": decode}
    groups = (
        WorkerGroup(role, n, {"role": role, "engine": engine, "model": "m"}, **more) for role, n in counts.items()
    )
    return WorkerFleet(tuple(groups), engine, "m", 32)


def on_gpu(name: str, *gpus: str) -> PlannedProcess:
    return PlannedProcess(name, "worker", WorkerSettings(), gpus)


def test_the_gpu_of_a_drained_worker_goes_to_one_of_another_role() -> None:
    """So a planner moves workers between roles, and back."""
    roles = [
        WorkerGroup(r, n, {"role": r, "engine": "native", "model": "m"}, gpus=1)
        for r, n in (("prefill", 1), ("decode", 3))
    ]
    fleet, gpus = WorkerFleet(tuple(roles), "native", "m", 32), ("0", "1", "2", "3")
    prefill, *decoders = on_gpu("prefill-0", "0"), *(on_gpu(f"decode-{n}", str(n + 1)) for n in range(3))
    (added,) = further(UpSettings(cells=1), fleet, ["prefill-1"], [prefill, *decoders[:2]], url=url, cores=4, gpus=gpus)
    assert added.gpus == ("3",)
    there = [prefill, added, decoders[0]]  # meanwhile decode-1 was drained, too
    assert resumed(fleet, decoders[2], there, gpus).gpus == ("2",)
    assert resumed(fleet, decoders[1], there, gpus) == decoders[1]
    assert resumed(fleet, decoders[2], [*there, decoders[1]], gpus).gpus == ("3",), "as many share GPUs as there were"


def test_a_drained_worker_whose_gpus_others_have_stays_away() -> None:
    roles = [
        WorkerGroup(r, 1, {"role": r, "engine": "trtllm", "model": "m"}, gpus=2, alone=True)
        for r in ("prefill", "decode")
    ]
    fleet = WorkerFleet(tuple(roles), "trtllm", "m", 32)
    there = [on_gpu("prefill-0", "0", "1"), on_gpu("prefill-1", "2", "3")]
    with pytest.raises(PlanError, match="decode-0 needs 2 GPUs, 0 of 4 are free"):
        resumed(fleet, on_gpu("decode-0", "2", "3"), there, ("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("gpus", "expected"), [(("0", "1"), [(), ("0",), ("1",)]), ((), [(), (), ()]), (None, [(), ("all",), ("all",)])]
)
def test_what_a_worker_holds_of_gpus_is_known_also_where_engines_choose(
    gpus: tuple[str, ...] | None, expected: list[tuple[str, ...]]
) -> None:
    fleet = apart("native", 1, 1, gpus=1)
    planned = plan(UpSettings(cells=1), fleet, ports=[8000], url=url, sys_url=lambda cell: "", cores=4, gpus=gpus)
    by_name = {each.name: each for each in planned}
    assert [held(fleet, by_name[name], gpus) for name in ("router-0", "prefill-0", "decode-0")] == expected
    assert held(fleet, replace(by_name["prefill-0"], name="prefill-3"), gpus) == expected[1]


def of_cell(role: str, cell: int) -> str:
    return f"nats://{role}@h{cell}"


def in_several(up: UpSettings, active: int = 0) -> dict[str, PlannedProcess]:
    children = plan(
        up, fleet_of(up), active=active, ports=[8000, 8001, 8002], url=of_cell, sys_url=lambda cell: f"sys{cell}",
        cores=4,
    )  # fmt: skip
    return {child.name: child for child in children}


def moved(up: UpSettings, children: Mapping[str, PlannedProcess], active: int) -> dict[str, PlannedProcess]:
    placed = in_cells(children.values(), up, active, url=of_cell, sys_url=lambda cell: f"sys{cell}")
    return {child.name: child for child in placed}


def test_processes_that_get_cells_are_as_if_they_had_been_started_with_them() -> None:
    one = UpSettings(engine="mock", workers=5, routers=2, cells=1, otlp_endpoint="http://h:1")
    three = msgspec.structs.replace(one, cells=3)
    there = in_several(one)
    added = {child.name: child for child in of_further_cells(three, 1)}
    assert list(added) == ["router-2", "trace-1", "trace-2"]
    assert moved(three, there | added, 3) == in_several(three)
    assert moved(three, in_several(three), 3) == in_several(three)


def test_of_fewer_active_cells_gateways_read_the_others_and_workers_leave_them() -> None:
    up = UpSettings(engine="mock", workers=5, cells=4)
    children = in_several(up, active=2)
    assert [children[f"worker-{n}"].cell for n in range(5)] == [0, 1, 0, 1, 0]
    assert [children[f"router-{n}"].cell for n in range(4)] == [0, 1, 2, 3]
    gateway = children["gateway-2"].settings
    assert isinstance(gateway, GatewaySettings)
    assert (gateway.cells, gateway.active_cells, gateway.nearest_cell) == (4, 2, 0)
    assert gateway.cell_nats_urls == ("nats://gateway@h1", "nats://gateway@h2", "nats://gateway@h3")
    assert moved(up, in_several(up), 2) == children


@given(st.integers(1, 9), st.integers(1, 9), st.integers(9, 20))
def test_each_cell_that_stays_active_keeps_its_first_worker(before: int, after: int, workers: int) -> None:
    names = [f"worker-{number}" for number in range(workers)]
    for cell in range(min(before, after)):
        first = next(name for name in names if cell_of(name, before) == cell)
        assert cell_of(first, after) == cell


fleets = st.dictionaries(
    st.tuples(st.sampled_from(["worker", "prefill"]), st.integers(0, 30)).map(lambda each: f"{each[0]}-{each[1]}"),
    st.integers(0, 3),
)


@given(fleets)
def test_workers_move_one_by_one_until_no_cell_lacks_them(workers: dict[str, int]) -> None:
    for _ in range(len(workers) + 1):
        lacking = sorted(lacking_cells(workers, 4))
        if not lacking:
            break
        kind, cell = lacking[0]
        name = spared_worker(kind, workers, 4)
        before = Counter(at for other, at in workers.items() if kind_of(other) == kind)
        assert kind_of(name) == kind
        assert before[workers[name]] >= before[cell] + 2, "the other cell has more than this one nevertheless"
        workers[name] = cell
    assert not lacking_cells(workers, 4)
    for kind in {kind_of(name) for name in workers}:
        counts = [sum(kind_of(name) == kind and at == cell for name, at in workers.items()) for cell in range(4)]
        assert all(counts) or sum(counts) < 4
        assert min(counts) * 2 >= sum(counts) / 4 or sum(counts) < 4


@given(fleets, st.integers(0, 3))
def test_a_worker_joins_a_cell_with_the_fewest_of_its_kind(workers: dict[str, int], planned: int) -> None:
    counts = Counter(dict.fromkeys(range(4), 0))
    counts.update(cell for name, cell in workers.items() if kind_of(name) == "prefill")
    cell = joined_cell("prefill-31", planned, workers, 4)
    assert counts[cell] == min(counts.values())
    assert cell == planned or counts[planned] > counts[cell]


@given(st.integers(1, 6), st.integers(0, 20))
def test_where_workers_are_dealt_over_the_cells_none_lacks_them_and_restarts_move_none(cells: int, count: int) -> None:
    workers = {f"worker-{number}": cell_of(f"worker-{number}", cells) for number in range(count)}
    assert not lacking_cells(workers, cells)
    for name, cell in workers.items():
        others = {other: at for other, at in workers.items() if other != name}
        assert joined_cell(name, cell, others, cells) == cell


def test_a_further_worker_joins_an_active_cell() -> None:
    up = UpSettings(engine="mock", workers=2, cells=4)
    children = list(in_several(up, active=2).values())
    (added,) = further(up, fleet_of(up), ["worker-3"], children, active=2, url=of_cell, cores=4)
    assert (added.cell, added.settings.namespace) == (1, "ps-1")


def test_a_folder_says_which_cells_it_has_and_how_many_are_active(tmp_path: Path) -> None:
    assert read_cells(tmp_path) == CellCounts(0, 0)
    write_cells(tmp_path, CellCounts(3, 2))  # on another's broker
    assert read_cells(tmp_path) == CellCounts(3, 2)
    for folder in ("nats", "cells/1/nats"):
        (tmp_path / folder).mkdir(parents=True)
    assert read_cells(tmp_path) == CellCounts(2, 2)
    (tmp_path / "cells.json").write_text("")  # as after a full disk
    assert read_cells(tmp_path) == CellCounts(2, 2)
    write_cells(tmp_path, CellCounts(2, 1))
    assert read_cells(tmp_path) == CellCounts(2, 1)
