"""From one of our sequences to one call of ``AsyncLLM.generate``. Pure."""

from typing import Any, NamedTuple

import structlog

from penstock.schemas.errors import Code
from penstock.workers.engines.base import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external import requests
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.vllm import handoff, sampling
from penstock.workers.engines.vllm.plugin import EARLIER

log = structlog.get_logger("engine")


class Options(NamedTuple):
    """Fixed properties of an engine besides ``EngineInfo``.

    Attributes:
        root: parent of the first block's name for prompts without tenant or adapter; other roots become a cache salt.
        layout: fingerprint that engines share to hand KV to each other; empty: this one cannot.
        max_logprobs: most alternatives per token.
    """

    root: bytes
    layout: str = ""
    max_logprobs: int = 20


class Prepared(NamedTuple):
    """One call of the engine.

    Attributes:
        sampling: arguments of SamplingParams, without ``output_kind``.
        known: tokens already reported that the engine draws again.
        adopted: the prompt's KV is fetched from another engine.
        computed: the tokens of its prompt, if it is held for a handoff.
        rank: data-parallel rank, if there are several.
    """

    prompt: dict[str, Any]
    sampling: dict[str, Any]
    known: tuple[int, ...] = ()
    adopted: bool = False
    computed: tuple[int, ...] = ()
    rank: int | None = None


def check(request: SequenceRequest, info: EngineInfo, options: Options) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    requests.check(request, info)
    if max(request.sampling.logprobs or 0, request.sampling.prompt_logprobs or 0) > options.max_logprobs:
        raise RequestError(Code.invalid_request, f"logprobs and prompt_logprobs are at most {options.max_logprobs}")
    if request.sampling.logits_processors:
        raise RequestError(Code.unsupported, "this worker's engine (vLLM) runs no logits processors")
    if request.media:
        raise RequestError(Code.unsupported, "this worker's engine takes text only; send the request without images")
    if request.hold and not options.layout:
        raise RequestError(Code.unsupported, "this worker does not hand off KV; start it with --role prefill")


def prepare(request: SequenceRequest, info: EngineInfo, options: Options, consumed: ConsumedStates) -> Prepared:
    """The call for a sequence that has passed ``check``.

    Args:
        consumed: states of prefill engines that this engine has taken over; each can be taken over once.

    Raises:
        RequestError: its constraint cannot be compiled.
    """
    tokens = [*request.prompt, *request.generated]
    takes_over = bool(request.opaque) and not request.score  # prompts that are scored are computed here
    params = _take_over(request, tokens, options, consumed) if takes_over else None
    last_tokens = tuple(tokens[-1:]) if params is not None else ()
    before = request.generated[: len(request.generated) - len(last_tokens)]
    room = info.max_model_len - len(request.prompt)
    limit = 1 if request.hold else min(request.stop.max_tokens, room) - len(before)
    parameters = sampling.arguments(
        request.sampling,
        request.stop,
        eos=info.eos_token_ids,
        max_tokens=limit,
        min_tokens=request.stop.min_tokens - len(before),
        choice=request.choice,
        earlier=before,
        score=0 < request.score < len(request.prompt),
        constraint=request.constraint,
    )
    computed = tuple(tokens[: len(tokens) - len(last_tokens)])
    extra: dict[str, Any] = {}
    if request.hold:
        extra["kv_transfer_params"] = dict(handoff.PRODUCE)
    elif params is not None:
        extra["kv_transfer_params"] = params
    if request.constraint is not None and before:
        extra[EARLIER] = list(before)
    if extra:
        parameters["extra_args"] = extra
    prompt: dict[str, Any] = {"prompt_token_ids": list(computed)}
    if request.root and request.root != options.root:
        prompt["cache_salt"] = request.root.hex()
    rank = request.rank % info.dp_size if info.dp_size > 1 else None
    return Prepared(prompt, parameters, last_tokens, params is not None, computed if request.hold else (), rank)


def _take_over(
    request: SequenceRequest, tokens: list[int], options: Options, consumed: ConsumedStates
) -> dict[str, Any] | None:
    """``kv_transfer_params`` for another engine's KV; None: it cannot be taken over, so the prompt is computed here."""
    try:
        if not options.layout:
            raise ValueError("this worker takes no KV over; start it with --role decode")
        if not request.generated:
            raise ValueError("the prefill engine's token is missing")
        params = handoff.unpack(request.opaque, options.layout, tokens)
    except ValueError as error:
        log.warning("handoff_state_unusable", error=str(error), action="computing the prompt here")
        return None
    return params if consumed.claim(params.get("remote_engine_id"), params.get("remote_request_id")) else None
