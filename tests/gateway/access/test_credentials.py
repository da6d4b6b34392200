import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.access.authentication import presented
from penstock.schemas.errors import Code, ServingError

KEY = b"pst-0a1b2c3d4e5f-secret"
OTHER = b"pst-0a1b2c3d4e5f-other"
BEARER = (b"authorization", b"Bearer " + KEY)


@pytest.mark.parametrize(
    "headers",
    [
        [BEARER],
        [(b"authorization", b"bearer " + KEY)],
        [(b"authorization", b"BEARER  " + KEY + b" ")],
        [(b"x-api-key", KEY)],
        [(b"host", b"a"), BEARER, (b"x-api-key", KEY)],  # a client that sends both, as LiteLLM does
        [BEARER, BEARER],
    ],
)
def test_a_key_is_found_in_either_header(headers: list[tuple[bytes, bytes]]) -> None:
    assert presented(headers) == KEY


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Basic " + KEY)],
        [(b"authorization", KEY)],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b""), BEARER],
        [BEARER, (b"authorization", b"Bearer " + OTHER)],
        [BEARER, (b"x-api-key", OTHER)],
        [(b"x-api-key", KEY), (b"authorization", b"Basic eA==")],
        [(b"cookie", b"key=" + KEY), (b"x-authorization", b"Bearer " + KEY)],
        [(b"authorization ", b"Bearer " + KEY)],
        [(b"proxy-authorization", b"Bearer " + KEY)],
    ],
)
def test_no_key_an_empty_one_another_scheme_and_two_different_ones_are_refused(
    headers: list[tuple[bytes, bytes]],
) -> None:
    with pytest.raises(ServingError) as caught:
        presented(headers)
    assert caught.value.code is Code.invalid_api_key
    assert "0a1b2c3d4e5f" not in caught.value.message


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"host"]), st.binary(max_size=40))))
def test_whatever_the_headers_say_one_credential_is_found_or_none(headers: list[tuple[bytes, bytes]]) -> None:
    with contextlib.suppress(ServingError):
        found = presented(headers)
        values = [value for name, value in headers if name != b"host"]
        assert values
        assert all(value.strip(b" ").endswith(found) for value in values)
