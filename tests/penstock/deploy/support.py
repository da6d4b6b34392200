"""The chart, run by the real helm, and how to find something in what comes out."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy.kubernetes import CHART, KubernetesSpec, rendered
from tests.binaries import find_helm

Tree = dict[str, Any]
HELM = find_helm()
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: python -m tests.binaries .venv/bin")

# The NATS chart is not in any registry that tests reach; helm only asks that it is there. Its values are in the
# ConfigMap that this stand-in makes of them.
STANDIN = {
    "Chart.yaml": "apiVersion: v2\nname: nats\nversion: 2.14.2\n",
    "templates/values.yaml": (
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-nats-values\n"
        "data:\n  values: {{ omit .Values `global` | toJson | quote }}\n"
        # as the NATS chart writes its configuration, numbers included
        "  jetstream: {{ .Values.config.jetstream.merge | toYaml | fromYaml | toRawJson | quote }}\n"
    ),
}


@cache
def prepared() -> Path:
    """The chart with its dependency, as after ``helm dependency build``; removed when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-chart-"))
    chart = folder / "penstock"
    shutil.copytree(CHART, chart)
    for name, text in STANDIN.items():
        path = chart / "charts" / "nats" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return chart


def forget() -> None:
    """Remove what ``prepared`` made."""
    if prepared.cache_info().currsize:
        shutil.rmtree(prepared().parent)
        prepared.cache_clear()


def helm(*arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm on the prepared chart, with values on its standard input."""
    command = [HELM or "helm", arguments[0], *arguments[1:], str(prepared()), "-f", "-"]
    home = str(prepared().parent / "home")
    environ = {
        "PATH": os.environ["PATH"],
        "GOGC": "off",
        "HELM_CACHE_HOME": home,
        "HELM_CONFIG_HOME": home,
        "HELM_DATA_HOME": home,
    }
    return subprocess.run(
        command, input=values or "{}", capture_output=True, text=True, check=False, timeout=60, env=environ
    )


@cache
def _made(values: str, release: str) -> str:
    run = helm("template", release, "--namespace", "serving", values=values)
    assert run.returncode == 0, run.stderr
    return run.stdout


def manifests(values: str | Mapping[str, Any] = "", release: str = "demo") -> list[Tree]:
    """The objects that the chart makes of values."""
    text = values if isinstance(values, str) else yaml.safe_dump(values)
    # Eight times as fast. It crashes on deeply nested text, which helm does not write.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [tree for tree in yaml.load_all(_made(text, release), Loader=loader) if tree]


def refused(values: str) -> str:
    """What helm says of values that the chart does not take."""
    run = helm("template", "demo", values=values)
    assert run.returncode != 0, run.stdout[:500]
    return run.stderr


def recipe_values(recipe: str, **wanted: Any) -> str:
    """What ``penstock kubernetes render`` prints."""
    return rendered(recipe, KubernetesSpec(engine_image="registry.example.com/engine:1", **wanted))


def found(trees: list[Tree], kind: str, name: str) -> Tree:
    return next(tree for tree in trees if (tree["kind"], tree["metadata"]["name"]) == (kind, name))


def named(trees: list[Tree], kind: str) -> list[str]:
    return [tree["metadata"]["name"] for tree in trees if tree["kind"] == kind]


def templates(tree: Tree) -> Iterator[Tree]:
    """The pod templates in an object."""
    spec = tree.get("spec", {})
    if tree["kind"] in ("Deployment", "Job", "StatefulSet"):
        yield spec["template"]
    group = spec.get("leaderWorkerTemplate", {})
    yield from (group[key] for key in ("leaderTemplate", "workerTemplate") if key in group)


def pods(trees: list[Tree]) -> list[Tree]:
    return [template for tree in trees for template in templates(tree)]


def container(template: Tree) -> Tree:
    (only,) = template["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def environment(template: Tree) -> dict[str, Tree]:
    return {each["name"]: each for each in container(template)["env"]}


def command_of(template: Tree) -> list[str]:
    """The arguments of ``penstock``; empty: the container runs something else."""
    only = container(template)
    if "command" in only:
        command: list[str] = only["command"]
        return command[command.index("penstock") + 1 :] if "penstock" in command else []
    return only["args"]  # type: ignore[no-any-return]
