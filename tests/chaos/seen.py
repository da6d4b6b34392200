"""What one client saw of one answer, event by event."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec


class Shown(msgspec.Struct):
    """One choice of an answer. ``logprobs``: (token text, its log-probability)."""

    text: str = ""
    finish: str = ""
    logprobs: list[tuple[str, float]] = []


class Seen:
    """Fold of one answer as its client got it, over any number of connections.

    Attributes:
        tag: names the request in the log (its "user"); copies of a repeated request share it.
        outcome: "answered", "failed", "cancelled" (by this client), "deleted" (by this client, after its end),
            "limited" (its API key's limit is reached), "denied" (its API key is none), "unknown" (the connection
            broke before it got an id, and there is no way to ask), or "hung"; "" while it runs.
        ended: Unix time of the outcome.
        refusal_s: the longest wait for a refusal of the broker's.
        url: where the last connection went.
        usage: tokens of prompt and answer, as the answer says; None: it does not.
    """

    def __init__(self, tag: str, recipe: str, kind: str, choices: int = 1) -> None:
        self.tag = tag
        self.recipe = recipe
        self.kind = kind
        self.request = ""
        self.outcome = ""
        self.code = ""
        self.message = ""
        self.left = False  # it asked to cancel, which may cross the end of the answer
        self.began = self.ended = 0.0
        self.refusal_s = 0.0
        self.url = ""
        self.usage: tuple[int, int] | None = None
        self.choices = {index: Shown() for index in range(choices)}
        self.last_id = ""
        self.repeats = 0
        self.holes = 0
        self.attached = 0
        self.refused = 0
        self.arrivals = array("d")
        self.notes: list[str] = []

    @property
    def finished(self) -> bool:
        return all(choice.finish for choice in self.choices.values())

    def begin_again(self) -> None:
        """The answer comes from its beginning once more: what came before counts no longer."""
        self.choices = {index: Shown() for index in self.choices}
        self.last_id = ""

    def deleted_for_it(self, request: str) -> None:
        """Its answer, of which it may not know, was deleted after the load. What it has not read is still unread."""
        if self.outcome in ("unknown", "answered") and self.finished:
            self.outcome, self.request = "deleted", request

    def take(self, body: Mapping[str, Any], event_id: str, now: float) -> None:
        """One event of a stream."""
        if event_id:
            if not goes_on(self.last_id, event_id):
                self.repeats += 1
            self.last_id = event_id
        self.arrivals.append(now)
        self.usage = _usage(body) or self.usage
        if "choices" not in body:
            _take_event(self.choices[0], body)
            return
        for part in body["choices"]:
            shown = self.choices[part["index"]]
            shown.text += part["text"] if "text" in part else _said(part["delta"])
            _take_logprobs(shown, part.get("logprobs"))
            shown.finish = part["finish_reason"] or shown.finish

    def take_whole(self, body: Mapping[str, Any]) -> None:
        """A whole answer."""
        self.usage = _usage(body) or self.usage
        for part in _choices(body):
            text = part["text"] if "text" in part else _said(part["message"])
            shown = self.choices[part["index"]] = Shown(text, part["finish_reason"], [])
            _take_logprobs(shown, part.get("logprobs"))


def _usage(body: Mapping[str, Any]) -> tuple[int, int] | None:
    """Of chats, completions and responses."""
    usage = (body.get("response") or body).get("usage") or {}
    if "completion_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    if "input_tokens" in usage and ("response" in body or body.get("object") == "response"):
        return usage["input_tokens"], usage["output_tokens"]
    return None


def _said(message: Mapping[str, Any]) -> str:
    """Content, and the calls of tools without their ids."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    named = "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)
    return (message.get("content") or "") + named


def _take_event(shown: Shown, body: Mapping[str, Any]) -> None:
    """One event of the Responses or Messages API, or of an image's progress."""
    match body.get("type"):
        case "response.output_text.delta":
            shown.text += body["delta"]
        case "response.completed" | "response.incomplete":
            shown.finish = body["response"]["status"]
        case "content_block_delta":
            shown.text += body["delta"].get("text", "")
        case "message_delta":
            shown.finish = body["delta"]["stop_reason"] or shown.finish


def last_event(body: Mapping[str, Any]) -> bool:
    """Whether nothing follows in the Responses or Messages API, whose streams have no ``[DONE]``."""
    return body.get("type") in ("response.completed", "response.incomplete", "message_stop")


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of a chat or a text; a response, a message, a list of vectors and one of images are one each."""
    if "output" in body:
        parts = [part["text"] for item in body["output"] for part in item.get("content", ())]
        return [{"index": 0, "text": "".join(parts), "finish_reason": body["status"]}]
    if body.get("type") == "message":
        parts = [block.get("text", "") for block in body["content"]]
        return [{"index": 0, "text": "".join(parts), "finish_reason": body["stop_reason"]}]
    if "data" in body:
        found = [str(each["embedding"] if "embedding" in each else each["url"]) for each in body["data"]]
        return [{"index": 0, "text": " ".join(found), "finish_reason": "stop"}]
    return list(body["choices"])


def goes_on(last: str, event_id: str) -> bool:
    """Whether an event id names more tokens than the last one."""
    if not last:
        return True
    before, after = (_numbers(each) for each in (last, event_id))
    grown = all(old <= new for old, new in zip(before, after, strict=True))
    return grown and before != after


def _numbers(event_id: str) -> list[tuple[int, bool]]:
    """(tokens, ended) per choice; behind all the usage."""
    parts = event_id.removesuffix("u").split(".")
    found = [(int(part.removesuffix("f")), part.endswith("f")) for part in parts]
    return [*found, (0, event_id.endswith("u"))]


def _take_logprobs(shown: Shown, given: Mapping[str, Any] | None) -> None:
    if not given:
        return
    if "tokens" in given:
        shown.logprobs += zip(given["tokens"], given["token_logprobs"], strict=True)
    else:
        shown.logprobs += [(each["token"], each["logprob"]) for each in given["content"]]
