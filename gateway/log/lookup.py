"""Finds a request by its id, if the caller may see it: its record once it has ended, its message while it runs.

A few round trips, however much the log holds. Who may see a request is decided here and nowhere else.
"""

from typing import NamedTuple

import msgspec

from penstock.gateway.log.find import RequestFinder, erased, unknown
from penstock.gateway.log.records import Records, is_whole, request_of
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.forget import DeletedRequests
from penstock.infra.bus.memory import find_request, lost
from penstock.schemas import done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.ids import time_of
from penstock.schemas.requests import GenerateRequest


class StoredRequest(NamedTuple):
    """``record``: None while the request runs."""

    request: GenerateRequest
    record: done.Done | None


class RequestLookup:
    """
    Args:
        grace_s: how long the content of a request with ``no_store`` is kept after its end.
    Attributes:
        deleted: requests of which something may be in the log yet, or again; known from its ``start`` on.
    """

    def __init__(self, bus: Bus, records: Records, finder: RequestFinder, grace_s: float) -> None:
        self._bus = bus
        self._records = records
        self._finder = finder
        self._grace_ns = int(grace_s * 1e9)
        self.deleted = DeletedRequests(bus)

    async def find(self, request_id: str, tenant: str | None = None, *, deleted: bool = False) -> StoredRequest:
        """
        Args:
            tenant: of the caller; None: this API has no tenants, and anyone with the id may use it.
            deleted: find it though it was deleted, if something of it is there.
        Raises:
            ServingError: request_not_found, also if it is another tenant's; request_erased; content_lost;
                broker_unavailable.
        """
        try:
            time_of(request_id)
        except ValueError:
            raise unknown(request_id) from None
        if request_id in self.deleted and not deleted:
            raise unknown(request_id)
        stored = await self._find(request_id, tenant)
        if tenant is not None and stored.request.tenant != tenant:
            raise unknown(request_id)
        return stored

    async def _find(self, request_id: str, tenant: str | None) -> StoredRequest:
        record = await self._records.find(request_id)
        request = request_of(record) if record is not None else None
        if request is not None and tenant not in (None, request.tenant):
            raise unknown(request_id)
        if record is not None and request is not None and is_whole(record) and "prompt" not in record.left_out:
            return StoredRequest(request, record)
        if request is not None and request.no_store:
            return StoredRequest(await self._with_content(request, record), record)
        # The rest is read from the log, where the stored request says from when on.
        try:
            whole = await self._finder.find(request_id)
        except ServingError as error:
            if error.code is not Code.request_not_found or record is None or request is None:
                raise
            if "prompt" in record.left_out:  # only its length is recorded
                request = msgspec.structs.replace(request, prompt=bytes(4 * record.usage.prompt))
            return StoredRequest(request, record)
        if whole.no_store:
            return StoredRequest(await self._with_content(whole, record), record)
        return StoredRequest(whole, record)

    async def _with_content(self, request: GenerateRequest, record: done.Done | None) -> GenerateRequest:
        """
        Raises:
            ServingError: request_erased, content_lost, broker_unavailable.
        """
        whole = await find_request(self._bus, request)
        if whole is not None:
            return whole
        if record is None or record.code == Code.content_lost:
            raise lost(request.id)
        left_ns = await self._records.ended_ns(request.id) + self._grace_ns - self._bus.clock.now_ns()
        raise lost(request.id) if left_ns > 0 else erased(request.id)  # nobody deletes it before its grace is over
