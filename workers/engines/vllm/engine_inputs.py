"""From one of our sequences to one call of ``AsyncLLM.generate`` (0.33). Pure: names and values, no engine types.

All token ids that end an output are passed as stop ids, with ``ignore_eos``: an engine without a tokenizer knows no end
token, and this way it always names the one that ended an output. The worker handles stop strings.

vLLM's NIXL connector moves the KV of a handoff; ``kv_transfer_params``, which pass between workers as bytes, locate it.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import msgspec
import structlog
import torch

from penstock.infra.model.modeldir import Vision
from penstock.schemas.errors import Code
from penstock.schemas.requests import Constraint, Sampling, Stop
from penstock.workers.engines.engine_protocol import EngineInfo, MediaSpan, RequestError, SequenceRequest
from penstock.workers.engines.external import handoff_state
from penstock.workers.engines.external.constrained import ends, grammar_text
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.images import ImageStore
from penstock.workers.engines.external.sampling import bias, check_sampling, greedy, seed_of, shape, stop_ids
from penstock.workers.engines.external.sequences import collapse
from penstock.workers.engines.logits.registry import Registry
from penstock.workers.engines.vllm.plugin import EARLIER, PROCESSORS_OF, ChosenProcessors

encode_chosen = msgspec.json.Encoder().encode


def sampling_arguments(
    sampling: Sampling,
    stop: Stop,
    *,
    eos: Seq[int],
    max_tokens: int,
    min_tokens: int = 0,
    choice: int = 0,
    earlier: Seq[int] = (),
    score: bool = False,
    constraint: Constraint | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``. Those left out have defaults in the engine that mean the same.

    Args:
        max_tokens, min_tokens: of the tokens that are still to be generated.
        earlier: generated tokens that the engine sees as prompt. It counts them for ``repetition_penalty`` only, so the
            other penalties are passed as a bias.
        score: return the prompt's log-probabilities; the engine then ignores cached blocks.

    Raises:
        RequestError: the constraint cannot be compiled.
    """
    stop = ends(stop, constraint)
    parameters: dict[str, Any] = {
        "n": 1,
        "max_tokens": max_tokens,
        "detokenize": False,
        "ignore_eos": True,
        "stop_token_ids": sorted(stop_ids(stop, eos)),
        "seed": seed_of(sampling.seed, choice, len(earlier)),
    }
    if constraint is not None:
        parameters["structured_outputs"] = {"grammar": grammar_text(constraint)}
    elif min_tokens > 0:
        parameters["min_tokens"] = min(min_tokens, max_tokens)  # vLLM refuses more
    if greedy(sampling):
        parameters["temperature"] = 0.0
    parameters |= shape(sampling)
    if biases := bias(sampling, earlier):
        parameters["logit_bias"] = biases
    if sampling.logprobs is not None:
        parameters["logprobs"] = sampling.logprobs  # 0: the chosen token's only
    if score:
        parameters["prompt_logprobs"] = sampling.prompt_logprobs or 0
    return parameters


# Have a prefill engine compute, keep the blocks and return their location.
PRODUCE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# The engine would report these as its own cache hits.
_OMITTED = frozenset(["remote_prefill_cached_tokens"])


def pack(params: dict[str, Any], layout: str, context: Seq[int], token: int) -> bytes:
    """The state for ``PinnedPrompt.opaque``.

    Args:
        context: the tokens that were computed.
        token: the one that was drawn after them.
    """
    kept = {name: value for name, value in params.items() if name not in _OMITTED}
    return handoff_state.pack(kept, layout, context, [token])


def unpack(opaque: bytes, layout: str, tokens: Seq[int]) -> dict[str, Any]:
    """The params for an engine that continues ``tokens``, the last of which the prefill engine drew.

    Raises:
        ValueError: the state is damaged, or from another prompt, attempt or KV layout.
    """
    state = handoff_state.unpack(opaque, layout)
    if not state.params.get("do_remote_prefill"):
        raise ValueError("it offers no KV")
    handoff_state.count_prefilled(state, tokens, len(tokens) - 1)
    return state.params


log = structlog.get_logger("engine")


class VllmOptions(NamedTuple):
    """Fixed properties of an engine besides ``EngineInfo``.

    Attributes:
        root: parent of the first block's name for prompts without tenant or adapter; other roots become a cache salt.
        layout: fingerprint that engines share to hand KV to each other; empty: this one cannot.
        max_logprobs: most alternatives per token.
        images: of prompts, and ``vision``: how they represent them; None: it takes text only.
        processors: logits processors that requests may choose; None: the engine runs none.
    """

    root: bytes
    layout: str = ""
    max_logprobs: int = 20
    images: ImageStore | None = None
    vision: Vision | None = None
    processors: Registry | None = None


