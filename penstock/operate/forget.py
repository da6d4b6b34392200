"""``penstock forget``: delete what the log holds of requests that have ended.

Jobs are deleted first, then requests, then records: a router that starts in between must not find a job without its
end, which it would place again. The broker overwrites a deleted message's bytes on the disk.
"""

import argparse
import contextlib
import datetime
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from penstock.cli.figures import counted
from penstock.cli.terminal import confirmed, stdout
from penstock.configs.flags import Parser
from penstock.infra.bus.audit import recorded
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.forget import Ended, Eraser, check_stores, find_ended, forget_messages
from penstock.infra.nats_server.jetstream_api import BrokerProblem, request
from penstock.log_tools.sources.open_log import Log, LogSource, add_flags, in_order, open_cells, run_command
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import request_of_answer, time_of
from penstock.schemas.subjects import HEADER_NO_STORE

WHAT = 1000  # characters of ids in the audit log
TOGETHER = 500  # requests: what is noted of them is kept for half an hour, and erasing them takes minutes


class Forgotten(NamedTuple):
    """How many messages were deleted; when the last of their tokens leave the log (Unix time, ns; 0: none is left)."""

    requests: int
    messages: int
    tokens_gone_ns: int


def run(argv: Sequence[str]) -> int:
    """Delete stored requests and return the exit status."""
    parser = Parser(
        prog="penstock forget",
        description="delete the prompts, jobs and records of ended requests for good. Their tokens share messages with "
        "other requests' and expire by age; the command prints when. The broker erases messages slowly, so that other "
        "clients are not disturbed.",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="requests")
    parser.add_argument("--tenant", default="", metavar="NAME", help="all requests of a tenant that have ended")
    parser.add_argument("--yes", "-y", action="store_true", help="delete without asking")
    add_flags(parser)
    args = parser.parse_args(argv)
    if bool(args.ids) == bool(args.tenant):
        parser.error("give ids of requests, or --tenant")
    return run_command("forget", lambda: _run(args, stdout()))


async def _run(args: argparse.Namespace, console: Console) -> None:
    whole = bool(args.tenant)  # whose requests may be in any cell
    async with open_cells(LogSource.of(args), name="forget", role="operator", streams=(), whole=whole) as logs:
        if any(log.stopped for log in logs):
            raise ValueError("the deployment is stopped: start it, then forget its requests")
        ended: dict[int, list[Ended]] = {log.cell: [] for log in logs}
        if args.tenant:
            ended = {log.cell: await _of_tenant(log.bus, args.tenant) for log in logs}
        for request_id in dict.fromkeys(map(request_of_answer, args.ids)):
            cell, found = await _named(logs, request_id)
            ended[cell].append(found)
        count = sum(map(len, ended.values()))
        for guest in [guest for found in ended.values() for each in found for guest in each.guests]:
            with contextlib.suppress(ValueError):  # it was deleted there
                cell, there = await _named(logs, guest)
                ended[cell].append(there)
        if not count:
            raise ValueError(f"no request of tenant {args.tenant!r} has ended")
        whose = f" of tenant {args.tenant!r}" if args.tenant else ""
        question = f"Delete everything that is stored of {counted(count, 'request')}{whose}?"
        if not args.yes and not confirmed(question):
            raise ValueError("nothing was deleted; --yes deletes without asking")
        forgotten = []
        for log in logs:
            if not (own := ended[log.cell]):
                continue
            what = f"tenant {args.tenant}" if args.tenant else " ".join(each.id for each in own)[:WHAT]
            try:
                async with recorded(log.bus.nc, log.bus.subjects, "forget", what, counted(len(own), "request")):
                    forgotten.append(await forget(log.bus, own))
            except (BrokerProblem, ServingError) as error:
                raise ValueError(f"{error}; repeat the command to delete the rest") from error
    tokens = "their tokens, too"
    if tokens_gone_ns := max(each.tokens_gone_ns for each in forgotten):
        gone = datetime.datetime.fromtimestamp(tokens_gone_ns / 1e9)
        tokens = f"the last of their tokens leave the log by {gone:%Y-%m-%d %H:%M:%S}"
    console.print(
        f"deleted {counted(sum(each.messages for each in forgotten), 'message')} of {counted(count, 'request')}; "
        f"{tokens}",
        highlight=False,
        soft_wrap=True,
    )


async def _named(logs: Sequence[Log], request_id: str) -> tuple[int, Ended]:
    """A request that has ended, and its cell."""
    time_of(request_id)
    for log in in_order(logs, request_id):
        if (found := await find_ended(log.bus, request_id)) is not None:
            return log.cell, found
    raise ValueError(
        f"request {request_id} has not ended, or the log no longer has it; `penstock requests` lists those "
        f"that run, and DELETE /v1/requests/{request_id} cancels one"
    )


async def _of_tenant(bus: Bus, tenant: str) -> list[Ended]:
    stream, subject = bus.subjects.stream("DONE"), bus.subjects.done(tenant, "model", "id")
    pattern = ".".join([*subject.split(".")[:-2], "*", "*"])
    return [
        Ended(entry.subject.rpartition(".")[2], entry.subject, entry.time_ns, HEADER_NO_STORE in entry.headers)
        async for entry in read(bus, stream, pattern)
    ]


async def forget(bus: Bus, ended: Sequence[Ended]) -> Forgotten:
    """Delete the jobs, requests and records of these requests.

    Raises:
        ServingError: a stream cannot be read, or the broker's disk is full.
        BrokerProblem: the broker refuses to delete, or does not answer. What was not deleted is found again.
    """
    await check_stores(bus, "forget")
    eraser, messages = Eraser(bus), 0
    for at in range(0, len(ended), TOGETHER):
        messages += await forget_messages(bus, ended[at : at + TOGETHER], eraser)
    for each in ended if any(one.no_store for one in ended) else ():
        subject = bus.subjects.contents("*", each.id, ">")
        await request(bus.nc, f"STREAM.PURGE.{bus.subjects.stream('MEMORY_CONTENTS')}", {"filter": subject})
    config = (await request(bus.nc, f"STREAM.INFO.{bus.subjects.stream('TOKENS')}", {}))["config"]
    shared_ns = max((each.ended_ns for each in ended if not each.no_store), default=0)
    return Forgotten(len(ended), messages, shared_ns + config["max_age"] if shared_ns else 0)
