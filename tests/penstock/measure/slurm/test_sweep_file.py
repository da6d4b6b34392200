"""The sweep file, its points and what becomes of them: engine arguments, flags and job scripts."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from penstock.infra.engine_args.tree import Tree, parse_yaml
from penstock.launch.recipes.catalogue import shape_at
from penstock.measure.slurm.placement import SlurmGroup, SlurmNode, load_of, place, workers_of
from penstock.measure.slurm.script import BODY, NUMA, JobPoint, instances, job
from penstock.measure.slurm.slurm_command import write
from penstock.measure.slurm.sweep_file import BadSweep, deployment_of, name_of, parse, select

R1 = """
model: deepseek-ai/DeepSeek-R1
gpu: GB200
load: {isl: 8150, osl: 1024, concurrency: [1, 64, 1024]}
slurm: {partition: batch, account: team, options: ["--qos=high"], bind: numa}
container: {image: /images/penstock.sqsh, mounts: ["/models:/models"]}
points:
  - {prefill: 1, decode: 3, prefill-tp: 4, tp: 4, attention-dp: false, batch: 128}
  - {prefill: 1, decode: 1, prefill-tp: 4, tp: 8, attention-dp: true, batch: 256, mtp: 1, concurrency: [256]}
  - {workers: 4, tp: 8}
