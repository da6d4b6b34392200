"""``penstock profile sla``: what it prints and writes, and that what it writes can be used."""

import shlex
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import yaml

from penstock.configs.flags import read
from penstock.configs.up_settings import UpSettings
from penstock.deploy.values import Values
from penstock.launch.deployment import read_args
from penstock.launch.groups import fleet_of
from penstock.launch.recipes.advice import advise, check_set, failed
from penstock.launch.recipes.catalogue import context_of, parse
from penstock.measure.pareto.records import front
from penstock.measure.profile.data import save
from penstock.measure.search import profile_sla_command
from penstock.measure.search.profile_sla_command import SlaProfileSettings, run
from tests.penstock.planner.engines import engine

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
PRICES = "gpus: {H200: {price_per_hour: 3.6}}\n"


def flags_of(command: str) -> UpSettings:
    words = shlex.split(command)
    assert words[:2] == ["penstock", "up"]
    return read(UpSettings, words[2:])


@pytest.mark.parametrize(
    ("flags", "roles"),
    [
        ({"model": LLAMA}, {"aggregated"}),
        ({"model": LLAMA, "ttft": 500.0, "itl": 8.0, "total_gpus": 8}, {"prefill", "decode"}),
        pytest.param(
            {"model": "deepseek-ai/DeepSeek-R1", "ttft": 400.0, "itl": 40.0, "total_gpus": 64, "gpus_per_node": 64},
            {"prefill", "decode"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_estimate_becomes_recipes_a_command_and_values(
    flags: dict[str, object], roles: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SlaProfileSettings(source="roofline", gpu="H200", out=str(tmp_path), **flags)) == 0  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "not measured" in said
    if find_spec("matplotlib"):
        assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
        assert "pareto.png in" in said
    told = yaml.safe_load((tmp_path / "suggestion.yaml").read_text())
    pools = {pool["role"]: pool for pool in told["best"]["pools"]}
    assert set(pools) == roles
    (command,) = told["commands"]
    assert command in said
    texts = {path.stem: path.read_text() for path in tmp_path.glob("*.yaml")}
    recipes = [parse(name, text) for name, text in texts.items() if text.startswith("# title")]
    assert {recipe.role for recipe in recipes} == roles
    for recipe in recipes:
        assert not failed(advise(recipe, context_of(recipe)).findings)
    assert not failed(check_set([(recipe, context_of(recipe)) for recipe in recipes]))
    groups = {group.role: group for group in fleet_of(flags_of(command), read=read_args).groups}
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    assert values["model"] == flags["model"]
    msgspec.convert(values, Values)
    for role, pool in pools.items():
        assert (groups[role].number, groups[role].gpus * groups[role].number) == (pool["workers"], pool["gpus"])
        own = values["workers"][role]
        assert own["replicas"] == pool["workers"]
        assert own["gpus"] * own.get("nodes", 1) * own["replicas"] == pool["gpus"]
        assert parse(role, own["engineArgs"]).args.gpus == pool["gpus"] // pool["workers"]


def test_the_plot_has_each_kind_and_its_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[tuple[float, float]]] = {}
    monkeypatch.setattr(profile_sla_command, "draw_estimates", lambda points, *_: drawn.update(points))
    settings = SlaProfileSettings(source="roofline", model=LLAMA, gpu="GB200", itl=10.0, out=str(tmp_path))
    assert run(settings) == 0
    assert set(drawn) == {"aggregated", "prefill and decode apart"}
    for points in drawn.values():
        best = front(points, lambda point: point)
        assert len(best) > 3
        assert max(pace for pace, _ in best) > 2 * min(pace for pace, _ in best), "a slower pace gives more per GPU"


def test_mock_workers_are_suggested_with_their_speedup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = SlaProfileSettings(source="mock", mock_speedups=(1.0, 2.0), rate=20.0, out=str(tmp_path))
    assert run(asked) == 0
    told = yaml.safe_load((tmp_path / "suggestion.yaml").read_text())
    up = flags_of(told["commands"][0])
    assert (up.engine, up.mock_speedup) == ("mock", 2.0)
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    assert values["workers"] == {"aggregated": {"engine": "mock", "replicas": 3, "settings": {"mock-speedup": 2.0}}}
    assert "mock engine's timing model" in capsys.readouterr().out


def test_a_percentile_needs_more_than_a_mean_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three workers keep the mean time per token of 12 ms, and a tenth of the answers is slower."""
    limits = {"source": "mock", "ttft": 300.0, "itl": 12.0, "isl": 2000, "osl": 200, "rate": 15.0, "show": 1}
    gpus = []
    for percentile in ("mean", "p95"):
        assert run(SlaProfileSettings(**limits, percentile=percentile, out=str(tmp_path))) == 0  # type: ignore[arg-type]
        best = yaml.safe_load((tmp_path / "suggestion.yaml").read_text())["best"]
        gpus.append(sum(pool["gpus"] for pool in best["pools"]))
        assert best["itl_ms"] <= 12.0
        said = capsys.readouterr()
        assert f"for {percentile} TTFT ≤ 300 ms" in said.out
        assert ("simulating" in said.err) is ("TTFT p95 ms" in said.out) is (percentile == "p95")
    assert gpus[0] < gpus[1]


def test_workers_take_the_longest_simulated_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of lengths that spread, a third is above the mean that the flags name."""
    asked = {"model": LLAMA, "isl": 2000, "osl": 300, "rate": 5.0, "show": 1, "gpu": "H200", "ttft": 1000.0}
    taken = []
    for spread in (0.0, 0.6):
        out = tmp_path / f"{spread}"
        settings = SlaProfileSettings(source="roofline", percentile="p90", spread=spread, out=str(out), **asked)  # type: ignore[arg-type]
        assert run(settings) == 0, capsys.readouterr()
        told = yaml.safe_load((out / "suggestion.yaml").read_text())
        assert [told[name] for name in ("gpu", "percentile", "spread", "rate")] == ["H200", "p90", spread, 5.0]
        workers = yaml.safe_load((out / "values.yaml").read_text())["workers"]
        for worker in workers.values():
            assert parse("own", worker["engineArgs"]).args.max_seq_len == worker["settings"]["max-model-len"]
        taken.append((told["longest_request"], min(each["settings"]["max-model-len"] for each in workers.values())))
    assert taken[0] == (2300, 2304)
    assert 5000 < taken[1][0] <= taken[1][1] < taken[1][0] + 32


ON_EACH = ["--http-host", "0.0.0.0", "--require-keys"]


@pytest.mark.parametrize(
    "flags",
    [
        {"source": "mock", "rate": 15.0, "gpus_per_node": 2},
        pytest.param(
            {"source": "roofline", "model": LLAMA, "gpu": "H100", "rate": 15.0, "gpus_per_node": 2, "max_gpus": 2},
            marks=pytest.mark.slow,
        ),
        # Both roles on one of the machines, each with a file of its own.
        {
            "source": "roofline",
            "model": LLAMA,
            "gpu": "H200",
            "ttft": 500.0,
            "itl": 8.0,
            "rate": 40.0,
            "gpus_per_node": 8,
        },
    ],
)
def test_a_deployment_larger_than_a_machine_has_commands_by_machine(
    flags: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: dict[str, object] = {"ttft": 300.0, "itl": 15.0, "out": str(tmp_path), "total_gpus": 32}
    assert run(SlaProfileSettings(**limits | flags)) == 0  # type: ignore[arg-type]
    said = capsys.readouterr().out
    told = yaml.safe_load((tmp_path / "suggestion.yaml").read_text())
    counts: dict[str, int] = {}
    machines = 0
    for line in told["commands"]:
        assert f"  {line}\n" in said
        if line.startswith("# on ") and line.endswith(":"):
            machines = int(line.split()[2]) if line.split()[2].isdigit() else 0
        elif line.startswith("penstock up"):
            up = flags_of(line)
            assert shlex.split(line)[2:5] == ON_EACH
            assert (up.engine, up.model) == (("mock", ()) if flags["source"] == "mock" else ("trtllm", (LLAMA,)))
            groups = fleet_of(msgspec.structs.replace(up, nats_url=""), read=read_args).groups
            assert sum(group.number * (group.gpus or 1) for group in groups) <= flags["gpus_per_node"]  # type: ignore[operator]
            for group in groups:
                counts[group.role] = counts.get(group.role, 0) + machines * group.number
    assert counts == {pool["role"]: pool["workers"] for pool in told["best"]["pools"]}
    assert "penstock keys create" in told["commands"]
    assert not any("--nats-url" in line for line in told["commands"])  # all read PENSTOCK_NATS_URL
    # Those of the chart are the ones in its values.
    listed = [line[4:] for line in (tmp_path / "values.yaml").read_text().splitlines() if line.startswith("#   ")]
    where = told["commands"].index("# on Kubernetes:") + 1 + (flags["source"] == "roofline")
    assert told["commands"][where:] == [line.replace("values.yaml", f"{tmp_path}/values.yaml") for line in listed]
    assert listed[-1].startswith("helm upgrade --install penstock ./penstock-chart")


def test_without_a_folder_the_files_that_commands_name_are_said_to_be_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(SlaProfileSettings(source="roofline", gpu="H200", model=LLAMA)) == 0
    assert "# --out . writes llama-3-1-8b-instruct-agg.yaml\n  penstock up" in capsys.readouterr().out


def test_measured_profiles_keep_their_flags_and_prices_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = engine(gpus=2).profile
    setup = msgspec.structs.replace(profile.setup, up="--tensor-parallel-size 2")
    save(tmp_path / "tp2", msgspec.structs.replace(profile, setup=setup))
    (tmp_path / "prices.yaml").write_text(PRICES)
    asked = SlaProfileSettings(
        data=(str(tmp_path / "tp2"),), isl=2000, osl=200, ttft=500.0, prices=str(tmp_path / "prices.yaml")
    )
    assert run(asked) == 0
    said = capsys.readouterr().out
    assert "USD per 10⁶ tokens" in said
    assert (
        "penstock up --engine native --tensor-parallel-size 2 --model m --prefill 2 --decode 1" in said.splitlines()[-1]
    )


def test_commands_and_values_load_the_model_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = engine().profile
    for served, up, flag, loads in (
        ("org/llama", "--engine vllm", "", "org/llama"),
        ("org/llama", "--engine vllm", "/srv/llama", "/srv/llama"),
        ("llama", "--engine vllm --model=/srv/own", "", "/srv/own"),
        ("tiny", "--engine mock", "", ""),
    ):
        setup = msgspec.structs.replace(profile.setup, model=served, up=up)
        save(tmp_path / "p", msgspec.structs.replace(profile, setup=setup))
        asked = SlaProfileSettings(
            data=(str(tmp_path / "p"),), isl=2000, osl=200, ttft=500.0, model=flag, out=str(tmp_path / "o")
        )
        assert run(asked) == 0
        (command,) = yaml.safe_load((tmp_path / "o/suggestion.yaml").read_text())["commands"]
        assert flags_of(command).model == ((loads,) if loads else ())
        assert yaml.safe_load((tmp_path / "o/values.yaml").read_text()).get("model", "") == loads
    capsys.readouterr()


def test_what_cannot_be_answered_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SlaProfileSettings(source="roofline", gpu="H200")) == 2
    assert run(SlaProfileSettings(source="roofline", gpu="H200", model="nowhere")) == 1
    assert run(SlaProfileSettings(source="roofline", gpu="H200", model=LLAMA, ttft=5.0)) == 1
    assert run(SlaProfileSettings(source="mock", rate=1e6)) == 1
    assert run(SlaProfileSettings(data=(str(tmp_path),))) == 1
    said = capsys.readouterr().err
    assert "needs --model and --gpu" in said
    assert "nowhere/config.json cannot be read" in said
    assert "no deployment serves at most 16 GPUs (--total-gpus) within the SLA" in said
    assert "no deployment serves 1e+06 requests/s with at most 16 GPUs" in said
