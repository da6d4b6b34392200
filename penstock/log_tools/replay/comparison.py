"""Turns a recorded request into a new one (another id, changed settings, another deployment), and compares it with its
replay. Pure.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.log_tools.export.recording import RecordedRun
from penstock.schemas import block_hashes
from penstock.schemas.done import Done, MadeWith, Outcome
from penstock.schemas.requests import GenerateRequest, Sampling, Stop
from penstock.schemas.tokens import FAILURES, Logprob
from penstock.schemas.wire import unpack_tokens

CONTEXT = 12  # tokens shown before and after the first difference
TEXT = 5  # characters for each, of texts

SAME, TOKENS, FINISH, ERROR, UNANSWERED, RECOVERED = "same", "tokens", "finish", "error", "unanswered", "recovered"
OUTCOMES = (SAME, TOKENS, FINISH, ERROR, UNANSWERED, RECOVERED)


class TokenDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first difference of a choice, in token ids. ``position`` counts the choice's tokens from 0.

    Attributes:
        before: the tokens before it, of the prompt too.
        recorded, replayed: the tokens from there on, as many as are shown; empty: the choice had ended.
        margin: between the two most likely tokens at this position, natural logarithm; None: unknown. A small margin
            (below about 0.1) can be reversed by rounding in another batch.
        margin_of: whose log-probabilities it is from, "recorded" or "replayed".
    """

    choice: int
    position: int
    before: tuple[int, ...] = ()
    recorded: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    margin: float | None = None
    margin_of: str = ""


class TextDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """As ``TokenDifference``, of texts: ``position`` counts characters."""

    choice: int
    position: int
    before: str
    recorded: str
    replayed: str


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Milliseconds; None: not known. ``itl_ms``: the mean."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None


