"""Monthly budgets of API keys and tenants, compared with the tokens in the ledgers of all cells.

Ledgers count ended requests once a second. New requests are refused within two seconds after a budget was spent.
Requests that are running at that moment may exceed it.
"""

import asyncio
import datetime
import time
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.gateway.access.authentication import Caller
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.schemas import usage
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey
from penstock.schemas.tenants import Limits
from penstock.schemas.usage import UsagePart, month_of

log = structlog.get_logger("gateway")

FOLLOW_AGAIN_S = 5.0
READ_S = 30.0  # a gateway that cannot read the ledgers in this time serves without budgets

_Spent = Counter[tuple[int, str, str]]  # tokens by start of the month (Unix time), kind and name


class SpentInCell:
    """The tokens in the ledger of a cell, by month."""

    def __init__(self, since_s: int) -> None:
        self.since_s = since_s  # earlier months are ignored
        self.spent = _Spent()
        self._open: dict[int, _Spent] = {}  # of open parts, by number
        self._closed = 0  # number of the last closed part

    def push(self, part: UsagePart) -> None:
        """Add a part, in stored order; it replaces an earlier revision of itself."""
        if part.number <= self._closed:
            return
        now = _Spent()
        for row in part.rows:
            month, _ = usage.interval(row.hour, "month")
            if month >= self.since_s:
                now[month, "tenant", row.tenant] += row.tokens
                now[month, "key", row.key] += row.tokens
        self.spent.subtract(self._open.pop(part.number, {}))
        self.spent.update(now)
        if part.closed:
            self._closed = part.number
        else:
            self._open[part.number] = now

    def clear(self) -> None:
        self.spent.clear()
        self._open.clear()
        self._closed = 0

    def forget_before(self, month_s: int) -> None:
        self.since_s = month_s
        for at in [at for at in self.spent if at[0] < month_s]:
            del self.spent[at]


class Budgets:
    """
    Args:
        keys: by id.
        tenants: all tenants except the default one.
        now_ns: Unix time.

    Attributes:
        reached: kind and name of the keys and tenants whose budgets are spent.
    """

    def __init__(self, keys: Mapping[str, ApiKey], tenants: Mapping[str, Limits], now_ns: Callable[[], int]) -> None:
        self._keys = keys
        self._tenants = tenants
        self._now_ns = now_ns
        self._cells: list[SpentInCell] = []
        self._tails: list[LogTail] = []
        self._followed: list[Bus] = []
        self._unread: dict[
            Bus, float
        ] = {}  # cells whose ledger is not read yet, and the time of the first try (monotonic)
        self.reached: frozenset[tuple[str, str]] = frozenset()

    def look(self) -> None:
        """Compare the spent tokens with the budgets. Call it a few times a second."""
        limits = {("key", key.prefix): key.tokens_per_month for key in self._keys.values() if key.tokens_per_month}
        limits |= {("tenant", name): each.tokens_per_month for name, each in self._tenants.items()}
        month, _ = month_of(self._now_ns())
        self.reached = frozenset(
            (kind, name) for (kind, name), limit in limits.items() if limit and self._spent(month, kind, name) >= limit
        )
        for cell in self._cells:
            if cell.since_s < month:
                cell.forget_before(month)

    def spent(self, kind: str, name: str) -> int:
        """Tokens of prompts and answers in this month. ``kind``: "key" or "tenant"."""
        return self._spent(month_of(self._now_ns())[0], kind, name)

    def _spent(self, month: int, kind: str, name: str) -> int:
        return sum(cell.spent[month, kind, name] for cell in self._cells)

    def unread(self, now: float) -> bool:
        """Whether there are budgets but the spent tokens are not known yet; False after ``READ_S`` in any case.

        Args:
            now: monotonic.
        """
        if not any(now - since < READ_S for since in self._unread.values()):
            return False
        limited = (self._keys.values(), self._tenants.values())
        return any(each.tokens_per_month for limits in limited for each in limits)

    def check(self, caller: Caller) -> None:
        """
        Raises:
            ServingError: insufficient_quota.
        """
        key, tenant = caller.key, caller.tenant
        if key is not None and ("key", key.prefix) in self.reached:
            self._check("key", key.prefix, f"the API key {key.prefix}", key.tokens_per_month)
        limits = self._tenants.get(tenant)
        if limits is not None and ("tenant", tenant) in self.reached:
            self._check("tenant", tenant, f"the tenant {tenant!r}", limits.tokens_per_month)

    def _check(self, kind: str, name: str, who: str, limit: int) -> None:
        now_ns, spent = self._now_ns(), self.spent(kind, name)
        if not limit or spent < limit:  # the month or the budget has changed since the last comparison
            return
        _, reset_s = month_of(now_ns)
        at = datetime.datetime.fromtimestamp(reset_s, datetime.UTC)
        raise ServingError(
            Code.insufficient_quota,
            f"{who} has used {spent} tokens of its budget of {limit} this month, which ends "
            f"{at:%Y-%m-%d %H:%M} UTC; ask for a larger budget (`penstock {kind}s` sets --monthly-tokens) or wait",
            retry_after=max(1.0, reset_s - now_ns / 1e9),
        )

    # --- the ledgers ---

    async def follow(self, bus: Bus) -> None:
        """Read a cell's ledger and follow it, as soon as it can be read.

        Later calls for the same cell do nothing: a cell may be opened several times, but must be counted once.
        """
        if any(each is bus for each in self._followed):
            return
        self._followed.append(bus)
        self._unread[bus] = time.monotonic()
        cell = SpentInCell(month_of(self._now_ns())[0])

        def read(entry: Entry) -> None:
            try:
                cell.push(usage.decode(entry.data))
            except msgspec.MsgspecError as error:
                log.warning("usage_unreadable", subject=entry.subject, error=str(error))

        subjects, logged = bus.subjects, False
        tail = LogTail(bus, subjects.stream("USAGE"), subjects.all("usage"), read, cell.clear)
        while True:
            try:
                await tail.start(since_ns=cell.since_s * 1_000_000_000)
                break
            except (ServingError, NatsError, OSError, TimeoutError) as error:
                cell.clear()
                if not logged:
                    why = str(error) or repr(error)
                    log.warning("budgets_unknown", error=why, action="run `penstock streams apply`")
                logged = True
                await asyncio.sleep(FOLLOW_AGAIN_S)
        self._tails.append(tail)
        self._cells.append(cell)
        self.look()
        del self._unread[bus]

    async def close(self) -> None:
        for tail in self._tails:
            await tail.stop()
