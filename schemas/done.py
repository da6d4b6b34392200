"""The ends of requests and attempts: worker or router → all.

``Done`` is the one terminal event of a request, and its record: request, output, usage and timings. It lacks the
prompt, which REQUESTS keeps as long. Each request has its own subject for it, which takes one message only (``once`` in
``penstock.infra.bus.publisher``). ``Returned`` ends only an attempt: the worker returns the request unstarted or
unfinished, and a router places it again. Both are republished without their bodies: followers read the headers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.schemas import requests, wire
from penstock.schemas.cells import guest_in, is_cell
from penstock.schemas.jobs import EarlierWorker
from penstock.schemas.requests import GenerateRequest, Parsing, ThoughtTokens
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_CRASHED, HEADER_RETURNED
from penstock.schemas.tokens import COUNTS, FAILURES, PROMPT, WHOLE_REQUEST, File, Finish, Logprob, TokenItem
from penstock.schemas.trace import Stamps, Trace

_HEADER_TEXT = 200  # characters of a reason in a header


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts. ``reasoning``: of ``completion``; -1: unknown."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    foreign: bool = False  # counted by another server with its own tokenizer


_UNKNOWN = (1 << 32) - 1


def counted(request: str, attempt: int, choice: int, usage: Usage) -> TokenItem:
    """The item with a server's own counts of a choice, before its end; of ``WHOLE_REQUEST``: of all of them."""
    counts = (usage.prompt, usage.completion, usage.cached, usage.reasoning & _UNKNOWN)
    return TokenItem(request, attempt, COUNTS, choice, wire.pack_tokens(counts))


def counts_in(item: TokenItem) -> Usage:
    """Inverse of ``counted``."""
    prompt, completion, cached, reasoning = wire.unpack_tokens(item.tokens)[:4]
    return Usage(prompt, completion, cached, -1 if reasoning == _UNKNOWN else reasoning, foreign=True)


def total(counts: Mapping[int, Usage], choices: int) -> Usage | None:
    """A server's counts of a request, whose prompt counts once; None: it has not counted every choice.

    Args:
        counts: by choice.
    """
    if (whole := counts.get(WHOLE_REQUEST)) is not None:
        return whole
    if len(counts) < choices:
        return None
    of = counts.values()
    return Usage(
        max(each.prompt for each in of),
        sum(each.completion for each in of),
        min(each.cached for each in of),
        -1 if any(each.reasoning < 0 for each in of) else sum(each.reasoning for each in of),
        foreign=True,
    )


