"""A message of WORK as routers read it: that a request was sent to a worker. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.infra.bus.direct_get import Entry
from penstock.schemas import jobs
from penstock.schemas.blocks import read_keys
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.subjects import HEADER_KEYS, HEADER_LOAD, HEADER_MSG_ID, HEADER_SUSPECT, KEPT


def parse_stage(parts: list[str]) -> tuple[list[str], bool]:
    """
    Args:
        parts: of a message id in WORK, after the request and the attempt.
    Returns: what names the stage, and whether the message is a copy.
    """
    if KEPT in parts:
        return parts[: parts.index(KEPT)], True
    return parts, False


class Positions(NamedTuple):
    """Stream sequences that a router has folded."""

    kv: int
    work: int
    done: int


class Sent(msgspec.Struct, frozen=True):
    """
    Attributes:
        is_copy: of a running job, for routers only.
        handed: to a decode worker, by the prefill worker that computed the prompt.
        keys: of the full blocks of its prompt, if the router that placed it sent them.
        suspect: as in ``Job``.
    """

    request: str
    attempt: int
    worker: str
    role: str
    load: LoadHeader
    is_copy: bool
    handed: bool
    keys: Sequence[int] = ()
    suspect: str = ""


def read_sent(entry: Entry) -> Sent | None:
    """None: a revocation, which says nothing about loads.

    Raises:
        ValueError: it cannot be read.
    """
    header = entry.headers.get(HEADER_LOAD)
    if header is None:
        return None
    role, worker = entry.subject.split(".")[-2:]
    load = jobs.read_load_header(header)
    request, number, *numbers = entry.headers.get(HEADER_MSG_ID, "").split(":")
    stage, is_copy = parse_stage(numbers)
    if load.route and load.route[0].worker != worker:
        raise ValueError("the route begins at another worker")
    keys = entry.headers.get(HEADER_KEYS)
    return Sent(
        request,
        int(number),
        worker,
        role,
        load,
        is_copy,
        stage == ["decode"],
        read_keys(keys) if keys else (),
        entry.headers.get(HEADER_SUSPECT, ""),
    )
