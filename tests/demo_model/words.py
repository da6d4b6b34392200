"""What the synthetic conversations are made of, and which of it training may never see.

A word, name or number is held out by its own hash, so that every generator and every version agrees on it.
"""

from hashlib import blake2b
from random import Random

from tests.demo_model.tiny import ADJECTIVES, ADVERBS, NOUNS, SMALL, VERBS

HELD_OUT_SHARE = 10  # one in so many

NAMES = """Ada Adam Alba Alex Alice Amir Ana Anna Anton Aria Asha Ben Bella Boris Bruno Carl Carla Cleo Clara Dana
Daniel David Diana Dora Edgar Elena Eli Ella Emil Emma Erik Eva Felix Fiona Frank Freya Gabriel Gina Greta Hana
Hans Hugo Ida Igor Ines Iris Ivan Jack Jana Jane Jasper John Jonas Julia Karim Kate Kenji Kira Lara Laura Leo
Lena Liam Lila Lina
Linus Lucas Lucia Luna Maria Mark Marta Max Maya Mia Mila Mina Nadia Nina Noah Nora Oscar Olga Oliver Otto Pablo Paul
Petra Pia Quentin Rafael Rosa Ruth Sam Sara Selma Simon Sofia Stella Tara Theo Tim Tina Tom Uma Vera Victor Viola Wanda
Xenia Yara Yuki Yusuf Zara Zoe""".split()  # noqa: SIM905 - as a list it would be a page

CITIES = """Accra Amsterdam Athens Austin Baku Bangkok Barcelona Berlin Bern Bogota Boston Brussels Cairo Chicago Dakar
Delhi Denver Dublin Geneva Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid
Manila Melbourne Milan Montreal Munich Nairobi Naples Osaka Oslo Ottawa Paris Porto Prague Quito Riga Rome Seattle
Seoul Sofia Stockholm Sydney Tallinn Tokyo Toronto Tunis Turin Vienna Vilnius Warsaw Zagreb Zurich""".split()  # noqa: SIM905

COLORS = "red blue green yellow purple orange white black brown gray pink silver golden".split()  # noqa: SIM905
ANIMALS = "cat dog horse bird fish rabbit turtle fox bear mouse sheep goat duck parrot hamster".split()  # noqa: SIM905
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()  # noqa: SIM905
JOBS = "teacher doctor farmer baker driver painter engineer lawyer nurse pilot singer writer cook judge".split()  # noqa: SIM905
COMMON = SMALL.split()
NOUN_LIST = NOUNS.split()
VERB_LIST = VERBS.split()
ADJECTIVE_LIST = ADJECTIVES.split()
DICTIONARY = sorted(
    {
        word
        for word in (*COMMON, *NOUN_LIST, *VERB_LIST, *ADJECTIVE_LIST, *ADVERBS.split())
        if len(word) > 2 and word.isalpha() and word.islower()
    }
)

_ONSETS = "b c d f g h j k l m n p r s t v w z br cl cr dr fl gr pl pr st tr sh ch th qu".split()  # noqa: SIM905
_VOWELS = "a e i o u a e i o ai ea io ou y".split()  # noqa: SIM905
_CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "nd", "st", "ck", "x"]


def held_out(*what: object) -> bool:
    """Whether training must not see this; the same on every machine."""
    text = "\0".join(map(str, what)).lower()
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") % HELD_OUT_SHARE == 0


def made_up(rng: Random) -> str:
    """A word that can be spoken and means nothing."""
    syllables = range(rng.choice((1, 2, 2, 2, 3, 3, 4)))
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in syllables)
    return word[:12]


def pick(rng: Random, kind: str, items: list[str], held: bool) -> str:
    """One of the items on the wanted side of the split, or a made-up one where none is there."""
    for _ in range(60):
        item = rng.choice(items)
        if held_out(kind, item) == held:
            return item
    return invent(rng, kind, held)


def invent(rng: Random, kind: str, held: bool) -> str:
    while True:
        word = made_up(rng)
        if len(word) > 2 and held_out(kind, word) == held:
            return word


def name(rng: Random, held: bool) -> str:
    if rng.random() < 0.5:
        return pick(rng, "name", NAMES, held)
    return invent(rng, "name", held).capitalize()


def city(rng: Random, held: bool) -> str:
    if rng.random() < 0.6:
        return pick(rng, "city", CITIES, held)
    return invent(rng, "city", held).capitalize()


def number(rng: Random, held: bool, low: int = 100, high: int = 99999) -> int:
    """A number of any length between; shorter ones as likely as longer ones."""
    while True:
        digits = rng.randint(len(str(low)), len(str(high)))
        value = rng.randint(max(low, 10 ** (digits - 1)), min(high, 10**digits - 1))
        if held_out("number", value) == held:
            return value
