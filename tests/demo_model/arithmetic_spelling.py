"""Arithmetic with small numbers, and tasks about the letters of words."""

import re
from random import Random

from tests.demo_model.facts import FACTS
from tests.demo_model.sample import CHARS, Sample
from tests.demo_model.words import ANIMALS, CITIES, DAYS, DICTIONARY, JOBS, NAMES, held_out, invent, pick

_PLUS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a}+{b}",
    "{a}+{b}=",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "Compute {a} plus {b}.",
    "What is the sum of {a} and {b}?",
    "Can you add {b} to {a}?",
    "I have {a} apples and get {b} more. How many apples do I have?",
    "Please add the numbers {a} and {b}.",
    "what's {a} + {b}",
)
_MINUS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a}-{b}",
    "{a}-{b}=",
    "Subtract {b} from {a}.",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
    "Calculate {a} - {b}.",
    "Compute {a} minus {b}.",
    "What is the difference of {a} and {b}?",
    "Take {b} away from {a}.",
    "I have {a} apples and give away {b}. How many are left?",
    "what's {a} - {b}",
)
_TIMES = (
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "{a} * {b}",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
)
_COUNT_TO = (
    "Count from {a} to {b}.",
    "Count from {a} to {b}",
    "Can you count from {a} to {b}?",
    "Please count from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}.",
)
_ALPHABET = ("Say the alphabet.", "List the letters of the alphabet.", "What is the alphabet?", "Recite the alphabet.")
_WEEK = ("List the days of the week.", "What are the days of the week?", "Name the days of the week.")
_THINK = ("{q} Think step by step.", "Think first. {q}", "{q} /think", "Please think step by step: {q}")
_SPELL = (
    "Spell {w}.",
    "Spell the word {w}.",
    'Spell "{w}".',
    "How do you spell {w}?",
    "How is {w} spelled?",
    "Can you spell {w}?",
    "Please spell the word {w}.",
    "What are the letters of {w}?",
    "Write {w} letter by letter.",
    "spell {w}",
    "List the letters of the word {w}.",
)
_REVERSE = (
    "Reverse {w}.",
    "Reverse the word {w}.",
    'Reverse "{w}".',
    "What is {w} backwards?",
    "Write {w} backwards.",
    "Spell {w} backwards.",
    "What is {w} reversed?",
    "Can you reverse {w}?",
    "Please write the word {w} backwards.",
    "reverse {w}",
    "How do you write {w} in reverse?",
)
_LENGTH = (
    "How many letters are in {w}?",
    "How many letters does {w} have?",
    "How many letters does the word {w} have?",
    'How many letters are in the word "{w}"?',
    "Count the letters of {w}.",
    "How long is the word {w}?",
    "What is the number of letters in {w}?",
    "count the letters in {w}",
)
_COUNT = (
    "How many {c} are in {w}?",
    "How many times does {c} occur in {w}?",
    "How many times does the letter {c} occur in {w}?",
    "How often does the letter {c} appear in {w}?",
    'How many "{c}" are in "{w}"?',
    "How many {c}'s are in the word {w}?",
    "Count the letter {c} in {w}.",
    "How many letters {c} are in {w}?",
    "how many {c} in {w}",
)

_USED = """answer apples arguments assistant backwards belongs brief calculate calculator capital compute costs count
counting description difference email euros explain favorite function functions hello integer json keys knows letter
letters member minus minutes nobody number numbers object occur parameters password people picture plus properties
question required reverse reversed search secret shape shapes circle square triangle star spell spelled spelling stands
string strawberry banana subject table timer tools tool type value weather words works"""
# Words of the other tasks: they may be single tokens, whose letters the model learns only by spelling them.
KNOWN = sorted(
    {
        word
        for text in (
            *(t for fact in FACTS for t in (fact.answer, *fact.subjects, *fact.asks)),
            *NAMES,
            *CITIES,
            *ANIMALS,
        )
        for word in re.findall("[A-Za-z]+", text)
        if len(word) > 2
    }
    | {*DAYS, *JOBS, *_USED.split()}
)


def arithmetic(rng: Random, held: bool) -> Sample:
    if not held and rng.random() < 0.04:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        question = rng.choice(_TIMES).format(a=a, b=b)
        return Sample("arithmetic", (("user", question),), f"{a} * {b} = {a * b}", a * b)
    a, b, sign = _operands(rng, held)
    result = a + b if sign == "+" else a - b
    question = rng.choice(_PLUS if sign == "+" else _MINUS).format(a=a, b=b)
    return Sample("arithmetic", (("user", question),), f"{a} {sign} {b} = {result}", result)


