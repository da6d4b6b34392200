"""Whether every promise was kept: a judgement over what the log has and what the clients saw. Knows no broker."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tests.chaos.seen import Seen, Shown

LOGPROB = 0.02  # engines that compute add in another order in another batch


class End(NamedTuple):
    """A terminal event. ``tokens``: packed, per choice."""

    request: str
    code: str
    tokens: tuple[bytes, ...] = ()
    message: str = ""
    attempt: int = 1


class Log(msgspec.Struct):
    """What the log says once the load is over.

    Attributes:
        accepted: (request id, tag) of every accepted request.
        leases: tickets that are still open.
        held: what workers say that they still hold.
        residue: consumers, queues and tasks that nobody needs.
    """

    accepted: Sequence[tuple[str, str]] = ()
    ends: Sequence[End] = ()
    leases: Sequence[str] = ()
    held: Sequence[str] = ()
    residue: Sequence[str] = ()


class Expected(NamedTuple):
    """What one recipe comes to undisturbed."""

    choices: Mapping[int, Shown]
    tokens: tuple[bytes, ...] = ()


class Problem(NamedTuple):
    """One promise that was broken. ``what`` is its kind: a column of the table, or a word of its own."""

    what: str
    text: str
    request: str = ""
    tag: str = ""
    kind: str = ""


class Judgement(msgspec.Struct):
    rows: dict[str, Counter[str]]
    problems: list[Problem]


def judge(seen: Sequence[Seen], log: Log, expected: Mapping[str, Expected], *, once: bool) -> Judgement:
    """Compare the two.

    Args:
        once: a request that is sent again under the same key must be accepted once only.
    """
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    problems: list[Problem] = []
    by_tag = defaultdict(list)
    for each in seen:
        by_tag[each.tag].append(each)
    requests = defaultdict(list)
    for request, tag in log.accepted:
        requests[tag].append(request)
    ends = defaultdict(list)
    for end in log.ends:
        ends[end.request].append(end)

    for tag, clients in by_tag.items():
        kind, recipe = clients[0].kind, clients[0].recipe
        row = rows[kind]
        row["asked"] += 1
        row["accepted"] += len(requests[tag])
        row["again"] += sum(client.attached for client in clients)
        row["refused"] += sum(client.refused for client in clients)
        found = [problem for client in clients for problem in client_problems(client, expected[recipe])]
        found += record_problems(tag, clients, requests[tag], ends, expected[recipe], once=once)
        for problem in found:
            problems.append(problem._replace(tag=tag, kind=kind))
        row.update({problem.what for problem in found})
        row["cancelled"] += all(client.outcome == "cancelled" for client in clients)
        row["unknown"] += all(client.outcome == "unknown" for client in clients)
        row["ok"] += not found
    known = {request for request, _ in log.accepted}
    problems += [
        Problem("extra", f"a terminal event ({end.code or 'ok'}) of a request that nobody made", request)
        for request, each in ends.items()
        if request not in known
        for end in each
    ]
    strays = [(request, tag) for request, tag in log.accepted if tag not in by_tag]
    problems += [Problem("extra", "an accepted request of no client of ours", *stray) for stray in strays]
    for what, lines in (("lease", log.leases), ("held", log.held), ("residue", log.residue)):
        problems += [Problem(what, line) for line in lines]
    return Judgement(dict(rows), problems)


def client_problems(seen: Seen, expected: Expected) -> Iterable[Problem]:
    """What is wrong with what one client saw."""
    if seen.outcome in ("hung", ""):
        yield Problem("hung", f"no end; {_so_far(seen)}", seen.request)
    elif seen.outcome == "failed":
        yield Problem("failed", f"{seen.code}: {seen.message}; {_so_far(seen)}", seen.request)
    if seen.repeats:
        yield Problem("duplicated", f"{seen.repeats} events came again or went back", seen.request)
    if seen.holes:
        yield Problem("hole", f"{seen.holes} gaps in the numbers of the messages", seen.request)
    for index, shown in seen.choices.items():
        wanted = expected.choices[index]
        if seen.outcome == "answered":
            if shown.text != wanted.text:
                yield Problem("wrong", f"choice {index}: {difference(wanted.text, shown.text)}", seen.request)
            elif shown.finish != wanted.finish:
                yield Problem("wrong", f"choice {index}: ended by {shown.finish}, not {wanted.finish}", seen.request)
            elif not alike(shown.logprobs, wanted.logprobs):
                yield Problem("wrong", f"choice {index}: other log-probabilities", seen.request)
        elif not wanted.text.startswith(shown.text):
            yield Problem("wrong", f"choice {index}: {difference(wanted.text, shown.text)}", seen.request)


def record_problems(
    tag: str,
    clients: Sequence[Seen],
    requests: Sequence[str],
    ends: Mapping[str, Sequence[End]],
    expected: Expected,
    *,
    once: bool,
) -> Iterable[Problem]:
    """What is wrong with what the log has of one question."""
    answered = [client for client in clients if client.outcome in ("answered", "failed", "hung")]
    if answered and not requests:
        yield Problem("missing", "a client has an answer, and the log no request", answered[0].request)
    if once and len(requests) > 1:
        yield Problem("duplicated", f"accepted {len(requests)} times: {', '.join(requests)}", requests[0])
    left = any(client.left or client.outcome == "cancelled" for client in clients)
    reported = {client.code for client in clients if client.outcome == "failed"}
    denied = {client.request: client.code or "no end" for client in clients if client.outcome in ("failed", "hung")}
    for request in requests:
        found = ends.get(request, ())
        if not found:
            yield Problem("missing", "no terminal event", request)
        elif len(found) > 1:
            codes = ", ".join(end.code or "ok" for end in found)
            yield Problem("duplicated", f"{len(found)} terminal events: {codes}", request)
        for end in found[:1]:
            if not end.code and request in denied:
                yield Problem("lost", f"its record is ok, and a client got {denied[request]}", request)
            if end.code and not (left and end.code == "cancelled") and end.code not in reported:
                yield Problem("failed", f"ended with {end.code}: {end.message} (attempt {end.attempt})", request)
            yield from _token_problems(end, expected)


def _token_problems(end: End, expected: Expected) -> Iterable[Problem]:
    for index, (tokens, wanted) in enumerate(zip(end.tokens, expected.tokens, strict=False)):
        # A record may be too large to hold its tokens; one of a request that failed has a part of them.
        if tokens != wanted and not ((end.code or not tokens) and wanted.startswith(tokens)):
            have, want = len(tokens) // 4, len(wanted) // 4
            yield Problem(
                "wrong", f"record, choice {index}: {have} tokens that are not the {want} expected", end.request
            )


def later_problems(request: str, choices: Mapping[int, Shown], expected: Expected) -> Iterable[Problem]:
    """What is wrong with an answer that was asked for again by its id, after its end."""
    for index, wanted in expected.choices.items():
        shown = choices.get(index, Shown())
        if (shown.text, shown.finish) != (wanted.text, wanted.finish):
            yield Problem("wrong", f"asked again later, choice {index}: {difference(wanted.text, shown.text)}", request)


def difference(wanted: str, shown: str) -> str:
    """How a text differs from what was expected, in words."""
    head = _common(wanted, shown)
    if head == len(shown):
        return f"cut short after {head} of {len(wanted)} characters"
    if head == len(wanted):
        return f"{len(shown) - head} characters too many"
    tail = _common(wanted[head:][::-1], shown[head:][::-1])
    if head + tail == len(shown):
        return f"a hole of {len(wanted) - len(shown)} characters after {head}"
    if head + tail == len(wanted):
        return f"{len(shown) - len(wanted)} characters twice after {head}"
    other, own = shown[head : head + 40], wanted[head : head + 40]
    return f"another text after {head} of {len(wanted)} characters: {other!r}, not {own!r}"


def _common(one: str, other: str) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def alike(shown: Sequence[tuple[str, float]], wanted: Sequence[tuple[str, float]]) -> bool:
    """Log-probabilities of the same tokens, equal but for rounding."""
    return len(shown) == len(wanted) and all(
        one[0] == other[0] and abs(one[1] - other[1]) <= LOGPROB for one, other in zip(shown, wanted, strict=True)
    )


def _so_far(seen: Seen) -> str:
    have = "+".join(str(len(shown.text)) for shown in seen.choices.values())
    return f"{have} characters, re-attached {seen.attached} times, {'; '.join(seen.notes[-3:])}"


class Footprint(NamedTuple):
    """Resident memory and open files of one process."""

    pid: int
    rss: int
    files: int = 0


GROWTH = {"nats": 250 << 20, "gateway": 40 << 20, "router": 40 << 20}  # bytes; of workers, whose engines have caches:
WORKER_GROWTH = 80 << 20
FILES_GROWTH = 40


def memory_problems(before: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> list[Problem]:
    """Processes that are larger, or have more open files, than the ones of their names before by more than they may."""
    found = []
    for name, was in before.items():
        now = after.get(name)
        limit = GROWTH.get(name.partition("-")[0], WORKER_GROWTH)
        if now is not None and now.rss - was.rss > limit:
            found.append(Problem("memory", f"{name}: {was.rss >> 20} MiB before, {now.rss >> 20} MiB after"))
        if now is not None and now.files - was.files > FILES_GROWTH:
            found.append(Problem("files", f"{name}: {was.files} open files before, {now.files} after"))
    return found


def recovery(at: float, arrivals: Iterable[Sequence[float]]) -> float | None:
    """How long the slowest stream that was under way at ``at`` waited for its next event; None: there was none."""
    waits = []
    for stream in arrivals:
        behind = bisect_right(stream, at)
        if 0 < behind < len(stream):
            waits.append(stream[behind] - at)
    return max(waits, default=None)
