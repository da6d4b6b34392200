"""What the bodies of all generation endpoints share: errors that name a field, options, what they are prepared for."""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Annotated, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.infra.model.modeldir import ModelDir
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.block_hashes import tenant_salt
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import adapter_name
from penstock.schemas.requests import COMPLETION as COMPLETION
from penstock.schemas.requests import Constraint, Priority
from penstock.schemas.streams import LONGEST_DEADLINE_S
from penstock.schemas.subjects import DEFAULT_TENANT

_FIELD = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_LONGEST = 400  # characters of a decoder's message, which may quote the client's text


def invalid(field: str | None, message: str) -> ServingError:
    """A value that the API does not allow."""
    return ServingError(Code.invalid_request, message, param=field)


class _Listed(Protocol):
    @property
    def id(self) -> str | None: ...


T = TypeVar("T", bound=_Listed)


class ListPage(NamedTuple, Generic[T]):
    """A part of a list, with the fields of the APIs. ``has_more``: in the direction that was asked for."""

    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None


def page_of(
    items: Iterable[T], query: Mapping[str, str], *, default: int, most: int, after: str = "after", before: str = ""
) -> ListPage[T]:
    """
    Args:
        items: all, the newest first.
        query: of the URL: ``limit``, and the id after or before which the page is. Without ``before``, also ``order``.
        default, most: of ``limit``.
        after, before: the names of those ids; "": there is none.
    Raises:
        ServingError: invalid_request, with the parameter.
    """
    text, order = query.get("limit", str(default)), "desc" if before else query.get("order", "desc")
    limit = int(text) if re.fullmatch("[0-9]{1,5}", text) else 0
    if not 1 <= limit <= most:
        raise invalid("limit", f"limit is {text[:40]!r}; it must be 1 to {most}")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order {order[:20]!r} must be 'asc' or 'desc'")
    ordered = list(items) if order == "desc" else [*items][::-1]
    places = {item.id: place for place, item in enumerate(ordered)}
    named = {field: query[field] for field in (after, before) if field and query.get(field)}
    if len(named) > 1:
        raise invalid(before, f"{after} and {before} exclude each other")
    for field, name in named.items():
        if name not in places:
            raise invalid(field, f"{field} {name[:200]!r} is the id of none of them; take it from the page before")
    if before in named:
        end = places[named[before]]
        start = max(end - limit, 0)
        more = start > 0
    else:
        start = places[named[after]] + 1 if named else 0
        end = min(start + limit, len(ordered))
        more = end < len(ordered)
    page = ordered[start:end]
    return ListPage(page, more, page[0].id if page else None, page[-1].id if page else None)


def unsupported(field: str, message: str) -> ServingError:
    """A valid value that this server does not implement."""
    return ServingError(Code.unsupported, message, param=field)


def needed(value: str | None, at: str) -> str:
    """
    Raises:
        ServingError: invalid_request: it is not given. ``at``: the name of its field.
    """
    if value is None:
        raise invalid(at, f"{at} is missing")
    return value


def prompt_too_long(tokens: int, max_model_len: int, *, at_least: bool = False) -> ServingError:
    """Agents compact a conversation when they read this: most know the first words, Claude Code its numbers too, others
    "maximum context length is N tokens"."""
    return ServingError(
        Code.context_length_exceeded,
        f"the prompt is too long: {'at least ' if at_least else ''}{tokens} tokens > {max_model_len - 1}. This model's "
        f"maximum context length is {max_model_len} tokens, prompt and output together. Shorten the prompt.",
    )


def model_not_found(model: str, served: Sequence[str], path: str = "") -> ServingError:
    """
    Args:
        path: where this model is asked instead; "": nowhere.
    """
    names = ", ".join(map(repr, served)) or "no model that generates text"
    if not model:
        return ServingError(Code.model_not_found, f"model is missing, and there is {names} for you", param="model")
    instead = f"generates no text; use POST {path}" if path else "is not served here"
    return ServingError(Code.model_not_found, f"model {model[:200]!r} {instead}; served: {names}", param="model")


