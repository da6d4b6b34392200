"""Parses what NATS clients send: the tenant of a subject, the form of the answer, the request that is meant. Pure."""

import re
from hashlib import sha256
from typing import NamedTuple

import msgspec

from penstock.gateway.base.request_bodies import BOM, CHAT, COMPLETION, decode_json, read_switch
from penstock.schemas import control
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import PREFIX, check_id
from penstock.schemas.requests import EMBEDDING, RERANK, SCORE
from penstock.schemas.subjects import (
    DEFAULT_TENANT,
    HEADER_FROM,
    HEADER_KEY,
    HEADER_MSG_ID,
    HEADER_NO_STORE,
    HEADER_REPLY_TO,
)

STREAM = "stream"
STREAM_USAGE = "stream+usage"

MAX_MESSAGE_ID = 255
MAX_READER = 128  # characters
MAX_REPLY = 512  # characters of a reply subject; the server disconnects clients that send lines above 4,096
_SUBJECT = re.compile(r"[!-)+-\-/-=?-~]+(\.[!-)+-\-/-=?-~]+)*")  # tokens of visible ASCII, without wildcards


class Origin(NamedTuple):
    """The sender of a message. ``direct``: from the pipeline's own account, on a broker without tenant accounts."""

    tenant: str
    direct: bool


def origin_of(subject: str, kind: str) -> Origin:
    """Of a subject ``<namespace>.<kind>.[<tenant>.]<model>``, or ``<namespace>.<kind>[.<tenant>]`` without a model."""
    parts = subject.split(".")[2:]
    if len(parts) > (1 if kind in ("submit", "ask") else 0):
        return Origin(parts[0], direct=False)
    return Origin(DEFAULT_TENANT, direct=True)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class RequestShape(msgspec.Struct):
    """The parts of a body that decide how it is answered."""

    messages: msgspec.Raw = msgspec.Raw()  # not "Raw | None": that takes nothing but null
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def endpoint(self) -> str:
        kinds = ((CHAT, self.messages), (COMPLETION, self.prompt), (EMBEDDING, self.input), (RERANK, self.query))
        pairs = ((SCORE, self.queries), (SCORE, self.text_1))
        return next((kind for kind, field in (*kinds, *pairs) if _is_given(field)), COMPLETION)

    @property
    def form(self) -> str:
        """As in ``GenerateRequest.form``."""
        if not self.stream:
            return ""
        usage = self.stream_options is not None and bool(self.stream_options.include_usage)
        return STREAM_USAGE if usage else STREAM


_decode_shape = msgspec.json.Decoder(RequestShape).decode


def _is_given(value: msgspec.Raw) -> bool:
    return bool(value) and bytes(value) != b"null"


def shape_of(body: bytes) -> RequestShape:
    """The shape of any body; the error of one that is not a JSON object is reported when it is prepared."""
    try:
        shape: RequestShape = decode_json(_decode_shape, body.removeprefix(BOM))
        return shape
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RequestShape(msgspec.Raw(b"[]" if b'"messages"' in body else b""))


def key_of(message_id: str) -> str:
    """The token of ``ps.answer.<key>`` for a submission with this ``Nats-Msg-Id``."""
    return sha256(message_id.encode()).hexdigest()[:32]


class _Marked(msgspec.Struct):
    no_store: bool | None = None
    store: bool | None = None


_decode_marked = msgspec.json.Decoder(_Marked).decode
_OFF = ("", "0", "false")


def _no_store_header(headers: dict[str, str]) -> str:
    """Look a header up in any case. NATS header names are case-sensitive, but privacy must not depend on case.

    Sent in several, as by a proxy that adds its own: asked for once is enough, and what is unclear is not passed over.
    """
    values = [value for name, value in headers.items() if name.lower() == HEADER_NO_STORE.lower()]
    return max(values, key=lambda value: value.strip().lower() not in _OFF, default="")


def may_ask_for_no_store(headers: dict[str, str], body: bytes) -> bool:
    """Whether a submission asks, or may have wanted to ask, not to be stored. A malformed wish counts."""
    if _no_store_header(headers).strip().lower() not in _OFF:
        return True
    if b"store" not in body and b"\\u" not in body:  # decoding every large body again would cost milliseconds
        return False
    try:
        marked: _Marked = decode_json(_decode_marked, body.removeprefix(BOM))
        return bool(marked.no_store) or marked.store is False
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True


