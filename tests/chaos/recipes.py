"""What clients ask: a fixed set of bodies, so that one undisturbed run tells what each must be answered."""

import base64
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tests.demo_model import vision

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSE, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
PICTURES = "/v1/images/generations"

# How a client behaves, and how often (by weight).
WEIGHTS = {
    "stream": 5.0,
    "whole": 2.0,
    "choices": 1.0,
    "logprobs": 1.0,
    "stop": 1.0,
    "image": 2.0,
    "cancel": 1.0,
    "slow": 0.5,
    "repeat": 1.0,
    "background": 1.0,
    "embed": 2.0,
    "picture": 0.5,
    "messages": 1.5,
    "responses": 1.5,
    "chain": 1.0,
    "structured": 1.0,
    "tools": 1.0,
    "delete": 1.0,
    "no-store": 2.0,
    "limited": 1.0,
    "denied": 0.5,
    "nats": 3.0,
    "nats-whole": 1.0,
    "nats-raw": 1.0,
    "nats-repeat": 1.0,
    "nats-cancel": 0.5,
    "nats-no-store": 1.0,
}
KINDS = tuple(WEIGHTS)
NATS_KINDS = frozenset(kind for kind in KINDS if kind.startswith("nats"))
NO_STORE = ("no-store", "nats-no-store")
PRIVATE = (*NO_STORE, "delete")  # kinds of whose text nothing may be left on a disk
MARK_WORDS = 24

CALLED = "note_person"  # the function that "tools" calls
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 8},
        "likes": {"enum": ["tea", "coffee"]},
    },
    "required": ["name", "ages", "likes"],
    "additionalProperties": False,
}


class Recipe(NamedTuple):
    """One body; asked again and again, under other tags.

    Attributes:
        then: what continues the answer (Responses): a second body, asked once the first one is answered.
        mark: words that no other prompt has, and that are nowhere on the broker's disk afterwards.
    """

    name: str
    kind: str
    path: str
    body: dict[str, Any]
    then: dict[str, Any] | None = None
    mark: str = ""

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


def make(
    seed: int,
    model: str,
    kinds: Iterable[str],
    *,
    each: int = 4,
    tokens: int = 90,
    real: bool = False,
    embed: str = "",
    painter: str = "",
) -> list[Recipe]:
    """Recipes of these kinds, ``each`` of a kind.

    Args:
        embed: the model of embeddings.
        painter: the one that makes images.
        tokens: answers are about this long.
        real: the model means what it says: it is asked what it knows, greedily, and ends by itself.
    """
    rng = random.Random(f"recipes-{seed}")

    def one(kind: str, number: int) -> Recipe:
        match kind:
            case "embed":
                return _embeddings(rng, embed, number)
            case "picture":
                return _picture_of(rng, painter, number)
            case "messages" | "responses" | "chain" | "structured" | "tools" | "delete" | "limited" | "denied":
                return _other(random.Random(f"{kind}-{seed}-{number}"), model, kind, number, tokens, real)
            case "no-store" | "nats-no-store":
                return _not_stored(random.Random(f"{kind}-{seed}-{number}"), model, kind, number, tokens, real)
        return _recipe(rng, model, kind, number, tokens, real)

    return [one(kind, number) for kind in kinds for number in range(each)]


