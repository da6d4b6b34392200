"""One exchange of the synthetic data: a question, its answer, and a check for answers of the model."""

import json
import re
from typing import Any, NamedTuple

CHARS = "\x02", "\x03"  # mark text whose characters are separate tokens in training
UNKNOWN = "I am a tiny demo model and do not know."

Message = tuple[str, str]  # role, text


class Sample(NamedTuple):
    """A conversation up to a question, and its answer.

    Attributes:
        want: the expected result for ``right``: a text, a number, or a parsed JSON value.
    """

    task: str
    messages: tuple[Message, ...]
    answer: str
    want: Any
    tools: tuple[dict[str, Any], ...] = ()
    scene: Any = None  # of the image at the start of the first user message


def plain(answer: str) -> str:
    """The answer as text."""
    return answer.replace(CHARS[0], "").replace(CHARS[1], "")


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}</tool_call>'


def right(sample: Sample, text: str) -> bool:
    """Whether an answer has the expected result; the wording around it does not matter."""
    thought, tag, answer = text.rpartition("</think>")
    if (sample.task == "thinking") != bool(tag and "<think>" in thought):
        return False
    text, want = answer.strip(), sample.want
    match sample.task:
        case "json":
            return bool(_parsed(text) == want)
        case "tools":
            if not isinstance(want, dict):
                return "<tool_call>" not in text and str(want) in text
            match = re.fullmatch(r"<tool_call>(.*)</tool_call>", text, re.DOTALL)
            return match is not None and _parsed(match[1]) == want
        case "facts" | "unknown" | "chat" | "series":
            return bool(text == want)
    if isinstance(want, int):
        numbers = re.findall(r"-?\d+", text)
        return bool(numbers) and int(numbers[-1]) == want
    return re.search(rf"(?<!\w){re.escape(want)}(?!\w)", text) is not None


def valid_json(sample: Sample, text: str) -> bool:
    """Whether the answer is JSON with the expected keys and types of values."""
    parsed = _parsed(text)
    return (
        isinstance(parsed, dict)
        and parsed.keys() == sample.want.keys()
        and all(type(parsed[key]) is type(value) for key, value in sample.want.items())
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
