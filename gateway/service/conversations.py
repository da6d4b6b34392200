"""The responses that a new one continues, from the log: by any gateway, for as long as their records are kept."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from penstock.gateway.access.authentication import ALL, Sight
from penstock.gateway.apis.responses.bodies import InputItem, ResponsesRequest
from penstock.gateway.apis.responses.chat import Turn
from penstock.gateway.apis.responses.record import PREFIX, check_turns, input_items, read_stored, turn_of
from penstock.gateway.base.request_bodies import RESPONSE, invalid
from penstock.gateway.request_log.lookup import StoredRequest, has_output
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest

LOOK_UPS = 16  # look-ups under way for one conversation
FIELD = "previous_response_id"
REFERENCE = "item_reference"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f-]{36})_(?:in)?[0-9]+")
RECORD_S = 10.0  # within which the record of an answer that a client has read is stored: an election takes up to 9 s
LOOK_S = 0.1


class History(NamedTuple):
    """``ancestors``: request ids of the turns. ``size``: about the bytes of their text."""

    turns: Sequence[Turn] = ()
    ancestors: tuple[str, ...] = ()
    size: int = 0


class Conversations:
    """
    Args:
        look_up: finds a request that the caller may see, see ``RequestLookup.find``.
        answered: whether a response without a record has ended, as its tokens show.
        detokenizer: of the model that a response was made with: each may have another one.
        max_bytes: of the input and output of all earlier responses.
    """

    def __init__(
        self,
        look_up: Callable[[str, Sight], Awaitable[StoredRequest]],
        answered: Callable[[GenerateRequest], Awaitable[bool]],
        detokenizer: Callable[[GenerateRequest], Awaitable[Detokenizer | None]],
        max_bytes: int,
    ) -> None:
        self._look_up = look_up
        self._answered = answered
        self._detokenizer = detokenizer
        self._max_bytes = max_bytes
        self._limit = f"the limit is {max_bytes} (--max-body-bytes)"

    async def history(self, response_id: str | None, sight: Sight = ALL) -> History:
        """Everything up to and including this response.

        Args:
            sight: which responses may be continued.
        Raises:
            ServingError: one of them is unknown, was deleted, has not ended or failed; there are too many; the log
                cannot be read.
        """
        if response_id is None:
            return History()
        last = await self._find(response_id.removeprefix(PREFIX), response_id, sight)
        stored = read_stored(last.request.client_body)
        check_turns(len(stored.ancestors) + 1)
        size = stored.history_bytes + _size(last)
        if size > self._max_bytes:
            raise invalid(
                FIELD,
                f"the conversation has {size} bytes; {self._limit}. Begin a new one with the items of this one that "
                "matter",
            )
        chain: list[StoredRequest] = []
        for at in range(0, len(stored.ancestors), LOOK_UPS):
            batch = stored.ancestors[at : at + LOOK_UPS]
            chain += await asyncio.gather(*(self._find(each, response_id, sight) for each in batch))
        turns = await self._turns([*chain, last])
        return History(turns, (*stored.ancestors, last.request.id), size)

    async def without_references(self, body: ResponsesRequest, sight: Sight = ALL) -> tuple[ResponsesRequest, int]:
        """The body with the items of stored responses in the place of references to them, and the bytes of these.

        Raises:
            ServingError: one of them is unknown, or its response was deleted or has not ended; there are too many; the
                log cannot be read.
        """
        if not body.input or isinstance(body.input, str):
            return body, 0
        counts: dict[str, Counter[str | None]] = {}  # by request id: how often each of its items is named
        fields: dict[str, str] = {}  # by request id: the first that names it
        for number, item in enumerate(body.input):
            if _refers(item):
                found = _ITEM_ID.fullmatch(item.id or "")
                if found is None:
                    raise _no_item(f"input[{number}].id", item.id or "")
                counts.setdefault(found[1], Counter())[item.id] += 1
                fields.setdefault(found[1], f"input[{number}].id")
        if not fields:
            return body, 0
        check_turns(len(fields), "input")

        async def find(request_id: str, field: str) -> StoredRequest:
            try:
                return await self._find(request_id, request_id, sight)
            except ServingError as error:
                unknown = error.code is Code.previous_response_not_found
                code = Code.request_not_found if unknown else error.code
                raise ServingError(code, f"{field}: {error.message}", param=field) from None

        named, size = list(fields.items()), 0
        items: dict[str | None, InputItem] = {}
        for at in range(0, len(named), LOOK_UPS):  # some at a time, since each holds the whole conversation before it
            chain = await asyncio.gather(*(find(*each) for each in named[at : at + LOOK_UPS]))
            for turn in await self._turns(chain):
                times = counts[turn.id.removeprefix(PREFIX)]
                for item in (*input_items(turn.id, turn.input), *turn.output):
                    if item.id in times and item.id not in items:
                        items[item.id] = item
                        size += times[item.id] * len(msgspec.json.encode(item))
            if size > self._max_bytes:
                raise invalid("input", f"the items that input refers to have more bytes than allowed; {self._limit}")
        for number, item in enumerate(body.input):
            if _refers(item) and item.id not in items:
                raise _no_item(f"input[{number}].id", item.id or "")
        resolved = [items[item.id] if _refers(item) else item for item in body.input]
        return msgspec.structs.replace(body, input=resolved), size

    async def remaining(self, ancestors: Sequence[str], sight: Sight = ALL) -> list[Turn]:
        """Those of these earlier responses that can still be read, the oldest first.

        Raises:
            ServingError: the log cannot be read.
        """

        async def find(request_id: str) -> StoredRequest | None:
            try:
                return await self._find(request_id, request_id, sight)
            except ServingError as error:
                if error.code not in (Code.invalid_request, Code.previous_response_not_found):
                    raise
                return None

        chain: list[StoredRequest] = []
        for at in range(0, len(ancestors), LOOK_UPS):
            found = await asyncio.gather(*(find(each) for each in ancestors[at : at + LOOK_UPS]))
            chain += [each for each in found if each is not None]
        return await self._turns(chain)

    async def _turns(self, chain: Sequence[StoredRequest]) -> list[Turn]:
        """
        Raises:
            ServingError: model_unavailable: the model that one was made with cannot be read.
        """
        found: list[tuple[GenerateRequest, done.Done, Detokenizer]] = []
        for request, record in chain:
            detokenizer = await self._detokenizer(request)
            if record is not None and detokenizer is not None:
                found.append((request, record, detokenizer))
        return await asyncio.to_thread(lambda: [turn_of(*each) for each in found])

    async def _find(self, request_id: str, continued: str, sight: Sight) -> StoredRequest:
        """A response that can be continued."""
        of = "" if continued.endswith(request_id) else f", which {continued} continues,"
        name = f"response {PREFIX}{request_id[:80]}{of}"
        try:
            found = await self._look_up(request_id, sight)
        except ServingError as error:
            if error.code not in (Code.request_not_found, Code.request_erased):
                raise
            raise _unknown(f"{name} is not known: it was deleted, or its record has expired") from None
        if found.request.endpoint != RESPONSE or found.request.no_store:
            raise _unknown(f"{name} is not a stored response")
        if found.record is None:
            found = await self._recorded(found.request, name, sight)
        assert found.record is not None
        if found.record.code:
            raise invalid(FIELD, f"{name} has failed or was cancelled; continue the one before it")
        if not has_output(found.record):
            raise invalid(FIELD, f"{name} cannot be continued: its output was too large for its record")
        return found

    async def _recorded(self, request: GenerateRequest, name: str, sight: Sight) -> StoredRequest:
        """A response with its record, which is stored after its last token: a client may have read that already."""
        if not await self._answered(request):
            raise invalid(FIELD, f"{name} has not ended yet; wait for it, or cancel it")
        until = time.monotonic() + RECORD_S
        while time.monotonic() < until:
            found = await self._look_up(request.id, sight)
            if found.record is not None:
                return found
            await asyncio.sleep(LOOK_S)
        raise ServingError(
            Code.broker_unavailable, f"{name} has ended, and its record is not stored yet; try again", retry_after=1.0
        )


def _refers(item: InputItem) -> bool:
    """Whether an item only names another one. OpenAI's clients may leave its type out."""
    return item.type == REFERENCE or (
        item.type is None and item.role is None and item.content is None and bool(item.id)
    )


def _no_item(field: str, name: str) -> ServingError:
    known = "it was not made here, or its response was deleted; send the item itself"
    message = f"{field} {name[:200]!r} is not an item of a stored response: {known}"
    return ServingError(Code.request_not_found, message, param=field)


def _unknown(message: str) -> ServingError:
    return ServingError(Code.previous_response_not_found, message, param=FIELD)


def _size(found: StoredRequest) -> int:
    record = found.record
    return len(found.request.client_body) + 4 * (record.usage.completion if record is not None else 0)
