"""A stand-in of Slurm: one machine, no authentication, and only the options that ``penstock slurm`` uses.

``install`` makes a folder of commands for the PATH. Jobs run at once as children of nobody; what runs is kept as files
in the folder ``$SLURM_STANDIN``. An option that is not in ``OPTIONS`` is refused, and a test compares these with the
options of Slurm 22.05 in ``tests/data``.
"""

import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scancel")


def install(folder: Path) -> Path:
    """Make the commands; their folder, for the PATH."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    # -I -S: without packages, which would take longer to find than the command takes.
    text = f'#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__).parent / "commands.py"} NAME "$@"\n'
    for name in COMMANDS:
        path = binaries / name
        path.write_text(text.replace("NAME", name))
        path.chmod(0o755)
    return binaries