class Comparison(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request.

    Attributes:
        id, replay_id: as recorded, and as run again.
        outcome: one of ``OUTCOMES``; "recovered": the recorded one had failed or was cancelled, and as far as it came
            the tokens are the same.
        compared: tokens that both have.
        logprob_gap: the largest difference of two log-probabilities of the same token; None: not recorded.
        recorded_code, replayed_code: of failures, as clients get them.
    """

    id: str
    replay_id: str
    outcome: str
    compared: int = 0
    difference: TokenDifference | None = None
    logprob_gap: float | None = None
    recorded_code: str = ""
    replayed_code: str = ""
    message: str = ""
    recorded_finish: tuple[str, ...] = ()
    replayed_finish: tuple[str, ...] = ()
    recorded_route: tuple[str, ...] = ()
    replayed_route: tuple[str, ...] = ()
    recorded_cached: int = 0
    replayed_cached: int = 0
    recorded_timing: Timing = Timing()
    replayed_timing: Timing = Timing()
    text_difference: TextDifference | None = None


def compare(recorded: RecordedRun, replayed: RecordedRun) -> Comparison:
    """``recorded`` has ended."""
    old, new = recorded.done, replayed.done
    assert old is not None
    difference, compared, gap = None, 0, None
    if new is None:
        outcome = UNANSWERED
    else:
        prompt = unpack_tokens(recorded.request.prompt) if recorded.request is not None else array("I")
        difference, compared, gap = _choices(old, new, tuple(prompt[-CONTEXT:]))
        outcome = _outcome(old, new, difference)
        if outcome in (RECOVERED, ERROR):  # the shorter of the two was cut off
            difference = None
    return Comparison(
        recorded.id,
        replayed.id,
        outcome,
        compared,
        difference if outcome in (TOKENS, FINISH) else None,
        gap,
        _code(old),
        _code(new) if new is not None else "",
        new.message if new is not None else "no answer in time",
        _finishes(old),
        _finishes(new) if new is not None else (),
        recorded.route,
        replayed.route,
        recorded.cached_tokens,
        replayed.cached_tokens,
        timing(recorded),
        timing(replayed),
    )


def what_changed(recorded: RecordedRun, replayed: RecordedRun) -> list[str]:
    """What a replay did not have as it was recorded, and what tokens depend on; as text."""
    one, other = recorded.request, replayed.request
    changes = []
    if recorded.revision and replayed.revision and recorded.revision != replayed.revision:
        changes.append(f"the revision changed from {recorded.revision} to {replayed.revision}")
    old_ran, new_ran = (
        (each.done.timings.made_with if each.done is not None else None) or MadeWith() for each in (recorded, replayed)
    )
    for name in ("engine", "build"):
        old, new = getattr(old_ran, name), getattr(new_ran, name)
        changes += [f"the {name} changed from {old} to {new}"] if old and new and old != new else []
    if one is None or other is None:
        return changes
    pairs: list[tuple[str, Any, Any]] = [("model", one.model, other.model), ("adapter", one.lora, other.lora)]
    for old, new in ((one.sampling, other.sampling), (one.stop, other.stop)):
        names = (name for name in old.__struct_fields__ if name not in ("logprobs", "prompt_logprobs"))
        pairs += [(name, getattr(old, name), getattr(new, name)) for name in names]
    changes += [f"{name} differs: {old!r}, now {new!r}" for name, old, new in pairs if old != new]
    return changes


def compare_texts(recorded: RecordedRun, replayed: RecordedRun, old: Sequence[str], new: Sequence[str]) -> Comparison:
    """As ``compare``, where the replay has no token ids but each choice's text.

    Args:
        old, new: the choices' texts.
    """
    comparison = compare(recorded, replayed)
    if comparison.replayed_code or replayed.done is None or comparison.outcome == RECOVERED:
        return comparison
    comparison = msgspec.structs.replace(comparison, outcome=SAME, difference=None, compared=0)
    for choice, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            at = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))
            shown = slice(at, at + CONTEXT * TEXT)
            before = one[max(0, at - CONTEXT * TEXT) : at]
            difference = TextDifference(choice, at, before, one[shown], other[shown])
            return msgspec.structs.replace(comparison, outcome=TOKENS, text_difference=difference)
    if comparison.recorded_finish != comparison.replayed_finish and not comparison.recorded_code:
        return msgspec.structs.replace(comparison, outcome=FINISH)
    return comparison


def timing(run: RecordedRun) -> Timing:
    itl = run.itl_ms()
    return Timing(run.ttft_ms, sum(itl) / len(itl) if itl else None, run.e2e_ms)


def _code(event: Done) -> str:
    if event.code:
        return event.code
    failed = [choice.reason for choice in event.choices if choice.reason in FAILURES]
    return failed[0] if failed else ""


def _finishes(event: Done) -> tuple[str, ...]:
    return tuple(choice.reason for choice in event.choices)


def _outcome(old: Done, new: Done, difference: TokenDifference | None) -> str:
    before, after = _code(old), _code(new)
    real = difference is not None and difference.recorded and difference.replayed
    if before == after and before:
        return SAME
    if after:
        return ERROR
    if real:
        return TOKENS
    if before:
        return RECOVERED
    if difference is not None:
        return TOKENS
    return SAME if [_ending(each) for each in old.choices] == [_ending(each) for each in new.choices] else FINISH


def _ending(choice: Outcome) -> tuple[str, str | int | None]:
    return choice.reason, choice.stop


def _choices(old: Done, new: Done, prompt: tuple[int, ...]) -> tuple[TokenDifference | None, int, float | None]:
    first: TokenDifference | None = None
    compared, gaps = 0, []
    for index in range(max(len(old.choices), len(new.choices))):
        one = old.choices[index] if index < len(old.choices) else Outcome()
        other = new.choices[index] if index < len(new.choices) else Outcome()
        position = _first_difference(one.tokens, other.tokens)
        common = min(len(one.tokens), len(other.tokens)) // 4 if position is None else position
        compared += common
        gaps += _gaps(one.logprobs[:common], other.logprobs[:common])
        if position is not None and first is None:
            first = _difference(index, position, one, other, prompt)
    return first, compared, max(gaps, default=None)


def _first_difference(one: bytes, other: bytes) -> int | None:
    """The first position with different tokens, or only in one of them; None: they are equal."""
    if one == other:
        return None
    low, high = 0, min(len(one), len(other)) // 4  # equal up to low
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * 4 : middle * 4] == other[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low


def _difference(choice: int, position: int, one: Outcome, other: Outcome, prompt: tuple[int, ...]) -> TokenDifference:
    old, new = unpack_tokens(one.tokens), unpack_tokens(other.tokens)
    margin, whose = None, ""
    for name, logprobs in (("recorded", one.logprobs), ("replayed", other.logprobs)):
        if margin is None and position < len(logprobs):
            margin, whose = _margin(logprobs[position]), name
    return TokenDifference(
        choice,
        position,
        (*prompt, *old[:position])[-CONTEXT:],
        tuple(old[position : position + CONTEXT]),
        tuple(new[position : position + CONTEXT]),
        margin,
        whose if margin is not None else "",
    )


def _margin(logprob: Logprob) -> float | None:
    return logprob.top[0][1] - logprob.top[1][1] if len(logprob.top) > 1 else None


def _gaps(one: Sequence[Logprob], other: Sequence[Logprob]) -> list[float]:
    return [abs(old.logprob - new.logprob) for old, new in zip(one, other, strict=False)]


_REQUEST = ("n", "priority", "worker", "user", "salt")
_replace = msgspec.structs.replace


class Changes(NamedTuple):
    """The changes to recorded requests.

    Attributes:
        values: by name of a field of ``Sampling`` or ``Stop``, or one of n, priority, worker, user, salt.
        logprobs: at least this many per token, so that margins are known; 0: as recorded.
    """

    model: str = ""
    values: dict[str, Any] = {}
    logprobs: int = 0


class NamingInputs(NamedTuple):
    """The inputs of block names at a deployment."""

    model: str
    revision: str
    block_size: int
    tokenizer: str


def parse_changes(texts: Sequence[str], *, model: str = "", seed: int | None = None, logprobs: int = 0) -> Changes:
    """``texts``: "name=value", as JSON where it is JSON.

    Raises:
        ValueError: no such setting, or not its value.
    """
    values: dict[str, Any] = {} if seed is None else {"seed": seed}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set {text}: write NAME=VALUE, as in --set temperature=0")
        try:
            values[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            values[name] = value
    for name, value in values.items():
        try:
            _typed(_kind_of(name), {name: value})
        except msgspec.ValidationError as error:
            raise ValueError(f"--set {name}={value}: {error}") from None
    return Changes(model, values, logprobs)


def _kind_of(name: str) -> type[msgspec.Struct]:
    for kind in (Sampling, Stop):
        if name in kind.__struct_fields__:
            return kind
    if name in _REQUEST:
        return GenerateRequest
    names = ", ".join((*Sampling.__struct_fields__, *Stop.__struct_fields__, *_REQUEST))
    raise ValueError(f"--set {name}: no such setting; there are {names}")


def _typed(kind: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some fields, as the fields' types."""
    fields = [(each.name, each.type) for each in msgspec.structs.fields(kind) if each.name in values]
    part = msgspec.convert(values, msgspec.defstruct("Part", fields))
    return {name: getattr(part, name) for name in values}


def as_new(
    request: GenerateRequest, name: str, gateway: str, now_ns: int, target: NamingInputs, changes: Changes
) -> GenerateRequest:
    """The request to publish.

    Its client request id is the recorded id. Blocks get the names that they have at the target. A pinned worker is
    dropped, since workers get new ids at each start.

    Args:
        name: its id.
        gateway: the answer goes to its token subject.
    """
    changed: dict[type[msgspec.Struct], dict[str, Any]] = {Sampling: {}, Stop: {}, GenerateRequest: {}}
    for key, value in changes.values.items():
        changed[_kind_of(key)][key] = value
    if changes.logprobs and (request.sampling.logprobs or 0) < changes.logprobs:
        changed[Sampling].setdefault("logprobs", changes.logprobs)
    typed = {kind: _typed(kind, values) if values else {} for kind, values in changed.items()}
    own = {"worker": ""} | typed[GenerateRequest]
    salt = own.get("salt", request.salt)
    root = block_hashes.root(target.revision, request.lora, salt)
    media = block_hashes.media_extra(((m.position, m.tokens, m.digest) for m in request.media), target.block_size)
    return _replace(
        request,
        id=name,
        model=target.model,
        gateway=gateway,
        created_ns=now_ns,
        deadline_ns=now_ns + max(1, request.deadline_ns - request.created_ns),
        digests=block_hashes.chain(request.prompt, target.block_size, root, media),
        block_size=target.block_size,
        sampling=_replace(request.sampling, **typed[Sampling]),
        stop=_replace(request.stop, **typed[Stop]),
        revision=target.revision,
        tokenizer=target.tokenizer,
        trace=None,
        form="",
        client_request_id=request.id,
        fallbacks=(),
        asked="",
        fallback=0,
        fell_back_at=0,
        **own,
    )
