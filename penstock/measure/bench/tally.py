"""What one stage of ``penstock bench http`` saw."""

from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

from penstock.measure.generator.exchange import Exchange

_MOST_REASONS = 20


@dataclass(slots=True)
class Tally:
    """What one stage of a benchmark saw; times in seconds."""

    first_s: "array[float]" = field(default_factory=lambda: array("d"))  # to the first text
    between_s: "array[float]" = field(default_factory=lambda: array("d"))  # between reads that carried text
    total_s: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: int = 0
    events: int = 0  # server-sent events but [DONE]
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """Answered as they should be."""
        return len(self.total_s)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def clear(self) -> None:
        for series in (self.first_s, self.between_s, self.total_s):
            del series[:]
        self.tokens = self.events = 0
        self.errors.clear()

    def copy(self) -> "Tally":
        return replace(
            self,
            first_s=self.first_s[:],
            between_s=self.between_s[:],
            total_s=self.total_s[:],
            errors=self.errors.copy(),
        )

    def fail(self, reason: str) -> None:
        counted = reason in self.errors or len(self.errors) < _MOST_REASONS
        self.errors[reason if counted else "other"] += 1

    def count(self, exchange: Exchange, expected_tokens: int) -> None:
        """Count a finished request. An answer with an unexpected number of tokens is an error."""
        if exchange.error:
            self.fail(exchange.error)
        elif exchange.output_tokens < 0:
            self.fail("answer without usage")
        elif exchange.output_tokens != expected_tokens:
            self.fail(f"{exchange.output_tokens} tokens instead of {expected_tokens}")
        else:
            self.tokens += exchange.output_tokens
            self.events += exchange.events
            self.total_s.append(exchange.ended - exchange.sent)
            self.between_s.extend(exchange.gaps_s)
            if exchange.first:
                self.first_s.append(exchange.first - exchange.sent)
