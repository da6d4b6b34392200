"""One deployment of the demo model, and each client's program against it, one after the other."""

import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.infra.model import modeldir
from penstock.launch.state import read_state
from tests.clients.catalogue import HERE, Client
from tests.clients.environments import Environments
from tests.workers.engines.embed.test_native import cross_encoder
from tests.workers.engines.native import qwen_vl

START_S, STOP_S, PROGRAM_S = 120.0, 60.0, 900.0


class Served(NamedTuple):
    """``key``: without it, requests are refused."""

    url: str
    model: str
    key: str


@contextlib.contextmanager
def deployment() -> Iterator[Served]:
    """The demo model on the native engine, with its vectors, a random cross-encoder, a random vision model and an API
    key, on free ports of this machine."""
    with tempfile.TemporaryDirectory(prefix="penstock-clients-") as name:
        data, root, penstock = Path(name) / "data", HERE.parents[1], [sys.executable, "-m", "penstock"]
        flags = ("--http-port", "0", "--data-dir", str(data), "--dashboard-port", "-1", "--embed", "1")
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        with (Path(name) / "up.log").open("wb") as out:
            up = subprocess.Popen([*penstock, "up", *flags], stdout=out, stderr=out, env=variables, cwd=root)
        try:
            _wait(up, Path(name) / "up.log")
            made = [*penstock, "keys", "create", "--quiet", "--data-dir", str(data)]
            key = subprocess.run(made, check=True, capture_output=True, text=True, timeout=START_S, cwd=root)
            state = read_state(data / "state.json")
            ranker, seeing = cross_encoder(Path(name) / "ranker"), Path(name) / "seeing"
            seeing.mkdir()
            sees = ("--engine", "native", "--model", str(qwen_vl.write(seeing)), "--kv-blocks", "100")
            variables["PENSTOCK_NATS_URL"] = state.nats_url
            with (
                _worker(Path(name), "ranker", "--role", "embed", "--model", str(ranker), **variables),
                _worker(Path(name), "seeing", *sees, **variables),
            ):
                yield Served(state.http_url, "demo", key.stdout.strip())
        finally:
            up.terminate()
            up.wait(STOP_S)


@contextlib.contextmanager
def _worker(folder: Path, name: str, *flags: str, **variables: str) -> Iterator[None]:
    """A worker of another model beside those of the deployment."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "penstock", "worker", "--served-model-name", name, "--device", "cpu", *flags]
        worker = subprocess.Popen(command, stdout=out, stderr=out, env=variables, cwd=HERE.parents[1])
    try:
        _wait(worker, log, "worker_registered")
        yield
    finally:
        worker.terminate()
        worker.wait(STOP_S)


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _wait(up: "subprocess.Popen[bytes]", log: Path, says: str = "Penstock serves") -> None:
    deadline = time.monotonic() + START_S
    while says not in (said := log.read_text(errors="replace")):
        if up.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the deployment did not start:\n{said}")
        time.sleep(0.2)


def run_all(clients: Sequence[Client], folder: Path, *, newest: bool) -> dict[str, Any]:
    """What each client's program found, by name. One that does not even start has the reason in ``problem``."""
    environments = Environments(folder, newest=newest)
    found: dict[str, Any] = {}
    with deployment() as served:
        for client in clients:
            print(f"{client.name}", flush=True)
            try:
                found[client.name] = _run(client, environments, served)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                found[client.name] = {"versions": {}, "checks": [], "problem": f"{type(error).__name__}: {error}"[:400]}
                print(f"  failed  {found[client.name]['problem']}", flush=True)
    return found


def _run(client: Client, environments: Environments, served: Served) -> Any:
    program = str(HERE / "programs" / client.program)
    with tempfile.TemporaryDirectory(prefix="penstock-client-") as home:
        results = Path(home) / "results.json"
        variables = os.environ | {
            "CLIENTS_URL": served.url,
            "CLIENTS_MODEL": served.model,
            "CLIENTS_KEY": served.key,
            "CLIENTS_TOKENIZER": str(modeldir.DEMO),
            "CLIENTS_RESULTS": str(results),
            "CLIENTS_PICTURE": _data_url("image/png", qwen_vl.picture(90, 60)),
            "CLIENTS_FILM": _data_url("video/mp4", qwen_vl.film(20, 5, 64, 48)),
            "HOME": home,  # clients keep their settings there
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if client.requirements:
            interpreter = environments.python(client.requirements)
        else:
            interpreter, modules = environments.node()
            path = f"{interpreter.parent}:{os.environ['PATH']}"
            variables |= {"CLIENTS_NODE_MODULES": str(modules), "CLIENTS_PYTHON": sys.executable, "PATH": path}
        command = [str(interpreter), program]
        # A session of its own: what a client left running ends with it.
        with subprocess.Popen(
            command, env=variables, cwd=home, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                process.wait(PROGRAM_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        return json.loads(results.read_text(encoding="utf-8"))