def model_missing(served: Sequence[str]) -> ServingError:
    """A body names no model where several are served."""
    names = ", ".join(map(repr, served))
    return ServingError(Code.invalid_request, f"model is missing; name one of {names}", param="model")


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_BACKSLASH, _HIGH, _MOST_LONE = b"\\"[0], b"89abAB", 10_000


def without_lone_surrogates(data: bytes) -> bytes:
    """JSON with U+FFFD for each escape that is half of a UTF-16 pair without the other half.

    JavaScript's clients send one when they cut a text within an emoji, and then again in each later turn.
    """
    lone: list[int] = []
    for found in _SURROGATE.finditer(data):  # a match at a time, since a long one would keep the event loop waiting
        start = run = found.start()
        while run and data[run - 1] == _BACKSLASH:
            run -= 1
        if (start - run) % 2:  # a backslash, and a text that begins with "u"
            continue
        if data[start + 3] not in _HIGH and lone and lone[-1] == start - 6 and data[start - 3] in _HIGH:
            lone.pop()
        elif len(lone) == _MOST_LONE:
            return data
        else:
            lone.append(start)
    kept = zip([0, *(start + 6 for start in lone)], [*lone, len(data)], strict=True)
    return rb"\ufffd".join(data[begin:end] for begin, end in kept)


def decode_json(decode: Any, data: bytes) -> Any:
    """Decode JSON of a client or a model, whose texts may end with half of a UTF-16 pair.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError
    """
    try:
        return decode(data)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        if (repaired := without_lone_surrogates(data)) == data:
            raise
        return decode(repaired)


def decode_body(decode: Any, data: bytes) -> Any:
    """Decode JSON with a typed msgspec decoder.

    Raises:
        ServingError: invalid_request: not JSON in UTF-8, or a field of another type or beyond its limit.
    """
    try:
        try:
            return decode_json(decode, data)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return decode(_with_whole_numbers(data))
    except msgspec.ValidationError as error:
        raise _violation(str(error)) from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"the body is not valid JSON in UTF-8: {error}"[:_LONGEST]) from None


def _with_whole_numbers(data: bytes) -> bytes:
    """A body whose options are 2 where they were 2.0, as clients write it whose language has one kind of numbers."""
    body = decode_json(msgspec.json.decode, data)
    for options in (body, *map(body.get, _OPTIONS)) if isinstance(body, dict) else ():
        if isinstance(options, dict):
            options.update((name, _whole(value)) for name, value in options.items())
    return msgspec.json.encode(body)


_OPTIONS = ("options", "thinking", "reasoning")  # fields whose own fields may be whole numbers


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    return [*map(_whole, value)] if isinstance(value, list) else value


def _violation(text: str) -> ServingError:
    """msgspec writes ``Expected `float` <= 2.0 - at `$.temperature```; put the field first."""
    match = _FIELD.search(text)
    if match is None or not match[1]:
        missing = _MISSING.search(text)
        return invalid(missing[1] if missing else None, text[:_LONGEST])
    known = f"; use {_KNOWN[match[1]]}" if match[1] in _KNOWN and text.startswith("Invalid enum") else ""
    return invalid(match[1], f"{match[1]}: {text[: match.start()]}"[:_LONGEST] + known)


# Values of fields that several servers have, with other values.
_KNOWN = {
    "priority": "'interactive', 'standard' or 'batch'; 0 is 'standard'",
    "service_tier": "'auto', 'default', 'flex', 'priority' or 'scale'",
}


def rename(field: str, places: Mapping[str, str]) -> str:
    """A field of the chat as the client wrote it: by the longest beginning that ``places`` has."""
    for end in range(len(field), 0, -1):
        if (end == len(field) or field[end] in ".[") and (place := places.get(field[:end])) is not None:
            return place + field[end:]
    return field


