"""Where a request stands, from the log alone: any gateway can tell, also of another one's requests."""

from typing import Literal

import msgspec

from gateway.answers import written
from gateway.developed import PictureCollector
from gateway.render import Collector
from gateway.responses import ErrorDetail, Status, error_body
from gateway.service import Gateway
from schemas import done
from schemas.errors import Code, ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import Finish, TokenItem

_json = msgspec.json.encode


async def status_of(gateway: Gateway, request: GenerateRequest, base_url: str) -> Status:
    """State and result of a request, from the log alone; ``base_url``: of links to its pictures."""
    collector = _collector(gateway, request, late=False)
    exchange = await gateway.attach(request)
    try:
        items = exchange.available()
        complete = collector.push(items)
    finally:
        gateway.detach(exchange)
    event = await gateway.outcome(request)
    if not complete and event is not None:  # the token log keeps less long than the terminal events
        collector = _collector(gateway, request, late=True)
        complete = collector.push(_items_of(event))
    state: Literal["queued", "running", "done", "failed", "cancelled"] = "running" if items else "queued"
    result: msgspec.Raw | None = None
    error: ErrorDetail | None = None
    if complete:
        try:
            result, state = await _result(collector, base_url), "done"
        except ServingError as failure:
            error = error_body(failure).error
            state = "cancelled" if failure.code is Code.cancelled else "failed"
    return Status(
        id=request.id,
        model=request.model,
        state=state,
        created=request.created_ns // 1_000_000_000,
        deadline=request.deadline_ns // 1_000_000_000,
        gateway=request.gateway,
        worker=event.worker if event else "",
        attempt=max(exchange.fold.attempt, event.attempt if event else 0, 0),
        output_tokens=collector.usage.completion_tokens,
        result=result,
        error=error,
    )


def _collector(gateway: Gateway, request: GenerateRequest, *, late: bool) -> Collector | PictureCollector:
    if request.diffusion is not None:
        return PictureCollector(request)
    return Collector(request, gateway.model.detokenizer, late=late)


async def _result(collector: Collector | PictureCollector, base_url: str) -> msgspec.Raw:
    """As it was answered; pictures always as links.

    Raises:
        ServingError: the request failed.
    """
    if isinstance(collector, PictureCollector):
        return msgspec.Raw(_json(collector.answer(base_url)))
    return msgspec.Raw(await written(collector))


def _items_of(event: done.Done) -> list[TokenItem]:
    """A terminal event as the token items that would say the same."""
    failed = event.code != ""
    return [
        TokenItem(
            event.request,
            event.attempt,
            index,
            0,
            choice.tokens,
            Finish(
                "cancelled" if event.code == Code.cancelled else "error" if failed else choice.reason,
                choice.stop,
                event.usage.cached,
                event.code,
                event.message,
                choice.files,
            ),
        )
        for index, choice in enumerate(event.choices)
    ] or [TokenItem(event.request, event.attempt, 0, 0, b"", Finish("error", None, 0, event.code, event.message))]
