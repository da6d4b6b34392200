"""``penstock kubernetes render``: values of recipes, the commands that use them, and what is refused."""

import re
import shlex
from typing import Any

import pytest
import yaml

from infra.deploy.helm.cli import rendered, run_render
from infra.deploy.helm.generate import CHART
from infra.deploy.helm.render import Wanted
from infra.engine_args import BadArguments
from infra.recipes.catalogue import members

ENGINE = "registry.example.com/engine:1"


def values(recipe: str = "", **wanted: Any) -> dict[str, Any]:
    wanted.setdefault("engine_image", ENGINE)
    made: dict[str, Any] = yaml.safe_load(rendered(recipe, Wanted(**wanted)))
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
        rendered(recipe, Wanted(**{"engine_image": ENGINE} | wanted))


def test_render_prints_values_below_the_commands_that_use_them(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["llama4-eagle-gb200", "--engine-image", ENGINE, "--hub-secret", "hub", "--release", "llama4"]
    assert run_render([*argv, "--prefill", "3", "--decode", "1"]) == 0
    output = capsys.readouterr().out
    commands = [line.removeprefix("#   ") for line in output.splitlines() if line.startswith("#   ")]
    assert all(shlex.split(line, comments=True) for line in commands if not line.startswith("#"))
    wanted = {found[1] for line in commands if (found := re.search(r"secret generic (\S+)", line))}
    assert wanted == {"llama4-ssh", "hub"}
    assert f"helm template llama4 {CHART} -f values.yaml" in "\n".join(commands)
    assert yaml.safe_load(output)["workers"]["prefill"]["replicas"] == 3
    assert run_render(["no-such"]) == 1
    assert "penstock kubernetes render: no recipe 'no-such'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_render(["llama3", "--prefill", "many"])
    assert "--prefill: 'many' is not a whole number" in capsys.readouterr().err
