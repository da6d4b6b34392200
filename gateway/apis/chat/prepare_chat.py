"""From the body of a chat completion or completion to a GenerateRequest: parse, prompt, options, request.

Pure but for random numbers. Blocks for as long as tokenisation takes (about 1 ms per 1,000 tokens), so an event loop
runs large bodies in a thread. A chat with media takes two steps: ``prepare_chat`` returns a ``PendingMediaRequest``
that names the media, and ``attach_media`` completes it once they are stored.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from penstock.gateway.apis.chat.bodies import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    TextOptions,
    TranslatedChat,
    as_written,
    check_chat,
    parse_chat,
    parse_completion,
)
from penstock.gateway.apis.chat.carried_chat import carried_chat, shown_as_text
from penstock.gateway.apis.chat.constraint import Wanted, resolve_constraint
from penstock.gateway.apis.chat.prompt import (
    TEXT_FIELDS,
    Prompt,
    chat_prompt,
    completion_prompt,
    expand_media,
    truncated,
)
from penstock.gateway.base.request_bodies import (
    CHAT,
    COMPLETION,
    PrepareContext,
    invalid,
    prompt_too_long,
    random_seed,
    rename,
    renamed,
    resolve_deadline_s,
    resolve_priority,
    resolve_seed,
    unsupported,
)
from penstock.infra.model.defaults import BARRED
from penstock.infra.text.parsers.families import TABLE
from penstock.infra.text.parsers.registry import answer_marks, answer_parsing
from penstock.schemas import requests
from penstock.schemas.block_hashes import chain, media_extra, root
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.trace import Trace
from penstock.schemas.wire import pack_tokens

T = TypeVar("T")


class PreparedRequest(NamedTuple):
    """A request that can be published, and how its client wants the answer.

    Attributes:
        detached: it continues when its client disconnects.
        wanted: where the request's constraint comes from.
        repeated: it was made before, under the same key; the client asks again.
    """

    request: requests.GenerateRequest
    prompt_tokens: int
    stream: bool
    include_usage: bool
    detached: bool = False
    repeated: bool = False
    wanted: Wanted | None = None


class PendingMediaRequest(NamedTuple):
    """A chat with images or videos, checked as far as possible without them.

    Attributes:
        deadline_s: counted from ``now_ns``.
    """

    body: ChatCompletionRequest
    prompt: Prompt
    deadline_s: float
    now_ns: int
    request_id: str
    no_store: bool = False


def with_trace(prepared: PreparedRequest, trace: Trace | None) -> PreparedRequest:
    """The request with its trace; unchanged without one."""
    if trace is None:
        return prepared
    return prepared._replace(request=msgspec.structs.replace(prepared.request, trace=trace))


MAX_PROMPT_LOGPROBS = 131_072  # values in one answer: prompt tokens x (1 + alternatives) x times they are shown
MAX_STREAMED_LOGPROBS = 8_192  # of them in one event of a stream
RESERVED = requests.MARKS  # names that clients cannot use
_NEUTRAL = requests.Sampling()  # whose values are left out of messages
MAX_PROCESSOR_BYTES = 65_536  # arguments of all logits processors of a request, as JSON


class GenerationOptions(NamedTuple):
    stop: requests.Stop
    sampling: requests.Sampling
    wanted: Wanted | None = None
    parsing: requests.Parsing | None = None


def prepare_chat(
    body: bytes | ChatCompletionRequest,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest | PendingMediaRequest:
    """
    Args:
        body: as it came; or a chat that ``check_chat`` accepts, in whichever API it was written.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    if not isinstance(body, ChatCompletionRequest):
        body = parse_chat(body)
    context.check_model(body.model)
    try:
        shown = shown_as_text(body, context) if context.carries_chat else body
        prompt = truncated(chat_prompt(shown, context), body, context)
        options = resolve_options(
            body, prompt.tokens, prompt.min_tokens, context, seed
        )  # before media are fetched for an invalid body
    except ServingError as error:
        raise as_written(error, body) from None
    if prompt.media:
        deadline_s = resolve_deadline_s(body, context.default_deadline_s)
        no_store = context.no_store or bool(body.no_store)
        return PendingMediaRequest(body, prompt, deadline_s, now_ns, request_id, no_store)
    return _prepared(body, CHAT, prompt.tokens, options, context, now_ns=now_ns, request_id=request_id)


