"""Reads again what chat templates make of calls: ``python -m tests.conformance.templates FOLDER...``.

Each template of the folders (``*.jinja``) renders a conversation that ends with an answer: thoughts, content and calls.
What it writes beyond the prompt is such a model's answer. The row that is detected from it must read that as it was.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from penstock.infra.text.chat_template import ChatTemplate, PromptEnd, TemplateError
from penstock.infra.text.parsers.families import TABLE
from penstock.infra.text.parsers.registry import ParserNames, answer_parsing
from tests.conformance.run import Piece, cuts, read

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look it up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "description": "how long"},
                    "deep": {"type": "object", "description": "more", "properties": {"a": {"type": "array"}}},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get_time")
]
UNKNOWN = "no row is detected"
USER = {"role": "user", "content": "How is the weather?"}
ARGUMENTS: list[dict[str, Any]] = [{"city": "Zürich, CH", "days": 3, "deep": {"a": [1, "x"]}}, {"city": "Bern"}]
CALLS = [
    {
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": tool["function"]["name"], "arguments": arguments},
    }  # type: ignore[index]
    for number, (tool, arguments) in enumerate(zip(TOOLS, ARGUMENTS, strict=True))
]
ANSWERS = {
    "one call": {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
    "two calls": {"role": "assistant", "content": "", "tool_calls": CALLS},
    "content and a call": {"role": "assistant", "content": "I will look.", "tool_calls": CALLS[:1]},
    "thoughts and a call": {
        "role": "assistant",
        "content": "",
        "reasoning_content": "They ask.",
        "tool_calls": CALLS[:1],
    },
    "content": {"role": "assistant", "content": "It is fine."},
}
_END = re.compile(r"\s*(<[^<>\n]*>|\[e~\[)\s*\Z")  # the end of a turn, which would have ended the answer
_OPENED = re.compile(r"<[^<>]*\Z")


def answer(template: ChatTemplate, message: dict[str, Any]) -> tuple[str, str]:
    """The prompt, and what the template writes of an answer behind it, without what ends it."""
    prompt = template.render([USER], TOOLS, PromptEnd.generation)
    whole = template.render([USER, message], TOOLS, PromptEnd.last_message)
    shared = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    prompt = _OPENED.sub("", prompt[:shared])  # a prompt may close thoughts that the answer has
    text = whole[len(prompt) :]
    return prompt, text


def tried(path: Path) -> list[str]:
    """What was not read as it was, of one template."""
    source = path.read_text(encoding="utf-8")
    names = ParserNames(TABLE.detected(source, "thoughts"), TABLE.detected(source, "calls"))
    if not names.tools:
        return [UNKNOWN]
    try:
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    except (TemplateError, ValueError) as error:
        return [f"the template is not taken: {error}"]
    wrong = []
    for what, message in ANSWERS.items():
        if template.splits_text and message.get("tool_calls") and message["content"]:
            continue  # two answers
        try:
            prompt, text = answer(template, message)
        except Exception as error:
            if not isinstance(error, TemplateError):
                wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue  # a template refuses such an answer
        parsing = answer_parsing(names, TOOLS, lambda count, prompt=prompt: prompt[-80:], one_call=False)  # type: ignore[misc]
        found = read(parsing, (), [[Piece(text)]], limited=False, whole=True)
        for _, cut in cuts([Piece(text)], 1):
            streamed = read(parsing, (), cut, limited=False, whole=False)
            if (streamed[0] or "", *streamed[1:]) != (found[0] or "", *found[1:]):
                wrong.append(f"{what}: streams differ")
                break
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        calls = [(name, json.loads(said)) for name, said in found[2]]
        content = found[0] or ""
        while calls == wanted and content != (content := _END.sub("", content)):
            pass
        if calls != wanted or content.strip() not in ("", message["content"]):
            wrong.append(f"{what}: {text!r} is {found}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    good = bad = 0
    for path in sorted(each for folder in parser.parse_args().folders for each in folder.glob("*.jinja")):
        wrong = tried(path)
        good, bad = good + (not wrong), bad + bool(wrong)
        source = path.read_text(encoding="utf-8")
        print(f"{path.stem}: {TABLE.detected(source, 'thoughts') or '-'}, {TABLE.detected(source, 'calls') or '-'}")
        for each in wrong:
            print(f"  {each}"[:700])
    print(f"{good} templates are read as they were written, {bad} are not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
