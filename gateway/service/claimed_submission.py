"""Submits a request under a key whose earlier request is not in the log. Used by both APIs."""

import msgspec

from penstock.gateway.admission.idempotency import Claim, reclaim
from penstock.gateway.log.inflight import InflightRequest
from penstock.gateway.service.service import Gateway
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest


async def submit_claimed(
    gateway: Gateway, tenant: str, name: str, body: bytes | None, request: GenerateRequest, claimed: Claim
) -> InflightRequest:
    """Run a request under a claim that another gateway made before it crashed, or whose request was deleted.

    In the first case the claim's own id is used: two gateways that find this at once store it once. In the second the
    log discards that id, and the request runs under its own.

    Args:
        name, body: as for ``claim``.
    Raises:
        ServingError: idempotency_conflict; or it could not be stored.
    """
    claim = await reclaim(gateway.bus, tenant, name, body, request.id, claimed)
    try:
        return await _submit_as(gateway, request, claim.request)
    except ServingError as error:
        if error.code is not Code.request_not_found:
            raise
    claim = await reclaim(gateway.bus, tenant, name, body, request.id, claimed, deleted=True)
    return await _submit_as(gateway, request, claim.request)


async def _submit_as(gateway: Gateway, request: GenerateRequest, request_id: str) -> InflightRequest:
    """Submit a request under another id, which is paid by what was reserved for its own."""
    gateway.payments.rename(request.id, request_id)
    try:
        return await gateway.submit(msgspec.structs.replace(request, id=request_id), owner=False)
    finally:
        gateway.payments.rename(request_id, request.id)  # if it was not submitted