def count_prompt(body: ChatCompletionRequest, context: PrepareContext) -> int:
    """Tokens of a chat's prompt; of an embedding file or video, one, of an image of any size the least.

    Raises:
        ServingError: the chat cannot be served; names the field and the limit.
    """
    context.check_model(body.model)
    return chat_prompt(shown_as_text(body, context) if context.carries_chat else body, context).min_tokens


def attach_media(
    pending: PendingMediaRequest,
    media: Sequence[requests.Media],
    context: PrepareContext,
    *,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """
    Args:
        media: stored, in the order of ``pending.prompt.media``; positions are set here.
    Raises:
        ServingError: with all tokens of its media, the prompt is too long.
    """
    body, prompt, _, now_ns, request_id, _ = pending
    vision = context.model.vision
    assert vision is not None
    length = len(prompt.tokens) - len(media) + sum(medium.tokens for medium in media)
    options = resolve_options(body, prompt.tokens, length, context, seed)
    tokens, placed = expand_media(prompt, media, vision)
    return _prepared(body, CHAT, tokens, options, context, now_ns=now_ns, request_id=request_id, media=placed)


def prepare_completion(
    data: bytes,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_completion(data)
    context.check_model(body.model)
    if context.carries_chat:
        raise unsupported("prompt", "this model's server takes chats only; use POST /v1/chat/completions")
    prompt = truncated(completion_prompt(body, context), body, context)
    options = resolve_options(body, prompt.tokens, prompt.min_tokens, context, seed)
    return _prepared(body, COMPLETION, prompt.tokens, options, context, now_ns=now_ns, request_id=request_id)


def prepare_translated(
    chat: TranslatedChat, prepare: Callable[[ChatCompletionRequest], PreparedRequest | PendingMediaRequest]
) -> PreparedRequest | PendingMediaRequest:
    """What ``prepare`` makes of another API's body. Errors and media have the names of the client's fields.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    try:
        check_chat(chat.body)
        prepared = prepare(chat.body)
    except ServingError as error:
        raise renamed(error, chat.places) from None
    if isinstance(prepared, PendingMediaRequest):
        media = [part._replace(field=rename(part.field, chat.places)) for part in prepared.prompt.media]
        return prepared._replace(prompt=prepared.prompt._replace(media=media))
    return prepared


def count_translated(chat: TranslatedChat, context: PrepareContext) -> int:
    """Tokens of the prompt of another API's body.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    try:
        check_chat(chat.body)
        return count_prompt(chat.body, context)
    except ServingError as error:
        raise renamed(error, chat.places) from None


def _prepared(
    body: ChatCompletionRequest | CompletionRequest,
    endpoint: str,
    tokens: Sequence[int],
    options: GenerationOptions,
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    media: tuple[requests.Media, ...] = (),
) -> PreparedRequest:
    model = context.model
    prompt = pack_tokens(tokens)
    salt = context.salt(body.cache_salt or "")
    extra = media_extra(((m.position, m.tokens, m.digest) for m in media), context.block_size) if media else None
    names = root(context.revision or model.revision, context.adapter, salt)
    request = requests.GenerateRequest(
        id=request_id,
        model=context.names[0],
        gateway=context.gateway,
        prompt=prompt,
        stop=options.stop,
        created_ns=now_ns,
        deadline_ns=now_ns + int(resolve_deadline_s(body, context.default_deadline_s) * 1e9),
        digests=chain(prompt, context.block_size, names, extra),
        block_size=context.block_size,
        sampling=options.sampling,
        n=body.n or 1,
        priority=resolve_priority(body.priority, body.service_tier, context.priority),
        user=body.user or "",
        salt=salt,
        lora=context.adapter,
        media=media,
        worker=body.worker or "",
        endpoint=endpoint,
        stops_shown=bool(body.include_stop_str_in_output),
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        unanswered=body.max_tokens == 0,
        revision="" if body.worker else context.revision,  # a named worker is wanted whatever revision it serves
        tokenizer=model.tokenizer_digest,
        parsing=options.parsing,
        no_store=context.no_store or bool(body.no_store),
        session=body.prompt_cache_key or body.session_id or "",
        tenant=context.tenant,
        constraint=options.wanted.constraint if options.wanted is not None else None,
        shown=_shown(body),
        api_key=context.api_key,
        prefilled=isinstance(body, ChatCompletionRequest) and bool(body.continue_final_message),
        chat=carried_chat(body, _carried_limit(body, options.stop.max_tokens, context))
        if context.carries_chat and isinstance(body, ChatCompletionRequest)
        else b"",
    )
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return PreparedRequest(request, len(tokens), bool(body.stream), usage, wanted=options.wanted)


def _shown(body: ChatCompletionRequest | CompletionRequest) -> requests.Shown:
    stream = body.stream_options
    usage = stream is not None and bool(stream.continuous_usage_stats)
    special = body.skip_special_tokens is False
    called = isinstance(body, ChatCompletionRequest) and bool(body.functions)
    ids, as_ids = bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
    shown = requests.Shown(ids, as_ids, usage, special, called)
    return requests.TEXT_ONLY if shown == requests.TEXT_ONLY else shown


def resolve_options(
    body: ChatCompletionRequest | CompletionRequest,
    tokens: Sequence[int],
    prompt_tokens: int,
    context: PrepareContext,
    seed: Callable[[], int],
) -> GenerationOptions:
    """
    Args:
        tokens: of the prompt, with one placeholder per medium.
        prompt_tokens: length of the prompt.
        seed: draws one if the client gives none.
    Raises:
        ServingError: no room for output, an id outside the vocabulary, an unknown logits processor, too many
            log-probabilities, a constraint that cannot be applied.
    """
    stop = _stop(body, _max_tokens(body, prompt_tokens, context), context)
    parsing = _parsing(body, tokens, context)
    wanted = resolve_constraint(body, parsing, context)
    sampling = _sampling(body, prompt_tokens, context, seed)
    if wanted is not None:
        processors = (*sampling.logits_processors, *map(requests.LogitsProcessor, wanted.marks))
        sampling = msgspec.structs.replace(sampling, logits_processors=processors)
    if marks := [
        name for name, on in ((requests.ADAPTER, context.adapter), (requests.CARRIED_CHAT, context.carries_chat)) if on
    ]:
        processors = (*sampling.logits_processors, *map(requests.LogitsProcessor, marks))
        sampling = msgspec.structs.replace(sampling, logits_processors=processors)
    return GenerationOptions(stop, sampling, wanted, parsing)


def _parsing(
    body: ChatCompletionRequest | CompletionRequest, tokens: Sequence[int], context: PrepareContext
) -> requests.Parsing | None:
    """How the answer is parsed."""
    if context.parsers is None or not isinstance(body, ChatCompletionRequest):
        return None

    def prompt_end(count: int) -> str:
        text: str = context.model.tokenizer.decode(list(tokens[-count:]), skip_special_tokens=False)
        return text

    tools = body.tools if body.tool_choice != "none" else None
    parsing = answer_parsing(
        context.parsers,
        tools,
        prompt_end,
        one_call=body.parallel_tool_calls is False,
        begins=body.add_generation_prompt is not False,
        prefilled=_text_of(body.messages[-1]) if body.continue_final_message and not context.carries_chat else None,
    )
    if parsing is None:
        return None
    joined = body.separate_reasoning is False and bool(parsing.reasoning)
    if joined and (thoughts := TABLE.thoughts(parsing.reasoning)) is not None and thoughts.channels:
        raise unsupported(
            "separate_reasoning",
            "separate_reasoning: false is not supported by models that think in channels (harmony)",
        )
    hidden = body.include_reasoning is False and not joined
    return msgspec.structs.replace(
        parsing,
        names=context.reasoning_fields,
        hidden=hidden,
        joined=joined,
        nonempty=(body.chat_template_kwargs or {}).get("force_nonempty_content") is True,
        thoughts=answer_marks(parsing, context.model.detokenizer).thoughts,
    )


def _text_of(message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, list):
        return "".join(part.text or "" for part in content if part.type in TEXT_FIELDS)
    return content or ""


def _asked_tokens(body: ChatCompletionRequest | CompletionRequest) -> int | None:
    if isinstance(body, ChatCompletionRequest):
        return body.max_completion_tokens or body.max_tokens
    return 1 if body.max_tokens == 0 else body.max_tokens  # an echo alone still runs the model on the prompt


def _usual_tokens(context: PrepareContext) -> int:
    """Of an answer whose body sets no limit; 0: as many as fit."""
    return context.default_max_tokens or context.model.defaults.max_tokens


def _carried_limit(body: ChatCompletionRequest, max_tokens: int, context: PrepareContext) -> int | None:
    """As ``carried_chat`` takes it. Of what was lowered to the room in the context, only the server knows how much it
    is: it counts the prompt's tokens."""
    wanted = _asked_tokens(body) or _usual_tokens(context)
    return wanted if wanted == max_tokens else None


def _max_tokens(body: ChatCompletionRequest | CompletionRequest, prompt_tokens: int, context: PrepareContext) -> int:
    asked = _asked_tokens(body)
    limit = context.max_model_len
    if not prompt_tokens:
        raise invalid("prompt", "prompt is empty; it must have at least 1 token")
    if prompt_tokens >= limit:
        raise prompt_too_long(prompt_tokens, limit)
    rest = limit - prompt_tokens
    if asked is None:
        return min(_usual_tokens(context) or rest, rest)
    if asked > rest and context.clamp_max_tokens:
        return rest
    if asked > rest:
        raise ServingError(
            Code.context_length_exceeded,
            f"this model's context length is {limit} tokens; the prompt has {prompt_tokens} and max_tokens asks for "
            f"{asked} more. Set max_tokens to at most {rest} or shorten the prompt.",
            param="max_tokens",
        )
    return asked


def _stop(body: TextOptions, max_tokens: int, context: PrepareContext) -> requests.Stop:
    """
    Raises:
        ServingError: a stop token is outside the vocabulary.
    """
    stop, model, defaults = body.stop, context.model, context.model.defaults
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    token_ids = () if context.carries_chat else tuple(body.stop_token_ids or ())  # the server has other ids
    if token_ids and max(token_ids) >= model.vocab_size:
        raise invalid("stop_token_ids", f"stop_token_ids has {max(token_ids)}; ids must be below {model.vocab_size}")
    return requests.Stop(
        max_tokens=max_tokens,
        min_tokens=min(_given(body.min_tokens, defaults.min_tokens), max_tokens),
        token_ids=token_ids,
        strings=tuple(dict.fromkeys([*strings, *defaults.strings])),
        ignore_eos=bool(body.ignore_eos),
    )


def _sampling(
    body: ChatCompletionRequest | CompletionRequest,
    prompt_tokens: int,
    context: PrepareContext,
    seed: Callable[[], int],
) -> requests.Sampling:
    """
    Raises:
        ServingError: an id outside the vocabulary, an unknown logits processor, too many log-probabilities.
    """
    model = context.model
    default = model.sampling
    bias = {} if context.carries_chat else body.logit_bias or {}
    if bias and max(bias) >= model.vocab_size:
        raise invalid("logit_bias", f"logit_bias has token id {max(bias)}; ids must be below {model.vocab_size}")
    if model.defaults.barred and not context.carries_chat:
        bias = bias | dict.fromkeys(model.defaults.barred, BARRED)
    return requests.Sampling(
        temperature=_given(body.temperature, default.temperature),
        top_p=_given(body.top_p, default.top_p),
        top_k=max(_given(body.top_k, default.top_k), 0),
        min_p=_given(body.min_p, default.min_p),
        seed=resolve_seed(body, seed),
        presence_penalty=body.presence_penalty or _NEUTRAL.presence_penalty,
        frequency_penalty=body.frequency_penalty or _NEUTRAL.frequency_penalty,
        repetition_penalty=_given(body.repetition_penalty, default.repetition_penalty),
        logit_bias=bias,
        logprobs=_logprobs(body),
        logits_processors=_logits_processors(body, context) if body.logits_processors else (),
        prompt_logprobs=_prompt_logprobs(body, prompt_tokens),
    )


def _logprobs(body: ChatCompletionRequest | CompletionRequest) -> int | None:
    if isinstance(body, ChatCompletionRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _prompt_logprobs(body: ChatCompletionRequest | CompletionRequest, prompt_tokens: int) -> int | None:
    """From ``prompt_logprobs``, or from ``logprobs`` with ``echo``; the larger one.

    Raises:
        ServingError: too many values for this prompt.
    """
    is_completion = isinstance(body, CompletionRequest)
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    given = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    if not given:
        return None
    most = max(given)
    if body.stream and prompt_tokens * (1 + most) > MAX_STREAMED_LOGPROBS:
        raise invalid(
            "logprobs",
            f"logprobs {most} of an echoed prompt of {prompt_tokens} tokens gives {prompt_tokens * (1 + most)} values; "
            f"with stream: true the limit is {MAX_STREAMED_LOGPROBS}. Ask for fewer alternatives, or do not stream.",
        )
    shown = body.n or 1 if is_completion else 1  # each choice of a completion repeats them
    if (values := prompt_tokens * (1 + most) * shown) > MAX_PROMPT_LOGPROBS:
        field = "prompt_logprobs" if most == body.prompt_logprobs else "logprobs"
        times, choices = (f", in each of {shown} choices", ", ask for fewer choices (n)") if shown > 1 else ("", "")
        raise invalid(
            field,
            f"{field} {most} with a prompt of {prompt_tokens} tokens gives {values} values, {1 + most} per token"
            f"{times}; the limit is {MAX_PROMPT_LOGPROBS}. Ask for fewer alternatives{choices} or shorten the prompt.",
        )
    return most


def _logits_processors(body: TextOptions, context: PrepareContext) -> tuple[requests.LogitsProcessor, ...]:
    """Names and JSON arguments for the workers.

    Raises:
        ServingError: no worker has one of them, or the arguments are too large.
    """
    processors = []
    for i, each in enumerate(body.logits_processors or ()):
        known = None if context.logits_processors is None else context.logits_processors - RESERVED
        if each.name in RESERVED or (known is not None and each.name not in known):
            registered = ", ".join(sorted(known or ())) or "none"
            raise invalid(
                f"logits_processors[{i}].name",
                f"no worker has a logits processor {each.name!r}; registered: {registered}",
            )
        processors.append(requests.LogitsProcessor(each.name, msgspec.json.encode(each.args) if each.args else b""))
    if (size := sum(len(each.args) for each in processors)) > MAX_PROCESSOR_BYTES:
        raise invalid(
            "logits_processors",
            f"the arguments of logits_processors take {size} bytes as JSON; the limit is {MAX_PROCESSOR_BYTES}",
        )
    return tuple(processors)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
