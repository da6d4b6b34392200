"""From one of our sequences to calls of ``Engine.async_generate``. Pure."""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from penstock.schemas.errors import Code
from penstock.workers.engines.base import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external import constrained, requests
from penstock.workers.engines.external.handoff_state import ConsumedStates
from penstock.workers.engines.external.sampling import stop_ids
from penstock.workers.engines.sglang import handoff, sampling
from penstock.workers.engines.sglang.handoff import Address, Room
from penstock.workers.engines.sglang.plugin import behind


class Options(NamedTuple):
    """Fixed properties of an engine besides ``EngineInfo``.

    Attributes:
        root: parent of the first block's name for prompts without tenant or adapter; other roots become a cache salt.
        role: "prefill" or "decode": it runs sequences together with another engine only.
        layout: fingerprint of engines that can; empty: it runs them alone.
        address: of a prefill engine's bootstrap server.
        wait_s: how long a decode engine waits for a prompt's KV.
        salts: the engine keeps prefixes of requests with a salt apart.
    """

    root: bytes
    role: str = "aggregated"
    layout: str = ""
    address: Address = Address("", 0)
    wait_s: float = 0.0
    salts: bool = True


class Prepared(NamedTuple):
    """One call of the engine.

    Attributes:
        arguments: of ``async_generate``, without ``rid`` and ``stream``.
        stops: token ids that end the sequence though the engine goes on, after ``least`` tokens.
        goes_on: when the call reaches its limit, another one follows.
    """

    arguments: dict[str, Any]
    stops: frozenset[int] = frozenset()
    least: int = 0
    goes_on: bool = False


def check(request: SequenceRequest, info: EngineInfo, options: Options) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    requests.check(request, info)
    if request.sampling.logits_processors:
        raise RequestError(Code.unsupported, "this worker's engine (SGLang) runs no logits processors")
    if request.media:
        raise RequestError(Code.unsupported, "this worker's engine takes text only; send the request without images")
    if request.root not in (b"", options.root) and not options.salts:
        raise RequestError(
            Code.unsupported,
            "this worker's SGLang has no cache_salt, so prefixes of tenants cannot be kept apart; install 0.5.23",
        )
    if request.hold and options.role != "prefill":
        raise RequestError(Code.unsupported, "this worker does not hand off KV; start it with --role prefill")
    if options.layout and request.score and request.sampling.prompt_logprobs is not None:
        raise RequestError(
            Code.unsupported, "prompt_logprobs: not with separate prefill and decode workers on SGLang; start one whole"
        )


def meeting(request: SequenceRequest, info: EngineInfo, options: Options, consumed: ConsumedStates) -> Room:
    """Where this engine meets the other one of its pair.

    Args:
        consumed: rooms that this engine has been to; both engines enter a room once.

    Raises:
        ValueError: there is no such place.
    """
    if options.role == "prefill":
        if not request.handoff:
            raise ValueError("this worker computes prompts for decode workers only")
        return handoff.room(options.address, request.handoff, request.choice, _rank(request, info))
    if not request.opaque:
        raise ValueError("this worker generates behind prompts of prefill workers only")
    found = handoff.unpack(request.opaque, options.layout, [*request.prompt, *request.generated], request.choice)
    if not consumed.claim(found):
        raise ValueError("it was used before")
    return found


def offer(request: SequenceRequest, info: EngineInfo, options: Options) -> bytes:
    """What the decode worker's engine needs to meet this one."""
    tokens = [*request.prompt, *request.generated]
    return handoff.pack(options.address, request.handoff, options.layout, tokens, _rank(request, info))


def _rank(request: SequenceRequest, info: EngineInfo) -> int | None:
    return request.rank % info.dp_size if info.dp_size > 1 else None


def prepare(
    request: SequenceRequest, info: EngineInfo, options: Options, said: Seq[int] = (), room: Room | None = None
) -> Prepared:
    """The next call for a sequence that has passed ``check``.

    Args:
        said: what earlier calls for it have generated.
        room: where the pair meets. A sequence is then one call, so ending tokens may be drawn before ``min_tokens``.

    Raises:
        RequestError: its constraint cannot be compiled.
    """
    earlier = [*request.generated, *said]
    tokens = [*request.prompt, *earlier]
    limit = min(request.stop.max_tokens, info.max_model_len - len(request.prompt)) - len(earlier)
    rules = constrained.ends(request.stop, request.constraint)
    ends = stop_ids(rules, info.eos_token_ids)
    goes_on, stops = False, frozenset[int]()
    least = min(rules.min_tokens - len(earlier), limit)
    grammar = "" if request.constraint is None else behind(constrained.grammar_text(request.constraint), earlier)
    if least > 0 and ends and room is None:
        ends_here, barred, goes_on = frozenset[int](), ends, least < limit
        limit = least
    elif least > 0 and ends:
        ends_here, barred, stops = frozenset(), frozenset(), ends
    elif rules.ignore_eos:  # the model's own end would end it, too
        ends_here, barred, stops = frozenset(), frozenset[int](), ends
    else:
        ends_here, barred = ends, frozenset()
    arguments: dict[str, Any] = {
        "input_ids": tokens,
        "sampling_params": sampling.arguments(
            request.sampling,
            max_tokens=limit,
            choice=request.choice,
            earlier=earlier,
            ends=ends_here,
            barred=barred,
            grammar=grammar,
        ),
    }
    scores = 0 < request.score < len(request.prompt) and not said
    if request.sampling.logprobs is not None or scores:
        best = max(request.sampling.logprobs or 0, (request.sampling.prompt_logprobs or 0) if scores else 0)
        arguments |= {"return_logprob": True, "top_logprobs_num": best}
        arguments["logprob_start_len"] = request.score - 1 if scores else -1
    if request.root and request.root != options.root:
        arguments["cache_salt"] = request.root.hex()
    if (rank := _rank(request, info)) is not None:
        arguments["routed_dp_rank"] = rank
    if request.trace is not None:
        arguments["external_trace_header"] = dict(request.trace)
    if room is not None:
        arguments |= room.arguments
    return Prepared(arguments, stops, max(0, least) if stops else 0, goes_on)
