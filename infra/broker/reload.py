"""Makes a running embedded broker reload its configuration, from any process of its user.

A tenant's account that is new to the server has its stream imports at once, but its service imports only after a second
reload (nats-server 2.15.1), so there are always two. Connections, subscriptions and replies of others are not
disturbed, but while the accounts are exchanged a submission may be answered with "no responders": nothing is stored
then, and its client publishes it again (3 of 11,954 during 50 reloads).
"""

import os
import re
import signal
import time
from pathlib import Path

from penstock.infra.broker.jetstream_api import BrokerProblem
from penstock.infra.broker.server import was_started_with

RELOAD_S = 10.0
_DONE = re.compile(rb"Reloaded server configuration|Failed to reload server configuration: (.*)")


def reload(data_dir: Path) -> None:
    """Have the broker that runs on this folder apply the configuration in it.

    Raises:
        BrokerProblem: no broker runs there, or it refused the configuration.
    """
    pid = running_pid(data_dir)
    log = data_dir / "nats.log"
    for _ in range(2):
        seen = log.stat().st_size
        os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_S
        while (match := _DONE.search(_since(log, seen))) is None:
            if time.monotonic() > deadline:
                raise BrokerProblem(f"the broker (pid {pid}) did not reload within {RELOAD_S:g} s; see {log}")
            time.sleep(0.01)
        if match[1]:
            raise BrokerProblem(f"the broker refused its new configuration: {match[1].decode(errors='replace')}")


def running_pid(data_dir: Path) -> int:
    """
    Raises:
        BrokerProblem: no broker runs there.
    """
    config = str((data_dir / "nats.conf").resolve())
    try:
        pid = int((data_dir / "nats.pid").read_text())
        if pid > 0 and was_started_with(pid, config):
            return pid
    except (OSError, ValueError):
        pass
    raise BrokerProblem(f"no broker runs on {data_dir}: start 'penstock up' or 'penstock nats', or give --data-dir")


def _since(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()
