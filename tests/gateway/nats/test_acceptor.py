from unittest.mock import MagicMock

import msgspec
import pytest

from penstock.gateway.nats.acceptor import VALUE_BYTES, RequestAcceptor, check_vectors
from penstock.gateway.nats.protocol import origin_of
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Embedding, GenerateRequest, Stop


async def test_a_message_waits_for_its_portion_before_it_is_prepared() -> None:
    steps: list[str] = []
    gateway = MagicMock()

    async def enter() -> None:
        steps.append("portion")

    async def run_for(*_: object) -> None:
        steps.append("prepare")
        raise ServingError(Code.invalid_request, "this is all")

    gateway.turns.enter, gateway.run_for = enter, run_for
    acceptor = RequestAcceptor(gateway, MagicMock(), MagicMock())
    with pytest.raises(ServingError):
        await acceptor.accept(MagicMock(data=b"{}"), origin_of("ps.ask.tiny", "ask"), "")
    assert steps == ["portion", "prepare"]


async def test_the_id_of_a_submission_is_made_where_that_of_an_http_request_is() -> None:
    gateway = MagicMock()
    given: list[object] = []

    async def nothing(*_: object) -> MagicMock:
        return MagicMock(endpoint="chat")

    async def prepare(*args: object, **_: object) -> None:
        given.extend(args)
        raise ServingError(Code.invalid_request, "this is all")

    gateway.turns.enter, gateway.run_for, gateway.prepare = nothing, nothing, prepare
    gateway.bus.subjects.namespace = "ps"
    acceptor = RequestAcceptor(gateway, MagicMock(), MagicMock())
    message = MagicMock(data=b"{}", headers={})
    with pytest.raises(ServingError, match="this is all"):
        await acceptor.accept(message, origin_of("ps.ask.tiny", "ask"), "")
    assert given == ["chat", b"{}"]  # no id: it has the number of the cell, too


@pytest.mark.parametrize(
    ("inputs", "base64", "served"),
    [(300, False, True), (400, False, False), (1500, True, True), (1600, True, False)],
)
def test_vectors_that_might_not_fit_into_a_message_are_refused_before_they_are_computed(
    inputs: int, base64: bool, served: bool
) -> None:
    """The client would have got an error, and the log a request that ended well."""
    stop = Stop(max_tokens=1)
    request = GenerateRequest(
        "id", "m", "g", b"", stop, 0, 0, embedding=Embedding(1024, ("x",) * inputs, base64=base64)
    )
    if served:
        check_vectors(request, 8_384_512)
        return
    with pytest.raises(ServingError, match="inputs at once") as error:
        check_vectors(request, 8_384_512)
    assert error.value.code is Code.body_too_large
    assert ("base64" in error.value.message) != base64
    assert "stream" not in error.value.message


@pytest.mark.parametrize("value", [0.0, -1.1754943508222875e-38, 3.4028234663852886e38, -0.3333333432674408, 1e-45])
def test_no_value_of_a_vector_takes_more_bytes_than_are_counted(value: float) -> None:
    assert len(msgspec.json.encode([value] * 100)) <= 1 + 100 * VALUE_BYTES