class SubmitHeaders(NamedTuple):
    """The headers of a submission or an ask.

    Attributes:
        first: number of the first message that is wanted.
        no_store: as if the body asked for it.
        key: id of the API key that the request counts for; "": none was named.
    """

    message_id: str
    reply_to: str
    first: int
    no_store: bool = False
    key: str = ""


def usable_reply_to(headers: dict[str, str], namespace: str) -> str:
    """The client's reply subject, also of headers that are refused for something else; "": none that can be used."""
    reply_to = headers.get(HEADER_REPLY_TO, "")
    return reply_to if is_reply_subject(reply_to, namespace) else ""


def parse_headers(headers: dict[str, str], namespace: str) -> SubmitHeaders:
    """
    Raises:
        ServingError: invalid_request: one of the headers cannot be used.
    """
    message_id = headers.get(HEADER_MSG_ID, "")
    if len(message_id) > MAX_MESSAGE_ID:
        raise _invalid(f"{HEADER_MSG_ID} has {len(message_id)} characters; at most {MAX_MESSAGE_ID} are taken")
    if (reply_to := headers.get(HEADER_REPLY_TO, "")) != usable_reply_to(headers, namespace):
        raise _invalid(
            f"{HEADER_REPLY_TO} {reply_to[:80]!r} cannot be used: name a subject below '_INBOX.' or "
            f"'{namespace}.reply.', without wildcards, of at most {MAX_REPLY} characters"
        )
    first = headers.get(HEADER_FROM, "0")
    if not (first.isascii() and first.isdigit() and len(first) < 10):
        raise _invalid(f"{HEADER_FROM} {first[:40]!r} is not a message number")
    no_store = read_switch(_no_store_header(headers), HEADER_NO_STORE)
    return SubmitHeaders(message_id, reply_to, int(first), no_store, _named_key(headers.get(HEADER_KEY, "")))


def _named_key(named: str) -> str:
    """The id of a key by its public part. Its secret must not be sent: headers are stored with the submission."""
    if not named:
        return ""
    try:
        found = check_id(named)
    except ValueError:
        raise _invalid(f"{HEADER_KEY} is not the first part of an API key, such as pst-0a1b2c3d4e5f") from None
    if named.removeprefix(PREFIX) != found:
        raise _invalid(f"{HEADER_KEY} has a whole API key: send its first part alone, {PREFIX}{found}")
    return found


def is_reply_subject(subject: str, namespace: str) -> bool:
    """Whether clients may read this subject, and a message there can have no other effect."""
    return (
        subject.startswith(("_INBOX.", f"{namespace}.reply."))
        and len(subject) <= MAX_REPLY
        and _SUBJECT.fullmatch(subject) is not None
    )


class AnswerQuery(msgspec.Struct, rename={"first": "from"}, forbid_unknown_fields=True):
    """The body of ``ps.read`` and ``ps.cancel``: which request, and what of its answer.

    ``reader``: the client's name for the reader. Its next read of the same answer ends this one.
    """

    id: str = ""
    key: str = ""
    first: int = 0
    until: int | None = None
    reason: str = "cancelled by its client"
    reader: str = ""


_QUERY_FIELDS = '"from", "until", "reader" and "reason"'
_decode_query = msgspec.json.Decoder(AnswerQuery).decode


def parse_query(body: bytes) -> AnswerQuery:
    """
    Raises:
        ServingError: invalid_request.
    """
    try:
        query = _decode_query(body) if body.lstrip()[:1] == b"{" else _cancel(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)[:200] if body.lstrip()[:1] == b"{" else f"it begins with {body[:20]!r}"
        raise _invalid(
            f'the body must be a JSON object with "id" or "key", and optionally {_QUERY_FIELDS}: {why}'
        ) from None
    if bool(query.id) == bool(query.key):
        raise _invalid('name the request by either "id" (its id) or "key" (the Nats-Msg-Id of its submission)')
    if len(query.reader) > MAX_READER:
        raise _invalid(f'"reader" has {len(query.reader)} characters; at most {MAX_READER} are taken')
    if query.first < 0 or (query.until is not None and query.until < query.first):
        raise _invalid('"from" and "until" are numbers of messages, 0 and up')
    return query


def _cancel(body: bytes) -> AnswerQuery:
    """As releases up to 0.1 had it."""
    old = control.decode_cancel(body)
    return AnswerQuery(id=old.request, reason=old.reason)


def _invalid(message: str) -> ServingError:
    return ServingError(Code.invalid_request, message)
