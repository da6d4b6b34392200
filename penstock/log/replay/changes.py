"""Turns a recorded request into a new one: another id, changed settings, another deployment. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.schemas import blocks
from penstock.schemas.requests import GenerateRequest, Sampling, Stop

_REQUEST = ("n", "priority", "worker", "user", "salt")
_replace = msgspec.structs.replace


class Changes(NamedTuple):
    """The changes to recorded requests.

    Attributes:
        values: by name of a field of ``Sampling`` or ``Stop``, or one of n, priority, worker, user, salt.
        logprobs: at least so many per token, so that margins are known; 0: as recorded.
    """

    model: str = ""
    values: dict[str, Any] = {}
    logprobs: int = 0


class Target(NamedTuple):
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
    request: GenerateRequest, name: str, gateway: str, now_ns: int, target: Target, changes: Changes
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
    root = blocks.root(target.revision, request.lora, salt)
    media = blocks.media_extra(((m.position, m.tokens, m.digest) for m in request.media), target.block_size)
    return _replace(
        request,
        id=name,
        model=target.model,
        gateway=gateway,
        created_ns=now_ns,
        deadline_ns=now_ns + max(1, request.deadline_ns - request.created_ns),
        digests=blocks.chain(request.prompt, target.block_size, root, media),
        block_size=target.block_size,
        sampling=_replace(request.sampling, **typed[Sampling]),
        stop=_replace(request.stop, **typed[Stop]),
        revision=target.revision,
        tokenizer=target.tokenizer,
        trace=None,
        form="",
        client_request_id=request.id,
        **own,
    )
