"""Feeds the fixtures of ``canitoolcall`` to our parsers: ``make conformance``.

Each fixture is one answer of a model, the tools that it was given, and what a correct server makes of it. It is read
whole, and streamed in the suite's own pieces and cut at many places of ours; the suite's own checks judge each result.
Vocabularies are not needed: which marks are tokens is learned from the fixtures' token ids.
"""

import argparse
import itertools
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.infra.text.parsers.answer_parser import AnswerParser
from penstock.infra.text.parsers.delta_builder import Delta
from penstock.infra.text.parsers.families import TABLE
from penstock.infra.text.parsers.reader import Marks, tokens_in
from penstock.infra.text.parsers.registry import ParserNames, answer_parsing, parser_for
from penstock.schemas.requests import GenerateRequest, Parsing, Stop

# Of each variant in the suite: the parsers with which we serve it.
PARSERS = {
    "deepseek-v3": ("", "deepseek_v3"),
    "deepseek-v31": ("deepseek_v3", "deepseek_v3_1"),
    "deepseek-v32": ("deepseek_v3", "deepseek_v32"),
    "deepseek-v4": ("deepseek_v3", "deepseek_v4"),
    "deepseek-v41": ("deepseek_v3", "deepseek_v41"),
    "devstral-2507": ("", "mistral"),
    "gemma4": ("gemma4", "gemma4"),
    "glm45-newline": ("glm45", "glm45"),
    "glm47-compact": ("glm45", "glm47"),
    "glm53-compact": ("glm45", "glm47"),
    "gpt-oss": ("gpt_oss", "gpt_oss"),
    "kimi-k2-instruct": ("", "kimi_k2"),
    "kimi-k2-thinking": ("kimi_k2", "kimi_k2"),
    "kimi-k3-xtml": ("kimi_k3", "kimi_k3"),
    "llama3-json": ("", "llama3_json"),
    "llama4-pythonic": ("", "llama4_pythonic"),
    "qwen3-coder": ("", "qwen3_coder"),
    "qwen3-coder-next": ("", "qwen3_coder"),
    "qwen3-hybrid": ("qwen3", "hermes"),
    "qwen3-instruct-2507": ("", "hermes"),
    "qwen3-thinking-2507": ("qwen3", "hermes"),
    "qwen3.5": ("qwen3", "qwen3_coder"),
    "qwen3.8": ("qwen3", "qwen3_coder"),
    "v11": ("", "mistral"),
    "v11-think-text": ("qwen3", "mistral"),
    "v13": ("", "mistral"),
    "v13-think": ("mistral", "mistral"),
    "v13plus-think": ("mistral", "mistral"),
    "v3": ("", "mistral"),
}
# Ids of the tokens that were added to each family's vocabularies.
ADDED: dict[str, Collection[int]] = {
    "deepseek": range(128_000, 130_000),
    "gemma4": range(256),
    "glm": range(151_300, 160_000),
    "gpt-oss": range(199_998, 201_088),
    "kimi": range(163_584, 164_000),
    "llama": range(128_000, 202_048),
    "mistral": range(1_000),
    "qwen3-hermes": range(151_643, 152_000),
    "qwen3-xml": (*range(151_643, 152_000), *range(248_044, 249_000)),
}
_TAG = re.compile(r"<[^<>=]*>|\[[/A-Z_]+\]|｜[^｜]*｜")
_NO_TOKENS = ("</function>", "</parameter>")
PASSES = ("pass", "soft_pass")
CUTS = 24  # random ways to cut each answer, beside the suite's own


class Piece(NamedTuple):
    """Text of an answer. ``token``: it is the one token of a mark."""

    text: str
    token: bool = False


def pieces(raw: str, ids: Sequence[int] | None, marks: Mapping[str, int]) -> list[Piece]:
    """An answer with the marks that the model wrote as their tokens.

    Args:
        ids: of its tokens; None: not known, so every mark is taken for its token.
        marks: id by text of those that are one token.
    """
    if not marks:
        return [Piece(raw)]
    found = list(re.finditer("|".join(map(re.escape, sorted(marks, key=len, reverse=True))), raw))
    if ids is not None:
        real = _placed(
            [(each.start(), each.end(), marks[each.group()]) for each in found], ids, set(marks.values()), raw
        )
        found = [each for each, is_token in zip(found, real, strict=True) if is_token]
    made, at = list[Piece](), 0
    for each in found:
        made += [Piece(raw[at : each.start()])] if each.start() > at else []
        made.append(Piece(each.group(), token=True))
        at = each.end()
    return made + ([Piece(raw[at:])] if at < len(raw) else [])


