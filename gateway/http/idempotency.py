"""Clients' own ids over HTTP: ``X-Request-Id`` is kept beside ours, ``X-Session-Id`` is a hint for routing; with an
``Idempotency-Key`` a repeat within a day gets the answer of the first run, finished or not, instead of a second run.

Requests without these headers pay only for one scan of their headers.

JSON rewritten so that two texts of the same value are equal: keys sorted, without whitespace.

Large values are rewritten in slices, as one call of the decoder or encoder holds the interpreter until it returns.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import msgspec

from penstock.gateway.admission.idempotency import Claim, claim, digest_of, find_claim
from penstock.gateway.apis.chat.bodies import StreamOptions
from penstock.gateway.apis.chat.prepare import PreparedRequest
from penstock.gateway.base.common import read_switch
from penstock.gateway.base.errors import decode_body, unsupported
from penstock.gateway.http.headers import client_id_of
from penstock.gateway.log.inflight import InflightRequest
from penstock.gateway.log.lookup import StoredRequest
from penstock.gateway.service.service import Gateway, submit_claimed
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.ids import time_of

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


KEY, NO_STORE = b"idempotency-key", b"x-penstock-no-store"
SESSION_IDS = (b"x-session-id", b"x-dynamo-session-id")  # the latter is what agents send that know Dynamo
MAX_KEY = 255
MAX_SESSION = 256
SOON_S = 2.0  # the request of a younger claim may still be on its way into the log
AGAIN_S = 0.05

Prepare = Callable[[], Awaitable[PreparedRequest]]


class ClientIds(NamedTuple):
    """As the client wrote them; "": not given. ``no_store``: the header asks for it."""

    key: str = ""
    client_id: str = ""
    no_store: bool = False
    session: str = ""


class _StreamFields(msgspec.Struct):
    """How a repeat wants the answer, which need not be how the first one did."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None


_stream_fields = msgspec.json.Decoder(_StreamFields).decode


def read_client_ids(headers: Collection[tuple[bytes, bytes]]) -> ClientIds:
    """From ASGI headers, whose names are lower case.

    Raises:
        ServingError: invalid_request: the key is empty or too long, or no_store is neither on nor off.
    """
    key, session, no_store = "", "", False
    client_id = client_id_of(headers).decode("latin-1")
    for name, value in headers:
        if name == KEY:
            key = value.decode("latin-1").strip()
            if not 0 < len(key) <= MAX_KEY:
                raise ServingError(
                    Code.invalid_request, f"Idempotency-Key needs 1 to {MAX_KEY} characters", param="Idempotency-Key"
                )
        elif name in SESSION_IDS:
            text = value.decode("latin-1")
            session = text if text.isprintable() and len(text) <= MAX_SESSION else ""
        elif name == NO_STORE:
            # Sent twice, as by a proxy that adds its own: asked for once is enough.
            no_store = read_switch(value.decode("latin-1"), "X-Penstock-No-Store") or no_store
    return ClientIds(key, client_id, no_store, session)


def with_client_id(prepared: PreparedRequest, names: ClientIds) -> PreparedRequest:
    if not names.client_id and not names.session:
        return prepared
    request = prepared.request
    session = names.session or request.session
    changed = msgspec.structs.replace(request, client_request_id=names.client_id, session=session)
    return prepared._replace(request=changed)


async def submit_once(
    gateway: Gateway, tenant: str, key: str, endpoint: str, body: bytes, prepare: Prepare
) -> tuple[PreparedRequest, InflightRequest]:
    """The run that a key stands for, started if need be. It continues without its client, which can come back.

    Raises:
        ServingError: idempotency_conflict, or why it cannot be served.
    """
    name = f"key:{key}"
    canonical = await gateway.run_for(body, _canonical_body, endpoint, body)
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
            return await gateway.look_up(stored_claim.request, tenant)
        except ServingError as error:
            if error.code is not Code.request_not_found:
                raise
            if gateway.bus.clock.now_ns() - time_of(stored_claim.request) > SOON_S * 1e9:
                return None
        await asyncio.sleep(AGAIN_S)


def _canonical_body(endpoint: str, body: bytes) -> bytes:
    """The part of a body that repeats share: everything but whether it is streamed, independent of JSON formatting."""
    try:
        return endpoint.encode() + b"\0" + canonical_json(body, without=("stream", "stream_options"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body  # refused anyway
