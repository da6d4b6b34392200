"""Compares prompts of real chat templates with those of transformers.

    python -m tests.conformance.prompts DIR...

DIRs are searched for ``*.jinja``. The source distributions of llama-cpp-python (``vendor/llama.cpp/models/templates``)
and of vLLM (``examples``) have about 110; nothing of them is in this repository:

    pip download --no-deps --no-binary :all: llama-cpp-python vllm

Each template renders each conversation as the gateway would have it, and as transformers does. Both refuse it, or both
give the same prompt. What differs by intention is counted apart: reasoning that a template reads under a name that
transformers does not fill, parts that a template prints as a list, texts that a template takes as parts alone. Exit
status 1: something else differs.
"""

import argparse
import difflib
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from penstock.gateway.apis.chat.bodies import parse_chat
from penstock.gateway.apis.chat.prompt import rendered, template_messages
from penstock.infra.text.chat_template import ChatTemplate, PromptEnd, TemplateError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
SAME, REFUSED, OURS, INTENDED, DIFFERENT = "same", "both refuse", "only we render", "intended", "different"

Message = dict[str, Any]


class Conversation(NamedTuple):
    messages: list[Message]
    tools: list[Message] | None = None
    documents: list[Message] | None = None
    ends: PromptEnd = PromptEnd.generation
    variables: Mapping[str, Any] = {}


def _user(content: Any = "What is the weather in Oslo?", **fields: Any) -> Message:
    return {"role": "user", "content": content, **fields}


def _system(content: Any = "You are helpful.") -> Message:
    return {"role": "system", "content": content}


def _said(content: Any = "It is sunny.", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def _call(number: int = 0, name: str = "get_weather", **arguments: Any) -> Message:
    given = arguments or {"city": "Oslo"}
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": given}}


def _result(content: Any = '{"degrees": 21}', number: int = 0) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}", "name": "get_weather"}


def _parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _tool(name: str = "get_weather", **properties: Any) -> Message:
    schema = {"type": "object", "properties": properties or {"city": {"type": "string", "description": "where"}}}
    function = {"name": name, "description": f"The <{name}> & 'more'", "parameters": {**schema, "required": ["city"]}}
    return {"type": "function", "function": function}


TOOLS = [_tool(), _tool("add", a={"type": "number"}, b={"type": "array", "items": {"type": "integer"}})]
DOCUMENTS = [{"title": "Oslo", "text": "A city."}, {"title": "Bergen", "text": "Rain."}]
_CALLED = [_user(), _said("", tool_calls=[_call()]), _result()]
_THOUGHT = _said("Sunny.", reasoning_content="The user asks for weather.")

CONVERSATIONS: dict[str, Conversation] = {
    "one message": Conversation([_user()]),
    "umlauts, symbols and lines": Conversation([_user("äöü 🙂 <b> & \"q\" 'r'\n\n\tline")]),
    "spaces around": Conversation([_user("  hi \n")]),
    "empty message": Conversation([_user("")]),
    "system": Conversation([_system(), _user()]),
    "system with spaces": Conversation([_system(" be brief \n"), _user()]),
    "two turns": Conversation([_user(), _said(), _user("And tomorrow?")]),
    "system and three turns": Conversation([_system(), _user(), _said(), _user("a"), _said("b"), _user("c")]),
    "two users": Conversation([_user("a"), _user("b")]),
    "two answers": Conversation([_user("a"), _said("b"), _said("c"), _user("d")]),
    "answer first": Conversation([_said("Welcome"), _user()]),
    "system in the middle": Conversation([_user("a"), _said("b"), _system("be brief"), _user("c")]),
    "system alone": Conversation([_system()]),
    "end of the last message": Conversation([_user(), _said()], ends=PromptEnd.last_message),
    "tools": Conversation([_user()], TOOLS),
    "system and tools": Conversation([_system(), _user()], TOOLS),
    "one tool": Conversation([_user()], TOOLS[:1]),
    "call and result": Conversation(_CALLED, TOOLS),
    "call, result, answer": Conversation([*_CALLED, _said(), _user("Thanks")], TOOLS),
    "call without tools": Conversation([*_CALLED, _said(), _user("Thanks")]),
    "call with text": Conversation([_user(), _said("Let me look.", tool_calls=[_call()]), _result()], TOOLS),
    "two calls": Conversation(
        [_user(), _said("", tool_calls=[_call(), _call(1, "add", a=1.5, b=[1, 2])]), _result(), _result("3", 1)], TOOLS
    ),
    "call after call": Conversation(
        [*_CALLED, _said("", tool_calls=[_call(1, city="Bergen")]), _result("x", 1)], TOOLS
    ),
    "odd arguments": Conversation(
        [_user(), _said("", tool_calls=[_call(0, city='ü\n"', deep={"a": [None, True]})]), _result()], TOOLS
    ),
    "a call that waits": Conversation([_user(), _said("", tool_calls=[_call()])], TOOLS, ends=PromptEnd.last_message),
    "long result": Conversation([_user(), _said("", tool_calls=[_call()]), _result("x " * 200)], TOOLS),
    "reasoning": Conversation([_user(), _THOUGHT, _user("Thanks")]),
    "reasoning with a call": Conversation(
        [_user(), _said("", reasoning_content="hm", tool_calls=[_call()]), _result()], TOOLS
    ),
    "reasoning in the content": Conversation([_user(), _said("<think>\nhm\n</think>\n\nSunny."), _user("Thanks")]),
    "thinking off": Conversation([_user()], variables={"enable_thinking": False}),
    "thinking on": Conversation([_user()], variables={"enable_thinking": True, "thinking": True}),
    "effort": Conversation([_user()], variables={"reasoning_effort": "high"}),
    "documents": Conversation([_user()], documents=DOCUMENTS),
    "documents and system": Conversation([_system(), _user()], documents=DOCUMENTS),
    "user with a name": Conversation([_user(name="Ada"), _said(), _user("b", name="Bob")]),
    "two texts": Conversation([_user(_parts("Hel", "lo"))]),
    "one text as a part": Conversation([_user(_parts("Hello"))]),
    "texts of a system prompt": Conversation([_system(_parts("Be ", "brief.")), _user()]),
    "texts of a result": Conversation([*_CALLED[:2], _result(_parts("21 ", "degrees"))], TOOLS),
    "continued": Conversation([_user(), _said("Once upon")], ends=PromptEnd.last_text),
    "continued at a space": Conversation([_user(), _said("Once upon ")], ends=PromptEnd.last_text),
    "continued at an end": Conversation([_user("end"), _said("end")], ends=PromptEnd.last_text),
    "continued at a bracket": Conversation([_user("<"), _said("<")], ends=PromptEnd.last_text),
}


