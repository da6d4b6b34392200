"""Recipes: that each is sound, that its set agrees, that the README says the truth, and that the scripts start it."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import yaml

from penstock.configs.flags import parse as parse_flags
from penstock.configs.settings import GatewaySettings, RouterSettings, TraceSettings, WorkerSettings
from penstock.deploy.kubernetes import run_render
from penstock.infra.engine_args.memory_estimate import GIB, estimate, kv_bytes
from penstock.infra.engine_args.rules import check
from penstock.infra.engine_args.tree import BadArguments, parse_yaml
from penstock.launch.recipes.advice import check_set
from penstock.launch.recipes.catalogue import FOLDER, GPUS, Recipe, context_of, load, members, parse, shape_at
from penstock.launch.recipes.recipe_command import known, run_check, run_list, run_matrix, run_show, worker_command
from penstock.workers.engines import support
from tests.generated.tables import memory_of
from tests.standins import installed

RECIPES = load()  # of TensorRT-LLM
MEMBERS = members()  # of every engine
EXAMPLES = Path(__file__).resolve().parents[4] / "infra" / "examples"
SETS = sorted({recipe.header.set for recipe in RECIPES.values() if recipe.header})

# The estimate of one GPU: KV blocks and contexts of max_seq_len that fit. Changes here are changes of a promise.
FITS = {
    "deepseek-r1-cutlass-agg": (16640, 65),
    "deepseek-r1-mtp-decode": (66096, 243),
    "deepseek-r1-mtp-prefill": (38624, 142),
    "deepseek-r1-trtllm-agg": (99840, 195),
    "deepseek-r1-wideep-decode": (85408, 314),
    "deepseek-r1-wideep-prefill": (60384, 222),
    "gemma3-vswa-agg": (491520, 480),
    "gemma3-vswa-decode": (499712, 488),
    "gemma3-vswa-prefill": (465920, 455),
    "gpt-oss-120b-decode": (56448, 49),
    "gpt-oss-120b-prefill": (232704, 202),
    "llama3-agg": (13312, 13),
    "llama3-decode": (13824, 24),
    "llama3-prefill": (12672, 22),
    "llama4-eagle-agg": (92752, 341),
    "llama4-eagle-gb200-decode": (141168, 519),
    "llama4-eagle-gb200-prefill": (27744, 102),
    "llava16-agg": (12288, 24),
    "llava16-decode": (13312, 26),
    "llava16-prefill": (12288, 24),
}


def of(name: str) -> Recipe:
    return RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_neither_errors_nor_warnings_on_the_gpus_it_names(name: str) -> None:
    recipe = of(name)
    assert recipe.header is not None
    context = context_of(recipe)
    assert context.shape is not None, "its model's sizes are not in models/"
    assert [str(finding) for finding in check(recipe.args, context)] == []


@pytest.mark.parametrize("name", FITS)
def test_the_memory_estimate_of_a_recipe_is_what_it_was(name: str) -> None:
    found = memory_of(of(name))
    assert found is not None
    assert (found.blocks, found.sequences) == FITS[name]


def test_every_recipe_with_a_cache_has_an_estimate() -> None:
    assert set(FITS) == {name for name, recipe in RECIPES.items() if recipe.role != "encode"}


@pytest.mark.parametrize("members", SETS)
def test_the_recipes_of_a_set_agree(members: str) -> None:
    found = [
        (recipe, context_of(recipe)) for recipe in RECIPES.values() if recipe.header and recipe.header.set == members
    ]
    roles = {context.role for _, context in found}
    assert "aggregated" in roles or {"prefill", "decode"} <= roles
    assert [str(finding) for finding in check_set(found)] == []


def shown(name: str) -> WorkerSettings:
    """The settings of a worker that is started by the command shown for a recipe."""
    words = shlex.split(worker_command(MEMBERS[name]))
    return parse_flags(WorkerSettings, words[words.index("worker") + 1 :], prog="worker", environ={})


@pytest.mark.parametrize("name", RECIPES)
def test_the_worker_takes_the_recipe_and_the_command_that_is_shown(name: str) -> None:
    args = pytest.importorskip("penstock.workers.engines.trtllm.args")
    recipe, settings = of(name), shown(name)
    path = str(FOLDER / f"{name}.yaml")
    assert (settings.role, settings.engine, settings.extra_engine_args) == (recipe.role, "trtllm", path)
    wanted = args.TrtllmSettings(settings, settings.max_model_len or 32768)
    resolved = args.resolve(wanted, parse_yaml(recipe.text))
    assert resolved.args.tensor_parallel_size == recipe.args.tensor_parallel_size
    assert resolved.args.speculative_config == recipe.args.speculative_config


def test_vllm_takes_its_recipe_and_its_draft() -> None:
    args = pytest.importorskip("penstock.workers.engines.vllm.args")
    settings = shown("llama3-eagle3-vllm")
    assert (settings.engine, settings.role, settings.block_size) == ("vllm", "aggregated", 32)
    wanted = args.VllmSettings(settings, 131072)
    given = parse_yaml(Path(settings.extra_engine_args).read_text(encoding="utf-8"))
    with installed():
        from vllm._standin.fields import FIELDS  # type: ignore[import-not-found]

        resolved = args.resolve(wanted, given, FIELDS)
    assert resolved.tree["speculative_config"]["method"] == "eagle3"
    assert resolved.tree["speculative_config"]["model"] == MEMBERS["llama3-eagle3-vllm"].header.draft
    assert resolved.tree["enable_prefix_caching"]


def test_a_recipe_of_several_nodes_starts_one_rank_per_gpu() -> None:
    words = worker_command(MEMBERS["deepseek-r1-wideep-decode"]).split()
    assert words[:6] == [
        "srun",
        "--mpi=pmix",
        "--nodes=4",
        "--ntasks=16",
        "--ntasks-per-node=4",
        "trtllm-llmapi-launch",
    ]
    assert worker_command(MEMBERS["gpt-oss-120b-decode"]).startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 penstock worker")


def test_windows_of_gemma_are_the_same_in_all_three_and_repeat_the_model_s_pattern() -> None:
    windows = {
        of(f"gemma3-vswa-{role}").args.kv_cache_config.max_attention_window for role in ("agg", "prefill", "decode")
    }
    assert windows == {(512, 512, 512, 512, 512, 32768)}


def test_gpt_oss_runs_in_a_container_with_shared_memory_and_stack_and_moves_kv_by_ucx() -> None:
    for role, devices in (("prefill", "0,1,2,3"), ("decode", "4,5,6,7")):
        recipe = of(f"gpt-oss-120b-{role}")
        assert recipe.header is not None
        assert recipe.header.container == (
            "--ipc=host", "--shm-size=16g", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864",
            "--ulimit", "nofile=65536:65536",
        )  # fmt: skip
        assert recipe.header.devices == devices
        transceiver = recipe.args.cache_transceiver_config
        assert transceiver is not None
        assert transceiver.backend == "UCX"


def test_deepseek_comes_with_each_moe_back_end_and_mtp() -> None:
    found = {recipe.args.moe_config.backend for name, recipe in RECIPES.items() if name.startswith("deepseek")}
    assert found == {"TRTLLM", "CUTLASS", "WIDEEP"}
    assert of("deepseek-r1-mtp-decode").args.draft_tokens == 1


# TP, EP, attention DP, experts, sequences and tokens per step, length, fraction, dtype, largest graph, draft, buffer.
SETTINGS = """
deepseek-r1-cutlass-agg     8  8 dp CUTLASS   64  2048  8192 0.8  auto  64 0     -
deepseek-r1-mtp-decode      4  4 -  TRTLLM   256   512  8704 0.85 fp8  256 1  8704
deepseek-r1-mtp-prefill     4  4 dp CUTLASS    4  8704  8704 0.7  fp8    - 1  8704
deepseek-r1-trtllm-agg      8  8 -  TRTLLM   128  8192 16384 0.85 fp8  128 1     -
deepseek-r1-wideep-decode  16 16 dp WIDEEP   256   256  8704 0.7  fp8  256 0  8704
deepseek-r1-wideep-prefill 16 16 dp WIDEEP     4  8704  8704 0.5  fp8    - 0  8704
gpt-oss-120b-decode         4  4 dp CUTLASS  128 16384 36864 0.8  auto 128 0 65536
gpt-oss-120b-prefill        4  4 -  TRTLLM    32 16384 36864 0.8  auto  32 0 65536
llama3-agg                  1  1 -  AUTO     256  8192 32768 0.9  auto 256 0     -
llama4-eagle-agg            8  8 -  AUTO     256  8192  8704 0.8  auto 256 3     -
llama4-eagle-gb200-decode   8  8 -  AUTO     256  1024  8704 0.8  auto 256 3 16384
llama4-eagle-gb200-prefill  4  4 -  AUTO       8  8704  8704 0.5  auto   - 3 16384
"""


@pytest.mark.parametrize("line", SETTINGS.strip().splitlines())
def test_a_recipe_resolves_to_these_settings(line: str) -> None:
    name, *expected = line.split()
    args = of(name).args
    kv, transceiver = args.kv_cache_config, args.cache_transceiver_config
    found = (
        args.tensor_parallel_size, args.moe_parallel[1], "dp" if args.enable_attention_dp else "-",
        args.moe_config.backend, args.batch_size, args.max_num_tokens, args.max_seq_len, kv.free_gpu_memory_fraction,
        kv.dtype, (args.graph_sizes or "-")[-1], args.draft_tokens,
        transceiver.max_tokens_in_buffer if transceiver else "-",
    )  # fmt: skip
    assert list(map(str, found)) == expected
    assert args.scheduler_config.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    assert kv.enable_block_reuse


def test_the_baseline_tunes_batches_over_a_moving_window_and_the_wide_one_has_slots_to_spare() -> None:
    dynamic = of("llama3-agg").args.scheduler_config.dynamic_batch_config
    assert dynamic is not None
    assert (dynamic.enable_batch_size_tuning, dynamic.dynamic_batch_moving_average_window) == (True, 128)
    for role in ("prefill", "decode"):
        balancer = of(f"deepseek-r1-wideep-{role}").args.moe_config.load_balancer
        assert balancer is not None
        assert not isinstance(balancer, str)
        assert (balancer.num_slots, balancer.layer_updates_per_iter) == (288, 1)


def test_a_window_of_its_own_would_cost_gemma_five_times_the_cache() -> None:
    recipe = of("gemma3-vswa-agg")
    context = context_of(recipe)
    assert context.shape is not None
    plain = parse("plain", recipe.text.replace("  max_attention_window", "  # max_attention_window"))
    sizes = [estimate(r.args, context.shape, 80 * GIB, length=32768).per_sequence for r in (recipe, plain)]
    assert sizes[1] / sizes[0] == pytest.approx(5.95, abs=0.1)


@pytest.mark.parametrize("key", ["role", "model", "gpu", "set"])
def test_a_header_with_a_missing_key_is_refused(key: str) -> None:
    text = "\n".join(line for line in of("llama3-agg").text.splitlines() if not line.startswith(f"# {key}:"))
    with pytest.raises(BadArguments, match=rf"header: .*{key}"):
        parse("x", text)


def test_a_header_with_an_unknown_key_is_refused_and_any_other_comment_is_none() -> None:
    with pytest.raises(BadArguments, match=r"header: .*rolle"):
        parse("x", "# rolle: decode\n" + of("llama3-agg").text)
    assert parse("x", "# my own file\nmax_batch_size: 4\n").header is None


def test_list_names_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_list([]) == 0
    output = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in output[1:]] == list(MEMBERS)
    assert set(RECIPES) < set(MEMBERS)


def test_the_matrix_names_every_engine_and_every_feature(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_matrix([]) == 0
    features, options, notes = capsys.readouterr().out.split("\n\n")
    head, *rows = features.splitlines()
    assert head.split() == ["feature", "native", "mock", "trtllm", "vllm", "sglang", "openai"]
    assert [row.split("  ")[0] for row in rows] == list(support.FEATURES.values())
    head, *rows = options.splitlines()
    assert head.startswith("option ")
    assert [row.split("  ")[0] for row in rows] == [row[0] for row in support.sampling_table()[1:]]
    assert [note.partition(") ")[2] for note in notes.splitlines()] == support.sampling_notes()


def test_show_prints_the_file_and_the_commands_of_its_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_show(["llama3-prefill", "--model", "/models/llama 3"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(of("llama3-prefill").text.rstrip())
    for role in ("aggregated", "prefill", "decode"):
        assert f"--role {role} --model '/models/llama 3'" in output
    assert "penstock up --recipe llama3 --model '/models/llama 3'" in output
    assert run_show(["deepseek-r1-wideep-decode"]) == 0
    assert "penstock up" not in capsys.readouterr().out  # more than one machine
    assert run_show(["llama5"]) == 2
    assert "llama3-agg" in capsys.readouterr().err


@pytest.mark.parametrize("members", SETS)
def test_check_says_that_a_whole_set_is_sound(members: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name, recipe in RECIPES.items() if recipe.header and recipe.header.set == members]
    assert run_check(names) == 0
    output = capsys.readouterr().out
    assert output.count("no findings") == len(names)
    assert "they agree" in output or len(names) == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["llama3-decode", "--model-len", "65536"], "A23  cache_transceiver_config.max_tokens_in_buffer"),
        (["llama3-decode", "--gpus", "2"], "A01  tensor_parallel_size"),
        (["deepseek-r1-mtp-decode", "--gpu-memory-gib", "80"], "A60  tensor_parallel_size"),
        (["deepseek-r1-trtllm-agg", "--gpu", "H200"], "A11  moe_config.backend"),
        (["llama3-agg", "--role", "prefill"], "A34  disable_overlap_scheduler"),
        (["prefill=llama3-agg"], "A34  disable_overlap_scheduler"),
        (["llama3-agg", "--block-size", "64"], "A22  kv_cache_config.tokens_per_block"),
        (["deepseek-r1-mtp-decode", "--logits-processors"], "A52  speculative_config"),
        (["llama3-agg", "--trtllm-version", "1.2.0"], "A61  enable_chunked_prefill"),
        (["llama3-prefill", "gemma3-vswa-decode"], "C07  model"),
    ],
)
def test_check_refuses_what_does_not_fit(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(argv) == 1
    output = capsys.readouterr().out
    assert f"error   {says}" in output
    assert "fix: " in output


def test_check_names_the_engine_of_another_s_file_and_reads_its_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of vLLM's without a header was read as TensorRT-LLM's, whose rules refused every key of it."""
    assert run_check(["llama3-eagle3-vllm"]) == 0
    output = capsys.readouterr().out
    assert "for vLLM: its keys are checked against those of 0.32 and 0.33" in output
    assert "no key that a worker would refuse" in output
    for name, text, title, problems in (
        ("v", "max_model_len: 8192\ngpu_memory_utilisation: 0.9\nmodel: m\n", "vLLM", (
            "model: use --model", "gpu_memory_utilisation: no such key; did you mean gpu_memory_utilization?",
        )),
        ("s", "tp_size: 2\nmem_fraction_static: 0.8\nblock_size: 32\n", "SGLang", (
            "block_size: no such key; it is page_size here",
        )),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        assert run_check([str(tmp_path / name)]) == 1
        output = capsys.readouterr().out
        assert f"for {title}: " in output
        found = [line.strip() for line in output.splitlines() if line.startswith("  error")]
        assert found == [f"error    {problem}" for problem in problems]
    (tmp_path / "both").write_text("tensor_parallel_size: 2\n")
    assert run_check([str(tmp_path / "both")]) == 0
    assert "for vLLM" not in capsys.readouterr().out
    assert run_check([str(tmp_path / "both"), "--engine", "vllm"]) == 0
    assert "for vLLM" in capsys.readouterr().out


def test_names_of_other_engines_arguments_are_those_of_the_releases_that_were_run() -> None:
    standins = Path(__file__).parents[3] / "standins"
    assert set(known()["vllm"].names) == set((standins / "vllm" / "_standin" / "fields.txt").read_text().split())
    described = msgspec.json.decode((standins / "sglang_signatures.json").read_bytes())
    assert set(known()["sglang"].names) == set(described["ServerArgs"])


def test_show_and_kubernetes_take_a_file_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(MEMBERS["llama3-decode"].path).read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.replace("title: ", "title: Mine, "), encoding="utf-8")
    assert run_show([str(mine)]) == 0
    output = capsys.readouterr().out
    assert "# Mine, " in output
    assert f"--extra-engine-args {mine}" in output
    for path in (mine, tmp_path):
        assert run_render([str(path), "--engine-image", "registry.example.com/engine:1"]) == 0
        values = yaml.safe_load(capsys.readouterr().out)
        assert values["workers"]["decode"]["engineArgs"] == mine.read_text(encoding="utf-8")
    mine.write_text("max_batch_size: 8\n", encoding="utf-8")
    assert run_show([str(mine)]) == 2
    said = f"{mine}: no header, which says what it is for: lines after '# ', with title, model"
    assert said in capsys.readouterr().err
    assert run_render([str(mine), "--engine-image", "e"]) == 1
    assert "no header" in capsys.readouterr().err


