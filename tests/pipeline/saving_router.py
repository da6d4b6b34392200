"""A router that stores what it knows many times a second, or never.

``python -m tests.pipeline.saving_router router FLAGS``, with the seconds between two snapshots in ``SNAPSHOT_S``.
"""

import os
import sys

from penstock.cli.commands import main
from penstock.router.service import maintenance

if __name__ == "__main__":
    maintenance.SNAPSHOT_S = float(os.environ["SNAPSHOT_S"])
    sys.exit(main(sys.argv[1:]))
