"""Makes a request of a NATS client's message: once, however often and to whichever gateway it is sent."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.gateway.access.authentication import TenantTable
from penstock.gateway.admission.idempotency import claim, digest_of, find_claim
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest, with_trace
from penstock.gateway.apis.endpoints import ignored_options, listed
from penstock.gateway.http.asgi import NEW_TRACE, PARENT, STATE
from penstock.gateway.nats.delivery import AcceptedRequest, AnswerDelivery
from penstock.gateway.nats.protocol import Origin, parse_headers, shape_of
from penstock.gateway.service.gateway import Gateway, submit_claimed
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.trace import Trace, asked


def from_nats_headers(headers: Mapping[str, str], tracing: str) -> Trace | None:
    """NATS headers: names keep the case that the client wrote."""
    if tracing == "off":
        return None
    fields = {name.lower(): value for name, value in headers.items() if name.lower() in (PARENT, STATE)}
    if PARENT in fields and (trace := asked(fields[PARENT], fields.get(STATE, ""))) is not None:
        return trace
    return NEW_TRACE if tracing == "all" else None


VALUE_BYTES = 24  # of a float32 as JSON, its comma included, at most


def check_vectors(request: GenerateRequest, limit: int) -> None:
    """
    Raises:
        ServingError: body_too_large: the vectors might not fit into the one message of the answer.
    """
    wanted = request.embedding
    if wanted is None or wanted.scores:
        return
    vectors = len(wanted.texts) or len(wanted.lengths)
    each = 64 + (-(-4 * wanted.dimensions // 3) * 4 if wanted.base64 else VALUE_BYTES * wanted.dimensions)
    if vectors * each > limit:
        smaller = "" if wanted.base64 else ", with encoding_format base64"
        raise ServingError(
            Code.body_too_large,
            f"{vectors} vectors of {wanted.dimensions} values may take {vectors * each} bytes and a message {limit}; "
            f"ask for at most {limit // each} inputs at once{smaller}, or ask over HTTP",
            param="input",
        )


class RequestAcceptor:
    """``table``: what each tenant may do."""

    def __init__(self, gateway: Gateway, table: TenantTable, delivery: AnswerDelivery) -> None:
        self._gateway = gateway
        self.table = table
        self._delivery = delivery

    def served_elsewhere(self, subject: str) -> str:
        """The model's token, if it is one that only other gateways of this namespace serve; else ""."""
        model = subject.rpartition(".")[2]
        return model if self._gateway.fleet.serves_elsewhere(model) else ""

    async def accept(self, message: Any, origin: Origin, name: str) -> AcceptedRequest:
        """The request, in the log; with its in-flight request if it was put there now.

        A repeat means the earlier request also while no new ones are accepted, or if it would be refused by now.

        Args:
            name: what a repeat has in common with it; "": it has no repeats.
        Raises:
            ServingError: it cannot be served.
        """
        body = bytes(message.data)
        try:
            prepared = await self._prepare(message, body, origin)
        except ServingError:
            if name and (earlier := await self.find_repeated(origin, name, digest_of(body))) is not None:
                return earlier
            raise
        try:
            return await self._submit(prepared, body, origin, name)
        finally:
            self._gateway.charges.abandon(prepared.request.id)

    async def _submit(self, prepared: PreparedRequest, body: bytes, origin: Origin, name: str) -> AcceptedRequest:
        """As ``accept``, of a request that has been paid for."""
        request = prepared.request
        if name:
            claimed_body = None if request.no_store else body
            claimed = await claim(self._gateway.bus, origin.tenant, name, claimed_body, request.id)
            if not claimed.fresh:
                try:
                    return await self._delivery.find(origin.tenant, claimed.request)
                except ServingError as error:
                    if error.code is not Code.request_not_found:
                        raise
                # The gateway that claimed it crashed before it was stored, or it was deleted.
                inflight = await submit_claimed(self._gateway, origin.tenant, name, claimed_body, request, claimed)
                return AcceptedRequest(inflight.request, inflight=inflight)
        inflight = await self._gateway.submit(request, owner=False)
        self._gateway.metrics.of(request.model).prompt.inc(prepared.prompt_tokens)
        unapplied = self._gateway.fleet.unapplied_by(body)
        names = await self._gateway.run_for(body, ignored_options, request.endpoint, body, unapplied)
        return AcceptedRequest(inflight.request, inflight=inflight, ignored=listed(names) if names else "")

    async def _prepare(self, message: Any, body: bytes, origin: Origin) -> PreparedRequest:
        """A request that is paid for."""
        gateway = self._gateway
        await gateway.turns.enter()
        shape = await gateway.run_for(body, shape_of, body)
        self.table.check_model(origin.tenant, shape.model or "")
        options = parse_headers(message.headers or {}, gateway.bus.subjects.namespace)
        caller = self.table.caller(origin.tenant)
        if options.key:
            caller = gateway.guard.caller_naming(options.key, origin.tenant)
        prepared: PreparedRequest = await gateway.prepare(
            shape.endpoint, body, no_store=options.no_store, caller=caller
        )
        check_vectors(prepared.request, gateway.bus.max_message)
        await gateway.charges.reserve(caller, prepared)
        prepared = with_trace(prepared, from_nats_headers(message.headers or {}, gateway.settings.tracing))
        if prepared.request.asked:
            self.table.check_model(origin.tenant, prepared.request.model)
        models = self.table.limits(origin.tenant).models
        request = msgspec.structs.replace(
            prepared.request,
            form=shape.form,
            client_request_id=options.message_id,
            fallbacks=tuple(each for each in prepared.request.fallbacks if not models or each.model in models),
        )
        return prepared._replace(request=request)

    async def stands_for(self, origin: Origin, name: str, digest: bytes) -> bool:
        """Whether a name has a request, or may have one."""
        try:
            return await self.find_repeated(origin, name, digest) is not None
        except ServingError:  # it has another body, or is erased
            return True

    async def find_repeated(self, origin: Origin, name: str, digest: bytes) -> AcceptedRequest | None:
        """The request that a repeat means; None: it repeats none.

        Args:
            digest: of the repeat's body.
        Raises:
            ServingError: idempotency_conflict: the request has another body; request_erased; broker_unavailable.
        """
        stored_claim = await find_claim(self._gateway.bus, origin.tenant, name, digest)
        if stored_claim is None:
            return None
        try:
            return await self._delivery.find(origin.tenant, stored_claim.request)
        except ServingError as error:
            if error.code is Code.request_not_found:
                return None
            raise
