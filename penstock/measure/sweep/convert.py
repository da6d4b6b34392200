"""``penstock bench convert``: results of aiperf in our format, so that all are plotted and compared alike.

Only the measurements of each request are converted. Figures are computed from them, by our definitions.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.cli.terminal import fail
from penstock.configs.flags import Parser
from penstock.measure.sweep import results
from penstock.measure.sweep.endpoints import BadEndpoint, name_of
from penstock.measure.sweep.figures import RequestRecord, figures
from penstock.measure.sweep.report import print_report
from penstock.measure.sweep.results import LevelResult, LevelRun
from penstock.measure.sweep.workload import LoadLevel, Workload

_AIPERF_SUMMARY, _AIPERF_RECORDS = "profile_export_aiperf.json", "profile_export.jsonl"


class NotConvertible(Exception):
    """Files that are not of the named tool, or have an unknown format."""


class Converted(NamedTuple):
    result: LevelResult
    records: list[RequestRecord]


def aiperf(folder: Path, name: str, gpus: int = 0) -> list[Converted]:
    """One run of ``aiperf profile`` from its ``--artifact-dir``.

    Raises:
        NotConvertible: the folder has no run with a concurrency or a rate.
    """
    try:
        summary: Any = msgspec.json.decode((folder / _AIPERF_SUMMARY).read_bytes())
        lines: list[Any] = [msgspec.json.decode(line) for line in (folder / _AIPERF_RECORDS).read_bytes().splitlines()]
        config = summary["input_config"]
        phase = next(each for each in config["phases"] if each["kind"] == "profiling")
        prompts: Any = next((each["prompts"] for each in config["datasets"] if "prompts" in each), {})
        measured = [each for each in lines if each["metadata"]["benchmark_phase"] == "profiling"]
        began = min(each["metadata"]["request_start_ns"] for each in measured)
        records = [_aiperf_record(number, each, began, prompts) for number, each in enumerate(measured)]
        level = _level(phase.get("concurrency"), phase.get("rate") or phase.get("request_rate"), len(records))
        result = LevelResult(
            endpoint=name,
            url=config["endpoint"]["urls"][0],
            model=config["models"]["items"][0]["name"],
            api="completions" if config["endpoint"]["type"] == "completions" else "chat",
            level=level,
            workload=_workload(prompts.get("isl"), prompts.get("osl")),
            seed=0,
            gpus=gpus,
            generator="aiperf",
            stream=bool(config["endpoint"].get("streaming")),
            runs=(LevelRun(number=1, began=str(summary["start_time"]), figures=figures(records, gpus)),),
        )
    except OSError as error:
        raise NotConvertible(f"{error.filename}: {error.strerror}; name the --artifact-dir of aiperf") from None
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, StopIteration) as error:
        raise NotConvertible(f"{folder}: not of a form of aiperf that is known ({error!r})") from None
    return [Converted(result, records)]


def _aiperf_record(number: int, line: Any, began: int, prompts: Any) -> RequestRecord:
    metadata, metrics = line["metadata"], line.get("metrics") or {}

    def value(*names: str, default: float = -1.0) -> Any:
        return next((metrics[each]["value"] for each in names if each in metrics), default)

    error = line.get("error") or ("cancelled" if metadata.get("was_cancelled") else "")
    return RequestRecord(
        number=number,
        sent_ms=(metadata["request_start_ns"] - began) / 1e6,
        latency_ms=float(value("request_latency")),
        ttft_ms=float(value("time_to_first_token")),
        itl_ms=float(value("inter_token_latency")),
        gaps_ms=tuple(map(float, value("inter_chunk_latency", default=0) or ())),
        isl_asked=round((prompts.get("isl") or {}).get("mean", 0)),
        osl_asked=round((prompts.get("osl") or {}).get("mean", 0)),
        isl=int(value("usage_prompt_tokens", "input_sequence_length")),
        osl=int(value("usage_completion_tokens", "output_sequence_length")),
        cached=int(value("usage_prompt_cache_read_tokens")),
        error=str(error.get("message", error) if isinstance(error, dict) else error),
    )


def _level(concurrency: float | None, rate: float | None, requests: int) -> LoadLevel:
    if rate:
        return LoadLevel("rate", float(rate), requests)
    if concurrency:
        return LoadLevel("concurrency", float(concurrency), requests)
    raise ValueError("neither a concurrency nor a rate")


def _workload(isl: Any, osl: Any) -> Workload:
    isl, osl = isl or {}, osl or {}
    return Workload(
        isl=round(isl.get("mean", 0)),
        isl_stddev=float(isl.get("stddev", 0.0)),
        osl=round(osl.get("mean", 0)),
        osl_stddev=float(osl.get("stddev", 0.0)),
    )


def as_runs(converted: Iterable[Converted]) -> list[tuple[LevelResult, list[Sequence[RequestRecord]]]]:
    """Merge results of the same level as runs of one result, in their order, with the records of each run."""
    levels: dict[str, tuple[LevelResult, list[Sequence[RequestRecord]]]] = {}
    for result, records in converted:
        if result.level.folder not in levels:
            levels[result.level.folder] = (result, [records])
            continue
        kept, all_records = levels[result.level.folder]
        run = msgspec.structs.replace(result.runs[0], number=len(kept.runs) + 1)
        levels[result.level.folder] = (msgspec.structs.replace(kept, runs=(*kept.runs, run)), [*all_records, records])
    return list(levels.values())


def run(argv: Sequence[str]) -> int:
    """Write the results. Returns 1 if a file cannot be read."""
    parser = Parser(
        prog="penstock bench convert",
        description="take over what aiperf has measured, for `penstock bench plot` and `compare`",
    )
    parser.add_argument("tool", choices=("aiperf",), help="which tool's results")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="--artifact-dir of aiperf")
    parser.add_argument("--name", default="", help="of the endpoint; default: the tool's")
    parser.add_argument("--out", metavar="FOLDER", default="bench-results", help="(default: bench-results)")
    parser.add_argument("--gpus", metavar="N", type=int, default=0, help="that the endpoint uses (default: unknown)")
    args = parser.parse_args(argv)
    try:
        name = name_of(f"{args.name or args.tool}=file", "--name")
        converted = [each for path in args.paths for each in aiperf(Path(path), name, args.gpus)]
    except (NotConvertible, BadEndpoint) as error:
        return fail("bench convert", error)
    out = Path(args.out)
    for result, records in as_runs(converted):
        folder = results.level_folder(out, name, result.level)
        for number, each in enumerate(records, 1):
            results.save_records(folder, number, each)
        results.save(folder, result)
    print_report(results.read_series([out / name]))
    return 0
