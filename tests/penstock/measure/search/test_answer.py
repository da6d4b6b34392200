"""Commands of a candidate: what starts on which machine, with which flags and GPUs."""

import re
import shlex
from pathlib import Path

import pytest

from penstock.configs.flags import read
from penstock.configs.settings import WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.measure.search.answer import Flags, commands, hosts, machine
from penstock.measure.search.candidates import PoolSize, SizedDeployment
from penstock.measure.search.profile_sla_command import SlaProfileSettings, _by_host
from penstock.schemas.plans import Role

FLAGS: dict[Role, Flags] = {
    "prefill": Flags("--engine vllm --model org/llama --tensor-parallel-size 2"),
    "decode": Flags("--engine vllm --model org/llama --tensor-parallel-size 1"),
}
BEST = SizedDeployment(
    pools=(PoolSize("prefill", "tp2", workers=1, gpus=2), PoolSize("decode", "tp1", workers=2, gpus=2)),
    ttft_ms=100.0,
    itl_ms=10.0,
    requests_per_s=1.0,
)


@pytest.mark.parametrize("several", [False, True])
def test_pools_whose_flags_differ_have_workers_beside_the_rest_each_with_its_own_gpus(several: bool) -> None:
    if several:
        ((number, workers),) = hosts(BEST, 4)
        assert number == 1
        lines = machine(workers, BEST, FLAGS, "--http-host 0.0.0.0 --require-keys")
    else:
        lines = commands(BEST, FLAGS)
    up = read(UpSettings, shlex.split(lines[0])[2:])
    assert (up.workers, up.engine, up.model, up.require_keys) == (0, "vllm", ("org/llama",), several)
    assert lines[1].startswith("#")
    if not several:  # else the shell has it, from operator.env
        assert re.fullmatch(r'export PENSTOCK_NATS_URL=".*\.penstock/state\.json.*"', lines[2])
    found = []
    for line in lines[2 if several else 3 :]:
        match = re.fullmatch(r"CUDA_VISIBLE_DEVICES=([\d,]+) penstock worker (.*) &", line)
        assert match is not None
        worker = read(WorkerSettings, shlex.split(match[2]))
        assert (worker.engine, worker.model) == ("vllm", "org/llama")
        found.append((match[1], worker.role, worker.tensor_parallel_size))
    assert found == [("0,1", "prefill", 2), ("2", "decode", 1), ("3", "decode", 1)]


def test_pools_with_files_of_engine_arguments_start_together() -> None:
    flags: dict[Role, Flags] = {
        "prefill": Flags("--engine trtllm --model m", "--prefill-engine-args p.yaml"),
        "decode": Flags("--engine trtllm --model m", "--decode-engine-args d.yaml"),
    }
    (line,) = commands(BEST, flags)
    up = read(UpSettings, shlex.split(line)[2:])
    assert (up.prefill, up.decode, up.prefill_engine_args, up.decode_engine_args) == (1, 2, "p.yaml", "d.yaml")


def test_the_page_has_what_is_printed_for_several_machines() -> None:
    """docs/planner.md named a flag that the command no longer prints."""
    page = (Path(__file__).parents[4] / "docs" / "planner.md").read_text(encoding="utf-8")
    lines = _by_host(SlaProfileSettings(gpus_per_node=4), BEST, FLAGS, ())
    fixed = [line for line in lines if not re.search(r"\d+ machine|CUDA|penstock up|whose flags differ", line)]
    assert "penstock keys create" in fixed
    assert len(fixed) >= 6
    shown = {line.strip() for line in page.splitlines()}
    assert [line for line in fixed if line not in shown] == []
    assert "penstock up --http-host 0.0.0.0 --require-keys --engine trtllm" in page
