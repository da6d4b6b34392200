"""Headers with which clients name and mark their requests."""

import pytest

from penstock.gateway.http.asgi import read_client_ids
from penstock.schemas.errors import ServingError

NAME = b"x-penstock-no-store"


@pytest.mark.parametrize("values", [(b"1",), (b"TRUE ",), (b"1", b"0"), (b"0", b"1"), (b"", b"true")])
def test_a_request_that_asks_once_not_to_be_stored_is_not(values: tuple[bytes, ...]) -> None:
    assert read_client_ids([(NAME, value) for value in values]).no_store


@pytest.mark.parametrize("values", [(), (b"0",), (b"false", b""), (b"0", b"0")])
def test_a_request_is_stored_unless_the_header_says_otherwise(values: tuple[bytes, ...]) -> None:
    assert not read_client_ids([(NAME, value) for value in values]).no_store


@pytest.mark.parametrize("values", [(b"yes",), (b"1,1",), (b"1", b"on"), (b"2", b"1")])
def test_a_wish_that_is_neither_on_nor_off_is_refused_and_not_taken_for_off(values: tuple[bytes, ...]) -> None:
    with pytest.raises(ServingError, match="use 1 or 0"):
        read_client_ids([(NAME, value) for value in values])
