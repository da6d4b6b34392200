"""With an ``Idempotency-Key`` a repeat within a day gets the answer of the first run, finished or not, instead of a
second run.

Bodies are compared as JSON rewritten so that two texts of the same value are equal: keys sorted, without whitespace.
Large values are rewritten in slices, as one call of the decoder or encoder holds the interpreter until it returns.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial

import msgspec

from penstock.gateway.access.authentication import Sight
from penstock.gateway.admission.idempotency import Claim, claim, digest_of, find_claim
from penstock.gateway.apis.chat.bodies import StreamOptions
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.base.request_bodies import decode_body, decode_json, unsupported
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import StoredRequest
from penstock.gateway.service.gateway import Gateway, submit_claimed
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import time_of

WHOLE_BYTES = 65_536  # of JSON that is sorted in one call, which holds the interpreter for 0.4 ms at most
DEPTH = 4  # objects and arrays within each other that are taken apart; each is scanned once more

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_json = msgspec.json.encode


def canonical_json(text: bytes, *, without: Collection[str] = (), depth: int = DEPTH) -> bytes:
    """
    Args:
        without: members of the outermost object to leave out.
    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: not JSON.
    """
    text = text.strip(b" \t\r\n")
    if text[:1] == b"{" and (without or (len(text) > WHOLE_BYTES and depth)):
        members = sorted((key, bytes(raw)) for key, raw in _object(text).items() if key not in without)
        return b"{%b}" % b",".join([_json(key) + b":" + canonical_json(raw, depth=depth - 1) for key, raw in members])
    if text[:1] == b"[" and len(text) > WHOLE_BYTES and depth:
        return b"[%b]" % b",".join(_canonical_elements(_array(text), depth - 1))
    return _json(msgspec.json.decode(text), order="deterministic")


def _canonical_elements(elements: list[msgspec.Raw], depth: int) -> list[bytes]:
    """Short elements are rewritten many at a time."""
    out: list[bytes] = []
    few: list[msgspec.Raw] = []
    size = 0
    for element in elements:
        length = len(bytes(element)) + 1
        if few and size + length > WHOLE_BYTES:
            out.append(canonical_json(b"[%b]" % b",".join(few), depth=0)[1:-1])
            few, size = [], 0
        if length > WHOLE_BYTES:
            out.append(canonical_json(bytes(element), depth=depth))
        else:
            few.append(element)
            size += length
    if few:
        out.append(canonical_json(b"[%b]" % b",".join(few), depth=0)[1:-1])
    return out


SOON_S = 2.0  # the request of a younger claim may still be on its way into the log
AGAIN_S = 0.05

Prepare = Callable[[], Awaitable[PreparedRequest]]


class _StreamFields(msgspec.Struct):
    """How a repeat wants the answer, which need not be how the first one did."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None


_stream_fields = msgspec.json.Decoder(_StreamFields).decode


async def submit_once(
    gateway: Gateway, tenant: str, key: str, endpoint: str, body: bytes, prepare: Prepare
) -> tuple[PreparedRequest, InflightRequest]:
    """The run that a key stands for, started if need be. It continues without its client, which can come back.

    Raises:
        ServingError: idempotency_conflict, or why it cannot be served.
    """
    name = f"key:{key}"
    canonical = await gateway.run_for(body, canonical_body, endpoint, body)
    stored_claim = await find_claim(gateway.bus, tenant, name, digest_of(canonical))
    if stored_claim is None:
        prepared = await prepare()
        claimed_body = None if prepared.request.no_store else canonical
        stored_claim = await claim(gateway.bus, tenant, name, claimed_body, prepared.request.id)
        if stored_claim.fresh:
            return prepared, await gateway.submit(prepared.request, owner=False)
    claimed = await _find(gateway, stored_claim, tenant)
    if claimed is None:  # its gateway crashed before the request was stored, or the request was deleted
        prepared = await prepare()
        claimed_body = None if prepared.request.no_store else canonical
        inflight = await submit_claimed(gateway, tenant, name, claimed_body, prepared.request, stored_claim)
        return prepared._replace(request=inflight.request), inflight
    request, record = claimed
    form = await gateway.run_for(body, decode_body, _stream_fields, body)
    if form.stream and request.sampling.prompt_logprobs is not None and not request.echo:
        raise unsupported("stream", "prompt_logprobs is not supported with stream: true")
    usage = form.stream_options is not None and bool(form.stream_options.include_usage)
    prepared = PreparedRequest(request, request.prompt_tokens, bool(form.stream), usage, repeated=True)
    return prepared, await gateway.attach(request, record, ordered=prepared.stream)


async def _find(gateway: Gateway, stored_claim: Claim, tenant: str) -> StoredRequest | None:
    """The claimed request; None: it is not in the log, and is unlikely to arrive."""
    while True:
        try:
            return await gateway.look_up(stored_claim.request, Sight(tenant))
        except ServingError as error:
            if error.code is not Code.request_not_found:
                raise
            if gateway.bus.clock.now_ns() - time_of(stored_claim.request) > SOON_S * 1e9:
                return None
        await asyncio.sleep(AGAIN_S)


def canonical_body(endpoint: str, body: bytes) -> bytes:
    """The part of a body that repeats share: everything but whether it is streamed, independent of JSON formatting."""
    try:
        canonical: bytes = decode_json(partial(canonical_json, without=("stream", "stream_options")), body)
        return endpoint.encode() + b"\0" + canonical
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body  # refused later
