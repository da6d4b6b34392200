"""``penstock up`` whose routers share their requests whatever they have to do, and begin and end that all the time.

``python -m tests.chaos.shared up FLAGS`` is the supervisor, which starts routers through this module again.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.flags import parse
from configs.up_settings import UpSettings

if TYPE_CHECKING:
    from router.ownership.sharing import Sharing

TURN_S = 4.0


def main(argv: Sequence[str]) -> int:
    role, *flags = argv
    if role == "up":
        return _supervise(flags)
    from infra.cli import main as penstock
    from router.ownership.sharing import Sharing

    Sharing.update = _by_turns  # type: ignore[method-assign]
    return penstock(list(argv)) or 0


def _by_turns(self: "Sharing", busy: float, rate: float, now: float, *, own_rate: float = 0.0) -> bool:
    return now // TURN_S % 2 == 0


def _supervise(flags: Sequence[str]) -> int:
    from infra.launch.main import run
    from infra.launch.plan import Planned

    def command(planned: Planned) -> list[str]:
        module = "tests.chaos.shared" if planned.argv[0] == "router" else "infra.cli"
        return [sys.executable, "-m", module, *planned.argv]

    return run(parse(UpSettings, flags, prog="penstock up"), command=command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
