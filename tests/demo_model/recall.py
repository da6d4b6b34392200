"""Recall tasks: copying, looking a key up in a long context, and facts from earlier turns."""

from random import Random

from tests.demo_model.sample import Message, Sample
from tests.demo_model.words import (
    ADJECTIVE_LIST,
    ANIMALS,
    COLORS,
    COMMON,
    NOUN_LIST,
    city,
    held_out,
    invent,
    made_up,
    name,
    number,
    pick,
)

CHARS_PER_TOKEN = 2.2  # approximate, of these contexts
LONGEST = 4800  # tokens

_LINES = (
    ("The code for {k} is {v}.", "What is the code for {k}?", "The code for {k} is {v}."),
    ("{k}: {v}", "What is the value of {k}?", "The value of {k} is {v}."),
    ("{k} = {v}", "Which value does {k} have?", "The value of {k} is {v}."),
    ("The password of {k} is {v}.", "Tell me the password of {k}.", "The password of {k} is {v}."),
    ("- {k} -> {v}", "Look up {k}.", "The value of {k} is {v}."),
)
_SECRETS = (
    ("The secret number is {v}.", "What is the secret number?", "The secret number is {v}."),
    ("The magic word is {v}.", "What is the magic word?", "The magic word is {v}."),
    ("Remember: the code for {k} is {v}.", "What is the code for {k}?", "The code for {k} is {v}."),
    ("The password of {k} is {v}.", "What is the password of {k}?", "The password of {k} is {v}."),
    ("The key {k} opens door {v}.", "Which door does the key {k} open?", "The key {k} opens door {v}."),
)
_COPY = ("Repeat: {t}", "Say this again: {t}", 'Repeat "{t}".', "Copy this: {t}", "Repeat after me: {t}", "Echo {t}")

_STATEMENTS = (
    ("name", "My name is {v}.", "Nice to meet you, {v}!", "Your name is {v}."),
    ("name", "I am {v}.", "Nice to meet you, {v}!", "Your name is {v}."),
    ("name", "Hello, I'm {v}!", "Nice to meet you, {v}!", "Your name is {v}."),
    ("name", "Hi, my name is {v}.", "Nice to meet you, {v}!", "Your name is {v}."),
    ("name", "Call me {v}.", "Nice to meet you, {v}!", "Your name is {v}."),
    ("number", "Remember the number {v}.", "I will remember {v}.", "The number is {v}."),
    ("number", "My number is {v}.", "I will remember {v}.", "The number is {v}."),
    ("number", "Please keep the number {v} in mind.", "I will remember {v}.", "The number is {v}."),
    ("number", "The number is {v}.", "I will remember {v}.", "The number is {v}."),
    ("city", "I live in {v}.", "I will remember that you live in {v}.", "You live in {v}."),
    ("city", "My home is in {v}.", "I will remember that you live in {v}.", "You live in {v}."),
    ("word", "The code word is {v}.", "I will remember {v}.", "The code word is {v}."),
    ("word", "Remember the word {v}.", "I will remember {v}.", "The word is {v}."),
    ("color", "My favorite color is {v}.", "I will remember {v}.", "Your favorite color is {v}."),
    ("animal", "My favorite animal is the {v}.", "I will remember {v}.", "Your favorite animal is the {v}."),
    ("age", "I am {v} years old.", "I will remember that you are {v}.", "You are {v} years old."),
)
_ASKED = {
    "name": ("What is my name?", "Do you remember my name?", "Who am I?", "What was my name?", "Tell me my name."),
    "number": (
        "What was the number?",
        "Which number did I tell you?",
        "What is the number?",
        "Do you remember the number?",
        "Tell me the number.",
        "What is my number?",
    ),
    "city": (
        "Where do I live?",
        "In which city do I live?",
        "Do you remember where I live?",
        "What city do I live in?",
    ),
    "word": ("What was the word?", "Which word did I tell you?", "Do you remember the word?", "Tell me the word."),
    "color": ("What is my favorite color?", "Which color do I like most?", "Do you remember my favorite color?"),
    "animal": ("What is my favorite animal?", "Which animal do I like most?", "Do you remember my favorite animal?"),
    "age": ("How old am I?", "What is my age?", "Do you remember my age?"),
}
_UNKNOWN = {kind: f"You have not told me your {kind} yet." for kind in ("name", "city", "color", "animal", "age")} | {
    "number": "You have not told me a number yet.",
    "word": "You have not told me a word yet.",
}


