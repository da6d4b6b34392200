"""An HTTP body becomes a GenerateRequest: parse, render the template, tokenise, check lengths, name blocks.

Pure but for random numbers; blocking for as long as tokenisation takes (about 1 ms per 1,000 tokens), so callers
with an event loop run large bodies in a thread. A conversation with images needs two steps: its ``Draft`` names the
media, and ``finish`` takes them once they are stored.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from configs.chat_template import TemplateError
from configs.modeldir import ModelDir, Vision
from gateway.media import Part
from gateway.openai import (
    MAX_PROCESSOR_BYTES,
    MAX_PROMPT_LOGPROBS,
    Body,
    ChatBody,
    TextBody,
    invalid,
    media_parts,
    parse_chat,
    parse_text,
    prompt_of,
    template_messages,
    unsupported,
)
from gateway.parsers.table import Parsers, parsing
from schemas.blocks import chain, media_extra, root
from schemas.errors import Code, ServingError
from schemas.ids import new_request_id
from schemas.requests import GenerateRequest, LogitsProcessor, Media, Parsing, Priority, Sampling, Stop
from schemas.wire import pack_tokens

T = TypeVar("T")

CHAT = "chat"
TEXT = "text"

SEED_MASK = (1 << 63) - 1
_OWN_VARIABLES = {"messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt"}
TIERS = {"flex": Priority.batch, "priority": Priority.interactive}
_PROBE_CHARS_PER_TOKEN = 16  # text above this ratio is probed by its start before all of it is tokenised


class Target(NamedTuple):
    """The model a body is prepared for, and what holds where the client says nothing.

    Attributes:
        names: what clients may call it; the first is canonical.
        gateway: whose token subject gets the answer.
        max_model_len: prompt + output in tokens, if the fleet's limit is below the model's; 0: the model's.
        revision: of the workers' weights, if they say another one than the model directory; "": the directory's.
        max_images: images and embedding files per request.
        processors: logits processors that some worker has; None: no worker is known.
        parsers: of thoughts and tool calls in chats; None: the answers are text.
    """

    model: ModelDir
    names: Sequence[str]
    gateway: str
    block_size: int = 32
    default_max_tokens: int = 512
    default_deadline_s: float = 600.0
    max_model_len: int = 0
    revision: str = ""
    max_images: int = 16
    processors: frozenset[str] | None = None
    parsers: Parsers | None = None

    @property
    def limit(self) -> int:
        """Prompt + output, tokens."""
        own = self.model.max_model_len
        return min(own, self.max_model_len) if self.max_model_len else own


class Prepared(NamedTuple):
    """A request that can be published, and how its answer is wanted."""

    request: GenerateRequest
    prompt_tokens: int
    stream: bool
    include_usage: bool


class Draft(NamedTuple):
    """A conversation with images, checked as far as it can be without them.

    Attributes:
        tokens: the prompt, with one placeholder per medium.
        media: what to load, in the order of the placeholders.
        deadline_s: from ``now_ns`` on.
    """

    body: ChatBody
    tokens: list[int]
    media: list[Part]
    now_ns: int
    request_id: str | None
    deadline_s: float


def random_seed() -> int:
    return secrets.randbits(63)


def prepare_chat(
    data: bytes,
    target: Target,
    *,
    now_ns: int,
    request_id: str | None = None,
    seed: Callable[[], int] = random_seed,
) -> Prepared | Draft:
    """A chat completion body, ready to be published, or waiting for its media.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_chat(data)
    _check_model(body.model, target)
    messages = template_messages(body.messages)
    media = media_parts(body.messages)
    vision = target.model.vision
    if vision is None and not media:
        tokens = _encode(_render(body, messages, target.model), target, special=False)
        return _request(body, CHAT, tokens, target, now_ns, request_id, seed)
    if vision is None:
        raise unsupported(media[0].field, f"images: {target.model.no_vision}")
    tokens = _tokens_with_images(body, messages, media, vision, target)
    if not media:
        return _request(body, CHAT, tokens, target, now_ns, request_id, seed)
    # as long as it will be at least, so that nothing is fetched for a prompt without room
    fewest = sum(1 if part.embedding else vision.image_tokens for part in media)
    _output_limit(len(tokens) - len(media) + fewest, _max_tokens(body), target)
    return Draft(body, tokens, media, now_ns, request_id, _deadline_s(body, target))


