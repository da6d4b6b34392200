"""``penstock up`` whose gateways have used as much CPU time as a file says, and which waits less before it acts.

``python -m tests.pipeline.scaled_up up FLAGS``, with the file in ``CPU_USE``: the share of a core of each gateway, and
the idle cores.
"""

import os
import sys
from pathlib import Path

from penstock.cli.commands import main
from penstock.launch import deployment, gateways
from penstock.launch.gateways import CpuMeter, CpuUse

LOOK_S = 0.1


class ToldMeter(CpuMeter):
    def look(self, now: float, pids: "dict[str, int | None]") -> CpuUse | None:  # type: ignore[override]
        if super().look(now, pids) is None:
            return None
        share, idle = map(float, Path(os.environ["CPU_USE"]).read_text(encoding="ascii").split())
        return CpuUse(dict.fromkeys(pids, share), idle)


if __name__ == "__main__":
    deployment.LOOK_S, deployment.CpuMeter = LOOK_S, ToldMeter  # type: ignore[misc]
    gateways.BUSY_S = gateways.SPARE_S = 4 * LOOK_S
    sys.exit(main(sys.argv[1:]))