def renamed(error: ServingError, places: Mapping[str, str]) -> ServingError:
    """The error with the client's name for the field, in its text too."""
    if error.param is None:
        return error
    param = rename(error.param, places)
    if param == error.param:
        return error
    message = error.message.replace(error.param, param)
    return ServingError(error.code, message, param=param, retry_after=error.retry_after)


BOM = b"\xef\xbb\xbf"  # which some clients write in front of UTF-8
CHAT = "chat"  # values of GenerateRequest.endpoint, beside COMPLETION
RESPONSE = "response"
COMPACTION = "compaction"
MESSAGE = "message"
OLLAMA_CHAT, OLLAMA_GENERATE = "ollama_chat", "ollama_generate"
OLLAMA = frozenset({OLLAMA_CHAT, OLLAMA_GENERATE})

SEED_MASK = (1 << 63) - 1
SERVICE_TIERS = {"flex": Priority.batch, "priority": Priority.interactive}

# One token of a NATS subject. Not "$", which in Python also matches before a final line break.
_WORKER_PATTERN = r"^[A-Za-z0-9_-]{1,128}(?![\s\S])"

Duration = Annotated[float, Meta(gt=0, le=LONGEST_DEADLINE_S)]
Name = Annotated[str, Meta(max_length=256)]


class CommonOptions(Struct, frozen=True, kw_only=True):
    """null means: not given."""

    model: (
        Annotated[
            str, Meta(max_length=512, description='missing, null or "": the one model of this kind that is served')
        ]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stream: Annotated[bool, Meta(description="answer with server-sent events")] | None = None
    user: Name | None = None
    priority: Annotated[Priority | Literal[0], Meta(description="0: standard, as other servers say")] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    timeout_s: Annotated[Duration, Meta(description="seconds until an unfinished request fails")] | None = None
    deadline_s: Annotated[Duration, Meta(description="alias of timeout_s; the shorter of the two applies")] | None = (
        None
    )
    no_store: Annotated[bool, Meta(description="never write prompt and answer to a disk")] | None = None
    worker: Annotated[str, Meta(pattern=_WORKER_PATTERN, description="id of the only worker to run on")] | None = None


def random_seed() -> int:
    """53 bits: JSON numbers are doubles in JavaScript and other languages, and a rounded seed draws another answer."""
    return secrets.randbits(53)


def resolve_seed(body: CommonOptions, draw: Callable[[], int]) -> int:
    """The client's seed, else one from ``draw``; in [0, 2**63)."""
    return (draw() if body.seed is None else body.seed) & SEED_MASK


def resolve_deadline_s(body: CommonOptions, default_s: float) -> float:
    """Seconds from acceptance in which the request must finish."""
    given = [seconds for seconds in (body.timeout_s, body.deadline_s) if seconds is not None]
    return min(given, default=default_s)


def resolve_priority(
    priority: Priority | Literal[0] | None, service_tier: str | None, highest: Priority | None = None
) -> Priority:
    """``priority`` wins over OpenAI's ``service_tier``. 0, the default of vLLM and SGLang, names no class.

    Args:
        highest: the class of a request that names none, and of one that names a higher one; None: it may have any.
    """
    named = priority or SERVICE_TIERS.get(service_tier or "")
    if highest is None:
        return named or Priority.standard
    return highest if named is None or named.rank < highest.rank else named


def read_switch(text: str, header: str) -> bool:
    """A header that is on ("1", "true") or off ("0", "false", empty).

    Raises:
        ServingError: invalid_request: anything else, which must not be taken for off.
    """
    match text.strip().lower():
        case "1" | "true":
            return True
        case "" | "0" | "false":
            return False
    raise ServingError(Code.invalid_request, f"{header} is {text[:40]!r}; use 1 or 0", param=header)


class ToolInput(NamedTuple):
    """What the only argument of a tool, a text, must match.

    Attributes:
        schema: of the arguments.
        given: the same as its client wrote it, for errors.
    """

    schema: dict[str, Any]
    given: Constraint


class PrepareContext(NamedTuple):
    """
    Attributes:
        names: of the model for clients; the first is canonical.
        gateway: id of the gateway whose token subject receives the answer.
        block_size: tokens of a KV block of the model's workers.
        default_max_tokens: output tokens at most if the client does not set max_tokens; 0: the model's own default, or
            the rest of the context.
        clamp_max_tokens: a limit of output tokens that exceeds the context is lowered, not refused.
        default_deadline_s: if the client sets neither timeout_s nor deadline_s.
        worker_max_model_len: the largest of the workers' limits on prompt + output, in tokens; 0: unknown.
        revision: that the workers serve; "": no worker is known, and block digests use the model directory's.
        max_images: images and embedding files per request.
        max_videos: likewise of videos.
        max_messages: of a chat, with those of the conversation that it continues.
        logits_processors: names that some worker has; None: no worker is known.
        parsers: of reasoning and tool calls in chats; None: output is plain text.
        special_tokens_as_text: the text of a special token in a message does not become that token.
        no_store: the request is erased after its end, whatever its body says.
        tenant: whose request it is.
        api_key: the part of its key that names it; "": it has none.
        allowed: names of models that it may use; None: all.
        priority: its class if the body names none, and the highest that it may have; None: the body decides.
        own_cache: tenants share no KV; False: this one shares it with the default tenant.
        reasoning_fields: of answers, see ``--reasoning-fields``; "": the default.
        inputs: by tool that takes one text: what this must match.
        loosened: schemas by tool, in place of those of tools that are not strict and have what cannot be compiled.
        elsewhere: models that generate no text, and the path to ask them at.
        adapter: id of the LoRA adapter that was named in place of the model; "": none was.
        carries_chat: requests carry their chat: the workers' servers take nothing else.
    """

    model: ModelDir
    names: Sequence[str]
    gateway: str
    block_size: int = 32
    default_max_tokens: int = 0
    clamp_max_tokens: bool = False
    default_deadline_s: float = 600.0
    worker_max_model_len: int = 0
    revision: str = ""
    max_images: int = 16
    max_videos: int = 2
    max_messages: int = 4_096
    logits_processors: frozenset[str] | None = None
    parsers: ParserNames | None = None
    special_tokens_as_text: bool = True
    no_store: bool = False
    tenant: str = DEFAULT_TENANT
    allowed: Set[str] | None = None
    priority: Priority | None = None
    own_cache: bool = True
    elsewhere: Mapping[str, str] = {}
    reasoning_fields: str = ""
    loosened: Mapping[str, Any] = {}
    inputs: Mapping[str, "ToolInput"] = {}
    api_key: str = ""
    adapter: str = ""
    carries_chat: bool = False

    def check_model(self, name: str | None) -> None:
        """
        Args:
            name: None or "": whichever is served.
        Raises:
            ServingError: model_not_found.
        """
        if not name:
            if not any(self.allowed is None or each in self.allowed for each in self.names):
                raise model_not_found("", ())
        elif (name not in self.names and name != adapter_name(self.adapter)) or (
            self.allowed is not None and name not in self.allowed
        ):
            allowed = self.allowed
            path = self.elsewhere.get(name, "") if allowed is None or name in allowed else ""
            raise model_not_found(name, [each for each in self.names if allowed is None or each in allowed], path)

    def salt(self, chosen: str) -> str:
        """The cache salt of a request for which its client chose this one: tenants cannot choose each other's."""
        tenant = self.tenant if self.own_cache else DEFAULT_TENANT
        return tenant_salt(tenant, chosen)

    @property
    def max_model_len(self) -> int:
        """Prompt + output, in tokens."""
        workers = self.worker_max_model_len
        if self.carries_chat and workers:  # the model is the server's, whichever folder counts its prompts
            return workers
        return min(self.model.length.limit(workers), workers) if workers else self.model.max_model_len
