"""One request of a load generator, and the measurements of its answer."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Exchange:
    """Times come from ``time.perf_counter``; 0.0 means that it did not happen.

    Attributes:
        request: the bytes to send, headers included.
        done: called once, when the answer is complete or has failed.
        key: identifies the request for the caller.
        due: when it should have been sent; 0.0: as soon as possible.
        sent: when its bytes were written.
        first: when the first text arrived.
        last: when the last text arrived.
        ended: when the answer was complete.
        gaps_s: seconds between reads that carried text.
        events: server-sent events but ``[DONE]``.
        status: of HTTP; 0: none.
        prompt_tokens: of the answer's usage, like the next two; -1: it did not say.
        error: why it failed; "": answered with status 200.
    """

    request: bytes
    done: Callable[["Exchange"], None]
    key: int = 0
    due: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    events: int = 0
    status: int = 0
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    error: str = ""

    @property
    def unreached(self) -> bool:
        """The connection failed, rather than the request."""
        return bool(self.error) and not self.status
