"""A stand-in of systemd: ``systemctl`` for the units of one host, whose processes run in the caller's namespaces.

It reads what `penstock systemd` writes and refuses other directives; ``User=`` is not heeded, as the interpreter that
runs the tests may be readable by root only.
"""

import sys
from pathlib import Path

COMMANDS = Path(__file__).with_name("commands.py")


def install(folder: Path) -> Path:
    """Make ``systemctl`` in a folder for PATH. Its state is where ``SYSTEMD_STANDIN`` says."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "systemctl"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {COMMANDS} "$@"\n')
    script.chmod(0o755)
    return folder
