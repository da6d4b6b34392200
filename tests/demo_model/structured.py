"""Structured answers: JSON of a requested shape, and tool calls."""

import json
from random import Random
from typing import Any

from tests.demo_model.arithmetic_spelling import arithmetic
from tests.demo_model.sample import UNKNOWN, Message, Sample, tool_call
from tests.demo_model.words import ANIMALS, COLORS, DAYS, JOBS, NOUN_LIST, VERB_LIST, city, held_out, name, pick

Field = tuple[str, Any, str]  # key, value, the value in a sentence

_ASK_JSON = (
    "Answer in JSON with the keys {k}. {t}",
    "Give me JSON with {k}: {t}",
    "Return a JSON object with the keys {k}. {t}",
    "{t} Answer in JSON with the keys {k}.",
    "{t} Write that as JSON with the keys {k}.",
    "Extract {k} as JSON: {t}",
    "Reply only with JSON, keys {k}: {t}",
    "Write JSON with {k}: {t}",
    "I need JSON with {k}. {t}",
    "Please write {k} as JSON: {t}",
    "Please give JSON with {k}: {t}",
    "Make a JSON object with {k} of this: {t}",
    "Turn this into JSON with {k}. {t}",
    "JSON with {k}, please: {t}",
    "Output only JSON with {k}. {t}",
    "Fill in a JSON object that has {k}: {t}",
    "{t} I need {k} as JSON.",
    "{t} Return {k} as a JSON object.",
    "{t} Now make JSON with {k}.",
)
_HELD_JSON = ("Please answer in JSON with {k}: {t}", "{t} Give me that as a JSON object with the keys {k}.")
_SYSTEM_JSON = ("You answer in JSON with the keys {k}.", "Reply only with JSON. Keys: {k}.")
_TYPES = {str: "string", int: "integer", bool: "boolean"}

