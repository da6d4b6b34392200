"""``penstock kubernetes render``: values of recipes, the commands that use them, and what is refused."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy.kubernetes import KubernetesSpec, rendered, run_chart, run_render
from penstock.infra.engine_args.tree import BadArguments
from penstock.launch.recipes.catalogue import members
from tests.penstock.deploy.support import HELM, needs_helm

ENGINE = "registry.example.com/engine:1"


def values(recipe: str = "", **wanted: Any) -> dict[str, Any]:
    wanted.setdefault("engine_image", ENGINE)
    made: dict[str, Any] = yaml.safe_load(rendered(recipe, KubernetesSpec(**wanted)))
    return made


def test_a_recipe_s_roles_gpus_nodes_and_arguments_become_pools() -> None:
    made = values("llama4-eagle-gb200", hub_secret="hub", image="registry.example.com/penstock:9")
    assert made["hub"] == {"existingSecret": "hub"}
    assert made["image"] == "registry.example.com/penstock:9"
    assert set(made["workers"]) == {"prefill", "decode"}
    decode = made["workers"]["decode"]
    assert (decode["engine"], decode["gpus"], decode["nodes"], decode["replicas"]) == ("trtllm", 4, 2, 1)
    assert decode["settings"] == {"max-model-len": 8704}
    entry = members()["llama4-eagle-gb200-decode"]
    with open(entry.path, encoding="utf-8") as file:
        assert decode["engineArgs"] == file.read()  # after rendering and parsing
    assert made["model"] == entry.header.model


@pytest.mark.parametrize("recipe", sorted({entry.header.set for entry in members().values()}))
def test_every_recipe_has_values_with_its_gpus(recipe: str) -> None:
    made = values(recipe)
    entries = {entry.header.role: entry for entry in members().values() if entry.header.set == recipe}
    assert made["workers"]
    for role, pool in made["workers"].items():
        header = entries[role].header
        assert pool["gpus"] * pool.get("nodes", 1) == header.gpus
        assert pool.get("nodes", 1) == header.nodes
        assert made["blockSize"] == entries[role].block_size


def test_counts_choose_the_roles_of_a_recipe_that_offers_both_ways() -> None:
    assert set(values("llama3")["workers"]) == {"prefill", "decode"}
    assert set(values("llama3", counts={"aggregated": 2})["workers"]) == {"aggregated"}
    pools = values("llama3", counts={"prefill": 3, "decode": 2})["workers"]
    assert {role: pool["replicas"] for role, pool in pools.items()} == {"prefill": 3, "decode": 2}


def test_without_a_recipe_an_engine_and_a_model_are_enough() -> None:
    assert values(engine_image="") == {
        "blockSize": 32, "models": {"enabled": False}, "workers": {"aggregated": {"engine": "native", "replicas": 1}},
    }  # fmt: skip
    made = values(engine="vllm", model="/models/m", counts={"prefill": 1, "decode": 1}, urls_secret="urls")
    assert (made["model"], made["nats"], made["broker"]) == ("/models/m", {"enabled": False}, {"urlsSecret": "urls"})
    assert {pool["engine"] for pool in made["workers"].values()} == {"vllm"}


@pytest.mark.parametrize(
    ("recipe", "wanted", "says"),
    [
        ("llama3", {"engine_image": ""}, "--engine-image: name the image with penstock and trtllm"),
        ("llama3", {"engine": "vllm"}, "the recipe is for trtllm"),
        ("llama9", {}, "no recipe 'llama9'"),
        ("llama3", {"counts": {"encode": 1}}, "--encode: the recipe has no engine arguments for it"),
        ("", {"engine": "trtllm"}, "--model: name a directory"),
    ],
)
def test_what_cannot_be_is_refused(recipe: str, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArguments, match=says):
        rendered(recipe, KubernetesSpec(**{"engine_image": ENGINE} | wanted))


def test_render_prints_values_below_the_commands_that_use_them(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["llama4-eagle-gb200", "--engine-image", ENGINE, "--hub-secret", "hub", "--release", "llama4"]
    assert run_render([*argv, "--prefill", "3", "--decode", "1"]) == 0
    output = capsys.readouterr().out
    commands = [line.removeprefix("#   ") for line in output.splitlines() if line.startswith("#   ")]
    assert all(shlex.split(line, comments=True) for line in commands if not line.startswith("#"))
    wanted = {found[1] for line in commands if (found := re.search(r"secret generic (\S+)", line))}
    assert wanted == {"llama4-ssh", "hub"}
    assert "helm template llama4 ./penstock-chart -f values.yaml" in "\n".join(commands)
    assert "helm dependency build ./penstock-chart" in "\n".join(commands)
    assert yaml.safe_load(output)["workers"]["prefill"]["replicas"] == 3
    assert run_render(["no-such"]) == 1
    assert "penstock kubernetes render: no recipe 'no-such'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_render(["llama3", "--prefill", "many"])
    assert "--prefill: 'many' is not a whole number" in capsys.readouterr().err


@needs_helm
def test_a_nats_of_one_s_own_needs_no_other_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """helm asks for every dependency in Chart.yaml, also for one that the values turn off."""
    argv = ["--engine", "mock", "--urls-secret", "urls", "--ca-secret", "nats-ca"]
    assert run_render(argv) == 0
    printed = capsys.readouterr().out
    assert "helm dependency" not in printed
    assert "kubectl create secret generic nats-ca --from-file=ca.crt=./ca.crt" in printed
    assert yaml.safe_load(printed)["broker"] == {"urlsSecret": "urls", "caSecret": "nats-ca"}
    chart = tmp_path / "penstock-chart"
    assert run_chart([str(chart), "--no-nats"]) == 0
    assert HELM is not None
    command = [HELM, "template", "demo", str(chart), "-f", "-"]
    run = subprocess.run(command, input=printed, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run_chart([str(chart)]) == 1
    assert "penstock-chart" in capsys.readouterr().err
    assert run_render(["--engine", "mock", "--ca-secret", "nats-ca"]) == 1
    assert "--urls-secret" in capsys.readouterr().err


def test_an_authority_for_a_nats_without_tls_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """helm alone refused it, when the release was installed."""
    asked = ["--engine", "mock", "--creds-secret", "creds", "--ca-secret", "nats-ca", "--nats-url"]
    assert run_render([*asked, "tls://nats-1:4222,nats://nats-2:4222"]) == 1
    assert "--ca-secret: it is for TLS, and --nats-url has nats://nats-2:4222; write tls://" in capsys.readouterr().err
    assert run_render([*asked, "tls://nats-1:4222"]) == 0


@needs_helm
def test_a_nats_of_one_s_own_is_named_with_secrets_for_every_user_that_pods_log_in_as(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command left out sys, which routers log in as: a worker whose link broke was noticed late."""
    servers = "tls://nats-1.example.com:4443,tls://nats-2.example.com:4443"
    chart = tmp_path / "penstock-chart"
    assert run_chart([str(chart), "--no-nats"]) == 0
    assert HELM is not None
    for own in (["--urls-secret", "login"], ["--nats-url", servers, "--creds-secret", "login"]):
        capsys.readouterr()
        assert run_render(["--engine", "mock", *own]) == 0
        printed = capsys.readouterr().out
        command = [HELM, "template", "demo", str(chart), "-f", "-"]
        run = subprocess.run(command, input=printed, capture_output=True, text=True, check=False, timeout=60)
        assert run.returncode == 0, run.stderr
        (created,) = re.findall(r"secret generic login (.*)", printed)
        made = set(re.findall(r"--from-(?:literal|file)=(\w+)=", created))
        asked = set(re.findall(r"name: login, items: \[\{key: (\w+)", run.stdout))
        asked |= set(re.findall(r"name: login\n\s+key: (\w+)", run.stdout))
        assert made == asked == {"gateway", "router", "worker", "operator", "sys"}
        assert "sys" in printed.partition("# sys: ")[2]
    assert yaml.safe_load(printed)["broker"] == {"url": servers, "credsSecret": "login", "ports": [4443]}
    assert "port: 4443" in run.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--nats-url tls://n:4222", "--nats-url and --creds-secret are needed together"),
        ("--creds-secret c", "--nats-url and --creds-secret are needed together"),
        ("--urls-secret u --nats-url tls://n", "--urls-secret has URLs with credentials"),
        ("--nats-url tls://u:p@n:4222 --creds-secret c", "without credentials"),
        ("--nats-url n:4222 --creds-secret c", "write nats://HOST:PORT or tls://HOST:PORT"),
        ("--nats-url tls://n:port --creds-secret c", "--nats-url: tls://n:port"),
    ],
)
def test_a_nats_of_one_s_own_needs_all_that_pods_log_in_with(
    argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_render(["--engine", "mock", *argv.split()]) == 1
    assert says in capsys.readouterr().err


@needs_helm
def test_the_lock_names_the_chart_s_dependency(tmp_path: Path) -> None:
    """helm says that a lock is out of sync before it looks for a repository."""
    for folder, said in (("as-it-is", "no repository definition"), ("changed", "out of sync")):
        chart = tmp_path / folder
        assert run_chart([str(chart)]) == 0
        if folder == "changed":
            text = (chart / "Chart.yaml").read_text()
            (chart / "Chart.yaml").write_text(text.replace("version: 2.14.2", "version: 2.14.1"))
        assert HELM is not None
        home = {name: str(tmp_path / "home") for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
        command = [HELM, "dependency", "build", str(chart)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=home)
        assert said in run.stderr
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
