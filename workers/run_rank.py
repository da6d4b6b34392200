"""The process of a rank other than 0 of a native engine over several GPUs; ``engines.native.ranks`` starts it."""

import os
import socket
import sys

from penstock.workers.engines.native.build import build_follower
from penstock.workers.engines.native.ranks import Link, serve


def main() -> None:
    """The argument is the number of the descriptor of a socket to rank 0."""
    with socket.socket(fileno=int(sys.argv[1])) as end:
        status = serve(Link(end), build_follower)
        sys.stdout.flush()
        os._exit(status)  # whatever threads of an exchange still wait


if __name__ == "__main__":
    main()
