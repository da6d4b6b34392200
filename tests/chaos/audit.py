"""Whether every promise was kept: a judgement over what the log has and what the clients saw. Knows no broker."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.schemas.requests import cell_in
from tests.chaos.plan import BROKER, Act, Hit
from tests.chaos.recipes import NO_STORE
from tests.chaos.seen import Seen, Shown

LOGPROB = 0.02  # engines that compute add in another order in another batch
LATE_S = 1.0  # tokens that are stored so long after their request's terminal event are late
BEFORE_S = 15.0  # what a disturbance breaks is seen within this time: leases, elections, drains and resends
REFUSED_S = 15.0  # within which a request is refused or accepted, whatever the broker does
SLACK_S = 8.0  # of a loaded machine
GRACE_S = 30.0  # for which the answer of a request with no_store can be read
MINUTE_S = 60.0
FRONT = ("gateway", BROKER, "all")


class End(NamedTuple):
    """A terminal event. ``tokens``: packed, per choice; ``at``: Unix time at which it was stored.

    ``usage``: tokens of its prompt and its answer.
    """

    request: str
    code: str
    tokens: tuple[bytes, ...] = ()
    message: str = ""
    attempt: int = 1
    at: float = 0.0
    worker: str = ""
    left_out: tuple[str, ...] = ()
    usage: tuple[int, int] = (0, 0)


class Streamed(NamedTuple):
    """What the token stream has of a request: how many tokens by choice, without gaps, and when the last came."""

    counts: Mapping[int, int]
    at: float


class Log(msgspec.Struct):
    """What the log says once the load is over.

    Attributes:
        accepted: (request id, tag) of every accepted request.
        times: Unix time at which each was stored, by id.
        carried: requests of another cell that ran under an id of this one, and the ids that their clients know.
        streamed: the token stream, by request; None: it was not read.
        leases: tickets that are still open.
        held: what workers say that they still hold.
        residue: consumers, queues and tasks that nobody needs.
        astray: requests and terminal events in a cell that is not the one of their ids.
        on_disk: what must not be in the broker's files, and is.
        miscounted: where the ledger of usage differs from the records.
    """

    accepted: Sequence[tuple[str, str]] = ()
    ends: Sequence[End] = ()
    times: Mapping[str, float] = {}
    carried: Mapping[str, str] = {}
    streamed: Mapping[str, Streamed] | None = None
    astray: Sequence[str] = ()
    on_disk: Sequence[str] = ()
    miscounted: Sequence[str] = ()
    leases: Sequence[str] = ()
    held: Sequence[str] = ()
    residue: Sequence[str] = ()


class Expected(NamedTuple):
    """What one recipe comes to undisturbed. ``exact``: its tokens are always these, not only so many."""

    choices: Mapping[int, Shown]
    tokens: tuple[bytes, ...] = ()
    exact: bool = True


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


class Circumstances(NamedTuple):
    """What else there was.

    Attributes:
        hits: what was done, in the order of time.
        rpm: requests that a limited client's key has in any minute.
        cells: how many there are, each with a broker of its own.
    """

    hits: Sequence[Hit] = ()
    rpm: int = 0
    cells: int = 1

    def broker_of(self, request: str) -> str:
        """How the names of the brokers begin that may have this request; of home, and of none, all."""
        cell = cell_in(request) if request and self.cells > 1 else 0
        return f"{BROKER}-{cell}" if cell else BROKER

    def hit(self, names: Sequence[str], since: float, until: float, acts: Sequence[Act] = tuple(Act)) -> bool:
        """Whether something whose name, or its beginning, is one of these was disturbed in that time."""
        return any(
            each.act in acts and each.at <= until and each.at + each.hold_s >= since
            for each in self.hits
            if each.name.startswith(tuple(names))
        )

    def servers(self, since: float, until: float) -> set[str]:
        """Servers of a cluster that were disturbed in that time; none: the broker has no cluster."""
        if self.cells > 1:
            return set()
        return {
            each.name
            for each in self.hits
            if each.name.startswith(f"{BROKER}-") and each.at <= until and each.at + each.hold_s >= since
        }

    def paused_s(self, since: float, until: float) -> float:
        """For how much of that time a front process or the broker stood still, at most."""
        return sum(
            max(0.0, min(until, each.at + each.hold_s) - max(since, each.at))
            for each in self.hits
            if each.act in (Act.stop, Act.stall) and each.name.startswith(FRONT)
        )


UNDISTURBED = Circumstances()


def judge(
    seen: Sequence[Seen],
    log: Log,
    expected: Mapping[str, Expected],
    *,
    once: bool,
    around: Circumstances = UNDISTURBED,
) -> Judgement:
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
        row, wanted = rows[kind], expected.get(recipe, Expected({}))
        row["asked"] += 1
        row["accepted"] += len(requests[tag])
        row["again"] += sum(client.attached for client in clients)
        row["refused"] += sum(client.refused for client in clients)
        found = [problem for client in clients for problem in client_problems(client, wanted)]
        found += [problem for client in clients for problem in outcome_problems(client, log, ends, around)]
        found += [problem for client in clients for problem in usage_problems(client, ends)]
        found += record_problems(tag, clients, requests[tag], ends, wanted, once=once, around=around)
        late = [
            (end, how) for request in requests[tag] for end in ends[request][:1] if (how := lateness(end, log, kind))
        ]
        found += [
            Problem("unsaid", f"{how}, and neither the broker nor {end.worker} was disturbed", end.request)
            for end, how in late
            if not explains_lateness(end, around)
        ]
        for problem in found:
            problems.append(problem._replace(tag=tag, kind=kind))
        row.update({problem.what for problem in found})
        row["late"] += bool(late)
        for outcome in OUTCOMES:
            row[outcome] += all(client.outcome == outcome for client in clients)
        row["ok"] += not found
    known = {request for request, _ in log.accepted}
    deleted = {client.request for client in seen if client.outcome == "deleted"}
    problems += [
        Problem("extra", f"a terminal event ({end.code or 'ok'}) of a request that nobody made", request)
        for request, each in ends.items()
        if request not in known and request not in deleted and request not in log.carried
        for end in each
    ]
    problems += carried_problems(log, ends, known, deleted)
    strays = [(request, tag) for request, tag in log.accepted if tag not in by_tag]
    problems += [Problem("extra", "an accepted request of no client of ours", *stray) for stray in strays]
    problems += rate_problems(log, [tag for tag in by_tag if by_tag[tag][0].kind == "limited"], around.rpm)
    for what, lines in (
        ("lease", log.leases),
        ("held", log.held),
        ("residue", log.residue),
        ("astray", log.astray),
        ("kept", log.on_disk),
        ("usage", log.miscounted),
    ):
        problems += [Problem(what, line) for line in lines]
    return Judgement(dict(rows), problems)


def carried_problems(
    log: Log, ends: Mapping[str, Sequence[End]], known: Collection[str], deleted: Collection[str]
) -> Iterable[Problem]:
    """What is wrong with requests that ran in another cell, beside what their clients saw."""
    for request, origin in log.carried.items():
        if origin in deleted:
            yield Problem("kept", f"it was deleted, and ran in another cell as {request}, which is in the log", origin)
        elif origin not in known:
            yield Problem("extra", f"it runs in another cell for {origin}, which nobody made", request)
        if len(ends.get(request, ())) > 1:
            yield Problem("duplicated", f"{len(ends[request])} terminal events of {origin} in another cell", request)


# Ends of a client that are neither an answer nor a failure, and are counted.
OUTCOMES = ("cancelled", "deleted", "limited", "denied", "unknown")
KINDS_OF = {"deleted": ("delete",), "limited": ("limited",), "denied": ("denied",)}


def client_problems(seen: Seen, expected: Expected) -> Iterable[Problem]:
    """What is wrong with what one client saw."""
    if seen.outcome in ("hung", ""):
        yield Problem("hung", f"no end; {_so_far(seen)}", seen.request)
    if seen.repeats:
        yield Problem("duplicated", f"{seen.repeats} events came again or went back", seen.request)
    if seen.holes:
        yield Problem("hole", f"{seen.holes} gaps in the numbers of the messages", seen.request)
    for index, shown in seen.choices.items():
        wanted = expected.choices.get(index, Shown())
        if seen.outcome in ("answered", "deleted"):
            if shown.text != wanted.text:
                yield Problem("wrong", f"choice {index}: {difference(wanted.text, shown.text)}", seen.request)
            elif shown.finish != wanted.finish:
                yield Problem("wrong", f"choice {index}: ended by {shown.finish}, not {wanted.finish}", seen.request)
            elif not alike(shown.logprobs, wanted.logprobs):
                yield Problem("wrong", f"choice {index}: other log-probabilities", seen.request)
        elif not wanted.text.startswith(shown.text):
            yield Problem("wrong", f"choice {index}: {difference(wanted.text, shown.text)}", seen.request)


def usage_problems(seen: Seen, ends: Mapping[str, Sequence[End]]) -> Iterable[Problem]:
    """What one client was told that it used is what its record has."""
    if seen.usage is not None and seen.outcome == "answered":
        for end in ends.get(seen.request, ())[:1]:
            if seen.usage != end.usage:
                yield Problem("usage", f"its client was told {seen.usage}, its record has {end.usage}", seen.request)


def miscounted(before: Mapping[str, int], after: Mapping[str, int], deleted: int, most_deleted: int) -> Iterable[str]:
    """Where the ledger differs from the records: it has what was deleted, too, and nothing else.

    Args:
        before, after: by what is counted, how much more the ledger has than the records.
        deleted, most_deleted: requests that were deleted meanwhile: at least, and at most.
    """
    more = {name: after[name] - before[name] for name in after}
    if not deleted <= more["requests"] <= most_deleted:
        wanted = deleted if deleted == most_deleted else f"{deleted} to {most_deleted}"
        yield f"the ledger has {more['requests']} requests more than the records; {wanted} were deleted"
    for name, count in more.items():
        if name != "requests" and (count < 0 or (count and not most_deleted)):
            yield f"the ledger has {count} {name} more than the records"


def outcome_problems(
    seen: Seen, log: Log, ends: Mapping[str, Sequence[End]], around: Circumstances
) -> Iterable[Problem]:
    """What is wrong with how it ended for one client: each exception needs its cause."""
    if seen.outcome == "failed" and not _may_be_lost(seen, ends, around):
        yield Problem("failed", f"{seen.code}: {seen.message}; {_so_far(seen)}", seen.request)
    if seen.kind not in KINDS_OF.get(seen.outcome, (seen.kind,)):
        yield Problem("failed", f"{seen.outcome}, as which this client must never end", seen.request)
    if seen.kind == "denied" and seen.outcome not in ("denied", "unknown"):
        yield Problem("admitted", f"without a valid key, it was {seen.outcome}", seen.request)
    # Its connection broke, which only a gateway's fault excuses; or its acceptance was not confirmed, the broker's.
    causes = FRONT if seen.left else ("gateway", "all")
    if seen.outcome == "unknown" and not around.hit(causes, seen.ended - REFUSED_S - BEFORE_S, seen.ended):
        yield Problem("broken", f"nobody can tell its fate, and nothing was disturbed: {_so_far(seen)}", seen.request)
    allowed_s = REFUSED_S + SLACK_S + around.paused_s(seen.began, seen.ended)
    if seen.refusal_s > allowed_s:
        yield Problem("slow", f"refused after {seen.refusal_s:.1f} s, not within {REFUSED_S:g} s", seen.request)


def _may_be_lost(seen: Seen, ends: Mapping[str, Sequence[End]], around: Circumstances) -> bool:
    """Of a request with no_store: what only memory had is gone with both gateway and broker, or after its grace."""
    if seen.kind not in NO_STORE:
        return False
    if seen.code == "request_erased":
        return any(seen.ended - end.at > GRACE_S - 1 for end in ends.get(seen.request, ()))
    return seen.code == "content_lost" and _died_together(seen, seen.ended, around)


def _died_together(seen: Seen, until: float, around: Circumstances) -> bool:
    """Whether a gateway and what was in memory died since the request was asked: together, or one before the other.

    A server alone loses its memory with its process. Of a cluster, one server must have died while another was away,
    or had not caught up yet.
    """
    deadly, since = (Act.kill, Act.restart, Act.roll, Act.crash, Act.fill), seen.began - BEFORE_S
    if around.hit(("all",), since, until, deadly):
        return True
    if not around.hit((around.broker_of(seen.request),), since, until, deadly) or not around.hit(
        ("gateway",), since, until, deadly
    ):
        return False
    return len(around.servers(since - BEFORE_S, until)) != 1


def record_problems(
    tag: str,
    clients: Sequence[Seen],
    requests: Sequence[str],
    ends: Mapping[str, Sequence[End]],
    expected: Expected,
    *,
    once: bool,
    around: Circumstances = UNDISTURBED,
) -> Iterable[Problem]:
    """What is wrong with what the log has of one question."""
    kind, outcomes = clients[0].kind, {client.outcome for client in clients}
    if "deleted" in outcomes:
        if requests or any(ends.get(client.request) for client in clients):
            yield Problem("kept", "it was deleted, and is in the log", clients[0].request)
        return
    # Whoever was told an id, or got an answer, was accepted: also a client that left, and one that cannot know.
    told = [client for client in clients if client.request or client.outcome in ("answered", "hung")]
    if told and not requests:
        yield Problem(
            "missing", f"a client was {told[0].outcome or 'asking'}, and the log has no request", told[0].request
        )
    if requests and outcomes <= {"denied", "limited"}:
        yield Problem("extra", f"{'+'.join(outcomes)}, and accepted all the same", requests[0])
    if once and len(requests) > 1:
        yield Problem("duplicated", f"accepted {len(requests)} times: {', '.join(requests)}", requests[0])
    left = any(client.left or client.outcome == "cancelled" for client in clients)
    failed = [client for client in clients if client.outcome == "failed"]
    reported = {client.code for client in failed}
    excused = {client.request for client in failed if _may_be_lost(client, ends, around)}
    denied = {client.request: client.code or "no end" for client in clients if client.outcome in ("failed", "hung")}
    for request in requests:
        found = ends.get(request, ())
        if not found:
            yield Problem("missing", "no terminal event", request)
        elif len(found) > 1:
            codes = ", ".join(end.code or "ok" for end in found)
            yield Problem("duplicated", f"{len(found)} terminal events: {codes}", request)
        for end in found[:1]:
            if not end.code and request in denied and request not in excused:
                yield Problem("lost", f"its record is ok, and a client got {denied[request]}", request)
            lost = kind in NO_STORE and end.code == "content_lost" and _died_together(clients[0], end.at, around)
            if end.code and not (left and end.code == "cancelled") and end.code not in reported and not lost:
                yield Problem("failed", f"ended with {end.code}: {end.message} (attempt {end.attempt})", request)
            yield from _token_problems(end, expected)


def _token_problems(end: End, expected: Expected) -> Iterable[Problem]:
    if "tokens" in end.left_out:  # too large for its record, or not to be kept
        if any(end.tokens):
            yield Problem("kept", "its record has tokens that it says it lacks", end.request)
        return
    if not end.code and len(end.tokens) != len(expected.tokens):
        yield Problem("wrong", f"record: {len(end.tokens)} choices, not {len(expected.tokens)}", end.request)
    for index, (tokens, wanted) in enumerate(zip(end.tokens, expected.tokens, strict=False)):
        # The record of a request that failed has a part of its tokens.
        same = tokens == wanted if expected.exact else len(tokens) == len(wanted)
        if not same and not (end.code and (not expected.exact or wanted.startswith(tokens))):
            have, want = len(tokens) // 4, len(wanted) // 4
            yield Problem(
                "wrong", f"record, choice {index}: {have} tokens that are not the {want} expected", end.request
            )


def lateness(end: End, log: Log, kind: str) -> str:
    """How the tokens of an answer came too late, or never, so that only its record completes it; "": they did not."""
    if log.streamed is None or end.code or kind in NO_STORE or "tokens" in end.left_out:
        return ""
    came = log.streamed.get(end.request, Streamed({}, 0.0))
    lacking = sum(max(0, len(tokens) // 4 - came.counts.get(at, 0)) for at, tokens in enumerate(end.tokens))
    if lacking:
        return f"{lacking} tokens never came"
    late_s = came.at - end.at
    return f"its last token came {late_s:.1f} s after its end" if late_s > LATE_S else ""


def explains_lateness(end: End, around: Circumstances) -> bool:
    """Whether the broker or its worker was disturbed about then."""
    since, until = end.at - BEFORE_S, end.at + BEFORE_S
    return any(
        each.at <= until and each.at + each.hold_s >= since
        for each in around.hits
        if each.name.startswith((around.broker_of(end.request), "all")) or end.worker.startswith(each.name)
    )


def rate_problems(log: Log, tags: Sequence[str], rpm: int) -> list[Problem]:
    """Whether more requests of a limited key were accepted in any minute than it has."""
    limited = set(tags)
    times = sorted(log.times[request] for request, tag in log.accepted if tag in limited and request in log.times)
    most = max((bisect_right(times, at + MINUTE_S) - n for n, at in enumerate(times)), default=0)
    return [Problem("admitted", f"{most} requests in a minute, of a key with {rpm}")] if rpm and most > rpm else []


def later_problems(
    request: str, choices: Mapping[int, Shown], expected: Expected, called: str = ""
) -> Iterable[Problem]:
    """What is wrong with an answer that was asked for again by its id, after its end.

    Args:
        called: the function that it calls. Of a call that was cut off, a stream has the beginning and a whole answer
            the text.
    """
    for index, wanted in expected.choices.items():
        shown = choices.get(index, Shown())
        cut_off = called and wanted.finish == "length" and wanted.text.removeprefix(called) in shown.text
        if shown.finish != wanted.finish or (shown.text != wanted.text and not cut_off):
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
    """Resident memory and open files of one process; ``kinds``: the files by what they are."""

    pid: int
    rss: int
    files: int = 0
    kinds: Mapping[str, int] = {}


GROWTH = {"gateway": 40 << 20, "router": 40 << 20}  # bytes; of workers, whose engines have caches:
WORKER_GROWTH = 80 << 20
FILES_GROWTH = 40


def memory_problems(before: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> list[Problem]:
    """Processes that are larger, or have more open files, than the ones of their names before by more than they may.

    Brokers' memory is judged by what they refer to (``brokers.heap_problems``): most of it is garbage.
    """
    found = []
    for name, was in before.items():
        now = after.get(name)
        limit = GROWTH.get(name.partition("-")[0], WORKER_GROWTH)
        if now is not None and not name.startswith(BROKER) and now.rss - was.rss > limit:
            found.append(Problem("memory", f"{name}: {was.rss >> 20} MiB before, {now.rss >> 20} MiB after"))
        if now is not None and now.files - was.files > FILES_GROWTH:
            more = {kind: number - was.kinds.get(kind, 0) for kind, number in now.kinds.items()}
            words = ", ".join(f"{number:+} {kind}" for kind, number in sorted(more.items()) if number > 0)
            found.append(Problem("files", f"{name}: {was.files} open files before, {now.files} after: {words}"))
    return found


def recovery(at: float, arrivals: Iterable[Sequence[float]]) -> float | None:
    """How long the slowest stream that was under way at ``at`` waited for its next event; None: there was none."""
    waits = []
    for stream in arrivals:
        behind = bisect_right(stream, at)
        if 0 < behind < len(stream):
            waits.append(stream[behind] - at)
    return max(waits, default=None)
