"""A client's request after validation and tokenisation: gateway → router → worker.

Request ids are UUIDv7, which contain the time, so that a request is found in the log by a short scan.
"""

import enum
import os
import time
from uuid import UUID

import msgspec

from penstock.schemas.subjects import HEADER_CONTENT_TYPE, MEMORY
from penstock.schemas.trace import Trace
from penstock.schemas.wire import TOKEN_BYTES, content_type, decoder, encode, narrowed, widened


class Priority(enum.StrEnum):
    """Classes, in the order in which routers serve them."""

    interactive = "interactive"
    standard = "standard"
    batch = "batch"

    @property
    def rank(self) -> int:
        """0 is served first."""
        return _RANKS[self]


_RANKS = {Priority.interactive: 0, Priority.standard: 1, Priority.batch: 2}


COMPLETION = "text"  # value of ``GenerateRequest.endpoint``
EMBEDDING = "embedding"  # value of ``GenerateRequest.endpoint`` and ``output``
RERANK = "rerank"  # values of ``GenerateRequest.endpoint``; their ``output`` is SCORE
SCORE = "score"
OLLAMA_EMBED, OLLAMA_EMBEDDINGS = "ollama_embed", "ollama_embeddings"  # endpoints; their ``output`` is EMBEDDING
BY_EMBED_WORKERS = frozenset({EMBEDDING, RERANK, SCORE, OLLAMA_EMBED, OLLAMA_EMBEDDINGS})  # endpoints
PAIRS = "<pairs>"  # reserved name of a prompt, see ``Embedding.queries``
CONSTRAINT = "constraint"  # reserved name of a logits processor, see ``Constraint``
CONSTRAINT_LARK = "constraint.lark"  # named besides for constraints of kind "lark"
CONSTRAINT_SPELLED = "constraint.spelled"  # besides, if the text of a special token may be in the output
CONSTRAINT_MARKS = frozenset({CONSTRAINT, CONSTRAINT_LARK, CONSTRAINT_SPELLED})
# Named by requests with an adapter, and registered by workers that apply them: builds without adapters refuse them.
ADAPTER = "adapter"
# Named by requests that run as a fallback, and registered by workers that say so in the token stream.
FALLBACK = "fallback"
# Named by requests that carry their chat, and registered by workers whose servers take chats only.
CARRIED_CHAT = "chat"
MARKS = CONSTRAINT_MARKS | {ADAPTER, FALLBACK, CARRIED_CHAT}  # names of logits processors that clients cannot use


class LogitsProcessor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A logits processor, by the name under which workers registered it."""

    name: str
    args: bytes = b""  # of its constructor, as a JSON object; empty: none


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is sampled. ``temperature`` 0 is greedy.

    The sample at output position i of choice c is a pure function of (seed, c, i) and the logits, so that another
    worker continues a request as the first would have.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # always set by the gateway; 0 .. 2**63 - 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none; k: of the chosen token and the k best
    logits_processors: tuple[LogitsProcessor, ...] = ()  # in this order, before all of the above
    prompt_logprobs: int | None = None  # of the prompt's tokens after the first; None: none; k: and of the k best


class Stop(msgspec.Struct, frozen=True, omit_defaults=True):
    """When an answer ends."""

    max_tokens: int
    min_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    ignore_eos: bool = False


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the whole output of each choice must match.

    A request with a constraint also names the logits processor ``CONSTRAINT``, which a worker registers if it applies
    constraints. Routers and workers of builds that do not know the field therefore refuse the request: a constraint is
    never ignored.
    """

    kind: str  # "json_schema", "regex", "choice", "grammar" (a client's) or "lark" (made by the gateway)
    text: str  # JSON schema, regular expression, JSON array of texts, or grammar (see infra/constraints)