def copying(rng: Random, held: bool) -> Sample:
    kind = rng.random()
    if kind < 0.5:
        text = " ".join(rng.choice(COMMON + NOUN_LIST) for _ in range(rng.randint(2, 10)))
    elif kind < 0.8:
        text = " ".join(made_up(rng) for _ in range(rng.randint(1, 6)))
    else:
        text = str(number(rng, held, 10, 999_999_999))
    if held_out("copy", text) != held:
        return copying(rng, held)
    return Sample("copying", (("user", rng.choice(_COPY).format(t=text)),), text, text)


def needle(rng: Random, held: bool, tokens: int = 0) -> Sample:
    """Look up one value among many, or one in prose.

    Args:
        tokens: approximate length of the context; 0: any, shorter ones more often.
    """
    size = tokens or int(120 * (LONGEST / 120) ** rng.random())
    room = int(size * CHARS_PER_TOKEN)
    key, value = _key(rng), _value(rng, held)
    if rng.random() < 0.6:
        line, ask, answer = rng.choice(_LINES)
        lines, used, length = [], {key}, 0
        while length < room:
            other = _key(rng)
            if other not in used:
                used.add(other)
                lines.append(line.format(k=other, v=_value(rng, held)))
                length += len(lines[-1]) + 1
        glue = "\n"
    else:
        line, ask, answer = rng.choice(_SECRETS)
        lines, length = [], 0
        while length < room:
            lines.append(sentence(rng))
            length += len(lines[-1]) + 1
        glue = " "
    lines.insert(rng.randint(0, len(lines)), line.format(k=key, v=value))
    context, question = glue.join(lines), ask.format(k=key)
    text = f"{question}\n\n{context}" if rng.random() < 0.15 else f"{context}\n\n{question}"
    return Sample("needle", (("user", text),), answer.format(k=key, v=value), value)


def recall(rng: Random, held: bool, between: tuple[Message, ...]) -> Sample:
    """Ask for a fact from an earlier turn; sometimes it was never mentioned.

    Args:
        between: complete exchanges between the fact and the question, user and assistant in turn.
    """
    kind, tell, noted, answer = rng.choice(_STATEMENTS)
    value = _stated_value(rng, kind, held)
    question = rng.choice(_ASKED[kind])
    if not held and rng.random() < 0.08:
        return Sample("recall", (*between, ("user", question)), _UNKNOWN[kind], _UNKNOWN[kind])
    stated: list[Message] = [("user", tell.format(v=value)), ("assistant", noted.format(v=value))]
    if rng.random() < 0.3:  # a second fact, so that the kind matters
        other, tell2, noted2, _ = rng.choice([each for each in _STATEMENTS if each[0] != kind])
        second = _stated_value(rng, other, held)
        more: list[Message] = [("user", tell2.format(v=second)), ("assistant", noted2.format(v=second))]
        stated = stated + more if rng.random() < 0.5 else more + stated
    return Sample("recall", (*stated, *between, ("user", question)), answer.format(v=value), value)


def _stated_value(rng: Random, kind: str, held: bool) -> str:
    match kind:
        case "name":
            return name(rng, held)
        case "number":
            return str(number(rng, held, 2))
        case "city":
            return city(rng, held)
        case "word":
            return pick(rng, "told", NOUN_LIST, held) if rng.random() < 0.5 else invent(rng, "told", held)
        case "color":
            return rng.choice(COLORS)
        case "animal":
            return rng.choice(ANIMALS)
        case _:
            return str(rng.randint(5, 99))


def _key(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return f"{rng.choice(ADJECTIVE_LIST)}-{rng.choice(NOUN_LIST)}"
    if kind < 0.6:
        return rng.choice(NOUN_LIST)
    if kind < 0.8:
        return made_up(rng)
    return f"{rng.choice(NOUN_LIST)}{rng.randint(1, 99)}"


def _value(rng: Random, held: bool) -> str:
    kind = rng.random()
    if kind < 0.6:
        return str(number(rng, held, 10, 999_999))
    if kind < 0.8:
        return pick(rng, "value", NOUN_LIST, held)
    return invent(rng, "value", held)


def sentence(rng: Random) -> str:
    a, n, m, c = (rng.choice(words) for words in (ADJECTIVE_LIST, NOUN_LIST, NOUN_LIST, COMMON))
    return rng.choice(_PROSE).format(a=a, n=n, m=m, c=c, k=rng.randint(2, 99))


_PROSE = (
    "The {a} {n} stands near the {m}.",
    "Some people like the {n}, and some like the {m}.",
    "There are {k} {a} things in the {n}.",
    "Nobody knows why the {n} was so {a}.",
    "In the evening the {n} looked at the {m}.",
    "It was a {a} day, and the {n} went home.",
    "We found the {m} behind the {a} {n}.",
    "The {n} and the {m} are {a}.",
    "They said {c} and took the {n} away.",
)
