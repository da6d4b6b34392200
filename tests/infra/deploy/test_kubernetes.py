"""Kubernetes manifests: valid against the published schemas, complete, and read back as what they were made from."""

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from configs.flags import parse
from configs.settings import GatewaySettings, RouterSettings, WorkerSettings
from infra.broker.binary import find_server
from infra.broker.config import USERS
from infra.deploy.kubernetes.cli import EXAMPLES, rendered, run_render
from infra.deploy.kubernetes.description import Description, read
from infra.deploy.kubernetes.manifests import to_yaml
from infra.deploy.kubernetes.multinode import KEYS, SCRIPTS
from infra.deploy.kubernetes.pods import GRACE_S
from infra.engine_args import BadArguments, decode, parse_yaml
from infra.launch.deathsig import die_with_parent
from tests.pipeline.support import free_port, until

ROOT = Path(__file__).resolve().parents[3]
VERSION = "1.33"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
Tree = dict[str, Any]

# LeaderWorkerSet's own fields, as its API types have them (kubernetes-sigs/lws, v1); pods are Kubernetes' own.
_OPEN: Tree = {"type": "object"}
LEADER_WORKER_SET: Tree = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "rolloutStrategy": _OPEN,
        "networkConfig": _OPEN,
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "leaderTemplate": _OPEN,
                "workerTemplate": _OPEN,
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {
                    "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"],
                },
                "subGroupPolicy": _OPEN,
                "volumeClaimTemplates": {"type": "array"},
            },
        },
    },
}  # fmt: skip
COMPUTE_DOMAIN: Tree = {
    "type": "object",
    "required": ["numNodes", "channel"],
    "additionalProperties": False,
    "properties": {
        "numNodes": {"type": "integer", "minimum": 1},
        "channel": {
            "type": "object",
            "required": ["resourceClaimTemplate"],
            "properties": {"resourceClaimTemplate": {"type": "object", "required": ["name"]}},
        },
    },
}


def objects(name: str) -> list[Tree]:
    """An example, through YAML and back."""
    given = read((EXAMPLES / name).read_text(encoding="utf-8"))
    return list(yaml.safe_load_all(to_yaml(rendered(given))))


def found(trees: list[Tree], kind: str, name: str) -> Tree:
    return next(tree for tree in trees if (tree["kind"], tree["metadata"]["name"]) == (kind, name))


def templates(tree: Tree) -> Iterator[Tree]:
    """The pod templates in an object."""
    spec = tree.get("spec", {})
    if "template" in spec:
        yield spec["template"]
    group = spec.get("leaderWorkerTemplate", {})
    yield from (group[key] for key in ("leaderTemplate", "workerTemplate") if key in group)


