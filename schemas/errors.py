"""Error codes on the wire, with their HTTP status. Codes are never renamed."""

import enum


class Code(enum.StrEnum):
    """What went wrong, as a code. ``status``: the HTTP status."""

    invalid_request = "invalid_request"
    model_not_found = "model_not_found"
    model_unavailable = "model_unavailable"
    endpoint_not_found = "endpoint_not_found"
    request_not_found = "request_not_found"
    request_erased = "request_erased"
    previous_response_not_found = "previous_response_not_found"  # OpenAI's
    content_lost = "content_lost"
    answer_ended = "answer_ended"
    idempotency_conflict = "idempotency_conflict"
    context_length_exceeded = "context_length_exceeded"
    body_too_large = "body_too_large"
    unsupported = "unsupported"
    queue_full = "queue_full"
    overloaded = "overloaded"
    deadline_exceeded = "deadline_exceeded"
    cancelled = "cancelled"
    out_of_blocks = "out_of_blocks"
    worker_lost = "worker_lost"
    poisoned_request = "poisoned_request"
    revision_unavailable = "revision_unavailable"
    engine_error = "engine_error"
    broker_unavailable = "broker_unavailable"
    transfer_failed = "transfer_failed"
    shutting_down = "shutting_down"
    headers_too_large = "headers_too_large"
    unsupported_encoding = "unsupported_encoding"
    request_timeout = "request_timeout"
    too_many_connections = "too_many_connections"
    invalid_api_key = "invalid_api_key"
    permission_denied = "permission_denied"
    rate_limit_exceeded = "rate_limit_exceeded"
    insufficient_quota = "insufficient_quota"
    internal = "internal"

    @property
    def status(self) -> int:
        return _STATUS[self]


_STATUS = {
    Code.invalid_request: 400,
    Code.model_not_found: 404,
    Code.model_unavailable: 503,
    Code.endpoint_not_found: 404,
    Code.request_not_found: 404,
    Code.request_erased: 410,
    Code.previous_response_not_found: 400,
    Code.content_lost: 502,
    Code.answer_ended: 416,
    Code.idempotency_conflict: 422,
    Code.context_length_exceeded: 400,
    Code.body_too_large: 413,
    Code.unsupported: 400,
    Code.queue_full: 429,
    Code.overloaded: 503,
    Code.deadline_exceeded: 504,
    Code.cancelled: 499,
    Code.out_of_blocks: 400,
    Code.worker_lost: 502,
    Code.poisoned_request: 422,  # clients repeat 5xx by themselves
    Code.revision_unavailable: 503,
    Code.engine_error: 500,
    Code.broker_unavailable: 503,
    Code.transfer_failed: 502,
    Code.shutting_down: 503,
    Code.headers_too_large: 431,
    Code.unsupported_encoding: 415,
    Code.request_timeout: 408,
    Code.too_many_connections: 503,
    Code.invalid_api_key: 401,
    Code.permission_denied: 403,
    Code.rate_limit_exceeded: 429,
    Code.insufficient_quota: 429,
    Code.internal: 500,
}

# Failures that are none of the request's own, its deadline's or its client's: another model may run it in their place.
FALLS_BACK = frozenset(
    {Code.model_unavailable, Code.overloaded, Code.worker_lost, Code.engine_error, Code.transfer_failed, Code.internal}
)


class ServingError(Exception):
    """A request cannot be served; the text says what to do about it.

    Attributes:
        param: the request field at fault, if one is.
        retry_after: seconds after which a retry makes sense, if known.
    """

    def __init__(self, code: Code, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
