"""Returns what a worker ran when its process ended to the routers, before the worker is started again.

Its next life would do so from the same journal, but only once it is connected, and without knowing the exit status.
"""

import contextlib
from pathlib import Path

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.broker.jetstream_api import BrokerProblem
from penstock.launch.nats import connect_operator
from penstock.schemas.subjects import Subjects
from penstock.workers.session.crash_journal import (
    End,
    LastLife,
    boot_id,
    judge,
    killed_for_memory,
    paths,
    read_journal,
    returns,
)

log = structlog.get_logger("up")

STORE_S = 1.0


async def report_end(folder: Path, name: str, status: int, url: str, subjects: Subjects) -> None:
    """
    Args:
        folder: the worker's state folder.
        status: exit status, negative for a signal.
        url: of the broker, for the operator. If it does not answer, the worker's next life reports the end.
    """
    path, _ = paths(folder, name)
    try:
        life = read_journal(path.read_bytes())
    except OSError:
        return
    if life is None or not life.running:
        return
    end = judge(life, boot=boot_id(), killed=killed_for_memory(), status=status)
    log.warning(
        "worker_ended", name=name, status=status, crashed=end.crashed, why=end.reason, requests=len(life.running)
    )
    with contextlib.suppress(OSError):
        if await _stored(life, end, url, subjects):
            path.write_bytes(b"")
        else:
            with path.open("ab") as journal:
                journal.write(msgspec.json.encode(end) + b"\n")


async def _stored(life: LastLife, end: End, url: str, subjects: Subjects) -> bool:
    try:
        nc = await connect_operator(url)
    except BrokerProblem:
        return False
    try:
        js = nc.jetstream(timeout=STORE_S)
        for each in returns(life, end, subjects):
            await js.publish(each.subject, each.payload, headers=each.headers | {"Nats-Msg-Id": each.id})
        return True
    except (NatsError, TimeoutError, OSError) as error:
        log.warning("worker_end_not_stored", error=repr(error), action="its next life reports it")
        return False
    finally:
        await nc.close()