def series(rng: Random, held: bool) -> Sample:
    """Long answers that are easy to check: counting up or down, the alphabet, the days of the week."""
    kind = rng.random()
    if kind < 0.06 and not held:
        text = ", ".join("abcdefghijklmnopqrstuvwxyz")
        return Sample("series", (("user", rng.choice(_ALPHABET)),), text, text)
    if kind < 0.1 and not held:
        text = ", ".join(DAYS)
        return Sample("series", (("user", rng.choice(_WEEK)),), text, text)
    while True:
        first = rng.choice((1, 1, rng.randint(0, 20), rng.randint(0, 999)))
        last = first + rng.randint(2, int(6 * 20 ** rng.random()))
        if rng.random() < 0.2:
            first, last = last, first
        if held_out("count", first, last) == held:
            break
    text = ", ".join(map(str, range(first, last + 1) if first < last else range(first, last - 1, -1)))
    return Sample("series", (("user", rng.choice(_COUNT_TO).format(a=first, b=last)),), text, text)


def thinking(rng: Random, held: bool) -> Sample:
    """Arithmetic and spelling with a visible chain of thought, which the question asks for."""
    if rng.random() < 0.7:
        a, b, sign = _operands(rng, held)
        result = a + b if sign == "+" else a - b
        question = rng.choice(_PLUS[:12] if sign == "+" else _MINUS[:12]).format(a=a, b=b)
        thought, answer, want = _columns(a, b, sign, result), f"{a} {sign} {b} = {result}", result
    else:
        plain = rng.choice((spelling, counting))(rng, held)
        question, answer, want = plain.messages[0][1], plain.answer, plain.want
        word = answer.partition(":")[0].partition(" ")[0].strip('."')
        thought = f"The letters are {', '.join(word.split('-'))}."
    question = rng.choice(_THINK).format(q=question)
    return Sample("thinking", (("user", question),), f"<think>\n{thought}\n</think>\n\n{answer}", want)


def spelling(rng: Random, held: bool) -> Sample:
    word = _word(rng, held)
    return _about(rng, "spelling", _SPELL, word, f"{'-'.join(word)}", "-".join(word))


def reversing(rng: Random, held: bool) -> Sample:
    word = _word(rng, held)
    back = word[::-1]
    answer = f"{'-'.join(word)} backwards is {CHARS[0]}{back}{CHARS[1]}"
    return _about(rng, "reversing", _REVERSE, word, answer, back)


def counting(rng: Random, held: bool) -> Sample:
    word = _word(rng, held)
    if rng.random() < 0.4:
        return _about(
            rng, "counting", _LENGTH, word, f"{'-'.join(word)}: the number of letters is {len(word)}", len(word)
        )
    char = rng.choice(word) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    count = word.count(char)
    answer = f"{'-'.join(word)}: the number of letters {char} is {count}"
    question = rng.choice(_COUNT).format(c=char, w=word)
    return Sample("counting", (("user", question),), answer, count)


def _about(rng: Random, task: str, questions: tuple[str, ...], word: str, answer: str, want: str | int) -> Sample:
    return Sample(task, (("user", rng.choice(questions).format(w=word)),), answer, want)


def _word(rng: Random, held: bool) -> str:
    kind = rng.random()
    if kind < 0.4:
        word = pick(rng, "word", DICTIONARY, held)
    elif kind < 0.55:
        word = pick(rng, "word", KNOWN, held)
    elif kind < 0.8:
        word = invent(rng, "word", held)
    else:
        word = _run(rng, held)
    return word.capitalize() if rng.random() < 0.1 else word


def _run(rng: Random, held: bool) -> str:
    """Joined pieces of dictionary words, so that every token occurs next to every other."""
    while True:
        pieces = [rng.choice(DICTIONARY) for _ in range(rng.randint(1, 3))]
        word = "".join(piece[: rng.randint(2, 5)] for piece in pieces)[:12]
        if len(word) > 2 and held_out("word", word) == held:
            return word


def _operands(rng: Random, held: bool) -> tuple[int, int, str]:
    while True:
        a, b = (rng.randint(*rng.choice(((0, 9), (10, 99), (10, 99), (100, 999), (100, 999)))) for _ in range(2))
        if held and min(a, b) < 10:
            continue
        sign = "+" if rng.random() < 0.5 else "-"
        if sign == "-" and a < b and rng.random() < 0.5:
            a, b = b, a
        if held_out("sum", a, sign, b) == held:
            return a, b, sign


def _columns(a: int, b: int, sign: str, result: int) -> str:
    """The calculation by columns, from the right, with carries or borrows."""
    if sign == "-" and a < b:
        return f"{a} is less than {b}. {_columns(b, a, sign, -result)} So the result is {result}."
    steps, carry = [], 0
    top, bottom = str(a)[::-1], str(b)[::-1]
    for place in range(max(len(top), len(bottom))):
        x, y = (int(side[place]) if place < len(side) else 0 for side in (top, bottom))
        if sign == "+":
            total = x + y + carry
            steps.append(f"{x} + {y} + {carry} = {total}.")
            carry = total // 10
        else:
            total = x - y - carry
            steps.append(f"{x} - {y} - {carry} = {total}" + (f", borrow: {total + 10}." if total < 0 else "."))
            carry = int(total < 0)
    return " ".join(steps)