class Media(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image or video in the object store; its placeholder tokens start at ``position`` of the prompt."""

    digest: bytes  # blake3 of the raw bytes, 32 bytes; in hex the object's name
    kind: str  # media type ("image/png", ...), or "embedding": a safetensors file of one (tokens, hidden) tensor
    size: int = msgspec.field(name="bytes")
    position: int = 0
    tokens: int = 0
    private: str = ""  # id of the request with ``no_store`` that it is stored for alone, and erased with
    grid: tuple[int, ...] = ()  # its tokens by time, height and width, for models that take positions from them
    seconds: float = 0.0  # between two steps in time of a video's grid


class Diffusion(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image or video request with every parameter decided, so that any worker of the model generates the same.

    In the token stream, each denoising step is one token whose value is the milliseconds it took.
    """

    kind: str  # "image" or "video"
    prompt: str
    width: int  # pixels
    height: int
    steps: int
    format: str  # of the files: "png", "jpeg", "webp", "gif", "mp4"
    negative: str = ""  # negative prompt
    frames: int = 1  # of a video
    frame_rate: float = 0.0  # per second, of a video
    images: int = 1  # how many to generate
    guidance: float | None = None  # None: the pipeline's default
    seed: int = 0  # 0 .. 2**63 - 1
    quality: int = 0  # 1 .. 100, of lossy formats; 0: the encoder's own
    inline: bool = False  # the answer contains the files instead of their URLs

    def without_texts(self) -> "Diffusion":
        """This request without its client's content."""
        return msgspec.structs.replace(self, prompt="", negative="")


class Embedding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request for vectors, one per input. Inputs are ``texts``, or consecutive parts of the request's prompt.

    In the token stream, the first "token" is the number of tokens of all inputs. Each further one is a float32 of a
    vector; the vectors follow each other in the order of the inputs.

    With ``queries``, an input is a query and a text, and its "vector" is one value: their score. Such a request has
    the prompt ``PAIRS``, so that workers of builds that do not know the field refuse it.
    """

    dimensions: int  # of each vector in the answer
    texts: tuple[str, ...] = ()  # the worker makes tokens of them
    lengths: tuple[int, ...] = ()  # of the inputs in the prompt, in tokens; empty: the inputs are ``texts``
    truncate: int = 0  # longer inputs are cut to this many tokens; 0: they are refused
    base64: bool = False  # the answer has each vector as base64 of its float32 values, little-endian
    prompt: str = ""  # name of what the worker puts before each text; "": the model's default
    queries: tuple[str, ...] = ()  # one for all texts, or one for each
    document_tokens: int = 0  # of pairs: texts are cut to this many tokens before they meet their query; 0: not
    top: int = 0  # the answer has the best this many scores, in their order; 0: all
    shows_texts: bool = False  # the answer repeats the texts beside their scores

    @property
    def scores(self) -> bool:
        """Whether it asks for scores of pairs. Also known where the content was left out."""
        return self.prompt == PAIRS

    def without_texts(self) -> "Embedding":
        """This request without its client's content."""
        return msgspec.structs.replace(self, texts=(), lengths=(), queries=())


class ThoughtTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """The marks around an answer's reasoning, each a token of its own."""

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    again: bool = False  # there may be more reasoning after content


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the answer's text is parsed. Decided when the request is accepted, so that every gateway does the same.

    ``texts``: for formats that do not distinguish text from numbers: by function, the parameters that are text, and
    whether null is allowed too. For those that do: by function, all parameters, and whether text is allowed.
    """

    reasoning: str = ""  # name of the parser; "": reasoning stays in the text
    tools: str = ""  # name of the parser; "": calls stay in the text
    thinking: bool = False  # the prompt ends within reasoning
    one_call: bool = False  # show the first call only
    texts: dict[str, dict[str, bool]] = {}
    prefilled: bool = False  # the prompt ends within text that the answer continues: of a thought, or of the content
    names: str = ""  # of the fields with reasoning, see ``--reasoning-fields``
    hidden: bool = False  # reasoning is left out of the answer
    joined: bool = False  # reasoning is part of the content, with its marks
    functions: tuple[str, ...] = ()  # names of the tools, for formats in which a name is not marked as one
    thoughts: ThoughtTokens | None = None  # None: the marks are not single tokens, or it is not known
    nonempty: bool = False  # reasoning that neither content nor a call followed is the content


class Shown(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of an answer besides its text."""

    token_ids: bool = False  # of the prompt and the output
    tokens_as_ids: bool = False  # tokens of log-probabilities are "token_id:ID", not their text
    usage: bool = False  # each event of a stream has the usage so far
    special: bool = False  # special tokens are a part of the text
    function_call: bool = False  # a call is in the field of this name, in place of tool_calls


TEXT_ONLY = Shown()  # this very one is left out of messages


class Fallback(msgspec.Struct, frozen=True, array_like=True):
    """A fallback of a request: the same request, prepared for another model.

    Attributes:
        model: its canonical name.
        request: an encoded ``GenerateRequest``; b"": left out.
    """

    model: str
    request: bytes = b""


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One accepted request. Once its publish is acknowledged, it gets exactly one terminal event."""

    id: str  # UUIDv7
    model: str
    gateway: str  # whose token subject receives the answer
    prompt: bytes  # token ids, packed u32
    stop: Stop
    created_ns: int  # Unix time
    deadline_ns: int  # Unix time; after it the request ends with deadline_exceeded
    digests: bytes = b""  # of the prompt's full blocks, packed
    block_size: int = 32
    sampling: Sampling = Sampling()
    n: int = 1
    priority: Priority = Priority.standard
    user: str = ""
    salt: str = ""  # cache salt: requests with different salts share no KV
    lora: str = ""  # its LoRA adapter, "NAME@DIGEST" (``fleet.adapter_id``); "": none
    media: tuple[Media, ...] = ()
    worker: str = ""  # routing mode "direct": only this worker
    endpoint: str = ""  # shape of the answer: chat, text, response, message, ollama_chat, embedding, rerank, image, …
    stops_shown: bool = False  # the answer includes the stop string
    diffusion: Diffusion | None = None  # an image or video request: prompt, stop and sampling are ignored
    echo: bool = False  # the answer starts with the prompt
    unanswered: bool = False  # only the prompt is shown, not the one token that is computed
    parsing: Parsing | None = None  # None: the text is not parsed
    trace: Trace | None = None
    revision: str = ""  # of the model that must answer; "": the one that serves when the request is placed
    tokenizer: str = ""  # digest of the tokenizer that made the prompt; "": no tokens
    tenant: str = "default"
    form: str = ""  # how the NATS API answers: "stream", "stream+usage"; "": in one message
    client_request_id: str = ""  # the client's own id for it
    no_store: bool = False  # its content and output never reach a disk: they are in memory storage until it has ended
    session: str = ""  # name of the conversation it belongs to, a hint for routing
    client_body: bytes = b""  # JSON: what the answer repeats of the client's body, or a later request continues
    constraint: Constraint | None = None  # None: the output is free; else ``sampling.logits_processors`` has CONSTRAINT
    embedding: Embedding | None = None  # a request for vectors or scores: stop and sampling are ignored
    repeats_poison: bool = False  # the first repeat of a request that crashed every worker: it runs alone
    shown: Shown = TEXT_ONLY
    prompt_length: int = 0  # tokens of the prompt, where it is left out (``penstock.schemas.contents.without_content``)
    watched: bool = False  # others of its tenant crashed every worker within an hour: after one crash it runs alone
    api_key: str = ""  # the part that names it, such as "pst-0a1b2c3d4e5f"; "": none, or it came over NATS
    origin: str = ""  # id of the request of another cell that runs here under this id; "": it is of this cell
    resumes: bool = False  # after what its origin had streamed, which attempt 0 has in the token stream of this cell
    ran_as: str = ""  # in records: its id in the cell that ran it; "": its own cell did
    fallbacks: tuple[Fallback, ...] = ()  # that may run in its place while it has no token, in this order
    fallback_after_s: float = 0.0  # for so long it waits for a worker before one does; 0: for as long as it may
    asked: str = ""  # of a fallback: the model that was asked for, canonical
    fallback: int = 0  # which of the fallbacks of the stored request this is, from 1; 0: none
    fell_back_at: int = 0  # its first attempt as this fallback
    chat: bytes = b""  # JSON: the chat and its options as the client gave them, with the mark CARRIED_CHAT; else b""
    interrupted_attempt: int = 0  # its attempt when its gateway stored it again, because the log had lost it; 0: never
    prefilled: bool = False  # a chat whose answer continues the text of its last message

    @property
    def continues(self) -> bool:
        """Whether the answer's text follows other text, so that the blank in front of its first word counts."""
        return self.prefilled or self.endpoint == COMPLETION

    def without_texts(self, *, trace: Trace | None = None, fallbacks: tuple[Fallback, ...] = ()) -> "GenerateRequest":
        """This request without its client's text, with these instead of its own; processors keep their names."""
        sampling, stop = self.sampling, self.stop
        if sampling.logit_bias or sampling.logits_processors:
            processors = tuple(LogitsProcessor(each.name) for each in sampling.logits_processors)
            sampling = msgspec.structs.replace(sampling, logit_bias={}, logits_processors=processors)
        if stop.token_ids or stop.strings:
            stop = msgspec.structs.replace(stop, token_ids=(), strings=())
        return msgspec.structs.replace(
            self,
            prompt=b"",
            prompt_length=self.prompt_tokens,
            sampling=sampling,
            stop=stop,
            diffusion=self.diffusion and self.diffusion.without_texts(),
            embedding=self.embedding and self.embedding.without_texts(),
            parsing=None,
            client_body=b"",
            chat=b"",
            constraint=None,
            trace=trace,
            fallbacks=fallbacks,
        )

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES or self.prompt_length

    @property
    def named(self) -> str:
        """The model's name for its client: the adapter's name, else ``model``."""
        return self.lora.partition("@")[0] or self.model

    @property
    def recorded_under(self) -> str:
        """The model in the subject of its terminal event: the requested one, so that all attempts share one event."""
        return self.asked or self.model

    @property
    def output(self) -> str:
        """The kind of output: "image", "video", "embedding" or "score"; "": tokens."""
        if self.embedding is not None:
            return SCORE if self.embedding.scores else EMBEDDING
        return self.diffusion.kind if self.diffusion is not None else ""

    @property
    def token_address(self) -> str:
        """The address of its output for ``Subjects.tokens``: its gateway's id, with ``no_store`` in memory storage."""
        return f"{MEMORY}.{self.gateway}" if self.no_store else self.gateway


class PackedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request whose prompt takes as few bits as its token ids need. A build that does not know it refuses the array,
    rather than run an empty prompt.

    The first byte of ``prompt`` is that number of bits, 8 to 32. For n ids, their n lowest bytes follow, then their n
    next bytes, and so on while 8 bits are left. The last 1, 2 or 4 bits, if there are such, lie 8/w to a byte: byte i
    has those of id i in its w lowest bits, those of id i + m in the next, and so on, where m is the number of bytes.
    """

    request: GenerateRequest  # without ``prompt``; ``prompt_length`` says how many token ids there are
    prompt: bytes  # token ids


_decode_plain, _decode_packed = decoder(GenerateRequest), decoder(PackedRequest)
HEADERS = {HEADER_CONTENT_TYPE: content_type(GenerateRequest)}  # of messages in REQUESTS, beside their id
_SHORT_ARRAY = 0x90  # how MessagePack begins an array of less than 16 elements
PACKED_HEADERS = {HEADER_CONTENT_TYPE: content_type(PackedRequest)}


def is_packed(data: bytes) -> bool:
    """Whether a stored request is a ``PackedRequest``."""
    return bool(data) and data[0] & 0xF0 == _SHORT_ARRAY


def headers_of(data: bytes) -> dict[str, str]:
    """The headers of a stored request beside its id."""
    return PACKED_HEADERS if is_packed(data) else HEADERS


def decode_stored(data: bytes) -> GenerateRequest | PackedRequest:
    """A stored request as it was stored.

    Raises:
        msgspec.MsgspecError: it is none, or one of a later version.
    """
    data = bytes(data)  # it may be the ``Raw`` of a job
    return _decode_packed(data) if is_packed(data) else _decode_plain(data)


def decode(data: bytes) -> GenerateRequest:
    """A stored request, whichever way its prompt is packed.

    Raises:
        msgspec.MsgspecError: it is none, or one of a later version.
    """
    stored = decode_stored(data)
    if isinstance(stored, GenerateRequest):
        return stored
    request = stored.request
    try:
        prompt = widened(stored.prompt, request.prompt_length)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None
    msgspec.structs.force_setattr(request, "prompt", prompt)  # no other code has a reference to it
    msgspec.structs.force_setattr(request, "prompt_length", 0)
    return request


def decode_head(data: bytes) -> GenerateRequest:
    """A stored request, for readers that need the length of its prompt only: a packed one stays packed.

    Raises:
        msgspec.MsgspecError: as ``decode``.
    """
    stored = decode_stored(data)
    return stored if isinstance(stored, GenerateRequest) else stored.request


def packed(request: GenerateRequest) -> GenerateRequest | PackedRequest:
    """A request as streams hold it that are marked ``PACKED``; one without a prompt stays as it is."""
    if not request.prompt:
        return request
    head = msgspec.structs.replace(request, prompt=b"", prompt_length=request.prompt_tokens)
    return PackedRequest(head, narrowed(request.prompt))


def fallen_back(request: GenerateRequest, number: int, attempt: int) -> GenerateRequest:
    """A request as one of its fallbacks runs it.

    Args:
        number: of the fallback, as in ``GenerateRequest.fallback``; one that is after the request's own.
        attempt: its first as this fallback.
    Raises:
        msgspec.MsgspecError, IndexError: there is none of that number that this version can read.
    """
    at = number - request.fallback
    if at < 1:
        raise IndexError(f"{number} is not after fallback {request.fallback}")
    other = decode(request.fallbacks[at - 1].request)
    processors = other.sampling.logits_processors
    if not any(each.name == FALLBACK for each in processors):
        processors = (*processors, LogitsProcessor(FALLBACK))
    return msgspec.structs.replace(
        other,
        id=request.id,
        gateway=request.gateway,
        created_ns=request.created_ns,
        deadline_ns=request.deadline_ns,
        priority=request.priority,
        tenant=request.tenant,
        api_key=request.api_key,
        trace=request.trace,
        form=request.form,
        client_request_id=request.client_request_id,
        no_store=request.no_store,
        watched=request.watched,
        repeats_poison=request.repeats_poison,
        sampling=msgspec.structs.replace(other.sampling, logits_processors=processors),
        fallbacks=request.fallbacks[at:],
        fallback_after_s=request.fallback_after_s,
        asked=request.recorded_under,
        fallback=number,
        fell_back_at=attempt,
    )


def stored_as_fallback(stored: bytes, number: int, attempt: int) -> tuple[GenerateRequest, bytes]:
    """A stored request as one of its fallbacks runs it, and as a job holds it: packed if it was.

    Args:
        number, attempt: as in ``fallen_back``.
    Raises:
        msgspec.MsgspecError, IndexError: as ``fallen_back``.
    """
    request = decode(stored)
    if request.fallback == number:  # its gateway stored it again
        return request, stored
    other = fallen_back(request, number, attempt)
    return other, encode(packed(other) if is_packed(stored) else other)


def with_content(whole: GenerateRequest, shell: GenerateRequest) -> GenerateRequest:
    """The content of a request, as the one has it that a job holds without it: the fallback that runs, if one does.

    Raises:
        msgspec.MsgspecError, IndexError: as ``fallen_back``.
    """
    return fallen_back(whole, shell.fallback, shell.fell_back_at) if shell.fallback > whole.fallback else whole


def without_fallbacks(request: GenerateRequest) -> GenerateRequest:
    """A request with the names of its fallbacks only."""
    if not any(each.request for each in request.fallbacks):
        return request
    return msgspec.structs.replace(request, fallbacks=tuple(Fallback(each.model) for each in request.fallbacks))


CELL_AT = 36  # bit; the last 12 bits choose a request's shard in the log (``subjects``), and stay random


def new_request_id(now_ns: int | None = None, randomness: bytes | None = None, *, cell: int = -1) -> str:
    """A UUIDv7 (RFC 9562, section 5.7) as text: 48 bits of Unix milliseconds, then 74 random bits.

    Args:
        randomness: 10 bytes to use instead, for ids that several processes derive from the same input.
        cell: the three hexadecimal digits after the last hyphen; -1: they are random, too.
    """
    ms = (time.time_ns() if now_ns is None else now_ns) // 1_000_000
    value = (ms << 80) | int.from_bytes(os.urandom(10) if randomness is None else randomness, "big")
    if cell >= 0:
        value = value & ~(0xFFF << CELL_AT) | cell << CELL_AT
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def cell_in(request_id: str) -> int:
    """The number of the cell in an id, see ``new_request_id``; -1: it is not the id of a request."""
    try:
        return int(request_id[24:27], 16) if len(request_id) == 36 else -1
    except ValueError:
        return -1


def in_cell(request_id: str, cell: int) -> str:
    """The same id in another cell."""
    return f"{request_id[:24]}{cell:03x}{request_id[27:]}"


_ANSWERS = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # how ids of answers begin
_LONGEST_SHOWN = 80  # characters of what is not an id
_LAST_MS = 253_402_300_799_999  # the year 9999, the last that RFC 3339 can write


def request_of_answer(answer_id: str) -> str:
    """The id of the request that an answer, or a request, names."""
    for prefix in _ANSWERS:
        answer_id = answer_id.removeprefix(prefix)
    return answer_id


def time_of(request_id: str) -> int:
    """The Unix time at which the id was made, in ns with millisecond resolution.

    Raises:
        ValueError: not a UUIDv7, or its time is beyond the year 9999.
    """
    try:
        uuid = UUID(request_id)
    except ValueError:
        uuid = UUID(int=0)
    if uuid.version != 7:
        shown = request_id if len(request_id) <= _LONGEST_SHOWN else request_id[:_LONGEST_SHOWN] + "…"
        raise ValueError(f"{shown!r} is not a request id, which is a UUIDv7 as in the X-Request-Id header")
    if (ms := uuid.int >> 80) > _LAST_MS:
        raise ValueError(f"{request_id!r} has a time beyond the year 9999")
    return ms * 1_000_000
