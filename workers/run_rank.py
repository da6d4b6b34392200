"""The process of a rank other than 0 of a native engine over several GPUs; ``engines.native.ranks`` starts it."""

import os
import socket
import sys
import threading

from penstock.infra.process.gc_policy import freeze_loaded
from penstock.schemas.transfer import Memory
from penstock.workers.engines.native.build import build_follower
from penstock.workers.engines.native.ranks import RankLink, serve
from penstock.workers.kv_transfer.ranks import serve_transport
from penstock.workers.kv_transfer.transport_thread import open_transport


def main() -> None:
    """The arguments are the numbers of the descriptors of two sockets to rank 0: for steps, and for transfers."""
    steps, transfers = (RankLink(socket.socket(fileno=int(each))) for each in sys.argv[1:3])

    def built(pools: dict[str, Memory]) -> None:
        threading.Thread(target=serve_transport, args=(transfers, pools, open_transport), daemon=True).start()
        freeze_loaded()

    status = serve(steps, build_follower, built)
    sys.stdout.flush()
    os._exit(status)  # whatever threads of an exchange still wait


if __name__ == "__main__":
    main()