def _placed(found: list[tuple[int, int, int]], ids: Sequence[int], special: set[int], raw: str) -> list[bool]:
    """Which of the marks in the text are tokens: between two of them are as many tokens as their text can have."""
    gaps, tokens, between = list[int](), list[int](), 0
    for token in ids:
        if token in special:
            gaps.append(between)
            tokens.append(token)
            between = 0
        else:
            between += 1
    gaps.append(between)

    def fits(start: int, end: int, count: int) -> bool:
        return (count == 0) == (start == end) and count <= len(raw[start:end].encode())

    ways: dict[tuple[int, int], bool] = {}

    def solve(mark: int, token: int, at: int) -> list[bool] | None:
        if ways.get((mark, token)) is False and not mark:
            return None
        if token == len(tokens):
            return [False] * (len(found) - mark) if fits(at, len(raw), gaps[token]) else None
        for index in range(mark, len(found)):
            start, end, wanted = found[index]
            if wanted == tokens[token] and fits(at, start, gaps[token]):
                rest = solve(index + 1, token + 1, end)
                if rest is not None:
                    return [False] * (index - mark) + [True, *rest]
        return None

    before = sys.getrecursionlimit()  # of the whole process: others count on theirs
    sys.setrecursionlimit(10_000)
    try:
        solved = solve(0, 0, 0)
    finally:
        sys.setrecursionlimit(before)
    return solved if solved is not None else [True] * len(found)


def learned_marks(
    fixtures: Iterable[Mapping[str, Any]], markers: Iterable[str], added: Collection[int]
) -> dict[str, int]:
    """The marks that are one token of a vocabulary, with its id: those that occur where the id does.

    Args:
        added: ids of the tokens that were added to the vocabulary.
    """
    known = [each for each in fixtures if each.get("output_token_ids")]
    counted = [Counter(token for token in each["output_token_ids"] if token in added) for each in known]
    made: dict[str, int] = {}
    for text in sorted(filter(_TAG.fullmatch, {*markers} - {*_NO_TOKENS})):
        wanted = [each["raw_output"].count(text) for each in known]
        best: tuple[int, int, int] | None = None
        for token in sorted(set().union(*(c for c, n in zip(counted, wanted, strict=True) if n))):
            have = [each[token] for each in counted]
            if all(h <= w for h, w in zip(have, wanted, strict=True)):
                # of several with equal counts, the one whose place is the mark's
                off = sum(
                    abs(each["output_token_ids"].index(token) / len(each["output_token_ids"])
                        - each["raw_output"].index(text) / len(each["raw_output"]))
                    for each, h in zip(known, have, strict=True) if h
                )  # fmt: skip
                rank = (-sum(have), round(off * 1e6), token)
                best = rank if best is None or rank < best else best
        if best is not None and best[2] not in made.values():
            made[text] = best[2]
    return made


def parsing_of(fixture: Mapping[str, Any], variant: str, prompt: str) -> Parsing | None:
    names = ParserNames(*PARSERS[variant])
    return answer_parsing(names, fixture["tools"], lambda count: prompt, one_call=False)


def made_parser(parsing: Parsing, marks: Iterable[str]) -> AnswerParser:
    request = GenerateRequest("r-1", "m", "g", b"", Stop(999), 0, 0, parsing=parsing)
    texts = marks_of_formats(parsing)
    spelled = set(marks)
    if any(each.startswith("<|") for each in spelled):  # those that no answer has are tokens as well
        spelled |= {found for text in texts for found in re.findall(r"<\|[^|<>]*\|>", text)}
    return parser_for(request, 0, Marks(tokens_in(texts, spelled)))


def marks_of_formats(parsing: Parsing) -> list[str]:
    rows = (TABLE.find(parsing.reasoning), TABLE.find(parsing.tools))
    return [text for row in rows if row is not None for text in row.marks]


def added(deltas: Iterable[Delta | None]) -> tuple[str | None, str | None, list[list[str]]]:
    """What a client makes of deltas."""
    content: str | None = None
    thought: str | None = None
    calls: list[list[str]] = []
    for delta in filter(None, deltas):
        if delta.content is not None:
            content = (content or "") + delta.content
        if delta.reasoning_content is not None:
            thought = (thought or "") + delta.reasoning_content
        for call in delta.tool_calls or ():
            if call.function.name is not None:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return content, thought, calls


def read(
    parsing: Parsing | None, marks: Collection[str], cut: Sequence[Sequence[Piece]], *, limited: bool, whole: bool
) -> Any:
    """What our parsers make of an answer that comes in these pieces."""
    if parsing is None:
        return "".join(each.text for group in cut for each in group), None, []
    parser = made_parser(parsing, marks)
    known = parser.marks.tokens
    texts = [
        "".join(parser.marks.char(p.text) if p.token and p.text in known else p.text for p in group) for group in cut
    ]
    if whole:
        return added([parser.parse(*texts, limited=limited)])
    return added([*map(parser.push, texts), parser.finish(limited=limited)])