def test_kv_in_fp8_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    """Twice the contexts fit where the checkpoint has scales for KV in FP8, and the engine then uses it."""
    config = {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    plain = shape_at(str(tmp_path))
    assert plain.kv_bits == 0
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_bytes(msgspec.json.encode({"quantization": quantization}))
    quantized = shape_at(str(tmp_path))
    assert (quantized.kv_bits, quantized.linear_bits) == (8, 8)
    args = parse("mine", "max_batch_size: 8").args
    assert kv_bytes(args, plain) == 2 * kv_bytes(args, quantized) == 2
    assert kv_bytes(parse("mine", "kv_cache_config: {dtype: bfloat16}").args, quantized) == 2
    (tmp_path / "hf_quant_config.json").unlink()
    stored = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config | {"quantization_config": stored}))
    assert shape_at(str(tmp_path)).kv_bits == 8


def test_check_warns_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["gemma3-vswa-agg", "--container-version", "0.5.1"]
    assert run_check(argv) == 0
    assert "warning A61" in capsys.readouterr().out
    argv = ["llama4-eagle-agg", "--draft-tokens", "30000", "--accepted-tokens", "3000"]
    assert run_check(argv) == 0
    assert "lower it to 1" in capsys.readouterr().out


def test_check_reads_a_file_and_a_model_directory_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (FOLDER / "models" / "meta-llama--Llama-3.1-8B-Instruct.json").read_text(encoding="utf-8")
    for folder, vocab in (("target", "128256"), ("draft", "32000")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(config.replace("128256", vocab), encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    draft = "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model: %s}"
    argv = [str(mine), "--model", str(tmp_path / "target"), "--gpu", "H100", "--model-len", "4096"]
    mine.write_text(draft % (tmp_path / "draft"), encoding="utf-8")
    assert run_check(argv) == 1
    assert "A51  speculative_config.speculative_model: its vocabulary has 32000 tokens" in capsys.readouterr().out
    mine.write_text(draft % (tmp_path / "nowhere"), encoding="utf-8")
    assert run_check(argv) == 1
    assert "no directory" in capsys.readouterr().out
    mine.write_text("max_batch_sise: 4", encoding="utf-8")
    assert run_check(argv) == 1
    assert "did you mean max_batch_size?" in capsys.readouterr().err
    assert run_check([str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_the_gpus_recipes_name_are_known() -> None:
    assert {recipe.header.gpu for recipe in RECIPES.values() if recipe.header} <= set(GPUS)


# Launch scripts -----------------------------------------------------------------------------------------------------

# Stands in for the command: tells what it was called with, and stays if the real one would.
STAND_IN = """#!/bin/bash
if [[ $1 == nats ]]; then echo '{"gateway": "g", "router": "r", "worker": "w", "operator": "o"}' > "$3/secrets.json"; fi
printf '%s\\t%s\\t%s\\n' "${PENSTOCK_NATS_URL:-}" "${CUDA_VISIBLE_DEVICES:-}" "$*" > "$HEARD"
case "$1" in streams|recipe) exit 0;; esac
exec sleep 60
"""


class Launched:
    """A script that runs with the stand-in; ``hear`` waits for its next calls."""

    def __init__(self, script: str, folder: Path, environ: dict[str, str]) -> None:
        command, fifo = folder / "penstock", folder / "received"
        command.write_text(STAND_IN, encoding="utf-8")
        command.chmod(0o755)
        os.mkfifo(fifo)
        self._fd = os.open(fifo, os.O_RDWR)
        self._lines = os.fdopen(os.dup(self._fd), encoding="utf-8")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.process = subprocess.Popen(
            [EXAMPLES / script], stdout=subprocess.DEVNULL, start_new_session=True, cwd=folder,
            env={"PATH": path, "PENSTOCK": str(command), "HEARD": str(fifo), "DATA_DIR": str(folder), **environ},
        )  # fmt: skip

    def received(self, calls: int) -> dict[str, tuple[str, str, list[str]]]:
        """Calls by name (workers by role): NATS URL, devices, arguments."""
        found = {}
        for _ in range(calls):
            url, devices, argv = self._lines.readline().rstrip("\n").split("\t")
            name, *rest = argv.split()
            role = rest[rest.index("--role") + 1] if "--role" in rest else name
            found[role] = (url, devices, rest)
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._lines.close()
        os.close(self._fd)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[object]:
    started = []

    def start(script: str, **environ: str) -> Launched:
        started.append(Launched(script, tmp_path, environ))
        return started[-1]

    yield start
    for each in started:
        each.close()


def after(argv: Sequence[str], flag: str) -> str:
    return argv[list(argv).index(flag) + 1]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_sound_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).stderr == b""


def test_the_aggregated_script_starts_all_processes_with_its_defaults(launch) -> None:  # type: ignore[no-untyped-def]
    calls = launch("aggregated.sh", PENSTOCK_NATS_URL="nats://elsewhere:4222").received(4)
    assert set(calls) == {"streams", "router", "gateway", "aggregated"}
    assert {url for url, _, _ in calls.values()} == {"nats://elsewhere:4222"}
    argv = calls["aggregated"][2]
    settings = parse_flags(WorkerSettings, argv, prog="worker", environ={})
    model = "meta-llama/Llama-3.1-8B-Instruct"
    assert (settings.engine, settings.model, settings.served_model_name) == ("trtllm", model, model)
    assert Path(settings.extra_engine_args).resolve() == (FOLDER / "llama3-agg.yaml").resolve()
    gateway = parse_flags(GatewaySettings, calls["gateway"][2], prog="gateway", environ={})
    assert (gateway.model, gateway.served_model_name, gateway.http_port) == ((model,), model, 8000)
    assert parse_flags(RouterSettings, calls["router"][2], prog="router", environ={}).mode == "kv"


def test_one_variable_traces_every_request_and_the_engine(launch) -> None:  # type: ignore[no-untyped-def]
    url = "http://127.0.0.1:4318/v1/traces"
    calls = launch("aggregated.sh", PENSTOCK_NATS_URL="nats://x:1", OTLP_ENDPOINT=url).received(5)
    assert parse_flags(TraceSettings, calls["trace"][2], prog="trace", environ={}).otlp_endpoint == url
    assert parse_flags(GatewaySettings, calls["gateway"][2], prog="gateway", environ={}).tracing == "all"
    assert parse_flags(WorkerSettings, calls["aggregated"][2], prog="worker", environ={}).otlp_endpoint == url


def test_the_speculative_quick_start_runs_vllm_with_its_recipe_and_nothing_else(launch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    calls = launch("speculative_vllm.sh", PENSTOCK_NATS_URL="nats://x:1").received(4)
    argv = calls["aggregated"][2]
    model = "meta-llama/Llama-3.1-8B-Instruct"
    assert [after(argv, f"--{flag}") for flag in ("engine", "model", "served-model-name")] == ["vllm", model, model]
    assert Path(after(argv, "--extra-engine-args")).resolve() == (FOLDER / "llama3-eagle3-vllm.yaml").resolve()
    run = subprocess.run(
        [EXAMPLES / "speculative_vllm.sh"], env={"PATH": os.environ["PATH"], "ENGINE": "mock"}, capture_output=True,
        text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (run.returncode, "see aggregated.sh" in run.stderr) == (2, True)


def test_every_default_of_the_aggregated_script_can_be_set(launch) -> None:  # type: ignore[no-untyped-def]
    calls = launch(
        "aggregated.sh", MODEL_PATH="/m", SERVED_MODEL_NAME="mine", AGG_ENGINE_ARGS="/mine.yaml", HTTP_PORT="9",
        MODALITY="multimodal", NATS_PORT="1", PENSTOCK_NATS_URL="nats://x:1", ROUTER_MODE="random", BLOCK_SIZE="64",
    ).received(4)  # fmt: skip
    worker, gateway = calls["aggregated"][2], calls["gateway"][2]
    assert [after(worker, f"--{flag}") for flag in ("model", "served-model-name", "extra-engine-args")] == [
        "/m", "mine", "/mine.yaml",
    ]  # fmt: skip
    assert (after(gateway, "--http-port"), after(gateway, "--block-size")) == ("9", "64")
    assert after(worker, "--block-size") == "64"
    assert after(calls["router"][2], "--mode") == "random"


@pytest.mark.parametrize(
    ("environ", "role", "flag", "value"),
    [
        ({"MODALITY": "multimodal"}, "aggregated", "--extra-engine-args", "llava16-agg.yaml"),
        ({"MODALITY": "multimodal"}, "aggregated", "--model", "llava-hf/llava-v1.6-mistral-7b-hf"),
        ({"MODALITY": "video_diffusion"}, "diffusion", "--engine", "native"),
        ({"ENGINE": "native", "MODEL_PATH": "demo"}, "aggregated", "--engine", "native"),
        ({"ENGINE": "vllm"}, "aggregated", "--engine", "vllm"),  # without the file of another engine
    ],
)
def test_the_modality_and_the_engine_choose_model_and_arguments(  # type: ignore[no-untyped-def]
    launch, environ: dict[str, str], role: str, flag: str, value: str
) -> None:
    argv = launch("aggregated.sh", PENSTOCK_NATS_URL="nats://x:1", **environ).received(4)[role][2]
    assert after(argv, flag).endswith(value)
    assert ("--extra-engine-args" in argv) == (environ.get("ENGINE", "trtllm") == "trtllm" and role == "aggregated")


def test_the_disaggregated_script_checks_the_pair_and_gives_each_worker_its_gpu_and_file(  # type: ignore[no-untyped-def]
    launch,
) -> None:
    calls = launch(
        "disaggregated.sh", MODALITY="multimodal", PENSTOCK_NATS_URL="nats://x:1", DECODE_DEVICES="6"
    ).received(7)
    assert [Path(given.partition("=")[2]).name for given in calls["recipe"][2][1:]] == [
        "llava16-prefill.yaml", "llava16-decode.yaml",
    ]  # fmt: skip
    assert {role: calls[role][1] for role in ("encode", "prefill", "decode")} == {
        "encode": "2", "prefill": "0", "decode": "6",
    }  # fmt: skip
    for role in ("encode", "prefill", "decode"):
        assert after(calls[role][2], "--extra-engine-args").endswith(f"llava16-{role}.yaml")


def test_a_script_without_broker_starts_one_and_ends_all_with_it(  # type: ignore[no-untyped-def]
    launch, tmp_path: Path
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as broker:
        port = str(broker.getsockname()[1])
        launched = launch("aggregated.sh", NATS_PORT=port)
        calls = launched.received(5)
        assert after(calls["nats"][2], "--data-dir") == str(tmp_path)
        roles = {"streams": "operator", "router": "router", "gateway": "gateway", "aggregated": "worker"}
        urls = {name: f"nats://{role}:{role[0]}@127.0.0.1:{port}" for name, role in roles.items()}
        assert {name: calls[name][0] for name in roles} == urls
        launched.process.terminate()
        launched.process.wait(10)
        with pytest.raises(ProcessLookupError):
            os.killpg(launched.process.pid, 0)


def test_an_unknown_modality_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for script in ("aggregated.sh", "disaggregated.sh"):
        run = subprocess.run(
            [EXAMPLES / script], env={"PATH": os.environ["PATH"], "MODALITY": "smell"}, capture_output=True, text=True,
            check=False, cwd=tmp_path,
        )  # fmt: skip
        assert run.returncode == 2
        assert "smell" in run.stderr
