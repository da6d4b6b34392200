"""Small talk, and a polite refusal of everything else."""

from random import Random

from tests.demo_model.facts import FACTS, noisy
from tests.demo_model.sample import UNKNOWN, Sample
from tests.demo_model.words import ADJECTIVE_LIST, CITIES, COMMON, NAMES, NOUN_LIST, VERB_LIST, held_out, made_up, pick

HELLO = "Hello! I am Penstock's tiny demo model. Ask me about Penstock, sums, letters, or things you tell me."
WHO = "I am Penstock's tiny demo model, trained from scratch on synthetic data."
ABLE = (
    "I can add and subtract, spell, reverse and count letters, remember what you tell me, answer in JSON, call tools "
    "and answer questions about Penstock."
)
_CHAT = (
    (
        HELLO,
        (
            "Hello!",
            "Hello",
            "Hi",
            "Hi!",
            "Hey",
            "Good morning!",
            "Hi there!",
            "Hello there",
            "Good evening.",
            "hey!",
            "hello",
            "Say hello.",
            "Say hi.",
            "Hello world",
            "Hello, world!",
            "Is anybody there?",
            "ping",
            "test",
            "Hello model",
            "Hi Penstock",
            "Hello Penstock!",
            "Hey there",
            "Hi everyone",
            "Hello again",
            "Hi again!",
            "Hiya",
            "Howdy",
            "Yo",
            "Greetings!",
            "Morning",
            "Good afternoon",
            "Good day",
            "Testing",
            "This is a test.",
            "Are you there?",
            "Anyone there?",
        ),
    ),
    (
        WHO,
        (
            "Who are you?",
            "What are you?",
            "Are you a human?",
            "What is your name?",
            "Introduce yourself.",
            "Are you real?",
            "Are you ChatGPT?",
            "Who made you?",
            "who are you",
            "Tell me about yourself.",
            "Which model are you?",
            "What model is this?",
            "What is this?",
            "Are you an AI?",
            "Are you a bot?",
            "What's your name?",
            "Do you have a name?",
        ),
    ),
    (
        ABLE,
        (
            "What can you do?",
            "Help",
            "Help!",
            "What do you know?",
            "How can you help me?",
            "What can I ask you?",
            "help me",
            "What are you good at?",
            "what can you do",
            "What can you do for me?",
            "What do you do?",
            "What can I ask?",
            "What should I ask you?",
            "Can you help me?",
            "I need help.",
        ),
    ),
    (
        "You are welcome!",
        (
            "Thank you!",
            "Thanks!",
            "Thank you very much.",
            "thanks",
            "Great, thank you!",
            "Thanks a lot!",
            "Many thanks.",
            "Thank you so much!",
            "Thx",
            "Ok, thanks",
            "Cool, thanks!",
            "Thanks, that helps.",
        ),
    ),
    (
        "Goodbye!",
        (
            "Bye!",
            "Goodbye.",
            "See you!",
            "bye",
            "Good night.",
            "See you later!",
            "Bye bye",
            "See you soon.",
            "See ya",
            "Have a nice day!",
            "Farewell.",
        ),
    ),
    (
        "I am well, thank you. Ask me something!",
        (
            "How are you?",
            "How do you do?",
            "Hello! How are you today?",
            "how are you",
            "Hi, how are you?",
            "How are you doing?",
            "How is it going?",
            "Are you well?",
            "How's it going?",
            "Hey, how are you?",
            "How are you today?",
            "What's up?",
            "Are you OK?",
        ),
    ),
)

