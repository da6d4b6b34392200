"""Ending open answers whose request is over although the token stream has not brought its end.

Tokens are published without acknowledgement: the last of them can be lost with a broker's leader or with their worker's
lease, and then nobody sends them again once the terminal event is stored. That event has the whole output.
"""

from collections.abc import Iterable

import structlog

from gateway.log.inflight import Exchange
from gateway.log.records import Records, has_output
from schemas import done
from schemas.errors import Code, ServingError

log = structlog.get_logger("gateway")

LOOK_S = 1.0  # an answer without news for so long, and at most twice that, is looked up
AT_ONCE = 256


class Completion:
    """Call ``look`` often; it looks up open answers that had no news since it looked last."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._marks: dict[Exchange, tuple[int, ...]] = {}
        self._quiet: list[Exchange] = []  # to be looked up
        self._looked = 0.0

    async def look(self, exchanges: Iterable[Exchange], now: float) -> None:
        """
        Raises:
            ServingError: the log did not answer.
        """
        if now - self._looked >= LOOK_S and not self._quiet:
            self._looked = now
            marks = {exchange: exchange.fold.mark for exchange in exchanges if not (exchange.ended or exchange.paused)}
            self._quiet = [exchange for exchange, mark in marks.items() if self._marks.get(exchange) == mark]
            self._marks = marks
        batch, self._quiet = self._quiet[:AT_ONCE], self._quiet[AT_ONCE:]
        if not batch:
            return
        open_: dict[str, list[Exchange]] = {}
        for exchange in batch:
            open_.setdefault(exchange.request.id, []).append(exchange)
        for record in await self._records.ends([each[0].request for each in open_.values()]):
            for exchange in open_.get(record.request, ()):
                if not exchange.ended:
                    complete(exchange, record)


def complete(exchange: Exchange, record: done.Done) -> None:
    """Give an exchange whatever of its request's answer it does not have yet."""
    if has_output(record):
        log.info("answer_completed_from_record", request=record.request, tokens=record.usage.completion)
        exchange.complete(done.items(record))
    else:
        log.error("answer_lost", request=record.request, left_out=record.left_out)
        exchange.fail(ServingError(Code.internal, "the output did not fit into the request's record and was lost"))