_TOOLS: tuple[tuple[str, str, tuple[tuple[str, str], ...], tuple[str, ...]], ...] = (
    ("get_weather", "Current weather of a city", (("city", "city"),),
     ("What is the weather in {city}?", "How is the weather in {city}?", "Is it raining in {city}?",
      "Weather in {city}, please.")),
    ("get_time", "Local time of a city", (("city", "city"),),
     ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?")),
    ("send_email", "Send an email", (("to", "name"), ("subject", "noun")),
     ("Send an email to {to} about the {subject}.", "Write to {to} about the {subject}.",
      "Email {to} about the {subject}.")),
    ("set_timer", "Set a timer", (("minutes", "int"),),
     ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes.")),
    ("set_light", "Set the color of a light", (("room", "noun"), ("color", "color")),
     ("Make the light in the {room} {color}.", "Turn the {room} light {color}.",
      "Set the light of the {room} to {color}.")),
    ("book_table", "Book a table", (("name", "name"), ("people", "int"), ("day", "day")),
     ("Book a table for {people} on {day}, name {name}.", "I am {name}. Book a table on {day} for {people} people.")),
    ("search", "Search the web", (("query", "nouns"),),
     ("Search for {query}.", "Look for {query} on the web.", "Find {query} on the web.")),
    ("add_note", "Save a note", (("text", "nouns"),),
     ("Save a note: {text}", "Write down {text}.", "Note {text}, please.")),
    ("play_music", "Play music", (("artist", "name"),),
     ("Play music by {artist}.", "Play something by {artist}.", "I want to hear {artist}.")),
    ("call_person", "Call somebody", (("name", "name"),),
     ("Call {name}.", "Please call {name}.", "I want to talk to {name}.")),
    ("get_price", "Price of an item", (("item", "noun"),),
     ("How much is the {item}?", "What does the {item} cost?", "Price of the {item}, please.")),
    ("calculate", "Add two numbers", (("a", "int"), ("b", "int")),
     ("Use the calculator to add {a} and {b}.", "Calculate {a} plus {b} with the tool.")),
    ("find_flight", "Find a flight", (("start", "city"), ("end", "city"), ("day", "day")),
     ("Find a flight from {start} to {end} on {day}.", "I want to fly from {start} to {end} on {day}.")),
    ("order", "Order an item", (("item", "noun"), ("count", "int")),
     ("Order {count} of the {item}.", "Buy {count} of the item {item}.", "I want {count} of the {item}.")),
)  # fmt: skip
_MADE_ASKS = (
    "{V} the {n} with {p}.",
    "Please {v} the {n}: {p}.",
    "I want to {v} the {n}, {p}.",
    "{V} the {n}. Use {p}.",
)


def json_answer(rng: Random, held: bool) -> Sample:
    if rng.random() < 0.12:
        return _json_sum(rng, held)
    fields = _fields(rng, held)
    text = _sentences(rng, fields)
    asked = rng.sample(fields, rng.randint(1, len(fields)))
    want = {key: value for key, value, _ in asked}
    keys = _listed(rng, want)
    if rng.random() < 0.15:
        messages: tuple[Message, ...] = (("system", rng.choice(_SYSTEM_JSON).format(k=keys)), ("user", text))
    else:
        messages = (("user", rng.choice(_HELD_JSON if held else _ASK_JSON).format(k=keys, t=text)),)
    return Sample("json", messages, json.dumps(want), want)


def _json_sum(rng: Random, held: bool) -> Sample:
    plain = arithmetic(rng, held)
    key = rng.choice(("result", "answer", "value", "sum"))
    question = f'Answer in JSON with the key "{key}". {plain.messages[0][1]}'
    return Sample("json", (("user", question),), json.dumps({key: plain.want}), {key: plain.want})


def _fields(rng: Random, held: bool) -> list[Field]:
    """Two to five fields for a sentence to mention."""
    number = rng.randint(1, 99)
    flag = rng.random() < 0.5
    match rng.randrange(4):
        case 0:
            fields: list[Field] = [
                ("name", who := name(rng, held), f"{who}"),
                ("age", number, f"is {number} years old"),
                ("city", where := city(rng, held), f"lives in {where}"),
                ("job", job := rng.choice(JOBS), f"works as a {job}"),
                ("member", flag, "is a member" if flag else "is not a member"),
            ]
        case 1:
            fields = [
                ("item", item := pick(rng, "item", NOUN_LIST, held), f"The {item}"),
                ("price", number, f"costs {number} euros"),
                ("color", color := rng.choice(COLORS), f"is {color}"),
                ("stock", flag, "is in stock" if flag else "is not in stock"),
            ]
        case 2:
            fields = [
                ("event", event := pick(rng, "item", NOUN_LIST, held), f"The {event}"),
                ("day", day := rng.choice(DAYS), f"is on {day}"),
                ("hour", hour := rng.randint(0, 23), f"starts at {hour}"),
                ("place", place := city(rng, held), f"takes place in {place}"),
            ]
        case _:
            fields = [
                ("pet", pet := name(rng, held), f"{pet}"),
                ("animal", animal := rng.choice(ANIMALS), f"is a {animal}"),
                ("age", number, f"is {number} years old"),
                ("owner", owner := name(rng, held), f"belongs to {owner}"),
            ]
    first, rest = fields[0], rng.sample(fields[1:], rng.randint(1, len(fields) - 1))
    return [first, *rest]


def _sentences(rng: Random, fields: list[Field]) -> str:
    said = [text for _, _, text in fields]
    if len(said) == 2:
        return f"{said[0]} {said[1]}."
    glue = rng.choice((" and ", ", and ", " but "))
    return f"{said[0]} {', '.join(said[1:-1])}{glue}{said[-1]}."


def _listed(rng: Random, want: dict[str, Any]) -> str:
    form = rng.randrange(4)
    if form == 0:
        keys = [f"{key} ({_TYPES[type(value)]})" for key, value in want.items()]
    elif form == 1:
        keys = [f'"{key}"' for key in want]
    elif form == 2:
        return "{" + ", ".join(f'"{key}": {_TYPES[type(value)]}' for key, value in want.items()) + "}"
    else:
        keys = list(want)
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def tools(rng: Random, held: bool) -> Sample:
    """A request with tools, of which one or none applies."""
    declared = rng.sample(_TOOLS, rng.randint(1, 4))
    if rng.random() < 0.4:
        return _made_up(rng, held, declared)
    tool_name, _, params, asks = chosen = declared[0]
    arguments = {key: _argument(rng, kind, held) for key, kind in params}
    offered = [_schema(*tool[:3]) for tool in declared]
    rng.shuffle(offered)
    question = rng.choice(asks).format(**arguments)
    kind = rng.random()
    if kind < 0.12:  # no tool applies
        others = [tool for tool in _TOOLS if tool not in declared]
        tool_name, _, params, asks = rng.choice(others)
        question = rng.choice(asks).format(**{key: _argument(rng, what, held) for key, what in params})
        return Sample("tools", (("user", question),), UNKNOWN, UNKNOWN, tuple(offered))
    if kind < 0.2:
        plain = arithmetic(rng, held)
        if "calculate" not in {tool[0] for tool in declared}:
            return plain._replace(task="tools", tools=tuple(offered), want=f"= {plain.want}")
    call = tool_call(tool_name, arguments)
    if kind < 0.35:
        return _result(rng, question, call, tuple(offered))
    return _call(question, call, chosen[0], arguments, tuple(offered))


def _call(
    question: str, call: str, tool: str, arguments: dict[str, Any], offered: tuple[dict[str, Any], ...]
) -> Sample:
    return Sample("tools", (("user", question),), call, {"name": tool, "arguments": arguments}, offered)


def _result(rng: Random, question: str, call: str, offered: tuple[dict[str, Any], ...]) -> Sample:
    """Report the result of a tool call."""
    value = rng.choice(
        (str(rng.randint(1, 999)), rng.choice(NOUN_LIST), rng.choice(COLORS), f"{rng.randint(1, 30)} degrees")
    )
    key = rng.choice(("result", "answer", "value", "status"))
    reply = json.dumps({key: value}) if rng.random() < 0.6 else value
    messages = (("user", question), ("assistant", call), ("tool", reply))
    return Sample("tools", messages, f"The answer is: {value}", value, offered)


def _made_up(rng: Random, held: bool, declared: list[Any]) -> Sample:
    """An unknown tool, to be used from its description alone."""
    made: list[tuple[str, str]] = []
    while len(made) < rng.randint(1, 3):
        verb, noun = rng.choice(VERB_LIST), rng.choice(NOUN_LIST)
        if held_out("tool", verb, noun) == held and all(verb != other[0] and noun != other[1] for other in made):
            made.append((verb, noun))
    verb, noun = made[0]
    params = rng.sample((("city", "city"), ("name", "name"), ("count", "int"), ("color", "color"), ("day", "day"),
                         ("item", "noun"), ("size", "int"), ("user", "name")), rng.randint(1, 3))  # fmt: skip
    offered = [_schema(f"{verb}_{noun}", f"{verb.capitalize()} the {noun}", tuple(params))]
    for v, n in made[1:]:
        other = rng.sample((("city", "city"), ("name", "name"), ("count", "int")), rng.randint(1, 2))
        offered.append(_schema(f"{v}_{n}", f"{v.capitalize()} the {n}", tuple(other)))
    offered += [_schema(*tool[:3]) for tool in declared[: rng.randint(0, 2)]]
    rng.shuffle(offered)
    arguments = {key: _argument(rng, kind, held) for key, kind in params}
    said = ", ".join(f"{key} {value}" for key, value in arguments.items())
    question = rng.choice(_MADE_ASKS).format(V=verb.capitalize(), v=verb, n=noun, p=said)
    return _call(question, tool_call(f"{verb}_{noun}", arguments), f"{verb}_{noun}", arguments, tuple(offered))


def _schema(tool: str, about: str, params: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    properties = {key: {"type": "integer" if kind == "int" else "string"} for key, kind in params}
    parameters = {"type": "object", "properties": properties, "required": [key for key, _ in params]}
    return {"type": "function", "function": {"name": tool, "description": about, "parameters": parameters}}


def _argument(rng: Random, kind: str, held: bool) -> str | int:
    match kind:
        case "city":
            return city(rng, held)
        case "name":
            return name(rng, held)
        case "int":
            return rng.randint(1, 99)
        case "color":
            return rng.choice(COLORS)
        case "day":
            return rng.choice(DAYS)
        case "nouns":
            return " ".join(pick(rng, "item", NOUN_LIST, held) for _ in range(rng.randint(1, 3)))
        case _:
            return pick(rng, "item", NOUN_LIST, held)