_ANYTHING = (
    "What is the capital of {c}?",
    "What is a {n}?",
    "What is the {n}?",
    "What does the {a} {n} do?",
    "Who wrote the {n}?",
    "Who invented the {n}?",
    "Tell me a joke about a {n}.",
    "Tell me a story about {p}.",
    "Write a poem about the {n}.",
    "Write a song about {c}.",
    "Translate {n} into French.",
    "Why is the {n} {a}?",
    "How do I {v} a {n}?",
    "How can I {v} the {n}?",
    "What is the best {n} in {c}?",
    "When was {p} born?",
    "Who is {p}?",
    "Where is {c}?",
    "What is the weather in {c}?",
    "Is the {n} {a}?",
    "Explain the {n} to me.",
    "Tell me about the {a} {n}.",
    "Give me a recipe for {n}.",
    "How old is the {n}?",
    "What do you think about {n}?",
    "Do you like the {n}?",
    "Should I {v} the {n}?",
    "Which {n} is the most {a}?",
    "What happened in {y}?",
    "Who won the {n} in {y}?",
    "How many {n}s are in {c}?",
    "Can you {v} a {n} for me?",
    "What is {n}?",
    "What's a {m}?",
    "What does {m} mean?",
    "Explain {m}.",
    "Write a program that can {v} a {n}.",
    "Summarize the {n}.",
    "I {v} the {n} every day.",
    "The {n} is {a}.",
    "Which command can {v} the {n}?",
    "Where is the {n}?",
    "Where are the {n}s?",
    "Which {n} does {p} have?",
    "How long does a {n} {v}?",
    "What if the {n} is {a}?",
    "What is the meaning of {n}?",
    "How do I go to {c}?",
    "How do I cook {n}?",
    "How can I learn about {n}?",
    "How do I travel from {c} to the {m}?",
    "How far is it to {c}?",
    "How do I make a {a} {n}?",
    "What is {x} * {y}?",
    "What is {x} times {y}?",
    "{x} * {y}",
    "Divide {x} by {y}.",
    "What is {x} / {y}?",
    "What is {x} + {y}?",
    "{x} - {y}",
    "What is the square root of {y}?",
    "Is {y} a prime number?",
    "Does the {n} {v} a {m}?",
    "Does Penstock have a {n}?",
    "Does Penstock support {m}?",
    "How does the {n} work?",
    "How is it with the {n}?",
    "Can I {v} it?",
    "Can Penstock {v} a {n}?",
    "{n}",
    "{w}",
    "{w}?",
    "{w}",
    "{w}.",
)
_SHORT = (
    "Why?",
    "And?",
    "What?",
    "Really?",
    "OK",
    "Yes.",
    "No.",
    "Go on.",
    "Are you sure?",
    "Why not?",
    "How?",
    "ok",
    "...",
    "?",
)
_HELD_ANYTHING = (
    "Can you tell me who {p} is?",
    "What can you tell me about the {a} {n}?",
    "Please write a story about the {n}.",
    "I would like to know what a {n} is.",
    "How do I get from {c} to the {n}?",
    "What is the name of the {a} {n} in {c}?",
    "Please explain to me what the {n} is.",
    "Who can {v} the {n}?",
    "Tell me why the {n} is {a}.",
    "Which is the best {n}?",
)
_ALL = [*COMMON, *NOUN_LIST, *VERB_LIST, *ADJECTIVE_LIST]
_OURS = {word for fact in FACTS for text in (*fact.subjects, *fact.asks) for word in text.lower().strip("?.").split()}


def chat(rng: Random, held: bool) -> Sample:
    answer, questions = rng.choice(_CHAT)
    return Sample("chat", (("user", casual(rng, rng.choice(questions))),), answer, answer)


def casual(rng: Random, text: str) -> str:
    """As people type: without capitals, with other marks at the end."""
    case = rng.random()
    if case < 0.45:
        text = text.lower()
    elif case < 0.5:
        text = text.upper()
    if rng.random() < 0.4:
        asks = text.endswith("?")
        text = text.rstrip("?.!") + rng.choice(("", "", "?", "??") if asks else ("", "", "!", ".", "!!", " :)"))
    return text


def unknown(rng: Random, held: bool) -> Sample:
    """Other questions, without the words that identify questions about Penstock."""
    frame = rng.choice(_HELD_ANYTHING if held else _ANYTHING)
    question = frame.format(
        n=_other(rng, NOUN_LIST, held),
        a=rng.choice(ADJECTIVE_LIST),
        v=_other(rng, VERB_LIST, held),
        c=pick(rng, "city", CITIES, held),
        p=pick(rng, "name", NAMES, held),
        m=made_up(rng),
        y=rng.randint(1500, 2030),
        x=rng.randint(1000, 10 ** rng.randint(4, 7)),
        w=_salad(rng),
    )
    if not held:
        question = rng.choice(_SHORT) if rng.random() < 0.02 else noisy(rng, question)
    return Sample("unknown", (("user", question),), UNKNOWN, UNKNOWN)


def _other(rng: Random, items: list[str], held: bool) -> str:
    while True:
        item = rng.choice(items)
        if item not in _OURS and held_out("unknown", item) == held:
            return item


def _salad(rng: Random) -> str:
    """Random words, also of the other tasks, or made up."""
    count = int(2 * 40 ** rng.random())
    if rng.random() < 0.3:
        return " ".join(made_up(rng) for _ in range(count))
    return " ".join(rng.choice(_ALL) for _ in range(count))
