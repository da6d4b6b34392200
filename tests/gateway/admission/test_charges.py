"""What requests are charged for, against the limits of their API keys."""

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.gateway.access.authentication import Caller
from penstock.gateway.admission import charges
from penstock.gateway.admission.charges import Charges, prompt_tokens
from penstock.gateway.admission.idempotency import Claim
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import unknown
from penstock.gateway.service.gateway import submit_claimed
from penstock.infra.bus.clock import BrokerClock
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.done import Done, Usage
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey
from penstock.schemas.requests import PAIRS, Embedding, GenerateRequest, Stop, new_request_id
from penstock.schemas.wire import pack_tokens
from tests.infra.bus.support import eventually

KEY = ApiKey("k" * 12, b"", max_concurrent=1)


class Till:
    """A limiter that notes what is paid, and a log that has what it is told."""

    def __init__(self) -> None:
        self.settled: list[int] = []
        self.undone = 0
        self.looked = 0
        self.stored = True
        self.record: Done | None = None
        self.tasks = Tasks("test")
        self.charges = Charges(cast(Any, self), self._find, self.find, self.tasks, BrokerClock())

    def pay(self, key: ApiKey, tokens: int) -> Any:
        return object()

    def settle(self, paid: object, used: int) -> None:
        self.settled.append(used)

    def undo(self, paid: object) -> None:
        self.undone += 1

    async def _find(self, request_id: str) -> Done | None:
        self.looked += 1
        return self.record

    async def find(self, request_id: str) -> GenerateRequest:
        if not self.stored:
            raise unknown(request_id)
        return request_named(request_id)

    async def begun(self) -> InflightRequest:
        inflight = InflightRequest(request_named(new_request_id(time.time_ns())))
        await self.charges.reserve(Caller("t", "t", key=KEY), cast(Any, SimpleNamespace(request=inflight.request)))
        self.charges.began(inflight)
        assert inflight.paid is not None
        return inflight


def request_named(name: str) -> GenerateRequest:
    now_ns = time.time_ns()
    return GenerateRequest(name, "m", "g", pack_tokens([1] * 4), Stop(10), now_ns, now_ns + 600 * 10**9)


@pytest.fixture
def till(monkeypatch: pytest.MonkeyPatch) -> Till:
    monkeypatch.setattr(charges, "LOOK_S", 0.001)
    return Till()


async def test_a_request_that_runs_without_its_client_pays_until_its_record_is_there(till: Till) -> None:
    till.charges.ended(await till.begun())
    await eventually(lambda: till.looked > 2 * charges.MISSED)
    assert not till.settled
    till.record = Done("r", "m", 1, usage=Usage(4, 3))
    await eventually(lambda: till.settled == [4 + 3])


async def test_a_request_that_was_deleted_or_never_stored_holds_no_slot_until_its_deadline(till: Till) -> None:
    till.stored = False
    till.charges.ended(await till.begun())
    await eventually(lambda: len(till.settled) == 1)
    assert till.settled[0] > 10**9  # what it has used is not known, so nothing is given back


async def test_a_repeat_of_what_the_log_has_is_not_paid_twice(till: Till) -> None:
    inflight = await till.begun()
    till.charges.repeated(inflight)
    till.charges.ended(inflight)
    till.charges.abandon(inflight.request.id)
    assert (till.settled, till.undone) == ([], 1)


@pytest.mark.parametrize("error", [None, ServingError(Code.queue_full, "full")])
async def test_a_request_under_the_id_of_an_earlier_claim_is_paid(till: Till, error: ServingError | None) -> None:
    request, earlier = (request_named(new_request_id(time.time_ns())) for _ in range(2))
    paid: list[bool] = []

    async def submit(request: GenerateRequest, *, owner: bool) -> InflightRequest:
        if error is not None:
            raise error
        inflight = InflightRequest(request)
        till.charges.began(inflight)
        paid.append(inflight.paid is not None)
        return inflight

    gateway = cast(Any, SimpleNamespace(bus=SimpleNamespace(clock=BrokerClock()), charges=till.charges, submit=submit))
    await till.charges.reserve(Caller("t", "t", key=KEY), cast(Any, SimpleNamespace(request=request)))
    with pytest.raises(ServingError, match="full") if error is not None else nullcontext():
        await submit_claimed(gateway, "t", "key:x", b"", request, Claim(earlier.id, False, 1))
    till.charges.abandon(request.id)
    assert (paid, till.undone) == (([], 1) if error is not None else ([True], 0))


def test_texts_whose_tokens_only_a_worker_counts_are_charged_by_their_bytes() -> None:
    def asked(tokens: int, *texts: str) -> GenerateRequest:
        embedding = Embedding(8, texts=texts, lengths=(tokens,) if tokens else ())
        return GenerateRequest("r", "m", "g", pack_tokens([1] * tokens), Stop(1), 1, 2, embedding=embedding)

    assert prompt_tokens(asked(9)) == 9
    assert prompt_tokens(asked(0, "abcd", "abcde", "é☃")) == 1 + 2 + 2


@pytest.mark.parametrize(("queries", "tokens"), [(("abcdefgh",), 4 + 2 * 3), (("abcdefgh", "a", "b"), 4 + 4)])
def test_the_query_of_pairs_is_charged_in_each_of_them(queries: tuple[str, ...], tokens: int) -> None:
    embedding = Embedding(1, texts=("abcd", "abcde", "a"), prompt=PAIRS, queries=queries)
    assert prompt_tokens(GenerateRequest("r", "m", "g", b"", Stop(1), 1, 2, embedding=embedding)) == tokens