def finish(draft: Draft, media: Sequence[Media], target: Target, *, seed: Callable[[], int] = random_seed) -> Prepared:
    """The request of a draft whose media are stored: each placeholder becomes as many as its medium has tokens.

    Args:
        media: in the order of ``draft.media``; positions are set here.
    Raises:
        ServingError: it has become too long.
    """
    vision = target.model.vision
    assert vision is not None
    total = len(draft.tokens) - len(media) + sum(medium.tokens for medium in media)
    _output_limit(total, _max_tokens(draft.body), target)
    tokens: list[int] = []
    placed = []
    start = 0
    for medium in media:
        at = draft.tokens.index(vision.image_token_id, start)
        tokens += draft.tokens[start:at]
        placed.append(msgspec.structs.replace(medium, position=len(tokens)))
        tokens += [vision.image_token_id] * medium.tokens
        start = at + 1
    tokens += draft.tokens[start:]
    return _request(draft.body, CHAT, tokens, target, draft.now_ns, draft.request_id, seed, tuple(placed))


def prepare_text(
    data: bytes,
    target: Target,
    *,
    now_ns: int,
    request_id: str | None = None,
    seed: Callable[[], int] = random_seed,
) -> Prepared:
    """A text completion body, ready to be published.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_text(data)
    _check_model(body.model, target)
    prompt = prompt_of(body)
    if isinstance(prompt, str):
        prompt = _encode(prompt, target, special=True)
    elif max(prompt, default=0) >= target.model.vocab_size:
        raise invalid("prompt", f"prompt has token id {max(prompt)}; ids are below {target.model.vocab_size}")
    vision = target.model.vision
    if vision is not None and vision.image_token_id in prompt:
        raise invalid("prompt", f"prompt has the image token {vision.image_token!r}; images go into chat completions")
    return _request(body, TEXT, prompt, target, now_ns, request_id, seed)


def _check_model(name: str, target: Target) -> None:
    if name not in target.names:
        served = ", ".join(repr(known) for known in target.names)
        raise ServingError(
            Code.model_not_found, f"model {name[:200]!r} is not served here; served: {served}", param="model"
        )


def _render(body: ChatBody, messages: list[dict[str, Any]], model: ModelDir) -> str:
    if model.template is None:
        raise unsupported(
            "messages", f"model {model.name!r} has no chat template; use /v1/completions or start with --chat-template"
        )
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    if taken := _OWN_VARIABLES & variables.keys():
        raise invalid("chat_template_kwargs", f"chat_template_kwargs cannot set {sorted(taken)}")
    tools = body.tools if body.tool_choice != "none" else None
    try:
        return model.template.render(messages, tools, **variables)
    except TemplateError as error:
        raise invalid("messages", f"the model's chat template refuses these messages: {str(error)[:300]}") from None


def _tokens_with_images(
    body: ChatBody, messages: list[dict[str, Any]], media: Sequence[Part], vision: Vision, target: Target
) -> list[int]:
    """The prompt of a model that sees: with one placeholder per medium, and none that a client wrote.

    The image token's text in a message would become the token. Such a text is cut in two by a mark that nobody can
    know before, and the pieces are tokenised apart: it stays text, read as it was written.

    Raises:
        ServingError: too many media; the template does not write one placeholder for each.
    """
    if len(media) > target.max_images:
        raise invalid(
            media[target.max_images].field,
            f"the request has {len(media)} images, and the limit is {target.max_images} (--max-images)",
        )
    token = vision.image_token
    text = _render(body, messages, target.model)
    given = (messages, body.tools, body.chat_template_kwargs)
    if text.count(token) == len(media) and not (media and _holds(given, token)):
        tokens = _encode(text, target, special=False)
    else:
        mark = secrets.token_hex(16)
        messages, tools, variables = _replaced(list(given), token, token[:1] + mark + token[1:])
        body = msgspec.structs.replace(body, tools=tools, chat_template_kwargs=variables)
        tokens = []
        for piece in _render(body, messages, target.model).split(mark):
            if len(tokens) >= target.limit:
                raise _too_long(f"at least {len(tokens)} tokens", target.limit)
            tokens += _encode(piece, target, special=False)
    if (found := tokens.count(vision.image_token_id)) != len(media):
        raise invalid(
            media[0].field if media else "messages",
            f"the model's chat template writes {found} image placeholders for {len(media)} images; give images in user "
            "messages, or start with another --chat-template",
        )
    return tokens


def _holds(value: Any, text: str) -> bool:
    """Whether a text is anywhere in a JSON value."""
    if isinstance(value, str):
        return text in value
    if isinstance(value, dict):
        return any(text in key or _holds(inner, text) for key, inner in value.items())
    return isinstance(value, list | tuple) and any(_holds(inner, text) for inner in value)


def _replaced(value: Any, old: str, new: str) -> Any:
    """A JSON value with a text replaced wherever it is."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {key.replace(old, new): _replaced(inner, old, new) for key, inner in value.items()}
    return [_replaced(inner, old, new) for inner in value] if isinstance(value, list) else value


