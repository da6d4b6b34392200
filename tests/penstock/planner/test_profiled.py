"""Engines whose times come from a profile, beside the mock's formula and the mock engine itself, in simulated time."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.figures import quantile
from penstock.measure.profile.data import BadProfile, file_of, load, mock_profile, save
from penstock.measure.search.profile_sla_command import SlaProfileSettings
from penstock.measure.search.profile_sla_command import run as suggest
from penstock.measure.simulation.fleet import simulate as run_fleet
from penstock.measure.simulation.placement import PlacementPolicy
from penstock.measure.simulation.policy import SimulatedFleet
from penstock.measure.simulation.trace import Request
from penstock.planner.capacity import EngineTiming
from penstock.planner.simulate_command import PlanSimulationSettings, run
from penstock.planner.simulated import BLOCK_SIZE, BLOCKS, Engines, ProfileTimes, generate, simulate, worker_of
from penstock.schemas.plans import Role, Rules
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import SequenceRequest
from tests.penstock.planner.engines import engine

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
MOCK = EngineTiming(mock_profile(blocks=BLOCKS, block_size=BLOCK_SIZE))


@pytest.mark.parametrize("counts", [{"aggregated": 4}, {"prefill": 2, "decode": 2}])
def test_a_profile_of_the_mock_gives_the_percentiles_of_its_formula(counts: dict[Role, int]) -> None:
    trace = generate("flat", seed=1, seconds=60, low=1, high=5, isl=3000, osl=200, shared=0.0)
    engines = Engines(), Engines(profiles=dict.fromkeys(counts, MOCK))
    rules = Rules(ttft_ms=1000, itl_ms=40)
    formula, profiled = (simulate("run", trace, 1.0, each, counts, rules, planned=False).outcome for each in engines)
    for name in ("ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms"):
        assert getattr(profiled, name) == pytest.approx(getattr(formula, name), rel=0.03), name


class Clock:
    """The time of a mock engine that sleeps in simulated time."""

    def __init__(self) -> None:
        self.s = 0.0

    def sleep(self, seconds: float) -> None:
        self.s += seconds


def mock_engine_times(requests: list[Request]) -> tuple[list[float], list[float]]:
    """TTFT and time per token of each request, ms, sorted, as the real mock engine's scheduler gives them."""
    clock = Clock()
    made = mock.build(
        mock.MockOptions(vocab_size=1000, block_size=BLOCK_SIZE, total_blocks=BLOCKS, max_model_len=100_000),
        sleep=clock.sleep,
    )
    first: dict[int, float] = {}
    ttft, itl = [], []
    arrived = 0
    while len(itl) < len(requests):
        if not made.has_work() and arrived < len(requests):
            clock.s = max(clock.s, requests[arrived].arrival_ns / 1e9)
        while arrived < len(requests) and requests[arrived].arrival_ns / 1e9 <= clock.s:
            each = requests[arrived]
            prompt = [1 + each.index % 997, *([2 + each.index % 991] * (each.prompt_tokens - 1))]
            made.submit(SequenceRequest(each.index, prompt, Sampling(), Stop(each.output_tokens, ignore_eos=True)))
            arrived += 1
        for output in made.step().outputs:
            assert isinstance(output.key, int)
            asked = requests[output.key]
            if output.key not in first:
                first[output.key] = clock.s
                ttft.append(1e3 * clock.s - asked.arrival_ns / 1e6)
            if output.finish:
                itl.append(1e3 * (clock.s - first[output.key]) / (asked.output_tokens - 1))
    made.close()
    return sorted(ttft), sorted(itl)


def test_the_percentiles_are_those_of_the_mock_engine_s_own_scheduler() -> None:
    trace = generate("flat", seed=4, seconds=120, low=1, high=4, isl=2000, osl=100, shared=0.0)
    requests = trace.requests(BLOCK_SIZE)
    fleet = SimulatedFleet((worker_of("aggregated", MOCK, BLOCK_SIZE),), BLOCK_SIZE)
    served = run_fleet(fleet, requests, PlacementPolicy()).served
    simulated = (
        sorted((each.first_ns - each.request.arrival_ns) / 1e6 for each in served),
        sorted((each.last_ns - each.first_ns) / 1e6 / (each.request.output_tokens - 1) for each in served),
    )
    for ours, engines in zip(simulated, mock_engine_times(requests), strict=True):
        for share in (0.5, 0.9, 0.95, 0.99):
            assert quantile(ours, share, 0.0) == pytest.approx(quantile(engines, share, 0.0), rel=0.05)


