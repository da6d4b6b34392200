"""Checks before any load whether an endpoint answers, and which options it supports.

Options that a server refuses are left out, and the report states the consequences: without ``ignore_eos`` and
``min_tokens`` answers may end early, without usage tokens are counted as events.
"""

import contextlib
import json
from typing import Any, Literal

from msgspec import Struct

from penstock.measure.load_generator import HttpTarget, ask
from penstock.measure.sweep.workload import TokenText

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_PROBE_TOKENS = 8
_PROBE_TEXT = " time year people way day man thing woman"
_REFUSED = (400, 404, 405, 422)
_QUOTED_BYTES = 300


class Unhealthy(Exception):
    """An endpoint that must not be loaded; the text says why."""


class Abilities(Struct, frozen=True, kw_only=True):
    """The options of a server that a sweep needs.

    Attributes:
        limit: the field for the largest number of tokens.
        exact: the field that keeps answers from ending early; "none": they may.
        usage: streamed answers end with the numbers of tokens.
        overhead_tokens: what the server counts beyond the text of a prompt; 0 if it does not say.
    """

    limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    exact: Literal["ignore_eos", "min_tokens", "none"] = "ignore_eos"
    usage: bool = True
    overhead_tokens: int = 0

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """The fields of a body that all requests share."""
        body: dict[str, Any] = {"model": model}
        if self.exact == "ignore_eos":
            body["ignore_eos"] = True
        if stream:
            body["stream"] = True
            if self.usage:
                body["stream_options"] = {"include_usage": True}
        return body

    def length(self, osl: int) -> dict[str, Any]:
        """The fields of a body that request this many tokens."""
        return {self.limit: osl} | ({"min_tokens": osl} if self.exact == "min_tokens" else {})


class Smoke(Struct, frozen=True):
    """The result of the smoke requests. ``warnings`` are for readers of the figures.

    ``fingerprint``: the server's ``system_fingerprint``, which changes with its model and its build; "": it has none.
    """

    model: str
    abilities: Abilities
    warnings: tuple[str, ...]
    fingerprint: str = ""


async def smoke(
    target: HttpTarget,
    api: Api,
    model: str,
    texts: TokenText | None,
    *,
    stream: bool = True,
    extra: dict[str, Any] | None = None,
    timeout_s: float = 60.0,
) -> Smoke:
    """Look for the model, then request a few tokens in the same way as the load.

    Args:
        model: "": the only one, or the first, that the server lists.
        texts: counts the probe's tokens, which gives the overhead; None: it stays unknown.

    Raises:
        Unhealthy: no answer, no such model, or a request that fails however it is put.
    """
    model = await _model(target, model, timeout_s)
    candidates = [
        Abilities(limit=limit, exact=exact, usage=usage)
        for limit in ("max_tokens", "max_completion_tokens")
        for usage in ((True, False) if stream else (True,))
        for exact in ("ignore_eos", "min_tokens", "none")
    ]
    said = ""
    for abilities in candidates:
        body = abilities.length(_PROBE_TOKENS) | abilities.body(model, stream=stream) | (extra or {})
        body |= _prompt(api)
        status, answer = await ask(target, PATHS[api], json.dumps(body).encode(), timeout_s)
        if status == 200:
            return _found(model, abilities, answer, texts)
        said = answer[:_QUOTED_BYTES].decode(errors="replace")
        if status not in _REFUSED:
            what = f"answers with status {status}: {said}" if status else f"does not answer ({said})"
            raise Unhealthy(f"{target.url}{PATHS[api]} {what}")
    raise Unhealthy(f"{target.url}{PATHS[api]} refuses the smoke request: {said}")


async def _model(target: HttpTarget, model: str, timeout_s: float) -> str:
    status, body = await ask(target, "/v1/models", timeout_s=timeout_s)
    if not status:
        raise Unhealthy(f"no server answers at {target.url} ({body.decode()}): start one, or correct the URL")
    try:
        names = [str(each["id"]) for each in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        if model:
            return model
        said = body[:_QUOTED_BYTES].decode(errors="replace")
        raise Unhealthy(f"{target.url}/v1/models lists no models ({said}): name one with --model") from None
    if not names:
        raise Unhealthy(f"{target.url} serves no model yet; wait until it is ready")
    if model and model not in names:
        raise Unhealthy(f"{target.url} has no model {model!r}; it serves {', '.join(names[:10])}")
    return model or names[0]


def _prompt(api: Api) -> dict[str, Any]:
    if api == "completions":
        return {"prompt": _PROBE_TEXT}
    return {"messages": [{"role": "user", "content": _PROBE_TEXT}]}


def _found(model: str, abilities: Abilities, answer: bytes, texts: TokenText | None) -> Smoke:
    warnings = []
    usage = _usage(answer)
    overhead = 0
    if usage is None:
        warnings.append("answers carry no usage: tokens are counted as server-sent events, prompts as asked for")
    else:
        if texts is not None:
            overhead = max(0, int(usage.get("prompt_tokens", 0)) - texts.count(_PROBE_TEXT))
        tokens = usage.get("completion_tokens", 0)
        if abilities.exact != "none" and tokens != _PROBE_TOKENS:
            warnings.append(f"{abilities.exact} was taken, but {tokens} tokens came instead of {_PROBE_TOKENS}")
    if abilities.exact == "none":
        warnings.append("neither ignore_eos nor min_tokens is supported: answers may be shorter than asked for")
    settled = Abilities(limit=abilities.limit, exact=abilities.exact, usage=usage is not None, overhead_tokens=overhead)
    prints = [found for part in _parts(answer) if isinstance(found := part.get("system_fingerprint"), str)]
    return Smoke(model, settled, tuple(warnings), prints[0] if prints else "")


def _usage(answer: bytes) -> dict[str, Any] | None:
    """The usage of an answer, streamed or whole; None: it has none."""
    return next((usage for part in reversed(_parts(answer)) if isinstance(usage := part.get("usage"), dict)), None)


def _parts(answer: bytes) -> list[dict[str, Any]]:
    """The objects of an answer, streamed or whole."""
    lines = [line.removeprefix(b"data:").strip() for line in answer.splitlines() if line.startswith(b"data:")]
    parts = []
    for text in lines or [answer]:
        with contextlib.suppress(ValueError):
            parts.append(json.loads(text))
    return [part for part in parts if isinstance(part, dict)]
