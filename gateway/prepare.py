"""An HTTP body becomes a GenerateRequest: parse, render the template, tokenise, check lengths, name blocks.

Pure but for the random seed; blocking for as long as tokenisation takes (about 1 ms per 1,000 tokens), so callers
with an event loop run large bodies in a thread.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from configs.chat_template import TemplateError
from configs.modeldir import ModelDir
from gateway.openai import (
    Body,
    ChatBody,
    TextBody,
    invalid,
    parse_chat,
    parse_text,
    prompt_of,
    template_messages,
    unsupported,
)
from schemas.blocks import chain, root
from schemas.errors import Code, ServingError
from schemas.ids import new_request_id
from schemas.requests import GenerateRequest, Priority, Sampling, Stop
from schemas.wire import pack_tokens

T = TypeVar("T")

CHAT = "chat"
TEXT = "text"

_SEED_MASK = (1 << 63) - 1
_OWN_VARIABLES = {"messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt"}
_TIERS = {"flex": Priority.batch, "priority": Priority.interactive}
_PROBE_CHARS_PER_TOKEN = 16  # text above this ratio is probed by its start before all of it is tokenised


class Target(NamedTuple):
    """The model a body is prepared for, and what holds where the client says nothing.

    Attributes:
        names: what clients may call it; the first is canonical.
        gateway: whose token subject gets the answer.
        max_model_len: prompt + output in tokens, if the fleet's limit is below the model's; 0: the model's.
        revision: of the workers' weights, if they say another one than the model directory; "": the directory's.
    """

    model: ModelDir
    names: Sequence[str]
    gateway: str
    block_size: int = 32
    default_max_tokens: int = 512
    default_deadline_s: float = 600.0
    max_model_len: int = 0
    revision: str = ""

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


def random_seed() -> int:
    return secrets.randbits(63)


def prepare_chat(
    data: bytes,
    target: Target,
    *,
    now_ns: int,
    request_id: str | None = None,
    seed: Callable[[], int] = random_seed,
) -> Prepared:
    """A chat completion body, ready to be published.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_chat(data)
    _check_model(body.model, target)
    text = _render(body, target.model)
    tokens = _encode(text, target, special=False)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    return _request(body, CHAT, tokens, max_tokens, logprobs, target, now_ns, request_id, seed)


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
    return _request(body, TEXT, prompt, body.max_tokens, body.logprobs, target, now_ns, request_id, seed)


def _check_model(name: str, target: Target) -> None:
    if name not in target.names:
        served = ", ".join(repr(known) for known in target.names)
        raise ServingError(
            Code.model_not_found, f"model {name[:200]!r} is not served here; served: {served}", param="model"
        )


def _render(body: ChatBody, model: ModelDir) -> str:
    if model.template is None:
        raise unsupported(
            "messages", f"model {model.name!r} has no chat template; use /v1/completions or start with --chat-template"
        )
    variables = body.chat_template_kwargs or {}
    if taken := _OWN_VARIABLES & variables.keys():
        raise invalid("chat_template_kwargs", f"chat_template_kwargs cannot set {sorted(taken)}")
    tools = body.tools if body.tool_choice != "none" else None
    try:
        return model.template.render(template_messages(body.messages), tools, **variables)
    except TemplateError as error:
        raise invalid("messages", f"the model's chat template refuses these messages: {str(error)[:300]}") from None


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


def _request(
    body: ChatBody | TextBody,
    endpoint: str,
    tokens: list[int],
    max_tokens: int | None,
    logprobs: int | None,
    target: Target,
    now_ns: int,
    request_id: str | None,
    seed: Callable[[], int],
) -> Prepared:
    model = target.model
    prompt = pack_tokens(tokens)
    salt = body.cache_salt or ""
    deadline_s = min(body.timeout_s or target.default_deadline_s, body.deadline_s or target.default_deadline_s)
    request = GenerateRequest(
        id=request_id or new_request_id(now_ns),
        model=target.names[0],
        gateway=target.gateway,
        prompt=prompt,
        stop=_stop(body, _output_limit(len(tokens), max_tokens, target), model),
        created_ns=now_ns,
        deadline_ns=now_ns + int(deadline_s * 1e9),
        digests=chain(prompt, target.block_size, root(target.revision or model.revision, salt=salt)),
        block_size=target.block_size,
        sampling=_sampling(body, logprobs, model, seed),
        n=body.n or 1,
        priority=body.priority or _TIERS.get(body.service_tier or "", Priority.standard),
        user=body.user or "",
        salt=salt,
        worker=body.worker or "",
        endpoint=endpoint,
        stops_shown=bool(body.include_stop_str_in_output),
    )
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Prepared(request, len(tokens), bool(body.stream), usage)


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


def _sampling(body: Body, logprobs: int | None, model: ModelDir, seed: Callable[[], int]) -> Sampling:
    """The client's values over the model's own defaults."""
    own = model.sampling
    bias = body.logit_bias or {}
    if bias and max(bias) >= model.vocab_size:
        raise invalid("logit_bias", f"logit_bias has token id {max(bias)}; ids are below {model.vocab_size}")
    return Sampling(
        temperature=_given(body.temperature, own.temperature),
        top_p=_given(body.top_p, own.top_p),
        top_k=max(_given(body.top_k, own.top_k), 0),
        min_p=_given(body.min_p, own.min_p),
        seed=(seed() if body.seed is None else body.seed) & _SEED_MASK,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, own.repetition_penalty),
        logit_bias=bias,
        logprobs=logprobs,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
