"""The kernels of multi-head latent attention, by Triton's interpreter, where Triton is installed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="torch's CPU build comes without Triton")
@pytest.mark.timeout(600)
def test_kernels_over_latents_compute_what_the_reference_does() -> None:
    command = [sys.executable, "-m", "tests.gpu.mla", "check", "--device", "cpu"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
