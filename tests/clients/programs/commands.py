"""How programs run the command-line tools of their environment."""

import os
import subprocess
import sys
from pathlib import Path


def run_tool(name: str, *arguments: str, cwd: Path | None = None, within_s: float = 400, **variables: str) -> str:
    """What it printed.

    Raises:
        AssertionError: it failed.
    """
    command = [str(Path(sys.executable).parent / name), *arguments]
    ended = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert ended.returncode == 0, f"{name} ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-600:]}"
    return ended.stdout
