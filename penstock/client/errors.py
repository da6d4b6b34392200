"""What can go wrong, as exceptions. ``code`` is one of the documented error codes; ``message`` says what to do."""


class PenstockError(Exception):
    """A request failed, or cannot be answered now. ``code`` is for programs, ``message`` for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class InvalidRequest(PenstockError):
    """The request itself is at fault: the same request fails again."""


class NotFound(PenstockError):
    """No such model, or no such request: it was never accepted, or its record has expired."""


class Conflict(PenstockError):
    """The idempotency key was used for another request within the last 24 hours."""


class Overloaded(PenstockError):
    """Refused for now: the queue is full. Try again later."""


class Cancelled(PenstockError):
    """The request was cancelled."""


class DeadlineExceeded(PenstockError):
    """The request did not finish within its own deadline (``timeout_s``)."""


class Timeout(PenstockError):
    """The client's own timeout has passed. The request continues: resume from its position, or cancel it."""


class Disconnected(PenstockError):
    """The connection is closed for good. The request continues: resume from its position with another client."""


_KINDS: dict[str, type[PenstockError]] = {
    "invalid_request": InvalidRequest,
    "context_length_exceeded": InvalidRequest,
    "body_too_large": InvalidRequest,
    "unsupported": InvalidRequest,
    "poisoned_request": InvalidRequest,
    "model_not_found": NotFound,
    "request_not_found": NotFound,
    "idempotency_conflict": Conflict,
    "queue_full": Overloaded,
    "overloaded": Overloaded,
    "cancelled": Cancelled,
    "deadline_exceeded": DeadlineExceeded,
    "timeout": Timeout,
    "disconnected": Disconnected,
}


def error(code: str, message: str) -> PenstockError:
    """The exception for a code; codes without a class of their own are a plain ``PenstockError``."""
    return _KINDS.get(code, PenstockError)(code, message or code)
