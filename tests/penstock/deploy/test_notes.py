"""What the chart prints to be copied: commands for Secrets, and for the first API key, with a stand-in of kubectl."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy.kubernetes import CHART
from penstock.infra.nats_server.config import USERS as BROKER_USERS
from tests.infra.bus.test_credentials import needs_openssl, seed, served, tls
from tests.penstock.deploy.support import Tree, found, helm, manifests, named, needs_helm, pods
from tests.penstock.deploy.test_chart import CREDENTIALS, OWN_NATS
from tests.pipeline.support import free_port
from tests.tls_support import issue

pytestmark = needs_helm

# Secrets are folders with a file for each key.
KUBECTL = """
import base64, pathlib, shutil, sys
args = [arg for arg in sys.argv[1:] if arg not in ("-n", "serving")]
folder = pathlib.Path(__file__).with_name("secrets")
if args[:2] == ["create", "secret"]:
    secret = folder / args[3]
    secret.mkdir(parents=True)
    for flag in args[4:]:
        name, _, value = flag.partition("=")
        key, _, of = value.partition("=")
        if name == "--from-literal":
            (secret / key).write_text(of)
        elif name == "--from-file":
            shutil.copy(of or key, secret / key)
        else:
            shutil.copy(value, secret / {"--cert": "tls.crt", "--key": "tls.key"}[name])
elif args[:2] == ["get", "secret"]:
    key = args[args.index("-o") + 1].removeprefix("jsonpath={.data.").removesuffix("}").replace("\\\\", "")
    sys.stdout.write(base64.b64encode((folder / args[2] / key).read_bytes()).decode())
"""
USERS = ("gateway", "router", "worker", "planner", "reader", "operator", "sys")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the commands that are printed: kubectl, and this penstock."""
    (tmp_path / "kubectl.py").write_text(KUBECTL)
    for name, what in (("kubectl", str(tmp_path / "kubectl.py")), ("penstock", "-m penstock")):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        (tmp_path / name).chmod(0o755)
    return tmp_path


