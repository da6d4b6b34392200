"""Whether requests with ``no_store`` can be taken: only where every router erases them after their end."""

import time

import msgspec

from infra.bus.connection import Bus
from infra.bus.direct_get import read
from schemas import routers
from schemas.errors import Code, ServingError
from schemas.routers import LEASE_S

TRUST_S = 1.0  # how long an answer of the bucket is used


class ErasureCheck:
    """Looks at the routers' leases, at most once a second, and only for requests with ``no_store``."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._checked = {False: -TRUST_S, True: -TRUST_S}  # with media

    async def check(self, *, sharded: bool, media: bool = False) -> None:
        """
        Args:
            sharded: routers read shards of REQUESTS.
            media: the request has media.
        Raises:
            ServingError: unsupported: a process or the broker is of an earlier release; broker_unavailable.
        """
        if not sharded:
            raise _unsupported("the broker has the consumers of release 0.1; see 'penstock streams apply'")
        if time.monotonic() - self._checked[media] < TRUST_S:
            return
        bucket = self._bus.subjects.bucket("routers")
        oldest_ns = time.time_ns() - int((LEASE_S + TRUST_S) * 1e9)
        async for entry in read(self._bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
            if not entry.data or "KV-Operation" in entry.headers or entry.time_ns < oldest_ns:
                continue
            try:
                member = routers.decode(entry.data)
                supported = member.no_store and (member.private_media or not media)
            except msgspec.MsgspecError:
                supported = False
            if not supported:
                what = "images" if media else "requests"
                name = entry.subject.rpartition(".")[2]
                raise _unsupported(f"router {name} is of a release that does not erase {what}; update it first")
        self._checked[media] = time.monotonic()


def _unsupported(why: str) -> ServingError:
    return ServingError(Code.unsupported, f"no_store cannot be kept: {why}", param="no_store")
