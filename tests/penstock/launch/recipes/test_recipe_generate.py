"""Generated engine arguments: equal to golden files, sound by the rules, refused with a fix where nothing would do."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.engine_args.memory_estimate import GIB
from penstock.infra.engine_args.rules import check
from penstock.infra.engine_args.tree import BadArguments, decode
from penstock.launch.recipes.catalogue import GPUS, context_of, known_shape, load, parse
from penstock.launch.recipes.generate import PER_NODE, EngineSpec, engine_context, generate, run_generate, sizes
from penstock.launch.recipes.recipe_command import run_check

GOLDEN = Path(__file__).parent / "golden"
MODELS = sorted({recipe.header.model for recipe in load().values() if recipe.header})

# The command of each golden file. A change here is a change of what users are given: look at it, then run the command.
COMMANDS = {
    ("r1-mtp-prefill", "r1-mtp-decode"): (
        "--model nvidia/DeepSeek-R1-FP4 --gpu GB200 --prefill-gpus 4 --decode-gpus 4 --isl 8192 --osl 512 "
        "--concurrency 64 --mtp 1 --transport UCX --set r1-mtp"
    ),
    ("r1-wide-agg",): (
        "--model nvidia/DeepSeek-R1-FP4 --gpu GB200 --gpus 16 --isl 8192 --osl 512 --concurrency 4096 --set r1-wide"
    ),
}


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_the_generator_makes_the_golden_files_and_the_advisor_has_nothing_against_them(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate([*COMMANDS[names].split(), "--out", str(tmp_path)]) == 0
    paths = [str(tmp_path / f"{name}.yaml") for name in names]
    assert capsys.readouterr().out.split() == paths
    for name, path in zip(names, paths, strict=True):
        assert Path(path).read_text(encoding="utf-8") == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")
    assert run_check(paths) == 0
    output = capsys.readouterr().out
    assert output.count("no findings") == len(names)
    assert "they agree" in output or len(names) == 1


def test_a_reader_that_has_seen_enough_is_not_an_error_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):  # which ends every command quietly
        run_generate(COMMANDS["r1-wide-agg",].split())


def test_generated_speculation_is_the_models_own_layer_on_both_sides() -> None:
    for name in ("r1-mtp-prefill", "r1-mtp-decode"):
        args = parse(name, (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")).args
        assert args.draft_tokens == 1
        assert args.cache_transceiver_config is not None
        assert args.cache_transceiver_config.max_tokens_in_buffer == args.max_seq_len


WISHES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "gpu": st.sampled_from(sorted(GPUS)),
        "role": st.sampled_from(["aggregated", "prefill", "decode"]),
        "gpus": st.sampled_from([1, 2, 4, 8, 16, 32]),
        "isl": st.integers(1, 28_000),
        "osl": st.integers(1, 4_000),
        "concurrency": st.integers(1, 5_000),
        "mtp": st.integers(0, 3),
        "windows": st.booleans(),
    }
)


@given(WISHES)
def test_what_is_made_has_no_errors_and_is_read_back_as_it_was_meant(asked: dict[str, Any]) -> None:
    shape, gpu = known_shape(asked.pop("model")), asked.pop("gpu")
    assert shape is not None
    memory, blackwell = GPUS[gpu]
    asked["mtp"] *= bool(shape.mtp_layers)
    asked["windows"] &= any(shape.windows)
    spec = EngineSpec(gpu_bytes=int(memory * GIB), blackwell=blackwell, gpus_per_node=PER_NODE.get(gpu, 8), **asked)
    try:
        made = generate(shape, spec)
    except BadArguments:
        return  # in words: the table below
    args = decode(made.tree)
    assert args == made.args
    found = check(args, engine_context(shape, spec))
    assert [str(each) for each in found if each.level == "error"] == []
    assert args.gpus == spec.gpus
    assert (args.max_seq_len or 0) >= spec.isl + spec.osl
    assert made.memory.fits
    assert args.draft_tokens == spec.mtp
    if spec.role != "prefill":
        assert args.graph_sizes[-1] == args.batch_size
        ranks = spec.gpus if args.enable_attention_dp else 1
        assert args.batch_size * ranks >= min(spec.concurrency, 2048 * ranks)


@pytest.mark.parametrize("name", sorted(name for name, recipe in load().items() if recipe.role != "encode"))
def test_it_makes_something_for_every_load_that_a_recipe_is_for(name: str) -> None:
    recipe = load()[name]
    context = context_of(recipe)
    header, shape = recipe.header, context.shape
    assert header is not None
    assert shape is not None
    length = recipe.args.max_seq_len or 0
    made = generate(
        shape,
        EngineSpec(
            role=recipe.role, gpus=header.gpus, gpu_bytes=context.gpu_bytes or 0, blackwell=bool(context.blackwell),
            isl=length - 512, osl=512, concurrency=64, mtp=1 if shape.mtp_layers else 0,
            gpus_per_node=PER_NODE.get(header.gpu, 8),
        ),
    )  # fmt: skip
    assert made.args.max_seq_len == length
    assert made.args.gpus == recipe.args.gpus


def test_graphs_are_powers_of_two_up_to_the_batch() -> None:
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(104) == [1, 2, 4, 8, 16, 32, 64, 104]
    assert sizes(1) == [1]


BASE = "--model meta-llama/Llama-3.1-8B-Instruct --gpu H100 --isl 4096 --osl 512 --concurrency 8 "


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (BASE, "give --gpus, or --prefill-gpus with --decode-gpus"),
        (BASE + "--gpus 1 --decode-gpus 1", "give --gpus, or --prefill-gpus"),
        (BASE + "--gpus 1 --mtp 1", "the model has no MTP layer"),
        (BASE + "--gpus 1 --windows", "the model has no sliding windows"),
        (BASE + "--gpus 12", "do not fill nodes of 8; use a multiple"),
        (BASE.replace("4096", "200000") + "--gpus 1", "the model supports 131072 positions"),
        (BASE.replace("meta-llama/Llama-3.1-8B-Instruct", "no/such"), "no/such/config.json"),
        (BASE.replace("meta-llama/Llama-3.1-8B-Instruct", "llama3") + "--gpus 1", "meta-llama/Llama-3.1-8B-Instruct"),
        (BASE + "--gpus 1 --set ../up", "set: '../up' is used in file names"),
        (BASE + "--gpus 1 --out /dev/null/here", "/dev/null"),
        (
            "--model deepseek-ai/DeepSeek-R1 --gpu H100 --gpus 4 --isl 3000 --osl 1000 --concurrency 8",
            "gpus: 16 are enough",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_would_do(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(line.split()) == 1
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_number_that_is_none_is_named(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_generate([*BASE.split(), f"--gpus={count}"])
    assert f"--gpus: {count!r} is not a whole number above 0" in capsys.readouterr().err


def test_more_at_once_than_fits_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate((BASE.replace("--concurrency 8", "--concurrency 500") + "--gpus 1").split()) == 0
    said = capsys.readouterr()
    assert "500 are to run there" in said.err
    assert "max_batch_size: 504" in said.out