class VllmInputs(NamedTuple):
    """One call of the engine.

    Attributes:
        sampling: arguments of SamplingParams, without ``output_kind``.
        known: tokens already reported that the engine draws again.
        adopted: the prompt's KV is fetched from another engine.
        computed: the tokens of its prompt, if it is pinned for a handoff.
        rank: data-parallel rank, if there are several.
        images: files, for the placeholders in the prompt; none: it has no images, or their embeddings.
        whole: the prompt's tokens as vLLM has to write it, if there are images.
    """

    prompt: dict[str, Any]
    sampling: dict[str, Any]
    known: tuple[int, ...] = ()
    adopted: bool = False
    computed: tuple[int, ...] = ()
    rank: int | None = None
    images: tuple[bytes, ...] = ()
    whole: tuple[int, ...] = ()


def check(request: SequenceRequest, info: EngineInfo, options: VllmOptions) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    check_sampling(request, info)
    if max(request.sampling.logprobs or 0, request.sampling.prompt_logprobs or 0) > options.max_logprobs:
        raise RequestError(Code.invalid_request, f"logprobs and prompt_logprobs are at most {options.max_logprobs}")
    if options.processors is not None:
        options.processors.chain(request)  # refuses what vLLM's processes would stumble over
    elif request.sampling.logits_processors:
        raise RequestError(Code.unsupported, "this worker has no logits processors; start it with --logits-processor")
    if request.media and options.images is None:
        raise RequestError(Code.unsupported, "this worker's engine takes text only; send the request without images")
    if request.pin and not options.layout:
        raise RequestError(Code.unsupported, "this worker does not hand off KV; start it with --role prefill")


def prepare(request: SequenceRequest, info: EngineInfo, options: VllmOptions, consumed: ConsumedStates) -> VllmInputs:
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
    limit = 1 if request.pin else min(request.stop.max_tokens, room) - len(before)
    parameters = sampling_arguments(
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
    if request.pin:
        extra["kv_transfer_params"] = dict(PRODUCE)
    elif params is not None:
        extra["kv_transfer_params"] = params
    if request.constraint is not None and before:
        extra[EARLIER] = list(before)
    if options.processors is not None and (selected := options.processors.selected(request)):
        named = tuple((each.name, (each.args or b"{}").decode()) for each in selected)
        extra[PROCESSORS_OF] = encode_chosen(ChosenProcessors(named, len(request.prompt))).decode()
    if extra:
        parameters["extra_args"] = extra
    prompt: dict[str, Any] = {"prompt_token_ids": list(computed)}
    images: tuple[bytes, ...] = ()
    if request.media and options.images is not None and options.vision is not None:
        images = options.images.images(request.media)
        if not images:
            embeddings = _embeddings(options.images.embeddings(request.media), request.media, options.vision)
            prompt["multi_modal_data"] = {"image": embeddings}
        prompt["prompt_token_ids"] = collapse(computed, request.media, options.vision.image_token_id)
        prompt["multi_modal_uuids"] = {"image": [span.digest.hex() for span in request.media]}  # as blocks are named
    if request.root and request.root != options.root:
        prompt["cache_salt"] = request.root.hex()
    rank = request.rank % info.dp_size if info.dp_size > 1 else None
    return VllmInputs(
        prompt,
        parameters,
        last_tokens,
        params is not None,
        computed if request.pin else (),
        rank,
        images,
        computed if request.media else (),
    )


def _embeddings(rows: list[Any], spans: Seq[MediaSpan], vision: Vision) -> Any:
    """Embeddings of images (tokens, hidden) each, as vLLM takes them."""
    if vision.patches is None:
        return rows
    merge = vision.patches.merge
    grids = [(steps, rows * merge, columns * merge) for steps, rows, columns in (span.grid for span in spans)]
    return {"image_embeds": torch.cat(rows), "image_grid_thw": torch.tensor(grids)}


def _take_over(
    request: SequenceRequest, tokens: list[int], options: VllmOptions, consumed: ConsumedStates
) -> dict[str, Any] | None:
    """``kv_transfer_params`` for another engine's KV; None: it cannot be taken over, so the prompt is computed here."""
    try:
        if not options.layout:
            raise ValueError("this worker does not accept KV; start it with --role decode")
        if not request.generated:
            raise ValueError("the prefill engine's token is missing")
        params = unpack(request.opaque, options.layout, tokens)
    except ValueError as error:
        log.warning("handoff_state_unusable", error=str(error), action="computing the prompt here")
        return None
    return params if consumed.claim(params.get("remote_engine_id"), params.get("remote_request_id")) else None