def _encode(text: str, target: Target, *, special: bool) -> list[int]:
    """Token ids; refuses text that cannot fit before paying for all of its tokenisation."""
    limit = target.limit

    def encode(part: str) -> list[int]:  # the batch form: no offsets (a fifth faster), and it frees the GIL
        ids: list[int] = target.model.tokenizer.encode_batch_fast([part], add_special_tokens=special)[0].ids
        return ids

    if len(text) > limit * _PROBE_CHARS_PER_TOKEN:
        longest = target.model.detokenizer.longest_bytes
        if len(text) > limit * longest:
            raise _too_long(
                f"{len(text)} characters, more than {limit} tokens of at most {longest} bytes can hold", limit
            )
        # cut anywhere: at most the last word is split differently, so its count can only be a little too high
        start = len(encode(text[: limit * _PROBE_CHARS_PER_TOKEN]))
        if start > limit + _PROBE_CHARS_PER_TOKEN:
            raise _too_long(f"at least {start} tokens", limit)
    return encode(text)


def _too_long(what: str, limit: int) -> ServingError:
    return ServingError(
        Code.context_length_exceeded,
        f"the prompt has {what}; this model takes {limit} tokens, prompt and answer together. Shorten the prompt.",
        param=None,
    )


def _max_tokens(body: ChatBody | TextBody) -> int | None:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens
    return 1 if body.max_tokens == 0 else body.max_tokens  # for the prompt's sake a token is computed


def _deadline_s(body: Body, target: Target) -> float:
    asked = [seconds for seconds in (body.timeout_s, body.deadline_s) if seconds is not None]
    return min(asked, default=target.default_deadline_s)


def _logprobs(body: ChatBody | TextBody) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _prompt_logprobs(body: ChatBody | TextBody, tokens: int) -> int | None:
    """What ``prompt_logprobs`` asks for, or echo with ``logprobs``.

    Raises:
        ServingError: too many for a prompt of so many tokens.
    """
    echoed = body.logprobs if isinstance(body, TextBody) and body.echo else None
    asked = [wanted for wanted in (body.prompt_logprobs, echoed) if wanted is not None]
    if not asked:
        return None
    most = max(asked)
    shown = body.n or 1 if isinstance(body, TextBody) else 1  # each choice of a text completion repeats them
    if (values := tokens * (1 + most) * shown) > MAX_PROMPT_LOGPROBS:
        field = "prompt_logprobs" if most == body.prompt_logprobs else "logprobs"
        times, choices = (f", in each of {shown} choices", ", ask for fewer choices (n)") if shown > 1 else ("", "")
        raise invalid(
            field,
            f"{field} {most} of a prompt of {tokens} tokens are {values} values, {1 + most} of each token{times}; the "
            f"limit is {MAX_PROMPT_LOGPROBS}. Ask for fewer alternatives{choices} or shorten the prompt.",
        )
    return most


def _request(
    body: ChatBody | TextBody,
    endpoint: str,
    tokens: list[int],
    target: Target,
    now_ns: int,
    request_id: str | None,
    seed: Callable[[], int],
    media: tuple[Media, ...] = (),
) -> Prepared:
    model = target.model
    prompt = pack_tokens(tokens)
    salt = body.cache_salt or ""
    deadline_s = _deadline_s(body, target)
    extra = media_extra(((m.position, m.tokens, m.digest) for m in media), target.block_size) if media else None
    request = GenerateRequest(
        id=request_id or new_request_id(now_ns),
        model=target.names[0],
        gateway=target.gateway,
        prompt=prompt,
        stop=_stop(body, _output_limit(len(tokens), _max_tokens(body), target), model),
        created_ns=now_ns,
        deadline_ns=now_ns + int(deadline_s * 1e9),
        digests=chain(prompt, target.block_size, root(target.revision or model.revision, salt=salt), extra),
        block_size=target.block_size,
        sampling=_sampling(body, _logprobs(body), _prompt_logprobs(body, len(tokens)), target, seed),
        n=body.n or 1,
        priority=body.priority or TIERS.get(body.service_tier or "", Priority.standard),
        user=body.user or "",
        salt=salt,
        media=media,
        worker=body.worker or "",
        endpoint=endpoint,
        stops_shown=bool(body.include_stop_str_in_output),
        echo=isinstance(body, TextBody) and bool(body.echo),
        unanswered=body.max_tokens == 0,
        parsing=_parsing(body, tokens, target) if target.parsers is not None and isinstance(body, ChatBody) else None,
    )
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Prepared(request, len(tokens), bool(body.stream), usage)