def usage_of(request: GenerateRequest, outputs: Sequence[bytes], cached: int = 0) -> Usage:
    """
    Args:
        outputs: of each choice, packed u32, as in the token stream.
    """
    if request.embedding is not None:  # see there what its "tokens" are
        return Usage(int.from_bytes(outputs[0][:4], "little") if outputs else 0)
    counts = [reasoning_tokens(request.parsing, output) for output in outputs]
    reasoning = -1 if any(count < 0 for count in counts) else sum(counts)
    return Usage(request.prompt_tokens, sum(map(len, outputs)) // wire.TOKEN_BYTES, cached, reasoning)


def reasoning_tokens(parsing: Parsing | None, output: bytes) -> int:
    """Tokens of a choice's reasoning and its marks, as its parser counts them; -1: only that can tell.

    Counted from the whole output, so that a continuation counts nothing twice. Reasoning that is not closed extends to
    the end.

    Args:
        output: packed u32.
    """
    if parsing is None or not parsing.reasoning or not output:
        return 0
    if parsing.thoughts is None:
        return -1
    begun = parsing.thinking
    if not begun and not parsing.prefilled:  # white space may come before the mark
        first = wire.unpack_tokens(output[: 2 * wire.TOKEN_BYTES])
        begun = first[0] not in parsing.thoughts.closing and any(token in parsing.thoughts.opening for token in first)
    end = 0
    if begun:
        ends = [at for token in parsing.thoughts.closing if (at := _position(output, token)) >= 0]
        end = min(ends) + 1 if ends else len(output) // wire.TOKEN_BYTES
    again = parsing.thoughts.again and not parsing.joined
    return end + (_later(parsing.thoughts, output[end * wire.TOKEN_BYTES :]) if again else 0)


def _later(thoughts: ThoughtTokens, output: bytes) -> int:
    """Tokens of the reasoning after content, with its marks."""
    count, within = 0, False
    for token in wire.unpack_tokens(output):
        if within or token in thoughts.opening:
            count += 1
            within = token not in thoughts.closing
    return count


def _position(output: bytes, token: int) -> int:
    """Of the first such token in packed ones; -1: there is none."""
    mark = wire.pack_tokens((token,))
    at = output.find(mark)
    while at % wire.TOKEN_BYTES and at >= 0:
        at = output.find(mark, at + 1)
    return at // wire.TOKEN_BYTES


class EarlierRevision(msgspec.Struct, frozen=True, omit_defaults=True):
    """Weights that were replaced while a request ran.

    Attributes:
        revision: of the model.
        tokens: number of tokens of each choice, from this and earlier revisions.
    """

    revision: str
    tokens: tuple[int, ...]


class MadeWith(msgspec.Struct, frozen=True, omit_defaults=True):
    """The software and weights that made an answer; "": unknown.

    Attributes:
        revision: revision of the model.
        engine: the engine's name in the worker's registration.
        build: versions of Penstock and of the engine's packages.
        fallback: number of the stored request's fallback that ran, as in ``GenerateRequest``; 0: none.
        before: if weights changed meanwhile, the revisions of the first tokens, oldest first.
    """

    revision: str = ""
    engine: str = ""
    build: str = ""
    fallback: int = 0
    before: tuple[EarlierRevision, ...] = ()


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """When and where a request ran. Unix time in ns; 0: did not happen."""

    created_ns: int = 0
    routed_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    streamed_ns: int = 0  # first token of an earlier attempt, which this one continued
    earlier_workers: tuple[EarlierWorker, ...] = ()  # workers of earlier attempts
    made_with: MadeWith | None = (
        None  # the last attempt; None: unknown. ``Done`` has the most fields that fit its short form
    )
    router: str = ""  # the one that placed the last attempt, in a worker's record; "": unknown

    @property
    def client_first_token_ns(self) -> int:
        """The first token that the client got; ``first_token_ns`` is of the last attempt."""
        return self.streamed_ns or self.first_token_ns


def fallback_of(event: "Done") -> int:
    """The number of the stored request's fallback that ran last, as in ``GenerateRequest``; 0: none."""
    return event.timings.made_with.fallback if event.timings.made_with is not None else 0


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One choice: its tokens (packed u32) and why it ended. ``logprobs``: one per token, if asked for and known.

    Records of packed requests have ``count`` tokens in ``packed`` instead, as ``PackedRequest`` has its prompt's.
    """

    tokens: bytes = b""
    reason: str = ""
    stop: str | int | None = None
    files: tuple[File, ...] = ()  # of an image or video request
    logprobs: tuple[Logprob, ...] = ()
    packed: bytes = b""
    count: int = 0


class Done(msgspec.Struct, frozen=True, omit_defaults=True, tag="done"):
    """Terminal event. ``code`` is empty when the request succeeded."""

    request: str
    model: str
    attempt: int
    worker: str = ""
    choices: tuple[Outcome, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    code: str = ""
    message: str = ""
    user: str = ""
    stamps: Stamps | None = None  # of a traced request, from its last worker
    submitted: bytes = b""  # the encoded GenerateRequest without its prompt, which REQUESTS has; 0.1 left it out
    scores: tuple[Logprob, ...] = ()  # of the prompt's tokens after the first, if asked for and known
    left_out: tuple[
        str, ...
    ] = ()  # what the record lacks: "prompt", "scores", "logprobs", "tokens", "request"; "message"


CRASHES = ("alone", "shared")  # by its own fault, while it ran nothing else, or others too
KILLED = "killed"  # otherwise: by an operator, a restart of its machine, ...


class Returned(msgspec.Struct, frozen=True, omit_defaults=True, tag="returned"):
    """An attempt ended without a result, and not because of the request (but see ``poison``)."""

    request: str
    model: str
    attempt: int
    worker: str
    reason: str
    poison: bool = False  # the engine failed while it ran this request
    crashed: str = ""  # of CRASHES, or KILLED: its worker's process or engine ended while it ran this; "": no


decode_stored: Callable[[bytes], Done | Returned] = wire.decoder(Done | Returned)  # type: ignore[arg-type]
DONE_TYPE, RETURNED_TYPE = wire.content_type(Done), wire.content_type(Returned)


def decode(data: bytes) -> Done | Returned:
    """Decode a message of DONE, with its tokens in either packing.

    Raises:
        msgspec.MsgspecError: it is not a message of DONE, or one of a later version.
    """
    event = decode_stored(data)
    if isinstance(event, Returned) or not any(choice.packed for choice in event.choices):
        return event
    try:
        return msgspec.structs.replace(event, choices=tuple(map(_unpacked, event.choices)))
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None


def _unpacked(choice: Outcome) -> Outcome:
    if not choice.packed:
        return choice
    return msgspec.structs.replace(choice, tokens=wire.widened(choice.packed, choice.count), packed=b"", count=0)


_NAMES = 8  # bytes that the names of two fields take more than that of one


def packed(event: Done) -> Done:
    """A terminal event whose tokens take as few bits as they need."""
    return msgspec.structs.replace(event, choices=tuple(map(_packed, event.choices)))


def _packed(choice: Outcome) -> Outcome:
    data = wire.narrowed(choice.tokens)
    if len(data) + _NAMES >= len(choice.tokens):
        return choice
    return msgspec.structs.replace(choice, tokens=b"", packed=data, count=len(choice.tokens) // wire.TOKEN_BYTES)


class ReturnedHeader(NamedTuple):
    """The part of a ``Returned`` that routers read, from its header."""

    attempt: int
    reason: str


def returned_header(event: Returned) -> str:
    """The ``Penstock-Returned`` header. The first word is its version, so that a later one can add words."""
    reason = " ".join(event.reason.split())[:_HEADER_TEXT].encode("ascii", "replace").decode()
    return f"1 {event.attempt} {reason}"


def returned_id(event: Returned) -> str:
    """Its message id, so that an attempt is returned once, by its worker or on the worker's behalf."""
    return f"{event.request}:{event.attempt}:returned"


def returned_headers(event: Returned) -> dict[str, str]:
    """Its headers besides its id: its kind, and the part that routers read."""
    headers = {HEADER_CONTENT_TYPE: RETURNED_TYPE, HEADER_RETURNED: returned_header(event)}
    return headers | {HEADER_CRASHED: event.crashed} if event.crashed else headers


def read_returned_header(text: str) -> ReturnedHeader:
    """Inverse of ``returned_header``.

    Raises:
        ValueError: malformed, or of a later version.
    """
    form, attempt, reason = text.split(" ", 2)
    if form != "1":
        raise ValueError(f"{text!r} is not a header of this form")
    return ReturnedHeader(int(attempt), reason)


def guests_of(event: Done) -> tuple[str, ...]:
    """The request's ids in other cells: the one that ran it, and those that returned it.

    Raises:
        msgspec.MsgspecError: the record has a version that this build cannot read.
    """
    request = request_of(event)
    earlier = (guest_in(each.ended) for each in event.timings.earlier_workers if is_cell(each.worker))
    return tuple(filter(None, (*earlier, request.ran_as if request is not None else "")))


def recorded(request: GenerateRequest) -> bytes:
    """A request as its record holds it: without its prompt, the names of its blocks and its fallbacks, which REQUESTS
    has as long."""
    if not (request.prompt or request.digests or request.fallbacks or request.chat):
        return wire.encode(request)
    length = request.prompt_tokens
    return wire.encode(
        msgspec.structs.replace(request, prompt=b"", prompt_length=length, digests=b"", fallbacks=(), chat=b"")
    )


def not_recorded(request: GenerateRequest) -> tuple[str, ...]:
    """The names in ``left_out`` for the parts that ``recorded`` omits."""
    return ("prompt",) if request.prompt_tokens else ()


def request_of(event: Done) -> GenerateRequest | None:
    """The request as it was accepted, without what ``left_out`` names; None: the record has no request.

    Raises:
        msgspec.MsgspecError: of a version that this one cannot read.
    """
    return requests.decode(event.submitted) if event.submitted else None


NOT_KEPT = "not kept: the request was made with no_store"


def without_content(event: Done, request: GenerateRequest | None = None) -> Done:
    """The record of a request with ``no_store``: tenant, times, counts and end, but no content.

    ``left_out`` names the omitted parts of the answer. An error keeps its code but not its text, which may quote the
    client.

    Args:
        request: the event's request; None: it is decoded from the event.
    """
    request = request or request_of(event)
    left_out = {"prompt", *event.left_out}
    if any(choice.tokens for choice in event.choices):
        left_out.add("tokens")
    if any(choice.logprobs for choice in event.choices):
        left_out.add("logprobs")
    if event.scores:
        left_out.add("scores")
    if event.message:
        left_out.add("message")
    return msgspec.structs.replace(
        event,
        choices=tuple(Outcome(reason=choice.reason) for choice in event.choices),
        message=NOT_KEPT if event.message else "",
        submitted=wire.encode(without_text(request)) if request is not None else b"",
        scores=(),
        left_out=tuple(sorted(left_out)),
    )


def without_text(request: GenerateRequest) -> GenerateRequest:
    """The request without the fields that can have its client's text, or numbers derived from it."""
    left = request.without_texts(trace=request.trace and Trace(request.trace.parent))
    sampling = msgspec.structs.replace(left.sampling, logits_processors=())
    return msgspec.structs.replace(
        left, prompt_length=0, digests=b"", sampling=sampling, salt="", media=(), diffusion=None, session=""
    )


def items(event: Done) -> list[TokenItem]:
    """A terminal event as token items: each choice from its first token on, with its finish."""
    request, attempt, cached = event.request, event.attempt, event.usage.cached
    failed = Finish("cancelled" if event.code == "cancelled" else "error", None, cached, event.code, event.message)
    out = []
    if event.usage.foreign:
        out.append(counted(request, attempt, WHOLE_REQUEST, event.usage))
    if event.scores:
        out.append(TokenItem(request, attempt, PROMPT, 1, b"", None, event.scores))
    for index, choice in enumerate(event.choices):
        own = Finish(choice.reason, choice.stop, cached, files=choice.files)
        finish = failed if event.code and choice.reason in ("", *FAILURES) else own
        out.append(TokenItem(request, attempt, index, 0, choice.tokens, finish, choice.logprobs or None))
    if event.code:
        out.append(TokenItem(request, attempt, WHOLE_REQUEST, 0, b"", failed))
    return out


def encode_within(event: Done, limit: int) -> bytes:
    """Encode a terminal event in at most ``limit`` bytes.

    Parts that do not fit are dropped in this order: the prompt, its scores, the output's log-probabilities, the output,
    the rest of the request. ``left_out`` names them. The result's code, usage and timings always fit.
    """
    payload = wire.encode(event)
    for name, without in _LESS:
        if len(payload) <= limit:
            break
        event = without(event)
        event = msgspec.structs.replace(event, left_out=tuple(dict.fromkeys((*event.left_out, name))))
        payload = wire.encode(event)
    return payload


def _without_prompt(event: Done) -> Done:
    try:
        request = request_of(event)
    except msgspec.MsgspecError:
        request = None
    if request is None:
        return event
    drawn, embedding = request.diffusion, request.embedding
    request = msgspec.structs.replace(
        request, prompt=b"", digests=b"", media=(), diffusion=drawn and drawn.without_texts(),
        embedding=embedding and embedding.without_texts(), fallbacks=(), chat=b"",
    )  # fmt: skip
    return msgspec.structs.replace(event, submitted=wire.encode(request))


def _without_scores(event: Done) -> Done:
    return msgspec.structs.replace(event, scores=())


def _without_logprobs(event: Done) -> Done:
    choices = tuple(msgspec.structs.replace(choice, logprobs=()) for choice in event.choices)
    return msgspec.structs.replace(event, choices=choices)


def _without_tokens(event: Done) -> Done:
    choices = tuple(msgspec.structs.replace(choice, tokens=b"", packed=b"", count=0) for choice in event.choices)
    return msgspec.structs.replace(event, choices=choices)


def _without_request(event: Done) -> Done:
    return msgspec.structs.replace(event, submitted=b"", message=event.message[:1000], user=event.user[:1000])


_LESS = (
    ("prompt", _without_prompt),
    ("scores", _without_scores),
    ("logprobs", _without_logprobs),
    ("tokens", _without_tokens),
    ("request", _without_request),
)
