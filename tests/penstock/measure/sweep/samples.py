"""Results of sweeps with known figures."""

from pathlib import Path

import msgspec

from penstock.measure.sweep import results
from penstock.measure.sweep.endpoints import GaugeLevel, ServerFigures
from penstock.measure.sweep.figures import RequestRecord, figures
from penstock.measure.sweep.results import LevelResult, LevelRun
from penstock.measure.sweep.workload import Workload, concurrency_level


def result(
    name: str, concurrency: int, latencies_ms: list[float], *, slots: int = 8, gpus: int = 1, seed: int = 1
) -> LevelResult:
    """A level of a server of so many slots; each run takes another of the latencies."""
    level = concurrency_level(concurrency)
    runs = []
    for number, latency in enumerate(latencies_ms, 1):
        waits = max(0.0, concurrency / slots - 1) * latency
        records = [
            RequestRecord(
                number=at,
                sent_ms=at * latency / min(concurrency, slots),
                latency_ms=latency + waits,
                ttft_ms=latency / 10 + waits,
                itl_ms=latency * 0.9 / 9,
                isl_asked=100,
                isl=100,
                osl_asked=10,
                osl=10,
                cached=50,
                events=12,
            )
            for at in range(level.requests)
        ]
        server = ServerFigures(pages=1, samples=3, running=GaugeLevel(concurrency, concurrency), kv_hit_rate=0.5)
        began = "2026-01-01T00:00:00+00:00"
        runs.append(LevelRun(number=number, began=began, figures=figures(records, gpus), server=server))
    return LevelResult(
        endpoint=name,
        url="http://h:1",
        model="m",
        api="chat",
        level=level,
        workload=Workload(isl=100, osl=10),
        seed=seed,
        gpus=gpus,
        runs=tuple(runs),
    )


def write(out: Path, *found: LevelResult) -> None:
    for each in found:
        results.save(results.level_folder(out, each.endpoint, each.level), each)


def load_records(folder: Path, run: int) -> list[RequestRecord]:
    """The requests of a run, as ``save_records`` wrote them."""
    lines = (folder / f"records-{run}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=RequestRecord) for line in lines]
