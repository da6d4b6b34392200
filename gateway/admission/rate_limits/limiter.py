"""The limits of API keys and tenants at this gateway: requests and tokens per minute, and a key's requests at a time.

They hold over all gateways and both APIs together.

A request is usually paid from what this gateway has at hand. Else one compare-and-set in the ``budgets`` bucket takes
more, for all requests that wait. A refusal needs no message: the bucket is followed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.gateway.admission.rate_limits.account import (
    EMPTY,
    Account,
    Amount,
    Reservation,
    free,
    seconds_until,
    seconds_until_reset,
    taken,
)
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE, compare_and_set
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import Ledger, Limited, decode_ledger
from penstock.schemas.wire import encode

log = structlog.get_logger("gateway")

SWEEP_S = 1.0
WITHIN_S = 5.0
ELECTED_S = 9.0  # in a cluster, whose bucket may have no leader for so long: restarts of its servers refuse no request
TRIES = 20  # compare-and-sets of one request; each that fails means that another gateway's has succeeded
SLOT_NS = 250_000_000  # how long a request waits for a slot that is being given up
LOOK_S = 0.02
MAX_LOOKING = 64  # such requests of one key
KEEP_S = 300  # an entry that does not change expires

_NONE = (EMPTY, 0)


class PaidPart(NamedTuple):
    """What a request has been given, and of which account."""

    account: Account
    reservation: Reservation


Paid = tuple[PaidPart, ...]


class LimitStanding(NamedTuple):
    """How much of a limit is left; ``reset_s``: until nothing counts any more."""

    limit: int
    remaining: int
    reset_s: int


class _Totals(NamedTuple):
    """Of one revision of a ledger in one second: what counts, and until nothing does."""

    revision: int
    second: int
    requests: int
    tokens: int
    requests_s: int
    tokens_s: int


class Limiter:
    """
    Args:
        gateway: id of this gateway.
    """

    def __init__(self, bus: Bus, gateway: str, clock: Callable[[], int] = time.time_ns) -> None:
        bucket = bus.subjects.bucket("budgets")
        self._stream, self._prefix = f"KV_{bucket}", f"$KV.{bucket}."
        self._tail = LogTail.of_bucket(bus, "budgets", self._on_entry)
        self._bus = bus
        self._gateway = gateway
        self._clock = clock
        self._ledgers: dict[str, tuple[Ledger, int]] = {}  # and revision
        self._totals: dict[str, _Totals] = {}
        self._accounts: dict[str, Account] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: Tasks | None = None

    async def open(self, tasks: Tasks) -> None:
        """
        Raises:
            ServingError: the bucket cannot be read.
        """
        await self._tail.start()
        self._tasks = tasks
        tasks.spawn(self._sweep(), name="sweep-budgets")

    async def close(self) -> None:
        await self._tail.stop()

    # --- requests ---

    async def reserve(self, limited: Sequence[Limited], tokens: int) -> Paid:
        """Take a request, its tokens and its slot out of all of these limits, or out of none.

        Raises:
            ServingError: rate_limit_exceeded; broker_unavailable: the limits cannot be checked.
        """
        paid: Paid = ()
        try:
            for by in limited:
                if tokens > by.tokens > 0:
                    raise ServingError(
                        Code.rate_limit_exceeded,
                        f"the request may take {tokens} tokens, prompt and max_tokens; {by.who} has {by.tokens} per "
                        "minute: lower max_tokens",
                        param="max_tokens",
                    )
                account = self._account(by)
                paid += (PaidPart(account, await self._taken(by, account, tokens)),)
        except BaseException:
            self.undo(paid)
            raise
        return paid

    def pay(self, limited: Sequence[Limited], tokens: int) -> Paid | None:
        """As ``reserve``, from what is at hand; None: that is too little."""
        paid: Paid = ()
        for by in limited:
            account = self._account(by)
            reservation = None if tokens > by.tokens > 0 else account.take(tokens, self._clock())
            if reservation is None:
                self.undo(paid)
                return None
            paid += (PaidPart(account, reservation),)
        return paid

    def check(self, limited: Sequence[Limited]) -> None:
        """Refuse early, before a body is read, what would be refused later.

        Raises:
            ServingError: rate_limit_exceeded.
        """
        for by in limited:
            if by.ledger in self._accounts:
                account = self._account(by)
                if not account.has(1, self._clock()):
                    self._check_free(by, account, Amount(bool(by.requests), bool(by.tokens)))

    def settle(self, paid: Paid, used_tokens: int) -> None:
        """The request has ended; it took this many tokens, its prompt included."""
        for account, reservation in paid:
            account.settle(reservation, used_tokens, self._clock())
            self._give_up(account)

    def undo(self, paid: Paid) -> None:
        """The request was not accepted after all."""
        for account, reservation in paid:
            account.undo(reservation, self._clock())
            self._give_up(account)

    def standing(self, limited: Sequence[Limited]) -> tuple[LimitStanding, LimitStanding]:
        """Of requests and of tokens per minute: of several limits the one of which less is left."""
        requests, tokens = self._standing(limited[0])
        for by in limited[1:]:
            more = self._standing(by)
            requests, tokens = _tighter(requests, more[0]), _tighter(tokens, more[1])
        return requests, tokens

    def _standing(self, by: Limited) -> tuple[LimitStanding, LimitStanding]:
        now_ns = self._clock()
        now_s = now_ns // 1_000_000_000
        account, (ledger, revision) = self._account(by), self._ledgers.get(by.ledger, _NONE)
        totals = self._totals.get(by.ledger)
        if totals is None or totals.revision != revision or totals.second != now_s:
            totals = self._totals[by.ledger] = _totals(ledger, revision, now_s)
        unspent, requests, tokens = account.unspent(now_ns), by.requests, by.tokens
        return (
            LimitStanding(
                requests, min(requests, max(0, requests - totals.requests) + unspent.requests), totals.requests_s
            ),
            LimitStanding(tokens, min(tokens, max(0, tokens - totals.tokens) + unspent.tokens), totals.tokens_s),
        )

    # --- the bucket ---

    @property
    def _within_s(self) -> float:
        return ELECTED_S if self._bus.clustered else WITHIN_S

    async def _taken(self, by: Limited, account: Account, tokens: int) -> Reservation:
        need = Amount(bool(by.requests), tokens if by.tokens else 0, bool(by.slots))
        if need.slots:
            await self._slot(by, account)
        self._check_free(by, account, need)
        _wait(account, need, 1)
        try:
            async with asyncio.timeout(self._within_s), self._lock(by.ledger):
                for _ in range(TRIES):
                    reservation = account.take(tokens, self._clock())
                    if reservation is not None:
                        return reservation
                    self._check_free(by, account, need)
                    await self._change(by.ledger, account)
        except TimeoutError:
            pass
        finally:
            _wait(account, need, -1)
        message = f"the limits of {by.who} cannot be checked now; try again"
        raise ServingError(Code.broker_unavailable, message, retry_after=1.0)

    async def _slot(self, by: Limited, account: Account) -> None:
        """Wait a moment if all slots are taken: another gateway gives a slot up only after its answer has ended."""
        until = self._clock() + SLOT_NS
        if self._slots_taken(by, account) and account.looking < min(by.slots, MAX_LOOKING):
            account.looking += 1
            try:
                while self._slots_taken(by, account) and self._clock() < until:  # noqa: ASYNC110 - bounded
                    await asyncio.sleep(LOOK_S)
            finally:
                account.looking -= 1

    def _slots_taken(self, by: Limited, account: Account) -> bool:
        ledger, _ = self._ledgers.get(by.ledger, _NONE)
        return free(ledger, account.limits, self._gateway, self._clock()).slots <= account.open

    def _check_free(self, by: Limited, account: Account, need: Amount) -> None:
        """
        Raises:
            ServingError: rate_limit_exceeded: as the ledger is, this cannot be given.
        """
        now_ns = self._clock()
        now_s = now_ns // 1_000_000_000
        ledger, _ = self._ledgers.get(by.ledger, _NONE)
        left, unspent, limits = (
            free(ledger, account.limits, self._gateway, now_ns),
            account.unspent(now_ns),
            account.limits,
        )
        if left.slots < account.open + need.slots and limits.slots:
            raise _refused(by, f"{limits.slots} requests at a time", 1)
        for what, limit, had, needed, charges in (
            ("requests", limits.requests, left.requests + unspent.requests, need.requests, ledger.requests),
            ("tokens", limits.tokens, left.tokens + unspent.tokens, need.tokens, ledger.tokens),
        ):
            if limit and had < needed:
                after_s = seconds_until(charges, limit, needed, now_s)
                raise _refused(by, f"{limit} {what} per minute", max(1, after_s))

    async def _change(self, key_id: str, account: Account) -> bool:
        """One compare-and-set. If another gateway was faster, the ledger is read, and nothing else changes.

        Returns: whether it was stored.
        Raises:
            ServingError: the broker does not answer.
        """
        ledger, revision = self._ledgers.get(key_id, _NONE)
        proposal = account.propose(ledger, self._clock())
        subject, value = self._prefix + key_id, encode(proposal.ledger)
        try:
            reply = await compare_and_set(self._bus.nc, subject, value, revision, self._within_s, ttl_s=KEEP_S)
        except (NatsError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            account.gave_back(proposal)  # it may be stored nevertheless
            raise _unavailable(repr(error)) from None
        except asyncio.CancelledError:
            account.gave_back(proposal)
            raise
        if reply.error is None:
            account.stored(proposal)
            if reply.seq > self._ledgers.get(key_id, _NONE)[1]:
                self._ledgers[key_id] = (proposal.ledger, reply.seq)
            return True
        if reply.error.err_code != WRONG_LAST_SEQUENCE:
            raise _unavailable(str(reply.error))
        entry = await get_last(self._bus, self._stream, subject, newest=True, within_s=self._within_s)
        self._ledgers.pop(key_id, None)
        if entry is not None:
            self._on_entry(entry)
        return False

    def _on_entry(self, entry: Entry) -> None:
        key_id = entry.subject.removeprefix(self._prefix)
        if entry.seq <= self._ledgers.get(key_id, _NONE)[1]:
            return
        try:
            self._ledgers[key_id] = (decode_ledger(entry.data) if entry.data else EMPTY, entry.seq)
        except msgspec.MsgspecError as error:
            log.warning("budget_unreadable", key=key_id, error=str(error))
            self._ledgers[key_id] = (EMPTY, entry.seq)

    # --- upkeep ---

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_ns = self._clock()
            for key_id, account in list(self._accounts.items()):
                if account.sweep(now_ns):
                    self._spawn(self._flush(key_id, account))
                elif account.idle and not self._lock(key_id).locked():
                    del self._accounts[key_id], self._locks[key_id]
                    self._totals.pop(key_id, None)
            for key_id in [key_id for key_id, (ledger, _) in self._ledgers.items() if ledger == EMPTY]:
                if key_id not in self._accounts:
                    del self._ledgers[key_id]

    async def _flush(self, key_id: str, account: Account) -> None:
        """Give back what is not used, and renew the share of requests at a time."""
        try:
            async with asyncio.timeout(self._within_s), self._lock(key_id):
                for _ in range(TRIES):
                    if await self._change(key_id, account) and not account.gives_up_slots:
                        return
        except (ServingError, TimeoutError) as error:
            log.debug("budget_not_given_back", key=key_id, error=repr(error))  # the next sweep tries again

    def _give_up(self, account: Account) -> None:
        if account.slots and account.gives_up_slots and not account.flushing:
            account.flushing = True
            self._spawn(self._give_up_soon(account))

    async def _give_up_soon(self, account: Account) -> None:
        account.flushing = False
        if account.gives_up_slots:
            await self._flush(account.key_id, account)

    def _spawn(self, work: Awaitable[None]) -> None:
        assert self._tasks is not None
        self._tasks.spawn(work, name="budgets")  # type: ignore[arg-type]

    def _account(self, by: Limited) -> Account:
        account = self._accounts.get(by.ledger)
        if account is None:
            account = self._accounts[by.ledger] = Account(by.ledger, self._gateway, Amount())
            self._locks[by.ledger] = asyncio.Lock()
        if account.by is not by:  # it was made or changed, or is that of another key of a tenant
            account.by, account.limits = by, Amount(by.requests, by.tokens, by.slots)
        return account

    def _lock(self, key_id: str) -> asyncio.Lock:
        return self._locks[key_id]


def _totals(ledger: Ledger, revision: int, now_s: int) -> _Totals:
    return _Totals(
        revision,
        now_s,
        taken(ledger.requests, now_s),
        taken(ledger.tokens, now_s),
        seconds_until_reset(ledger.requests, now_s),
        seconds_until_reset(ledger.tokens, now_s),
    )


def _wait(account: Account, need: Amount, sign: int) -> None:
    waiting = account.waiting
    account.waiting = Amount(
        waiting.requests + sign * need.requests, waiting.tokens + sign * need.tokens, waiting.slots + sign * need.slots
    )


def _tighter(one: LimitStanding, other: LimitStanding) -> LimitStanding:
    """That of which less is left; one without a limit leaves everything."""
    return min((each for each in (one, other) if each.limit), key=lambda each: each.remaining, default=one)


def _refused(by: Limited, limit: str, after_s: int) -> ServingError:
    return ServingError(
        Code.rate_limit_exceeded,
        f"{by.who} has reached its limit of {limit}; try again in {after_s} s",
        retry_after=float(after_s),
    )


def _unavailable(why: str) -> ServingError:
    return ServingError(
        Code.broker_unavailable, f"the broker does not confirm the limits ({why}); try again", retry_after=1.0
    )
