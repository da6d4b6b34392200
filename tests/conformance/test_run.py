"""The conformance run itself, on answers of our own in the suite's form. The suite is not installed here."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.run import CUTS, PARSERS, Verdict, cuts, learned_marks, parsing_of, pieces, read, report
from tests.conformance.templates import UNKNOWN, tried

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "times": {"type": "integer"}},
        },
    },
}
# Ids as of a vocabulary that has <tool_call> and </tool_call> as 1000 and 1001, and a token for each other character.
OPEN, CLOSE = 1000, 1001


def ids_of(text: str, quoted: str = "") -> list[int]:
    """Tokens of a text in which all marks but those within ``quoted`` are tokens."""
    found: list[int] = []
    at = 0
    spared = (text.index(quoted), text.index(quoted) + len(quoted)) if quoted else (0, 0)
    while at < len(text):
        mark = next((m for m in ("<tool_call>", "</tool_call>") if text.startswith(m, at)), "")
        if mark and not spared[0] <= at < spared[1]:
            found.append(OPEN if mark == "<tool_call>" else CLOSE)
            at += len(mark)
        else:
            found.append(ord(text[at]))
            at += 1
    return found


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "no", "times": 2}}\n</tool_call>'
QUOTES = f"Write {CALL} for that."
FIXTURES: list[dict[str, Any]] = [
    {"raw_output": CALL, "output_token_ids": ids_of(CALL), "tools": [TOOL]},
    {"raw_output": f"So.\n{CALL}", "output_token_ids": ids_of(f"So.\n{CALL}"), "tools": [TOOL]},
    {"raw_output": QUOTES, "output_token_ids": ids_of(QUOTES, QUOTES), "tools": [TOOL]},
]


def test_marks_that_are_tokens_are_learned_from_ids() -> None:
    markers = ["<tool_call>", "</tool_call>", "<think>"]
    assert learned_marks(FIXTURES, markers, range(1000, 2000)) == {"<tool_call>": OPEN, "</tool_call>": CLOSE}


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture["raw_output"][:9])
def test_an_answer_of_the_suite_is_read_whole_and_in_any_cut(fixture: dict[str, Any]) -> None:
    marks = {"<tool_call>": OPEN, "</tool_call>": CLOSE}
    units = pieces(fixture["raw_output"], fixture["output_token_ids"], marks)
    parsing = parsing_of(fixture, "qwen3-hybrid", "<|im_start|>assistant\n")
    whole = read(parsing, marks, [units], limited=False, whole=True)
    ways = list(cuts(units, 1))
    assert len(ways) == CUTS + 2
    for _, cut in ways:
        assert list(itertools.chain(*cut)) == [
            part for unit in units for part in ([unit] if unit.token or cut == [units] else map(type(unit), unit.text))
        ]
        assert read(parsing, marks, cut, limited=False, whole=False) == whole
    content, _, calls = whole
    if fixture["raw_output"] == QUOTES:
        assert (content, calls) == (QUOTES, [])
    else:
        assert calls == [["look_up", '{"word": "no", "times": 2}']]


def test_the_report_counts_and_names_what_fails() -> None:
    verdicts = [
        Verdict("a/x", "v", "pass", "", streams_only=False),
        Verdict("a/y", "v", "soft_pass", "", streams_only=False),
        Verdict("b/z", "v", "fail", "why", streams_only=True),
    ]
    text = report(verdicts)
    assert "| a | 2 | 1 | 2 | 2 | 0 |" in text
    assert "| all | 3 | 1 | 2 | 3 | 1 |" in text
    assert "66.7 % of 3 cases pass" in text
    assert "- `b/z` (whole answers pass): why" in text


def test_the_parsers_of_the_suites_variants_exist() -> None:
    from penstock.infra.text.parsers.families import TABLE

    for reasoning, tools in PARSERS.values():
        assert not reasoning or TABLE.thoughts(reasoning) is not None
        assert TABLE.calls(tools) is not None


TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|over|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_what_a_template_writes_of_calls_is_read_again(tmp_path: Path) -> None:
    good, other, without = (tmp_path / f"{name}.jinja" for name in ("good", "other", "without"))
    good.write_text(TEMPLATE)
    other.write_text(TEMPLATE.replace('{"name": "', '{"nome": "'))
    without.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert tried(good) == []
    assert "one call: " in tried(other)[0]
    assert tried(without) == [UNKNOWN]