def cuts(units: Sequence[Piece], seed: int) -> Iterator[tuple[str, list[list[Piece]]]]:
    """The answer in several ways of cutting: in one piece, by characters, and at random places."""
    letters = [each for unit in units for each in ([unit] if unit.token else map(Piece, unit.text))]
    yield "one", [list(units)]
    yield "letters", [[each] for each in letters]
    rng = random.Random(seed)
    for number in range(CUTS):
        at = sorted({0, len(letters), *(rng.randrange(len(letters) + 1) for _ in range(rng.randrange(1, 9)))})
        yield f"cut {number}", [letters[start:end] for start, end in itertools.pairwise(at)]


class Verdict(NamedTuple):
    fixture: str
    variant: str
    status: str
    reason: str
    streams_only: bool  # whole answers pass


def judge(fixture: Any, family: Any, variant: str, prompt: str, marks: Mapping[str, int]) -> Verdict:
    """What the suite's checks say of one fixture, with its marks as text and as tokens."""
    from canitoolcall.checks import case_status, run_checks
    from canitoolcall.results import Observation, ParsedToolCall, ParseResult

    record = fixture.to_dict()
    parsing = parsing_of(record, variant, prompt)
    limited = "truncated" in fixture.tags  # as the suite says: the model wrote no stop token

    def result(found: Any) -> ParseResult:
        content, thought, calls = found
        return ParseResult(content, thought, tuple(ParsedToolCall(name, said) for name, said in calls))

    units = pieces(fixture.raw_output, record.get("output_token_ids"), marks)
    whole = result(read(parsing, marks, [units], limited=limited, whole=True))
    streams = {
        name: result(read(parsing, marks, cut, limited=limited, whole=False))
        for name, cut in cuts(units, len(fixture.raw_output))
    }
    whole_passes = case_status(run_checks(fixture, family, Observation(whole, {}))).value in PASSES
    rows = run_checks(fixture, family, Observation(whole, streams))
    status = case_status(rows).value
    bad = [f"{row.check} ({row.strategy}): {row.detail}" for row in rows if row.status.value not in PASSES]
    return Verdict(fixture.id, variant, status, bad[0] if bad else "", whole_passes and status not in PASSES)


def judged(only: str = "") -> list[Verdict]:
    """The verdict on every fixture of the installed suite whose id begins with ``only``."""
    from canitoolcall.fixtures import load_families, load_fixtures

    families = load_families()
    variants = {m.repo: (m.variant, m.default_generation_prompt) for f in families.values() for m in f.reference_models}
    fixtures = load_fixtures()
    by_vocabulary: dict[str, list[Any]] = defaultdict(list)
    for each in fixtures:
        by_vocabulary[each.models[0]].append(each)
    marks = {
        name: learned_marks(
            [each.to_dict() for each in members], families[members[0].family].markers, ADDED[members[0].family]
        )
        for name, members in by_vocabulary.items()
    }
    made = []
    for each in fixtures:
        if not each.id.startswith(only):
            continue
        variant, prompt = variants[each.models[0]]
        given = each.generation_prompt if each.generation_prompt is not None else prompt
        if variant not in PARSERS:
            made.append(Verdict(each.id, variant, "unsupported", "no parser", False))
            continue
        try:
            made.append(judge(each, families[each.family], variant, given or "", marks[each.models[0]]))
        except Exception as error:
            made.append(Verdict(each.id, variant, "error", f"{type(error).__name__}: {error}", False))
    return made


def report(verdicts: Sequence[Verdict]) -> str:
    """The table of families, then what does not pass, as Markdown."""
    rows = defaultdict(Counter[str])
    for each in verdicts:
        family = each.fixture.partition("/")[0]
        for name in (family, "all"):
            rows[name]["cases"] += 1
            rows[name][each.status] += 1
            rows[name]["whole"] += each.status in PASSES or each.streams_only
    lines = ["| family | cases | equal | pass | whole answers pass | fail |", "|---|---|---|---|---|---|"]
    for name, row in sorted(rows.items(), key=lambda item: (item[0] == "all", item[0])):
        passed = row["pass"] + row["soft_pass"]
        bad = row["cases"] - passed
        lines.append(f"| {name} | {row['cases']} | {row['pass']} | {passed} | {row['whole']} | {bad} |")
    total = rows["all"]
    share = 100 * (total["pass"] + total["soft_pass"]) / max(total["cases"], 1)
    lines += ["", f"{share:.1f} % of {total['cases']} cases pass.", ""]
    lines += [
        f"- `{each.fixture}` ({'whole answers pass' if each.streams_only else each.status}): {each.reason}"
        for each in verdicts
        if each.status not in PASSES
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="fixtures whose id begins so")
    parser.add_argument("--least", type=float, default=95.0, help="percentage that must pass")
    parser.add_argument("--json", type=Path, help="also write the verdicts to this file")
    args = parser.parse_args()
    verdicts = judged(args.only)
    print(report(verdicts))
    if args.json:
        args.json.write_text(json.dumps([each._asdict() for each in verdicts], indent=1))
    passed = sum(each.status in PASSES for each in verdicts)
    return 0 if 100 * passed >= args.least * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