def _parsing(body: ChatBody, tokens: list[int], target: Target) -> Parsing | None:
    assert target.parsers is not None

    def prompt_end(count: int) -> str:
        text: str = target.model.tokenizer.decode(tokens[-count:], skip_special_tokens=False)
        return text

    tools = body.tools if body.tool_choice != "none" else None
    return parsing(target.parsers, tools, prompt_end, one_call=body.parallel_tool_calls is False)


def _output_limit(prompt_tokens: int, asked: int | None, target: Target) -> int:
    """How many tokens the answer may have.

    Raises:
        ServingError: no room is left, or less than the client asked for.
    """
    limit = target.limit
    if not prompt_tokens:
        raise invalid("prompt", "the prompt is empty; it needs at least 1 token")
    if prompt_tokens >= limit:
        raise _too_long(f"{prompt_tokens} tokens, which leaves no room for an answer", limit)
    if asked is None:
        return min(target.default_max_tokens, limit - prompt_tokens)
    if prompt_tokens + asked > limit:
        raise ServingError(
            Code.context_length_exceeded,
            f"this model takes {limit} tokens; the prompt has {prompt_tokens} and max_tokens asks for {asked} more. "
            f"Ask for at most {limit - prompt_tokens} or shorten the prompt.",
            param="max_tokens",
        )
    return asked


def _stop(body: Body, max_tokens: int, model: ModelDir) -> Stop:
    stop = body.stop
    token_ids = tuple(body.stop_token_ids or ())
    if token_ids and max(token_ids) >= model.vocab_size:
        raise invalid("stop_token_ids", f"stop_token_ids has {max(token_ids)}; ids are below {model.vocab_size}")
    return Stop(
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens or 0, max_tokens),
        token_ids=token_ids,
        strings=() if stop is None else (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop)),
        ignore_eos=bool(body.ignore_eos),
    )


def _sampling(
    body: Body, logprobs: int | None, prompt_logprobs: int | None, target: Target, seed: Callable[[], int]
) -> Sampling:
    """The client's values over the model's own defaults."""
    model = target.model
    own = model.sampling
    bias = body.logit_bias or {}
    if bias and max(bias) >= model.vocab_size:
        raise invalid("logit_bias", f"logit_bias has token id {max(bias)}; ids are below {model.vocab_size}")
    return Sampling(
        temperature=_given(body.temperature, own.temperature),
        top_p=_given(body.top_p, own.top_p),
        top_k=max(_given(body.top_k, own.top_k), 0),
        min_p=_given(body.min_p, own.min_p),
        seed=(seed() if body.seed is None else body.seed) & SEED_MASK,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, own.repetition_penalty),
        logit_bias=bias,
        logprobs=logprobs,
        logits_processors=_processors(body, target) if body.logits_processors else (),
        prompt_logprobs=prompt_logprobs,
    )


def _processors(body: Body, target: Target) -> tuple[LogitsProcessor, ...]:
    """What workers are told of the processors; the arguments stay as the client wrote them.

    Raises:
        ServingError: no worker has it, or the arguments are too many.
    """
    made = []
    for i, each in enumerate(body.logits_processors or ()):
        if target.processors is not None and each.name not in target.processors:
            known = ", ".join(sorted(target.processors)) or "none"
            raise invalid(
                f"logits_processors[{i}].name",
                f"logits processor {each.name!r} is registered on no worker; registered: {known}",
            )
        made.append(LogitsProcessor(each.name, msgspec.json.encode(each.args) if each.args else b""))
    if (size := sum(len(each.args) for each in made)) > MAX_PROCESSOR_BYTES:
        raise invalid(
            "logits_processors",
            f"the arguments of logits_processors take {size} bytes as JSON; the limit is {MAX_PROCESSOR_BYTES}",
        )
    return tuple(made)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
