"""``penstock up`` whose routers share their requests whatever they have to do, and begin and end that all the time.

``python -m tests.chaos.shared up FLAGS`` is the supervisor, which starts routers through this module again.
"""

import sys
from collections.abc import Sequence

from configs.flags import parse
from configs.up_settings import UpSettings


def main(argv: Sequence[str]) -> int:
    role, *flags = argv
    if role == "up":
        return _supervise(flags)
    from infra.cli import main as penstock
    from router.ownership import sharing

    sharing.BUSY, sharing.BUSY_S, sharing.CALM, sharing.CALM_S = 0.0, 1.0, 1.1, 2.0
    return penstock(list(argv)) or 0


def _supervise(flags: Sequence[str]) -> int:
    from infra.launch.main import run
    from infra.launch.plan import Planned

    def command(planned: Planned) -> list[str]:
        module = "tests.chaos.shared" if planned.argv[0] == "router" else "infra.cli"
        return [sys.executable, "-m", module, *planned.argv]

    return run(parse(UpSettings, flags, prog="penstock up"), command=command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