def done(machine: Path, script: str) -> str:
    environ = os.environ | {"PATH": f"{machine}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
    command = ["bash", "-ec", script]
    run = subprocess.run(command, cwd=machine, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def secret(machine: Path, name: str, **data: str | bytes) -> None:
    folder = machine / "secrets" / name
    folder.mkdir(parents=True)
    for key, value in data.items():
        (folder / key.replace("_", ".")).write_bytes(value.encode() if isinstance(value, str) else value)


@cache
def notes(values: str) -> str:
    run = helm("install", "demo", "--dry-run=client", "--namespace", "serving", "-o", "json", values=values)
    assert run.returncode == 0, run.stderr
    return str(json.loads(run.stdout)["info"]["notes"])


def first_key(values: str) -> str:
    """The commands of the notes that make a key."""
    block = notes(values).partition("Requests need an API key")[2].partition("GET /v1/models")[0]
    return "\n".join(line.strip() for line in block.splitlines() if line.startswith("  "))


def blocks() -> Iterator[tuple[str, str]]:
    text = (CHART / "README.md").read_text(encoding="utf-8").partition("These make the Secrets")[2]
    for block in re.findall(r"```sh\n(.*?)```", text.partition("\n## ")[0], re.DOTALL):
        comment, _, commands = block.partition("\n")
        yield comment, commands


def wanted(trees: list[Tree]) -> Iterator[tuple[str, str]]:
    """The keys of Secrets that pods cannot start without."""
    for pod in pods(trees):
        (container,) = pod["spec"]["containers"]
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("secretKeyRef", {"optional": True})
            if not source.get("optional"):
                yield source["name"], source["key"]
        for volume in pod["spec"].get("volumes", ()):
            parts: list[dict[str, Any]] = [part["secret"] for part in volume.get("projected", {}).get("sources", ())]
            if "secret" in volume:
                parts.append(volume["secret"])
            for part in parts:
                name = part.get("name") or part["secretName"]
                yield from ((name, item["key"]) for item in part["items"])


def test_the_readme_s_commands_make_every_secret_that_pods_mount(machine: Path) -> None:
    """There was no example for files, and the names of their keys had to be guessed."""
    for user in USERS:
        for kind in ("password", "creds", "nk", "crt", "key"):
            (machine / f"{user}.{kind}").write_text(f"{kind}-of-{user}")
    (machine / "ca.crt").write_text("the authority")
    made = list(blocks())
    assert len(made) == 5
    for comment, commands in made:
        everybody = "router worker operator sys"
        assert everybody in commands or "nats-ca" in commands, comment
        done(machine, commands.replace(everybody, f"{everybody} planner reader"))
    there = {(path.parent.name, path.name) for path in (machine / "secrets").glob("*/*")}
    files = yaml.safe_load(CREDENTIALS)
    files["broker"] |= {"credsSecret": "nats-creds", "caSecret": "nats-ca"}
    files["broker"]["certSecrets"] = {user: f"nats-{user}" for user in USERS}
    seeds = files | {"broker": files["broker"] | {"credsSecret": "", "nkeysSecret": "nats-nkeys"}}
    for values in (OWN_NATS, yaml.safe_dump(files), yaml.safe_dump(seeds)):
        needed = set(wanted(manifests(values)))
        assert needed
        assert needed <= there
    assert (machine / "secrets/nats-creds/router").read_text() == "creds-of-router"
    assert "//router:password-of-router@" in (machine / "secrets/nats-urls/router").read_text()


def test_the_readme_s_command_makes_every_password_of_the_broker(machine: Path) -> None:
    """It left out the second user of each role, without which the servers do not start."""
    text = (CHART / "README.md").read_text(encoding="utf-8").partition("\n## Secrets\n")[2].partition("\n## ")[0]
    (command,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    done(machine, command)
    there = {path.name: path.read_text() for path in (machine / "secrets/llm-broker").iterdir()}
    made = found(manifests("", "llm"), "Secret", "llm-broker")["data"]
    assert there.keys() == made.keys() == set(BROKER_USERS)
    assert len(set(there.values())) == len(there)
    assert all(value.startswith("p") for value in there.values())
    own = manifests("broker: {makePasswords: false}", "llm")
    assert "llm-broker" not in named(own, "Secret")
    needed = {key for name, key in wanted(own) if name == "llm-broker"}
    assert needed
    assert needed <= there.keys()


def with_streams(script: str) -> str:
    """The commands, after those of the chart's Job; the key is printed."""
    return script.replace("KEY=$(", 'penstock streams apply --nats-url "$URL" > /dev/null\nKEY=$(') + "\necho $KEY"


STREAMS = "max_payload: 8MB\njetstream {{ store_dir: {}, max_file_store: 64GB }}\n"  # whatever the disk has free
ACCOUNTS = "accounts {{ A {{ jetstream: enabled, users: [{}] }} }}\n"


async def test_the_notes_make_a_first_key_at_a_nats_of_one_s_own_with_passwords(machine: Path) -> None:
    """They said nothing where NATS was the operator's own."""
    port = free_port()
    secret(machine, "nats-urls", operator=f"nats://operator:secret@127.0.0.1:{port}")
    script = first_key(OWN_NATS)
    users = ACCOUNTS.format('{ user: "operator", password: "secret" }')
    async with served(machine, port, STREAMS.format(machine / "store") + users):
        said = done(machine, with_streams(script))
    assert re.fullmatch(r"pst-\w{12}-\w{40}\n", said), said


@needs_openssl
async def test_the_notes_make_a_first_key_at_a_nats_of_one_s_own_with_files(machine: Path) -> None:
    nkeys = pytest.importorskip("nkeys")
    server, client, port = issue(machine, "server"), issue(machine, "client"), free_port()
    text, public = seed(nkeys.PREFIX_BYTE_USER)
    secret(machine, "seeds", operator=text)
    secret(machine, "authority", ca_crt=server[0].read_bytes())
    secret(machine, "cert-o", tls_crt=client[0].read_bytes(), tls_key=client[1].read_bytes())
    values = yaml.safe_load(CREDENTIALS)
    values["broker"] |= {"credsSecret": "", "nkeysSecret": "seeds", "url": f"tls://127.0.0.1:{port}"}
    script = first_key(yaml.safe_dump(values))
    users = STREAMS.format(machine / "store") + ACCOUNTS.format(f'{{ nkey: "{public}" }}')
    async with served(machine, port, users + tls(server, client[0])):
        said = done(machine, with_streams(script))
    assert re.fullmatch(r"pst-\w{12}-\w{40}\n", said), said
    assert (machine / "operator.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (CREDENTIALS, "get secret creds -o jsonpath='{.data.operator}' | base64 -d > operator.creds"),
        ("", "get secret demo-broker -o jsonpath='{.data.operator}'"),
        ("broker: {second: true}", 'URL="nats://operator-2:$PASSWORD@127.0.0.1:4222"'),
        (f"{OWN_NATS}gateway: {{requireKeys: false}}", ""),
    ],
)
def test_the_notes_name_where_the_operator_s_login_is(values: str, says: str) -> None:
    commands = first_key(values)
    assert says in commands
    assert bool(commands) == bool(says)


def test_the_notes_say_that_urls_in_a_secret_must_ask_for_tls() -> None:
    """helm cannot read them, and fails where they are values."""
    values = OWN_NATS.replace("urlsSecret: nats-urls", "urlsSecret: nats-urls, caSecret: ca")
    assert "those in the Secret nats-urls must begin so" in notes(values)
    assert "must begin so" not in notes(OWN_NATS)