def theirs(source: str, given: Conversation) -> str:
    """
    Raises:
        Exception: of any kind.
    """
    texts, _ = render_jinja_template(
        conversations=[given.messages],
        chat_template=source,
        tools=given.tools,
        documents=given.documents,
        add_generation_prompt=given.ends is PromptEnd.generation,
        continue_final_message=given.ends is PromptEnd.last_text,
        **{**TOKENS, **given.variables},
    )
    return str(texts[0])


def ours(template: ChatTemplate, given: Conversation) -> str:
    """As the gateway makes it of a body.

    Raises:
        TemplateError: the template refuses the messages.
    """
    body = parse_chat(json.dumps({"model": "m", "messages": _as_sent(given.messages)}).encode())
    messages = template_messages(body.messages, template.walks_parts)
    return rendered(
        messages, lambda each: template.render(each, given.tools, given.ends, given.documents, **given.variables)
    )


def _as_sent(messages: list[Message]) -> list[Message]:
    """As clients send them: arguments are text."""
    sent = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        sent.append({key: value for key, value in message.items() if key != "name" or message["role"] != "tool"})
        if calls:
            sent[-1]["tool_calls"] = calls
        if "name" in message:
            sent[-1]["name"] = message["name"]
    return sent


def compare(source: str, template: ChatTemplate, given: Conversation) -> tuple[str, str, str]:
    """The outcome, their prompt and ours; a refusal is its reason."""
    try:
        expected, they_refuse = theirs(source, given), False
    except Exception as error:  # templates are code and may raise anything
        expected, they_refuse = f"{type(error).__name__}: {error}", True
    try:
        found, we_refuse = ours(template, given), False
    except TemplateError as error:
        found, we_refuse = str(error), True
    if they_refuse and we_refuse:
        return REFUSED, expected, found
    if they_refuse:
        return OURS, expected, found
    if found == expected:
        return SAME, expected, found
    return (INTENDED if _intended(source, template, given, expected) else DIFFERENT), expected, found


def _intended(source: str, template: ChatTemplate, given: Conversation, expected: str) -> bool:
    if template.null_content and any(message.get("tool_calls") for message in given.messages):
        return True  # they leave out calls beside empty content
    if template.lead or template.splits_text:  # they leave out the text beside calls
        beside = [message["content"] for message in given.messages if message.get("tool_calls") and message["content"]]
        if beside:
            return all(text not in expected and text in ours(template, given) for text in beside)
    if template.wants_parts:  # they write nothing of a text that is no list
        parts = [{**m, "content": _parts(m["content"])} if isinstance(m["content"], str) else m for m in given.messages]
        return theirs(source, given._replace(messages=parts)) == ours(template, given)
    if any(isinstance(m["content"], list) and m["role"] not in template.walks_parts for m in given.messages):
        return "'type'" in expected or '"type"' in expected or not _all_texts(given, expected)
    if any("reasoning_content" in message for message in given.messages):
        # They would render the same, had the client called it what this template reads.
        named = [{**m, "reasoning": m["reasoning_content"]} if "reasoning_content" in m else m for m in given.messages]
        try:
            return theirs(source, given._replace(messages=named)) == ours(template, given)
        except Exception:
            return False
    return False


def _all_texts(given: Conversation, text: str) -> bool:
    return all(
        part["text"].strip() in text for m in given.messages if isinstance(m["content"], list) for part in m["content"]
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="+", type=Path)
    parser.add_argument("--show", type=int, default=3, help="differences to show")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    files = sorted({file for folder in args.folder for file in folder.rglob("*.jinja")})
    total: Counter[str] = Counter()
    shown = unusable = 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        try:
            template = ChatTemplate(source, TOKENS)
        except TemplateError as error:
            unusable += 1
            print(f"{file.name:<60} unusable: {str(error)[:100]}")
            continue
        counts: Counter[str] = Counter()
        for name, given in CONVERSATIONS.items():
            outcome, expected, found = compare(source, template, given)
            counts[outcome] += 1
            if outcome == DIFFERENT and shown < args.show:
                shown += 1
                print(f"--- {file.name}, {name}: transformers / here")
                print("\n".join(difflib.unified_diff(expected.splitlines(), found.splitlines(), lineterm="", n=1)))
        total += counts
        if counts.keys() - {SAME, REFUSED}:
            print(f"{file.name:<60} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    print(f"{len(files)} templates × {len(CONVERSATIONS)} conversations, {unusable} templates unusable: " + ", ".join(
        f"{count} {outcome}" for outcome, count in total.most_common()
    ))  # fmt: skip
    return int(bool(total[DIFFERENT]) or not files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
