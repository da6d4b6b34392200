"""What a body's options ask of the engine: how long an answer may be and take, where it stops, how it is drawn."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from gateway.openai.prepare_context import PrepareContext
from gateway.openai.prompt import too_long
from gateway.openai.requests import (
    MAX_PROCESSOR_BYTES,
    MAX_PROMPT_LOGPROBS,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    invalid,
)
from infra.model.modeldir import ModelDir
from schemas.errors import Code, ServingError
from schemas.requests import LogitsProcessor, Sampling, Stop

T = TypeVar("T")

SEED_MASK = (1 << 63) - 1


def max_tokens_of(body: ChatCompletionRequest | CompletionRequest) -> int | None:
    """How long an answer is asked for."""
    if isinstance(body, ChatCompletionRequest):
        return body.max_completion_tokens or body.max_tokens
    return 1 if body.max_tokens == 0 else body.max_tokens  # for the prompt's sake a token is computed


def deadline_of(body: Body, context: PrepareContext) -> float:
    """Seconds that a request may take."""
    asked = [seconds for seconds in (body.timeout_s, body.deadline_s) if seconds is not None]
    return min(asked, default=context.default_deadline_s)


def _logprobs(body: ChatCompletionRequest | CompletionRequest) -> int | None:
    if isinstance(body, ChatCompletionRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _prompt_logprobs(body: ChatCompletionRequest | CompletionRequest, tokens: int) -> int | None:
    """What ``prompt_logprobs`` asks for, or echo with ``logprobs``.

    Raises:
        ServingError: too many for a prompt of so many tokens.
    """
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    asked = [wanted for wanted in (body.prompt_logprobs, echoed) if wanted is not None]
    if not asked:
        return None
    most = max(asked)
    shown = body.n or 1 if isinstance(body, CompletionRequest) else 1  # each choice of a text completion repeats them
    if (values := tokens * (1 + most) * shown) > MAX_PROMPT_LOGPROBS:
        field = "prompt_logprobs" if most == body.prompt_logprobs else "logprobs"
        times, choices = (f", in each of {shown} choices", ", ask for fewer choices (n)") if shown > 1 else ("", "")
        raise invalid(
            field,
            f"{field} {most} of a prompt of {tokens} tokens are {values} values, {1 + most} of each token{times}; the "
            f"limit is {MAX_PROMPT_LOGPROBS}. Ask for fewer alternatives{choices} or shorten the prompt.",
        )
    return most


def output_limit(prompt_tokens: int, asked: int | None, context: PrepareContext) -> int:
    """How many tokens the answer may have.

    Raises:
        ServingError: no room is left, or less than the client asked for.
    """
    limit = context.limit
    if not prompt_tokens:
        raise invalid("prompt", "the prompt is empty; it needs at least 1 token")
    if prompt_tokens >= limit:
        raise too_long(f"{prompt_tokens} tokens, which leaves no room for an answer", limit)
    if asked is None:
        return min(context.default_max_tokens, limit - prompt_tokens)
    if prompt_tokens + asked > limit:
        raise ServingError(
            Code.context_length_exceeded,
            f"this model takes {limit} tokens; the prompt has {prompt_tokens} and max_tokens asks for {asked} more. "
            f"Ask for at most {limit - prompt_tokens} or shorten the prompt.",
            param="max_tokens",
        )
    return asked


def stop_of(body: Body, max_tokens: int, model: ModelDir) -> Stop:
    """
    Raises:
        ServingError: a stop token is outside the vocabulary.
    """
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


def sampling_of(
    body: ChatCompletionRequest | CompletionRequest,
    prompt_tokens: int,
    context: PrepareContext,
    seed: Callable[[], int],
) -> Sampling:
    """The client's values over the model's own defaults.

    Raises:
        ServingError: an id outside the vocabulary, an unknown logits processor, too many log-probabilities.
    """
    model = context.model
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
        logprobs=_logprobs(body),
        logits_processors=_processors(body, context) if body.logits_processors else (),
        prompt_logprobs=_prompt_logprobs(body, prompt_tokens),
    )


def _processors(body: Body, context: PrepareContext) -> tuple[LogitsProcessor, ...]:
    """What workers are told of the processors; the arguments stay as the client wrote them.

    Raises:
        ServingError: no worker has it, or the arguments are too many.
    """
    made = []
    for i, each in enumerate(body.logits_processors or ()):
        if context.processors is not None and each.name not in context.processors:
            known = ", ".join(sorted(context.processors)) or "none"
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