"""


def no_file(path: str) -> Tree:
    raise AssertionError(path)


def test_a_name_tells_the_point_and_words_choose_points() -> None:
    sweep = parse(R1)
    names = [each.name for each in sweep.points]
    assert names == [
        "prefill1_decode3_tep4_batch128_eplb0_mtp0",
        "prefill1_decode1_prefilltp4_dep8_batch256_eplb0_mtp1",
        "agg4_tp8_batch0_eplb0_mtp0",
    ]
    chosen = {
        "all": names, "tep": names[:1], "dep": names[1:2], "aggregated": names[2:], "disaggregated": names[:2],
        "16gpu": names[:1], "*mtp0": [names[0], names[2]],
    }  # fmt: skip
    for word, expected in chosen.items():
        assert [each.name for each in select(sweep.points, [word])] == expected
    assert [each.name for each in select(sweep.points, ["pareto"], best=names[1:2])] == names[1:2]
    assert [each.name for each in select(sweep.points, [], mtp="on")] == names[1:2]
    with pytest.raises(BadSweep, match="--points 99gpu: it means no point"):
        select(sweep.points, ["99gpu"])
    told = deployment_of(sweep, sweep.points[0])
    assert (told.kind, told.total_gpus, told.prefill_workers, told.decode_workers) == ("disaggregated", 16, 1, 3)
    assert told.settings == {"mapping": "tep4", "batch": 128}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("decode: 3", "decodes: 3"), "decodes"),
        (("decode: 3, ", ""), "give prefill together with decode"),
        (("workers: 4", "encode: 4"), "no worker generates"),
        (("workers: 4", "name: plots, workers: 4"), "plots and slurm are taken"),
        (("{workers: 4, tp: 8}", "{workers: 4, tp: 8}\n  - {workers: 4, tp: 8}"), "given twice"),
        (("workers: 4", "cells: 5, workers: 4"), "cells 5: each cell needs a worker of each role, and a role has 4"),
        (("decode: 3, ", "decode: 3, cells: 2, "), "cells 2: each cell needs a worker of each role, and a role has 1"),
        (("workers: 4", "cells: 0, workers: 4"), "cells"),
        (("account: team", "time: tomorrow"), "slurm.time"),
        (("--qos=high", "qos=high"), "write each as --NAME=VALUE"),
        (("partition: batch", 'partition: "a\\nb"'), "slurm.partition: one line"),
        (("gpu: GB200", 'gpu: GB200\nout: "a\\nrm -r b"'), "out: one line"),
        (("gpu: GB200", 'gpu: GB200\nenvironment: {"A;rm -r b": x}'), "'A;rm -r b' is not a variable name"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(change: tuple[str, str], said: str) -> None:
    assert change[0] in R1
    with pytest.raises(BadSweep) as refused:
        parse(R1.replace(*change))
    assert said in str(refused.value)


def test_engine_arguments_follow_the_rules_and_the_point() -> None:
    sweep = parse(R1)
    plain, wide = (
        {w.group.role: w for w in workers_of(sweep, p, no_file, shape_at, "{role}")} for p in sweep.points[:2]
    )
    decode = parse_yaml(plain["decode"].arguments)
    assert (decode["max_batch_size"], decode["enable_attention_dp"], decode["tensor_parallel_size"]) == (128, False, 4)
    assert decode["moe_config"]["backend"] == "TRTLLM"  # without attention data parallelism
    assert decode["cache_transceiver_config"]["max_tokens_in_buffer"] >= 8150 + 1024
    assert parse_yaml(plain["prefill"].arguments)["disable_overlap_scheduler"] is True
    assert "--extra-engine-args=decode" in plain["decode"].argv
    decode = parse_yaml(wide["decode"].arguments)
    assert decode["speculative_config"] == {"decoding_type": "MTP", "num_nextn_predict_layers": 1}
    assert (decode["enable_attention_dp"], decode["gpus_per_node"]) == (True, 4)
    assert load_of(sweep, sweep.points[1])[-2:] == ("--concurrency=256", "--tokenizer=deepseek-ai/DeepSeek-R1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engine: native\npoints: [{workers: 1, tp: 2}]", "the native engine uses one GPU"),
        ("engine: mock\npoints: [{workers: 1, mtp: 1}]", "mtp, slots and attention-dp are TensorRT-LLM's"),
        ("engine: mock\npoints: [{workers: 1, worker: {max-runing: 3}}]", "did you mean --max-running"),
        ("model: x\npoints: [{workers: 1}]", "gpu: none is not one of A100"),
        ("model: x\ngpu: H100\npoints: [{workers: 1}]", "or give the points engine-args"),
        ("engine: mock\nload: {out: x}\npoints: [{workers: 1}]", "load.out: the sweep sets it itself"),
        ("engine: mock\nload: {isl: x}\npoints: [{workers: 1}]", "load: --isl"),
    ],
)
def test_what_a_job_would_fail_with_is_refused_before_it_is_submitted(text: str, said: str, tmp_path: Path) -> None:
    sweep = parse(text)
    with pytest.raises(BadSweep) as refused:
        write(sweep, sweep.points[0], tmp_path)
    assert said in str(refused.value)
    assert not list(tmp_path.rglob("job.sh"))


def test_a_script_asks_for_what_the_file_says(tmp_path: Path) -> None:
    sweep = parse(R1)
    text = job(sweep, sweep.points[0], 4, ["--isl=8150"], tmp_path, "true")
    own = f"{tmp_path}/{sweep.points[0].name}/slurm"
    assert text.splitlines()[:12] == [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name=penstock-{sweep.points[0].name}",
        "#SBATCH --partition=batch",
        "#SBATCH --account=team",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --time=04:00:00",
        "#SBATCH --signal=B:TERM@120",
        f"#SBATCH --output={own}/job-%j.out",
        "#SBATCH --exclusive",
        "#SBATCH --qos=high",
    ]
    assert f"MOUNTS=/models:/models,{tmp_path}:{tmp_path},/tmp:/tmp" in text
    assert "RUNTIME=pyxis\nIMAGE=/images/penstock.sqsh" in text
    for script in (BODY, NUMA):
        subprocess.run(["bash", "-n", script], check=True)


def test_text_of_the_file_is_never_read_as_shell_or_as_further_options(tmp_path: Path) -> None:
    nasty = f"a b'\"\\ $(touch {tmp_path}/ran) `touch {tmp_path}/ran` }} # ;"
    yaml = json.dumps(nasty)
    sweep = parse(
        f"{{engine: mock, points: [{{name: p, workers: 1}}], otlp-endpoint: {yaml}, environment: {{TOKEN: {yaml}}},"
        f" model: {yaml}, penstock: {yaml}, slurm: {{partition: {yaml}}}, router: {{model: {yaml}}}}}"
    )
    body = 'printf "%s\\0" "$OTLP_ENDPOINT" "$TOKEN" "$PENSTOCK" "$OUT" "${GATEWAY[@]}" "${ROUTER[@]}"'
    text = job(sweep, sweep.points[0], 1, [], tmp_path / "a b" / "100%", body)
    (tmp_path / "job.sh").write_text(text)
    run = subprocess.run(["bash", tmp_path / "job.sh"], env={}, capture_output=True, check=True)
    told = [nasty, nasty, nasty, str(tmp_path / "a b" / "100%"), f"--model={nasty}", f"--model={nasty}"]
    assert run.stdout.decode().split("\0")[:-1] == told
    assert not run.stderr
    assert not (tmp_path / "ran").exists()
    # sbatch reads these lines as shlex does; "%%" is a percent sign in the name of a file.
    asked = [shlex.split(line.removeprefix("#SBATCH ")) for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert [f"--partition={nasty}"] in asked
    assert [f"--output={tmp_path}/a b/100%%/p/slurm/job-%j.out"] in asked


def test_a_worker_is_bound_beside_its_first_gpu(tmp_path: Path) -> None:
    """With nvidia-smi and numactl that print what they are asked."""
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\n[ "$3" = --id=2 ] && echo 00000000:8A:00.0\n')
    (tmp_path / "numactl").write_text('#!/bin/sh\necho "$@"\n')
    for name in ("nvidia-smi", "numactl"):
        (tmp_path / name).chmod(0o755)
    device = tmp_path / "sys/bus/pci/devices/0000:8a:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SYSFS": str(tmp_path / "sys"), "CUDA_VISIBLE_DEVICES": "2,3"}
    bound = subprocess.run(["bash", NUMA, "echo", "x"], env=environ, capture_output=True, text=True, check=True)
    assert bound.stdout == "--cpunodebind=1 --membind=1 echo x\n"
    (device / "numa_node").write_text("-1\n")
    unbound = subprocess.run(["bash", NUMA, "echo", "x"], env=environ, capture_output=True, text=True, check=True)
    assert (unbound.stdout, "not bound" in unbound.stderr) == ("x\n", True)


def test_an_engine_over_two_nodes_runs_under_its_launcher_and_the_second_node_shows_its_ranks_metrics() -> None:
    point = JobPoint("p", "penstock", (SlurmGroup("aggregated", 1, 4),), {"aggregated": ("worker", "--engine=trtllm")})
    placed = place(point.groups, [SlurmNode("a", 2), SlurmNode("b", 2)])
    assert instances(placed, point, 9100, devices=True).splitlines() == [
        "WORKERS=1",
        "instance worker-0 0 a,b 2 4 0,1 penstock worker --engine=trtllm --name=worker-0 --metrics-host=0.0.0.0 "
        "--metrics-port=9100",
        "ranks worker-0 b 9100",
        "METRICS=(--metrics=p=http://a:9100/metrics --metrics=p=http://b:9100/metrics)",
    ]


def test_vllm_over_two_nodes_is_a_process_on_each_that_knows_where_they_meet() -> None:
    point = JobPoint("p", "penstock", (SlurmGroup("aggregated", 1, 4),), {"aggregated": ("worker", "--engine=vllm")})
    placed = place(point.groups, [SlurmNode("a", 2), SlurmNode("b", 2)])
    assert instances(placed, point, 9100, devices=True).splitlines() == [
        "WORKERS=1",
        "instance worker-0 0 a,b 2 2 0,1 penstock worker --engine=vllm --name=worker-0 --metrics-host=0.0.0.0 "
        "--metrics-port=9100 --nodes=2 --leader-address=a --leader-port=9101",
        "METRICS=(--metrics=p=http://a:9100/metrics --metrics=p=http://b:9100/metrics)",
    ]


def test_workers_of_each_role_are_dealt_over_the_cells() -> None:
    groups = (SlurmGroup("prefill", 2, 1), SlurmGroup("decode", 3, 1))
    point = JobPoint("p", "penstock", groups, {"prefill": ("worker",), "decode": ("worker",)}, cells=2)
    lines = instances(place(groups, [SlurmNode("a", 5)]), point, 9100, devices=False).splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith("instance ")] == [
        ["prefill-0", "0"], ["prefill-1", "1"], ["decode-0", "0"], ["decode-1", "1"], ["decode-2", "0"],
    ]  # fmt: skip


def test_a_point_with_cells_says_so() -> None:
    sweep = parse("engine: mock\npoints: [{workers: 4, cells: 2}]")
    assert sweep.points[0].name == "agg4_tp1_batch0_eplb0_mtp0_cells2"
    assert deployment_of(sweep, sweep.points[0]).settings["cells"] == 2


def test_name_of_a_named_point_is_its_own() -> None:
    sweep = parse("engine: mock\npoints: [{name: mine, workers: 2}]")
    assert sweep.points[0].name == "mine"
    assert name_of(sweep.points[0]) == "agg2_tp1_batch0_eplb0_mtp0"
