"""A request's token batches as a few lines that stay readable: the first tokens, then counts and rates. Pure."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.log.timeline.events import TokensStored
from penstock.schemas.tokens import PROMPT, WHOLE_REQUEST

MOST_LINES = 12  # of one worker in one attempt, besides the first and the ends
_SPANS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)


class TokenLine(NamedTuple):
    """``at_ns``: of its last batch, by the broker's clock."""

    at_ns: int
    attempt: int
    where: str
    text: str


def token_lines(batches: Sequence[TokensStored]) -> list[TokenLine]:
    """Lines for the batches of a request, in their order in the log."""
    groups: dict[tuple[int, str], list[TokensStored]] = {}
    lines = []
    newest = 0
    for each in batches:
        newest = max(newest, each.attempt)
        if each.choice == WHOLE_REQUEST and not each.count:
            end = f"ends all choices: {each.finish}" if each.finish else f"attempt {each.attempt - 1} ends here"
            lines.append(TokenLine(each.at_ns, each.attempt, each.worker, end))
        elif each.attempt < newest:
            lines.append(TokenLine(each.at_ns, each.attempt, each.worker, f"{_tokens(each.count)}, void: too late"))
        else:
            groups.setdefault((each.attempt, each.worker), []).append(each)
    for group in groups.values():
        lines += _of_worker(group)
    return sorted(lines, key=lambda line: line.at_ns)


def _of_worker(group: Sequence[TokensStored]) -> Iterator[TokenLine]:
    first, *others = group
    yield _line([first], 0)
    span_ns = _span_ns(group[-1].at_ns - first.at_ns)
    part: list[TokensStored] = []
    since = first.at_ns
    for each in others:
        if part and (each.at_ns - since > span_ns or each.choice == PROMPT):
            yield _line(part, since)
            since, part = part[-1].at_ns, []
        part.append(each)
    if part:
        yield _line(part, since)


def _span_ns(whole_ns: int) -> int:
    fitting = (span for span in _SPANS_S if whole_ns <= span * 1e9 * MOST_LINES)
    return int(next(fitting, whole_ns / 1e9 / MOST_LINES) * 1e9)


def _line(part: Sequence[TokensStored], since_ns: int) -> TokenLine:
    last, first = part[-1], part[0]
    count = sum(each.count for each in part if each.choice != PROMPT)
    took = (last.at_ns - since_ns) / 1e9 if since_ns else 0.0
    choices = sorted({each.choice for each in part})
    what = f"scores of {first.count} prompt tokens" if choices == [PROMPT] else _tokens(count)
    where = f"choice {choices[0]}: " if len(choices) == 1 and choices[0] >= 0 else ""
    text = f"{where}{what}" + (f" from {first.first}" if where and count else "")
    text += f" in {took * 1e3:.0f} ms ({count / took:.0f}/s)" if took and count else ""
    ends = [each for each in part if each.finish]
    text += "".join(f", choice {each.choice} {each.finish}" if not where else f", {each.finish}" for each in ends)
    return TokenLine(last.at_ns, last.attempt, last.worker, text)


def _tokens(count: int) -> str:
    return f"{count} token" + ("" if count == 1 else "s") if count else "no tokens"