def container(template: Tree) -> Tree:
    (only,) = template["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def environment(template: Tree) -> dict[str, Tree]:
    return {each["name"]: each for each in container(template)["env"]}


# -- the schemas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_valid_by_the_published_schemas(name: str) -> None:
    for tree in objects(name):
        match tree["kind"]:
            case "LeaderWorkerSet":
                assert tree["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
                jsonschema.validate(tree["spec"], LEADER_WORKER_SET)
            case "ComputeDomain":
                assert tree["apiVersion"] == "resource.nvidia.com/v1beta1"
                jsonschema.validate(tree["spec"], COMPUTE_DOMAIN)
            case _:
                kubernetes_validate.validate(tree, VERSION, strict=True)
        for template in templates(tree):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_schemas_find_what_is_wrong() -> None:
    tree = found(objects("llama3.yaml"), "Deployment", "llama3-decode")
    tree["spec"]["template"]["spec"]["terminationGrace"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGrace"):
        kubernetes_validate.validate(tree, VERSION, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_names_labels_volumes_and_references_hold_together(name: str) -> None:
    trees = objects(name)
    made = {(tree["kind"], tree["metadata"]["name"]) for tree in trees}
    assert len(made) == len(trees)
    claims = {
        tree["spec"]["channel"]["resourceClaimTemplate"]["name"] for tree in trees if tree["kind"] == "ComputeDomain"
    }
    for tree in trees:
        for template in templates(tree):
            if "selector" in tree["spec"]:
                assert tree["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
            spec, only = template["spec"], container(template)
            volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
            volumes |= {claim["metadata"]["name"]: claim for claim in tree["spec"].get("volumeClaimTemplates", [])}
            assert {mount["name"] for mount in only.get("volumeMounts", [])} == set(volumes)
            for volume in volumes.values():
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in made
                if "persistentVolumeClaim" in volume and name != "demo.yaml":
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in made
            assert {claim["resourceClaimTemplateName"] for claim in spec.get("resourceClaims", [])} <= claims
            # Else a service of ours would set variables that are flags of ours.
            assert spec["enableServiceLinks"] is False
    services = [tree for tree in trees if tree["kind"] == "Service"]
    pods = [template for tree in trees for template in templates(tree)]
    for service in services:
        (behind,) = [pod for pod in pods if pod["metadata"]["labels"] == service["spec"]["selector"]]
        open_ports = {port["containerPort"] for port in container(behind)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= open_ports


# -- settings of the processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_process_reads_its_arguments_and_outlives_its_drain(name: str) -> None:
    kinds: dict[str, Any] = {"gateway": GatewaySettings, "router": RouterSettings, "worker": WorkerSettings}
    seen = set()
    for template in (template for tree in objects(name) for template in templates(tree)):
        only = container(template)
        argv = only.get("args", only.get("command", []))
        argv = argv[argv.index("penstock") + 1 :] if "penstock" in argv else argv
        if not argv or argv[0] not in kinds:
            continue
        seen.add(argv[0])
        settings = parse(kinds[argv[0]], argv[1:], prog=argv[0], environ={})
        if hasattr(settings, "drain_s"):
            assert template["spec"]["terminationGracePeriodSeconds"] >= settings.drain_s + GRACE_S
        port = getattr(settings, "metrics_port", 0) or settings.http_port
        assert only["livenessProbe"]["httpGet"]["port"] == port == only["ports"][0]["containerPort"]
        assert getattr(settings, "metrics_host", "0.0.0.0") == "0.0.0.0"  # probes come from outside the pod
        assert "@" not in " ".join(argv)  # no passwords
        assert {"PENSTOCK_NATS_URL", "PENSTOCK_NAME"} <= set(environment(template))
    assert seen == set(kinds)


def test_prefill_and_decode_get_their_files_gpus_memory_and_volume() -> None:
    trees = objects("llama3.yaml")
    data = found(trees, "ConfigMap", "llama3-engine")["data"]
    assert set(data) == {"prefill.yaml", "decode.yaml"}
    for role in ("prefill", "decode"):
        recipe = (ROOT / "configs" / "recipes" / f"llama3-{role}.yaml").read_text(encoding="utf-8")
        assert data[f"{role}.yaml"] == recipe  # after rendering and parsing
        assert decode(parse_yaml(data[f"{role}.yaml"])).max_seq_len == 18432
        tree = found(trees, "Deployment", f"llama3-{role}")
        (template,) = templates(tree)
        only, spec = container(template), template["spec"]
        settings = parse(WorkerSettings, only["args"][1:], prog="worker", environ={})
        assert (settings.role, settings.engine, settings.max_model_len) == (role, "trtllm", 18432)
        mounts = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
        assert settings.extra_engine_args == f"{mounts['engine']}/{role}.yaml"
        assert only["resources"]["limits"]["nvidia.com/gpu"] == "1" == only["resources"]["requests"]["nvidia.com/gpu"]
        shm = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        assert mounts["shm"] == "/dev/shm"
        assert environment(template)["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}
        assert environment(template)["HF_HOME"]["value"].startswith(mounts["models"])
        # An hour to load, then checked every ten seconds.
        assert only["startupProbe"]["failureThreshold"] * only["startupProbe"]["periodSeconds"] == 3600
        assert tree["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert found(trees, "Deployment", "llama3-prefill")["spec"]["replicas"] == 2
    assert found(trees, "PersistentVolumeClaim", "llama3-models")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_llama_4_decodes_on_two_gb200_trays_whose_leader_serves() -> None:
    trees = objects("llama4-eagle-gb200.yaml")
    prefill = found(trees, "Deployment", "llama4-prefill")
    assert container(prefill["spec"]["template"])["resources"]["limits"]["nvidia.com/gpu"] == "4"
    group = found(trees, "LeaderWorkerSet", "llama4-decode")
    assert group["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "nvidia.com/gpu.clique"
    }
    body = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], body["size"], body["restartPolicy"]) == (1, 2, "RecreateGroupOnPodRestart")
    leader, ranks = body["leaderTemplate"], body["workerTemplate"]
    command = container(leader)["command"]
    assert command[:3] == ["bash", "/etc/penstock/scripts/lead.sh", "4"]  # GPUs of each of the two pods
    settings = parse(WorkerSettings, command[5:], prog="worker", environ={})
    assert command[3:5] == ["penstock", "worker"]
    assert (settings.role, settings.model) == ("decode", "nvidia/Llama-4-Maverick-17B-128E-Instruct-FP8")
    args = decode(parse_yaml(found(trees, "ConfigMap", "llama4-engine")["data"]["decode.yaml"]))
    assert args.gpus == 4 * body["size"]
    assert args.speculative_config is not None
    assert args.speculative_config.draft_model == "nvidia/Llama-4-Maverick-17B-128E-Eagle3"
    # The others only compute: no broker, no metrics, no work of ours.
    assert container(ranks)["command"] == ["bash", "/etc/penstock/scripts/follow.sh"]
    assert "PENSTOCK_NATS_URL" not in environment(ranks)
    for template in (leader, ranks):
        only = container(template)
        assert only["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert only["resources"]["claims"] == [{"name": "nvlink"}]
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-GB200"}
    domain = found(trees, "ComputeDomain", "llama4-decode-nvlink")
    assert domain["spec"]["numNodes"] == 2
    assert leader["spec"]["terminationGracePeriodSeconds"] == 135


# -- the broker -------------------------------------------------------------------------------------------------------


def answers(port: int) -> bool:
    try:
        return said_to(port, "nobody", "") != ""
    except OSError:
        return False


def said_to(port: int, user: str, password: str) -> str:
    """What the server says to a client of this name, in NATS's own protocol."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as link,
        link.makefile("rw", newline="\r\n") as lines,
    ):
        assert lines.readline().startswith("INFO ")
        credentials = json.dumps({"user": user, "pass": password, "verbose": False})
        lines.write(f"CONNECT {credentials}\r\nPING\r\n")
        lines.flush()
        return lines.readline().strip()


async def test_a_real_server_runs_the_configuration_and_lets_each_role_in(tmp_path: Path) -> None:
    trees = objects("llama3.yaml")
    text = found(trees, "ConfigMap", "llama3-nats")["data"]["nats.conf"]
    (template,) = templates(found(trees, "StatefulSet", "llama3-nats"))
    variables = {name: f"p{index}b4{name.lower()}" for index, name in enumerate(environment(template))}
    assert set(variables) == {f"{user.upper()}_PASSWORD" for user in USERS}
    port, monitor = free_port(), free_port()
    for old, new in (("4222", str(port)), ("8222", str(monitor)), ('"/data"', f'"{tmp_path}/store"')):
        assert old in text
        text = text.replace(old, new)
    conf = tmp_path / "nats.conf"
    conf.write_text(text, encoding="utf-8")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(  # noqa: ASYNC220
            [find_server(), "-c", conf], env={"PATH": os.environ["PATH"], **variables}, stdout=log, stderr=log,
            preexec_fn=die_with_parent(),
        )  # fmt: skip
    try:
        await until(lambda: asyncio.to_thread(answers, port), "the server answers")
        for user in USERS:
            assert said_to(port, user, variables[f"{user.upper()}_PASSWORD"]) == "PONG"
            assert said_to(port, user, "wrong").startswith("-ERR 'Authorization")
    finally:
        server.terminate()
        server.wait(30)


def test_pods_get_the_url_of_their_role_with_the_password_from_the_secret() -> None:
    trees = objects("llama3.yaml")
    for name, user in (("gateway", "gateway"), ("router", "router"), ("prefill", "worker")):
        (template,) = templates(found(trees, "Deployment", f"llama3-{name}"))
        found_env = environment(template)
        password = f"{user.upper()}_PASSWORD"
        assert found_env[password]["valueFrom"]["secretKeyRef"] == {"name": "llama3-nats", "key": user}
        url = f"nats://{user}:$({password})@llama3-nats.default:4222"
        assert found_env["PENSTOCK_NATS_URL"]["value"] == url
        names = list(found_env)
        assert names.index(password) < names.index("PENSTOCK_NATS_URL")  # Kubernetes expands what stands before
    own = objects("demo.yaml")
    assert not [tree for tree in own if tree["kind"] == "StatefulSet"]
    (template,) = templates(found(own, "Deployment", "demo-aggregated"))
    assert environment(template)["PENSTOCK_NATS_URL"]["valueFrom"]["secretKeyRef"]["name"] == "nats-urls"


# -- scripts ----------------------------------------------------------------------------------------------------------


def lead(tmp_path: Path, size: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """The leader's script with an mpirun that tells its arguments."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ssh-privatekey").write_text("key")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    mpirun.chmod(0o755)
    text = SCRIPTS["lead.sh"].replace(KEYS, str(tmp_path / "keys")).replace(">= 1800", ">= 0")
    script = tmp_path / "lead.sh"
    script.write_text(text)
    return subprocess.run(
        ["bash", script, "4", "penstock", "worker", "--model", "a b"], capture_output=True, text=True, check=False,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path),
            "LWS_LEADER_ADDRESS": "llama4-decode-0.llama4-decode.inference", "LWS_GROUP_SIZE": str(size),
        } | variables,
    )  # fmt: skip


def test_the_leader_starts_a_rank_per_gpu_of_every_pod_and_the_first_is_the_worker(tmp_path: Path) -> None:
    run = lead(tmp_path, 1)
    assert run.returncode == 0, run.stderr
    argv = run.stdout.splitlines()
    assert argv[argv.index("-np") + 1] == "4"
    assert argv[argv.index("--host") + 1] == "localhost:4"
    assert argv[argv.index("trtllm-llmapi-launch") :] == [
        "trtllm-llmapi-launch", "penstock", "worker", "--model", "a b",
    ]  # fmt: skip
    assert (tmp_path / ".ssh" / "penstock").stat().st_mode & 0o777 == 0o600


def test_the_leader_waits_for_the_others_only_so_long(tmp_path: Path) -> None:
    run = lead(tmp_path, 2)
    assert run.returncode == 69
    assert "no SSH server on llama4-decode-0-1.llama4-decode.inference" in run.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_sound_bash(name: str) -> None:
    run = subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, capture_output=True, check=False)
    assert run.stderr == ""


# -- descriptions -----------------------------------------------------------------------------------------------------


NATIVE = "model: m\nworkers: {aggregated: {}}\n"


def describe(text: str) -> Description:
    return read("image: i\n" + text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engine: native\n", "workers: name at least one role, or a recipe"),
        ("workers: {aggregated: {}}\n", "workers.aggregated: model: name"),
        ("recipe: llama3\n", "engine_image: name the image with penstock and trtllm"),
        ("recipe: llama3\nengine_image: e\nworkers: {decode: {gpus: 2}}\n", "gpus: 2 x 1 nodes.*ask for 1"),
        ("recipe: llama3\nengine: vllm\nengine_image: e\n", "the recipe is for trtllm"),
        ("model: m\nworkers: {aggregated: {engine_args: 'a: 1'}}\n", "read by trtllm and vllm, not by native"),
        ("model: m\nworkers: {aggregated: {nodes: 2}}\n", "only trtllm runs one engine over several nodes"),
        ("model: m\nworkers: {decode: {}, prefill: {model: n}}\n", "one language model per deployment, not m, n"),
        ("recipe: llama9\n", "no recipe 'llama9'"),
        (
            "engine: trtllm\nengine_image: e\nmodel: m\nworkers: {decode: {engine_args: 'max_bach_size: 8'}}\n",
            "workers.decode: engine_args: .*max_batch_size",
        ),
        (NATIVE + "gateway: {flags: [--nope]}\n", "gateway.flags: .*--nope"),
        (NATIVE + "gateway: {flags: [--help]}\n", "gateway.flags: .*--help"),
        (NATIVE + "gateway: {flags: [--http-port=9]}\n", "gateway.flags: --http-port follows from the rest"),
        (NATIVE + "router: {flags: [--name, x]}\n", "router.flags: --name follows from the rest"),
        (NATIVE + "router: {flags: [--mode=best]}\n", "router.flags: --mode: 'best' is not one of"),
        (
            "model: m\nworkers: {aggregated: {flags: [--kv-blocks, abc]}}\n",
            "workers.aggregated.flags: --kv-blocks: 'abc' is not a whole number",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(BadArguments, match=says):
        rendered(describe(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers: {decode: {replica: 2}}\n", r"workers\[...\]: .*replica"),
        ("name: Upper\n", "name: "),
        ("nats: {storage: much}\n", "nats.storage: "),
        ("workers: {decode: {load_s: .inf}}\n", r"workers\[...\].load_s: .*604800"),
        ("drain_s: 1e9\n", "drain_s: "),
    ],
)
def test_a_wrong_key_or_value_is_named(text: str, says: str) -> None:
    with pytest.raises(BadArguments, match=says):
        describe(text)


def test_an_engine_s_arguments_decide_its_gpus_also_without_a_recipe() -> None:
    given = describe(
        "engine: vllm\nengine_image: e\nmodel: m\n"
        "workers: {aggregated: {engine_args: 'tensor_parallel_size: 4', resources: {rdma/ib: 1}}}\n"
    )
    (template,) = templates(found(rendered(given), "Deployment", "penstock-aggregated"))
    limits = container(template)["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/ib"]) == ("4", "1")


def test_pictures_alone_need_no_language_model() -> None:
    given = describe("workers: {diffusion: {model: /models/painter}}\n")
    trees = rendered(given)
    (template,) = templates(found(trees, "Deployment", "penstock-gateway"))
    assert parse(GatewaySettings, container(template)["args"][1:], prog="g", environ={}).model == ""
    (template,) = templates(found(trees, "Deployment", "penstock-diffusion"))
    assert container(template)["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_render_prints_yaml_below_the_commands_for_the_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_render(["llama4-eagle-gb200.yaml"]) == 0
    output = capsys.readouterr().out
    commands = [line.lstrip("# ") for line in output.splitlines() if line.startswith("#  ")]
    assert all(shlex.split(line) for line in commands)
    wanted = {re.search(r"secret generic (\S+)", line)[1] for line in commands if "secret generic" in line}  # type: ignore[index]
    used = set(re.findall(r"secretKeyRef:\s+name: (\S+)", output)) | set(re.findall(r"secretName: (\S+)", output))
    assert wanted == used == {"llama4-nats", "llama4-ssh", "hub-token"}
    assert len(list(yaml.safe_load_all(output))) > 8
    assert run_render(["no-such.yaml"]) == 1
    assert "no-such.yaml" in capsys.readouterr().err


# -- the image --------------------------------------------------------------------------------------------------------


def test_the_containerfile_copies_every_package_and_keeps_an_engine_s_own_torch() -> None:
    text = (ROOT / "infra" / "Containerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]} - {
        "penstock"
    }  # gateway/client
    for package in packages:
        assert f"COPY {package} {package}" in text
    ignored = (ROOT / "infra" / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{package}" for package in packages} <= set(ignored)
    code = re.search(r'python -c "(.*?)" >', text, re.DOTALL)
    assert code is not None
    run = subprocess.run(
        [sys.executable, "-c", code[1].replace("\\\n", "")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    needed = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in run.stdout.splitlines()}
    assert {"msgspec", "nats-py", "faststream"} <= needed
    assert needed.isdisjoint({"torch", "transformers"})
    pinned = re.search(r"nixl-cu12==([\d.]+)", " ".join(project["project"]["optional-dependencies"]["trtllm"]))
    assert pinned is not None
    assert f"ARG NIXL={pinned[1]}\n" in text
