"""The page on several machines, command by command as printed, on three hosts: network namespaces of this machine.
Then that on upgrades, there and back again.

Each host has an address, /etc, /var/lib and /opt of its own. `systemctl` is a stand-in, `scp` copies into the other
host's folder, and what the blocks for installing fetch is there already; all else is real.
"""

import asyncio
import json
import os
import re
import select
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from penstock.infra.nats_server.binary import find_server
from tests.pipeline.support import ROOT
from tests.standins import systemd
from tests.workers.kv_transfer.support import needs_nixl

PAGE = (ROOT / "docs/several-machines.md").read_text()
HOSTS = ("host-1", "host-2", "host-3")
ADMIN = "the admin machine"
NET = "10.78.0"
BLOCK_S = 150.0
TOKENS = 24
PROMPT = "a long question " * 240  # a decode worker without a GPU computes up to 256 tokens itself
EMPTY_S = 0.05  # between two requests of a client

UPGRADES = (ROOT / "docs/upgrades.md").read_text()


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each."""
    return [(found[1], found[2]) for found in re.finditer(r"```(\w+)\n(.*?)```", page, re.S)]


def typed(page: str) -> list[str]:
    """Those that say on which machine they are typed."""
    return [text for kind, text in blocks(page) if kind == "sh" and text.startswith("# On ")]


SHELL, UPGRADE = typed(PAGE), typed(UPGRADES)


def possible() -> bool:
    """Whether this user may make network and mount namespaces."""
    if not all(shutil.which(each) for each in ("ip", "unshare", "openssl", "curl", "useradd")):
        return False
    probe = "unshare -mn sh -c 'mount --make-rprivate / && mount --bind /opt /opt && ip link add type veth'"
    return os.geteuid() == 0 and subprocess.run(probe, shell=True, capture_output=True, check=False).returncode == 0


pytestmark = [
    needs_nixl,
    pytest.mark.skipif(not os.environ.get("PENSTOCK_TEST_HOSTS"), reason="takes three minutes: make test-hosts"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not possible(), reason="needs root, for namespaces"),
]


# As pip makes it, and it says of which installation it is.
PROGRAM = """#!{python} -P
import os, sys
os.environ |= {{"PYTHONPATH": "{root}", "PYTHONSAFEPATH": "1"}}
sys.path.insert(0, "{root}")
print("installation {number}", file=sys.stderr, flush=True)
from penstock.cli.commands import main
sys.exit(main())
"""


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=30)


class Host:
    """One machine, with a root's shell in it that goes on from block to block."""

    def __init__(self, name: str, place: int, folder: Path, net: str) -> None:
        self.name = name
        self.address = f"{NET}.{place}"
        self.root = folder / name.replace(" ", "-")
        self.state = self.root / "run"
        self._space = f"{net}-{place}"
        for each in ("var", "opt/penstock-1/bin", "opt/penstock-2/bin", "home", "bin"):
            (self.root / each).mkdir(parents=True)
        (self.root / "opt/penstock").symlink_to("penstock-1")
        subprocess.run(["cp", "-a", "/etc", self.root / "etc"], check=True, capture_output=True)
        (self.root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
        hosts = [f"{NET}.{number} {each}" for number, each in enumerate(HOSTS, 1)]
        (self.root / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        self._programs(folder)
        link = f"{net}v{place}"
        sh(f"ip netns add {self._space} && ip link add {link} type veth peer name eth0 netns {self._space}")
        sh(f"ip link set {link} master {net} up && ip -n {self._space} link set lo up")
        sh(f"ip -n {self._space} addr add {self.address}/24 dev eth0 && ip -n {self._space} link set eth0 up")
        self._shell = subprocess.Popen(
            self.inside("bash", "-e"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=self.root / "home", env=self._environ(), start_new_session=True,
        )  # fmt: skip

    def _programs(self, folder: Path) -> None:
        for number in (1, 2):
            installed = self.root / f"opt/penstock-{number}/bin"
            (installed / "penstock").write_text(PROGRAM.format(python=sys.executable, root=str(ROOT), number=number))
            (installed / "penstock").chmod(0o755)
            (installed / "nats-server").symlink_to(find_server())
        systemd.install(self.root / "bin")
        copies = (
            f'last=${{!#}}; host=${{last%%:*}}; host=${{host#root@}}\ncp "${{@:2:$#-2}}" {folder}/$host"${{last#*:}}"\n'
        )
        (self.root / "bin/scp").write_text(f"#!/bin/bash\nset -e\n[[ $1 == -q ]]\n{copies}")
        (self.root / "bin/scp").chmod(0o755)

    def _environ(self) -> dict[str, str]:
        own = {
            "PATH": f"{self.root / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.root / "home"),
        }
        return own | {"SYSTEMD_STANDIN": str(self.state), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}

    def inside(self, *command: str) -> list[str]:
        binds = " && ".join(
            f"mount --bind {self.root / own} {place}"
            for own, place in (("etc", "/etc"), ("var", "/var/lib"), ("opt", "/opt"))
        )
        script = f'mount --make-rprivate / && {binds} && hostname {self.name.split()[-1]} && exec "$@"'
        return ["ip", "netns", "exec", self._space, "unshare", "-m", "-u", "sh", "-c", script, "sh", *command]

    def run(self, block: str) -> str:
        """Type a block into the shell. Returns what it printed."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{block}\necho; echo =done=\n".encode())
        self._shell.stdin.flush()
        said, until = b"", time.monotonic() + BLOCK_S
        while not said.endswith(b"=done=\n"):
            left = until - time.monotonic()
            if not select.select([self._shell.stdout], [], [], max(0.0, left))[0]:
                raise AssertionError(f"{self.name}: not within {BLOCK_S:g} s:\n{block}\n{said.decode()}\n{self.logs()}")
            piece = os.read(self._shell.stdout.fileno(), 65536)
            assert piece, f"{self.name}: failed:\n{block}\n{said.decode()}\n{self.logs()}"
            said += piece
        return said.decode()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.state.glob("*.log")))

    def close(self) -> None:
        pids = subprocess.run(["ip", "netns", "pids", self._space], capture_output=True, text=True, check=False).stdout
        subprocess.run(["kill", "-KILL", *pids.split()], capture_output=True, check=False)
        self._shell.kill()
        self._shell.wait()
        for pipe in (self._shell.stdin, self._shell.stdout):
            assert pipe is not None
            pipe.close()
        subprocess.run(["ip", "netns", "del", self._space], capture_output=True, check=False)


class Site:
    def __init__(self, folder: Path) -> None:
        self.net = f"ps{os.getpid() % 100000}"
        sh(f"ip link add {self.net} type bridge && ip link set {self.net} up")
        sh(f"ip addr add {NET}.254/24 dev {self.net}")
        self.hosts: dict[str, Host] = {}
        for place, name in enumerate((*HOSTS, ADMIN), 1):
            self.hosts[name] = Host(name, place, folder, self.net)

    @property
    def admin(self) -> Host:
        return self.hosts[ADMIN]

    def chosen(self, block: str) -> list[Host]:
        """Where a block is typed, as its first line says."""
        where = block.partition("\n")[0].removeprefix("# On ")
        every = where.startswith("each host")
        chosen = [each for each in (*HOSTS, ADMIN) if each in where or (every and each != ADMIN)]
        assert chosen, where
        return [self.hosts[name] for name in chosen]

    def run(self, block: str) -> list[str]:
        return [host.run(block) for host in self.chosen(block)]

    def installations(self, unit: str) -> list[int]:
        """Which one each start of a unit was of, host by host."""
        logs = [(self.hosts[name].state / f"{unit}.log").read_text() for name in HOSTS]
        return [int(re.findall(r"^installation (\d)", log, re.M)[-1]) for log in logs]

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        subprocess.run(["ip", "link", "del", self.net], capture_output=True, check=False)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()


class Load:
    """Clients of both tenants at all gateways, over HTTPS: one request after the other.

    Args:
        gateways_restart: a connection that is refused is tried again, and each request has its own.
    """

    def __init__(self, site: Site, *, gateways_restart: bool = False) -> None:
        self._again = gateways_restart
        home = site.admin.root / "home"
        self._context = ssl.create_default_context(cafile=home / "ca.crt")
        self._keys = {tenant: (home / f"{tenant}.key").read_text().split()[-1] for tenant in ("acme", "blue")}
        self._site = site
        self._stop = asyncio.Event()
        self.answers: list[tuple[str, str, int, str]] = []

    async def client(self, host: str, tenant: str) -> None:
        base = f"https://{self._site.hosts[host].address}:8000"
        body = {"model": "demo", "max_tokens": TOKENS, "ignore_eos": True}
        kept = httpx.Limits(max_keepalive_connections=0) if self._again else httpx.Limits()
        async with httpx.AsyncClient(
            base_url=base, verify=self._context, trust_env=False, timeout=120, limits=kept
        ) as http:
            number = 0
            while not self._stop.is_set():
                number += 1
                asked = body | {"messages": [{"role": "user", "content": f"{host} {tenant} {number}: {PROMPT}"}]}
                try:
                    answer = await http.post(
                        "/v1/chat/completions",
                        json=asked,
                        headers={"Authorization": f"Bearer {self._keys[tenant]}", "Host": host},
                        extensions={"sni_hostname": host},
                    )
                except httpx.ConnectError:
                    if not self._again:
                        raise
                    await asyncio.sleep(EMPTY_S)
                    continue
                self.answers.append((host, tenant, answer.status_code, answer.text))
                await asyncio.sleep(EMPTY_S)

    async def during(self, work: list[tuple[Host, str]]) -> None:
        """Ask while the blocks run, one after the other."""
        async with asyncio.TaskGroup() as group:
            for name in HOSTS:
                for tenant in ("acme", "blue"):
                    group.create_task(self.client(name, tenant))
            try:
                for host, block in work:
                    await asyncio.to_thread(host.run, block)
            finally:
                self._stop.set()


NATS_CLIENT = """
import asyncio, json, sys
from penstock import Client
async def main():
    for tenant in ("acme", "blue"):
        url = json.load(open(f"operator/tenants/{tenant}.json"))["nats_url"]
        async with Client(url) as client:
            answer = await client.chat(model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=5)
            print("answered", tenant, answer.usage.completion_tokens)
asyncio.run(main())
"""


async def test_the_page_makes_a_deployment_whose_brokers_restart_under_load(site: Site) -> None:
    *made, restart = SHELL
    assert "one after the other" in restart.partition("\n")[0]
    for block in [each for each in made if ".whl" not in each]:  # Penstock is on the hosts already
        await asyncio.to_thread(site.run, block)

    load = Load(site)
    await load.during([(site.hosts[name], restart) for name in HOSTS])
    bad = [answer for answer in load.answers if answer[2] != 200]
    assert not bad, f"{len(bad)} of {len(load.answers)}: {bad[0]}"
    seen = {(host, tenant) for host, tenant, *_ in load.answers}
    assert len(seen) == 6
    assert {json.loads(text)["usage"]["completion_tokens"] for *_, text in load.answers} == {TOKENS}
    for name in HOSTS:  # each broker did restart, by itself, within its bound
        log = (site.hosts[name].state / "penstock-nats.log").read_text()
        assert log.count("Server is ready") == 2
        assert "certificate is valid for" not in log, "servers tell each other the names in their certificates"
        assert not list(site.hosts[name].state.glob("*.killed"))

    (site.admin.root / "home/nats_client.py").write_text(NATS_CLIENT)
    python = f"PYTHONPATH={ROOT} PYTHONSAFEPATH=1 SSL_CERT_FILE=$PWD/ca.crt {sys.executable}"
    said = await asyncio.to_thread(site.admin.run, f"{python} nats_client.py")
    assert "answered acme 5" in said
    assert "answered blue 5" in said

    await asyncio.to_thread(every_target_answers, site)
    said = await asyncio.to_thread(site.admin.run, 'penstock doctor --nats-url "$PENSTOCK_NATS_URL" || true')
    assert "0 problems" in said
    read = 0.0
    for name in ("host-2", "host-3"):  # KV blocks went there from host-1
        page = await asyncio.to_thread(site.admin.run, f"curl -fsS http://{name}:9201/metrics")
        read += sum(
            float(value) for value in re.findall(r"^penstock_handoff_read_bytes_total\{.*\} (\S+)$", page, re.M)
        )
    assert read > 0
    await upgrade_and_go_back(site)


UNITS = ("penstock-router", "penstock-worker@9201", "penstock-gateway")


async def upgraded(site: Site, work: list[str]) -> None:
    """Type blocks on one host after the other, under load; nothing may be refused."""
    load = Load(site, gateways_restart=True)
    await load.during([(host, block) for block in work for host in site.chosen(block)])
    bad = [answer for answer in load.answers if answer[2] != 200]
    assert not bad, f"{len(bad)} of {len(load.answers)}: {bad[0]}"
    assert {json.loads(text)["usage"]["completion_tokens"] for *_, text in load.answers} == {TOKENS}


async def upgrade_and_go_back(site: Site) -> None:
    *forth, back = UPGRADE
    _, _, routers, _, workers, gateways, _ = forth
    await upgraded(site, forth)
    for unit in UNITS:
        assert site.installations(unit) == [2, 2, 2], unit
    again = [block.replace("ln -sfn penstock-2 /opt/penstock\n", "") for block in (gateways, workers, routers)]
    await upgraded(site, [back, *again])
    for unit in UNITS:
        assert site.installations(unit) == [1, 1, 1], unit


def every_target_answers(site: Site) -> None:
    """The Prometheus configuration of the page names pages that are there."""
    (text,) = [text for kind, text in blocks(PAGE) if kind == "yaml"]
    ours = [job for job in yaml.safe_load(text)["scrape_configs"] if job["job_name"] != "node"]
    assert len(ours) == 2
    for job in ours:
        for target in (each for group in job["static_configs"] for each in group["targets"]):
            url = f"{job.get('scheme', 'http')}://{target}/metrics"
            assert "penstock_" in site.admin.run(f"curl -fsS --cacert ca.crt {url} | grep -m 1 ^penstock_")
