"""The result as text: one table of counts, kills and recovery times, and what was broken."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from tests.chaos.audit import OUTCOMES, Footprint, Judgement
from tests.chaos.plan import Hit

COLUMNS = (
    *("asked", "accepted", "ok", *OUTCOMES, "failed", "lost", "wrong", "missing", "duplicated", "hole", "hung"),
    *("kept", "admitted", "unsaid", "late", "broken", "slow", "again", "refused"),
)
ALWAYS = ("asked", "accepted", "ok", "unknown", "failed", "lost", "wrong", "missing", "duplicated", "hung", "late")
MOST = 40  # problems that are printed


def counts(judgement: Judgement) -> str:
    """A row for each class of clients, and their sum."""
    rows = dict(sorted(judgement.rows.items()))
    total: Counter[str] = sum(rows.values(), Counter())
    columns = [column for column in COLUMNS if total[column] or column in ALWAYS]
    return _table(
        ("class", *columns),
        [(name, *(str(row[c]) for c in columns)) for name, row in [*rows.items(), ("all", total)]],
    )


def disturbances(hits: Sequence[Hit], waits: Sequence[float | None]) -> str:
    """By what was done to what: how often, and how long the slowest stream under way waited for its next event."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    number: Counter[tuple[str, str]] = Counter()
    for hit, wait in zip(hits, waits, strict=True):
        key = (hit.act.value, hit.name.rpartition("-")[0] or hit.name)
        number[key] += 1
        if wait is not None:
            groups[key].append(wait)
    rows = []
    for key in sorted(number):
        found = sorted(groups[key])
        times = (f"{found[len(found) // 2]:.2f} s", f"{found[-1]:.2f} s") if found else ("", "")
        rows.append((*key, str(number[key]), *times))
    return _table(("act", "process", "times", "next event p50", "max"), rows)


def memory(before: Mapping[str, Footprint], most: Mapping[str, int], after: Mapping[str, Footprint]) -> str:
    """Resident memory; ``most`` was seen under load."""
    rows = []
    for name in sorted(before):
        was, now = before[name], after.get(name)
        sizes = (was.rss, max(most.get(name, 0), was.rss), now.rss if now is not None else 0)
        same = "yes" if now is not None and now.pid == was.pid else "no"
        rows.append((name, *(f"{size / 2**20:.0f} MiB" for size in sizes), same))
    return _table(("process", "before", "most", "after", "the same"), rows)


def heaps(before: Mapping[str, int], after: Mapping[str, int], stored: int) -> str:
    """What brokers refer to."""
    rows = []
    for name, was in sorted(before.items()):
        more = (after.get(name, 0) - was) / max(1, stored)
        rows.append((name, f"{was / 2**20:.1f} MiB", f"{after.get(name, 0) / 2**20:.1f} MiB", f"{more:.0f}"))
    return _table(("broker in use", "before", "after", "bytes a request"), rows)


def builds(starts: Mapping[tuple[str, str], int]) -> str:
    """How often each kind of process was started, by build."""
    names = sorted({name for name, _ in starts})
    return _table(
        ("starts of", "this build", "the other"),
        [(name, str(starts.get((name, "this"), 0)), str(starts.get((name, "other"), 0))) for name in names],
    )


def problems(judgement: Judgement) -> str:
    lines = [f"{p.what:<10} {p.kind:<10} {p.request or '-':<36} {p.tag}  {p.text}" for p in judgement.problems[:MOST]]
    if (more := len(judgement.problems) - MOST) > 0:
        lines.append(f"... and {more} more")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
