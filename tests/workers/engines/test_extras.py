"""A worker without the packages that its engine needs says which line installs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.workers.engines.support import install_hint

ROOT = Path(__file__).parents[3]
# What ``penstock[native]`` adds to ``penstock``.
ABSENT = ("numpy", "torch", "transformers", "safetensors", "PIL", "nixl_cu12", "zmq")


def worker(broker: EmbeddedNats, *flags: str) -> "subprocess.CompletedProcess[str]":
    """A worker where the packages of the extra are not installed."""
    code = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({ABSENT!r})\n"  # None: an import raises ModuleNotFoundError
        "from penstock.cli.commands import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "worker", "--log-format=json", *flags],
        capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PENSTOCK_NATS_URL": broker.url("worker")},
    )  # fmt: skip


@pytest.mark.parametrize("role", ["aggregated", "encode"])
def test_a_native_worker_without_its_packages_names_the_extra(broker: EmbeddedNats, role: str) -> None:
    run = worker(broker, "--role", role)
    assert run.returncode == 2
    assert "pip install 'penstock[native]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_event_plane_zmq_without_its_package_names_the_extra(broker: EmbeddedNats) -> None:
    run = worker(broker, "--engine", "mock", "--event-plane", "zmq")
    assert run.returncode == 2
    assert "needs zmq: pip install 'penstock[zmq]'" in run.stderr


def test_front_processes_and_the_mock_engine_need_none_of_them() -> None:
    code = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({ABSENT!r})\n"
        "import penstock.gateway.run_gateway, penstock.router.run_router, penstock.workers.run_worker\n"
        "import penstock.launch.up\n"
        "import penstock.client\n"
        "from penstock.configs.settings import WorkerSettings\n"
        "from penstock.infra.model import modeldir\n"
        "from penstock.workers.runners.token_backend import build_engine\n"
        "modeldir.load(modeldir.TINY)\n"
        "print(type(build_engine(WorkerSettings(engine='mock', kv_blocks=64), modeldir.TINY)).__name__)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert run.returncode == 0, run.stderr


def test_workers_on_other_engines_import_nothing_of_transformers() -> None:
    """Two constants of the native engine's vision models cost each of them 1.4 CPU-seconds."""
    modules = [f"penstock.workers.engines.{name}" for name in ("vllm", "sglang", "trtllm", "openai")]
    code = f"import sys; sys.modules['transformers'] = None; import {', '.join(modules)}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert run.returncode == 0, run.stderr


def test_a_command_without_its_packages_names_the_extra() -> None:
    code = "import sys; sys.modules['numpy'] = None; from penstock.cli.commands import main; main(['bench', 'handoff'])"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (run.returncode, run.stderr) == (1, "penstock: this command needs numpy: pip install 'penstock[native]'\n")


def test_a_missing_module_that_no_extra_brings_is_not_explained_away() -> None:
    with pytest.raises(ModuleNotFoundError):
        install_hint(ModuleNotFoundError("No module named 'schemas'", name="schemas"), "native", "decode")
