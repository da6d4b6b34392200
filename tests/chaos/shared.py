"""A router that shares its requests whatever it has to do, and begins and ends that all the time.

``python -m tests.chaos.shared router FLAGS``; ``tests.chaos.launch`` starts routers so, those of another build, too.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.router.ownership.intake import Sharing

TURN_S = 4.0


def main(argv: Sequence[str]) -> int:
    from penstock.cli.commands import main as penstock
    from penstock.router.ownership.intake import Sharing

    Sharing.update = _by_turns  # type: ignore[method-assign]
    return penstock(list(argv)) or 0


def _by_turns(self: "Sharing", busy: float, rate: float, now: float, *, own_rate: float = 0.0) -> bool:
    return now // TURN_S % 2 == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
