"""What clients ask: a fixed set of bodies, so that one undisturbed run tells what each must be answered."""

import base64
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from infra.demo_model import vision

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSE, EMBEDDINGS = "/v1/responses", "/v1/embeddings"

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
    "nats": 3.0,
    "nats-whole": 1.0,
    "nats-raw": 1.0,
    "nats-repeat": 1.0,
    "nats-cancel": 0.5,
}
KINDS = tuple(WEIGHTS)
NATS_KINDS = frozenset(kind for kind in KINDS if kind.startswith("nats"))


class Recipe(NamedTuple):
    """One body; asked again and again, under other tags."""

    name: str
    kind: str
    path: str
    body: dict[str, Any]

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
) -> list[Recipe]:
    """Recipes of these kinds, ``each`` of a kind.

    Args:
        embed: the model of embeddings.
        tokens: answers are about this long.
        real: the model means what it says: it is asked what it knows, greedily, and ends by itself.
    """
    rng = random.Random(f"recipes-{seed}")
    return [
        _embeddings(rng, embed, number) if kind == "embed" else _recipe(rng, model, kind, number, tokens, real)
        for kind in kinds
        for number in range(each)
    ]


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