def _other(rng: random.Random, model: str, kind: str, number: int, tokens: int, real: bool) -> Recipe:
    """Of APIs and options that are asked in one form each."""
    length = rng.randrange(tokens // 2, tokens * 3 // 2)
    sampling: dict[str, Any] = {"temperature": 0} if real or number % 2 else {"temperature": 0.8, "seed": 7 + number}
    prompt = _question(rng) if real else _words(rng)
    chat = [{"role": "user", "content": prompt}]
    name, streamed = f"{kind}-{number}", number % 2 == 0
    match kind:
        case "messages":
            body = {"model": model, "max_tokens": length, "messages": chat, "temperature": 0, "stream": streamed}
            return Recipe(name, kind, MESSAGES, body)
        case "responses":
            body = {"model": model, "input": prompt, "max_output_tokens": length, "stream": streamed} | sampling
            return Recipe(name, kind, RESPONSE, body)
        case "chain":
            body = {"model": model, "input": prompt, "max_output_tokens": length // 2, "stream": streamed} | sampling
            return Recipe(name, kind, RESPONSE, body, body | {"input": "Go on.", "stream": not streamed})
        case "structured":
            shape = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
            body = {"model": model, "messages": chat, "response_format": shape, "max_tokens": 300, "stream": streamed}
            return Recipe(name, kind, CHAT, body | sampling)
        case "tools":
            tool = {"name": CALLED, "strict": True, "parameters": SCHEMA}
            body = {"model": model, "messages": chat, "tools": [{"type": "function", "function": tool}]}
            more = {"tool_choice": "required", "max_tokens": 300, "stream": streamed}
            return Recipe(name, kind, CHAT, body | more | sampling)
        case "delete":
            mark = _mark(rng)
            body = {"model": model, "input": f"{prompt} {mark}", "max_output_tokens": length // 2, "stream": streamed}
            return Recipe(name, kind, RESPONSE, body | sampling, mark=mark)
    body = {"model": model, "messages": chat, "max_tokens": 8, "stream": streamed}
    return Recipe(name, kind, CHAT, body | sampling)


def _not_stored(rng: random.Random, model: str, kind: str, number: int, tokens: int, real: bool) -> Recipe:
    """One of each way to say so: the option, of responses and of messages, and a stop string that is content, too."""
    mark = _mark(rng)
    prompt = f"{_question(rng) if real else _words(rng)} {mark}"
    length = rng.randrange(tokens // 2, tokens * 3 // 2)
    body: dict[str, Any] = {"model": model, "temperature": 0, "stream": number % 2 == 0}
    if kind == "no-store" and number % 4 == 2:
        body |= {"input": prompt, "max_output_tokens": length, "store": False}
        return Recipe(f"{kind}-{number}", kind, RESPONSE, body, mark=mark)
    body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": length}
    if kind == "no-store" and number % 4 == 3:
        return Recipe(f"{kind}-{number}", kind, MESSAGES, body | {"no_store": True}, mark=mark)
    body |= {"no_store": True, "stop": [mark]} | ({} if real else {"ignore_eos": True})
    return Recipe(f"{kind}-{number}", kind, CHAT, body, mark=mark)


def _mark(rng: random.Random) -> str:
    return " ".join(f"mark{rng.randrange(1000, 9973)}" for _ in range(MARK_WORDS))


def _picture_of(rng: random.Random, model: str, number: int) -> Recipe:
    """An image that is made, of few steps."""
    body = {"model": model, "prompt": "a red cube on the sea", "size": "32x32", "seed": rng.randrange(999)}
    return Recipe(f"picture-{number}", "picture", PICTURES, body | {"num_inference_steps": 8 + number})


def _recipe(rng: random.Random, model: str, kind: str, number: int, tokens: int, real: bool) -> Recipe:
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randrange(tokens // 2, tokens * 3 // 2)}
    if real:
        body["temperature"] = 0
    else:
        body |= {"ignore_eos": True} | rng.choice(
            [{"temperature": 0}, {"temperature": 0.8, "seed": rng.randrange(999)}]
        )
    path = TEXT if rng.random() < 0.2 and kind != "image" and not real else CHAT
    path = RESPONSE if kind == "background" else path
    prompt = _question(rng) if real else _words(rng)
    if kind == "image":
        body["messages"] = [{"role": "user", "content": [_picture(number), {"type": "text", "text": prompt}]}]
    elif path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    elif path == RESPONSE:
        body.pop("ignore_eos", None)
        body |= {"input": prompt, "background": True, "max_output_tokens": body.pop("max_tokens")}
        return Recipe(f"{kind}-{number}", kind, path, body)
    else:
        body["prompt"] = prompt
    body["stream"] = kind not in ("whole", "nats-whole") and (kind not in ("repeat", "nats-repeat") or number % 2 == 0)
    if kind == "choices":
        body |= {"n": 2, "stream": number % 2 == 0}
    elif kind == "nats" and number == 1:
        body["n"] = 2
    elif kind == "logprobs" or (kind == "nats" and number == 2):
        body |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    elif kind == "slow":
        body["max_tokens"] *= 5
    elif kind == "image":
        body["max_tokens"] = min(40, body["max_tokens"])
    return Recipe(f"{kind}-{number}", kind, path, body)


def _embeddings(rng: random.Random, model: str, number: int) -> Recipe:
    """Of 1 to 40 texts, as numbers or base64."""
    inputs = [_words(rng) for _ in range(rng.choice((1, 5, 40)))]
    body = {"model": model, "input": inputs, "encoding_format": ("float", "base64")[number % 2]}
    return Recipe(f"embed-{number}", "embed", EMBEDDINGS, body)


def with_stop(recipe: Recipe, text: str, rng: random.Random) -> Recipe:
    """Ends at a string that its answer has: ``text`` is that answer."""
    at = rng.randrange(len(text) // 3, max(len(text) // 3 + 1, len(text) * 3 // 4))
    stop = text[at : at + rng.randrange(2, 6)].replace("\ufffd", "")
    return recipe if not stop else recipe._replace(body=recipe.body | {"stop": [stop]})


def _words(rng: random.Random) -> str:
    """A prompt of 20 to 500 words; half of them begin alike."""
    shared = "You are a helpful assistant who answers at length. " * 6 if rng.random() < 0.5 else ""
    return shared + " ".join(f"word{rng.randrange(9973)}" for _ in range(rng.choice((20, 60, 150, 500))))


def _question(rng: random.Random) -> str:
    return rng.choice(
        (
            f"What is {rng.randrange(100, 900)} + {rng.randrange(100, 900)}?",
            f"Spell the word {rng.choice(('harbour', 'lantern', 'window', 'garden'))}.",
            "How do I start a worker?",
            f"Reverse the word {rng.choice(('river', 'stone', 'bottle'))}.",
        )
    )


def _picture(number: int) -> dict[str, Any]:
    raw = base64.b64encode(vision.png(vision.scene(random.Random(number), True))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{raw}"}}


def draw(rng: random.Random, recipes: Sequence[Recipe]) -> Recipe:
    """The next question of one client."""
    kinds = {recipe.kind: WEIGHTS[recipe.kind] for recipe in recipes}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    return rng.choice([recipe for recipe in recipes if recipe.kind == kind])