def test_parts_of_a_long_prompt_take_what_they_add_and_never_less_than_their_length() -> None:
    times = ProfileTimes(engine(prefill_ms=100.0, step_ms=10.0, growth_ms=0.1))
    assert times.prefill_ns(1, 2000, 0) == 200_000_000
    assert times.prefill_ns(1, 4000, 2000) == 200_000_000
    assert times.prefill_ns(2, 1000, 0) == 200_000_000
    assert times.prefill_ns(1, 500, 500) == 0
    assert times.decode_run_ns(1000, 1, 3) == [10_100_000, 10_100_100, 10_100_200]
    assert times.decode_run_ns(0, 0, 2) == [0, 0]


def test_ranks_share_the_memory_and_the_batch_of_their_worker() -> None:
    spec = worker_of("decode", engine(kv_tokens=64_000, max_batch=10), 64)
    assert (spec.blocks, spec.ranks, spec.max_sequences) == (1000, 1, 10)


def test_plan_simulate_takes_profiles_as_they_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "fast", engine(prefill_ms=20, step_ms=4, gpus=2).profile)
    save(tmp_path / "slow", engine(prefill_ms=400, step_ms=30).profile)
    load = {"shape": "flat", "seconds": 60.0, "high": 2.0, "isl": 1000, "osl": 60, "fixed": ("2+1",)}
    both = (str(tmp_path / "slow"), str(tmp_path / "fast" / "profile.json"))
    assert run(PlanSimulationSettings(**load, prefill=2, decode=1, profile=both)) == 0  # type: ignore[arg-type]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fixed 2+1")).split()
    assert float(row[-2]) == 4.0  # two workers of one GPU, and one of two: the mean of GPUs, and the peak
    assert run(PlanSimulationSettings(profile=both)) == 2
    assert "--profile: 2 for aggregated; give one" in capsys.readouterr().err
    assert run(PlanSimulationSettings(profile=(str(tmp_path / "none"),))) == 1
    assert "there is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "fleet"),
    [
        ({"source": "mock", "mock_speedups": (2.0,), "rate": 20.0}, {"workers": 2}),
        (
            {
                "source": "roofline",
                "model": LLAMA,
                "gpu": "H200",
                "ttft": 500.0,
                "itl": 8.0,
                "total_gpus": 8,
            },
            {"prefill": 1, "decode": 1},
        ),
    ],
)
def test_plan_simulate_takes_the_folder_of_a_suggestion(
    asked: dict[str, Any], fleet: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pools of two configurations have a profile each: each role takes its own."""
    assert suggest(SlaProfileSettings(**asked, out=str(tmp_path))) == 0
    best = yaml.safe_load((tmp_path / "suggestion.yaml").read_text())["best"]["pools"]
    for pool in best:
        assert load(tmp_path, pool["role"]) == load(tmp_path / file_of(pool["configuration"]))
    load_of = {"shape": "flat", "seconds": 20.0, "high": 2.0, "isl": 1000, "osl": 60}
    assert run(PlanSimulationSettings(**load_of, **fleet, profile=(str(tmp_path),))) == 0  # type: ignore[arg-type]
    assert "planned, holt" in capsys.readouterr().out


def test_a_suggestion_of_measured_profiles_names_them(tmp_path: Path) -> None:
    save(tmp_path / "measured", engine(prefill_ms=20, step_ms=4).profile)
    asked = SlaProfileSettings(data=(str(tmp_path / "measured"),), rate=1.0, out=str(tmp_path / "out"))
    assert suggest(asked) == 0
    with pytest.raises(BadProfile, match="name those of `--data`"):
        load(tmp_path / "out", "aggregated")
    pools = [{"role": role, "configuration": f"tp{n}"} for n, role in enumerate(("prefill", "decode"))]
    (tmp_path / "out" / "suggestion.yaml").write_text(yaml.safe_dump({"best": {"pools": pools}}))
    with pytest.raises(BadProfile, match=r"suggests prefill and decode workers, no aggregated; name one: .*tp0"):
        load(tmp_path / "out", "aggregated")
