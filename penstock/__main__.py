"""``python -m penstock``: the ``penstock`` command, also in a checkout in which nothing is installed."""

import sys

from penstock.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
